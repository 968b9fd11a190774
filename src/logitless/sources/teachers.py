"""The teacher's logits of some rows and columns, in the student's order of columns, as a tile or a chunk needs them.

    Teacher, Teachers  ->  TeacherRows: rows grouped by teacher  ->  problem(memory, first, like)

Whatever a teacher is (a head, logits that exist, another vocabulary) ends here: below there are two matrices of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from logitless.backends.contract import Problem
from logitless.call import PLAIN, Call, Operands
from logitless.call.checks import check_kept, vocabulary
from logitless.call.resolve import autocast_dtype
from logitless.collectives import sum_over
from logitless.errors import LogitlessError
from logitless.errors.arguments import refused
from logitless.machine import SLAB, pieces
from logitless.operands import Kept, Logits, Teacher, Teachers, TopK
from logitless.operands.logits import like
from logitless.readings.over_support import rows_of
from logitless.readings.reading import LARGEST
from logitless.readings.support import Support
from logitless.rows import Rows
from logitless.sources.given import as_matrix
from logitless.sources.linear import Projection, gathered_tokens
from logitless.sources.listed import raw_logits
from logitless.spec import IGNORE, TokenStats, accumulation_dtype, has_values, inspectable


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
class TeacherRows:
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
    def of(given: Teacher | Teachers, call: Call) -> TeacherRows:
        """For a call whose rows are grouped by teacher, if there are several (:func:`grouped`)."""
        members, counts = ((given,), (call.num_rows,)) if isinstance(given, Teacher) else _counted(given, call)
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

    def padded(self, multiple: int) -> TeacherRows:
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
            f"{call.caller}: which names the teachers of {given.which.numel()} rows but there are {call.num_rows}."
        )
    order = _order(given, call)
    index = call.rows.index[order]
    rows = Rows.at(index, call.rows.target[order])
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


def check_teacher(given: Teacher | Teachers, tokens: Tensor, call: Call) -> None:
    """Raise, before anything runs, for a teacher that does not go with the student's tokens and vocabulary."""
    name = call.caller
    if not isinstance(given, (Teacher, Teachers)):
        raise LogitlessError(
            f"{name}: teacher must be logits, Logits, a Teacher or Teacher.by_row but is {type(given).__name__}."
        )
    for teacher in (given,) if isinstance(given, Teacher) else given.members:
        if teacher.tokens.shape[:-1] != tokens.shape[:-1]:
            raise LogitlessError(
                f"{name}: the teacher's hidden states or logits are {list(teacher.tokens.shape)} but the student's are "
                f"{list(tokens.shape)}. They must be of the same tokens."
            )
        for own in (teacher.tokens, teacher.ids):
            if own is not None and own.device != tokens.device:
                raise LogitlessError(
                    f"{name}: logits and ids of the teacher are on {own.device}, the student on {tokens.device}."
                )
        if teacher.ids is not None and call.shard is not None:
            raise LogitlessError(
                f"{name}: Teacher(ids=) goes with a whole vocabulary. Under a shard, bring the rows of the teacher's "
                f"weight into the student's order first."
            )
        if teacher.hidden is None and call.linear is not None and call.linear.sequence_parallel:
            raise LogitlessError(f"{name}: the teacher's logits are of all tokens, and sequence_parallel is on.")
        _, columns = vocabulary(name, teacher.width, teacher.head or PLAIN, call.shard)
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


def check_teachers(call: Call, tokens: Tensor, given: Any) -> None:
    """Raise for a teacher that does not go with the call, or with its divergence."""
    members = (given,) if isinstance(given, Teacher) else getattr(given, "members", ())
    linear, name = call.linear, call.caller
    if isinstance(given, Teachers) and given.which.is_meta and not call.rows.index.is_meta:
        raise refused(f"{name}: which, the teacher of each row,", "a tensor with numbers", given.which)
    if linear is not None and linear.bits == "canonical" and isinstance(given, Teachers) and call.kept is None:
        raise LogitlessError(
            f'{name}: bits="canonical" goes with one Teacher. With several, how many rows a product has depends on '
            f"who else is in the batch: call once for each of them."
        )
    if call.kept is not None or any(x.kept is not None for x in members):
        _check_supports(call, members)
        check_teacher(given, tokens, call)
        return
    if isinstance(given, Teacher) and given.top_k is not None:
        _check_top_k(call, given.top_k)
        return
    check_teacher(given, tokens, call)
    sizes = [min(x.width, (x.head or PLAIN).vocab_size or x.width) for x in members]
    if call.kind is not None and call.kind.kind == "reverse_kl" and call.shard is None and min(sizes) < call.columns:
        raise LogitlessError(
            f"{name}: the teacher has {min(sizes)} ids and the student {call.columns}, so that KL(student || teacher) "
            f"is "
            f"infinite. Compare over the ids that both have, with head=Head(vocab_size={min(sizes)}), or take another "
            f"divergence: all others are finite."
        )


