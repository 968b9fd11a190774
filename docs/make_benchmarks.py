"""``docs/benchmarks.md`` from the benchmark records: run by ``python docs/make_figures.py``, held by a test.

The newest record of each case and provider counts. A cell never mixes two records: time and floor are of one run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import make_notes
import make_whole_step

from benchmarks.bench.records import PEERS, Record, newest, read_records, worst
from logitless.spec import format_bytes

PAGE = Path(__file__).parent / "benchmarks.md"
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
Show = Callable[[Record], str]
Found = Mapping[tuple[str, str], Record]

LOGITS_PROVIDERS = ("torch", "torch.compile", "megatron", "liger", "trl-kernel", "logitless", "logitless-overwrite")
LINEAR_PROVIDERS = (
    *("torch", "torch.compile", "te", "quack", "trl-head", "verl-kernel", "liger-native", "liger-sm90", "liger-flce"),
    *("liger-flce-none", "liger-chunked", "liger-selective", "cce", "cce-exact", "logitless", "logitless-logits"),
)
LOSS_PROVIDERS = (*LINEAR_PROVIDERS, "logitless-loss", "logitless-loss-buffer")

# Heading of a group of columns, then case and heading of each column.
LOGITS_CASES = {
    "Float32": {f"reference-fp32-{work}": work for work in ("forward", "value", "grad")},
    "Bfloat16": {f"reference-bf16-{work}": work for work in ("forward", "value", "grad")},
    "Peaked logits, as a trained model's": {
        "reference-fp32-value-peaked": "fp32 value",
        "reference-fp32-grad-peaked": "fp32 grad",
        "reference-bf16-value-peaked": "bf16 value",
        "reference-bf16-grad-peaked": "bf16 grad",
    },
    "Fewer scored rows, and more of everything": {
        "reference-fp32-grad-25pct": "25 % response",
        "reference-fp32-grad-3pct": "3 % response",
        "over-int32-bf16-grad": "T = 28672, bf16",
        "huge-fp32-grad": "T = 205280, V = 76032",
    },
}
LINEAR_CASES = {
    "Kinds of work": {
        "linear-reference-forward": "forward",
        "linear-reference-value": "value",
        "linear-reference-grad": "grad",
        "linear-reference-frozen": "frozen head",
        "linear-reference-keep": "6.5 GiB allowed",
    },
    "By hidden size, with an entropy gradient": {
        "linear-reference-grad": "D = 4096",
        "linear-d2048-grad": "D = 2048",
        "linear-d1024-grad": "D = 1024",
    },
    "Other inputs and shapes, with an entropy gradient": {
        "linear-reference-grad-peaked": "peaked",
        "linear-reference-grad-25pct": "25 % response",
        "linear-reference-grad-3pct": "3 % response",
        "linear-long-grad": "T = 65536, D = 2048",
        "linear-v32k-grad": "V = 32768",
        "linear-v256k-grad": "V = 262144",
        "linear-huge-grad": "T = 205280, V = 76032",
    },
}
EXACTNESS = "Largest errors to float64 {}"
LOGITS_ERRORS = {
    "reference-fp32-grad": "fp32",
    "reference-fp32-grad-peaked": "fp32 peaked",
    "reference-bf16-grad": "bf16",
    "reference-bf16-grad-peaked": "bf16 peaked",
}
LINEAR_ERRORS = {
    "linear-reference-grad": "gaussian",
    "linear-reference-grad-peaked": "peaked",
    "linear-d1024-grad": "D = 1024",
}
LOSS = "linear-reference-loss"
LOSS_CASES = {
    f"linear-{size}-loss{budget}": f"{text}, {allowed}"
    for budget, allowed in (("", "2.5 GiB"), ("-1gib", "1 GiB"))
    for size, text in (("reference", "D = 4096"), ("d2048", "D = 2048"), ("d1024", "D = 1024"))
}
TRAINED_CASES = {
    "linear-trained-forward": "forward",
    "linear-trained-grad": "grad",
    "linear-trained-frozen": "frozen head",
    "linear-trained-keep": "6.5 GiB allowed",
    "linear-trained-loss": "loss, 2.5 GiB",
    "linear-trained-loss-1gib": "loss, 1 GiB",
}
TRAINED_LOGITS = {"trained-fp32-grad": "fp32 grad", "trained-bf16-grad": "bf16 grad"}
GROWTH = "linear-growth-"

INTRODUCTION = """# Benchmarks

