"""Results of each row from lines of this shard's columns: one gather over the vocabulary group, one merge, formulas.

    Lines   numbers of the columns here      ->  find  ->      Found   results by name, and tensors for backward

Two readings take a second look when the first is merged over all ranks: the rank of a target, and the divergence from a
teacher. Their callers hand :func:`find` the function that looks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.backends import run_solved
from logitless.backends.divergences import Divergence, combined
from logitless.collectives import gather_over, sum_over
from logitless.readings.best import merged_best
from logitless.readings.reading import Row
from logitless.readings.support import merge_kept
from logitless.readings.table import Table
from logitless.softmax import (
    WIDTH,
    Normaliser,
    Statistic,
    entropy,
    kl_of,
    mean_shift,
    merge,
    merge_kl,
    normaliser,
    solved,
)


class Lines(NamedTuple):
    """Lines of the columns here, of R rows.

    Attributes:
        statistic: ``[4, R]`` of the softmax.
        kept: ``[2, R]`` (m, s) of the ids that a sampler kept, or None.
        more: lines of the other readings, or None.
        teacher: ``[4, R]`` statistic of a teacher's logits, or None.
        best: ``[2, R]`` key and id of a teacher's best column, or None.
        cross: ``[2, R]`` sums of a KL between the references of the two statistics (:func:`~logitless.softmax.kl_of`),
            or None: then both are compared in a second look.
    """

    statistic: Tensor
    kept: Tensor | None = None
    more: Tensor | None = None
    teacher: Tensor | None = None
    best: Tensor | None = None
    cross: Tensor | None = None


class Taught(NamedTuple):
    """The results that are wanted beside a teacher.

    Attributes:
        kind: which divergence.
        compare: the second look. Takes both normalisers, and where the acceptance is read the logarithm of a factor of
            the teacher's probabilities (:attr:`~logitless.backends.contract.Pair.share`); returns ``[2, R]`` or
            ``[5, R]`` sums over the columns here. None where the first look has summed the divergence.
        accepts: whether the acceptance is read.
        bucket: whether the divergence is over all ids of the teacher, and not over those that both have.
        stats: names of the teacher's statistics that are wanted.
        whole: lines of the teacher over all of its ids on all ranks, as a pass over its whole vocabulary makes them;
            None where the student has them all, too.
    """

    kind: Divergence
    compare: Callable[[Normaliser, Normaliser, Tensor | None], Tensor] | None
    accepts: bool
    bucket: bool
    stats: tuple[str, ...]
    whole: Tensor | None = None


class Found(NamedTuple):
    """Results of R rows, as :class:`~logitless.spec.TokenStats` names them, and tensors for backward, by name."""

    results: dict[str, Tensor]
    saved: dict[str, Tensor]

    @staticmethod
    def joined(parts: list[Found], num_rows: int) -> Found:
        """The results of consecutive chunks of rows as one, of which the first ``num_rows`` rows count."""
        if len(parts[0].results["logprob"]) == num_rows:
            return parts[0]
        both = (
            {name: torch.cat([part[i][name] for part in parts])[:num_rows] for name in parts[0][i]} for i in range(2)
        )
        return Found(*both)

    @property
    def norm(self) -> Normaliser:
        return Normaliser(self.saved["reference"], self.saved["log_sum"])


class Asked(NamedTuple):
    """The results that :func:`find` is to make, and of which rows.

    Attributes:
        target, gain, squash: ``[R]`` of the rows, and the head's.
        ignored: ``[R]`` rows to leave out; None where every row is known to have a target in the vocabulary.
        entropy: whether entropy is wanted.
        group: of the vocabulary, or None.
        table: other readings, or None.
        solver: backend that makes statistics of order-free lines; None where lines are statistics.
    """

    target: Tensor
    gain: Tensor
    squash: float
    ignored: Tensor | None
    entropy: bool
    group: Any
    table: Table | None = None
    solver: str | None = None


def find(
    asked: Asked, lines: Lines, count: Callable[[Tensor], Tensor] | None = None, taught: Taught | None = None
) -> Found:
    """Results over the whole vocabulary.

    Args:
        count: the second look of a rank: from the keys of the targets to how many columns here come before each.
        taught: the results that are wanted beside a teacher, where there is one.
    """
    statistic, kept, more, teacher, best, cross = _whole(asked, lines, taught)
    ignored = asked.ignored
    norm, target, mean, own_entropy = solved(statistic, ignored is None, asked.entropy)
    kept_norm = norm if kept is None else normaliser(Statistic.of(kept))
    logprob = (target - kept_norm.reference) - kept_norm.log_sum
    results = {"logprob": logprob, "log_z": norm.reference + norm.log_sum}
    saved = {"reference": norm.reference, "log_sum": norm.log_sum, "logprob": logprob}
    if mean is not None and own_entropy is not None:
        saved["mean"], results["entropy"] = mean, own_entropy
    if ignored is not None:
        for x in results.values():
            x.masked_fill_(ignored, 0.0)
    if kept is not None:
        saved |= {"kept_reference": kept_norm.reference, "kept_log_sum": kept_norm.log_sum}
    if asked.table is not None and more is not None:
        ahead = None
        if count is not None:
            ahead = count(asked.table.key(more))
            ahead = ahead if asked.group is None else sum_over(asked.group, ahead)
        table = asked.table.results(more, Row(norm, asked.target, asked.gain, asked.squash), ahead)
        results, saved = results | table[0], saved | table[1]
    if teacher is not None and taught is not None:
        other = Statistic.of(teacher)
        sums = None if cross is None else _kl_sums(Statistic.of(statistic), norm, other, cross, taught)
        beside, for_backward = _divergence(norm, other, best, asked, taught, sums)
        if ignored is not None:
            beside = {name: x.masked_fill_(ignored, 0.0) for name, x in beside.items()}
        results, saved = results | beside, saved | for_backward
    return Found(results, saved)


def _divergence(
    norm: Normaliser, other: Statistic, best: Tensor | None, asked: Asked, taught: Taught, sums: Tensor | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results beside a teacher, whose statistic over the ids that both have is ``other``, and tensors for backward.

    Args:
        best: ``[2, R]`` key and id of the teacher's most likely column, where it is asked for.
        sums: over all columns of all ranks; None where both are still to be compared.
    """
    kind, whole, share = taught.kind, other, torch.zeros_like(other.m)
    if taught.whole is not None:
        lines, others, best = taught.whole.split([WIDTH, 1, len(taught.whole) - WIDTH - 1])
        whole = Statistic.of(lines)
        # The logarithm of the teacher's probability of the ids that both have. Both sums are rounded, in other orders:
        # where there are no other ids, it is 0.
        share = ((other.m - whole.m) + (torch.log(other.s) - torch.log(whole.s))).clamp_max(0.0)
        share = torch.where(others[0] > 0, share, 0.0)
    # The teacher's normaliser over all of its ids is larger by its share of those that both have.
    teacher = Normaliser(other.m, torch.log(other.s) - share if taught.bucket else torch.log(other.s))
    factor = (torch.zeros_like(share) if taught.bucket else share) if taught.accepts else None
    if sums is None:
        assert taught.compare is not None
        sums = taught.compare(norm, teacher, factor)
        if asked.group is not None:
            sums = gather_over(asked.group, sums).sum(0)
    terms, mean = sums[:2]
    rest = -torch.expm1(share)
    if taught.bucket:
        terms = terms + torch.where(rest > 0, rest * kind.alone, 0.0)
    tv, rising, acceptance = (sums[2] + 0.5 * rest, *sums[3:]) if taught.accepts else (None, None, None)
    value, by_terms, by_acceptance = combined(kind, terms, tv, acceptance)
    # The teacher never samples a target that it does not have.
    missing = other.t.isnan() & ~teacher.log_sum.isnan()
    logprob = torch.where(missing, -torch.inf, (other.t - teacher.reference) - teacher.log_sum)
    over = whole if taught.bucket else other
    own_entropy = entropy(Normaliser(over.m, torch.log(over.s)), mean_shift(over))
    results = {"divergence": value, "teacher_logprob": logprob, "teacher_entropy": own_entropy}
    # The mean slope is the sum of p slope over a row; of some divergences it is known exactly, without rounding.
    none = torch.zeros_like(mean)
    mean = {"forward_kl": none, "lk_hybrid": none, "reverse_kl": terms}.get(kind.kind, mean)
    saved = {"teacher_reference": teacher.reference, "teacher_log_sum": teacher.log_sum, "mean_slope": mean}
    if acceptance is not None and rising is not None and factor is not None:
        results["acceptance"] = acceptance
        saved |= {"share": factor, "mean_rising": rising}
    if by_terms is not None and by_acceptance is not None:
        saved |= {"by_terms": by_terms, "by_acceptance": by_acceptance}
    if "teacher_log_z" in taught.stats:
        results["teacher_log_z"] = whole.m + torch.log(whole.s)
    if "teacher_shared" in taught.stats:
        results["teacher_shared"] = share.exp()
    if "teacher_top1" in taught.stats and best is not None:
        results["teacher_top1_id"] = best[1].to(torch.int64)
    return results, saved


