"""Gradients of extras: what they add to the coefficients of backward, and columns that are finished after the kernel.

collision       2 g p (p - collision)          mean_logit      g / number of columns, but 0 where z is -inf
log-prob of an id    g (onehot - p)            once for every time the id was asked for
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.backends.contract import Problem
from logitless.extras.lines import Extras, Row
from logitless.softmax import ELSEWHERE, SKIP, AtIds, Coefficients, Normaliser
from logitless.spec import IGNORE


class SavedExtras(NamedTuple):
    """What backward needs of the results; None what it does not.

    Attributes:
        collision: ``[R]`` sum of p^2.
        counted: ``[R]`` columns that are not -inf.
        x: ``[R, K]`` logits of the further ids.
    """

    collision: Tensor | None = None
    counted: Tensor | None = None
    x: Tensor | None = None

    @staticmethod
    def of(extras: Extras, lines: Tensor, results: dict[str, Tensor]) -> SavedExtras:
        """From the lines of the whole vocabulary, and results by name."""
        *_, moments, _, x = lines.split(extras.counts)
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
        g = given["further_logprobs"].masked_fill(extras.ids == IGNORE, 0.0)
        total = g.sum(1)
        plain, at_target = plain - total, at_target - p * total
        own = _total_by_id(extras.ids, g)
        own = own + torch.where(extras.ids == row.target[:, None], g_logprob[:, None], 0.0)
        at_ids = AtIds((extras.ids - extras.start).clamp_min(ELSEWHERE), saved.x, own)
    return Coefficients(plain, coef.product, at_target, square, constant, at_ids)


def write_at_ids(
    problem: Problem, norm: Normaliser, coef: Coefficients, out: Tensor, out_index: Tensor | None = None
) -> None:
    """Write finished gradients at the columns of the further ids that are here; ``out`` has all others already.

    Ids that are elsewhere must not write. Because their number is not fetched from the device, each of them repeats the
    write of an id of its row that is here, or, where there is none, writes the value of column 0 once more.
    """
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
    value = coef.elsewhere(d, log_p.exp(), (slice(None), None), at.upstream) - at.upstream * torch.expm1(log_p)
    value = (value * slope).masked_fill((problem.column == SKIP)[:, None], 0.0).to(out.dtype)
    row = torch.arange(problem.num_rows, device=out.device) if out_index is None else out_index
    some = here.any(1, keepdim=True)
    place = torch.where(here, torch.arange(here.shape[1], device=out.device), here.int().argmax(1, keepdim=True))
    column = torch.where(some, column.gather(1, place), 0)
    out[row[:, None], column] = torch.where(some, value.gather(1, place), out[row, 0][:, None])


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


def _total_by_id(ids: Tensor, g: Tensor) -> Tensor:
    """``[R, K]`` sum of g over all places of a row that have the same id, in order: nothing is added atomically."""
    total = torch.zeros_like(g)
    for k in range(ids.shape[1]):
        total = total + torch.where(ids == ids[:, k : k + 1], g[:, k : k + 1], 0.0)
    return total
