"""``docs/how-to/scale.md``: its table of steps on 8, 64 and 1,024 cards, and the figure of growth.

    python docs/make_scale.py           also done by docs/make_figures.py

Compute is the newest record of an H200, divided by ranks; what is sent is what ``explain`` lists, at link speeds that
the page states. The figure is of ``estimate`` and ``explain`` alone. The table is held by a test.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt

import logitless as ll
from benchmarks.bench.records import Record, newest, read_records
from logitless.machine import H200
from logitless.memory.meta import sized
from logitless.objectives import Objective
from logitless.tools.style import DARK, LIGHT, WIDTH_INCHES, Style, save

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "how-to" / "scale.md"
RECORDS = ROOT / "benchmarks" / "results" / "h200.jsonl"
FIGURES, NAME = ROOT / "docs" / "figures", "scale"
BEGIN, END = "<!-- steps: python docs/make_scale.py -->\n", "<!-- end of steps -->\n"

CASE, PROVIDER = "linear-reference-loss-1gib", "logitless-loss"
NVLINK, INFINIBAND, NODE = 450e9, 50e9, 8
"""Bytes a second that leave a card within a node of so many cards, and between nodes."""
STEP, MICRO = 1 << 22, 1 << 14
"""Tokens of a step, and of a card's micro-batch at most."""


