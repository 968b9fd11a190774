"""The comparisons at the top of ``docs/benchmarks.md``, from the records of the benchmarks."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from benchmarks.bench.records import Record, format_bytes, newest

FP32, BF16 = "reference-fp32-grad", "reference-bf16-grad"
HUGE, LOSS, OVER = "huge-fp32-grad", "linear-reference-loss", "logitless-overwrite"
NARROW = "linear-d2048-grad"
# From hidden states, by their names in a sentence.
HEADS = {"trl-head": "TRL's head", "liger-sm90": "Liger's Hopper kernel", "torch.compile": "`torch.compile`"}


def notes(records: Sequence[Record]) -> str:
    """The comparisons that readers ask for first, with numbers from the records."""
    found = {(r.case["name"], r.provider): r for r in newest(records)}
    ours, theirs = (
        {name: found[name, provider] for name in (FP32, BF16, f"{FP32}-peaked")}
        for provider in ("logitless", "trl-kernel")
    )
    behind = [
        _more(theirs[FP32].forward_ms, ours[FP32].forward_ms),
        *(_more(theirs[name].total_ms, ours[name].total_ms) for name in (FP32, BF16)),
    ]
    errors = [x[f"{FP32}-peaked"].errors["entropy"] for x in (theirs, ours)]
    huge = {provider: found[HUGE, provider] for provider in ("torch", "torch.compile", "trl-kernel", "liger", OVER)}
    assert {huge[name].status for name in ("torch", "torch.compile")} == {"out of memory"}
    more = {_gigabytes(huge[name].peak_bytes) for name in ("trl-kernel", "liger")}
    assert more == {_gigabytes(huge[OVER].logits_bytes)}
    providers = ("torch", "torch.compile", "verl-kernel", "logitless-loss", "logitless")
    loss = {name: found[LOSS, name] for name in providers}
    costs = {name: _cost(r) for name, r in loss.items()}
    own, heads = found[NARROW, "logitless"], {text: found[NARROW, name] for name, text in HEADS.items()}
    assert len({r.environment["commit"] for r in (own, *heads.values())}) == 1
    case, of_loss = huge[OVER].case, loss["logitless-loss"]
    lines = [
        f"* From logits that exist, TRL's kernel takes {behind[0]} more time than ours in float32 forward, {behind[1]} "
        f"more with backward, and {behind[2]} more with backward in bfloat16. On peaked logits its entropy is off by "
        f"{errors[0]:.0e}, and ours by {errors[1]:.0e}.",
        f"* With {_gigabytes(huge[OVER].logits_bytes)} of float32 logits (T = {case['tokens']:,}, V = "
        f"{case['vocab']:,}), forward and backward take {huge[OVER].total_ms:.1f} ms and "
        f"{format_bytes(huge[OVER].peak_bytes or 0)} beyond the logits. Plain torch and `torch.compile` run out of "
        f"memory there; the kernels of TRL and Liger need another {more.pop()}.",
        f"* PPO's loss with entropy, and its gradients, from bfloat16 hidden states of size {of_loss.case['hidden']}: "
        f"plain torch takes {costs['torch']}, `torch.compile` {costs['torch.compile']} (logits in bfloat16), and "
        f"verl's kernel {costs['verl-kernel']}. `policy_loss` of `Logits` under "
        f'`memory="{of_loss.case["memory"]}"` takes {costs["logitless-loss"]}; `logprobs` and the objective under '
        f"256 MiB take {costs['logitless']}. Three matrix products alone take {of_loss.floor_ms:.0f} ms.",
        f"* `logprobs` of `Logits` with hidden states of size {own.case['hidden']} and an entropy gradient takes "
        f"{_cost(own)}; " + ", ".join(f"{text} {_cost(r)}" for text, r in heads.items()) + ".",
    ]
    return "\n".join(textwrap.fill(line, 120, subsequent_indent="  ") for line in lines) + "\n"


def _cost(record: Record) -> str:
    return f"{record.total_ms:.0f} ms and {format_bytes(record.peak_bytes or 0)}"


def _more(theirs: float | None, ours: float | None) -> str:
    assert theirs is not None
    assert ours is not None
    return f"{100 * (theirs / ours - 1):.0f} %"


def _gigabytes(size: int | None) -> str:
    assert size is not None
    return f"{size / 1e9:.0f} GB"
