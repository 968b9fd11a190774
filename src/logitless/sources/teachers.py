"""The teacher's logits of some rows and columns, in the student's order of columns, as a tile or a chunk needs them.

    Teacher, Teachers  ->  TeacherRows: rows grouped by teacher  ->  problem(memory, first, like)

All forms of a teacher (a head, logits that exist, another vocabulary) end here: a backend sees two matrices of logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.backends.contract import Problem
from logitless.call import PLAIN, Call, Operands, members_of, rows_of_each
from logitless.call.checks import vocabulary
from logitless.call.resolve import autocast_dtype, in_three_parts
from logitless.collectives import sum_over
from logitless.errors import LogitlessError
from logitless.machine import SLAB, pieces
from logitless.operands import Logits, Teacher, Teachers
from logitless.operands.logits import like
from logitless.operands.stands import factors_of_rows
from logitless.operands.teacher import columns_of_ids, regrouped
from logitless.rows.rows import single_sample
from logitless.softmax import ELSEWHERE
from logitless.sources.given import as_matrix
from logitless.sources.linear import Projection, gathered_tokens
from logitless.spec import TokenStats, accumulation_dtype, has_values, inspectable


@dataclass(frozen=True, eq=False)
class Part:
    """Consecutive rows of one teacher.

    Attributes:
        rows: where they are among all rows.
        projection: of those rows; None where logits exist.
        logits, index: logits of all tokens, and which of them the rows are; None where there is a head.
        source: ``[V]`` column of the teacher for each of the student's columns here, -1 for none; None for the same.
        columns: the student's columns here that have one of the teacher's, where ``source`` is None.
        negative: whether the teacher's head turns the order of its logits around.
        outside: whether the teacher has ids that the student has not, on any rank: a 0-dim tensor; None for no.
        mapped: the projection with the rows of the weight in the order of ``source``, where there is room for them.
        place: ``[rows]`` on the CPU, ascending: which of the projection's rows each row is; None for one each.
    """

    rows: slice
    projection: Projection | None
    logits: Tensor | None
    index: Tensor | None
    source: Tensor | None
    columns: int
    negative: bool
    outside: Tensor | None = None
    mapped: Projection | None = None
    place: Tensor | None = None

    @property
    def height(self) -> int:
        """Rows of logits that the part writes."""
        if self.place is None or not len(self.place):
            return self.rows.stop - self.rows.start
        return int(self.place[-1]) + 1

    def cut(self, within: slice, rows: slice) -> Part:
        """Some rows of the part, which are then at ``rows``."""
        index = None if self.index is None else self.index[within]
        place, taken = self.place, within
        if place is not None:
            place = place[within]
            first = int(place[0])
            taken, place = slice(first, int(place[-1]) + 1), place - first
        p, mapped = (None if x is None else x.cut(taken.start, taken.stop) for x in (self.projection, self.mapped))
        return replace(self, rows=rows, projection=p, mapped=mapped, index=index, place=place)

    def write(self, rows: slice, first: int, out: Tensor) -> None:
        """Write raw logits of some rows of the part, and of as many columns from ``first`` on as ``out`` has.

        Columns that the teacher does not have get any numbers.
        """
        if self.source is not None and self.mapped is None:
            self._write_mapped(rows, out, self.source[first : first + out.shape[1]].clamp_min(0))
            return
        here = self.here(first, out.shape[1]) if self.source is None else out.shape[1]
        whole = self.mapped or self.projection
        if whole is not None:
            p = whole.cut(rows.start, rows.stop)
            for columns in pieces(here, SLAB if not p.call.machine.wide_products else max(here, 1), out.is_meta):
                p.project(first + columns.start, out[:, columns])
        elif self.logits is not None:
            out[:, :here] = self._given(rows, slice(first, first + here))

    def leave_out(self, first: int, out: Tensor, squashed: bool) -> None:
        """Write into the columns that the teacher does not have what its gain makes -inf of: after a softcap, whose
        gain is positive, -inf itself."""
        nothing = torch.inf if self.negative and not squashed else -torch.inf
        if self.source is not None:
            out.masked_fill_((self.source[first : first + out.shape[1]] < 0)[None, :], nothing)
        else:
            out[:, self.here(first, out.shape[1]) :] = nothing

    def here(self, first: int, width: int) -> int:
        """How many of ``width`` columns from ``first`` on the teacher has: the first ones."""
        return min(max(self.columns - first, 0), width)

    def _given(self, rows: slice, columns: slice) -> Tensor:
        assert self.logits is not None
        assert self.index is not None
        return self.logits[:, columns].index_select(0, self.index[rows])

    def _write_mapped(self, rows: slice, out: Tensor, taken: Tensor) -> None:
        """Write logits of the teacher's columns ``taken``, a slab of them at a time."""
        for columns in pieces(out.shape[1], SLAB, out.is_meta):
            if self.projection is not None:
                p = self.projection.cut(rows.start, rows.stop)
                bias = None if p.bias is None else p.bias[taken[columns]]
                replace(p, weight=p.weight[taken[columns]], bias=bias).project(0, out[:, columns])
            else:
                out[:, columns] = self._given(rows, slice(None))[:, taken[columns]]


