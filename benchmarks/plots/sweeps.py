"""The points of ``python -m benchmarks sweep``: peak memory above, time below, against the size with the most values.

Other options that vary, such as entropy, make columns. A sweep of a single size is drawn as bars.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.bench.records import Record, where
from benchmarks.bench.sweep import AXES, fixed_text, value_text, varying
from benchmarks.plots.bars import draw_records
from benchmarks.plots.curves import MEMORY, TIME, draw_curves, draw_legend, label_shares, label_sizes
from logitless.errors import LogitlessError
from logitless.spec import parse_memory
from logitless.tools.style import DARK, LIGHT, WIDTH_INCHES, Style, head, save

COLUMNS = 3
NUMBERS = ("response", "tokens", "vocab", "hidden", "memory")
TITLES = {"response": "share of the tokens that is response", "memory": "memory allowed, MiB"}


def draw_sweep(records: Sequence[Record], folder: Path, stem: str) -> list[Path]:
    """PNG files in both styles: curves against the size that varies most, or bars where no size varies."""
    if not any(r.total_ms is not None for r in records):
        raise LogitlessError("plots: no point of the sweep has a time, so there is nothing to draw.")
    along = max(NUMBERS, key=lambda name: len({r.case[name] for r in records}))
    if along not in varying(records):
        return draw_records(records, folder, stem)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for style in (LIGHT, DARK):
        paths.append(folder / f"{stem}-{style.name}.png")
        _draw(records, along, paths[-1], style)
    return paths


def _draw(records: Sequence[Record], along: str, path: Path, style: Style) -> None:
    others = [name for name in varying(records) if name != along]
    panels: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        panels.setdefault(tuple(record.case[name] for name in others), []).append(record)
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    size = (WIDTH_INCHES, 0.8 + 4.4 * lines)
    look: dict[str, Any] = {"layout": "constrained", "squeeze": False, "sharey": "row"}
    figure, axes = plt.subplots(2 * lines, columns, figsize=size, **look)
    for number, (values, group) in enumerate(panels.items()):
        line, column = divmod(number, columns)
        pair = axes[2 * line, column], axes[2 * line + 1, column]
        for axis, (field, label) in zip(pair, (MEMORY, TIME), strict=True):
            draw_curves(axis, group, lambda r: _place(r, along), field, style)
            ticks = [_place(r, along) for r in group]
            label_shares(axis, ticks) if along == "response" else label_sizes(axis, ticks)
            if column == 0:
                axis.set_ylabel(label)
        title = ", ".join(f"{AXES[name]} {value_text(name, v)}" for name, v in zip(others, values, strict=True))
        pair[0].set_title(title, color=style.text, fontsize=10, fontweight="bold", loc="left", pad=8)
        pair[1].set_xlabel(TITLES.get(along, AXES[along]))
    for axis in [a for i, a in enumerate(axes.flat) if i // columns // 2 * columns + i % columns >= len(panels)]:
        axis.set_visible(False)
    draw_legend(figure, [axis for axis in axes.flat if axis.get_visible()], style)
    head(figure, fixed_text(records), where(records), style)
    save(figure, path, style)


def _place(record: Record, along: str) -> float:
    value = record.case[along]
    return parse_memory(value) / 2**20 if along == "memory" else value
