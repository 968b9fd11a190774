"""Off-policy corrections: a constant weight per row, by which the policy term is multiplied.

The rollout engine that sampled the tokens is never quite the policy that trains on them. With w = pi_old / pi_rollout,
the trainer's probability of a token over the engine's:

    tis              clip(w, low, high)                                      truncated importance sampling
    icepop           w inside [low, high], 0 outside
    sequence_tis     clip(product of w over the sample, low, high)
    sequence_icepop  that product inside [low, high], 0 outside
    geometric_tis    clip(geometric mean of w over the sample, low, high)
    geometric_mask   1 if the geometric mean is inside [low, high], else 0
    opsm             0 for samples with A < 0 whose mean log(pi_old / pi) is above a bound, else 1

No gradient flows through a weight. Rows with weight 0 leave the policy term, but still count in its denominator, and in
the KL and entropy terms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.objectives.inputs import Inputs, bounded_exp


def rollout_log_ratio(inputs: Inputs) -> Tensor:
    """``old_logprob - rollout_logprob``: log-ratio of the trainer to the engine that sampled the tokens."""
    return (inputs.old_logprob - inputs.rollout_logprob).detach()


def tis(inputs: Inputs, low: float, high: float) -> Tensor:
    """Truncated importance sampling, token by token. Ionides 2008; Yao et al. 2025 for rollout engines."""
    return bounded_exp(rollout_log_ratio(inputs)).clamp(low, high)


def icepop(inputs: Inputs, low: float, high: float) -> Tensor:
    """The ratio itself, and 0 outside the bounds. Ring-1T / IcePop, 2025."""
    return _inside(bounded_exp(rollout_log_ratio(inputs)), low, high)


def sequence_tis(inputs: Inputs, low: float, high: float) -> Tensor:
    """Truncated importance sampling of whole samples: the product of all token ratios."""
    return bounded_exp(inputs.sum_by_sample(rollout_log_ratio(inputs))).clamp(low, high)


def sequence_icepop(inputs: Inputs, low: float, high: float) -> Tensor:
    """The product of all token ratios of the sample, and 0 outside the bounds."""
    return _inside(bounded_exp(inputs.sum_by_sample(rollout_log_ratio(inputs))), low, high)


def geometric_tis(inputs: Inputs, low: float, high: float) -> Tensor:
    """As ``sequence_tis``, with the geometric mean of the token ratios, which does not grow with the length."""
    return bounded_exp(inputs.mean_by_sample(rollout_log_ratio(inputs))).clamp(low, high)


def geometric_mask(inputs: Inputs, low: float, high: float) -> Tensor:
    """0 for samples whose geometric mean ratio is outside the bounds, 1 for all other samples."""
    ratio = bounded_exp(inputs.mean_by_sample(rollout_log_ratio(inputs)))
    return ((ratio >= low) & (ratio <= high)).to(ratio.dtype)


def opsm(inputs: Inputs, high: float) -> Tensor:
    """Off-policy sequence masking: drop samples with A < 0 that the policy has moved away from. DeepSeek-V3.2, 2025.

    Args:
        high: largest mean of ``old_logprob - logprob`` over the sample, in nats per token.
    """
    moved = -inputs.mean_by_sample(inputs.log_ratio.detach())
    return (~((inputs.advantage < 0) & (moved > high))).to(moved.dtype)


class Correction(NamedTuple):
    """A named correction.

    Attributes:
        function: ``function(inputs, *bounds)``.
        bounds: default bounds, ``(low, high)`` or ``(high,)``.
        needs: fields it reads.
        level: "sequence" if it takes means over samples.
    """

    function: Callable[..., Tensor]
    bounds: tuple[float, ...]
    needs: tuple[str, ...] = ("old_logprob", "rollout_logprob")
    level: str = "sequence"


CORRECTIONS = {
    "tis": Correction(tis, (0.0, 2.0), level="token"),
    "icepop": Correction(icepop, (0.5, 5.0), level="token"),
    "sequence_tis": Correction(sequence_tis, (0.0, 2.0)),
    "sequence_icepop": Correction(sequence_icepop, (0.5, 5.0)),
    "geometric_tis": Correction(geometric_tis, (0.0, 2.0)),
    "geometric_mask": Correction(geometric_mask, (0.99, 1.01)),
    "opsm": Correction(opsm, (1e-4,), needs=("old_logprob", "advantage")),
}


def _inside(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
