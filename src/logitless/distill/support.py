"""Divergence over the ids that a sampler kept: dot products with a few rows of both heads, and no product.

    student's ids and target, teacher's own ids  ->  one sorted list of entries  ->  logits of both, one all_reduce each
    log-probs of both over their own ids  ->  terms of ``backends/divergences.py``, summed by row

A teacher without ids of its own is over the student's. Everything is a flat vector over the entries, in float64: they
are few, and a small divergence of large logits keeps its digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.backends.divergences import Divergence, elements
from logitless.call import Call
from logitless.call.checks import check_kept, vocabulary
from logitless.collectives import sum_over
from logitless.distill.source import own_call, source_columns
from logitless.distill.stats import DivergenceStats
from logitless.distill.teacher import Teacher, Teachers
from logitless.errors import LogitlessError
from logitless.from_hidden.id_logits import entry_logits
from logitless.from_hidden.logprobs import score
from logitless.from_hidden.plan import LinearPlan, SupportPlan
from logitless.from_hidden.projection import gathered_tokens
from logitless.from_hidden.support import raw_logits
from logitless.kept import Kept
from logitless.spec import IGNORE, Head, inspectable
from logitless.support import Entries, Support


def check_supports(call: Call, members: Sequence[Teacher]) -> None:
    """Raise for teachers whose ids do not go with the call's."""
    name = call.asked.caller
    if any(x.top_k is not None for x in members):
        raise LogitlessError(
            f"{name}: kept= does not go with Teacher.from_top_k, which names its own ids. Leave kept= out; with "
            f'tail="renormalise" both distributions are over those ids.'
        )
    supports = [x.kept for x in members if x.kept is not None]
    if supports and (call.asked.kept is None or len(supports) < len(members)):
        raise LogitlessError(
            f"{name}: Teacher(kept=) goes with kept= of the student, and of several teachers all have it or none."
        )
    for kept in supports:
        check_kept(name, kept, call.rows, call.vocab_size, call.gain.device)
        none = (kept.lengths == 0) & (call.rows.target != IGNORE)
        if inspectable(none) and len(supports) == 1 and bool(none.any()):
            raise LogitlessError(f"{name}: the teacher kept no id at all in a row. Give at least one id for each.")


class Outcomes(NamedTuple):
    """The ids of both in one sorted list.

    Attributes:
        support: its entries and their rows.
        own, others: ``[E]`` whether the student, and the teacher, has the id. False for second copies.
    """

    support: Support
    own: Tensor
    others: Tensor

    @staticmethod
    def of(call: Call, teacher: Teacher | Teachers) -> Outcomes:
        kept, target = call.asked.kept, call.rows.target
        assert kept is not None
        if all(x.kept is None for x in _members(teacher)):
            support = Support.of(kept, target, call.start, call.vocab_size)
            return Outcomes(support, support.entries.first, support.entries.first)
        other = _of_rows(teacher)
        each, size = torch.arange(call.num_rows, device=target.device), call.vocab_size + 2
        row = torch.cat([_rows(kept, each), each, _rows(other, each)])
        ids = torch.cat([kept.ids, target, other.ids]).clamp(-1, call.vocab_size)
        # As for one support: one sort, and copies of an id side by side. The last bit tells whose it is.
        taught = torch.arange(len(ids), device=ids.device) >= len(kept.ids) + call.num_rows
        key = (2 * (size * row + ids + 1) + taught).sort(stable=True).values
        key, taught = key // 2, key % 2 == 1
        row = key // size
        ids = key - size * row - 1
        first = torch.cat([key.new_ones(min(1, len(key)), dtype=torch.bool), key[1:] != key[:-1]])
        entries = Entries(row, ids, first, ids == target.clamp(-1, call.vocab_size)[row])
        lengths = kept.lengths + other.lengths + 1
        support = Support(target, entries, lengths, call.start, call.vocab_size)
        return Outcomes(support, first & _any_copy(~taught, first), first & _any_copy(taught, first))


def score_kept(
    hidden: Tensor,
    weight: Tensor,
    call: Call,
    plan: LinearPlan | SupportPlan,
    teacher: Teacher | Teachers,
    kind: Divergence,
) -> DivergenceStats:
    """``[R]`` results of a call that was checked. Over the support alone, or, as the call's scope says, with entropy
    and log Z of the whole vocabulary."""
    outcomes = Outcomes.of(call, teacher)
    support, read = outcomes.support, ~outcomes.support.lone()
    log_q = _log_softmax(_teacher_logits(teacher, support, read, call), outcomes.others, support)
    raw, gain = entry_logits(hidden, weight, support, read, call).double(), call.gain.double()[support.entries.row]
    z = gain * torch.tanh(raw * call.squash) if call.squash else gain * raw
    inside = (support.entries.ids >= 0) & (support.entries.ids < call.vocab_size)
    z = torch.where(inside, z, torch.nan)
    found = _Ragged.apply(z, log_q, outcomes, kind)
    ignored = call.rows.target == IGNORE
    divergence, logprob, entropy, *other = (torch.where(ignored, 0.0, x.to(call.gain.dtype)) for x in found)
    if isinstance(plan, SupportPlan):
        return DivergenceStats(divergence, logprob, entropy, None, *other)
    own = score(hidden, weight, call, plan)
    assert own.entropy is not None
    return DivergenceStats(divergence, own.logprob, own.entropy, own.log_z, *other)


