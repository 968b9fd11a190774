"""Peak memory of a loss step: most bytes alive at once beyond hidden states and head, gradients included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.bench.measure import peak_bytes
from examples.demo.policy import head_of
from examples.demo.steps import LossStep, deferred_step, logitless_step, plain_step, plain_step_of_all_rows
from logitless.rows import Rows

WAYS: dict[str, LossStep] = {
    "plain torch, all rows": plain_step_of_all_rows,
    "plain torch, response rows": plain_step,
    "one line more": deferred_step,
    "policy_loss": logitless_step,
}
FRACTIONS = (0.125, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class PeaksByFraction:
    """Peaks of every way at every response fraction.

    Attributes:
        tokens, vocab: sizes of the batch.
        fractions: parts of the tokens that are response.
        peaks: bytes by way, one number for each fraction.
    """

    tokens: int
    vocab: int
    fractions: tuple[float, ...]
    peaks: dict[str, tuple[int, ...]]


def step_peak(step: LossStep, hidden: Tensor, weight: Tensor, rows: Rows, advantage: Tensor) -> int:
    """Peak bytes of a loss step, forward and backward. A collective if the step is one."""
    hidden, head = hidden.requires_grad_(), head_of(weight)

    def run() -> None:
        loss, _ = step(hidden, head, rows, advantage, None)
        loss.backward()

    peak = peak_bytes(run, "cpu")
    hidden.grad = head.weight.grad = None
    return peak


def peaks_by_fraction(
    report: Callable[[str], None],
    *,
    samples: int = 4,
    length: int = 256,
    vocab: int = 16384,
    width: int = 64,
    fractions: Sequence[float] = FRACTIONS,
) -> PeaksByFraction:
    """Measure every way on random batches of one size with growing responses."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab, (samples, length), generator=generator)
    hidden, weight = (torch.randn(n, width, generator=generator) for n in (samples * length, vocab))
    peaks: dict[str, list[int]] = {name: [] for name in WAYS}
    for fraction in fractions:
        report(f"memory at {fraction:.0%} response")
        # No token predicts the first one.
        response = min(round(fraction * length), length - 1)
        rows = Rows.packed(list(tokens), [response] * samples)
        for name, step in WAYS.items():
            peaks[name].append(step_peak(step, hidden, weight, rows, torch.ones(len(rows))))
    return PeaksByFraction(samples * length, vocab, tuple(fractions), {name: tuple(x) for name, x in peaks.items()})
