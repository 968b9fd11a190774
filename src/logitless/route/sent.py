"""Every collective of a call, in order, from the call and its plan alone: nothing is sent to find out.

    forward     hidden states          all_gather        under sequence parallelism
                lines of each row      all_gather        [lines, R], or of each chunk of rows: all that is read
                a rank's count         all_reduce        [R], where a rank is asked for
                sums of a divergence   all_gather        [2 or 5, R], of each chunk of rows; with the lines where one
                                                         kernel makes both
    backward    hidden states          all_gather        once more, unless the head is frozen
                d_hidden               all_reduce        or reduce_scatter under sequence parallelism; none if partial
    a loss      sums over samples      all_reduce        [N] over the sequence group, in both directions

The lists follow the passes line by line. Tests count what really runs over ranks and hold it against them, and ranks
that compare their calls (``check_calls=True``) compare them: what would hang differs in one of these records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from logitless.backends.blocks import LINES
from logitless.call import Call, Operands, rows_of_each
from logitless.objectives import Objective, Preference
from logitless.operands import Logits, Teacher, Teachers
from logitless.route.plan import Collective, Plan
from logitless.softmax import WIDTH
from logitless.spec import has_values


def over_vocabulary(call: Call, plan: Plan, operands: Operands) -> tuple[Collective, ...]:
    """What the ranks of a vocabulary group send, of log-probs or of a loss."""
    if call.group is None:
        return ()
    assert call.shard is not None
    checked = [_facts("vocabulary", call.group)] if getattr(call.shard, "check_calls", False) else []
    of = _Sender(call, operands)
    if plan.kind == "one pass" and plan.first is None:
        return (*checked, *of.one_pass(plan), *_backward(of.reduced()))
    own = plan.first or plan
    return (*checked, *of.forward(own), *(_backward(of.backward(own)) if any(call.needs) else ()))


def over_samples(
    call: Call, objective: Objective | Preference, group: Any, check_group: bool, summed: bool
) -> tuple[Collective, ...]:
    """What the ranks that have parts of the same samples send for a loss.

    Args:
        group: as the caller gave it; None if samples are not split.
        summed: whether the sums of a reference over each sample came with the call.
    """
    if group is None:
        return ()
    checked = (_facts("sequence", group),) if check_group else ()
    if group.size() == 1:
        return checked
    sums = objective.sample_sums(summed) if isinstance(objective, Preference) else _sums(objective)
    wide = torch.float64.itemsize if isinstance(objective, Preference) else call.gain.dtype.itemsize
    size = len(call.rows.counts) * wide
    what = "a sum over each sample"
    if sums is None:
        what += " for each mean that a term of the caller's own takes"
    sent = Collective("all_reduce", what, size, "forward", "sequence", group.size(), each=sums is None)
    forward, backward = sums or (1, 1)
    back = (replace(sent, when="backward"),) * backward if any(call.needs) else ()
    return (*checked, *(sent,) * forward, *back)


def _sums(objective: Objective) -> tuple[int, int] | None:
    """How many sums over samples forward and backward take; None where a term of the caller's own takes them."""
    if objective.level in ("sequence", "batch") and not all(
        x is None or isinstance(x, str) for x in (objective.policy, objective.correction)
    ):
        return None
    # A correction is a constant, and has no backward.
    return sum(objective.sample_means), int(objective.sample_means[0])


def _facts(over: Literal["vocabulary", "sequence"], group: Any) -> Collective:
    return Collective("all_gather_object", "the facts of the call", 0, "forward", over, group.size())


def _backward(found: Iterator[Collective]) -> Iterator[Collective]:
    return (replace(x, when="backward") for x in found)


