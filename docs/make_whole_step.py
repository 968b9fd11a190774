"""What a whole policy update gains, from the records of ``benchmarks/whole_step.py`` and ``benchmarks/trl_trainer.py``.

A figure in both styles, the lines under it in the README, and a section of ``docs/benchmarks.md``: run by
``python docs/make_figures.py``, held by tests. The newest record of each model and contender counts. Without records
there is neither figure nor section.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.bench.records import PEERS, Record, newest
from benchmarks.plots import Bar, Style, draw_bars
from logitless.spec import format_bytes
from logitless.tools.style import WIDTH_INCHES, save

RECORDS = Path(__file__).parent.parent / "benchmarks" / "results" / "whole-step.jsonl"
NAME = "h200-whole-step"
ALT = "Tokens per second and longest micro-batch of whole policy updates: plain torch, torch.compile, TRL and logitless"
START, END = "<!-- whole step: python docs/make_figures.py -->\n", "<!-- end of whole step -->\n"
OURS = {"ours": "logitless"}
EXACT = "linear-d2048-grad"
"""The case, in the records of the benchmarks, that says how exact TRL's head and ours are."""
Line = dict[str, Any]


def read(path: Path = RECORDS) -> list[Line]:
    """The newest line of each kind, model, contender and budget, in the order in which these first came."""
    if not path.exists():
        return []
    found: dict[tuple[Any, ...], Line] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        found[line["kind"], line["model"], line["contender"], line.get("budget_bytes")] = line
    return list(found.values())


def of_kind(lines: Sequence[Line], kind: str) -> dict[str, dict[str, list[Line]]]:
    """Lines of a kind by model and contender."""
    found: dict[str, dict[str, list[Line]]] = {}
    for line in lines:
        if line["kind"] == kind:
            found.setdefault(line["model"], {}).setdefault(line["contender"], []).append(line)
    return found


def longest(lines: Sequence[Line], budget: int) -> Line:
    """The line of one budget; without tokens where none was found."""
    return next((line for line in lines if line["budget_bytes"] == budget), {"tokens": 0, "status": "not tried"})


def budgets(lines: Sequence[Line]) -> list[int]:
    return sorted({line["budget_bytes"] for line in lines if line["kind"] == "longest"})


def where(lines: Sequence[Line]) -> str:
    """Device, versions and commits of the lines."""
    places = [line["environment"] for line in lines]
    devices = ", ".join(dict.fromkeys(place["device"] for place in places))
    named = [{name: p["versions"][name] for name in ("torch", *PEERS) if name in p["versions"]} for p in places]
    versions = ", ".join(dict.fromkeys(f"{name} {version}" for one in named for name, version in one.items()))
    commits = ", ".join(dict.fromkeys(f"`{place['commit']}`" for place in places))
    return f"{devices}, {versions}, commit {commits}"


# The figure.


def draw(lines: Sequence[Line], path: Path, style: Style) -> None:
    """A line of panels per model: tokens per second, and the longest micro-batch in the smallest of the memories."""
    timed, most = of_kind(lines, "step"), of_kind(lines, "longest")
    budget = budgets(lines)[0]
    size = (WIDTH_INCHES, 0.3 + 1.45 * len(timed))
    figure, axes = plt.subplots(len(timed), 2, figsize=size, layout="constrained", squeeze=False)
    for (speed, batch), model in zip(axes, timed, strict=True):
        steps = {name: found[-1] for name, found in timed[model].items()}
        bars = [_bar(name, line.get("tokens_per_s"), "{:,.0f}", line) for name, line in steps.items()]
        draw_bars(speed, bars, style)
        found = {name: longest(most.get(model, {}).get(name, []), budget) for name in steps}
        draw_bars(batch, [_bar(name, line.get("tokens"), "{:,}", line) for name, line in found.items()], style)
        titles = (f"{model}: tokens per second", f"{model}: tokens that fit on {budget / 1e9:.0f} GB")
        for axis, title in zip((speed, batch), titles, strict=True):
            axis.set_title(title, color=style.text, fontsize=10, fontweight="bold", loc="left")
    save(figure, path, style)