All numbers were measured on one NVIDIA H200, and this page is made from their records
(`benchmarks/results/h200.jsonl`) by `python docs/make_figures.py`. `benchmarks/README.md` says what is measured and
how. [The end of this page](#runs) says which commit measured what, and with which versions.

In the tables T is the number of tokens, V the size of the vocabulary and D that of the hidden states; a *provider* is
whoever's code is timed. In short:
"""

READING = """## How to read the tables

Each group of cases has three tables: the milliseconds of one step; that time as a multiple of the floor, the least
time that the hardware allows, measured in the same run; and the peak memory beyond the inputs, gradients included. A
step is forward and backward from given upstream gradients; `forward` is forward alone. Entropy is a metric in `forward`
and `value`, and part of the loss in `grad`. Every provider was first compared with float64; a wrong one has no time.

* `*` marks a provider that computes less than the case asks for: the log-prob without entropy.
* `**` marks a provider that computes a mean loss alone.
* `-` marks a provider that was not run in that case.
"""

FROM_LOGITS = """## From logits

T = 16384 and V = 151936 unless said otherwise. The floor is one read of the scored rows in forward, and in backward one
more read and one write of the gradient of every token, at the bandwidth of a plain copy in the same run.
"""

FROM_HIDDEN = """## From hidden states

T = 16384, V = 151936, D = 4096 in bfloat16 unless said otherwise. The floor is the products of scored rows, hidden size
and vocabulary that must be made without storing logits: four; three where memory is allowed to store exponentials; two
with a frozen head; one in forward. A provider that stores the logits makes three instead of four, and may be below 1:
read time and peak together.

Two peers have no time. Torch's own `linear_cross_entropy` in chunks is not in torch 2.11, which was measured. QuACK
0.6.5, beside CUTLASS DSL 4.8.0, refuses its own default of 4,096 rows a chunk where the hidden size is 4096; at
D = 1024 and V = 16384 its mean loss is off by 3e-7 and its gradients by 3e-3. Liger's native kernels and Transformer
Engine's cross entropy ran at D = 4096 alone.

Ours were measured before [products by turns](decisions/0034-products-by-turns.md). In multiples of the bare products,
these make a forward at D = 1024 a fifth faster, and forward and backward 3 % ([shapes](shapes.md)).

Records from before 2026-11-16 were taken after a pause, on a cool chip, on which the first products run faster than in
a long run. Later ones follow some hundred milliseconds of products.
"""

POLICY_LOSS = """## Policy loss

PPO's clipped loss with an entropy bonus, from hidden states to the gradients of hidden states and head: T = 16384,
V = 151936, D = 4096, bfloat16. `policy_loss` (`logitless-loss`) may use 2.5 GiB, `logprobs` with an
objective (`logitless`) its default of 256 MiB. The floor is three products.
"""

TRAINED = """## Inputs of a trained model

A model of Qwen3's kind (D = {hidden}, {layers} layers, a vocabulary of {vocab:,}, of which {known:,} are used), trained
for {seconds:.0f} s on Python sources that lay on the machine: the loss of a batch fell from {first:.1f} to {last:.1f}.
Hidden states, targets and logits are of {tokens:,} tokens of other files. Their log-probs are {logprob:.2f} in the
mean, entropies {entropy:.2f}, {confident:.1f} % of the rows have a token above 99 %, and the largest logit is
{largest:.1f}. The reference that a frozen head's exponentials start from was right in {right:.0f} % of {launches}
launches. Made by `benchmarks/trained_inputs.py`: {device}, commit `{commit}`.
"""

GROWING = """## Growth

Forward and backward with an entropy gradient from hidden states in bfloat16, one size changed at a time. The floor is
four products; plain torch makes three, and stores the logits.
"""

RESPONSE = """## Memory against the response fraction

From logits, every provider but the one that overwrites them allocates a gradient of every token, prompts included. From
hidden states, the peak is the gradients of hidden states and head, and what the scored rows take.
"""


def read_trained() -> tuple[list[Record], dict[str, Any]]:
    """Records of a trained model, and the newest facts about it."""
    facts = (RESULTS / "trained-model.jsonl").read_text(encoding="utf-8").splitlines()
    return read_records(RESULTS / "trained.jsonl"), json.loads(facts[-1])


def page(
    records: Sequence[Record],
    whole_steps: Sequence[make_whole_step.Line] = (),
    trained: tuple[Sequence[Record], Mapping[str, Any]] | None = None,
) -> str:
    """The whole page, as Markdown."""
    found = {(r.case["name"], r.provider): r for r in newest(records)}
    parts = [
        INTRODUCTION,
        make_notes.notes(records),
        READING,
        FROM_LOGITS,
        figure("h200-reference", "Time and peak memory from float32 logits"),
    ]
    parts += [group(found, title, cases, LOGITS_PROVIDERS) for title, cases in LOGITS_CASES.items()]
    parts += [group(found, EXACTNESS.format("from logits"), LOGITS_ERRORS, LOGITS_PROVIDERS, ERRORS)]
    parts += [FROM_HIDDEN, figure("h200-linear", "Time and peak memory from hidden states")]
    parts += [group(found, title, cases, LINEAR_PROVIDERS) for title, cases in LINEAR_CASES.items()]
    parts += [group(found, EXACTNESS.format("from hidden states"), LINEAR_ERRORS, LINEAR_PROVIDERS, ERRORS)]
    parts += [POLICY_LOSS, loss_table(found)]
    parts += [group(found, "By hidden size and budget", LOSS_CASES, ("logitless-loss", "logitless"))]
    parts += [] if trained is None else trained_section(*trained)
    parts += [GROWING, figure("h200-growth", "Time and peak memory against T, V and D"), growth_table(found)]
    parts += [RESPONSE, figure("h200-response", "Peak memory against the share of response tokens")]
    if whole_steps:
        steps = make_whole_step.section(whole_steps, records)
        parts += [steps[0], figure(make_whole_step.NAME, make_whole_step.ALT), *steps[1:]]
    parts += [runs_table(list(found.values()))]
    return "\n".join(parts)


def trained_section(records: Sequence[Record], facts: Mapping[str, Any]) -> list[str]:
    """Times and errors on what a trained model makes, and what that is like."""
    found, model = {(r.case["name"], r.provider): r for r in newest(records)}, facts["model"]
    history, guesses = model["history"], facts["guesses"][0]
    text = TRAINED.format(
        **{name: model["sizes"][name] for name in ("hidden", "layers", "vocab")},
        known=model["known_ids"],
        seconds=model["effort"]["seconds"],
        first=history[0]["loss"],
        last=history[-1]["loss"],
        tokens=next(iter(found.values())).case["tokens"],
        logprob=facts["logprob"]["mean"],
        entropy=facts["entropy"]["mean"],
        confident=100 * facts["rows_above_99"],
        largest=facts["largest_logit"],
        right=100 * guesses["launches_right"],
        launches=guesses["launches"],
        device=facts["environment"]["device"],
        commit=facts["environment"]["commit"],
    )
    both = TRAINED_CASES | TRAINED_LOGITS
    return [
        text,
        group(found, "From its hidden states", TRAINED_CASES, LOSS_PROVIDERS),
        group(found, "From its logits", TRAINED_LOGITS, LOGITS_PROVIDERS),
        group(found, EXACTNESS.format("on its inputs"), both, LOSS_PROVIDERS, ERRORS),
    ]


def figure(name: str, alt: str) -> str:
    """A figure that follows the reader's colour scheme."""
    return (
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="figures/{name}-dark.png">\n'
        f'  <img alt="{alt}" src="figures/{name}-light.png">\n</picture>\n'
    )


def milliseconds(record: Record) -> str:
    return "" if record.total_ms is None else number(record.total_ms)


def multiple(record: Record) -> str:
    return "" if record.ratio is None else f"{record.ratio:.2f}"


def peak(record: Record) -> str:
    return "" if record.peak_bytes is None else format_bytes(record.peak_bytes)


def error_of_values(record: Record) -> str:
    """Largest distance of log-prob and entropy."""
    return worst(record, "logprob", "entropy") if record.errors else ""


def error_of_gradients(record: Record) -> str:
    """Largest distance of the gradients, relative to their size."""
    return worst(record, "gradient", "weight", "weight_rest") if record.errors else ""


MEASURED = {"Milliseconds": milliseconds, "Multiples of the floor": multiple, "Peak memory": peak}
ERRORS = {"Values": error_of_values, "Gradients": error_of_gradients}


def cell(record: Record | None, show: Show) -> str:
    """One number, marked where less was computed; or why there is none."""
    if record is None or record.status == "absent":
        return "-"
    if record.total_ms is None or record.peak_bytes is None:
        return record.status
    less = {None: "*", "mean": "**"}.get(record.computes, "") if record.computes != record.case["entropy"] else ""
    return f"{show(record)}{less.replace('*', chr(92) + '*')}" if show(record) else "-"


def group(
    found: Found,
    title: str,
    cases: Mapping[str, str],
    providers: Sequence[str],
    measures: Mapping[str, Show] = MEASURED,
) -> str:
    """Tables of providers by cases, one for each measure, without cases and providers that have no record."""
    there = {name: text for name, text in cases.items() if any((name, p) in found for p in providers)}
    parts = [f"### {title}\n"]
    for measure, show in measures.items():
        lines = [[heading(p), *(cell(found.get((name, p)), show) for name in there)] for p in providers]
        parts.append(markdown([measure, *there.values()], [line for line in lines if set(line[1:]) != {"-"}]))
    return "\n".join(parts)


def loss_table(found: Found) -> str:
    """One line per provider, errors included."""
    measures, lines = {**MEASURED, "Error of values": error_of_values, "Error of gradients": error_of_gradients}, []
    for provider in LOSS_PROVIDERS:
        record = found.get((LOSS, provider))
        if record is not None and record.status != "absent":
            lines.append([heading(provider), *(cell(record, show) for show in measures.values())])
    return markdown(["", *measures], lines)


def growth_table(found: Found) -> str:
    """One line per size, both providers side by side."""
    lines = []
    for name in dict.fromkeys(name for name, _ in found if name.startswith(GROWTH)):
        plain, ours = found[name, "torch"], found[name, "logitless"]
        case = ours.case
        sizes = [str(case[size]) for size in ("tokens", "vocab", "hidden")]
        numbers = [cell(record, show) for show in MEASURED.values() for record in (plain, ours)]
        lines.append([name.removeprefix(GROWTH), *sizes, *numbers])
    measures = [f"{measure.lower()}, {whose}" for measure in MEASURED for whose in ("plain torch", "**logitless**")]
    return markdown(["", "T", "V", "D", *measures], lines)


def runs_table(records: Sequence[Record]) -> str:
    """Which commit measured what, where and with which versions."""
    runs: dict[tuple[str, ...], list[Record]] = {}
    for r in records:
        where = r.environment
        versions = f"torch {where['versions']['torch']}, Triton {where['versions']['triton']}"
        versions += "".join(f", {name} {where['versions'][name]}" for name in PEERS if name in where["versions"])
        runs.setdefault((where["commit"], where["date"][:16], where["device"], versions), []).append(r)
    lines = []
    for (commit, date, device, versions), own in sorted(runs.items(), key=lambda run: run[0][1]):
        cases = list(dict.fromkeys(r.case["name"] for r in own))
        shown = ", ".join(f"`{name}`" for name in cases[:3]) + (f" and {len(cases) - 3} more" if len(cases) > 3 else "")
        lines.append([f"`{commit}`", date.replace("T", " "), device, versions, str(len(own)), shown])
    text = "## Runs\n\nThe newest record of each case and provider.\n\n"
    return text + markdown(["commit", "date (UTC)", "device", "versions", "records", "cases"], lines)


def heading(provider: str) -> str:
    """Ours in bold."""
    return f"**{provider}**" if provider.startswith("logitless") else provider


def number(x: float) -> str:
    return f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 100 else f"{x:.0f}"


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table, its first column to the left and the others to the right."""
    rows = [header, ["---", *["---:"] * (len(header) - 1)], *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