@dataclass(frozen=True)
class _Sender:
    """A call whose vocabulary is sharded over a group, and its operands."""

    call: Call
    operands: Operands

    def forward(self, plan: Plan) -> Iterator[Collective]:
        """Of log-probs and what is read with them."""
        call, teacher = self.call, self.call.asked.teacher
        if call.over_support and teacher is None:
            yield from self.tokens(self.operands.hidden)
            yield self.lines(call.num_rows, WIDTH)
        elif call.kept is not None and teacher is not None:
            yield from self.kept_entries()
            if not call.over_support:
                yield from self.vocabulary(plan)
        elif plan.kind == "support":
            yield from self.tokens(self.operands.hidden)
            yield self.wide("all_reduce", "logits of the teacher's ids", plan.ids)
        else:
            yield from self.vocabulary(plan)

    def vocabulary(self, plan: Plan) -> Iterator[Collective]:
        """Of results over the whole vocabulary."""
        yield from self.tokens(self.operands.hidden)
        if plan.taught:
            yield from self.teacher_rows(forward=True)
        # Rows beside a teacher go in chunks, at least one even without rows, or all at once in one kernel.
        by_chunks = plan.taught and not plan.crossed
        chunks = plan.chunks or ((0, 0),) if by_chunks else ((0, self.call.num_rows),)
        for start, stop in chunks:
            yield from self.chunk(plan, stop - start)

    def one_pass(self, plan: Plan) -> Iterator[Collective]:
        """Of a loss in chunks of rows. The teacher comes first."""
        if plan.taught:
            yield from self.teacher_rows(forward=True)
        yield from self.tokens(self.operands.hidden)
        for start, stop in plan.chunks:
            yield from self.chunk(plan, stop - start)

    def chunk(self, plan: Plan, rows: int) -> Iterator[Collective]:
        """Of some rows whose lines are there."""
        call, table = self.call, self.call.table
        whole = "teacher_top1" in call.asked.stats and not call.wants_whole
        own = LINES if call.canonical else WIDTH
        beside = (WIDTH + 2 * whole + 2 * plan.crossed) * plan.taught
        yield self.lines(rows, own + 2 * (call.kept is not None) + (0 if table is None else table.width) + beside)
        if table is not None and table.rank is not None:
            yield self.wide("all_reduce", "counts of columns before the target", rows)
        if plan.taught and not plan.crossed:
            yield self.wide("all_gather", "sums of the divergence", (5 if call.accepts else 2) * rows)

    def backward(self, plan: Plan) -> Iterator[Collective]:
        """Of all results that have a graph. Of a plan with unit gradients, of the divergence alone."""
        call, kept = self.call, self.call.kept
        if plan.kind != "support":
            yield from self.vocabulary_back(plan)
        if plan.kind == "support" or (kept is not None and call.asked.teacher is not None):
            yield from self.reduced()
            if call.needs[1]:
                yield from self.tokens(self.operands.hidden)

    def vocabulary_back(self, plan: Plan) -> Iterator[Collective]:
        if plan.kind != "frozen" and not plan.unit:
            yield from self.tokens(self.operands.hidden)
            if plan.taught:
                yield from self.teacher_rows(forward=False)
        yield from self.reduced()

    def reduced(self) -> Iterator[Collective]:
        """The gradient of hidden states, and that of a LoRA's part of them."""
        call, linear = self.call, self.call.linear
        if linear is None or not (linear.sequence_parallel or linear.hidden_grad == "reduced"):
            return
        named = (("d_hidden", self.operands.hidden), ("the gradient of a LoRA's a", self.operands.y))
        for what, x in named:
            if x is None or not x.requires_grad:
                continue
            if linear.sequence_parallel:
                yield self.sent("reduce_scatter", what, x.nbytes * call.group.size())
            else:
                yield self.sent("all_reduce", what, x.nbytes)

    def tokens(self, hidden: Tensor | None, what: str = "hidden states") -> Iterator[Collective]:
        """Hidden states of which every rank has its part of the tokens."""
        if hidden is not None and self.call.linear is not None and self.call.linear.sequence_parallel:
            yield self.sent("all_gather", what, hidden.nbytes)

    def kept_entries(self) -> Iterator[Collective]:
        """Of a divergence over the ids that samplers kept: single logits of both models."""
        call = self.call
        entries = _entries(call)
        for member in call.teachers:
            yield from self.tokens(member.hidden, "the teacher's hidden states")
        yield self.wide("all_reduce", "the teacher's logits of kept ids", 2 * entries)
        yield from self.tokens(self.operands.hidden)
        yield self.wide("all_reduce", "logits of kept ids", entries)

    def teacher_rows(self, forward: bool) -> Iterator[Collective]:
        """Of teachers that are multiplied, or that have ids of their own."""
        call, members = self.call, self.call.teachers
        for member in members:
            if not isinstance(member.logits, Logits):
                continue
            yield from self.tokens(member.hidden, "the teacher's hidden states")
            if member.ids is not None:
                yield from self.named_columns(member.logits)
        if forward and call.wants_whole:
            lines = WIDTH + 2 * ("teacher_top1" in call.asked.stats)
            for rows in _rows_of(members, call):
                yield self.wide("all_gather", "the teacher's statistics of all of its ids", lines * rows)

    def named_columns(self, logits: Logits) -> Iterator[Collective]:
        """Rows of a sharded teacher's weight, which go to the ranks that have the student's ids of them."""
        call, weight, bias = self.call, logits.weight, logits.linear.bias
        assert isinstance(weight, Tensor)
        item = weight.dtype.itemsize
        yield self.sent("all_reduce", "the teacher's weight by id", call.vocab_size * weight.shape[1] * item)
        if bias is not None:
            yield self.sent("all_reduce", "the teacher's bias by id", call.vocab_size * bias.dtype.itemsize)
        yield self.sent("all_reduce", "which ids the teacher has", call.vocab_size * item)

    def lines(self, rows: int, width: int) -> Collective:
        """Of all readings of some rows."""
        return self.wide("all_gather", f"{width} lines a row", width * rows)

    def wide(self, kind: Literal["all_gather", "all_reduce"], what: str, numbers: int) -> Collective:
        """Of numbers in the dtype of sums."""
        return self.sent(kind, what, numbers * self.call.gain.dtype.itemsize)

    def sent(self, kind: Literal["all_gather", "all_reduce", "reduce_scatter"], what: str, size: int) -> Collective:
        return Collective(kind, what, size, "forward", "vocabulary", self.call.group.size())


def _entries(call: Call) -> int:
    """Ids of a divergence over kept ids, and targets, all rows together."""
    assert call.kept is not None
    own, teacher = call.kept.ids.numel() + call.num_rows, call.asked.teacher
    kept = [x.kept for x in call.teachers if x.kept is not None]
    if not kept:
        return own
    if not isinstance(teacher, Teachers) or not has_values(teacher.which):
        # In a dry run all rows count as the first teacher's.
        return own + kept[0].ids.numel()
    lengths = torch.stack([x.lengths for x in kept])
    return own + int(lengths.gather(0, teacher.which[None].to(lengths.device)).sum())


def _rows_of(members: tuple[Teacher, ...], call: Call) -> list[int]:
    """Rows of each teacher that are multiplied: several of the caller's may be beside one token."""
    teacher, at = call.asked.teacher, members[0].at
    if isinstance(teacher, Teachers):
        return rows_of_each(teacher, call.num_rows)
    head = members[0].head
    shared = at is not None and members[0].hidden is not None and has_values(at)
    if not shared or (call.linear is not None and call.bits == "canonical"):
        return [call.num_rows]
    if head is not None and isinstance(head.temperature, Tensor):
        return [call.num_rows]
    assert at is not None
    return [len(at.reshape(-1).unique())]
