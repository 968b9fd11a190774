"""The figure of the first page, from a record of the demo: ``python -m examples.demo --json`` into ``RECORD``.

Two learning curves that coincide, and the peak memory of the loss step of both. Drawn by ``docs/make_figures.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from logitless.spec import format_bytes
from logitless.tools.style import Style, dress, save

RECORD = Path(__file__).parent.parent / "benchmarks" / "results" / "demo.json"
NAME = "demo"
WIDTH, HEIGHT = 6.4, 4.4
BARS = ("ours", "text")
"""Colours of the bars' numbers, ours first."""


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
    figure, (above, below) = plt.subplots(2, 1, figsize=(WIDTH, HEIGHT), layout="constrained", height_ratios=(3, 1.2))
    steps = range(1, record["steps"] + 1)
    dress(above, style, "Reward by GRPO step: the same training", 12)
    # A wide line below a thin one: where they coincide, both are seen.
    above.plot(steps, plain["rewards"], color=style.others, linewidth=7, solid_capstyle="round")
    above.plot(steps, ours["rewards"], color=style.ours, linewidth=2)
    above.set(ylim=(0, 1.04), xlim=(1, record["steps"]), yticks=(0, 0.5, 1))
    look: dict[str, Any] = {"textcoords": "offset points", "fontsize": 12, "va": "center"}
    at = int(0.6 * record["steps"])
    above.annotate(plain_name, (at, plain["rewards"][at]), (24, -12), color=style.quiet, **look)
    above.annotate(our_name, (at, ours["rewards"][at]), (24, -32), color=style.ours, fontweight="bold", **look)
    dress(below, style, "Peak memory of its loss step, and processor time", 12)
    peaks = [ours["loss_step_peak_bytes"], plain["loss_step_peak_bytes"]]
    bars = below.barh([our_name, plain_name], peaks, color=[style.ours, style.others], height=0.66)
    seconds = [ours["processor_seconds"], plain["processor_seconds"]]
    labels = [f"{format_bytes(peak)}, {time:.0f} s" for peak, time in zip(peaks, seconds, strict=True)]
    for text, colour in zip(below.bar_label(bars, labels, fontsize=12, padding=6), BARS, strict=True):
        text.set(color=getattr(style, colour), fontweight="bold")
    below.set(xlim=(0, 1.5 * max(peaks)), xticks=[])
    below.grid(visible=False)
    below.tick_params(labelsize=11, colors=style.text)
    save(figure, path, style, said(record))
