"""Two products in one tile beside two bare products, over hidden sizes and configurations.

    python -m benchmarks.pairs
    python -m benchmarks.pairs --hidden 2048 --only joint

Each number is a multiple of two bare bfloat16 products in the same run, which the library makes in slabs of columns: dZ
of three divergences slab by slab, the parts of the reverse KL, the same with what its gradient needs in 16 bits, the
merge of the parts, and dZ from those 16 bits, which multiply nothing.
Beside them errors to float64 of some rows: relative ones of dZ, and of the KL. What a configuration cannot have, for
want of shared memory say, is reported and left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from benchmarks.epilogues import milliseconds
from logitless.backends.contract import Couple, Product
from logitless.backends.divergences import Divergence
from logitless.backends.triton import pairs, products
from logitless.product_table import PairSizes
from logitless.softmax import Coefficients, Normaliser, Statistic

TOKENS, VOCAB, SLAB, SAMPLED, CHUNK = 16384, 151936, 8448, 32, 4096
KINDS = ("reverse_kl", "forward_kl", "jsd")
STEPS = (*(f"dZ {kind}" for kind in KINDS), "sums", "stored", "merge", "dZ from")

Step = Callable[[], object]


def configurations() -> dict[str, PairSizes]:
    """What is tried, by name: the sizes in use first."""
    two, joint = PairSizes(128, 128, 64, band=8), PairSizes(128, 128, 64, joint=True, stages=3)
    small = PairSizes(64, 128, 64, warps=4, stages=3, residents=2)
    return {
        "128x128x64 s4": two,
        "128x128x64 s5": two._replace(stages=5),
        "128x128x64 s6": two._replace(stages=6),
        "128x128x64 s4, band 16": two._replace(band=16),
        "128x128x64 s4, not flattened": two._replace(flatten=False),
        "128x128x64 s3, joint": joint,
        "128x128x32 s5, joint": joint._replace(depth=32, stages=5),
        "64x256x64 s4": two._replace(rows=64, columns=256),
        "256x64x64 s4": two._replace(rows=256, columns=64),
        "64x128x64 w4 s3, two": small,
        "128x64x64 w4 s3, two": small._replace(rows=128, columns=64),
    }


class Case:
    """Tensors of one hidden size, and what is timed on them."""

    def __init__(self, hidden: int) -> None:
        device, dtype = torch.device("cuda"), torch.bfloat16

        def normal(rows: int, scale: float) -> Tensor:
            return (torch.randn(rows, hidden, device=device) * scale).to(dtype)

        column = torch.randint(VOCAB, (TOKENS,), device=device)
        gain = torch.ones(TOKENS, device=device)
        self.x, self.w = normal(TOKENS, 1.0), normal(VOCAB, 2 * hidden**-0.5)
        self.y, self.u = normal(TOKENS, 1.0), normal(VOCAB, 2 * hidden**-0.5)
        student, teacher = (Product(x, w, None, column, gain) for x, w in ((self.x, self.w), (self.y, self.u)))
        self.couple = Couple(student, teacher)
        self.d_z = torch.empty(TOKENS, SLAB, device=device, dtype=dtype)
        self.values = torch.empty(2, CHUNK, VOCAB, device=device, dtype=dtype)
        self.parts = torch.ones(-(-VOCAB // 32) * pairs.LINES * CHUNK, device=device)
        self.lines = torch.empty(pairs.LINES, CHUNK, device=device)
        lines = [Statistic.of(products.statistics(p)) for p in self.couple]
        self.norms = tuple(Normaliser(row.m, row.s.log()) for row in lines)
        (m, log_s), (n, log_q) = self.norms
        self.shift, zero = (n - m) + (log_q - log_s), torch.zeros_like(m)
        self.by, self.mean = torch.randn_like(m), torch.full_like(m, 0.25)
        self.coef = Coefficients(zero, None, zero)

    def bare(self) -> None:
        for p in self.couple:
            for c in range(0, VOCAB, SLAB):
                part = p.weight[c : c + SLAB]
                torch.mm(p.hidden, part.T, out=self.d_z[:, : len(part)])

    def cut(self, rows: slice, columns: slice) -> Couple:
        def some(p: Product) -> Product:
            own = {name: getattr(p, name)[rows] for name in ("hidden", "column", "gain")}
            return dataclasses.replace(p, **own, weight=p.weight[columns], first=columns.start)

        return Couple(some(self.couple.student), some(self.couple.teacher))

    def gradient(self, kind: str, sizes: PairSizes, rows: int = TOKENS, slabs: int | None = None) -> None:
        some = slice(rows)
        norms = (self.norms[0].cut(some), self.norms[1].cut(some))
        row = (self.shift[some], self.mean[some], self.by[some])
        for c in range(0, VOCAB, SLAB)[:slabs]:
            couple = self.cut(some, slice(c, min(c + SLAB, VOCAB)))
            out = self.d_z[some, : couple.student.columns]
            pairs.gradient(couple, norms, Divergence(kind), row, self.coef.cut(some), out, sizes)  # pyright: ignore[reportArgumentType]

    def sums(self, sizes: PairSizes, stored: bool, rows: int = TOKENS) -> Tensor | None:
        """All rows in chunks, the parts of the first."""
        first = None
        for start in range(0, rows, CHUNK):
            couple = self.cut(slice(start, min(start + CHUNK, rows)), slice(0, VOCAB))
            values = self.values[:, : couple.student.rows]
            into = (values[0], values[1]) if stored else None
            parts = pairs.parts(couple, True, None, into, sizes)
            first = parts if first is None else first
        return first

    def merged(self, sizes: PairSizes, rows: int = TOKENS) -> None:
        """Of parts that are there, all rows in chunks; what it takes does not depend on what they hold."""
        for start in range(0, rows, CHUNK):
            couple = self.cut(slice(start, min(start + CHUNK, rows)), slice(0, VOCAB))
            pairs.merge(couple, True, self.parts_of(couple, sizes), self.lines[:, : couple.student.rows])

    def gradient_from(self, sizes: PairSizes, rows: int = TOKENS) -> None:
        """Over whatever is in the place of the 16-bit numbers."""
        for start in range(0, rows, CHUNK):
            some = slice(start, min(start + CHUNK, rows))
            couple, values = self.cut(some, slice(0, VOCAB)), self.values[:, : some.stop - some.start]
            norms, row = (self.norms[0].cut(some), self.norms[1].cut(some)), (self.mean[some], self.by[some])
            stored, parts = (values[0], values[1]), self.parts_of(couple, sizes)
            pairs.gradient_from(couple, parts, stored, norms, True, row, self.coef.cut(some), sizes)

    def parts_of(self, couple: Couple, sizes: PairSizes) -> Tensor:
        tiles, rows = -(-VOCAB // sizes.columns), couple.student.rows
        return self.parts[: tiles * pairs.LINES * rows].view(tiles, pairs.LINES, rows)

    def steps(self, sizes: PairSizes, rows: int = TOKENS) -> dict[str, Step]:
        found: dict[str, Step] = {f"dZ {kind}": lambda kind=kind: self.gradient(kind, sizes, rows) for kind in KINDS}
        for name, stored in (("sums", False), ("stored", True)):
            found[name] = lambda stored=stored: self.sums(sizes, stored, rows)
        found["merge"] = lambda: self.merged(sizes, rows)
        found["dZ from"] = lambda: self.gradient_from(sizes, rows)
        return found


def runnable(case: Case, sizes: PairSizes) -> dict[str, str]:
    """Compile and run each kernel once on few rows: why not, for those that cannot run."""
    refused = {}
    for name, step in case.steps(sizes, 300).items():
        reason = products.refusal(lambda step=step: (step(), torch.cuda.synchronize()))
        if reason is not None:
            refused[name] = reason[:120]
    return refused


def errors(case: Case, sizes: PairSizes, refused: dict[str, str]) -> str:
    """Of dZ in the first slab, and of the reverse KL by its parts."""
    some = torch.arange(SAMPLED, device="cuda")
    log_p, log_q = ((p.hidden[some].double() @ p.weight.double().T).log_softmax(1) for p in case.couple)
    found = []
    if "dZ reverse_kl" not in refused:
        case.gradient("reverse_kl", sizes, SAMPLED, slabs=1)
        slope = (log_p - log_q) - case.mean[some].double()[:, None]
        wanted = (case.by[some].double()[:, None] * log_p.exp() * slope)[:, :SLAB]
        found.append(f"dZ {(case.d_z[some].double() - wanted).norm() / wanted.norm():.1e}")
    if "sums" not in refused:
        parts = case.sums(sizes, False, SAMPLED)
        assert parts is not None
        m, s, n, q, linear = parts[:, [0, 1, 4, 5, 9]].double().unbind(1)
        top, other = m.amax(0), n.amax(0)
        f, g = (m - top).exp(), (n - other).exp()
        delta = (n - m) - (other - top)
        whole, sum_l = (f * s).sum(0), (f * (linear + delta * s)).sum(0)
        kl = ((g * q).sum(0) / whole).log() - sum_l / whole
        truth = (log_p.exp() * (log_p - log_q)).sum(1)
        found.append(f"KL {((kl - truth) / truth).abs().max():.1e}")
    return ", ".join(found)


def report(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def measure(hidden: int, tried: dict[str, PairSizes], repeats: int) -> None:
    begin = time.monotonic()
    case = Case(hidden)
    with ThreadPoolExecutor(14, initializer=lambda: torch.ones(1, device="cuda").item()) as threads:
        refused = dict(zip(tried, threads.map(lambda sizes: runnable(case, sizes), tried.values()), strict=True))
    report(f"\ncompiled in {time.monotonic() - begin:.0f} s")
    steps: dict[str, Step] = {"bare": case.bare}
    for name, sizes in tried.items():
        for kernel, step in case.steps(sizes).items():
            if kernel not in refused[name]:
                steps[f"{name} {kernel}"] = step
    case.bare()
    times = milliseconds(steps, repeats, heated=8)
    report(f"T={TOKENS} V={VOCAB} D={hidden}: two bare products {times['bare']:.2f} ms; multiples of them, and errors")
    report(f"{'':30}" + "".join(f"{step:>15}" for step in STEPS))
    for name, sizes in tried.items():
        ratios = (times.get(f"{name} {step}", float("nan")) / times["bare"] for step in STEPS)
        report(f"{name:30}" + "".join(f"{x:15.3f}" for x in ratios) + f"   {errors(case, sizes, refused[name])}")
        for step, reason in refused[name].items():
            report(f"{'':30}{step}: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096, 2048])
    parser.add_argument("--only", default="", help="configurations whose name has this in it")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    begin = time.monotonic()
    tried = {name: sizes for name, sizes in configurations().items() if arguments.only in name}
    report(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for hidden in arguments.hidden:
        measure(hidden, tried, arguments.repeats)
        torch.cuda.empty_cache()
    report(f"\n{time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
