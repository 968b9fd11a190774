"""Policy terms: one loss per row from log-ratios and advantages. Plain functions, and a dictionary of them by name.

With r = pi / pi_old the probability ratio of a token and A its advantage:

    ppo_clip    max(-A r, -A clip(r, 1 - low, 1 + high)), at most -A c where A < 0 (dual clip)
    gspo        the same with s, the geometric mean of r over the sample, in place of r
    cispo       -A log pi * constant(clip(r, 1 - low, 1 + high))
    sapo        -A (4 / tau) sigmoid(tau (r - 1)), tau one number where A > 0 and another elsewhere
    reinforce   -A log pi
    cross_entropy   -w log pi                  of supervised training; w is a weight of the token, or 1
    dft             -w constant(pi) log pi     the same, by the probability that the token has already

A term returns ``[C]`` losses, or those and a dictionary of ``[C]`` values to be averaged as metrics; or a function that
makes it, which is called where metrics are wanted. GRPO, DAPO, Dr.GRPO and REINFORCE++ are not terms: they are
``ppo_clip`` with other advantages and reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.objectives.inputs import Inputs, bounded_exp

Values = dict[str, Tensor]
Later = Callable[[], Values]
Bounds = tuple[float, float]


def ppo_clip(inputs: Inputs, *, clip: Bounds = (0.2, 0.2), dual_clip: float | None = None) -> tuple[Tensor, Later]:
    """Clipped surrogate with separate bounds, ``(low, high)``, and a bound on the loss where A < 0.

    Schulman et al. 2017 (PPO); dual clip: Ye et al. 2020; separate bounds: Yu et al. 2025 (DAPO).
    """
    return _clipped_surrogate(bounded_exp(inputs.log_ratio), inputs.advantage, clip, dual_clip)


def gspo(inputs: Inputs, *, clip: Bounds = (3e-4, 4e-4)) -> tuple[Tensor, Later]:
    """Clipped surrogate of the sequence ratio ``exp(mean over the sample of log r)``. Zheng et al. 2025 (GSPO).

    Every token of a sample has the same loss, and its gradient reaches the log-probs of all of them.
    """
    ratio = bounded_exp(inputs.mean_by_sample(inputs.log_ratio))
    loss, values = _clipped_surrogate(ratio, inputs.advantage, clip, None)
    return loss, lambda: {**values(), "sequence_ratio": ratio}


def cispo(inputs: Inputs, *, clip: Bounds = (1.0, 4.0)) -> tuple[Tensor, Later]:
    """REINFORCE with a clipped, constant importance weight: no token loses its gradient. MiniMax-M1, 2025.

    A low bound of 1 means no low bound.
    """
    low, high = clip
    ratio = bounded_exp(inputs.log_ratio.detach())
    weight = ratio.clamp(1 - low, 1 + high)

    def values() -> Values:
        below = ratio < 1 - low
        return _shares(below | (ratio > 1 + high), below, ratio.dtype)

    return _weighed(-inputs.advantage * weight, inputs.logprob), values


def sapo(inputs: Inputs, *, positive: float = 1.0, negative: float = 1.05) -> tuple[Tensor, Later]:
    """A sigmoid gate around r = 1 in place of a hard clip. Gao et al. 2025 (SAPO).

    Args:
        positive, negative: temperatures of tokens whose advantage is above 0, and of all other tokens.
    """
    advantage = inputs.advantage
    ratio = bounded_exp(inputs.log_ratio)
    tau = torch.full_like(ratio, negative).masked_fill(advantage > 0, positive)
    gate = torch.sigmoid(tau * (ratio - 1)) * (4 / tau)

    def values() -> Values:
        # The gradient's weight relative to that of the unclipped surrogate: 1 at r = 1, towards 0 far from it.
        return {"gate": 4 * torch.sigmoid(tau * (ratio - 1)) * torch.sigmoid(-tau * (ratio - 1))}

    return -advantage * gate, values


def reinforce(inputs: Inputs) -> Tensor:
    """``-A log pi``, without a ratio. Williams 1992."""
    return _weighed(-inputs.advantage, inputs.logprob)


def none(inputs: Inputs) -> Tensor:
    """0: for objectives of other terms alone, such as a divergence from a teacher."""
    return torch.zeros_like(inputs.logprob)


def cross_entropy(inputs: Inputs, *, label_smoothing: float = 0.0) -> Tensor:
    """``-log pi``, times ``token_weight`` where that is given.

    Args:
        label_smoothing: the share of the target that is spread evenly over the vocabulary: the mean of ``-log pi`` over
            all tokens is log Z less the mean logit.
    """
    loss = -inputs.logprob
    if label_smoothing:
        assert inputs.log_z is not None
        assert inputs.mean_logit is not None
        loss = (1 - label_smoothing) * loss + label_smoothing * (inputs.log_z - inputs.mean_logit)
    return _weighed(inputs.token_weight, loss) if inputs.has("token_weight") else loss


def dft(inputs: Inputs) -> Tensor:
    """Cross-entropy times the token's probability, a constant: unlikely tokens pull less. Wu et al. 2025 (DFT)."""
    return _weighed(inputs.logprob.detach().exp(), cross_entropy(inputs))


