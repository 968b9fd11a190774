"""The teacher's logits of some rows and columns, in the student's order of columns, as a tile or a chunk needs them.

    Teacher, Teachers  ->  Source: rows grouped by teacher  ->  write(rows, columns, out)

Whatever a teacher is (a head, logits that exist, another vocabulary) ends here: below there are two matrices of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from logitless.backends.contract import Problem
from logitless.call import Call
from logitless.call.checks import vocabulary
from logitless.distill.teacher import Teacher, Teachers
from logitless.errors import LogitlessError
from logitless.from_hidden.projection import Projection, gathered_tokens
from logitless.machine import SLAB, pieces
from logitless.rows import Rows
from logitless.spec import Head, accumulation_dtype, has_values


@dataclass(frozen=True, eq=False)
class Part:
    """Consecutive rows of one teacher.

    Attributes:
        rows: where they are among all rows.
        projection: of those rows; None where logits exist.
        logits, index: logits of all tokens, and which of them the rows are; None where there is a head.
        source: ``[V]`` column of the teacher for each of the student's columns here, -1 for none; None for the same.
        columns: the student's columns here that have one of the teacher's, where ``source`` is None.
        nothing: the raw logit of a column that the teacher has not: its gain makes -inf of it.
    """

    rows: slice
    projection: Projection | None
    logits: Tensor | None
    index: Tensor | None
    source: Tensor | None
    columns: int
    nothing: float

    def write(self, rows: slice, first: int, out: Tensor) -> None:
        """The raw logits of some of its rows, and of as many columns from ``first`` on as ``out`` has.

        Anything where the teacher has no such column.
        """
        if self.source is not None:
            self._write_mapped(rows, out, self.source[first : first + out.shape[1]].clamp_min(0))
            return
        here = self._here(first, out)
        if self.projection is not None:
            p = self.projection.cut(rows.start, rows.stop)
            for columns in pieces(here, SLAB if not p.call.machine.wide_products else max(here, 1), out.is_meta):
                p.project(first + columns.start, out[:, columns])
        elif self.logits is not None:
            out[:, :here] = self._given(rows, slice(first, first + here))

    def leave_out(self, first: int, out: Tensor) -> None:
        """Nothing in the columns that the teacher has not."""
        if self.source is not None:
            out.masked_fill_((self.source[first : first + out.shape[1]] < 0)[None, :], self.nothing)
        else:
            out[:, self._here(first, out) :] = self.nothing

    def _here(self, first: int, out: Tensor) -> int:
        """How many columns of ``out`` the teacher has, where it has the first ones."""
        return min(max(self.columns - first, 0), out.shape[1])

    def _given(self, rows: slice, columns: slice) -> Tensor:
        assert self.logits is not None
        assert self.index is not None
        return self.logits[:, columns].index_select(0, self.index[rows])

    def _write_mapped(self, rows: slice, out: Tensor, taken: Tensor) -> None:
        """Columns are looked up, a slab of them at a time."""
        for columns in pieces(out.shape[1], SLAB, out.is_meta):
            if self.projection is not None:
                p = self.projection.cut(rows.start, rows.stop)
                bias = None if p.bias is None else p.bias[taken[columns]]
                replace(p, weight=p.weight[taken[columns]], bias=bias).project(0, out[:, columns])
            else:
                out[:, columns] = self._given(rows, slice(None))[:, taken[columns]]


@dataclass(frozen=True, eq=False)
class Source:
    """The teachers of all rows.

    Attributes:
        parts: in the order of the rows.
        gain: ``[R]`` factor of each row's logits.
        squash: factor inside tanh; 0 without a softcap.
        columns: that the logits are written for: all that the student has here.
        missing: whether the student has ids that a teacher has not.
    """

    parts: tuple[Part, ...]
    gain: Tensor
    squash: float
    columns: int
    missing: bool

    @staticmethod
    def of(given: Teacher | Teachers, call: Call) -> Source:
        """For a call whose rows are grouped by teacher, if there are several (:func:`grouped`)."""
        members, counts = ((given,), (call.num_rows,)) if isinstance(given, Teacher) else _counted(given, call)
        parts, gains, start = [], [], 0
        for teacher, count in zip(members, counts, strict=True):
            rows = slice(start, start + count)
            head = teacher.head or Head()
            gain = head.gain(call.num_rows, call.gain.dtype, call.gain.device)
            # A temperature for every row is given in the order of the caller's rows.
            gain = gain if not isinstance(head.temperature, Tensor) else gain[_order(given, call)]
            gains.append(gain[rows])
            parts.append(_part(teacher, call, rows, gains[-1]))
            start += count
        squashes = {(teacher.head or Head()).squash for teacher in members}
        if len(squashes) > 1:
            raise LogitlessError("Teachers: members have different softcaps. Call once for each of them.")
        missing = any(x.source is not None or x.columns < call.columns for x in parts if x.rows.stop > x.rows.start)
        return Source(tuple(parts), torch.cat(gains), squashes.pop(), call.columns, missing)

    def cut(self, start: int, stop: int) -> Source:
        """Rows ``start .. stop`` of it."""
        parts = []
        for part in self.parts:
            low, high = max(part.rows.start, start), min(part.rows.stop, stop)
            if low < high:
                within = slice(low - part.rows.start, high - part.rows.start)
                p = None if part.projection is None else part.projection.cut(within.start, within.stop)
                index = None if part.index is None else part.index[within]
                parts.append(replace(part, rows=slice(low - start, high - start), projection=p, index=index))
        return replace(self, parts=tuple(parts), gain=self.gain[start:stop])

    def padded(self, multiple: int) -> Source:
        """The same rows of one teacher, and as many further ones as make a multiple."""
        (part,), pad, missing = self.parts, torch.nn.functional.pad, -len(self.gain) % multiple
        p = None if part.projection is None else part.projection.padded(multiple)
        index = None if part.index is None else pad(part.index, (0, missing))
        part = replace(part, rows=slice(0, len(self.gain) + missing), projection=p, index=index)
        return replace(self, parts=(part,), gain=pad(self.gain, (0, missing), value=1.0))

    def problem(self, memory: Tensor, first: int, like: Problem) -> Problem:
        """Its logits for the rows and columns of a problem of the student's, written into flat memory."""
        rows, width = like.num_rows, like.columns
        logits = memory[: rows * width].view(rows, width)
        for part in self.parts:
            part.write(slice(0, part.rows.stop - part.rows.start), first, logits[part.rows])
        if self.missing:
            # Before anything is left out: there is no logit that a softcap makes -inf of.
            if self.squash:
                logits.mul_(self.squash).tanh_()
            for part in self.parts:
                part.leave_out(first, logits[part.rows])
        return self.of_written(logits, like)

    def of_written(self, logits: Tensor, like: Problem) -> Problem:
        """The problem of logits that were written."""
        squash = 0.0 if self.missing else self.squash
        return replace(like, logits=logits, index=None, gain=self.gain, squash=squash, unit=False)


