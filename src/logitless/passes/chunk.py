"""The memory of a chunk of rows: whole rows of the vocabulary, of which first the statistic is taken, then dZ is made.

    LogitsChunk          float32 (or wider): one product. 16-bit rows of dZ go over the start of their own float32 rows
    ExponentialsChunk    e^(z - reference) in the operands' 16 bits, filled tile by tile, or by the product itself. dZ
                         goes over them

Exponentials take half the memory, so twice the rows share one product for dW; and the float32 logits of a tile are
read once while they are warm. They cost dZ a second rounding of 2^-9.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from logitless.from_hidden.exponentials import Exponentials
from logitless.from_hidden.plan import Tiles
from logitless.from_hidden.projection import Projection
from logitless.from_hidden.statistics import row_statistics
from logitless.machine import pieces
from logitless.policy_loss.plan import LossPlan
from logitless.softmax import Coefficients, Normaliser


class Chunk(Protocol):
    """Room for some rows of ``p`` at a time."""

    def statistics(self, start: int, stop: int) -> Tensor:
        """``[4, C]`` statistic of rows ``start .. stop``, which are then here."""
        ...

    def gradient(self, start: int, stop: int, column: Tensor, norm: Normaliser, coef: Coefficients) -> Tensor:
        """``[C, V]`` dZ of the rows that are here, over them, in the operands' dtype.

        Args:
            column: ``[C]`` of the targets, ``SKIP`` for rows that get no gradient whatever they hold.
        """
        ...


def empty_chunk(p: Projection, plan: LossPlan) -> Chunk:
    """Room for the largest chunk of a plan."""
    if plan.tiles is not None:
        return ExponentialsChunk(p, Exponentials.empty(p, plan.rows, plan.tiles), plan.tiles)
    logits = p.empty((plan.rows, p.call.columns), p.call.logits_dtype)
    return LogitsChunk(p, logits.view(-1), plan.columns, plan.elementwise)


@dataclass(frozen=True, eq=False)
class LogitsChunk:
    """Logits in the dtype that they are computed in.

    Attributes:
        p: the rows.
        logits: flat memory of a chunk.
        columns: of one product.
        elementwise: bytes of working space for the plain-torch backend.
    """

    p: Projection
    logits: Tensor
    columns: int
    elementwise: int

    def statistics(self, start: int, stop: int) -> Tensor:
        rows, logits = self._rows(start, stop)
        for columns in pieces(rows.call.columns, self.columns, rows.hidden.is_meta):
            rows.project(columns.start, logits[:, columns])
        return rows.backend.statistics(rows.problem(logits, self.elementwise))

    def gradient(self, start: int, stop: int, column: Tensor, norm: Normaliser, coef: Coefficients) -> Tensor:
        rows, logits = self._rows(start, stop)
        problem = replace(rows, column=column).problem(logits, self.elementwise)
        return rows.backend.gradient_over(problem, norm, coef, rows.hidden.dtype)

    def _rows(self, start: int, stop: int) -> tuple[Projection, Tensor]:
        """Those rows, and the place of their logits."""
        rows = self.p.cut(start, stop)
        return rows, self.logits[: len(rows.hidden) * rows.call.columns].view(len(rows.hidden), rows.call.columns)


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

    def statistics(self, start: int, stop: int) -> Tensor:
        here = self.exponentials.cut(0, stop - start)
        # The first guess of a row is 0, and not what another row had here before it.
        here.reference[:1].zero_()
        statistic, _ = row_statistics(self.p.cut(start, stop), self.tiles, exponentials=here)
        return statistic

    def gradient(self, start: int, stop: int, column: Tensor, norm: Normaliser, coef: Coefficients) -> Tensor:
        here, rows = self.exponentials.cut(0, stop - start), replace(self.p.cut(start, stop), column=column)
        here.write_gradient(rows, norm, coef, self.tiles.elementwise, 0, here.values)
        return here.values
