"""From a shard's statistics to results: one gather over the vocabulary group, one merge, three formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.collectives import gather_over, sum_over
from logitless.extras import Extras, Row, SavedExtras
from logitless.softmax import ELSEWHERE, SKIP, Normaliser, Statistic, entropy, mean_shift, merge, normaliser
from logitless.spec import IGNORE, TokenStats


class RowResults(NamedTuple):
    """``[R]`` results of each row, and what backward needs of it.

    Attributes:
        logprob, entropy, log_z: as in :class:`~logitless.spec.TokenStats`.
        norm: pieces of log Z.
        kept_norm: pieces of the log normaliser over the support; ``norm`` itself where there is none.
        mean: ``w / s``, if entropy was wanted.
        extras: ``[L, R]`` lines of the extras, if there are any.
    """

    logprob: Tensor
    entropy: Tensor | None
    log_z: Tensor
    norm: Normaliser
    kept_norm: Normaliser
    mean: Tensor | None
    extras: Tensor | None = None


def target_column(target: Tensor, start: int, columns: int) -> Tensor:
    """``[R]`` column of each target among the ``columns`` from ``start`` on, ``ELSEWHERE`` or ``SKIP``."""
    column = target - start if start else target
    column = column.masked_fill((column < 0) | (column >= columns), ELSEWHERE)
    return column.masked_fill_(target == IGNORE, SKIP)


def row_results(
    statistic: Tensor,
    support: Tensor | None,
    ignored: Tensor | None,
    with_entropy: bool,
    group: Any,
    extras: Extras | None = None,
    extra_lines: Tensor | None = None,
) -> RowResults:
    """Results of the whole vocabulary from this shard's ``[4, R]`` statistic, ``[2, R]`` (m, s) of the support, and
    lines of the extras.

    Args:
        ignored: ``[R]`` rows to leave out; None where every row is known to have a target in the vocabulary.
    """
    lines, support, extra_lines = whole_vocabulary(statistic, support, group, extras=extras, extra_lines=extra_lines)
    row = Statistic.of(lines)
    norm = Normaliser(row.m, row.s.log()) if ignored is None else normaliser(row)
    kept_norm = norm if support is None else normaliser(Statistic.of(support))
    logprob = (row.t - kept_norm.reference) - kept_norm.log_sum
    mean = mean_shift(row) if with_entropy else None
    return RowResults(
        logprob=_without(ignored, logprob),
        entropy=None if mean is None else _without(ignored, entropy(norm, mean)),
        log_z=_without(ignored, norm.reference + norm.log_sum),
        norm=norm,
        kept_norm=kept_norm,
        mean=mean,
        extras=extra_lines,
    )


def _without(ignored: Tensor | None, x: Tensor) -> Tensor:
    """Results with 0 in rows to leave out, in place."""
    return x if ignored is None else x.masked_fill_(ignored, 0.0)


def whole_vocabulary(
    statistic: Tensor,
    support: Tensor | None,
    group: Any,
    further: tuple[str, ...] = (),
    extras: Extras | None = None,
    extra_lines: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The statistic over all shards, that of the support and the lines of the extras: one ``all_gather`` for all of
    them, or none if unsharded."""
    support_parts = None if support is None else support[None]
    if group is not None:
        sent = [x for x in (statistic, support, extra_lines) if x is not None]
        parts = gather_over(group, sent[0] if len(sent) == 1 else torch.cat(sent))
        found = list(parts.split([len(x) for x in sent], 1))
        statistic = merge(found.pop(0), further)
        support_parts = None if support is None else found.pop(0)
        extra_lines = None if extras is None else extras.merge(found.pop(0))
    support = None if support_parts is None else merge_support(support_parts, Statistic.of(statistic).t)
    return statistic, support, extra_lines


def extra_results(
    extras: Extras, lines: Tensor, row: Row, group: Any, count: Callable[[Tensor, Tensor], Tensor]
) -> tuple[dict[str, Tensor], SavedExtras]:
    """Results of the extras by name, and what backward needs of them.

    Args:
        count: ``(key, place)`` to how many columns of this shard come before those of the targets. The counts of all
            shards are summed: one ``all_reduce``, and only where ranks are asked for.
    """
    ahead = None
    if extras.ranked:
        ahead = count(extras.target_key(lines), row.target - extras.start)
        ahead = ahead if group is None else sum_over(group, ahead)
    found = extras.results(lines, row, ahead)
    return found, SavedExtras.of(extras, lines, found)


def merge_support(parts: Tensor, target: Tensor) -> Tensor:
    """``[P, 2, R]`` parts of the support's (m, s) as one statistic with the given target logit."""
    m, s = parts.unbind(1)
    return merge(torch.stack([m, s, torch.zeros_like(s), target.expand_as(s)], dim=1))


def in_shape(stats: TokenStats, shape: tuple[int, ...]) -> TokenStats:
    """``[R]`` results in the caller's shape. Vectors stay as they are: FSDP warns of modules that return views."""
    if len(shape) == 1:
        return stats
    # Lists of ids, and what belongs to them, keep their last dimension.
    return TokenStats(*(None if x is None else x.reshape((*shape, *x.shape[1:])) for x in stats))  # pyright: ignore[reportArgumentType]