def _bar(name: str, value: float | None, text: str, line: Line) -> Bar:
    ours, label = name in OURS, OURS.get(name, name)
    return Bar(label, value, text.format(value), ours) if value else Bar(label, 0.0, line.get("status", ""), ours)


# What the figure does not say.


def beside_trl(lines: Sequence[Line], records: Sequence[Record]) -> str:
    """That TRL's own head fits as much, by how much a step is faster, and what else there is to gain. Links aside."""
    timed, most = of_kind(lines, "step"), of_kind([x for x in lines if "tokens" in x], "longest")
    pairs = [(of["TRL"][-1], of["ours"][-1]) for of in timed.values() if {"TRL", "ours"} <= set(of)]
    exact = {r.provider: r for r in newest(records) if r.case["name"] == EXACT}
    if not pairs or not {"trl-head", "logitless"} <= set(exact):
        return ""
    fits = [
        [longest(of[name], memory)["tokens"] for name in ("TRL", "ours")]
        for of in most.values()
        for memory in budgets(lines)
        if {"TRL", "ours"} <= set(of)
    ]
    assert all(theirs == ours for theirs, ours in fits), f"the sentence is no longer true: {fits}"
    faster = sorted(100 * (ours["tokens_per_s"] / theirs["tokens_per_s"] - 1) for theirs, ours in pairs)
    theirs, ours = (exact[name].errors["logprob"] for name in ("trl-head", "logitless"))
    width = f"D = {exact['logitless'].case['hidden']}"
    return (
        f"TRL's own head stores no logits either: at all of these sizes as many tokens fit with it as with ours, and a "
        f"step with ours is only {faster[0]:.1f} to {faster[-1]:.1f} % faster. Beside it you gain better numbers (a "
        f"log-prob of bfloat16 inputs at {width} is off by up to {ours:.0e}, with TRL's rounding by {theirs:.0e}), "
        f"statistics from the same pass, an audit against float64, and losses that TRL's head does not have."
    )


# The README.


def readme(lines: Sequence[Line], records: Sequence[Record] = ()) -> str:
    """The figure, what it says of the largest model that both plain torch and we could train, and what it does not."""
    if not lines:
        return ""
    most, memory = of_kind([x for x in lines if x["kind"] != "longest" or "tokens" in x], "longest"), budgets(lines)[0]
    both = {
        model: [(of[name][-1], longest(most[model][name], memory)["tokens"]) for name in ("plain torch", "ours")]
        for model, of in of_kind(lines, "step").items()
        if all("ms" in of[name][-1] and name in most[model] for name in ("plain torch", "ours"))
    }
    model, ((plain, before), (ours, after)) = list(both.items())[-1]
    said = (
        f"The bars show whole policy updates of models with the shapes of Qwen3, with gradient checkpointing and "
        f"AdamW. At {model}, {ours['tokens']:,} tokens take {ours['ms']:,.0f} ms instead of {plain['ms']:,.0f} ms, "
        f"and a micro-batch of {after:,} tokens instead of {before:,} fits on {memory / 1e9:.0f} GB."
    )
    beside = beside_trl(lines, records)
    more = f"\n{textwrap.fill(beside + ' [More on that](docs/adapters/trl.md).', 142)}\n" if beside else ""
    return (
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="docs/figures/{NAME}-dark.png">\n'
        f'  <img alt="{ALT}" src="docs/figures/{NAME}-light.png">\n</picture>\n\n{textwrap.fill(said, 142)}\n{more}'
    )


def with_readme(text: str, lines: Sequence[Line], records: Sequence[Record] = ()) -> str:
    """The README with what is between the marks made anew."""
    before, rest = text.split(START)
    return before + START + readme(lines, records) + END + rest.split(END)[1]


# The page.

