"""``logitless tune``: what products cost on this card, and the steps that they end in. Calls choose their route by it.

    logitless tune  ->  a file  ->  LOGITLESS_MACHINE=file, the same on every rank

One card was measured for this library (``machine.H200``). Elsewhere products that end in a softmax are not chosen, and
costs are that card's. A table says what holds here; nothing is ever measured while a model trains.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.backends import load
from logitless.backends.contract import Problem, Product
from logitless.backends.triton import products
from logitless.errors import LogitlessError
from logitless.machine import ALIGNED, H200, by_turns, multiprocessors
from logitless.product_table import product_sizes
from logitless.softmax import Coefficients, Normaliser
from logitless.sources.gemm import multiply
from logitless.tools.stopwatch import StopWatch, copy_bandwidth

Report = Callable[[str], None]

ENDS = {
    "statistic": "product that ends in the statistic",
    "gradient": "product that ends in dZ",
    "exponentials": "product that ends in exponentials",
    "turns": "product by turns",
}
"""The names of steps, by the field of :class:`~logitless.machine.Costs` that each measures."""


class Sizes(NamedTuple):
    """Sizes of the products that are timed: rows, columns, hidden size, and rows of a chunk whose product is added."""

    rows: int = 8192
    columns: int = 33792
    width: int = 2048
    chunk: int = 1024
    repeats: int = 15


def num_steps(device: torch.device) -> int:
    """How many products :func:`measure` times."""
    return 8 + by_turns(device)


def measure(device: torch.device, sizes: Sizes | None = None, report: Report = lambda what: None) -> dict[str, Any]:
    """The table of a device, as :func:`write` has it."""
    case = _Case(device, sizes or Sizes())
    ms, refused = {}, None
    for name, step in case.apart().items():
        report(name)
        ms[name] = case.milliseconds(step)
    for name, step in case.epilogues().items():
        report(name)
        refused = refused or products.refusal(step)
        if refused is None:
            ms[name] = case.milliseconds(step)
    return case.table(ms, refused)


class _Case:
    """Tensors, and the steps that are timed on them."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=generator)

        rows, columns, width = sizes[:3]
        self.x, self.w = draw(rows, width).bfloat16(), (draw(columns, width) / width**0.5).bfloat16()
        self.out, self.logits = (torch.empty(rows, columns, device=device, dtype=d) for d in (self.x.dtype, None))
        target, one = torch.arange(rows, device=device) % columns, torch.ones(rows, device=device)
        self.p = Product(self.x, self.w, None, target, one)
        self.turns = by_turns(device)
        self.problem = Problem(self.logits, None, target, one, 0.0, columns, True, 0)
        self.norm, self.coef = Normaliser(0 * one, 10 * one), Coefficients(one, one, one)
        self.references = one.new_empty(-(-columns // ALIGNED), rows)
        self.accumulated = torch.zeros(columns, width, device=device)

    def apart(self) -> dict[str, Callable[[], object]]:
        backend, wide = load("triton"), self.device.type == "cuda"
        dz, x = self.out[: self.sizes.chunk], self.x[: self.sizes.chunk]
        return {
            "product": lambda: torch.mm(self.x, self.w.T, out=self.out),
            "product, float32": lambda: multiply(self.x, self.w.T, self.logits, wide=wide),
            "statistic of logits": lambda: backend.statistics(self.problem),
            "dZ of logits": lambda: backend.gradient(self.problem, self.norm, self.coef, self.out, None),
            "product that is added": lambda: multiply(dz.T, x, self.accumulated, wide=wide, add=True),
        }

    def epilogues(self) -> dict[str, Callable[[], object]]:
        def exponentials(turns: bool) -> Tensor:
            columns = product_sizes(*self.w.shape, turns=turns).columns
            references = self.references[: -(-self.sizes.columns // columns)]
            return products.exponentials(replace(self.p, turns=turns), self.out, references)

        steps: dict[str, Callable[[], object]] = {
            ENDS["statistic"]: lambda: products.statistics(self.p),
            ENDS["gradient"]: lambda: products.gradient(self.p, self.norm, self.coef, self.out),
            ENDS["exponentials"]: lambda: exponentials(False),
        }
        # Not on every card, nor with every Triton.
        return steps | ({ENDS["turns"]: lambda: exponentials(True)} if self.turns else {})

    def milliseconds(self, step: Callable[[], object]) -> float:
        laps = []
        for turn in range(self.sizes.repeats + 2):
            clock = StopWatch(self.device)
            clock.mark()
            step()
            clock.mark()
            if turn > 1:
                laps += clock.laps_ms()
        return statistics.median(laps)

    def table(self, ms: dict[str, float], refused: str | None) -> dict[str, Any]:
        assert H200.costs is not None
        rows, columns, width, chunk, _ = self.sizes
        elements, seconds = rows * columns, {name: 1e-3 * x for name, x in ms.items()}
        flops = 2 * elements * width / seconds["product"]
        more = seconds["product that is added"] - 2 * chunk * columns * width / flops
        ends = {
            field: max(0.0, seconds[name] - seconds["product"]) / elements
            for field, name in ENDS.items()
            if name in seconds
        }
        # By turns no end takes longer than that in exponentials.
        both = (ENDS["turns"], ENDS["turns"]) if self.turns else (ENDS["statistic"], ENDS["gradient"])
        apart = 2 * seconds["product, float32"] + seconds["statistic of logits"] + seconds["dZ of logits"]
        costs = {
            **H200.costs._asdict(),
            "flops": flops,
            "bandwidth": copy_bandwidth(self.device),
            "adding": 8 * columns * width / max(more, 1e-6),
            **ends,
        }
        return {
            "card": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type,
            "multiprocessors": multiprocessors(self.device),
            "epilogues": refused is None and sum(seconds[name] for name in both) < apart,
            "refused": refused,
            "costs": costs,
            "milliseconds": ms,
            "sizes": self.sizes._asdict(),
            "torch": torch.__version__,
        }


def write(table: dict[str, Any], path: Path) -> None:
    """The file that ``LOGITLESS_MACHINE`` names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def require_card(device: torch.device) -> None:
    """Raise unless there is a card to measure."""
    if device.type != "cuda":
        raise LogitlessError(
            f"tune: wanted a CUDA device, and this is {device.type}. A CPU has no table: its route does not depend on "
            f"what products cost."
        )
