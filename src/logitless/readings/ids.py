"""Log-probs of K listed ids of every row, and of all other ids together: ``ids=``, and a teacher's K log-probs.

The gradient of an id's log-prob is ``g (onehot - p)``, once for every time that it is listed. The gradient of the
log-prob of all other ids is ``g p (1 / p_rest - 1)`` at those, and ``-g p`` at the listed ids. A kernel writes dZ of
all columns; the listed ones are finished after it, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from logitless.backends.contract import Backend, Listed, Problem
from logitless.machine import pieces
from logitless.readings.reading import Row, Upstream, at_columns, logprobs_of
from logitless.softmax import ELSEWHERE, WIDTH, AtIds, Coefficients, Statistic, merge, merge_targets, transform
from logitless.spec import IGNORE

FAINT = -85.0
"""The inverse of a probability is a float32 down to this log-prob."""


@dataclass(frozen=True, eq=False)
class Ids:
    """Log-probs of the ids ``[R, K]``, of which ``IGNORE`` is an empty place.

    Attributes:
        negative: whether the head has a negative scale, which turns the order of the logits around.
        start: first column here.
        rest: whether the log-prob of all other ids together stands behind those of the ids.
    """

    ids: Tensor
    negative: bool
    start: int
    rest: bool = False

    names = ("ids_logprobs",)
    differentiable = ("ids_logprobs",)

    @property
    def width(self) -> int:
        return self.ids.shape[1] + WIDTH * self.rest

    def cut(self, rows: slice | Tensor) -> Ids:
        return replace(self, ids=self.ids[rows])

    def padded(self, num_rows: int) -> Ids:
        return replace(self, ids=torch.nn.functional.pad(self.ids, (0, 0, 0, num_rows - len(self.ids)), value=IGNORE))

    def lines(self, backend: Backend, tile: Problem, rows: slice) -> Tensor:
        ids = self.ids[rows]
        # A padded tile has more rows than there are ids.
        ids = torch.nn.functional.pad(ids, (0, 0, 0, tile.num_rows - len(ids)))
        column = ids - self.start - tile.first
        x = at_columns(tile, column).T
        return torch.cat([x, _rest_statistic(backend, tile, column, self.negative)]) if self.rest else x

    def merge(self, parts: Tensor) -> Tensor:
        x, rest = parts.split([self.ids.shape[1], WIDTH * self.rest], 1)
        return torch.cat([merge_targets(x), merge(rest)]) if self.rest else merge_targets(x)

    def results(self, lines: Tensor, row: Row) -> dict[str, Tensor]:
        count = self.ids.shape[1]
        logprob = logprobs_of(lines[:count].T, row)[1].masked_fill(self.ids == IGNORE, 0.0)
        if self.rest:
            other = Statistic.of(lines[count:])
            together = ((other.m - row.norm.reference) + other.s.log()) - row.norm.log_sum
            logprob = torch.cat([logprob, torch.where(other.s == 0, -torch.inf, together)[:, None]], 1)
        return {"ids_logprobs": logprob}

    def saved(self, lines: Tensor, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Logits of the ids, and behind them the log-prob of all other ids, if it was asked for."""
        x = lines[: self.ids.shape[1]]
        if self.rest:
            x = torch.cat([x, results["ids_logprobs"][None, :, -1]])
        return {"ids_x": x.T.contiguous()}

    def extend(self, coef: Coefficients, saved: Mapping[str, Tensor], row: Row, up: Upstream) -> Coefficients:
        """The last of all readings: the listed columns are finished from all other coefficients."""
        if "ids_logprobs" not in up.by:
            return coef
        g, x, count = up.by["ids_logprobs"], saved["ids_x"], self.ids.shape[1]
        total, share = self._shares(g, x)
        g = g[:, :count].masked_fill(self.ids == IGNORE, 0.0)
        own = _total_by_id(self.ids, g) + torch.where(self.ids == row.target[:, None], up.g_logprob[:, None], 0.0)
        # The share of all other ids does not go to the listed ones.
        value = _at_ids(coef._replace(plain=coef.plain - total), x[:, :count], own, row)
        at_ids = AtIds((self.ids - self.start).clamp_min(ELSEWHERE), own, value)
        at_target = coef.at_target + up.logprob.exp() * (share - total)
        return coef._replace(plain=coef.plain + (share - total), at_target=at_target, at_ids=at_ids)

    def _shares(self, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """``[R]`` sum of the upstream gradients, and each other column's share of the last one: ``g / p_rest``."""
        if not self.rest:
            total = g.masked_fill(self.ids == IGNORE, 0.0).sum(1)
            return total, torch.zeros_like(total)
        listed, of_rest, log_rest = g[:, :-1].masked_fill(self.ids == IGNORE, 0.0), g[:, -1], x[:, -1]
        # Below FAINT no float32 holds the inverse, nor the probability of any of these columns.
        share = of_rest * (-log_rest.clamp_min(FAINT)).exp()
        return listed.sum(1) + of_rest, share.masked_fill(log_rest == -torch.inf, 0.0)


def _at_ids(coef: Coefficients, x: Tensor, own: Tensor, row: Row) -> Tensor:
    """``[R, K]`` finished gradient of logits ``x``, whose own log-probs have the upstream gradient ``own``."""
    z, slope = transform(x, row.gain[:, None], row.squash)
    d = z - row.norm.reference[:, None]
    log_p = d - row.norm.log_sum[:, None]
    value = coef.elsewhere(d, log_p.exp(), (slice(None), None), own) - own * torch.expm1(log_p)
    return (value * slope).masked_fill((row.target == IGNORE)[:, None], 0.0)


def write_at_ids(
    backend: Backend, coef: Coefficients, first: int, columns: int, out: Tensor, out_index: Tensor | None = None
) -> None:
    """Write finished gradients at the listed ids among those columns; ``out`` has all others already."""
    at = coef.at_ids
    if at is not None and at.column.numel():
        backend.write(Listed(at.column, at.value, first, columns), out, out_index)


def upstream_at(coef: Coefficients | None, row: Tensor, column: Tensor) -> Tensor | None:
    """``[E]`` upstream gradient of the log-probs of listed columns of this shard; 0 where none is asked for."""
    at = None if coef is None else coef.at_ids
    if at is None or not at.column.numel():
        return None
    # A key is one number for row and column, so that one sort and a binary search find all.
    wide = 1 << 32
    of_row = torch.arange(len(at.column), device=row.device)[:, None] * wide
    key, order = (of_row + at.column + 1).flatten().sort(stable=True)
    wanted = row * wide + column + 1
    place = torch.searchsorted(key, wanted).clamp_max(len(key) - 1)
    return torch.where(key[place] == wanted, at.upstream.flatten()[order[place]], 0.0)


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


def _rest_statistic(backend: Backend, problem: Problem, column: Tensor, negative: bool) -> Tensor:
    """``[4, R]`` statistic of the columns other than ``column`` ``[R, K]``, which may be outside of the problem.

    Subtracting the listed probabilities from 1 would leave nothing but rounding where they are nearly all there is. So
    the listed columns of a copy, a few rows at a time, are set to -inf, and a backend reads the others.
    """
    wide, out = problem.gain.dtype, problem.gain.new_empty((WIDTH, problem.num_rows))
    step = max(1, problem.memory // max(1, problem.columns * wide.itemsize))
    for rows in pieces(problem.num_rows, step, problem.logits.is_meta):
        part = problem.cut(rows.start, rows.stop)
        x = part.logits if part.index is None else part.logits[part.index]
        x = x[:, : part.columns].to(wide, copy=True)
        part = replace(part, logits=x, index=None, entropy=False, canonical=False)
        if part.squash or negative:
            # The head comes first: a softcap or a negative scale makes another number of -inf.
            z, _ = transform(x, part.gain[:, None], part.squash)
            part = replace(part, logits=z, gain=torch.ones_like(part.gain), squash=0.0)
        at = column[rows]
        backend.write(Listed(at, torch.full_like(at, -torch.inf, dtype=wide), 0, part.columns), part.logits, None)
        out[:, rows] = backend.statistics(part)
    return out
