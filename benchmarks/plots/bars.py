"""Bars: one panel per case, one bar per provider, fastest or leanest first. Ours are in colour.

A line marks the floor: the time of the bytes or products that no provider avoids, or the size of the logits. A hatched
bar is a provider that computed less than the case asks for.

Cases named ``linear-growth-*`` are points of curves instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.bench.records import COMPUTES, Record, by_case, newest, where
from benchmarks.plots.curves import GROWTH, draw_growth
from logitless.errors import LogitlessError
from logitless.spec import format_bytes
from logitless.tools.style import DARK, LIGHT, WIDTH_INCHES, Style, head, save

Panel = Callable[[Axes, Sequence[Record], Style], None]


@dataclass(frozen=True)
class Bar:
    """One labelled bar."""

    label: str
    value: float
    text: str
    ours: bool
    partial: bool = False


def draw_records(records: Sequence[Record], folder: Path, stem: str) -> list[Path]:
    """Time and memory of the newest record of each case and provider, in both styles: four PNG files.

    Points of growth curves are drawn in two more.
    """
    timed = [g for g in by_case(newest(records)) if any(r.total_ms is not None for r in g)]
    groups = [g for g in timed if not g[0].case["name"].startswith(GROWTH)]
    if not timed:
        raise LogitlessError("plots: none of the records has a time, so there is nothing to draw.")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for style in (LIGHT, DARK) if len(groups) < len(timed) else ():
        paths.append(folder / f"{stem}-growth-{style.name}.png")
        draw_growth(records, paths[-1], style)
    if not groups:
        return paths
    for style in (LIGHT, DARK):
        for name, panel, title in PANELS:
            paths.append(folder / f"{stem}-{name}-{style.name}.png")
            figure = _grid(groups, panel, style)
            head(figure, title, where(records), style)
            save(figure, paths[-1], style)
    return paths


def draw_case(records: Sequence[Record], path: Path, style: Style) -> None:
    """Time and memory of one case side by side, every bar with its name: the figure of the README."""
    group = _shown(newest(records))
    size = (WIDTH_INCHES, 1.1 + 0.27 * len(group))
    figure, axes = plt.subplots(1, len(PANELS), figsize=size, layout="constrained")
    for axis, (_, panel, title) in zip(axes, PANELS, strict=True):
        panel(axis, group, style)
        axis.set_title(title, color=style.text, fontsize=10, fontweight="bold", loc="left")
    head(figure, _detail(group[0]), where(group), style)
    save(figure, path, style)


def _grid(groups: Sequence[Sequence[Record]], panel: Panel, style: Style) -> Figure:
    columns = min(2, len(groups))
    lines = -(-len(groups) // columns)
    tallest = max(len(_shown(group)) for group in groups)
    size = (WIDTH_INCHES, 0.6 + lines * (1.0 + 0.25 * tallest))
    figure, axes = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    for axis, group in zip(axes.flat[: len(groups)], groups, strict=True):
        panel(axis, _shown(group), style)
        # The same height for every panel keeps bars equally thick.
        axis.set_ylim(tallest - 0.45, -0.55)
        _title(axis, group[0], style)
    for axis in axes.flat[len(groups) :]:
        axis.set_visible(False)
    return figure


def _shown(group: Sequence[Record]) -> list[Record]:
    """Records of providers that ran; without a time, the bar says why."""
    return [record for record in group if record.status != "absent"]


def _time_panel(axis: Axes, records: Sequence[Record], style: Style) -> None:
    ordered = sorted(records, key=lambda r: math.inf if r.total_ms is None else r.total_ms)
    draw_bars(axis, [_bar(r, r.total_ms, f"{_short(r.total_ms or 0.0)} ms") for r in ordered], style)
    if (floor := records[0].floor_ms) is not None:
        # A provider that stores logits makes fewer products and may be below the mark, which says how many it counts.
        gemms = records[0].gemm_ms
        products = f" ({gemms.index(floor) + 1} products)" if gemms and floor in gemms else ""
        _draw_mark(axis, floor, f"floor {_short(floor)} ms{products}", style)


def _memory_panel(axis: Axes, records: Sequence[Record], style: Style) -> None:
    ordered = sorted(records, key=lambda r: math.inf if r.peak_bytes is None else r.peak_bytes)
    draw_bars(axis, [_bar(r, r.peak_bytes, "+" + format_bytes(r.peak_bytes or 0)) for r in ordered], style)
    _draw_mark(axis, records[0].logits_bytes, f"logits {format_bytes(records[0].logits_bytes)}", style)


PANELS = (
    ("time", _time_panel, "Median time of one step"),
    ("memory", _memory_panel, "Peak memory beyond the inputs"),
)


def _bar(record: Record, value: float | None, text: str) -> Bar:
    ours, partial = record.provider.startswith("logitless"), record.computes != record.case["entropy"]
    if value is None:
        return Bar(record.provider, 0.0, record.status, ours)
    text = f"{text} ({COMPUTES[record.computes]} only)" if partial and record.computes in (None, "mean") else text
    return Bar(record.provider, value, text, ours, partial)


def draw_bars(axis: Axes, bars: Sequence[Bar], style: Style) -> None:
    """Bars from top to bottom, each with its name before it and its text behind it."""
    axis.set_facecolor(style.background)
    longest = max(bar.value for bar in bars) or 1.0
    # Labels have the background's colour behind them, so that the mark does not run through them.
    behind = {"facecolor": style.background, "edgecolor": "none", "pad": 1.2}
    label: dict[str, Any] = {"va": "center", "fontsize": 9, "zorder": 4}
    for place, bar in enumerate(bars):
        colour = style.ours if bar.ours else style.others
        face = "none" if bar.partial else colour
        axis.barh(place, bar.value, 0.68, color=face, edgecolor=colour, hatch="////" if bar.partial else None, zorder=2)
        look = {"color": style.ours, "fontweight": "bold"} if bar.ours else {"color": style.text}
        axis.text(bar.value + 0.015 * longest, place, bar.text, bbox=behind, **look, **label)
    axis.set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize=9, color=style.text)
    for name, bar in zip(axis.get_yticklabels(), bars, strict=True):
        name.set(color=style.ours if bar.ours else style.text, fontweight="bold" if bar.ours else "normal")
    axis.set_xticks([])
    axis.set_xlim(0, 1.3 * longest)
    axis.set_ylim(len(bars) - 0.45, -0.55)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.axvline(0, color=style.faint, linewidth=1.5, zorder=1)


def _draw_mark(axis: Axes, value: float, text: str, style: Style) -> None:
    """A line across all bars, with its name below them, clear of their labels."""
    low, high = axis.get_xlim()
    axis.set_xlim(low, max(high, 1.2 * value))
    axis.axvline(value, color=style.mark, linewidth=1.2, linestyle=(0, (4, 2)), zorder=3)
    side = "left" if value < 0.6 * axis.get_xlim()[1] else "right"
    axis.annotate(
        f" {text} ", (value, 0), (0, -2), ("data", "axes fraction"), "offset points",
        ha=side, va="top", fontsize=8.5, color=style.mark,
    )  # fmt: skip


def _title(axis: Axes, record: Record, style: Style) -> None:
    axis.set_title(f"{record.case['name']}\n", color=style.text, fontsize=10, fontweight="bold", loc="left")
    axis.text(0, 1.03, _detail(record), transform=axis.transAxes, fontsize=8.5, color=style.quiet, va="bottom")


def _detail(record: Record) -> str:
    """The case in words."""
    case = record.case
    work = "forward + backward" if case["backward"] else "forward"
    share = "" if record.rows == case["tokens"] else f", {record.rows / case['tokens']:.0%} of rows"
    hidden = f" from {case['hidden']:,}" if case.get("hidden") else ""
    return f"{case['tokens']:,} x {case['vocab']:,}{hidden} {case['dtype']}, {work}{share}"


def _short(x: float) -> str:
    return f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 100 else f"{x:.0f}"
