"""From a shard's statistics to results: one gather over the vocabulary group, one merge, three formulas."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.collectives import gather_over
from logitless.softmax import ELSEWHERE, SKIP, Normaliser, entropy, mean_shift, merge, normaliser
from logitless.spec import IGNORE, TokenStats


class RowResults(NamedTuple):
    """``[R]`` results of each row, and what backward needs of it.

    Attributes:
        logprob, entropy, log_z: as in :class:`~logitless.spec.TokenStats`.
        norm: pieces of log Z.
        kept_norm: pieces of the log normaliser over the kept ids; ``norm`` itself if there are none.
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
    stats: Tensor, kept_stats: Tensor | None, ignored: Tensor, with_entropy: bool, group: Any
) -> RowResults:
    """Results from ``[4, R]`` statistics, and ``[2, R]`` of the kept ids, of this shard."""
    stats, kept_stats = _whole_vocabulary(stats, kept_stats, group)
    norm = normaliser(stats)
    kept_norm = norm if kept_stats is None else normaliser(kept_stats)
    logprob = (stats[3] - kept_norm.reference) - kept_norm.log_sum
    mean = mean_shift(stats) if with_entropy else None
    return RowResults(
        logprob=logprob.masked_fill(ignored, 0.0),
        entropy=None if mean is None else entropy(norm, mean).masked_fill(ignored, 0.0),
        log_z=(norm.reference + norm.log_sum).masked_fill(ignored, 0.0),
        norm=norm,
        kept_norm=kept_norm,
        mean=mean,
    )


def _whole_vocabulary(stats: Tensor, kept_stats: Tensor | None, group: Any) -> tuple[Tensor, Tensor | None]:
    """Statistics over all shards, and those of the kept ids: one ``all_gather`` for both, or none if unsharded."""
    kept_parts = None if kept_stats is None else kept_stats[None]
    if group is not None:
        parts = gather_over(group, stats if kept_stats is None else torch.cat([stats, kept_stats]))
        stats = merge(parts[:, :4])
        kept_parts = None if kept_stats is None else parts[:, 4:]
    return stats, None if kept_parts is None else merge_kept(kept_parts, stats[3])


def merge_kept(parts: Tensor, target: Tensor) -> Tensor:
    """``[P, 2, R]`` parts of the kept ids' (m, s) as one ``[4, R]`` statistic with the given target logit."""
    m, s = parts.unbind(1)
    return merge(torch.stack([m, s, torch.zeros_like(s), target.expand_as(s)], dim=1))


def in_shape(values: tuple[Tensor, Tensor | None, Tensor], shape: tuple[int, ...]) -> TokenStats:
    """``[R]`` results in the caller's shape. Vectors stay as they are: FSDP warns of modules that return views."""
    if len(shape) == 1:
        return TokenStats(*values)
    logprob, entropy_value, log_z = values
    reshaped = None if entropy_value is None else entropy_value.reshape(shape)
    return TokenStats(logprob.reshape(shape), reshaped, log_z.reshape(shape))