SECTION = """## A whole step

A step is forward, loss, backward, clipping of gradients and AdamW. The models are those of Transformers with the shapes
of Qwen3: tied embeddings, random weights in bfloat16, gradient checkpointing, torch's attention. Sequences have
{length} tokens, {prompt} of them prompt. AdamW is fused and keeps its state in bfloat16. Plain torch, like the others,
computes logits of the response alone. `logitless` is the `loss=` of a patched model, with the default budget of 1 GiB.
The column *loss* is the share of the step that forward and backward of the loss take, from given hidden states.
{where}.
"""

LONGEST = """This is the longest micro-batch that fits, in whole sequences. The next size that was tried, at most 6 % or
one sequence longer, ran out of memory; `+` marks a size beyond which nothing was tried.
"""

TRAINER = """This is TRL's own GRPOTrainer on a given batch of {tokens:,} tokens, with its loop, loss, optimizer and
metrics: as it is, and after `install("trl")`, which rounds logits as TRL does unless `accurate=True` is given. {where}.
"""


def section(lines: Sequence[Line], records: Sequence[Record] = ()) -> list[str]:
    """Parts of the page, none without records. The records are those of the other benchmarks."""
    steps, trainers = of_kind(lines, "step"), of_kind(lines, "trainer")
    if not steps:
        return []
    own = [line for line in lines if line["kind"] != "trainer"]
    shape = own[0]["shape"]
    parts = [SECTION.format(where=where(own), **shape), steps_table(steps)]
    if budgets(lines):
        parts += [LONGEST, longest_table(lines)]
    if beside := beside_trl(lines, records):
        parts.insert(1, textwrap.fill(f"{beside} [More on that](adapters/trl.md).", 120) + "\n")
    if trainers:
        found = [line for line in lines if line["kind"] == "trainer"]
        parts += [TRAINER.format(tokens=found[0]["tokens"], where=where(found)), trainer_table(trainers)]
    return parts


def steps_table(steps: dict[str, dict[str, list[Line]]]) -> str:
    out = [
        "| | | ms | tokens/s | loss | peak | loss, gradient norm: relative difference to plain torch |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for model, contenders in steps.items():
        for name, found in contenders.items():
            line, label = found[-1], _label(name)
            opens = model if name == next(iter(contenders)) else ""
            if "ms" not in line:
                out.append(f"| {opens} | {label} | {line['status']} | | | | |")
                continue
            apart = [line.get(f"{what}_difference") for what in ("loss", "grad_norm")]
            cells = (
                *(opens, label, f"{line['ms']:,.0f}", f"{line['tokens_per_s']:,.0f}"),
                f"{100 * line['loss_share']:.0f} %",
                format_bytes(line["peak_bytes"]),
                ", ".join("-" if x is None else f"{x:.1e}" for x in apart),
            )
            out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def longest_table(lines: Sequence[Line]) -> str:
    memories, most = budgets(lines), of_kind(lines, "longest")
    head = [f"tokens on {memory / 1e9:.0f} GB" for memory in memories]
    out = [f"| | | {' | '.join(head)} |", f"|---|---|{'---:|' * len(head)}"]
    for model, contenders in most.items():
        for name, found in contenders.items():
            cells = [_tokens(longest(found, memory)) for memory in memories]
            opens = model if name == next(iter(contenders)) else ""
            out.append(f"| {opens} | {_label(name)} | {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def _tokens(line: Line) -> str:
    if not line.get("tokens"):
        return line["status"]
    return f"{line['tokens']:,}" + ("" if line["refused_tokens"] else "+")


def trainer_table(trainers: dict[str, dict[str, list[Line]]]) -> str:
    out = ["| | | ms | tokens/s | peak | gradient norm: relative difference |", "|---|---|---:|---:|---:|---:|"]
    for model, contenders in trainers.items():
        for name, found in contenders.items():
            line, opens = found[-1], model if name == next(iter(contenders)) else ""
            speed = f"{line['ms']:,.0f} | {line['tokens_per_s']:,.0f}"
            apart = f"{line['grad_norm_difference']:.1e}"
            out.append(f"| {opens} | {name} | {speed} | {format_bytes(line['peak_bytes'])} | {apart} |")
    return "\n".join(out) + "\n"


def _label(name: str) -> str:
    return f"**{OURS[name]}**" if name in OURS else name