class PolicyTerm(NamedTuple):
    """A named policy term.

    Attributes:
        function: ``function(inputs, **options)``.
        needs: fields it reads.
        level: "sequence" if it takes means over samples.
        numbers: its options that are positive numbers, besides the clip bounds.
        reads: fields it reads where they are given.
        refused: options that users would look for, and why there are none.
    """

    function: Callable[..., Any]
    needs: tuple[str, ...] = ("old_logprob", "advantage")
    level: str = "token"
    numbers: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    refused: Mapping[str, str] = MappingProxyType({})


NO_SMOOTHING = {
    "label_smoothing": "it spreads a part of the target over the whole vocabulary, and this loss is weighed by the "
    "probability of the target alone. Take policy='cross_entropy'"
}

POLICY_TERMS = {
    "ppo_clip": PolicyTerm(ppo_clip),
    "gspo": PolicyTerm(gspo, level="sequence"),
    "cispo": PolicyTerm(cispo),
    "sapo": PolicyTerm(sapo, numbers=("positive", "negative")),
    "reinforce": PolicyTerm(reinforce, needs=("advantage",)),
    "none": PolicyTerm(none, needs=()),
    "cross_entropy": PolicyTerm(cross_entropy, needs=(), reads=("token_weight",)),
    "dft": PolicyTerm(dft, needs=(), reads=("token_weight",), refused=NO_SMOOTHING),
}


def _clipped_surrogate(ratio: Tensor, advantage: Tensor, clip: Bounds, dual_clip: float | None) -> tuple[Tensor, Later]:
    (low, high), cost = clip, -advantage
    # Where the clipped one is larger, the ratio is out of bounds, and its clip has no gradient.
    plain, clipped = cost * ratio, cost * ratio.detach().clamp(1 - low, 1 + high)
    active, capped = clipped > plain, None
    loss = torch.where(active, clipped, plain)
    if dual_clip is not None:
        bound = cost * dual_clip
        capped = (advantage < 0) & (loss > bound)
        loss = torch.where(capped, bound, loss)

    def values() -> Values:
        more = {} if capped is None else {"dual_clip_fraction": capped.to(ratio.dtype)}
        # Where it is active the ratio is out of bounds, on one side or on the other.
        return _shares(active, active & (ratio < 1 - low), ratio.dtype) | more

    return loss, values


def _weighed(weight: Tensor, x: Tensor) -> Tensor:
    """The product, and 0 where the weight is: a log-prob may be -inf there."""
    return torch.where(weight != 0, weight * x, 0.0)


def _shares(clipped: Tensor, below: Tensor, dtype: torch.dtype) -> Values:
    """Of rows that are clipped, and of those among them whose ratio is below its bounds; the others' is above."""
    names = ("clip_fraction", "clip_fraction_low", "clip_fraction_high")
    return dict(zip(names, torch.stack([clipped, below, clipped ^ below]).to(dtype), strict=True))
