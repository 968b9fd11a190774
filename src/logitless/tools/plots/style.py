"""For all figures: a width that reads well in a README, two sets of colours, and the origin of the records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from logitless.tools.bench.records import Record

WIDTH_INCHES = 9.0
DPI = 200


@dataclass(frozen=True)
class Style:
    """Colours of a figure."""

    name: str
    background: str
    text: str
    faint: str
    ours: str
    others: str
    mark: str


LIGHT = Style("light", "#ffffff", "#1f2328", "#d0d7de", "#2563eb", "#9aa4b2", "#d1242f")
DARK = Style("dark", "#0d1117", "#e6edf3", "#30363d", "#5b9dff", "#5d6875", "#ff7b72")


def where(records: Sequence[Record]) -> str:
    """Device and commit, or commits, of the records."""
    devices = dict.fromkeys(r.environment["device"] for r in records)
    commits = dict.fromkeys(r.environment["commit"] + ("+" if r.environment["dirty"] else "") for r in records)
    return f"{', '.join(devices)}, commit {', '.join(commits)}"


def save(figure: Figure, path: Path, style: Style) -> None:
    """Write the figure on the style's background, and close it."""
    figure.set_facecolor(style.background)
    figure.savefig(path, dpi=DPI, facecolor=style.background)
    plt.close(figure)
