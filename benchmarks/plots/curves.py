"""Curves: one line per provider, through the points that have a value. Ours are in colour.

Where a provider ran out of memory its line ends, and a cross at the top of the panel says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.bench.records import Record, newest, where
from logitless.errors import LogitlessError
from logitless.spec import format_bytes
from logitless.tools.style import WIDTH_INCHES, Style, dress, head, name_lines, save

GROWTH = "linear-growth-"
SIZES = (("tokens", "T"), ("vocab", "V"), ("hidden", "D"))
MARKERS = "osD^vP*Xh<>p"
DASHES = ("solid", (0, (4, 1.5)), (0, (1, 1)))
TIME, MEMORY = ("total_ms", "time of one step, ms"), ("peak_bytes", "peak beyond the inputs")


def draw_growth(records: Sequence[Record], path: Path, style: Style) -> None:
    """Time and peak memory against T, V and D around the case named ``linear-growth-base``, one line per provider."""
    points = [r for r in newest(records) if r.case["name"].startswith(GROWTH)]
    base = next((r.case for r in points if r.case["name"] == f"{GROWTH}base"), None)
    if base is None:
        raise LogitlessError(f"plots: growth is drawn around {GROWTH}base, of which there is no record.")
    figure, axes = plt.subplots(2, len(SIZES), figsize=(WIDTH_INCHES, 5.2), layout="constrained", sharey="row")
    for column, (size, symbol) in enumerate(SIZES):
        others = [name for name, _ in SIZES if name != size]
        along = [r for r in points if all(r.case[name] == base[name] for name in others)]
        for row, (field, _) in enumerate((TIME, MEMORY)):
            draw_curves(axes[row, column], along, lambda r, size=size: r.case[size], field, style)
            label_sizes(axes[row, column], [r.case[size] for r in along])
        fixed = ", ".join(f"{s} = {base[name]:,}" for name, s in SIZES if name != size)
        axes[1, column].set_xlabel(f"{symbol}   ({fixed})")
    for row, (_, label) in enumerate((TIME, MEMORY)):
        axes[row, 0].set_title(label, color=style.text, fontsize=10, fontweight="bold", loc="left", pad=8)
        name_lines(axes[row, -1], style)
    heading = f"From hidden states, {base['dtype']}, forward + backward with an entropy gradient"
    head(figure, heading, where(points), style)
    save(figure, path, style)


def draw_response(
    groups: Sequence[Sequence[Record]], titles: Sequence[str], what: str, path: Path, style: Style
) -> None:
    """Peak memory against the share of the tokens that is response, one panel per group of records.

    A provider that was measured at one share alone is left out.
    """
    figure, axes = plt.subplots(1, len(groups), figsize=(WIDTH_INCHES, 3.9), layout="constrained", squeeze=False)
    field, label = MEMORY
    for axis, group, title in zip(axes.flat, groups, titles, strict=True):
        records = newest(group)
        times = Counter(record.provider for record in records)
        found = [record for record in records if times[record.provider] > 1]
        draw_curves(axis, found, lambda r: r.case["response"], field, style)
        label_shares(axis, [r.case["response"] for r in found])
        axis.set_title(title, color=style.text, fontsize=10, fontweight="bold", loc="left", pad=8)
        axis.set_xlabel("share of the tokens that is response")
        name_lines(axis, style)
    axes[0, 0].set_ylabel(label)
    head(figure, what, where([r for group in groups for r in newest(group)]), style)
    save(figure, path, style)


def draw_curves(axis: Axes, records: Sequence[Record], x: Callable[[Record], float], field: str, style: Style) -> None:
    """``field`` against ``x``, both logarithmic, one line per provider; times also have a line for the floor."""
    dress(axis, style)
    ours = 0
    for place, name in enumerate(dict.fromkeys(r.provider for r in records)):
        own = sorted((x(r), value) for r in records if r.provider == name and (value := getattr(r, field)))
        is_ours = name.startswith("logitless")
        colour, dashes = (style.ours, DASHES[ours % len(DASHES)]) if is_ours else (style.others, "solid")
        ours += is_ours
        marker = MARKERS[place % len(MARKERS)]
        if own:
            look = {
                "color": colour,
                "linestyle": dashes,
                "marker": marker,
                "markersize": 4,
                "zorder": 3 if is_ours else 2,
            }
            axis.plot(*zip(*own, strict=True), label=name, **look)
        lost = [x(r) for r in records if r.provider == name and r.status == "out of memory"]
        if lost and field == MEMORY[0]:
            top = axis.get_xaxis_transform()
            axis.scatter(lost, [0.94] * len(lost), marker="x", color=style.mark, transform=top, label="out of memory")
            look: dict[str, Any] = {"ha": "right", "va": "top", "fontsize": 8, "color": style.mark}
            axis.annotate("out of\nmemory", (max(lost), 0.94), (4, -6), top, "offset points", **look)
    if field == TIME[0]:
        floors = sorted({x(r): r.floor_ms for r in records if r.floor_ms is not None}.items())
        if floors:
            look = {"color": style.mark, "linewidth": 1.2, "linestyle": (0, (4, 2))}
            axis.plot(*zip(*floors, strict=True), label="floor", **look)
    axis.set_xscale("log", base=2)
    if field == MEMORY[0]:
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_locator(LogLocator(base=2, numticks=8))
        axis.yaxis.set_major_formatter(lambda y, _: format_bytes(round(y)).replace(".00 ", " ").replace(".0 ", " "))
    else:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=8))
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axis.yaxis.set_minor_locator(NullLocator())


def label_sizes(axis: Axes, sizes: Sequence[float]) -> None:
    """Ticks at the sizes, in units of 1024 where those are whole."""
    axis.set_xticks(sorted(set(sizes)), minor=False)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}k" if x % 1024 == 0 else f"{x:g}")


def label_shares(axis: Axes, shares: Sequence[float]) -> None:
    """Ticks at the shares, in per cent."""
    axis.set_xticks(sorted(set(shares)), minor=False)
    axis.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.3g}%")


def draw_legend(figure: Figure, axes: Sequence[Axes], style: Style) -> None:
    """One legend below all panels."""
    found = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    look = {"fontsize": 9, "frameon": False, "labelcolor": style.quiet, "loc": "outside lower left"}
    figure.legend(found.values(), found.keys(), ncols=min(6, len(found)), **look)
