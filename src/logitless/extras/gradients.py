"""Gradients of extras: what they add to the coefficients of backward, and columns that are finished after the kernel.

collision       2 g p (p - collision)          mean_logit      g / number of columns, but 0 where z is -inf
log-prob of an id    g (onehot - p)            once for every time the id was asked for
of all other ids     g p (1 / p_rest - 1)      but -g p at the ids
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.backends.contract import Problem
from logitless.extras.lines import Extras, Row
from logitless.extras.rest import write_here
from logitless.softmax import ELSEWHERE, SKIP, AtIds, Coefficients, Normaliser
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
    square = constant = at_ids = None
    if "collision" in given:
        assert saved.collision is not None
        square, less = 2 * given["collision"], 2 * given["collision"] * saved.collision
        plain, at_target = plain - less, at_target + p * (square * p - less)
    if "mean_logit" in given:
        assert saved.counted is not None
        constant = given["mean_logit"] / saved.counted
        at_target = at_target + torch.where(logprob == -torch.inf, 0.0, constant)
    if "further_logprobs" in given:
        assert extras.ids is not None
        assert saved.x is not None
        g, x, count = given["further_logprobs"], saved.x, extras.ids.shape[1]
        total, share = _shares(extras, g, x)
        at_listed = (plain - total) if extras.rest else None
        plain, at_target = plain + (share - total), at_target + p * (share - total)
        g = g[:, :count].masked_fill(extras.ids == IGNORE, 0.0)
        own = _total_by_id(extras.ids, g)
        own = own + torch.where(extras.ids == row.target[:, None], g_logprob[:, None], 0.0)
        at_ids = AtIds((extras.ids - extras.start).clamp_min(ELSEWHERE), x[:, :count], own, at_listed)
    return Coefficients(plain, coef.product, at_target, square, constant, at_ids)


def write_at_ids(
    problem: Problem, norm: Normaliser, coef: Coefficients, out: Tensor, out_index: Tensor | None = None
) -> None:
    """Write finished gradients at the columns of the further ids that are here; ``out`` has all others already."""
    at = coef.at_ids
    if at is None or not problem.columns or not at.column.numel():
        return
    column = at.column - problem.first
    here = (column >= 0) & (column < problem.columns)
    slope = problem.gain[:, None]
    z = at.x * slope
    if problem.squash:
        y = torch.tanh(at.x * problem.squash)
        z, slope = y * slope, slope * problem.squash * (1 - y * y)
    d = z - norm.reference[:, None]
    log_p = d - norm.log_sum[:, None]
    coef = coef if at.plain is None else coef._replace(plain=at.plain)
    value = coef.elsewhere(d, log_p.exp(), (slice(None), None), at.upstream) - at.upstream * torch.expm1(log_p)
    value = (value * slope).masked_fill((problem.column == SKIP)[:, None], 0.0).to(out.dtype)
    row = torch.arange(problem.num_rows, device=out.device) if out_index is None else out_index
    write_here(out, row, column, here, value)


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
    """``[R, K]`` sum of g over all places of a row that have the same id, in order: nothing is added atomically."""
    total = torch.zeros_like(g)
    for k in range(ids.shape[1]):
        total = total + torch.where(ids == ids[:, k : k + 1], g[:, k : k + 1], 0.0)
    return total