def grouped(given: Teacher | Teachers, call: Call) -> tuple[Call, Tensor | None]:
    """The call with its rows in the order of their teachers, and that order; None where there is only one teacher."""
    if isinstance(given, Teacher):
        return call, None
    if given.which.shape != (call.num_rows,):
        raise LogitlessError(
            f"{call.asked.caller}: teachers are given for {given.which.numel()} rows but there are {call.num_rows}."
        )
    order = _order(given, call)
    index = call.rows.index[order]
    rows = Rows.at(index, call.rows.target[order])
    return replace(call, rows=rows, index=index, gain=call.gain[order]), order


def ungrouped(values: Sequence[Tensor], order: Tensor | None) -> list[Tensor]:
    """Values of rows in the order of :func:`grouped`, in that of the caller's rows again."""
    if order is None:
        return list(values)
    place = order.argsort()
    return [x[place] for x in values]


def check_teacher(given: Teacher | Teachers, hidden: Tensor, call: Call) -> None:
    """Raise, before anything runs, for a teacher that does not go with the student's tokens and vocabulary."""
    name, asked = call.asked.caller, call.asked
    if not isinstance(given, (Teacher, Teachers)):
        raise LogitlessError(f"{name}: teacher must be a Teacher or Teachers but is {type(given).__name__}.")
    for teacher in (given,) if isinstance(given, Teacher) else given.members:
        if teacher.tokens.shape[:-1] != hidden.shape[:-1]:
            raise LogitlessError(
                f"{name}: the teacher's hidden states or logits are {list(teacher.tokens.shape)} but the student's are "
                f"{list(hidden.shape)}. They must be of the same tokens."
            )
        if teacher.tokens.device != hidden.device:
            raise LogitlessError(f"{name}: the teacher is on {teacher.tokens.device}, the student on {hidden.device}.")
        if teacher.ids is not None and asked.shard is not None:
            raise LogitlessError(
                f"{name}: Teacher(ids=) goes with a whole vocabulary. Under a shard, bring the rows of the teacher's "
                f"weight into the student's order first."
            )
        if teacher.logits is not None and asked.sequence_parallel:
            raise LogitlessError(f"{name}: the teacher's logits are of all tokens, and sequence_parallel is on.")
        _, columns = vocabulary(name, teacher.width, teacher.head or Head(), asked.shard)
        if teacher.ids is None and columns > call.columns:
            raise LogitlessError(
                f"{name}: the teacher has {columns} columns here and the student {call.columns}. If the rest is "
                f"padding, give the teacher Head(vocab_size={call.vocab_size}); otherwise map its columns with ids=."
            )
        if teacher.ids is not None and has_values(teacher.ids) and int(teacher.ids.max()) >= call.vocab_size:
            raise LogitlessError(
                f"{name}: the teacher's ids go up to {int(teacher.ids.max())}, outside of the student's vocabulary of "
                f"{call.vocab_size}. Use -1 for columns that the student does not have."
            )


