"""What statistics beyond the softmax cost: each beside the plain call, from hidden states and from logits.

    python benchmarks/extras.py --out benchmarks/results/extras.jsonl        the GPU's sizes, or the CPU's
    python benchmarks/extras.py --only "ids of 64"                           one of them, beside "nothing"

Every contender is the call with one thing more asked for, forward and, where it has a gradient, forward and backward.
Values are compared with float64 at sampled rows first. Plain torch's ``topk`` of logits that exist is in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import logitless as ll
from benchmarks.bench.measure import interleaved, peak_bytes
from benchmarks.bench.records import Environment
from logitless.spec import format_bytes
from logitless.tools.outputs import text_table

SAMPLED = 16
ALL = ("top1", "collision", "mean_logit", "logit_variance", "max_logit", "rank")


@dataclass(frozen=True)
class Case:
    """One problem."""

    name: str
    tokens: int
    vocab: int
    hidden: int
    dtype: str = "bfloat16"


CASES = {"cuda": Case("h200", 16384, 151936, 4096), "cpu": Case("cpu", 256, 4096, 64, "float32")}


@dataclass(frozen=True, eq=False)
class Inputs:
    hidden: Tensor
    weight: Tensor
    logits: Tensor
    target: Tensor
    ids: Tensor


def draw(case: Case, device: torch.device) -> Inputs:
    generator, dtype = torch.Generator(device).manual_seed(0), getattr(torch, case.dtype)
    hidden, weight = (
        torch.empty(n, case.hidden, device=device).normal_(generator=generator).mul_(scale).to(dtype)
        for n, scale in ((case.tokens, 1.0), (case.vocab, 2 * case.hidden**-0.5))
    )
    target = torch.randint(case.vocab, (case.tokens,), device=device, generator=generator)
    ids = torch.randint(case.vocab, (case.tokens, 64), device=device, generator=generator)
    return Inputs(hidden.requires_grad_(), weight.requires_grad_(), hidden.detach() @ weight.detach().T, target, ids)


def contenders(x: Inputs) -> dict[str, dict[str, Any]]:
    """What is asked for besides log-probs."""
    return {
        "nothing": {},
        **{name: {"stats": (name,)} for name in ALL},
        **{f"top_k={k}": {"top_k": k} for k in (5, 20, 128)},
        **{f"ids of {k}": {"ids": x.ids[:, :k].contiguous()} for k in (8, 64)},
        "all stats, top_k=20": {"stats": ALL, "top_k": 20},
    }


def differentiated(out: ll.TokenStats) -> list[Tensor]:
    return [v for v in (out.logprob, out.collision, out.mean_logit, out.ids_logprobs) if v is not None]


def step(x: Inputs, asked: dict[str, Any]) -> tuple[Tensor, ...]:
    results = differentiated(ll.logprobs(ll.Logits(x.hidden, x.weight), x.target, **asked))
    return torch.autograd.grad(results, (x.hidden, x.weight), [torch.ones_like(v) for v in results])


@torch.no_grad()
def worst(x: Inputs, asked: dict[str, Any]) -> float:
    """Largest error at sampled rows, relative to float64; 1 where ids or ranks are not those of the logits."""
    rows = torch.arange(0, len(x.target), max(1, len(x.target) // SAMPLED), device=x.target.device)[:SAMPLED]
    out = ll.logprobs(x.logits, x.target, **asked)
    z = x.logits[rows].double()
    log_p, (value, best) = z.log_softmax(-1), z.sort(dim=1, descending=True, stable=True)
    own = x.target[rows, None]
    right = {
        "top1_id": best[:, 0],
        "rank": (best == own).int().argmax(1),
        "collision": log_p.exp().square().sum(1),
        "mean_logit": z.mean(1),
        "logit_variance": z.var(1, correction=0),
        "max_logit": value[:, 0],
    }
    if "top_k" in asked:
        right["top_k_ids"] = best[:, : asked["top_k"]]
        right["top_k_logprobs"] = log_p.gather(1, best)[:, : asked["top_k"]]
    if "ids" in asked:
        right["ids_logprobs"] = log_p.gather(1, asked["ids"][rows])
    found = 0.0
    for name, exact in right.items():
        mine = getattr(out, name)
        if mine is not None:
            error = (mine[rows].double() - exact).abs() / exact.abs().clamp_min(1.0)
            found = max(found, float(error.max()) if mine.is_floating_point() else float((error > 0).any()))
    return found


def run(
    case: Case, device: torch.device, repeats: int, commit: str | None, only: list[str] | None = None
) -> list[dict[str, Any]]:
    x = draw(case, device)
    asked_for = contenders(x)
    if only is not None:
        unknown = sorted(set(only) - set(asked_for))
        if unknown:
            raise SystemExit(f"--only: no {unknown[0]!r} among {', '.join(asked_for)}")
        asked_for = {name: asked for name, asked in asked_for.items() if name in ("nothing", *only)}
    forward = torch.no_grad()(ll.logprobs)

    def from_hidden(asked: dict[str, Any]) -> ll.TokenStats:
        return forward(ll.Logits(x.hidden, x.weight), x.target, **asked)

    timed: dict[str, Callable[[], object]] = {"plain torch, topk(20)": lambda: x.logits.topk(20)}
    lines: dict[str, dict[str, Any]] = {"plain torch, topk(20)": {}}
    for name, asked in asked_for.items():
        peak = peak_bytes(lambda asked=asked: from_hidden(asked), device)
        lines[name] = {"error": worst(x, asked), "forward_peak_bytes": peak}
        timed[f"{name}, hidden"] = lambda asked=asked: from_hidden(asked)
        timed[f"{name}, logits"] = lambda asked=asked: forward(x.logits, x.target, **asked)
        timed[f"{name}, step"] = lambda asked=asked: step(x, asked)
    laps = {name: statistics.median(found) for name, found in interleaved(timed, x.hidden, x.weight, repeats).items()}
    for name, line in lines.items():
        line |= {
            f"{kind}_ms": laps[f"{name}, {kind}"] for kind in ("hidden", "logits", "step") if f"{name}, {kind}" in laps
        }
        if name in laps:
            line["logits_ms"] = laps[name]
    where = asdict(Environment.here(device, commit))
    return [
        {"case": asdict(case), "asked": name, **line, "repeats": repeats, "environment": where}
        for name, line in lines.items()
    ]


def table(lines: list[dict[str, Any]]) -> str:
    rows = []
    for line in lines:
        cells = [f"{line[f'{kind}_ms']:.2f}" if f"{kind}_ms" in line else "" for kind in ("hidden", "step", "logits")]
        peak = format_bytes(line["forward_peak_bytes"]) if "forward_peak_bytes" in line else ""
        rows.append((line["asked"], *cells, peak, f"{line['error']:.1e}" if "error" in line else ""))
    names = ("asked for", "from hidden ms", "and backward ms", "from logits ms", "forward peak", "error")
    return text_table(names, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to append records to")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit")
    parser.add_argument("--only", action="append", metavar="NAME", help="this one beside 'nothing'; may be repeated")
    options = parser.parse_args()
    lines = run(CASES[options.device], torch.device(options.device), options.repeats, options.commit, options.only)
    if options.out is not None:
        with options.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    sys.stdout.write(table(lines) + "\n")


if __name__ == "__main__":
    main()
