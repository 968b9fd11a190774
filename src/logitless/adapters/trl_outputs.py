"""What TRL's fused head reports of a token besides its log-prob and entropy; metrics, without gradient.

    is_top1            whether the label is the likeliest token, the first of several: SFT and DPO
    mean_logits        mean logit over the vocabulary: DPO and KTO
    log_sum_sq_probs   log of the sum of squared probabilities: DPO with WPO weights

They are statistics of the call that scores the tokens. Only a mean of logits without a softcap is not: the mean of
products is the product with the mean, and takes no logits at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from logitless.operands import Logits
from logitless.operands.unit import reading
from logitless.spec import Head, TokenStats

STATS = {"log_sum_sq_probs": "collision", "mean_logits": "mean_logit", "is_top1": "top1"}
"""Outputs of TRL's head, and the statistic that each is made of."""

ROWS = 4096
"""Rows of hidden states that are widened at a time."""


def asked_of_logits(outputs: tuple[str, ...], head: Head) -> tuple[str, ...]:
    """What ``stats=`` is for these outputs."""
    return tuple(stat for name, stat in STATS.items() if name in outputs and not _linear(name, head))


@torch.no_grad()
def further_outputs(
    outputs: tuple[str, ...], stats: TokenStats, logits: Logits, head: Head
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``log_sum_sq_probs``, ``mean_logits`` and ``is_top1``, each None unless asked for."""
    squares, mean = stats.collision, stats.mean_logit
    if "mean_logits" in outputs and _linear("mean_logits", head):
        mean = _mean_logits(logits, head)
    return (
        None if squares is None else squares.detach().log().float(),
        None if mean is None else mean.detach().float(),
        stats.top1_hit,
    )


def _linear(name: str, head: Head) -> bool:
    return name == "mean_logits" and head.softcap is None


@reading
def _mean_logits(logits: Logits, head: Head) -> Tensor:
    """The head is linear, so the mean over its rows comes first."""
    stands = logits.opened()
    hidden, weight, bias = stands.hidden, stands.weight, stands.linear.bias
    assert isinstance(weight, Tensor)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        mean = weight.mean(0, dtype=wide)
        offset = 0.0 if bias is None else bias.mean(dtype=wide)
        # Some rows at a time, since all of them widened would be as large as hidden once more.
        means = [part.to(wide) @ mean for part in hidden.split(ROWS)]
        return (torch.cat(means) + offset) * (head.scale / head.temperature)
