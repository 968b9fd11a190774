"""For all figures: a width that reads well in a README, two sets of colours, and axes without a frame."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH_INCHES = 9.0
DPI = 200


@dataclass(frozen=True)
class Style:
    """Colours of a figure: of its titles (``text``), its numbers and labels (``quiet``), its grid (``faint``), and of
    data: this library's (``ours``), everyone else's, and a line that marks a bound."""

    name: str
    background: str
    text: str
    quiet: str
    faint: str
    ours: str
    others: str
    mark: str


LIGHT = Style("light", "#ffffff", "#1f2328", "#59636e", "#e4e8ed", "#2563eb", "#aeb7c3", "#c2410c")
DARK = Style("dark", "#0d1117", "#e6edf3", "#9198a1", "#262c34", "#5b9dff", "#586472", "#f59e5b")


def dress(axis: Axes, style: Style, title: str = "", size: int = 10) -> None:
    """A title at the left, quiet numbers, a faint grid, and nothing around it."""
    axis.set_facecolor(style.background)
    axis.set_title(title, color=style.text, fontsize=size, fontweight="bold", loc="left", pad=8)
    axis.grid(color=style.faint, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=style.quiet, which="both", labelsize=size - 1, length=0)
    axis.xaxis.label.set(color=style.quiet, fontsize=9)
    axis.yaxis.label.set(color=style.quiet, fontsize=9)
    axis.spines[:].set_visible(False)


def name_lines(axis: Axes, style: Style) -> None:
    """The name of every line at its right end, in its colour, names moved apart where lines meet."""
    axis.autoscale_view()
    into = axis.transData + axis.transAxes.inverted()
    lines: list[Any] = [line for line in axis.lines if not str(line.get_label()).startswith("_")]
    ends = [(float(into.transform(line.get_xydata()[-1])[1]), line) for line in lines]
    place = 2.0
    for height, line in sorted(ends, key=lambda end: -end[0]):
        place = min(height, place - 0.08)
        colour = style.quiet if line.get_color() == style.others else line.get_color()
        axis.text(1.02, place, line.get_label(), transform=axis.transAxes, va="center", fontsize=9, color=colour)


def head(figure: Figure, title: str, source: str, style: Style) -> None:
    """Write a title above the figure, and below it where its numbers come from."""
    figure.suptitle(title, color=style.text, fontsize=11, fontweight="bold", x=0.01, ha="left")
    figure.supxlabel(source, color=style.quiet, fontsize=8, x=0.01, ha="left")


def save(figure: Figure, path: Path, style: Style, drawn: str = "") -> None:
    """Write the figure on the style's background, and close it. Its numbers (``drawn``) are kept in a PNG file, by
    which a test sees whether it was drawn from the newest records."""
    figure.set_facecolor(style.background)
    figure.savefig(path, dpi=DPI, facecolor=style.background, metadata={"Description": drawn} if drawn else None)
    plt.close(figure)