def _check_supports(call: Call, members: Sequence[Teacher]) -> None:
    """Raise for teachers whose ids do not go with the call's."""
    name = call.caller
    if any(x.top_k is not None for x in members):
        raise LogitlessError(
            f"{name}: kept= does not go with Teacher.from_top_k, which names its own ids. Leave kept= out; with "
            f'tail="renormalise" both distributions are over those ids.'
        )
    supports = [x.kept for x in members if x.kept is not None]
    if supports and (call.kept is None or len(supports) < len(members)):
        raise LogitlessError(
            f"{name}: Teacher(kept=) goes with kept= of the student, and of several teachers all have it or none."
        )
    for kept in supports:
        check_kept(name, kept, call.rows, call.vocab_size, call.gain.device)
        none = (kept.lengths == 0) & (call.rows.target != IGNORE)
        if inspectable(none) and len(supports) == 1 and bool(none.any()):
            raise LogitlessError(f"{name}: the teacher kept no id at all in a row. Give at least one id for each.")


def _check_top_k(call: Call, sent: TopK) -> None:
    """Raise for log-probs that do not go with the rows and the vocabulary of the call."""
    name, ids = call.caller, sent.ids
    if call.asked.ids is not None:
        raise LogitlessError(
            f"{name}: ids= does not go with a teacher that sent K log-probs, whose ids are looked up likewise. Ask "
            f"for the log-probs of ids in a call of their own."
        )
    if tuple(ids.shape[:-1]) not in (call.shape, (call.num_rows,)):
        raise LogitlessError(
            f"{name}: the teacher's log-probs are {list(ids.shape)} but there are {call.num_rows} rows. Give K for "
            f"every scored row."
        )
    if ids.device != call.gain.device:
        raise LogitlessError(f"{name}: the teacher's log-probs are on {ids.device}, the student on {call.gain.device}.")
    if inspectable(ids) and ids.numel() and int(ids.max()) >= call.vocab_size:
        raise LogitlessError(
            f"{name}: the teacher's ids go up to {int(ids.max())}, outside of the student's vocabulary of "
            f"{call.vocab_size}. Use -1 for ids that the student does not have."
        )
    if call.vocab_size > LARGEST:
        raise LogitlessError(f"{name}: log-probs of single ids take up to {LARGEST} columns, not {call.vocab_size}.")


def in_place(given: Teacher | Teachers, student: Problem, call: Call) -> Problem | None:
    """The teacher's rows where they lie, if its logits exist in the order of the student's columns; None otherwise."""
    if not isinstance(given, Teacher) or given.ids is not None or given.hidden is not None or call.linear is not None:
        return None
    assert given.logits is not None
    if given.logits.stride(-1) != 1:
        return None
    head, gain = given.head or PLAIN, own_gain(given, call, call.gain.dtype)
    _, columns = vocabulary(call.caller, given.width, head, call.shard)
    matrix, index = as_matrix(given.logits.detach(), call.index, call.caller)
    # A target that is among the student's columns need not be among the teacher's.
    found = student.found and columns == student.columns
    own = {"gain": gain, "squash": head.squash, "columns": columns, "unit": False, "found": found}
    return replace(student, logits=matrix, index=index, **own)


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
    head = teacher.head or PLAIN
    _, columns = vocabulary(call.caller, teacher.width, head, call.shard)
    source = source_columns(teacher, call, columns)
    nothing = torch.inf if head.scale < 0 and head.softcap is None else -torch.inf
    index = call.rows.index[rows]
    if not isinstance(teacher.logits, Logits):
        logits = teacher.tokens
        return Part(rows, None, logits.reshape(-1, logits.shape[-1]), index, source, columns, nothing)
    tokens = gathered_tokens(teacher.tokens, call)
    hidden = tokens if call.index is None and len(tokens) == rows.stop - rows.start else tokens.index_select(0, index)
    p = Projection.of(hidden, own_operands(teacher), call.rows.target[rows], own_call(teacher, call, columns, gain))
    return Part(rows, p, None, None, source, columns, nothing)


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
    now = teacher.logits.stands()
    hidden, weight, bias = now.hidden, now.weight, now.linear.bias
    assert isinstance(weight, Tensor)
    return Operands(None, hidden, weight, bias)


