"""Train-inference mismatch: how many tokens are how far apart, and where: at which probability, how late in a response.

The lines of the last two panels are quantiles of the tokens of a bin, and a bin without ten tokens has none.
"""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator
from torch import Tensor

from logitless.objectives import Mismatch
from logitless.tools.style import WIDTH_INCHES, Style, dress, name_lines, save

LINES = {0.99: ("99%", "solid"), 0.9: ("90%", (0, (4, 2))), 0.5: ("median", (0, (1, 1.5)))}
LEAST = 1e-7
"""A distance of 0 has no logarithm; below the last digit of float32 all distances are the same."""

ENOUGH = 10


def draw_mismatch(
    logprob: Tensor, rollout_logprob: Tensor, position: Tensor, report: Mismatch, path: Path, style: Style
) -> None:
    """Three panels from ``[R]`` log-probs of trainer and engine, and places in the response."""
    distance = (logprob - rollout_logprob).abs().clamp_min(LEAST)
    finite = distance.isfinite()
    distance, engine, place = distance[finite], rollout_logprob[finite], position[finite]
    logarithmic = {"xscale": "log", "yscale": "log"}
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH_INCHES, 3.3), layout="constrained", subplot_kw=logarithmic)
    _draw_share(axes[0], distance, report, style)
    _draw_quantiles(axes[1], engine.exp().clamp_min(1e-6), distance, 0.5, style)
    _draw_quantiles(axes[2], place.double() + 1, distance, math.log10(2), style)
    labels = ("|log ratio|", "probability by the engine", "place in the response")
    titles = ("share of tokens beyond", "|log ratio| by probability", "|log ratio| by place")
    for axis, label, title in zip(axes, labels, titles, strict=True):
        axis.set_xlabel(label)
        _dress(axis, style, title)
    heights = [float(y) for axis in axes[1:] for line in axis.lines for y in line.get_ydata()]
    for axis in axes[1:] if heights else ():
        axis.set_ylim(min(heights) / 1.6, max(heights) * 1.6)
        name_lines(axis, style)
    heading = (
        f"Trainer against rollout engine: {report.tokens:,} tokens, KL (k3) {report.kl_k3:.2e}, effective sample size "
        f"{report.effective_tokens:.1%} of the tokens"
    )
    figure.suptitle(heading, color=style.text, fontsize=10, x=0.01, ha="left")
    save(figure, path, style)


def _draw_share(axis: Axes, distance: Tensor, report: Mismatch, style: Style) -> None:
    """The share of tokens whose distance is at least x, against x."""
    ordered = distance.sort(descending=True).values
    share = torch.arange(1, len(ordered) + 1) / max(1, len(ordered))
    # A line of a million points is drawn no better than one of a thousand.
    few = torch.unique(torch.logspace(0, math.log10(max(1, len(ordered))), 1000).round().long().clamp(1, len(ordered)))
    axis.plot(ordered[few - 1].tolist(), share[few - 1].tolist(), color=style.ours)
    axis.axvline(report.bound, color=style.mark, linewidth=1.2, linestyle=(0, (4, 2)))
    text = f"beyond {report.bound:.3g}\n{100 * report.beyond:.2g}%"
    look = {"color": style.mark, "fontsize": 8.5, "va": "bottom", "ha": "right"}
    axis.annotate(text, (report.bound, 0.03), (-5, 0), ("data", "axes fraction"), "offset points", **look)
    axis.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g}%")


def _draw_quantiles(axis: Axes, x: Tensor, distance: Tensor, width: float, style: Style) -> None:
    """Quantiles of the distance against ``x``, in bins of so many decades."""
    bins = (x.log10() / width).floor()
    found: dict[float, list[tuple[float, float]]] = {q: [] for q in LINES}
    for number in torch.unique(bins).tolist():
        inside = distance[bins == number]
        if len(inside) >= ENOUGH:
            middle = 10 ** ((number + 0.5) * width)
            values = torch.quantile(inside[:10_000_000], inside.new_tensor(list(LINES)))
            for q, value in zip(LINES, values.tolist(), strict=True):
                found[q].append((middle, value))
    for q, (name, dashes) in LINES.items():
        if found[q]:
            look = {"color": style.ours, "linestyle": dashes, "marker": "o", "markersize": 3}
            axis.plot(*zip(*found[q], strict=True), **look, label=name)


def _dress(axis: Axes, style: Style, title: str) -> None:
    dress(axis, style, title)
    axis.xaxis.set_major_locator(LogLocator(base=10, numticks=6))
    axis.yaxis.set_major_locator(LogLocator(base=10, numticks=7))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_minor_locator(NullLocator())