def _kl_sums(own: Statistic, norm: Normaliser, other: Statistic, cross: Tensor, taught: Taught) -> Tensor:
    """``[2, R]`` the KL, and 0 for its mean slope, which follows from it. NaN where the row has no target."""
    p, q = (own, other) if taught.kind.kind == "reverse_kl" else (other, own)
    value = kl_of(p.s, q.s, *cross)
    value = torch.where(norm.log_sum.isnan(), norm.log_sum, value)
    return torch.stack([value, torch.zeros_like(value)])


def _whole(asked: Asked, lines: Lines, taught: Taught | None) -> tuple[Tensor, *tuple[Tensor | None, ...]]:
    """The lines over all shards, those of kept ids as a statistic: one ``all_gather`` for all of them, or none."""
    statistic, kept, more, teacher, best, cross = lines
    kept_parts = None if kept is None else kept[None]
    if asked.solver is not None and asked.group is None:
        statistic = run_solved(asked.solver, statistic[None], asked.gain)
    if asked.group is not None:
        sent = [x for x in lines if x is not None]
        parts = gather_over(asked.group, sent[0] if len(sent) == 1 else torch.cat(sent))
        gathered = list(parts.split([len(x) for x in sent], 1))
        own = gathered.pop(0)
        statistic = merge(own) if asked.solver is None else run_solved(asked.solver, own, asked.gain)
        kept_parts = None if kept is None else gathered.pop(0)
        more = None if more is None or asked.table is None else asked.table.merge(gathered.pop(0))
        others = None if teacher is None else gathered.pop(0)
        teacher = None if others is None else merge(others)
        best = None if best is None else merged_best(gathered.pop(0), 1)
        if cross is not None and others is not None and taught is not None:
            cross = merge_kl(own, others, gathered.pop(0), taught.kind.kind == "reverse_kl")
    kept = None if kept_parts is None else merge_kept(kept_parts, Statistic.of(statistic).t)
    assert len(statistic) == WIDTH
    return statistic, kept, more, teacher, best, cross