class Split(NamedTuple):
    """How a run is split. Tensor-parallel ranks are neighbours."""

    cards: int
    tp: int = 1
    cp: int = 1

    @property
    def replicas(self) -> int:
        """Parts that the tokens of a step are cut into."""
        return self.cards // self.tp

    def __str__(self) -> str:
        sizes = {"TP": self.tp, "CP": self.cp, "DP": self.replicas // self.cp}
        return " x ".join(f"{name} {n}" for name, n in sizes.items() if n > 1)


SPLITS = (
    *(Split(8), Split(8, tp=8)),
    *(Split(64), Split(64, tp=8), Split(64, tp=8, cp=4), Split(64, tp=64)),
    *(Split(1024), Split(1024, tp=8), Split(1024, tp=8, cp=8), Split(1024, tp=64)),
)


def measured() -> Record:
    """One card's time for a micro-batch of the loss."""
    (found,) = (x for x in newest(read_records(RECORDS)) if (x.case["name"], x.provider) == (CASE, PROVIDER))
    return found


class Cost(NamedTuple):
    """Milliseconds of a step on each card: the head's products, what its ranks send, and the sum of d_weight."""

    compute: float
    sent: float
    weight: float

    @property
    def total(self) -> float:
        return sum(self)


def cost(split: Split, record: Record) -> Cost:
    """Of a step of ``STEP`` tokens."""
    case = record.case
    assert record.total_ms is not None
    tokens = min(MICRO, STEP // split.replicas)
    rounds = STEP // split.replicas // tokens
    compute = record.total_ms * tokens / case["tokens"] / split.tp
    logits, rows = sized(tokens, case["vocab"], case["hidden"], tensor_parallel=split.tp)
    wire = sum(x.wire for x in ll.explain(ll.policy_loss, logits, rows, Objective()).collectives)
    # In float32, as optimizers keep it.
    buffer = 4 * case["vocab"] * case["hidden"] / split.tp
    ring = 2 * (split.replicas - 1) / split.replicas * buffer
    weight = ring / (NVLINK if split.cards <= NODE else INFINIBAND)
    return Cost(rounds * compute, 1e3 * rounds * wire / (NVLINK if split.tp <= NODE else INFINIBAND), 1e3 * weight)


def section() -> str:
    """The table."""
    record = measured()
    where, case = record.environment, record.case
    links = f"links of {NVLINK / 1e9:.0f} GB/s within a node of {NODE} and {INFINIBAND / 1e9:.0f} GB/s between nodes"
    out = [
        f"A step of {STEP:,} tokens, V = {case['vocab']:,}, D = {case['hidden']:,}, bfloat16. "
        f"Compute from {record.total_ms:.1f} ms for {case['tokens']:,} tokens on one {where['device']}, "
        f"commit `{where['commit'][:7]}`; {links}. Milliseconds of a step on every card:\n",
        "| cards | split | head's compute | sent over TP | d_weight over DP x CP | all, of ideal |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    ideal = cost(Split(1), record).compute
    for split in SPLITS:
        x = cost(split, record)
        share = ideal / split.cards / x.total
        cells = f"{x.compute:,.0f} | {x.sent:,.0f} | {x.weight:,.0f} | {x.total:,.0f}, {share:.0%}"
        out.append(f"| {split.cards:,} | {split} | {cells} |")
    return "\n".join(out) + "\n"


def made() -> str:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + section() + END + rest.split(END)[1]


# The figure.

BASE = {"T": 16384, "V": 131072, "TP": 8, "CP": 1}
FIRST = {"T": 16384, "V": 65536, "TP": 1, "CP": 1}
DOUBLED = {"T": 5, "V": 5, "TP": 6, "CP": 5}
VERBS = {"policy_loss": "loss", "logprobs": "log-prob and entropy"}


def growth(sizes: dict[str, int], verb: str) -> tuple[float, float, float]:
    """GiB at the peak of a rank, TFLOP that it multiplies, and MiB that it sends."""
    tokens = sizes["T"] // sizes["CP"]
    logits, rows = sized(tokens, sizes["V"], 4096, tensor_parallel=sizes["TP"])
    call = (ll.policy_loss, logits, rows, Objective()) if verb == "policy_loss" else (ll.logprobs, logits, rows)
    fields = {"old_logprob": "current", "advantage": rows.new_empty(tokens, dtype=logits.hidden.dtype)}
    fields = fields if verb == "policy_loss" else {"entropy": "grad"}
    found = ll.estimate(*call, device=H200, **fields)
    assert found.plan is not None
    work = 2 * found.plan.products * tokens * (sizes["V"] // sizes["TP"]) * 4096
    return found.peak / 2**30, work / 1e12, sum(x.wire for x in found.plan.collectives) / 2**20


def draw(path: Path, style: Style) -> None:
    """Peak, work and bytes of a rank as T, V, TP and CP double."""
    labels = ("peak of a rank, GiB", "products of a rank, TFLOP", "sent by a rank, MiB")
    figure, axes = plt.subplots(3, len(DOUBLED), figsize=(WIDTH_INCHES, 6.0), layout="constrained", sharey="row")
    for column, (name, times) in enumerate(DOUBLED.items()):
        values = [FIRST[name] << i for i in range(times)]
        for color, (verb, label) in zip((style.ours, style.others), VERBS.items(), strict=True):
            points = [growth(BASE | {name: value}, verb) for value in values]
            for row, line in enumerate(zip(*points, strict=True)):
                axes[row, column].plot(range(times), line, marker="o", markersize=3, color=color, label=label)
        for row, axis in enumerate(axes[:, column]):
            axis.set_facecolor(style.background)
            axis.set_yscale("symlog", linthresh=1.0) if row == 2 else axis.set_yscale("log", base=2)
            shown = [f"{v // 1024}k" if v >= 1024 else str(v) for v in values]
            axis.set_xticks(range(times), shown, fontsize=7, color=style.text)
            axis.tick_params(colors=style.text, labelsize=7)
            axis.grid(color=style.faint, linewidth=0.5)
            for spine in axis.spines.values():
                spine.set_color(style.faint)
        axes[2, column].set_xlabel(name, color=style.text, fontsize=9)
    for axis, label in zip(axes[:, 0], labels, strict=True):
        axis.set_ylabel(label, color=style.text, fontsize=8)
    axes[0, 0].legend(fontsize=7, facecolor=style.background, edgecolor=style.faint, labelcolor=style.text)
    heading = "From hidden states of 4,096 bfloat16 numbers, around T = 16k, V = 128k, TP = 8; nothing was measured"
    figure.suptitle(heading, color=style.text, fontsize=9, x=0.01, ha="left")
    save(figure, path, style)


def main() -> None:
    for style in (LIGHT, DARK):
        draw(FIGURES / f"{NAME}-{style.name}.png", style)
    PAGE.write_text(made(), encoding="utf-8")


if __name__ == "__main__":
    main()
