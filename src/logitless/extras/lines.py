"""What a call can be asked for beyond log-prob, entropy and log Z: ``stats=``, ``top_k=`` and ``further_ids=``.

    Extras   what is asked for, and which lines of numbers that takes
    lines    of some columns of every row, from a backend  ->  merged over tiles and ranks  ->  results

All are over the whole vocabulary, whatever the sampler kept. Columns are ordered by their logits before the head's
transformation, which keeps that order, and where equal by their ids: so ``top_k_ids``, ``top1_id`` and ``rank`` agree.
Lines are numbers of the accumulation dtype, ids included, which float32 counts up to 2^24.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.backends.contract import MOMENTS, Problem
from logitless.extras.rest import rest_statistic
from logitless.softmax import WIDTH, Normaliser, Statistic, merge, merge_targets
from logitless.spec import IGNORE

STATS = ("top1", "collision", "mean_logit", "logit_variance", "max_logit", "rank")
"""What ``stats=`` may name."""

MOST = 128
"""Largest ``top_k``."""

LARGEST = 1 << 24
"""Columns that float32 can count."""

DIFFERENTIABLE = ("collision", "mean_logit", "further_logprobs")
"""Results with a gradient."""


class Row(NamedTuple):
    """What results are made of besides the lines: ``[R]`` each, of the whole vocabulary.

    Attributes:
        norm: pieces of log Z.
        target: token id.
        gain, squash: of the head.
    """

    norm: Normaliser
    target: Tensor
    gain: Tensor
    squash: float


@dataclass(frozen=True, eq=False)
class Extras:
    """What is asked for.

    Attributes:
        stats: names out of :data:`STATS`.
        top_k: how many of the most likely tokens; 0 for none.
        ids: ``[R, K]`` further ids, or None.
        negative: whether the head turns the order of the logits around.
        start: first column here.
        rest: whether the log-prob of all other ids together stands behind those of the further ids.
    """

    stats: tuple[str, ...]
    top_k: int
    ids: Tensor | None
    negative: bool
    start: int
    rest: bool = False

    @property
    def best(self) -> int:
        """How many of the best columns are looked for."""
        return max(self.top_k, 1 if {"top1", "max_logit"} & set(self.stats) else 0)

    @property
    def only_best(self) -> bool:
        """Whether the best column and its logit answer all that is asked for."""
        return self.counts == (1, 1, 0, 0, 0, 0)

    @property
    def sums(self) -> bool:
        return bool({"collision", "mean_logit", "logit_variance"} & set(self.stats))

    @property
    def ranked(self) -> bool:
        return "rank" in self.stats

    @property
    def names(self) -> tuple[str, ...]:
        """Fields of :class:`~logitless.spec.TokenStats`, in their order."""
        named = []
        for stat in STATS:
            if stat in self.stats:
                named += ["top1_id", "top1_logprob", "top1_hit"] if stat == "top1" else [stat]
        named += ["top_k_ids", "top_k_logprobs"] if self.top_k else []
        return (*named, *(() if self.ids is None else ("further_logprobs",)))

    @property
    def differentiable(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name in DIFFERENTIABLE)

    @property
    def counts(self) -> tuple[int, int, int, int, int, int]:
        """Lines of the best keys, of their ids, of the moments, of the target's key, of the further logits and of the
        statistic of all other columns."""
        further = 0 if self.ids is None else self.ids.shape[1]
        return self.best, self.best, MOMENTS * self.sums, int(self.ranked), further, WIDTH * self.rest

    def lines(self, backend: Any, problem: Problem, rows: slice) -> Tensor:
        """``[L, R]`` lines of those columns of every row; ``rows`` says which rows of the call these are."""
        found = []
        if self.best:
            key, column = backend.best(problem, self.best, self.negative)
            found += [key, column + self.start]
        if self.sums:
            found.append(backend.moments(problem))
        if self.ranked:
            key = _at(problem, problem.column[:, None] - problem.first)
            found.append((-key if self.negative else key).T)
        if self.ids is not None:
            column = _padded(self.ids[rows], problem.num_rows) - self.start - problem.first
            found.append(_at(problem, column).T)
            if self.rest:
                found.append(rest_statistic(backend, problem, column, self.negative))
        return torch.cat(found) if found else problem.gain.new_empty((0, problem.num_rows))

    def merge(self, parts: Tensor) -> Tensor:
        """Lines of all columns from those of parts of them: ``[P, L, R]`` becomes ``[L, R]``, added in order."""
        keys, ids, moments, target, further, rest = parts.split(self.counts, 1)
        found = []
        if self.best:
            found += _merge_best(keys, ids, self.best)
        if self.sums:
            found.append(_merge_moments(moments))
        found += [merge_targets(target), merge_targets(further)]
        return torch.cat([*found, merge(rest)] if self.rest else found)

    def target_key(self, lines: Tensor) -> Tensor:
        """``[R]`` what ``rank`` counts columns against."""
        return lines.split(self.counts)[3][0]

    def results(self, lines: Tensor, row: Row, ahead: Tensor | None) -> dict[str, Tensor]:
        """Every result by name, from the lines of the whole vocabulary.

        Args:
            ahead: ``[R]`` columns before the target, if ranks are asked for.
        """
        keys, ids, moments, _, x, rest = lines.split(self.counts)
        # A row without a distribution: NaN or +inf among its logits, nothing but -inf, or a target that is no id.
        valid, ignored = row.norm.log_sum.isfinite(), row.target == IGNORE
        found: dict[str, Tensor] = {}
        if self.best:
            best = ids.T.to(torch.int64)
            z = _transformed(-keys.T if self.negative else keys.T, row)
            logprob = _logprob(z, row.norm)
            found |= {"top1_id": best[:, 0], "top1_logprob": logprob[:, 0], "max_logit": z[:, 0]}
            found["top1_hit"] = (best[:, 0] == row.target) & valid
            found |= {"top_k_ids": best[:, : self.top_k], "top_k_logprobs": logprob[:, : self.top_k]}
        if self.sums:
            m, q, count, center, mean, squares = moments
            found["collision"] = q * (2 * ((m - row.norm.reference) - row.norm.log_sum)).exp()
            found |= {"mean_logit": center + mean, "logit_variance": squares / count}
        if ahead is not None:
            found["rank"] = ahead.to(torch.int64)
        if self.ids is not None:
            logprob = _logprob(_transformed(x.T, row), row.norm)
            logprob = logprob.masked_fill(self.ids == IGNORE, 0.0)
            if self.rest:
                other = Statistic.of(rest)
                together = ((other.m - row.norm.reference) + other.s.log()) - row.norm.log_sum
                logprob = torch.cat([logprob, torch.where(other.s == 0, -torch.inf, together)[:, None]], 1)
            found["further_logprobs"] = logprob
        return {name: _told(found[name], valid, ignored) for name in self.names}


def _at(problem: Problem, column: Tensor) -> Tensor:
    """``[R, K]`` logits at the columns ``[R, K]`` of the problem; NaN where they are not among them."""
    inside = (column >= 0) & (column < problem.columns)
    if not problem.columns:
        return torch.full_like(column, torch.nan, dtype=problem.gain.dtype)
    row = torch.arange(problem.num_rows, device=column.device) if problem.index is None else problem.index
    x = problem.logits[row[:, None], column.clamp(0, problem.columns - 1)].to(problem.gain.dtype)
    return torch.where(inside, x, torch.nan)


def _padded(ids: Tensor, num_rows: int) -> Tensor:
    """As many rows as a padded tile has."""
    return ids if len(ids) == num_rows else torch.nn.functional.pad(ids, (0, 0, 0, num_rows - len(ids)))


def _merge_best(keys: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The best k of ``[P, k, R]`` lists, each best first: by key, and where equal by id."""
    keys, ids = keys.flatten(0, 1), ids.flatten(0, 1)
    order = ids.argsort(0)
    order = order.gather(0, keys.gather(0, order).argsort(dim=0, descending=True, stable=True))[:k]
    return keys.gather(0, order), ids.gather(0, order)