class Seen(NamedTuple):
    """What a look finds of the teachers of some rows.

    Attributes:
        problem: the logits as a backend takes them.
        whole: as in :class:`TeacherRows`.
        best: ``[2, R]`` key and id of the most likely column here, where it is asked for and ``whole`` has it not.
    """

    problem: Problem
    whole: Tensor | None = None
    best: Tensor | None = None


@dataclass(frozen=True, eq=False)
class TeacherRows:
    """The teachers of all rows.

    Attributes:
        parts: in the order of the rows.
        gain: ``[R]`` factor of each row's logits.
        squash: factor inside tanh; 0 without a softcap.
        columns: that the logits are written for: all that the student has here.
        missing: whether the student has ids that a teacher does not have.
        whole: lines of the statistic over all ids of the teacher, also those that the student does not have; one that
            is 0 where it has no such id; and two for the most likely one where it is asked for. None where nobody asks.
    """

    parts: tuple[Part, ...]
    gain: Tensor
    squash: float
    columns: int
    missing: bool
    whole: Tensor | None = None

    @staticmethod
    def of(given: Teacher | Teachers, call: Call) -> TeacherRows:
        """For a call whose rows are grouped by teacher, if there are several (:func:`grouped`)."""
        members, counts = members_of(given), rows_of_each(given, call.num_rows)
        parts, gains, start = [], [], 0
        for teacher, count in zip(members, counts, strict=True):
            rows = slice(start, start + count)
            gains.append(own_gain(teacher, call, call.gain.dtype, _order(given, call))[rows])
            parts.append(_part(teacher, call, rows, gains[-1]))
            start += count
        squashes = {(teacher.head or PLAIN).squash for teacher in members}
        if len(squashes) > 1:
            raise LogitlessError("Teachers: members have different softcaps. Call once for each of them.")
        missing = any(x.source is not None or x.columns < call.columns for x in parts if x.rows.stop > x.rows.start)
        return TeacherRows(tuple(parts), torch.cat(gains), squashes.pop(), call.columns, missing)

    def cut(self, start: int, stop: int) -> TeacherRows:
        """Rows ``start .. stop``."""
        parts = []
        for part in self.parts:
            low, high = max(part.rows.start, start), min(part.rows.stop, stop)
            if low < high:
                within = slice(low - part.rows.start, high - part.rows.start)
                parts.append(part.cut(within, rows=slice(low - start, high - start)))
        whole = None if self.whole is None else self.whole[:, start:stop]
        return replace(self, parts=tuple(parts), gain=self.gain[start:stop], whole=whole)

    def padded(self, multiple: int) -> TeacherRows:
        """The same rows of one teacher, and as many empty rows as make a multiple."""
        (part,), pad, missing = self.parts, torch.nn.functional.pad, -len(self.gain) % multiple
        p, mapped = (None if x is None else x.padded(multiple) for x in (part.projection, part.mapped))
        index = None if part.index is None else pad(part.index, (0, missing))
        part = replace(part, rows=slice(0, len(self.gain) + missing), projection=p, mapped=mapped, index=index)
        whole = None if self.whole is None else pad(self.whole, (0, missing))
        return replace(self, parts=(part,), gain=pad(self.gain, (0, missing), value=1.0), whole=whole)

    def problem(self, memory: Tensor, first: int, like: Problem) -> Problem:
        """The teacher's logits for the rows and columns of a problem of the student's, written into flat memory."""
        return self._finished(self._written(memory, first, like), first, like)

    def look(self, memory: Tensor, like: Problem, call: Call) -> Seen:
        """The same of whole rows, and what is read of the teacher besides."""
        logits = self._written(memory, 0, like)
        best = self._best(logits, like, call) if "teacher_top1" in call.asked.stats and self.whole is None else None
        return Seen(self._finished(logits, 0, like), self.whole, best)

    def _written(self, memory: Tensor, first: int, like: Problem) -> Tensor:
        """Raw logits; of columns that a teacher does not have, any numbers."""
        logits = self.room(memory, like)
        for part in self.parts:
            part.write(slice(0, part.height), first, self._of(part, logits))
        return logits

    def _finished(self, logits: Tensor, first: int, like: Problem) -> Problem:
        """The problem of raw logits, over which those of columns that a teacher does not have are written."""
        if self.missing:
            # The softcap comes first: there is no logit that it makes -inf of.
            if self.squash:
                logits.mul_(self.squash).tanh_()
            for part in self.parts:
                part.leave_out(first, self._of(part, logits), bool(self.squash))
        return self.of_written(logits, like)

    def _best(self, logits: Tensor, like: Problem, call: Call) -> Tensor:
        """``[2, R]`` key and id of each teacher's best column here, from raw logits: softcaps make ties of large ones,
        and columns that are left out look like others."""
        raw, found = self.of_written(logits, like), [self.gain.new_empty((2, 0))]
        for part in self.parts:
            own = replace(raw, columns=part.here(0, like.columns)).cut(part.rows.start, part.rows.stop)
            found.append(best_here(own, part.negative, call))
        return torch.cat(found, 1)

    def room(self, memory: Tensor, like: Problem) -> Tensor:
        """Where the teacher's logits beside a problem of the student's lie in flat memory."""
        rows = like.num_rows if self._place is None else self.parts[0].height
        return memory[: rows * like.columns].view(rows, like.columns)

    def of_written(self, logits: Tensor, like: Problem) -> Problem:
        """The problem of logits that were written."""
        squash, place = 0.0 if self.missing else self.squash, self._place
        index = None if place is None else place.to(logits.device, non_blocking=True)
        return replace(like, logits=logits, index=index, gain=self.gain, squash=squash, unit=False)

    @property
    def _place(self) -> Tensor | None:
        """``Part.place`` where there is one teacher; None where each row has a row of logits of its own."""
        return self.parts[0].place if len(self.parts) == 1 else None

    def _of(self, part: Part, logits: Tensor) -> Tensor:
        """The rows of logits that a part writes."""
        return logits if self._place is not None else logits[part.rows]


