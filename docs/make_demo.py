"""The figure of the first page, from a record of the demo: ``python -m examples.demo --json`` into ``RECORD``.

Two learning curves that coincide, and the peak memory of the loss step of both. Drawn by ``docs/make_figures.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from logitless.spec import format_bytes
from logitless.tools.style import Style, save

RECORD = Path(__file__).parent.parent / "benchmarks" / "results" / "demo.json"
NAME = "demo"
WIDTH, HEIGHT = 6.4, 4.4


def read() -> dict[str, Any]:
    """The record of one run."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def said(record: dict[str, Any]) -> str:
    """The numbers of the figure's bars."""
    names = ("loss_step_peak_bytes", "processor_seconds")
    return "; ".join(f"{run} {' '.join(f'{one[name]:.0f}' for name in names)}" for run, one in record["runs"].items())


def draw(record: dict[str, Any], path: Path, style: Style) -> None:
    """Curves above, bars below."""
    (plain_name, plain), (our_name, ours) = record["runs"].items()
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(WIDTH, HEIGHT), layout="constrained", height_ratios=(3, 1.1), facecolor=style.background
    )
    steps = range(1, record["steps"] + 1)
    # A wide line below a thin dashed one: where they coincide, both are seen.
    above.plot(steps, plain["rewards"], color=style.others, linewidth=5, alpha=0.7, label=plain_name)
    above.plot(steps, ours["rewards"], color=style.ours, linewidth=1.8, linestyle=(0, (3, 1)), label=our_name)
    above.legend(fontsize=10, frameon=False, labelcolor=style.text, loc="upper left")
    above.set(ylim=(0, 1), xlim=(1, record["steps"]))
    above.set_title(
        "The same training, up to rounding: mean reward by GRPO step", color=style.text, fontsize=11, loc="left"
    )
    peaks = [ours["loss_step_peak_bytes"], plain["loss_step_peak_bytes"]]
    bars = below.barh([our_name, plain_name], peaks, color=[style.ours, style.others], height=0.62)
    seconds = [ours["processor_seconds"], plain["processor_seconds"]]
    labels = [f"{format_bytes(peak)}, {time:.0f} s" for peak, time in zip(peaks, seconds, strict=True)]
    below.bar_label(bars, labels, color=style.text, fontsize=11, fontweight="bold", padding=5)
    below.set_xlim(0, 1.38 * max(peaks))
    below.set_xticks([])
    below.set_title(
        "Peak memory of its loss step, and processor time of the run", color=style.text, fontsize=11, loc="left"
    )
    for axis in (above, below):
        axis.set_facecolor(style.background)
        axis.tick_params(colors=style.text, labelsize=9, length=0)
        axis.spines[:].set_visible(False)
    above.grid(color=style.faint, linewidth=0.5)
    save(figure, path, style, said(record))
