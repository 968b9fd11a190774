"""Products that end in a softmax beside the bare product, over hidden sizes and configurations.

    python benchmarks/epilogues.py
    python benchmarks/epilogues.py --hidden 1024 --only turns "s3$"

Each number is a multiple of the bare bfloat16 product in the same run, which the library makes in slabs of columns: the
statistic's kernel alone, the same with its merge, dZ slab by slab, exponentials of all rows, and dZ over those, which
multiplies nothing. Beside them the errors to float64 of 64 rows: of log-probs, and relative ones of dZ and of
exponentials. What a configuration cannot have, for want of shared memory say, is reported and left out. At the end,
whether a row has the same bits in every batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from logitless.backends.contract import Problem, Product
from logitless.backends.triton import products
from logitless.product_table import ProductSizes, product_sizes, tiles_per_part
from logitless.softmax import Coefficients, Normaliser, Statistic, coefficients, normaliser

TOKENS, VOCAB, SLAB, SAMPLED, REPEATS = 16384, 151936, 8448, 64, 5
KERNELS = ("statistic", "merged", "gradient", "exponentials", "dZ from them")

Step = Callable[[], object]


def configurations() -> dict[str, ProductSizes]:
    """What is tried, by name: the sizes in use first."""

    def sizes(rows: int, columns: int, depth: int, **more: int | bool) -> ProductSizes:
        return ProductSizes(rows, columns, depth, tiles_per_part(-(-VOCAB // columns)))._replace(**more)

    def turns(rows: int, columns: int, **more: int) -> ProductSizes:
        tiles = tiles_per_part(-(-VOCAB // 256))
        return ProductSizes(rows, columns, 64, tiles, warps=4, stages=5, turns=True)._replace(**more)

    return {
        "128x256x64 w8 s3": sizes(128, 256, 64),
        "128x256x64 w8 s3, not flattened": sizes(128, 256, 64, flatten=False),
        "128x256x64 w8 s3, band 8": sizes(128, 256, 64, band=8),
        "128x256x64 w8 s3, 18 tiles": sizes(128, 256, 64, tiles=18),
        "256x128x64 w8 s3": sizes(256, 128, 64, band=8),
        "128x128x64 w4 s3, two": sizes(128, 128, 64, warps=4, residents=2),
        "128x128x64 by turns": turns(128, 128),
        "128x128x64 by turns, band 8": turns(128, 128, band=8),
        "128x128x64 by turns, band 32": turns(128, 128, band=32),
        "128x128x64 by turns, 18 tiles": turns(128, 128, tiles=18),
        "64x256x64 by turns, s4": turns(64, 256, stages=4),
    }


class Case:
    """Tensors of one hidden size, and what is timed on them."""

    def __init__(self, hidden: int) -> None:
        device, dtype = torch.device("cuda"), torch.bfloat16
        self.x = torch.randn(TOKENS, hidden, device=device).to(dtype)
        self.w = (2 * torch.randn(VOCAB, hidden, device=device) / hidden**0.5).to(dtype)
        column = torch.randint(VOCAB, (TOKENS,), device=device)
        self.p = Product(self.x, self.w, None, column, torch.full((TOKENS,), 1.25, device=device))
        self.values = torch.empty(TOKENS, VOCAB, device=device, dtype=dtype)
        self.d_z = torch.empty(TOKENS, SLAB, device=device, dtype=dtype)
        self.references = torch.empty(-(-VOCAB // 64), TOKENS, device=device)
        self.upstream = torch.randn(2, TOKENS, device=device)
        self.norm, self.coef = self.terms(products.statistics(self.p))

    def terms(self, lines: Tensor) -> tuple[Normaliser, Coefficients]:
        row = Statistic.of(lines)
        norm = normaliser(row)
        logprob = row.t - norm.reference - norm.log_sum
        return norm, coefficients(logprob, norm, row.w / row.s, *self.upstream.to(logprob), None)

    def bare(self) -> None:
        for c in range(0, VOCAB, SLAB):
            part = self.w[c : c + SLAB]
            torch.mm(self.x, part.T, out=self.d_z[:, : len(part)])

    def gradient(self, p: Product, sizes: ProductSizes, slabs: int | None = None) -> None:
        norm, coef = self.norm.cut(slice(p.rows)), self.coef.cut(slice(p.rows))
        for c in range(0, VOCAB, SLAB)[:slabs]:
            part = dataclasses.replace(p, weight=self.w[c : c + SLAB], first=c)
            products.gradient(part, norm, coef, self.d_z[: p.rows, : part.columns], sizes)

    def references_of(self, p: Product, sizes: ProductSizes) -> Tensor:
        tiles = -(-VOCAB // sizes.columns)
        return self.references.view(-1)[: tiles * p.rows].view(tiles, p.rows)

    def exponentials(self, p: Product, sizes: ProductSizes) -> Tensor:
        references = self.references_of(p, sizes)
        products.statistic_parts(p, sizes, self.values[: p.rows], references)
        return references

    def gradient_from(self, p: Product, sizes: ProductSizes) -> None:
        """Over whatever is in the place of the exponentials: what it takes does not depend on that."""
        norm, coef, values = self.norm.cut(slice(p.rows)), self.coef.cut(slice(p.rows)), self.values[: p.rows]
        problem = Problem(values, None, p.column, p.gain, 0.0, VOCAB, entropy=True, memory=0)
        products.gradient_from(problem, self.references_of(p, sizes), sizes.columns, norm, coef, values)

    def steps(self, p: Product, sizes: ProductSizes) -> dict[str, Step]:
        return {
            "statistic": lambda: products.statistic_parts(p, sizes),
            "merged": lambda: products.statistics(p, sizes=sizes),
            "gradient": lambda: self.gradient(p, sizes),
            "exponentials": lambda: self.exponentials(p, sizes),
            "dZ from them": lambda: self.gradient_from(p, sizes),
        }

    def some(self, rows: slice) -> Product:
        cut = {name: getattr(self.p, name)[rows] for name in ("hidden", "column", "gain")}
        return dataclasses.replace(self.p, **cut)


def runnable(case: Case, sizes: ProductSizes) -> dict[str, str]:
    """Compile and run each kernel once on few rows: why not, for those that cannot run."""
    from triton import TritonError

    refused, p = {}, case.some(slice(300))
    for name, step in case.steps(p, sizes).items():
        try:
            step()
            torch.cuda.synchronize()
        except TritonError as error:
            refused[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    return refused


def milliseconds(steps: dict[str, Step], repeats: int = REPEATS, heated: int = 16) -> dict[str, float]:
    """Medians, in a random order every time, each after so many products that keep the chip warm."""
    heat = torch.randn(8192, 8192, device="cuda").bfloat16()
    laps: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name in random.sample(list(steps), len(steps)):
            for _ in range(heated):
                torch.mm(heat, heat)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            steps[name]()
            end.record()
            end.synchronize()
            laps[name].append(begin.elapsed_time(end))
    return {name: statistics.median(times) for name, times in laps.items()}


class Truth:
    """Log-probs of some rows in float64; z, dZ and exponentials of their first slab."""

    def __init__(self, case: Case) -> None:
        self.case, p = case, case.p
        self.rows = torch.randperm(TOKENS, device="cuda")[:SAMPLED]
        x, gain = p.hidden[self.rows].double(), p.gain[self.rows].double()[:, None]
        z = torch.cat([x @ case.w[c : c + SLAB].double().T for c in range(0, VOCAB, SLAB)], 1) * gain
        log_p = torch.log_softmax(z, 1)
        target = p.column[self.rows]
        self.logprob = log_p.gather(1, target[:, None]).squeeze(1)
        entropy = -(log_p.exp() * log_p).sum(1, keepdim=True)
        by_logprob, by_entropy = case.upstream[:, self.rows].double()[:, :, None]
        at = torch.arange(VOCAB, device="cuda") == target[:, None]
        d_z = by_logprob * (at.double() - log_p.exp()) - by_entropy * log_p.exp() * (log_p + entropy)
        self.z, self.d_z, self.at = z[:, :SLAB], (d_z * gain)[:, :SLAB], at[:, :SLAB]

    def errors(self, sizes: ProductSizes, refused: dict[str, str]) -> str:
        """Of a configuration's log-probs, dZ and exponentials."""
        case, found = self.case, []
        if "merged" not in refused:
            row = Statistic.of(products.statistics(case.p, sizes=sizes)[:, self.rows].double())
            found.append(f"log-prob {(row.t - row.m - row.s.log() - self.logprob).abs().max():.1e}")
        if "gradient" not in refused:
            case.gradient(case.p, sizes, slabs=1)
            found.append(f"dZ {(case.d_z[self.rows].double() - self.d_z).norm() / self.d_z.norm():.1e}")
        if "exponentials" not in refused:
            references = case.exponentials(case.p, sizes)[:, self.rows].double()
            base = references.repeat_interleave(sizes.columns, 0)[:SLAB].T
            wanted = (self.z - base).exp().masked_fill(self.at, 0.0)
            error = (case.values[self.rows, :SLAB].double() - wanted).norm() / wanted.norm()
            found.append(f"e {error:.1e}")
        return ", ".join(found)