def grouped(given: Teacher | Teachers, call: Call) -> tuple[Call, Tensor | None]:
    """The call with its rows in the order of their teachers, or of one teacher's tokens, and that order; None for the
    order where the rows stay as they are."""
    if not regrouped(given):
        return call, None
    if isinstance(given, Teachers) and given.which.shape != (call.num_rows,):
        raise LogitlessError(
            f"{call.caller}: which names the teachers of {given.which.numel()} rows but there are {call.num_rows}."
        )
    order = _order(given, call)
    index = call.rows.index[order]
    rows = single_sample(index, call.rows.target[order], None)
    table = None if call.table is None else call.table.cut(order)
    ignored = None if call.ignored is None else call.ignored[order]
    places = {"index": index, "gain": call.gain[order], "column": call.column[order], "ignored": ignored}
    return replace(call, rows=rows, table=table, **places), order


def ungrouped(stats: TokenStats, order: Tensor | None) -> TokenStats:
    """Results of rows in the order of :func:`grouped`, in that of the caller's rows again."""
    if order is None:
        return stats
    place = order.argsort()
    return stats.each(lambda x: x[place])


def in_place(given: Teacher | Teachers, student: Problem, call: Call) -> Problem | None:
    """The problem of a teacher's logits where they lie, if they exist in the student's order of columns; or None."""
    if not isinstance(given, Teacher) or given.ids is not None or given.hidden is not None or call.linear is not None:
        return None
    assert given.logits is not None
    if given.logits.stride(-1) != 1:
        return None
    head, gain = given.head or PLAIN, own_gain(given, call, call.gain.dtype)
    _, columns = vocabulary(call.caller, given.width, head, call.shard)
    index = call.index if given.at is None else given.at.reshape(-1)
    matrix, index = as_matrix(given.logits.detach(), index, call.caller)
    # A target that is among the student's columns need not be among the teacher's.
    found = student.found and columns == student.columns
    own = {"gain": gain, "squash": head.squash, "columns": columns, "unit": False, "found": found}
    return replace(student, logits=matrix, index=index, **own)


def best_here(raw: Problem, negative: bool, call: Call) -> Tensor:
    """``[2, R]`` key and id of a teacher's best column here, from logits before the softcap."""
    key, column = call.backend.best(raw, 1, negative)
    return torch.cat([key, column + call.start])