def _merge_moments(parts: Tensor) -> Tensor:
    """``[P, 6, R]`` to ``[6, R]``: means by their counts about one of the centers, and squares about the new mean."""
    m, q, count, center, mean, squares = parts.unbind(1)
    top = m.amax(0)
    shift = torch.where(m == -torch.inf, 0.0, m - top)
    total = count.sum(0)
    # Of a part with columns: the center of an empty one is 0, and may be far away.
    base = center.gather(0, count.argmax(0, keepdim=True))
    mean = torch.where(count == 0, 0.0, (center - base) + mean)
    new = (count / total.clamp_min(1.0) * mean).sum(0)
    squares = torch.where(count == 0, 0.0, squares + count * (mean - new).square()).sum(0)
    return torch.stack([top, (q * (2 * shift).exp()).sum(0), total, base[0], new, squares])


def _transformed(x: Tensor, row: Row) -> Tensor:
    """``[R, K]`` z from logits as they were."""
    gain = row.gain[:, None]
    return gain * torch.tanh(x * row.squash) if row.squash else gain * x


def _logprob(z: Tensor, norm: Normaliser) -> Tensor:
    return (z - norm.reference[:, None]) - norm.log_sum[:, None]


def _told(x: Tensor, valid: Tensor, ignored: Tensor) -> Tensor:
    """A result with what stands for rows without one: 0 and id -1 for ignored rows, NaN and -1 where undefined."""
    valid, ignored = (flag[:, None] if x.dim() == 2 else flag for flag in (valid, ignored))
    if x.dtype == torch.bool:
        return x & ~ignored
    if x.dtype == torch.int64:
        return torch.where(valid & ~ignored, x, -1)
    return torch.where(valid, x, torch.nan).masked_fill(ignored, 0.0)
