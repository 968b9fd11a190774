"""What one order of summation costs, and what it gives: ``bits="canonical"`` beside ``"fast"`` on one GPU.

    python -m benchmarks.canonical --out benchmarks/results/canonical.jsonl

Times are medians of whole calls in one run: from hidden states forward, and forward and backward with the entropy's
gradient, in multiples of one and of four bare products; from float32 and bfloat16 logits in milliseconds. Kernels that
end in order-free sums are timed in several configurations besides.

Bits are the share of log-probs and of entropies that are equal: between logits that the library multiplied and hidden
states, between budgets, between a row alone and in its batch, and between one card and 2 or 4 shards, scored one by one
and merged. Errors are those to float64 of sampled rows. It takes about two minutes.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import logitless as ll
from benchmarks.bench.records import Environment
from logitless.backends import triton as backend
from logitless.backends.contract import Problem, Product
from logitless.backends.triton import products
from logitless.product_table import ProductSizes
from logitless.softmax import Statistic, merge, solved, target_column

TOKENS, VOCAB, SLAB, SAMPLED, ROWS = 16384, 151936, 8448, 64, 2048
BITS = ("fast", "canonical")

CONFIGURATIONS = {
    "256x128x64 w8 s3 band 8": ProductSizes(256, 128, 64, 0, band=8),
    "128x128x64 w4 s3, two": ProductSizes(128, 128, 64, 0, warps=4, residents=2),
    "128x128x64 w4 s3 band 8, two": ProductSizes(128, 128, 64, 0, warps=4, residents=2, band=8),
}


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


def share(a: Tensor, b: Tensor) -> float:
    """Of elements whose bits are equal."""
    return (a.view(torch.int32) == b.view(torch.int32)).double().mean().item()


def shares(one: ll.TokenStats, other: ll.TokenStats) -> dict[str, float]:
    return {name: share(getattr(one, name), getattr(other, name)) for name in ("logprob", "entropy", "log_z")}


class Case:
    """Tensors of one hidden size."""

    def __init__(self, hidden: int) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(TOKENS, hidden, device="cuda").bfloat16()
        self.w = (2 * torch.randn(VOCAB, hidden, device="cuda") / hidden**0.5).bfloat16()
        self.target = torch.randint(VOCAB, (TOKENS,), device="cuda")
        self.up = torch.randn(2, TOKENS, device="cuda")
        self.slab = torch.empty(TOKENS, SLAB, device="cuda", dtype=torch.bfloat16)

    def bare(self, times: int) -> None:
        for _ in range(times):
            for c in range(0, VOCAB, SLAB):
                part = self.w[c : c + SLAB]
                torch.mm(self.x, part.T, out=self.slab[:, : len(part)])

    def forward(self, bits: Any, rows: slice = slice(None), **more: Any) -> ll.TokenStats:
        logits = ll.Logits(self.x[rows], self.w, bits=bits, match=more.pop("match", None))
        return ll.logprobs(logits, self.target[rows], entropy="value", **more)

    def both(self, bits: Any) -> None:
        x, w = self.x.requires_grad_(), self.w.requires_grad_()
        out = ll.logprobs(ll.Logits(x, w, bits=bits), self.target, entropy="grad")
        assert out.entropy is not None
        torch.autograd.grad((out.logprob, out.entropy), (x, w), tuple(self.up))
        self.x, self.w = x.detach(), w.detach()

    def product(self, **more: Any) -> Product:
        return Product(self.x, self.w, None, self.target, torch.ones(TOKENS, device="cuda"), canonical=True, **more)

    def shard(self, bits: str, rows: int, degree: int) -> Tensor:
        """Log-probs and entropies of some rows, from shards scored one by one and merged as ranks do."""
        start, parts, gain = 0, [], torch.ones(rows, device="cuda")
        sizes = [VOCAB // 128 // degree * 128] * (degree - 1)
        for size in [*sizes, VOCAB - sum(sizes)]:
            column = target_column(self.target[:rows], start, size)
            given = (self.x[:rows], self.w[start : start + size], None, column, gain)
            parts.append(products.statistics(Product(*given, canonical=bits == "canonical")))
            start += size
        lines = torch.stack(parts)
        whole = backend.solved(lines, gain) if bits == "canonical" else merge(lines)
        norm, t, _, entropy = solved(whole, True, True)
        assert entropy is not None
        return torch.stack([(t - norm.reference) - norm.log_sum, entropy])


def times(case: Case) -> dict[str, Any]:
    """Of calls from hidden states, and of the kernel in several configurations."""
    for bits in BITS:
        case.forward(bits)
        case.both(bits)
    steps: dict[str, Callable[[], object]] = {"1": lambda: case.bare(1), "4": lambda: case.bare(4)}
    for bits in BITS:
        steps |= {f"forward {bits}": lambda b=bits: case.forward(b), f"both {bits}": lambda b=bits: case.both(b)}
    refused = {}
    for name, sizes in CONFIGURATIONS.items():
        why = products.refusal(lambda s=sizes: products.statistics(case.product(), sizes=s))
        if why is None:
            steps[f"kernel {name}"] = lambda s=sizes: products.statistic_parts(case.product(), s)
            steps[f"merged {name}"] = lambda s=sizes: products.statistics(case.product(), sizes=s)
        else:
            refused[name] = why
    found = milliseconds(steps)
    over = {name: x / found["4" if name.startswith("both") else "1"] for name, x in found.items()}
    return {"milliseconds": found, "over products": over, "refused": refused}


def bits_of(case: Case) -> dict[str, Any]:
    """Shares of equal bits, and errors."""
    rows, found = slice(0, ROWS), {}
    z = torch.mm(case.x[rows], case.w.T, out_dtype=torch.float32)
    rounded = z.bfloat16()
    exact = torch.log_softmax(case.x[:SAMPLED].double() @ case.w.double().T, -1)
    truth = exact.gather(1, case.target[:SAMPLED, None])[:, 0]
    entropies = -(exact.exp() * exact).sum(-1)
    for bits in BITS:
        whole = case.forward(bits)
        some = ll.TokenStats(whole.logprob[rows], *(whole.entropy[rows], whole.log_z[rows]))
        given = {"entropy": "value"}
        logits = ll.logprobs(ll.Logits.given(z, bits=bits), case.target[rows], **given)
        of_head = ll.logprobs(ll.Logits.given(rounded, bits=bits), case.target[rows], **given)
        shards = {str(n): case.shard(bits, ROWS, n) for n in (1, 2, 4)}
        found[bits] = {
            "hidden against logits": shares(some, logits),
            "rounded hidden against bfloat16 logits": shares(case.forward(bits, rows, match="bfloat16"), of_head),
            "budget of 24 MiB": shares(whole, case.forward(bits, memory="24MiB")),
            "257 rows against all": shares(
                case.forward(bits, slice(100, 357)),
                ll.TokenStats(whole.logprob[100:357], *(whole.entropy[100:357], whole.log_z[100:357])),
            ),
            "logits, budget of 1 MiB": shares(
                logits, ll.logprobs(ll.Logits.given(z, bits=bits), case.target[rows], memory="1MiB", **given)
            ),
            **{f"{n} shards": [share(shards["1"][i], shards[str(n)][i]) for i in (0, 1)] for n in (2, 4)},
            "1 shard against the call": [share(shards["1"][0], some.logprob), share(shards["1"][1], some.entropy)],
            "errors": [
                (whole.logprob[:SAMPLED].double() - truth).abs().max().item(),
                (whole.entropy[:SAMPLED].double() - entropies).abs().max().item(),
            ],
        }
    for name, sizes in CONFIGURATIONS.items():
        p = replace(case.product(), hidden=case.x[rows], column=case.target[rows], gain=torch.ones(ROWS, device="cuda"))
        lines = products.statistics(p, sizes=sizes)
        found[f"tile {name} against the default"] = share(lines, products.statistics(p))
    return found


def of_logits(dtype: torch.dtype) -> dict[str, Any]:
    """From logits in memory: milliseconds of forward, and of forward and backward over them."""
    torch.manual_seed(0)
    z = torch.empty(TOKENS, VOCAB, device="cuda", dtype=dtype)
    for row in z.split(1024):
        row.copy_(2 * torch.randn(row.shape, device="cuda"))
    target, up = torch.randint(VOCAB, (TOKENS,), device="cuda"), torch.randn(2, TOKENS, device="cuda")
    gain = torch.ones(TOKENS, device="cuda")
    steps: dict[str, Callable[[], object]] = {}

    def forward(bits: Any) -> None:
        ll.logprobs(ll.Logits.given(z, bits=bits), target, entropy="value")

    def both(bits: Any) -> None:
        x = z.requires_grad_()
        out = ll.logprobs(ll.Logits.given(x, bits=bits), target, entropy="grad")
        torch.autograd.grad((out.logprob, out.entropy), x, tuple(up))
        z.requires_grad_(False)

    def kernel(bits: str) -> Tensor:
        given = (z, None, target, gain, 0.0, VOCAB, True, 16 << 20)
        return backend.statistics(Problem(*given, canonical=bits == "canonical"))

    for bits in BITS:
        steps |= {f"forward {bits}": lambda b=bits: forward(b), f"both {bits}": lambda b=bits: both(b)}
        steps[f"kernel {bits}"] = lambda b=bits: kernel(b)
    for step in steps.values():
        step()
    m = Statistic.of(kernel("fast")).m
    assert torch.equal(m, kernel("canonical")[0])
    return milliseconds(steps)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--commit")
    arguments.add_argument("--hidden", type=int, nargs="*", default=(4096, 2048, 1024))
    given = arguments.parse_args()
    environment = asdict(Environment.here(torch.device("cuda"), given.commit))
    shape = {"tokens": TOKENS, "vocab": VOCAB}
    for hidden in given.hidden:
        case = Case(hidden)
        with torch.no_grad():
            found = {"bits": bits_of(case)}
        found |= times(case)
        show({**shape, "hidden": hidden, **found, "environment": environment}, given.out)
        del case
        gc.collect()
        torch.cuda.empty_cache()
    for dtype in (torch.float32, torch.bfloat16):
        found = {"logits": str(dtype), "milliseconds": of_logits(dtype)}
        show({**shape, **found, "environment": environment}, given.out)
        gc.collect()
        torch.cuda.empty_cache()


def show(record: dict[str, Any], out: Path | None) -> None:
    print(json.dumps({name: x for name, x in record.items() if name != "environment"}, indent=1), flush=True)  # noqa: T201
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
