"""Chunks of whole rows: logits of some rows in memory, of which everything is found, and over which dZ is made.

    LogitsChunk          float32 (or wider): one product; the teacher's beside them. Any reading. 16-bit rows of dZ go
                         over the start of their own float32 rows
    PairChunk            (``pairs``) e^(z - reference) of the student, and beside it what a KL's gradient needs of the
                         teacher, in 16 bits, both written by one product. dZ goes over the former
    ExponentialsChunk    e^(z - reference) in the operands' 16 bits, filled tile by tile, or by the product itself. The
                         softmax alone. dZ goes over them

Exponentials take half the memory, so twice the rows share one product for dW; and the float32 logits of a tile are
read once while they are warm. They cost dZ a second rounding of 2^-9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from logitless.machine import Tiles, pieces
from logitless.operands import Kept
from logitless.passes.exponentials import Exponentials
from logitless.passes.look import asked_of, look_whole, tile_lines
from logitless.passes.pairs import PairChunk, crossed, found
from logitless.passes.terms import Terms
from logitless.readings.found import Asked, Found, find
from logitless.readings.ids import write_at_ids
from logitless.readings.reading import Row
from logitless.readings.support import Support
from logitless.route import Plan
from logitless.softmax import SKIP, Normaliser
from logitless.sources.linear import Projection
from logitless.sources.teachers import TeacherRows
from logitless.spec import IGNORE


class Chunk(Protocol):
    """Room for some rows of a projection at a time."""

    def look(self, start: int, stop: int) -> Found:
        """What is found of rows ``start .. stop``, which are then here."""
        ...

    def gradient(
        self, start: int, stop: int, column: Tensor, saved: Mapping[str, Tensor], up: Mapping[str, Tensor | None]
    ) -> Tensor:
        """``[C, V]`` dZ of the rows that are here, over them, in the operands' dtype.

        Args:
            column: ``[C]`` of the targets, ``SKIP`` for rows that get no gradient whatever they hold.
            saved: what was found of them.
            up: upstream gradients by the names of results.
        """
        ...


def empty_chunk(p: Projection, plan: Plan, teacher: TeacherRows | None) -> Chunk:
    """Room for the largest chunk of a plan."""
    if plan.tiles is not None and teacher is None:
        return ExponentialsChunk(p, Exponentials.empty(p, plan.rows, plan.tiles), plan.tiles)
    if plan.tiles is not None and plan.tiles.fused and teacher is not None:
        return PairChunk.empty(p, plan.rows, teacher)
    rows = max((stop - start for start, stop in plan.chunks), default=0)
    logits = p.empty_rows(rows, p.call.columns, p.call.logits_dtype)
    others = None if teacher is None else p.empty_rows(rows, p.call.columns, p.gain.dtype)
    return LogitsChunk(p, logits, plan.columns, plan.elementwise, teacher, others, crossing=plan.tiles is not None)


@dataclass(frozen=True, eq=False)
class LogitsChunk:
    """Logits in the dtype that they are computed in.

    Attributes:
        p: the rows; of a batch-invariant call with rows after the last, which stand for nothing.
        logits: flat memory of a chunk.
        columns: of one product.
        elementwise: bytes of working space for the plain-torch backend.
        teacher, others: the teacher's logits of all rows, and flat memory of a chunk of them; None without a teacher.
        crossing: whether other ranks send the sums of a KL, and this one has to.
    """

    p: Projection
    logits: Tensor
    columns: int
    elementwise: int
    teacher: TeacherRows | None = None
    others: Tensor | None = None
    crossing: bool = False

    def look(self, start: int, stop: int) -> Found:
        rows, call, seen = self.p.cut(start, stop), self.p.call, None
        problem = rows.whole(self.logits, self.elementwise)
        if self.columns >= call.columns:
            rows.project(0, problem.logits)
        else:
            for columns in pieces(call.columns, self.columns, rows.hidden.is_meta):
                rows.project(columns.start, problem.logits[:, columns])
        if self.teacher is not None and self.others is not None:
            seen = self.teacher.cut(start, stop).look(self.others, problem, call)
        if self.crossing and seen is not None:
            return found(call, slice(start, stop), crossed(call, problem, seen.problem))
        support = None if call.kept is None else self._support(call.kept, start, stop)
        asked = self._padded(start, stop) if len(self.p.hidden) > call.num_rows else asked_of(call, slice(start, stop))
        return look_whole(call, asked, problem, support, seen)

    def gradient(
        self, start: int, stop: int, column: Tensor, saved: Mapping[str, Tensor], up: Mapping[str, Tensor | None]
    ) -> Tensor:
        rows, call, teacher = self.p.cut(start, stop), self.p.call, None
        problem = rows.whole(self.logits, self.elementwise, column)
        support = None if call.kept is None else self._support(call.kept, start, stop)
        asked = self._padded(start, stop) if len(self.p.hidden) > call.num_rows else asked_of(call, slice(start, stop))
        if self.teacher is not None and self.others is not None:
            beside = self.teacher.cut(start, stop)
            teacher = beside.of_written(beside.room(self.others, problem), problem)
        target, table = asked.target.masked_fill(column == SKIP, IGNORE), asked.table
        if support is not None:
            support = replace(support, target=target)
        row = Row(Normaliser(saved["reference"], saved["log_sum"]), target, asked.gain, asked.squash)
        terms = Terms.of(call if table is None else replace(call, table=table), saved, up, row, support)
        # dZ lies over the start of each row's own logits, in the operands' dtype.
        out = problem.logits.view(rows.hidden.dtype)[:, : call.columns]
        terms.write(call, problem, out, None, teacher, over=True)
        if terms.coef.at_ids is not None and support is None and teacher is None:
            write_at_ids(call.backend, terms.coef, 0, call.columns, out)
        return out

    def _padded(self, start: int, stop: int) -> Asked:
        """What is to be found of some rows, where there are rows that stand for nothing after the last."""
        call, length = self.p.call, len(self.p.hidden)
        pad, table = torch.nn.functional.pad, call.table
        target = pad(call.rows.target, (0, length - call.num_rows), value=IGNORE)[start:stop]
        table = None if table is None else table.padded(length).cut(slice(start, stop))
        given = (call.squash, target == IGNORE, call.entropy, call.group, table)
        return Asked(target, self.p.gain[start:stop], *given, call.backend_name if call.canonical else None)

    def _support(self, kept: Kept, start: int, stop: int) -> Support:
        call = self.p.call
        return Support.of(kept.cut(start, stop), call.rows.target[start:stop], call.start, call.vocab_size)


@dataclass(frozen=True, eq=False)
class ExponentialsChunk:
    """16-bit exponentials of the logits.

    Attributes:
        p: the rows.
        exponentials: memory of a chunk.
        tiles: by which it is filled.
    """

    p: Projection
    exponentials: Exponentials
    tiles: Tiles

    def look(self, start: int, stop: int) -> Found:
        here = self.exponentials.cut(0, stop - start)
        # Guesses of references start at 0: the memory still holds those of the chunk before.
        here.reference[:1].zero_()
        lines = tile_lines(self.p.cut(start, stop), self.tiles, None, None, here)
        return find(asked_of(self.p.call, slice(start, stop)), lines)

    def gradient(
        self, start: int, stop: int, column: Tensor, saved: Mapping[str, Tensor], up: Mapping[str, Tensor | None]
    ) -> Tensor:
        here, rows = self.exponentials.cut(0, stop - start), replace(self.p.cut(start, stop), column=column)
        asked, norm = asked_of(self.p.call, slice(start, stop)), Normaliser(saved["reference"], saved["log_sum"])
        terms = Terms.of(self.p.call, saved, up, Row(norm, asked.target, asked.gain, asked.squash), None)
        out = here.values[:, : self.p.call.columns]
        here.write_gradient(rows, norm, terms.coef, self.tiles.elementwise, 0, out)
        return out