def own_gain(teacher: Teacher, call: Call, dtype: torch.dtype, order: Tensor | None = None) -> Tensor:
    """``[R]`` factor of the teacher's logits for the rows of the call.

    Args:
        order: of the call's rows among the caller's, who gives a temperature for every row in an order of its own.
    """
    head = teacher.head or PLAIN
    gain = head.gain(call.num_rows, dtype, call.gain.device)
    if order is not None and isinstance(head.temperature, Tensor):
        gain = gain[order]
    factor = teacher.logits.gain if isinstance(teacher.logits, Logits) else 1.0
    if isinstance(factor, Tensor):
        factor = factor.detach().reshape(-1).to(gain)[call.rows.index]
    return gain * factor


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
    assert isinstance(teacher.logits, Logits)
    linear = replace(teacher.logits.linear, sequence_parallel=call.linear is not None and call.linear.sequence_parallel)
    return replace(
        call,
        linear=linear,
        gain=gain,
        columns=columns,
        rank=0,
        dtype=teacher.tokens.dtype,
        logits_dtype=accumulation_dtype(call.dtype) if linear.match is None else getattr(torch, linear.match),
    )


# Single logits of the teachers, over the ids that samplers kept.


def entries_of(given: Teacher | Teachers, support: Support, read: Tensor, call: Call) -> Tensor:
    """``[E]`` logits in float64 of each row's own teacher, transformed; -inf for ids that it has not."""
    members, row = members_of(given), support.entries.row
    total = call.gain.new_zeros((2, len(row)))
    gain, squash = torch.ones_like(total[0], dtype=torch.float64), torch.zeros_like(total[0], dtype=torch.float64)
    for number, member in enumerate(members):
        mine = torch.ones_like(read) if isinstance(given, Teacher) else given.which[row] == number
        total += torch.where(mine, _member_entries(member, support, read & mine, call), 0.0)
        gain = torch.where(mine, own_gain(member, call, torch.float64)[row], gain)
        squash = torch.where(mine, (member.head or PLAIN).squash, squash)
    raw, has = (total if call.group is None else sum_over(call.group, total)).double()
    z = gain * torch.where(squash == 0, raw, torch.tanh(raw * squash))
    return torch.where(has > 0, z, -torch.inf)


def _member_entries(teacher: Teacher, support: Support, read: Tensor, call: Call) -> Tensor:
    """``[2, E]`` raw logits of the columns that are here, and whether they are."""
    _, columns = vocabulary(call.caller, teacher.width, teacher.head or PLAIN, call.shard)
    column, here = support.place(0, columns)
    source = source_columns(teacher, call, columns)
    if source is not None:
        ids = support.entries.ids
        column = torch.where((ids >= 0) & (ids < len(source)), source[ids.clamp(0, len(source) - 1)], -1)
        here, column = column >= 0, column.clamp_min(0)
    if isinstance(teacher.logits, Logits):
        operands, own = own_operands(teacher), own_call(teacher, call, columns, call.gain)
        assert operands.weight is not None
        tokens, place = gathered_tokens(teacher.tokens, call), (column, here & read)
        raw = raw_logits(tokens, operands.weight, operands.bias, support, place, own)
    else:
        logits = teacher.tokens.reshape(-1, teacher.width)
        at = call.rows.index[support.entries.row]
        raw = logits[at, column].to(call.gain.dtype) if columns else call.gain.new_zeros(len(at))
    return torch.stack([torch.where(here & read, raw, 0.0), here.to(raw.dtype)])


def kept_of(given: Teacher | Teachers) -> Kept | None:
    """What each row's own teacher kept; None where it is taken over the student's ids."""
    kept = [x.kept for x in members_of(given) if x.kept is not None]
    if isinstance(given, Teacher) or not kept:
        return kept[0] if kept else None
    parts = [torch.arange(len(x.lengths), device=x.ids.device) for x in kept]
    row = torch.cat([rows_of(x, each) for x, each in zip(kept, parts, strict=True)])
    number = torch.cat([torch.full_like(x.ids, i) for i, x in enumerate(kept)])
    mine = number == given.which[row]
    order = row[mine].argsort(stable=True)
    lengths = torch.stack([x.lengths for x in kept]).gather(0, given.which[None])[0]
    return Kept(torch.cat([x.ids for x in kept])[mine][order], lengths)


def members_of(given: Teacher | Teachers) -> tuple[Teacher, ...]:
    return (given,) if isinstance(given, Teacher) else tuple(given.members)