def _order(given: Teacher | Teachers, call: Call) -> Tensor:
    which = torch.zeros_like(call.rows.index) if isinstance(given, Teacher) else given.which
    return which.to(call.rows.index.device).argsort(stable=True)


def _counted(given: Teachers, call: Call) -> tuple[tuple[Teacher, ...], tuple[int, ...]]:
    if not has_values(given.which):
        # A dry run: as if all rows were the first teacher's.
        return tuple(given.members), (call.num_rows, *(0,) * (len(given.members) - 1))
    return tuple(given.members), tuple(given.which.bincount(minlength=len(given.members)).tolist())


def _part(teacher: Teacher, call: Call, rows: slice, gain: Tensor) -> Part:
    """Rows of one teacher, with all that its logits take."""
    _, columns = vocabulary(call.asked.caller, teacher.width, teacher.head or Head(), call.asked.shard)
    source = source_columns(teacher, call, columns)
    head = teacher.head or Head()
    nothing = torch.inf if head.scale < 0 and head.softcap is None else -torch.inf
    index = call.rows.index[rows]
    if teacher.logits is not None:
        logits = teacher.logits.detach()
        return Part(rows, None, logits.reshape(-1, logits.shape[-1]), index, source, columns, nothing)
    assert teacher.weight is not None
    tokens = gathered_tokens(teacher.tokens, call)
    hidden = tokens if call.index is None and len(tokens) == rows.stop - rows.start else tokens.index_select(0, index)
    own = own_call(teacher, call, columns, gain)
    p = Projection.of(hidden, teacher.weight, teacher.bias, call.rows.target[rows], own)
    return Part(rows, p, None, None, source, columns, nothing)


def source_columns(teacher: Teacher, call: Call, columns: int) -> Tensor | None:
    """``[V]`` column of the teacher for each of the student's columns, -1 for none; None where they are the same."""
    if teacher.ids is None:
        return None
    ids = teacher.ids[:columns]
    source = torch.full((call.columns + 1,), -1, dtype=torch.int64, device=ids.device)
    # What the student does not have goes to a place of its own.
    place = torch.where(ids < 0, call.columns, ids)
    return source.scatter_(0, place, torch.arange(columns, device=ids.device))[: call.columns]


def own_call(teacher: Teacher, call: Call, columns: int, gain: Tensor) -> Call:
    """The call as it would be for the teacher, who multiplies its own hidden states."""
    return replace(
        call,
        asked=replace(call.asked, bias=teacher.bias, head=teacher.head),
        gain=gain,
        columns=columns,
        dtype=teacher.tokens.dtype,
        logits_dtype=accumulation_dtype(call.dtype),
    )
