"""What a float32 head costs above hidden states in bfloat16 and in float32, and how exact it is.

    python -m benchmarks.float32_head --out benchmarks/results/float32-head.jsonl

    bfloat16    hidden states in bfloat16, the weight rounded to it: what people settle for
    two parts   hidden states in bfloat16, the float32 weight as two bfloat16 parts
    bfloat16x3  both in float32, as ``precision=`` says: two bfloat16 parts of each, three products of these
    tf32        both in float32, products in TF32
    float32     both in float32, IEEE products

Times are medians in one run, in multiples of bare bfloat16 products: 1 forward, 4 forward and backward (logits, logits
again, two gradients). Errors are those to float64 products of the float32 weight with the same hidden states: the
largest of sampled log-probs, and norms relative to the gradients'. Peaks are bytes beyond the operands, gradients
included. It takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

import logitless as ll
from benchmarks.bench.measure import peak_bytes
from benchmarks.bench.records import Environment
from logitless.operands.stands import Precision

TOKENS, VOCAB, SLAB, SAMPLED = 16384, 151936, 8448, 64
WAYS = ("bfloat16", "two parts", "bfloat16x3", "tf32", "float32")


class Case:
    """Tensors of one hidden size."""

    def __init__(self, hidden: int) -> None:
        torch.manual_seed(0)
        self.wide = torch.randn(TOKENS, hidden, device="cuda")
        self.x = self.wide.bfloat16()
        self.w = 2 * torch.randn(VOCAB, hidden, device="cuda") / hidden**0.5
        self.narrow = self.w.bfloat16()
        self.target = torch.randint(VOCAB, (TOKENS,), device="cuda")
        self.up = torch.randn(TOKENS, device="cuda") / TOKENS
        self.slab = torch.empty(TOKENS, SLAB, device="cuda", dtype=torch.bfloat16)

    def bare(self) -> None:
        for c in range(0, VOCAB, SLAB):
            part = self.narrow[c : c + SLAB]
            torch.mm(self.x, part.T, out=self.slab[:, : len(part)])

    def operands(self, way: str) -> tuple[Tensor, Tensor]:
        x = self.wide if way in get_args(Precision) else self.x
        return x, self.narrow if way == "bfloat16" else self.w

    def logprob(self, way: str, x: Tensor, w: Tensor) -> Tensor:
        precision = way if way in get_args(Precision) else "float32"
        return ll.logprobs(ll.Logits(x, w, precision=precision), self.target).logprob

    def forward(self, way: str) -> Tensor:
        return self.logprob(way, *self.operands(way))

    def both(self, way: str) -> tuple[Tensor, ...]:
        x, w = (x.detach().requires_grad_() for x in self.operands(way))
        return torch.autograd.grad(self.logprob(way, x, w), (x, w), self.up)

    def truth(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs, and gradients of the hidden states, of sampled rows in float64."""
        x = hidden[:SAMPLED].double().requires_grad_()
        log_p = (x @ self.w.double().T).log_softmax(-1).gather(1, self.target[:SAMPLED, None])[:, 0]
        (gradient,) = torch.autograd.grad(log_p, x, self.up[:SAMPLED].double())
        return log_p.detach(), gradient

    def weight_gradient(self, hidden: Tensor, rows: int = 2048) -> Tensor:
        """Of the first rows of the weight, in float64."""
        total = torch.zeros(rows, hidden.shape[1], device="cuda", dtype=torch.float64)
        for start in range(0, TOKENS, 1024):
            x = hidden[start : start + 1024].double()
            z = x @ self.w.double().T
            p = (z[:, :rows] - z.logsumexp(-1, keepdim=True)).exp()
            target = self.target[start : start + 1024]
            hit = (target[:, None] == torch.arange(rows, device="cuda")).double()
            total += ((hit - p) * self.up[start : start + 1024, None]).T @ x
        return total


def milliseconds(steps: dict[str, Callable[[], object]], repeats: int = 5) -> dict[str, float]:
    """Medians, in a random order every time, each after products that keep the chip warm."""
    heat = torch.randn(8192, 8192, device="cuda").bfloat16()
    laps: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name in random.sample(list(steps), len(steps)):
            for _ in range(8):
                torch.mm(heat, heat)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            steps[name]()
            end.record()
            end.synchronize()
            laps[name].append(begin.elapsed_time(end))
    return {name: statistics.median(x) for name, x in laps.items()}


def measured(hidden: int) -> list[dict[str, Any]]:
    case = Case(hidden)
    truths = {
        x.dtype: (*case.truth(x), case.weight_gradient(x) if hidden <= 2048 else None) for x in (case.x, case.wide)
    }
    found: dict[str, dict[str, Any]] = {way: {"hidden_size": hidden, "way": way} for way in WAYS}
    for way in WAYS:
        gradients = case.both(way)
        truth, d_hidden, d_weight = truths[gradients[0].dtype]
        off = (gradients[0][:SAMPLED].double() - d_hidden).norm() / d_hidden.norm()
        found[way] |= {
            "logprob_error": (case.forward(way)[:SAMPLED].double() - truth).abs().max().item(),
            "hidden_gradient_error": off.item(),
        }
        if d_weight is not None:
            off = (gradients[1][: len(d_weight)].double() - d_weight).norm() / d_weight.norm()
            found[way]["weight_gradient_error"] = off.item()
        del gradients
        found[way]["peak_bytes"] = peak_bytes(lambda way=way: case.both(way), "cuda")
    forward = milliseconds({"bare": case.bare, **{way: lambda way=way: case.forward(way) for way in WAYS}})
    both = milliseconds({way: lambda way=way: case.both(way) for way in WAYS}, 3)
    for way in WAYS:
        found[way] |= {"forward_ms": forward[way], "both_ms": both[way], "product_ms": forward["bare"]}
    return list(found.values())


def line(record: dict[str, Any]) -> str:
    one, errors = record["product_ms"], [x for name, x in record.items() if name.endswith("_error")]
    return (
        f"D={record['hidden_size']} {record['way']:10s} forward {record['forward_ms'] / one:6.2f} of 1, both "
        f"{record['both_ms'] / one:6.2f} of 4, errors {', '.join(f'{x:.1e}' for x in errors)}, "
        f"peak {record['peak_bytes'] / 2**30:.2f} GiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096, 2048, 1024])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="commit to record where the code has no git history")
    options = parser.parse_args()
    where = asdict(Environment.here(torch.device("cuda"), options.commit))
    for hidden in options.hidden:
        for record in measured(hidden):
            sys.stdout.write(line(record) + "\n")
            sys.stdout.flush()
            if options.out is not None:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(
                        json.dumps({**record, "tokens": TOKENS, "vocabulary": VOCAB, "environment": where}) + "\n"
                    )
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
