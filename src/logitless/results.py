"""From a shard's statistics to results: one gather over the vocabulary group, one merge, three formulas."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.collectives import gather_over
from logitless.softmax import ELSEWHERE, SKIP, Normaliser, Statistic, entropy, mean_shift, merge, normaliser
from logitless.spec import IGNORE, TokenStats


class RowResults(NamedTuple):
    """``[R]`` results of each row, and what backward needs of it.

    Attributes:
        logprob, entropy, log_z: as in :class:`~logitless.spec.TokenStats`.
        norm: pieces of log Z.
        kept_norm: pieces of the log normaliser over the support; ``norm`` itself where there is none.
        mean: ``w / s``, if entropy was wanted.
    """

    logprob: Tensor
    entropy: Tensor | None
    log_z: Tensor
    norm: Normaliser
    kept_norm: Normaliser
    mean: Tensor | None


def target_column(target: Tensor, start: int, columns: int) -> Tensor:
    """``[R]`` column of each target among the ``columns`` from ``start`` on, ``ELSEWHERE`` or ``SKIP``."""
    column = target - start
    inside = (column >= 0) & (column < columns)
    return torch.where(inside, column, ELSEWHERE).masked_fill(target == IGNORE, SKIP)


def row_results(
    statistic: Tensor, support: Tensor | None, ignored: Tensor, with_entropy: bool, group: Any
) -> RowResults:
    """Results of the whole vocabulary from this shard's ``[4, R]`` statistic, and ``[2, R]`` (m, s) of the support."""
    lines, support = whole_vocabulary(statistic, support, group)
    row = Statistic.of(lines)
    norm = normaliser(row)
    kept_norm = norm if support is None else normaliser(Statistic.of(support))
    logprob = (row.t - kept_norm.reference) - kept_norm.log_sum
    mean = mean_shift(row) if with_entropy else None
    return RowResults(
        logprob=logprob.masked_fill(ignored, 0.0),
        entropy=None if mean is None else entropy(norm, mean).masked_fill(ignored, 0.0),
        log_z=(norm.reference + norm.log_sum).masked_fill(ignored, 0.0),
        norm=norm,
        kept_norm=kept_norm,
        mean=mean,
    )


def whole_vocabulary(
    statistic: Tensor, support: Tensor | None, group: Any, further: tuple[str, ...] = ()
) -> tuple[Tensor, Tensor | None]:
    """The statistic over all shards, and that of the support: one ``all_gather`` for both, or none if unsharded."""
    support_parts = None if support is None else support[None]
    if group is not None:
        lines = len(statistic)
        parts = gather_over(group, statistic if support is None else torch.cat([statistic, support]))
        statistic = merge(parts[:, :lines], further)
        support_parts = None if support is None else parts[:, lines:]
    return statistic, None if support_parts is None else merge_support(support_parts, Statistic.of(statistic).t)


def merge_support(parts: Tensor, target: Tensor) -> Tensor:
    """``[P, 2, R]`` parts of the support's (m, s) as one statistic with the given target logit."""
    m, s = parts.unbind(1)
    return merge(torch.stack([m, s, torch.zeros_like(s), target.expand_as(s)], dim=1))


def in_shape(stats: TokenStats, shape: tuple[int, ...]) -> TokenStats:
    """``[R]`` results in the caller's shape. Vectors stay as they are: FSDP warns of modules that return views."""
    if len(shape) == 1:
        return stats
    entropy, log_z = (None if x is None else x.reshape(shape) for x in (stats.entropy, stats.log_z))
    return TokenStats(stats.logprob.reshape(shape), entropy, log_z)