class _Ragged(torch.autograd.Function):
    """Divergence, log-prob and entropy of each row, and the teacher's, from the entries' logits.

    The gradient by a logit is ``p slope - p mean``, made so that nothing of a certain id's size is subtracted.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, log_q: Tensor, outcomes: Outcomes, kind: Divergence) -> tuple[Tensor, ...]:
        support, own, others = outcomes
        row, target = support.entries.row, support.entries.is_target & support.entries.first
        log_p = _log_softmax(z, own, support)
        p, found = log_p.exp(), elements(log_p, log_q, log_q - log_p, kind)
        u = found.weighted_slope
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
        return _sum(found.term, support), logprob, entropy, teacher_logprob, teacher_entropy

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
    # A row without any is undefined, not certain of nothing.
    total = _sum(d.exp(), support)
    log_sum = torch.where(total == 0, torch.nan, total).log()[row]
    return torch.where(has, d - log_sum, torch.where(log_sum.isnan(), torch.nan, -torch.inf))


def _times(x: Tensor, y: Tensor) -> Tensor:
    """Their product, 0 where x is, whatever y."""
    return torch.where(x == 0, 0.0, x * y)


def _sum(x: Tensor, support: Support) -> Tensor:
    return torch.segment_reduce(x, "sum", lengths=support.lengths, unsafe=True)


def _members(teacher: Teacher | Teachers) -> tuple[Teacher, ...]:
    return (teacher,) if isinstance(teacher, Teacher) else tuple(teacher.members)


def _rows(kept: Kept, each: Tensor) -> Tensor:
    """``[K]`` row of each kept id."""
    return torch.repeat_interleave(each, kept.lengths, output_size=kept.ids.numel())


def _of_rows(teacher: Teacher | Teachers) -> Kept:
    """What each row's own teacher kept."""
    kept = [x.kept for x in _members(teacher) if x.kept is not None]
    if isinstance(teacher, Teacher):
        return kept[0]
    parts = [torch.arange(len(x.lengths), device=x.ids.device) for x in kept]
    row = torch.cat([_rows(x, each) for x, each in zip(kept, parts, strict=True)])
    number = torch.cat([torch.full_like(x.ids, i) for i, x in enumerate(kept)])
    mine = number == teacher.which[row]
    order = row[mine].argsort(stable=True)
    lengths = torch.stack([x.lengths for x in kept]).gather(0, teacher.which[None])[0]
    return Kept(torch.cat([x.ids for x in kept])[mine][order], lengths)


def _any_copy(flag: Tensor, first: Tensor) -> Tensor:
    """Whether any copy of the same id in the same row has the flag."""
    run = first.cumsum(0) - 1
    return torch.zeros_like(run).scatter_reduce(0, run, flag.to(run.dtype), "amax").bool()[run]


def _teacher_logits(teacher: Teacher | Teachers, support: Support, read: Tensor, call: Call) -> Tensor:
    """``[E]`` logits in float64 of each row's own teacher; -inf for ids that it has not."""
    members, row = _members(teacher), support.entries.row
    total = call.gain.new_zeros((2, len(row)))
    gain, squash = torch.ones_like(total[0], dtype=torch.float64), torch.zeros_like(total[0], dtype=torch.float64)
    for number, member in enumerate(members):
        mine = torch.ones_like(read) if isinstance(teacher, Teacher) else teacher.which[row] == number
        head = member.head or Head()
        total += torch.where(mine, _member_logits(member, support, read & mine, call), 0.0)
        gain = torch.where(mine, head.gain(call.num_rows, torch.float64, gain.device)[row], gain)
        squash = torch.where(mine, head.squash, squash)
    raw, has = (total if call.group is None else sum_over(call.group, total)).double()
    z = gain * torch.where(squash == 0, raw, torch.tanh(raw * squash))
    return torch.where(has > 0, z, -torch.inf)


def _member_logits(teacher: Teacher, support: Support, read: Tensor, call: Call) -> Tensor:
    """``[2, E]`` raw logits of the columns that are here, and whether they are."""
    _, columns = vocabulary(call.asked.caller, teacher.width, teacher.head or Head(), call.asked.shard)
    column, here = support.place(0, columns)
    source = source_columns(teacher, call, columns)
    if source is not None:
        ids = support.entries.ids
        column = torch.where((ids >= 0) & (ids < len(source)), source[ids.clamp(0, len(source) - 1)], -1)
        here, column = column >= 0, column.clamp_min(0)
    if teacher.logits is not None:
        logits = teacher.tokens.reshape(-1, teacher.width)
        at = call.rows.index[support.entries.row]
        raw = logits[at, column].to(call.gain.dtype) if columns else call.gain.new_zeros(len(at))
    else:
        assert teacher.weight is not None
        own = own_call(teacher, call, columns, call.gain)
        raw = raw_logits(
            gathered_tokens(teacher.tokens, call), teacher.weight, teacher.bias, support, (column, here & read), own
        )
    return torch.stack([torch.where(here & read, raw, 0.0), here.to(raw.dtype)])
