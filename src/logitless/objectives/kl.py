"""Estimates of KL(policy || reference) from the sampled tokens alone. With d = log pi - log pi_ref:

    k1     d                      unbiased, may be negative; its gradient as a loss is 0 on average
    abs    |d|
    k2     d^2 / 2                biased value, unbiased gradient
    k3     exp(-d) - 1 + d        unbiased, never negative, little variance

``NAME_straight_through`` has the value of its estimator and the gradient of k2. ``NAME_weighted`` is multiplied by
pi / pi_old, with gradient through it, which makes value and gradient unbiased for tokens sampled from an older policy.
Schulman 2020 for k1, k2, k3; DeepSeek-V3.2 for the weighted form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.errors.arguments import FLOATS, real_numbers
from logitless.objectives.inputs import LARGEST_LOG_RATIO, Inputs, bounded_exp


def k1(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """``log pi - log pi_ref``."""
    return logprob - ref_logprob


def k1_abs(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """``|log pi - log pi_ref|``."""
    return (logprob - ref_logprob).abs()


def k2(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """Half the square of the difference."""
    return 0.5 * (logprob - ref_logprob).square()


def k3(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """``exp(-d) - 1 + d``, for differences up to 20 either way; beyond, constant."""
    return k3_of(logprob - ref_logprob)


def k3_of(difference: Tensor) -> Tensor:
    """The same of differences."""
    d = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    # For small d the value is about d^2 / 2, of which exp(-d) - 1 would round most digits away.
    return torch.expm1(-d) + d


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "abs": k1_abs, "k2": k2, "k3": k3}


def straight_through(estimator: Callable[[Tensor, Tensor], Tensor], logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """The value of an estimator with the gradient of k2."""
    gradient = k2(logprob, ref_logprob)
    return estimator(logprob.detach(), ref_logprob) + (gradient - gradient.detach())


class KLTerm(NamedTuple):
    """A named KL term: its estimator, and which of the two forms above."""

    estimator: Callable[[Tensor, Tensor], Tensor]
    straight: bool = False
    weighted: bool = False


KL_TERMS = {
    **{name: KLTerm(f) for name, f in ESTIMATORS.items()},
    **{f"{name}_straight_through": KLTerm(f, straight=True) for name, f in ESTIMATORS.items() if name != "k2"},
    **{f"{name}_weighted": KLTerm(f, weighted=True) for name, f in ESTIMATORS.items()},
}


def kl_rows(term: KLTerm, inputs: Inputs) -> Tensor:
    """``[C]`` KL of each row against ``ref_logprob``."""
    if term.straight:
        return straight_through(term.estimator, inputs.logprob, inputs.ref_logprob)
    value = term.estimator(inputs.logprob, inputs.ref_logprob)
    return value * bounded_exp(inputs.log_ratio) if term.weighted else value


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kind: str = "k1") -> Tensor:
    """KL of each token as a penalty to subtract from rewards, times a coefficient. Carries no gradient.

    Args:
        logprob, ref_logprob: of one shape.
        kind: ``"k1"``, ``"abs"``, ``"k2"`` or ``"k3"``.

    >>> kl_penalty(torch.tensor([-1.0]), torch.tensor([-1.5]), "k2")
    tensor([0.1250])
    """
    if not isinstance(kind, str) or kind not in ESTIMATORS:
        raise LogitlessError(
            f"kl_penalty: kind must be one of {', '.join(ESTIMATORS)} but is {kind!r}. The straight-through and "
            f"weighted forms differ in their gradient, which a penalty has not."
        )
    shape = tuple(real_numbers(logprob, "kl_penalty: logprob", dtypes=FLOATS).shape)
    real_numbers(ref_logprob, "kl_penalty: ref_logprob", shape, "log-prob", logprob.device)
    return ESTIMATORS[kind](logprob.detach(), ref_logprob.detach())
