"""Student and teacher side by side: chunks of rows whose logits of both exist, and tiles of both in backward.

    forward, for each chunk of rows:   X W^T and Y U^T  ->  both statistics, one all_gather  ->  divergence, one more
    backward, for each tile:           X W^T and Y U^T  ->  dZ in the operands' dtype  ->  dW and dX

A divergence is summed from terms that are 0 where the two agree (``backends/divergences.py``), and those take both
normalisers first. So a chunk is whole rows of both, read twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from logitless.backends.contract import Pair, Problem, over
from logitless.backends.divergences import Divergence
from logitless.call import Call
from logitless.collectives import gather_over
from logitless.distill.source import Source
from logitless.from_hidden.gradients import Terms
from logitless.from_hidden.plan import FIXED_ROWS, Shape, Tiles, backward_tiles, even_chunks
from logitless.from_hidden.projection import Projection
from logitless.machine import SLAB, WORK, pieces
from logitless.results import RowResults, row_results
from logitless.softmax import SKIP, WIDTH, Coefficients, Normaliser, Statistic, entropy, mean_shift, merge


@dataclass(frozen=True)
class PairPlan:
    """In which chunks and tiles.

    Attributes:
        chunks: ``(start, stop)`` of each chunk of rows in forward. Batch-invariant ones are all of one length, the last
            beyond the rows.
        backward: sizes of its tile loop; None where nothing needs a gradient.
        columns: of one product in forward.
        elementwise: bytes of working space for the plain-torch backend.
        products: matrix products of forward and backward together, the teacher's counted like the student's.
    """

    chunks: tuple[tuple[int, int], ...]
    backward: Tiles | None
    columns: int
    elementwise: int
    products: int
    kind: Literal["pair"] = "pair"

    @property
    def rows(self) -> int:
        """Of the largest chunk."""
        return max((stop - start for start, stop in self.chunks), default=0)

    def __str__(self) -> str:
        back = "" if self.backward is None else f" Backward in tiles of {self.backward.rows} x {self.backward.columns}."
        return (
            f"pair: {self.products} matrix products, the teacher's included. Forward in {len(self.chunks)} chunks of "
            f"at most {self.rows} rows of both models' logits.{back}"
        )


def pair_plan(call: Call, needs: tuple[bool, ...]) -> PairPlan:
    """The chunks that the budget holds, the same on every rank of a vocabulary group."""
    machine, wide = call.machine, call.gain.dtype.itemsize
    row = max(1, call.mean_columns) * (call.logits_dtype.itemsize + wide)
    share = max(1, int(call.memory * machine.elementwise)) if machine.elementwise else call.memory
    rows = max(1, int(call.memory * (1 - machine.elementwise)) // row)
    chunks = even_chunks(call.num_rows, rows)
    if call.asked.batch_invariant:
        rows = min(rows, FIXED_ROWS)
        chunks = tuple((start, start + rows) for start in range(0, call.num_rows, rows))
    widened = call.dtype.itemsize == 2 and not machine.wide_products
    shape = Shape.of(call)._replace(logits_bytes=call.logits_dtype.itemsize + wide, product=None)
    gradients = needs[0] + any(needs[1:3])
    return PairPlan(
        chunks=chunks,
        backward=backward_tiles(shape, min(call.memory, WORK)) if gradients else None,
        columns=SLAB if widened else max(1, call.columns),
        elementwise=share,
        products=4 + gradients if gradients else 2,
    )


class PairResults(NamedTuple):
    """``[C]`` results of some rows.

    Attributes:
        row: the student's own.
        divergence: of the two.
        teacher_logprob, teacher_entropy: the teacher's.
        teacher_norm: pieces of the teacher's log Z.
        mean: sum of ``p slope``.
    """

    row: RowResults
    divergence: Tensor
    teacher_logprob: Tensor
    teacher_entropy: Tensor
    teacher_norm: Normaliser
    mean: Tensor

    def vectors(self) -> tuple[Tensor, ...]:
        """All of them: the results in the order of ``DivergenceStats``, then what backward needs."""
        row = self.row
        assert row.entropy is not None
        assert row.mean is not None
        own = (self.divergence, row.logprob, row.entropy, row.log_z)
        return *own, self.teacher_logprob, self.teacher_entropy, *row.norm, row.mean, *self.teacher_norm, self.mean


@dataclass(frozen=True, eq=False)
class PairChunk:
    """Room for the logits of both of some rows.

    Attributes:
        p, source: student and teacher, all rows.
        kind: which divergence.
        logits, teacher: flat memory of a chunk of each.
        columns: of one product.
        elementwise: bytes of working space for the plain-torch backend.
    """

    p: Projection
    source: Source
    kind: Divergence
    logits: Tensor
    teacher: Tensor
    columns: int
    elementwise: int

    @staticmethod
    def empty(p: Projection, source: Source, kind: Divergence, rows: int, columns: int, elementwise: int) -> PairChunk:
        """Room for so many rows."""
        shape = (rows, p.call.columns)
        logits, teacher = p.empty(shape, p.call.logits_dtype), p.empty(shape, p.gain.dtype)
        return PairChunk(p, source, kind, logits.view(-1), teacher.view(-1), columns, elementwise)

    def results(self, start: int, stop: int) -> PairResults:
        """Of rows ``start .. stop``, whose logits are then here."""
        rows = self.p.cut(start, stop)
        student = self._student(rows, rows.column)
        for columns in pieces(rows.call.columns, self.columns, rows.hidden.is_meta):
            rows.project(columns.start, student.logits[:, columns])
        teacher = self.source.cut(start, stop).problem(self.teacher, 0, student)
        return pair_results(rows.backend, student, teacher, self.kind, rows.call.group)

    def gradient(
        self, start: int, stop: int, column: Tensor, results: PairResults, by: Tensor, coef: Coefficients
    ) -> Tensor:
        """``[C, V]`` dZ of the rows that are here, over them, in the operands' dtype.

        Args:
            column: of the targets, ``SKIP`` for rows that get no gradient whatever they hold.
            by: gradient of each row's divergence.
            coef: for log-prob and entropy.
        """
        rows = self.p.cut(start, stop)
        student = self._student(rows, column)
        source, size = self.source.cut(start, stop), student.num_rows * student.columns
        logits = self.teacher[:size].view(student.num_rows, student.columns)
        teacher = source.of_written(logits, student)
        pair = Pair(student, teacher, results.row.norm, results.teacher_norm, self.kind)
        out = over(student.logits, rows.hidden.dtype)
        rows.backend.divergence_gradient(pair, results.mean, by, coef, out, None)
        return out

    def _student(self, rows: Projection, column: Tensor) -> Problem:
        count, columns = len(rows.hidden), rows.call.columns
        logits = self.logits[: count * columns].view(count, columns)
        return replace(rows, column=column).problem(logits, self.elementwise)


def pair_results(backend: Any, student: Problem, teacher: Problem, kind: Divergence, group: Any) -> PairResults:
    """Results of the whole vocabulary from this shard's columns: two ``all_gather``, or none if unsharded."""
    # Entropies of both cost nothing that shows.
    problems = (replace(x, entropy=True, further=()) for x in (student, teacher))
    statistics = torch.cat([backend.statistics(x) for x in problems])
    if group is not None:
        gathered = gather_over(group, statistics)
        statistics = torch.cat([merge(gathered[:, :WIDTH]), merge(gathered[:, WIDTH:])])
    ignored = student.column == SKIP
    row = row_results(statistics[:WIDTH], None, ignored, True, None)
    other = Statistic.of(statistics[WIDTH:])
    norm = Normaliser(other.m, torch.log(other.s))
    sums = student.gain.new_empty((2, student.num_rows))
    backend.divergence(Pair(student, teacher, row.norm, norm, kind), sums)
    if group is not None:
        sums = gather_over(group, sums).sum(0)
    divergence, mean = sums
    # A target that the teacher does not have is one that it never samples.
    logprob = torch.where(other.t.isnan() & ~norm.log_sum.isnan(), -torch.inf, (other.t - norm[0]) - norm[1])
    return PairResults(
        row,
        divergence,
        logprob.masked_fill(ignored, 0.0),
        entropy(norm, mean_shift(other)).masked_fill(ignored, 0.0),
        norm,
        mean_slope(kind, divergence, mean),
    )


