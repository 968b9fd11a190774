"""Predicted against measured peaks: the same step, once through ``estimate`` and once through the allocator.

case = PeakCase("frozen", {"path": "hidden", "tokens": 16384, ..., "needs_grad": ("hidden",)})
print(table([compare(case, torch.device("cuda"))]))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from benchmarks.bench.measure import peak_bytes
from benchmarks.bench.sized_steps import SizedStep
from logitless.memory import Estimate
from logitless.spec import VocabShard, format_bytes
from logitless.tools.outputs import text_table


@dataclass(frozen=True)
class PeakCase:
    """Sizes and options of a :class:`SizedStep`, under a name."""

    name: str
    options: dict[str, Any]

    def predicted(self, device: torch.device) -> Estimate:
        return SizedStep(**self.options).predicted("cuda" if device.type == "cuda" else "cpu")


class Compared(NamedTuple):
    """Bytes of forward alone and of the whole step, predicted and measured."""

    name: str
    forward: int
    measured_forward: int
    step: int
    measured_step: int

    @property
    def error(self) -> float:
        """The larger of the two relative errors."""
        pairs = ((self.forward, self.measured_forward), (self.step, self.measured_step))
        return max(abs(predicted - measured) / max(1, measured) for predicted, measured in pairs)


def compare(case: PeakCase, device: torch.device, group: Any = None) -> Compared:
    """Run a case once to warm up (workspaces, compiled kernels), then measure forward and the whole step."""
    predicted, asked = case.predicted(device), SizedStep(**case.options)
    shard = None if group is None else VocabShard.even(asked.vocab, group)
    running = asked.on(device, shard)

    def step() -> None:
        running.backward(running.forward())

    if device.type != "cpu":
        step()
    measured = peak_bytes(running.forward, device), peak_bytes(step, device)
    return Compared(case.name, predicted.forward_peak, measured[0], predicted.peak, measured[1])


def table(results: Iterable[Compared]) -> str:
    """One line per case."""
    rows = [(r.name, *map(format_bytes, r[1:]), f"{r.error:.2%}") for r in results]
    return text_table(("case", "forward", "measured", "step", "measured", "error"), rows)
