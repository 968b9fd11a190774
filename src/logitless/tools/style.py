"""For all figures: a width that reads well in a README, and two sets of colours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

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


def save(figure: Figure, path: Path, style: Style, drawn: str = "") -> None:
    """Write the figure on the style's background, and close it. Its numbers (``drawn``) are kept in a PNG file, by
    which a test sees whether it was drawn from the newest records."""
    figure.set_facecolor(style.background)
    figure.savefig(path, dpi=DPI, facecolor=style.background, metadata={"Description": drawn} if drawn else None)
    plt.close(figure)
