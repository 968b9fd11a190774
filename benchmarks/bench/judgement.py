"""When a provider counts as wrong: off by more than these tolerances, it gets no time."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.bench.cases import Case
from benchmarks.bench.measure import Errors, Truth
from benchmarks.bench.providers import Scores

# Wrong means clearly wrong: the float32 sums of plain torch itself are off by up to 3e-5 on CPU, and count as right.
VALUE_TOLERANCE = 1e-4
# Half precision rounds up to three times on the way: the upstream gradient, an intermediate and the result.
GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# For providers that sum up hundreds of parts in half precision.
ROUNDED_TOLERANCE = 0.1
# For those providers in a clipped loss: a log-prob from a half-precision logit can carry a row across a bound of the
# ratio. The table shows how far off that makes the gradient; only nonsense is refused.
ROUNDED_LOSS_TOLERANCE = 0.5
# Error of float32 sums of half-precision products on tensor cores, relative to the largest sum.
TENSOR_CORE = 2.0**-16


def complaint_of(errors: Errors, scores: Scores, truth: Truth, case: Case, rounds: bool) -> str:
    """What is wrong with a provider's numbers; empty if nothing is.

    Results in half precision are held to the rounding of their dtype. A provider that rounds the logits is held to the
    rounding of the largest one, and may lose the small gradients of ``weight_rest``.
    """
    slack = torch.finfo(case.torch_dtype).eps * truth.largest if rounds else 0.0
    gradient = max(GRADIENT_TOLERANCE[dtype] for dtype in (case.torch_dtype, scores.logprob.dtype))
    if case.hidden is not None and case.torch_dtype != torch.float32:
        slack = max(slack, TENSOR_CORE * truth.largest)
    if rounds and case.torch_dtype != torch.float32:
        gradient = ROUNDED_LOSS_TOLERANCE if case.loss else ROUNDED_TOLERANCE
    checks = [
        ("log-prob", errors.logprob, max(slack, _allowed(scores.logprob, truth.logprob))),
        ("entropy", errors.entropy, max(slack, _allowed(scores.entropy, truth.entropy))),
        ("gradient", errors.gradient, gradient),
        ("weight's gradient", errors.weight, gradient),
        ("weight's gradient at no target", None if rounds else errors.weight_rest, gradient),
    ]
    # Written so that NaN, which is not below anything, is wrong.
    wrong = [(what, off, limit) for what, off, limit in checks if off is not None and not off <= limit]
    return ", ".join(f"{what} is off by {off:.1e}, allowed {limit:.1e}" for what, off, limit in wrong)


def _allowed(result: Tensor | None, truth: Tensor) -> float:
    if result is None or result.dtype == torch.float32:
        return VALUE_TOLERANCE
    return torch.finfo(result.dtype).eps * float(truth.abs().amax())
