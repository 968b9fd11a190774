"""The figure of the demo: two learning curves that coincide, and memory against the response fraction."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from examples.demo.run import Demo
from logitless.spec import format_bytes
from logitless.tools.style import LIGHT, WIDTH_INCHES, dress, save

LINES = {
    "plain torch, all rows": ("s", 0, (0, 6)),
    "plain torch, response rows": ("D", -2, (6, -20)),
    "one line more": ("o", 0, (0, 6)),
    "policy_loss": ("^", -2, (6, 6)),
}
"""Marker of each line, the point that its name stands at, and how far from it in points."""


def draw_demo(demo: Demo, path: Path) -> None:
    """Both panels, side by side."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH_INCHES, 3.6), layout="constrained")
    _draw_curves(left, demo)
    _draw_memory(right, demo)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path, LIGHT)


def _draw_curves(axis: Axes, demo: Demo) -> None:
    steps = range(1, demo.setting.steps + 1)
    # A wide line below a thin dashed one: where they coincide, both are seen.
    axis.plot(steps, demo.plain.rewards, color=LIGHT.others, linewidth=4.5, alpha=0.6, label=demo.plain.name)
    axis.plot(steps, demo.ours.rewards, color=LIGHT.ours, linewidth=1.6, linestyle=(0, (3, 1)), label=demo.ours.name)
    axis.legend(fontsize=9, frameon=False, labelcolor=LIGHT.text)
    axis.set(ylim=(0, 1.04), xlabel="GRPO step", ylabel="mean reward")
    difference = f"largest difference {demo.difference:.1g}" if demo.difference else "no difference"
    dress(axis, LIGHT, f"Repeat {demo.setting.length} digits: {difference}")


def _draw_memory(axis: Axes, demo: Demo) -> None:
    measured = demo.by_fraction
    percent = [100 * fraction for fraction in measured.fractions]
    for name, peaks in measured.peaks.items():
        colour = LIGHT.others if name.startswith("plain") else LIGHT.ours
        marker, point, offset = LINES[name]
        mib = [peak / 2**20 for peak in peaks]
        axis.plot(percent, mib, color=colour, marker=marker, markersize=4)
        text = name.replace(", response", ",\nresponse") + f": {format_bytes(max(peaks))}" * (point == 0)
        axis.annotate(
            text, (percent[point], mib[point]), offset, textcoords="offset points", fontsize=8, color=LIGHT.text
        )
    axis.set_ylim(bottom=0, top=1.15 * max(max(peaks) for peaks in measured.peaks.values()) / 2**20)
    axis.set(xlabel="response tokens, % of all", ylabel="peak of the loss step, MiB")
    dress(axis, LIGHT, f"Memory, {measured.tokens:,} tokens x {measured.vocab:,} ids")