def _order(given: Teacher | Teachers, call: Call) -> Tensor:
    """The order of the call's rows among the caller's, after :func:`grouped`."""
    which = torch.zeros_like(call.rows.index)
    if isinstance(given, Teachers):
        which = given.which.to(which.device)
    elif given.at is not None and regrouped(given):
        which = given.at.reshape(-1)
    return which.argsort(stable=True)


def tokens_beside(teacher: Teacher, call: Call, order: Tensor | None = None) -> Tensor:
    """``[R]`` the teacher's token beside each row of the call. ``order`` is that of the call's rows among the
    caller's, where they are :func:`grouped`."""
    if teacher.at is None:
        return call.rows.index
    at = teacher.at.reshape(-1)
    return at if order is None else at[order]


def _part(teacher: Teacher, call: Call, rows: slice, gain: Tensor) -> Part:
    """The part of one teacher: its rows, and the projection or the logits that they come from."""
    head, place = teacher.head or PLAIN, None
    _, columns = own_vocabulary(teacher, call)
    source = source_columns(teacher, call, columns)
    outside = None if teacher.ids is None else (teacher.ids[:columns] < 0).any()
    negative = head.scale < 0
    index = tokens_beside(teacher, call, _order(teacher, call))[rows]
    if not isinstance(teacher.logits, Logits):
        # A shard of no columns leaves no size to infer.
        logits = teacher.tokens.reshape(teacher.tokens.shape[:-1].numel(), teacher.width)
        return Part(rows, None, logits, index, source, columns, negative, outside)
    tokens = gathered_tokens(teacher.tokens, call)
    fixed = call.linear is not None and call.bits == "canonical"
    if teacher.at is not None and has_values(index) and not fixed and not isinstance(head.temperature, Tensor):
        index, place = index.unique_consecutive(return_inverse=True)
        gain = gain.new_empty(len(index)).scatter_(0, place, gain)
        place = place.cpu()
    in_order = teacher.at is None and call.index is None and len(tokens) == rows.stop - rows.start
    hidden = tokens if in_order else tokens.index_select(0, index)
    own, column = own_call(teacher, call, columns, gain), torch.full_like(index, ELSEWHERE)
    p = Projection.of(hidden, own_operands(teacher), column, own, multiplied=False)
    mapped = None
    if source is not None and teacher.ids is not None and call.group is not None:
        source, outside, mapped = _exchanged(p, teacher, call)
    elif source is not None:
        mapped = _mapped(p, source, call)
    mapped = None if mapped is None else mapped.in_parts()
    return Part(rows, p.in_parts(), None, None, source, columns, negative, outside, mapped, place)


def _exchanged(p: Projection, teacher: Teacher, call: Call) -> tuple[Tensor, Tensor, Projection]:
    """Of a sharded head: which of the student's columns here the teacher has, on any rank; whether it has ids that the
    student has not; and the projection with its rows of the student's columns, in the student's order."""
    assert teacher.ids is not None
    ids = teacher.ids[: p.call.columns]
    named = ids >= 0
    here = slice(call.start, call.start + call.columns)
    exchanged = []
    for x in (p.weight, p.bias, torch.ones_like(p.weight[:, 0])):
        if x is not None:
            whole = x.new_zeros((call.vocab_size, *x.shape[1:]))
            whole[ids[named]] = x[: p.call.columns][named]
            x = sum_over(call.group, whole)
        exchanged.append(x)
    weight, bias, has = exchanged
    twice = named_twice(has, call.caller)
    size, _ = own_vocabulary(teacher, call)
    outside = (has > 0).sum() < size
    if forbids_others(teacher, call) and has_values(outside) and bool(outside):
        # All ranks come here with the same sum, so that all raise.
        raise infinite_bucket(call.caller)
    bias, weight = None if bias is None else bias[here], weight[here].masked_fill_(twice[here, None], torch.nan)
    return torch.where(has[here] > 0, 0, -1), outside, replace(p, weight=weight, bias=bias)


def forbids_others(teacher: Teacher, call: Call) -> bool:
    """Whether ids that only the teacher has make the divergence infinite."""
    return call.kind is not None and call.kind.alone == torch.inf and teacher.tail == "bucket"


def infinite_bucket(caller: str) -> LogitlessError:
    return LogitlessError(
        f"{caller}: the teacher has ids that the student has not, so that KL(teacher || student) is infinite with "
        f'tail="bucket". Take tail="renormalise", over the ids that both have, or another divergence.'
    )


