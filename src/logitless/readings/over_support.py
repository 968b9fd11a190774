"""Results over the sampler's support alone, from the logits of its ids: log-prob, entropy, divergence from a teacher.

    raw logits of the entries (``sources/listed``)  ->  statistic of each row, one all_gather if sharded  ->  results
    with a teacher: logits of both, in float64  ->  log-probs over their own ids  ->  terms, summed by row

Everything is a flat vector over the entries, with a graph of its own: without the vocabulary no tiles are needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.backends.divergences import Divergence, over_outcomes
from logitless.operands import Kept
from logitless.readings.found import Asked, Lines, find
from logitless.readings.support import Entries, Support, rows_of, support_gradient, support_statistic
from logitless.softmax import Normaliser, coefficients
from logitless.spec import IGNORE, TokenStats


def results_over(raw: Tensor, support: Support, here: tuple[Tensor, Tensor], asked: Asked, grad: bool) -> TokenStats:
    """``[R]`` log-prob and entropy over the support.

    Args:
        raw: ``[E]`` logits of the entries that are here.
        here: place of each entry among the columns here, and whether it is one of them.
        grad: whether the entropy has a graph.
    """
    vectors = (*support.entries, support.lengths, *here)
    return TokenStats(*_OverSupport.apply(raw, *vectors, support, asked, grad))  # pyright: ignore[reportGeneralTypeIssues]


class _OverSupport(torch.autograd.Function):
    """Log-prob and entropy of each row from its entries' logits; small terms stay small in the gradient."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *vectors, support, asked, grad = rest
        logits = support.transformed(raw, *vectors[5:], asked.gain, asked.squash)
        found = find(asked, Lines(support_statistic(logits)))
        ctx.set_materialize_grads(False)
        entropy = (found.results["entropy"],) if asked.entropy else ()
        if not grad:
            ctx.mark_non_differentiable(*entropy)
        saved = {**found.saved, "raw": raw, **dict(zip(_NAMES, vectors, strict=True))}
        if not grad:
            saved.pop("mean", None)
        ctx.names, ctx.support, ctx.asked = tuple(saved), support, asked
        ctx.save_for_backward(*saved.values())
        return found.results["logprob"], *entropy

    @staticmethod
    def backward(ctx: Any, g_logprob: Tensor | None, g_entropy: Tensor | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, asked = dict(zip(ctx.names, ctx.saved_tensors, strict=True)), ctx.asked
        entries = Entries(*(saved[name] for name in _NAMES[:4]))
        support = Support(asked.target, entries, saved["lengths"], ctx.support.start, ctx.support.vocab_size)
        logits = support.transformed(saved["raw"], saved["column"], saved["here"], asked.gain, asked.squash)
        norm, logprob = Normaliser(saved["reference"], saved["log_sum"]), saved["logprob"]
        g_logprob = torch.zeros_like(logprob) if g_logprob is None else g_logprob.contiguous()
        coef = coefficients(logprob, norm, saved.get("mean"), g_logprob, g_entropy, None)
        d_raw = support_gradient(logits, norm, coef, asked.target == IGNORE)
        return torch.where(logits.here, d_raw, 0.0), *(None,) * 10


_NAMES = ("row", "ids", "once", "is_target", "lengths", "column", "here")


class Outcomes(NamedTuple):
    """The ids of a student and of its teacher in one sorted list, and ``[E]`` whether the student (``own``), and the
    teacher (``others``), has the id. False for second copies."""

    support: Support
    own: Tensor
    others: Tensor

    @staticmethod
    def of(kept: Kept, other: Kept | None, target: Tensor, start: int, vocab_size: int) -> Outcomes:
        """The ids that the student kept, and those that the teacher kept (``other``; None if they are the same)."""
        if other is None:
            support = Support.of(kept, target, start, vocab_size)
            return Outcomes(support, support.entries.once, support.entries.once)
        each = torch.arange(len(target), device=target.device)
        row = torch.cat([rows_of(kept, each), each, rows_of(other, each)])
        ids = torch.cat([kept.ids, target, other.ids]).clamp(-1, vocab_size)
        # Keys are sorted once, as for one support; their last bit tells whose the id is.
        taught = torch.arange(len(ids), device=ids.device) >= len(kept.ids) + len(target)
        key = (2 * ((vocab_size + 2) * row + ids + 1) + taught).sort(stable=True).values
        taught = key % 2 == 1
        entries = Entries.of_keys(key // 2, target, vocab_size)
        once = entries.once
        support = Support(target, entries, kept.lengths + other.lengths + 1, start, vocab_size)
        return Outcomes(support, once & _any_copy(~taught, once), once & _any_copy(taught, once))


def divergence_over(z: Tensor, others: Tensor, outcomes: Outcomes, kind: Divergence, dtype: torch.dtype) -> TokenStats:
    """``[R]`` divergence, log-prob and entropy over the ids, and the teacher's log-prob and entropy, from ``[E]``
    transformed logits in float64 of the student (``z``) and of the teacher (``others``)."""
    support, target = outcomes.support, outcomes.support.target
    inside = (support.entries.ids >= 0) & (support.entries.ids < support.vocab_size)
    log_q = _log_softmax(others, outcomes.others, support)
    found = _Ragged.apply(torch.where(inside, z, torch.nan), log_q, outcomes, kind)
    values = (torch.where(target == IGNORE, 0.0, x.to(dtype)) for x in found)  # pyright: ignore[reportGeneralTypeIssues]
    names = ("divergence", "logprob", "entropy", "teacher_logprob", "teacher_entropy")
    return TokenStats(**dict(zip(names, values, strict=True)))


class _Ragged(torch.autograd.Function):
    """Divergence, log-prob and entropy of each row, and the teacher's, from the entries' logits.

    The gradient by a logit is ``p slope - p mean``, made so that nothing of a certain id's size is subtracted.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, log_q: Tensor, outcomes: Outcomes, kind: Divergence) -> tuple[Tensor, ...]:
        support, own, others = outcomes
        row, target = support.entries.row, support.entries.is_target & support.entries.once
        log_p = _log_softmax(z, own, support)
        p = log_p.exp()
        divergence, u = over_outcomes(log_p, log_q, kind, lambda x: _sum(x, support), lambda x: x[row])
        entropy = _sum(-_times(p, log_p), support)
        gradient = u * (_sum(p, support)[row] - p) - p * (_sum(u, support)[row] - u)
        ctx.save_for_backward(row, own, target, p, log_p, entropy, gradient)
        q = log_q.exp()
        has = _sum((target & others).to(q), support) > 0
        teacher_logprob = torch.where(has, _sum(torch.where(target & others, log_q, 0.0), support), -torch.inf)
        logprob = _sum(torch.where(target, log_p, 0.0), support)
        teacher_entropy = _sum(-_times(q, log_q), support)
        ctx.mark_non_differentiable(teacher_logprob, teacher_entropy)
        ctx.set_materialize_grads(False)
        return divergence, logprob, entropy, teacher_logprob, teacher_entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        row, own, target, p, log_p, entropy, gradient = ctx.saved_tensors
        by, g_logprob, g_entropy = upstream[:3]
        d_z = torch.zeros_like(p)
        if by is not None:
            d_z = d_z + _times(by[row], gradient)
        if g_logprob is not None:
            d_z = d_z - g_logprob[row] * torch.where(target, torch.expm1(log_p), p)
        if g_entropy is not None:
            d_z = d_z - g_entropy[row] * _times(p, log_p + entropy[row])
        return torch.where(own, d_z, 0.0), None, None, None


def _log_softmax(z: Tensor, has: Tensor, support: Support) -> Tensor:
    """``[E]`` log-probs over the entries of each row that ``has`` names; -inf for the others."""
    row = support.entries.row
    z = torch.where(has, z, -torch.inf)
    highest = torch.segment_reduce(z, "max", lengths=support.lengths, unsafe=True)
    d = z - torch.where(highest == -torch.inf, 0.0, highest)[row]
    # A row without any entry is undefined: NaN, and not a log-prob of 0.
    total = _sum(d.exp(), support)
    log_sum = torch.where(total == 0, torch.nan, total).log()[row]
    return torch.where(has, d - log_sum, torch.where(log_sum.isnan(), torch.nan, -torch.inf))


def _times(x: Tensor, y: Tensor) -> Tensor:
    """``x * y``, and 0 where x is 0, even if y is not finite."""
    return torch.where(x == 0, 0.0, x * y)


def _sum(x: Tensor, support: Support) -> Tensor:
    return torch.segment_reduce(x, "sum", lengths=support.lengths, unsafe=True)


def _any_copy(flag: Tensor, once: Tensor) -> Tensor:
    """Whether any copy of the same id in the same row has the flag."""
    run = once.cumsum(0) - 1
    return torch.zeros_like(run).scatter_reduce(0, run, flag.to(run.dtype), "amax").bool()[run]