def mean_slope(kind: Divergence, divergence: Tensor, mean: Tensor) -> Tensor:
    """The sum of ``p slope`` over a row; where it is known in other terms, by those, which rounding has not been at."""
    if kind.kind == "forward_kl":
        return torch.zeros_like(mean)
    return divergence if kind.kind == "reverse_kl" else mean


@dataclass(frozen=True, eq=False, kw_only=True)
class PairTerms(Terms):
    """What turns tiles of both logits into a tile of dZ; ``coef`` is for log-prob, entropy and log Z.

    Attributes:
        source: of the teacher's logits of these rows.
        teacher_norm: pieces of the teacher's log Z.
        kind: which divergence.
        mean, by: ``[R]`` sum of ``p slope``, and the gradient of the row's divergence.
        memory: flat memory of a tile of the teacher's logits.
    """

    source: Source
    teacher_norm: Normaliser
    kind: Divergence
    mean: Tensor
    by: Tensor
    memory: Tensor

    def cut(self, start: int, stop: int) -> PairTerms:
        rows = slice(start, stop)
        return replace(
            self,
            norm=self.norm.cut(rows),
            coef=self.coef.cut(rows),
            source=self.source.cut(start, stop),
            teacher_norm=self.teacher_norm.cut(rows),
            mean=self.mean[rows],
            by=self.by[rows],
        )

    def write(self, p: Projection, tile: Problem, out: Tensor) -> None:
        """dZ of a tile into ``out``."""
        teacher = self.source.problem(self.memory, tile.first, tile)
        pair = Pair(tile, teacher, self.norm, self.teacher_norm, self.kind)
        p.backend.divergence_gradient(pair, self.mean, self.by, self.coef, out, None)