def _mapped(p: Projection, source: Tensor, call: Call) -> Projection | None:
    """The projection with the rows of its weight in the student's order; None where they take more than a quarter of
    the budget."""
    weight, bias = p.weight, p.bias
    if len(source) * weight[:1].nbytes > call.memory // 4:
        return None
    taken = source.clamp_min(0)
    return replace(p, weight=weight[taken], bias=None if bias is None else bias[taken])


def under_autocast(given: Any) -> Any:
    """The teacher with its hidden states and head in the dtype that autocast gives those of the student; as it is where
    autocast is off, and where its logits exist."""
    if isinstance(given, Teachers):
        members = [under_autocast(member) for member in given.members]
        same = all(new is old for new, old in zip(members, given.members, strict=True))
        return given if same else replace(given, members=members)
    logits = given.logits if isinstance(given, Teacher) else None
    dtype = autocast_dtype(logits.hidden) if isinstance(logits, Logits) else None
    if not isinstance(logits, Logits) or dtype is None:
        return given
    linear, weight = logits.linear, logits.weight
    assert isinstance(weight, Tensor)
    linear = replace(linear, bias=None if linear.bias is None else linear.bias.to(dtype))
    cast = like(logits, logits.hidden.detach().to(dtype), weight=weight.detach().to(dtype), linear=linear)
    return replace(given, logits=cast)


def own_operands(teacher: Teacher) -> Operands:
    """The teacher's hidden states and head."""
    assert isinstance(teacher.logits, Logits)
    now = teacher.logits.opened()
    hidden, weight, bias = now.hidden, now.weight, now.linear.bias
    assert isinstance(weight, Tensor)
    return Operands(None, hidden, weight, bias)


def own_gain(teacher: Teacher, call: Call, dtype: torch.dtype, order: Tensor | None = None) -> Tensor:
    """``[R]`` factor of the teacher's logits for the rows of the call. ``order`` is that of the call's rows among the
    caller's, in which a temperature for every row is given, where they are :func:`grouped`."""
    head = teacher.head or PLAIN
    gain = head.gain(call.num_rows, dtype, call.gain.device)
    if order is not None and isinstance(head.temperature, Tensor):
        gain = gain[order]
    factor = teacher.logits.gain if isinstance(teacher.logits, Logits) else 1.0
    if not isinstance(factor, Tensor):
        # The head's scale has it.
        return gain
    return gain * factors_of_rows(factor, gain)[tokens_beside(teacher, call, order)]


def source_columns(teacher: Teacher, call: Call, columns: int) -> Tensor | None:
    """``[V]`` column of the teacher for each of the student's columns, -1 for none; None where they are the same."""
    if teacher.ids is None:
        return None
    if call.group is not None:
        # The ids of other ranks come with their weights, in _exchanged.
        return torch.full((call.columns,), -1, dtype=torch.int64, device=teacher.ids.device)
    return columns_of_ids(teacher.ids[:columns], call.columns)


def named_twice(has: Tensor, caller: str) -> Tensor:
    """Where an id of the student's has several columns on all ranks together, whose sum is no logit; raises where that
    can be seen."""
    if inspectable(has) and bool((has > 1).any()):
        raise LogitlessError(
            f"{caller}: ids of Teacher(ids=) name one of the student's ids on several ranks. Give each of them to "
            f"one column of one rank."
        )
    return has > 1


def own_vocabulary(teacher: Teacher, call: Call) -> tuple[int, int]:
    """The teacher's true vocabulary size, and how many columns of it are here."""
    shard, logits = call.shard, teacher.logits
    if shard is not None and teacher.ids is not None and isinstance(logits, Logits):
        shard = logits.linear.shard
    return vocabulary(call.caller, teacher.width, teacher.head or PLAIN, shard)


def own_call(teacher: Teacher, call: Call, columns: int, gain: Tensor) -> Call:
    """The call as it would be for the teacher, who multiplies its own hidden states."""
    assert isinstance(teacher.logits, Logits)
    linear = replace(teacher.logits.linear, sequence_parallel=call.linear is not None and call.linear.sequence_parallel)
    own = replace(
        call,
        linear=linear,
        gain=gain,
        columns=columns,
        rank=0,
        parts=1,
        dtype=teacher.tokens.dtype,
        logits_dtype=accumulation_dtype(call.dtype) if linear.match is None else getattr(torch, linear.match),
    )
    return in_three_parts(own) if linear.precision == "bfloat16x3" else own
