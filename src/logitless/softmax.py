"""The statistic everything reduces to, in plain torch on ``[R]`` vectors.

For any part of a row of (transformed) logits z keep four numbers:

    m  a reference near the largest z      s  sum of e^(z-m)      w  sum of e^(z-m) (z-m)      t  target's z

Two parts merge into one of the same form, so vocabulary tiles, split reductions and tensor-parallel ranks are
the same :func:`merge`. From the whole row

    log Z = m + log s        log p(target) = (t - m) - log s        entropy = log s - w / s

and for upstream gradients (g_l, g_H, g_Z) of log-prob, entropy and log Z the gradient of the row is

    dz = g_l onehot + p (b + c (z - m)),    b = g_Z - g_l + g_H w / s,    c = -g_H

since log p + H = (z - m) - w / s. A backward kernel needs p = exp((z - m) - log s) and three numbers per row, and
never the entropy itself, whose log s would only be rounded twice and cancelled. m and log s stay apart:
z - (m + log s) would round at the size of z.

A part that does not hold the target has t = NaN. If no part does, the target is not in the vocabulary, and the
whole row comes out NaN: a wrong id can never look like a plausible number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ELSEWHERE = -1
"""Target column of a row whose target is not in this part of the vocabulary."""

SKIP = -2
"""Target column of a row to leave out: its logits are not read and its gradient is zero."""

FLOOR = -1.0e30
"""Stands in for log 0 in products: finite, so that 0 * FLOOR is 0, and far below any log-probability."""


TINY = 2.0e-38
"""Stands in for 0 in a logarithm: the smallest round normal float32, multiplied by the 0 it stood in for."""


class Normaliser(NamedTuple):
    """``[R]`` pieces of log Z, kept apart for precision: ``log Z = reference + log_sum``."""

    reference: Tensor
    log_sum: Tensor


class Coefficients(NamedTuple):
    """``[R]`` numbers a backward kernel needs: ``dz = p (plain + product (z - m))``, but ``at_target`` there."""

    plain: Tensor
    product: Tensor | None
    at_target: Tensor


def merge(parts: Tensor) -> Tensor:
    """One statistic from many: ``[P, 4, R]`` (m, s, w, t) becomes ``[4, R]``.

    Associative up to rounding, and exact for a single part. Parts are added in order, so the same parts give
    the same bits wherever this runs.
    """
    m, s, w, t = parts.unbind(1)
    top = m.amax(0)
    # A row of nothing but -inf has no finite reference; 0 keeps its sums at 0 instead of NaN.
    top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    shift = torch.where(s == 0, torch.zeros_like(m), m - top)
    factor = torch.where(s == 0, torch.zeros_like(m), torch.exp(shift))
    s_all = (factor * s).sum(0)
    w_all = (factor * (w + shift * s)).sum(0)
    return torch.stack([top, s_all, w_all, merge_targets(t)])


def merge_targets(t: Tensor) -> Tensor:
    """The target logit from the one part that holds it (``[P, R]`` to ``[R]``), or NaN if none does."""
    held = torch.where(t.isnan(), torch.full_like(t, -torch.inf), t).amax(0)
    return torch.where(t.isnan().all(0), torch.full_like(held, torch.nan), held)


def normaliser(stats: Tensor) -> Normaliser:
    """The pieces of log Z; NaN where the row has no target in the vocabulary."""
    m, s, _, t = stats
    return Normaliser(m, torch.where(t.isnan(), t, torch.log(s)))


def mean_shift(stats: Tensor) -> Tensor:
    """``w / s``: the mean of ``z - m`` under the row's distribution."""
    return stats[2] / stats[1]


def entropy(norm: Normaliser, mean: Tensor) -> Tensor:
    """``log s - w / s``, never below zero (a one-hot row rounds to a hair below)."""
    return (norm.log_sum - mean).clamp_min(0.0)


def coefficients(
    logprob: Tensor,
    norm: Normaliser,
    mean: Tensor | None,
    g_logprob: Tensor,
    g_entropy: Tensor | None,
    g_log_z: Tensor | None,
) -> Coefficients:
    """What the backward kernel needs, from the row's statistics and upstream gradients.

    The target's own element is ``g_l (1 - p) + p (g_Z + g_H w / s + c (t - m))``, with ``1 - p = -expm1(log p)``: small
    terms stay small, whether the target is nearly certain or nearly impossible.
    """
    rest = torch.zeros_like(g_logprob) if g_log_z is None else g_log_z
    product = None
    at_target = rest
    if g_entropy is not None:
        assert mean is not None
        product = -g_entropy
        rest = rest + g_entropy * mean
        at_target = rest + product * (logprob + norm.log_sum).clamp_min(FLOOR)
    at_target = logprob.exp() * at_target - g_logprob * torch.expm1(logprob)
    return Coefficients(rest - g_logprob, product, at_target)
