"""Gradients of extras: what they add to the coefficients of backward, and columns that are finished after the kernel.

collision       2 g p (p - collision)          mean_logit      g / number of columns, but 0 where z is -inf
log-prob of an id    g (onehot - p)            once for every time the id was asked for
of all other ids     g p (1 / p_rest - 1)      but -g p at the ids
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.backends.contract import Listed
from logitless.extras.lines import Extras, Row
from logitless.softmax import ELSEWHERE, AtIds, Coefficients
from logitless.spec import IGNORE

FAINT = -85.0
"""Log-prob up to which the inverse of a probability is a float32."""


class SavedExtras(NamedTuple):
    """What backward needs of the results; None what it does not.

    Attributes:
        collision: ``[R]`` sum of p^2.
        counted: ``[R]`` columns that are not -inf.
        x: ``[R, K]`` logits of the further ids; behind them the log-prob of all others, if that was asked for.
    """

    collision: Tensor | None = None
    counted: Tensor | None = None
    x: Tensor | None = None

    @staticmethod
    def of(extras: Extras, lines: Tensor, results: dict[str, Tensor]) -> SavedExtras:
        """From the lines of the whole vocabulary, and results by name."""
        *_, moments, _, x, _ = lines.split(extras.counts)
        if extras.rest:
            x = torch.cat([x, results["further_logprobs"][None, :, -1]])
        return SavedExtras(
            results.get("collision"),
            moments[2] if "mean_logit" in extras.stats else None,
            None if extras.ids is None else x.T.contiguous(),
        )


def extended(
    coef: Coefficients,
    extras: Extras,
    saved: SavedExtras,
    row: Row,
    logprob: Tensor,
    g_logprob: Tensor,
    upstream: Sequence[Tensor | None],
) -> Coefficients:
    """``coef`` with what the upstream gradients of these results add.

    Args:
        logprob, g_logprob: ``[R]`` of the target over the vocabulary, as ``coef`` was made from them.
        upstream: gradient of each of ``extras.names`` or None, in their order.
    """
    given = {name: g for name, g in zip(extras.names, upstream, strict=True) if g is not None}
    plain, at_target, p = coef.plain, coef.at_target, logprob.exp()
    square = constant = None
    if "collision" in given:
        assert saved.collision is not None
        square, less = 2 * given["collision"], 2 * given["collision"] * saved.collision
        plain, at_target = plain - less, at_target + p * (square * p - less)
    if "mean_logit" in given:
        assert saved.counted is not None
        constant = given["mean_logit"] / saved.counted
        at_target = at_target + torch.where(logprob == -torch.inf, 0.0, constant)
    if "further_logprobs" not in given:
        return Coefficients(plain, coef.product, at_target, square, constant)
    assert extras.ids is not None
    assert saved.x is not None
    g, x, count = given["further_logprobs"], saved.x, extras.ids.shape[1]
    total, share = _shares(extras, g, x)
    g = g[:, :count].masked_fill(extras.ids == IGNORE, 0.0)
    own = _total_by_id(extras.ids, g) + torch.where(extras.ids == row.target[:, None], g_logprob[:, None], 0.0)
    # What all other ids share, these have no part in.
    value = _at_ids(Coefficients(plain - total, coef.product, at_target, square, constant), x[:, :count], own, row)
    at_ids = AtIds((extras.ids - extras.start).clamp_min(ELSEWHERE), own, value)
    plain, at_target = plain + (share - total), at_target + p * (share - total)
    return Coefficients(plain, coef.product, at_target, square, constant, at_ids)


def _at_ids(coef: Coefficients, x: Tensor, own: Tensor, row: Row) -> Tensor:
    """``[R, K]`` finished gradient of logits ``x``, whose own log-probs have the upstream gradient ``own``."""
    slope = row.gain[:, None]
    z = x * slope
    if row.squash:
        y = torch.tanh(x * row.squash)
        z, slope = y * slope, slope * row.squash * (1 - y * y)
    d = z - row.norm.reference[:, None]
    log_p = d - row.norm.log_sum[:, None]
    value = coef.elsewhere(d, log_p.exp(), (slice(None), None), own) - own * torch.expm1(log_p)
    return (value * slope).masked_fill((row.target == IGNORE)[:, None], 0.0)


def write_at_ids(
    backend: Any, coef: Coefficients, first: int, columns: int, out: Tensor, out_index: Tensor | None = None
) -> None:
    """Write finished gradients at the further ids among those columns; ``out`` has all others already."""
    at = coef.at_ids
    if at is not None and at.column.numel():
        backend.write(Listed(at.column, at.value, first, columns), out, out_index)


def upstream_at(coef: Coefficients | None, row: Tensor, column: Tensor) -> Tensor | None:
    """``[E]`` upstream gradient of the log-probs of listed columns of this shard; 0 where none is asked for."""
    at = None if coef is None else coef.at_ids
    if at is None or not at.column.numel():
        return None
    # One number for row and column, so that one sort and a binary search find all.
    wide = 1 << 32
    first = torch.arange(len(at.column), device=row.device)[:, None] * wide
    key, order = (first + at.column + 1).flatten().sort(stable=True)
    wanted = row * wide + column + 1
    place = torch.searchsorted(key, wanted).clamp_max(len(key) - 1)
    return torch.where(key[place] == wanted, at.upstream.flatten()[order[place]], 0.0)


def _shares(extras: Extras, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """``[R]`` sum of the upstream gradients, and what every other column has of the last one: ``g / p_rest``."""
    assert extras.ids is not None
    if not extras.rest:
        total = g.masked_fill(extras.ids == IGNORE, 0.0).sum(1)
        return total, torch.zeros_like(total)
    listed, of_rest, log_rest = g[:, :-1].masked_fill(extras.ids == IGNORE, 0.0), g[:, -1], x[:, -1]
    # Below FAINT no float32 holds the inverse, and none of the columns has a probability that it holds.
    share = of_rest * (-log_rest.clamp_min(FAINT)).exp()
    return listed.sum(1) + of_rest, share.masked_fill(log_rest == -torch.inf, 0.0)


def _total_by_id(ids: Tensor, g: Tensor) -> Tensor:
    """``[R, K]`` sum of g over all places of a row that have the same id: nothing is added atomically.

    Sorted by id, every place adds what stands 1, 2, 4, ... before it in its run of equal ids; the last has all.
    """
    count = ids.shape[1]
    ids, order = ids.sort(dim=1, stable=True)
    total, step = g.gather(1, order), 1
    while step < count:
        same = ids[:, step:] == ids[:, :-step]
        total = torch.cat([total[:, :step], total[:, step:] + torch.where(same, total[:, :-step], 0.0)], 1)
        step *= 2
    last = torch.searchsorted(ids, ids, right=True) - 1
    return torch.empty_like(total).scatter_(1, order, total.gather(1, last))
