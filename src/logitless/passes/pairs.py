"""Student and teacher by a kernel that multiplies both: a KL is summed, and dZ is made, without logits in memory.

look_at_pairs          both products  ->  both statistics and the sums of a KL, of all rows
write_pair_gradient    both products  ->  dZ of a tile
PairChunk              both products  ->  the sums, and 16 bits for each model  ->  dZ over the student's
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from logitless.backends.contract import Couple, Pair, Pairs, Problem
from logitless.call import Call
from logitless.machine import Tiles, pieces
from logitless.passes.look import asked_of
from logitless.passes.terms import Terms
from logitless.product_table import pair_sizes
from logitless.readings.found import Found, Lines, Taught, find
from logitless.readings.reading import Row
from logitless.route.pairs import LINES
from logitless.softmax import WIDTH, Normaliser, Statistic
from logitless.sources.linear import Projection
from logitless.sources.teachers import TeacherRows


def couple_of(p: Projection, teacher: TeacherRows, columns: slice) -> Couple:
    """All rows and those columns of both models."""
    (part,) = teacher.parts or (None,)
    assert part is not None
    assert part.projection is not None
    other = replace(
        part.projection.product(columns),
        column=p.column,
        gain=teacher.gain,
        squash=teacher.squash,
        negative=False,
        top=False,
    )
    return Couple(replace(p.product(columns), top=False), other)


def pairs_of(p: Projection) -> Pairs:
    """Kernels that multiply two models; only where the plan says that they are there."""
    return p.backend.pairs  # pyright: ignore[reportAttributeAccessIssue]


def look_at_pairs(p: Projection, tiles: Tiles, teacher: TeacherRows) -> Found:
    """Everything that is asked for of all rows and their teacher's, so many rows at a time; one gather for all."""
    out = p.gain.new_empty((LINES, len(p.hidden)))
    reverse, whole = is_reverse(p.call), slice(0, p.call.columns)
    memory = None if tiles.fused else [p.empty_rows(tiles.rows, p.call.columns, p.gain.dtype) for _ in range(2)]
    for rows in pieces(len(p.hidden), tiles.rows, p.hidden.is_meta):
        part, beside = p.cut(rows.start, rows.stop), teacher.cut(rows.start, rows.stop)
        if memory is not None:
            problem = part.whole(memory[0], tiles.elementwise)
            part.project(0, problem.logits)
            out[:, rows] = crossed(p.call, problem, beside.problem(memory[1], 0, problem))
            continue
        couple = couple_of(part, beside, whole)
        parts = pairs_of(p).parts(couple, reverse)
        pairs_of(p).merge(couple, reverse, parts, out[:, rows])
    return found(p.call, slice(0, p.call.num_rows), out)


def crossed(call: Call, student: Problem, teacher: Problem) -> Tensor:
    """``[10, R]`` lines as that kernel makes them, of logits that exist: its sums follow from the KL of the columns."""
    assert call.kind is not None
    lines = [call.backend.statistics(replace(x, entropy=True)) for x in (student, teacher)]
    own, other = (Statistic.of(x) for x in lines)
    norm, teacher_norm = (Normaliser(x.m, x.s.log()) for x in (own, other))
    pair = Pair(student, teacher, norm, teacher_norm, call.kind)
    sums = student.gain.new_empty((pair.lines, student.num_rows))
    call.backend.divergence(pair, sums)
    first, second = (own, other) if is_reverse(call) else (other, own)
    mean = first.s * ((second.s / first.s).log() - sums[0])
    # A column that only one model has contributes 0 or makes the KL infinite.
    mean = torch.where(second.s > 0, mean, -torch.inf).masked_fill(first.s == 0, 0.0)
    return torch.cat([*lines, (second.s - first.s - mean)[None], mean[None]])


def write_pair_gradient(p: Projection, teacher: TeacherRows, terms: Terms, columns: slice, into: Tensor) -> None:
    """dZ of all rows and those columns."""
    own = terms.teacher
    assert own is not None
    shift = own.shift(terms.norm)
    couple, norms = couple_of(p, teacher, columns), (terms.norm, own.norm)
    pairs_of(p).gradient(couple, norms, own.kind, (shift, own.mean, own.by), terms.coef, into)


@dataclass(frozen=True, eq=False)
class PairChunk:
    """Rows of both models in 16 bits.

    Attributes:
        p, teacher: all rows.
        values: ``[2, C, V]`` the student's exponentials, and what lies beside them.
        parts: flat memory of the sums' parts, whose references the values are relative to.
    """

    p: Projection
    teacher: TeacherRows
    values: Tensor
    parts: Tensor

    @staticmethod
    def empty(p: Projection, rows: int, teacher: TeacherRows) -> PairChunk:
        """Room for so many rows."""
        width = p.hidden.shape[1] if not teacher.parts else couple_of(p, teacher, slice(0, 0)).teacher.hidden.shape[1]
        tiles = -(-p.call.columns // pair_sizes(p.hidden.shape[1], width).columns)
        values = p.empty((2, rows, p.call.columns), p.hidden.dtype)
        return PairChunk(p, teacher, values, p.gain.new_empty(tiles * LINES * rows))

    def look(self, start: int, stop: int) -> Found:
        couple, stored = self._here(start, stop)
        reverse, out = is_reverse(self.p.call), self.p.gain.new_empty((LINES, stop - start))
        parts = pairs_of(self.p).parts(couple, reverse, self.parts, stored)
        pairs_of(self.p).merge(couple, reverse, parts, out)
        return found(self.p.call, slice(start, stop), out)

    def gradient(
        self, start: int, stop: int, column: Tensor, saved: Mapping[str, Tensor], up: Mapping[str, Tensor | None]
    ) -> Tensor:
        call, (couple, stored) = self.p.call, self._here(start, stop)
        couple = couple._replace(student=replace(couple.student, column=column))
        asked, norm = asked_of(call, slice(start, stop)), Normaliser(saved["reference"], saved["log_sum"])
        terms = Terms.of(call, saved, up, Row(norm, asked.target, asked.gain, asked.squash), None)
        own = terms.teacher
        assert own is not None
        tiles = len(self.parts) // max(1, LINES * self.values.shape[1])
        parts = self.parts[: tiles * LINES * (stop - start)].view(tiles, LINES, stop - start)
        pairs_of(self.p).gradient_from(
            couple, parts, stored, (norm, own.norm), is_reverse(call), (own.mean, own.by), terms.coef
        )
        return stored[0]

    def _here(self, start: int, stop: int) -> tuple[Couple, tuple[Tensor, Tensor]]:
        values = self.values[:, : stop - start]
        whole = slice(0, self.p.call.columns)
        return couple_of(self.p.cut(start, stop), self.teacher.cut(start, stop), whole), (values[0], values[1])


def is_reverse(call: Call) -> bool:
    assert call.kind is not None
    return call.kind.kind == "reverse_kl"


def found(call: Call, rows: slice, lines: Tensor) -> Found:
    """Results from the lines of those rows of a call."""
    assert call.kind is not None
    taught = Taught(call.kind, None, False, False, call.asked.stats)
    own, other, cross = lines[:WIDTH], lines[WIDTH : 2 * WIDTH], lines[2 * WIDTH :]
    return find(asked_of(call, rows), Lines(own, teacher=other, cross=cross), None, taught)