def same_bits(case: Case, sizes: ProductSizes) -> bool:
    """Parts, statistic and dZ of rows in batches of one row up to all but one, from several starts."""
    parts, stats = products.statistic_parts(case.p, sizes), products.statistics(case.p, sizes=sizes)
    case.gradient(case.p, sizes, slabs=1)
    d_z, same = case.d_z.clone(), True
    for start, count in ((0, 1), (5, 1), (100, 3), (7, 17), (1000, 130), (333, 1025), (3, 8192), (1, TOKENS - 1)):
        rows = slice(start, start + count)
        some = case.some(rows)
        # NaN, where a part does not hold the target, is not equal to itself.
        same &= torch.equal(products.statistic_parts(some, sizes).nan_to_num(9.0), parts[:, :, rows].nan_to_num(9.0))
        same &= torch.equal(products.statistics(some, sizes=sizes), stats[:, rows])
        first, out = dataclasses.replace(some, weight=case.w[:SLAB]), case.d_z[:count]
        products.gradient(first, case.norm.cut(rows), case.coef.cut(rows), out, sizes)
        same &= torch.equal(out, d_z[rows])
    return same


def report(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def measure(hidden: int, tried: dict[str, ProductSizes]) -> None:
    case = Case(hidden)
    with ThreadPoolExecutor(12, initializer=lambda: torch.ones(1, device="cuda").item()) as threads:
        refused = dict(zip(tried, threads.map(lambda sizes: runnable(case, sizes), tried.values()), strict=True))
    steps: dict[str, Step] = {"bare": case.bare}
    for name, sizes in tried.items():
        for kernel, step in case.steps(case.p, sizes).items():
            if kernel not in refused[name]:
                steps[f"{name} {kernel}"] = step
    case.bare()
    times, truth = milliseconds(steps), Truth(case)
    report(f"\nT={TOKENS} V={VOCAB} D={hidden}: bare product {times['bare']:.2f} ms; multiples of it, and errors")
    report(f"{'':40}" + "".join(f"{kernel:>14}" for kernel in KERNELS))
    for name, sizes in tried.items():
        ratios = (times.get(f"{name} {kernel}", float("nan")) / times["bare"] for kernel in KERNELS)
        report(
            f"{name:40}" + "".join(f"{ratio:14.3f}" for ratio in ratios) + f"   {truth.errors(sizes, refused[name])}"
        )
        for kernel, reason in refused[name].items():
            report(f"{'':40}{kernel}: {reason}")
    same = {turns: same_bits(case, product_sizes(VOCAB, hidden, turns=turns)) for turns in (False, True)}
    report(f"same bits in every batch: {same[False]}; by turns: {same[True]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096, 2048, 1024])
    parser.add_argument("--only", nargs="+", default=[""], help="patterns of configurations")
    arguments = parser.parse_args()
    begin = time.monotonic()
    tried = {name: x for name, x in configurations().items() if any(re.search(y, name) for y in arguments.only)}
    report(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for hidden in arguments.hidden:
        measure(hidden, tried)
        torch.cuda.empty_cache()
    report(f"\n{time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
