"""``docs/benchmarks.md`` from the benchmark records: run by ``python docs/make_figures.py``, held by a test.

The newest record of each case and provider counts. A cell never mixes two records: time and floor are of one run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import make_whole_step

from logitless.spec import format_bytes
from logitless.tools.bench.records import PEERS, Record, newest, worst

PAGE = Path(__file__).parent / "benchmarks.md"
Cell = Callable[[Record | None], str]
Found = Mapping[tuple[str, str], Record]

LOGITS_PROVIDERS = ("torch", "torch.compile", "megatron", "liger", "trl-kernel", "logitless", "logitless-overwrite")
LINEAR_PROVIDERS = (
    *("torch", "torch.compile", "trl-head", "verl-kernel", "liger-flce", "liger-flce-none", "liger-chunked"),
    *("liger-selective", "cce", "cce-exact", "logitless", "logitless-logits"),
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
EXACTNESS = "Largest errors to float64 {}: values, gradients"
LOGITS_ERRORS = {
    "reference-fp32-grad": "fp32",
    "reference-fp32-grad-peaked": "fp32 peaked",
    "reference-bf16-grad": "bf16",
    "reference-bf16-grad-peaked": "bf16 peaked",
}
LINEAR_ERRORS = {"linear-reference-grad": "gaussian", "linear-reference-grad-peaked": "peaked"}
LOSS = "linear-reference-loss"
GROWTH = "linear-growth-"

INTRODUCTION = """# Benchmarks

Made from the records in `benchmarks/results/h200.jsonl` by `python docs/make_figures.py`; not written by hand. What is
measured and how: `benchmarks/README.md`. Which commit measured what, and with which versions: [at the end](#runs).

A cell is milliseconds of one step, that time as a multiple of the floor of the same run, and peak memory beyond the
inputs, gradients included. The step is forward and backward from given upstream gradients; `forward` is forward alone.
Entropy is a metric in `forward` and `value`, and part of the loss in `grad`. Every provider was first compared with
float64; a wrong one has no time.

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
with a frozen head; one in forward. A provider that stores the logits makes three, and may be below four: read time and
peak together.

These records were taken after a pause, on a cool chip, on which the first products run faster than in a long run.
"""

POLICY_LOSS = """## Policy loss

PPO's clipped loss with an entropy bonus, from hidden states to the gradients of hidden states and head: T = 16384,
V = 151936, D = 4096, bfloat16. `linear_policy_loss` (`logitless-loss`) may use 2.5 GiB, `linear_logprobs` with an
objective (`logitless`) its default of 256 MiB. The floor is three products.
"""

GROWING = """## Growth

Forward and backward with an entropy gradient from hidden states in bfloat16, one size changed at a time. The floor is
four products; plain torch makes three, and stores the logits.
"""

RESPONSE = """## Memory against the response fraction

From logits, every provider but the one that overwrites them allocates a gradient of every token, prompts included. From
hidden states, the peak is the gradients of hidden states and head, and what the scored rows take.
"""


def page(records: Sequence[Record], whole_steps: Sequence[make_whole_step.Line] = ()) -> str:
    """The whole page, as Markdown."""
    found = {(r.case["name"], r.provider): r for r in newest(records)}
    parts = [INTRODUCTION, FROM_LOGITS, figure("h200-reference", "Time and peak memory from float32 logits")]
    parts += [group(found, title, cases, LOGITS_PROVIDERS) for title, cases in LOGITS_CASES.items()]
    parts += [group(found, EXACTNESS.format("from logits"), LOGITS_ERRORS, LOGITS_PROVIDERS, errors)]
    parts += [FROM_HIDDEN, figure("h200-linear", "Time and peak memory from hidden states")]
    parts += [group(found, title, cases, LINEAR_PROVIDERS) for title, cases in LINEAR_CASES.items()]
    parts += [group(found, EXACTNESS.format("from hidden states"), LINEAR_ERRORS, LINEAR_PROVIDERS, errors)]
    parts += [POLICY_LOSS, loss_table(found)]
    parts += [GROWING, figure("h200-growth", "Time and peak memory against T, V and D"), growth_table(found)]
    parts += [RESPONSE, figure("h200-response", "Peak memory against the share of response tokens")]
    if whole_steps:
        steps = make_whole_step.section(whole_steps)
        parts += [steps[0], figure(make_whole_step.NAME, make_whole_step.ALT), *steps[1:]]
    parts += [runs_table(list(found.values()))]
    return "\n".join(parts)


def figure(name: str, alt: str) -> str:
    """A figure that follows the reader's colour scheme."""
    return (
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="figures/{name}-dark.png">\n'
        f'  <img alt="{alt}" src="figures/{name}-light.png">\n</picture>\n'
    )


def cell(record: Record | None) -> str:
    """Time, multiple of the floor and peak; or why there is no time."""
    if record is None or record.status == "absent":
        return "-"
    if record.total_ms is None or record.peak_bytes is None:
        return record.status
    less = {None: "*", "mean": "**"}.get(record.computes, "") if record.computes != record.case["entropy"] else ""
    ratio = "" if record.ratio is None else f", x {record.ratio:.2f}"
    return f"{number(record.total_ms)}{ratio}, {format_bytes(record.peak_bytes)}{less.replace('*', chr(92) + '*')}"


def group(found: Found, title: str, cases: Mapping[str, str], providers: Sequence[str], show: Cell = cell) -> str:
    """A table of providers by cases, without cases that have no record and providers that ran in no case."""
    there = {name: text for name, text in cases.items() if any((name, p) in found for p in providers)}
    lines = [[heading(p), *(show(found.get((name, p))) for name in there)] for p in providers]
    return f"### {title}\n\n" + markdown(["", *there.values()], [line for line in lines if set(line[1:]) != {"-"}])


def loss_table(found: Found) -> str:
    """One line per provider, errors included."""
    lines = []
    for provider in LOSS_PROVIDERS:
        record = found.get((LOSS, provider))
        if record is not None and record.status != "absent":
            lines.append([heading(provider), cell(record), errors(record)])
    return markdown(["", "ms, x floor, peak", "errors to float64: values, gradients"], lines)


def growth_table(found: Found) -> str:
    """One line per size, both providers side by side."""
    lines = []
    for name in dict.fromkeys(name for name, _ in found if name.startswith(GROWTH)):
        plain, ours = found[name, "torch"], found[name, "logitless"]
        case = ours.case
        sizes = [str(case[size]) for size in ("tokens", "vocab", "hidden")]
        lines.append([name.removeprefix(GROWTH), *sizes, cell(plain), cell(ours)])
    return markdown(["", "T", "V", "D", "plain torch", "**logitless**"], lines)


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


def errors(record: Record | None) -> str:
    """Largest distance to float64 of log-prob and entropy, and of the gradients relative to their size."""
    if record is None or not record.errors:
        return "-"
    return f"{worst(record, 'logprob', 'entropy')}, {worst(record, 'gradient', 'weight', 'weight_rest')}"


def number(x: float) -> str:
    return f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 100 else f"{x:.0f}"


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table, its first column to the left and the others to the right."""
    rows = [header, ["---", *["---:"] * (len(header) - 1)], *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
