"""The memory of a chunk of rows: whole rows of the vocabulary, of which first statistics are taken, then dZ is made.

    Logits          float32 (or wider): one product. 16-bit rows of dZ go over the start of their own float32 rows
    Exponentials    e^(z - reference) in the operands' 16 bits, filled tile by tile. dZ goes over them

Exponentials take half the memory, so twice the rows share one product for dW; and the float32 logits of a tile are
read once while they are warm. They cost dZ a second rounding of 2^-9.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from logitless.backends import load
from logitless.from_hidden.gradients import Exponentials, Projection, Space, project, sweep_statistics
from logitless.from_hidden.plan import Tiles
from logitless.softmax import Coefficients, Normaliser


class Chunk(Protocol):
    """Room for some rows of ``p`` at a time."""

    def statistics(self, start: int, stop: int) -> Tensor:
        """``[4, C]`` (m, s, w, t) of rows ``start .. stop``, which are then here."""
        ...

    def gradient(self, start: int, stop: int, column: Tensor, norm: Normaliser, coef: Coefficients) -> Tensor:
        """``[C, V]`` dZ of the rows that are here, over them, in the operands' dtype.

        Args:
            column: ``[C]`` of the targets, ``SKIP`` for rows that get no gradient whatever they hold.
        """
        ...


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

    @staticmethod
    def make(p: Projection, rows: int, columns: int, elementwise: int) -> LogitsChunk:
        return LogitsChunk(
            p, Space.make(p, Tiles(rows, p.columns, rows, elementwise), None).logits, columns, elementwise
        )

    def statistics(self, start: int, stop: int) -> Tensor:
        rows, logits = self._rows(start, stop)
        for c in range(0, rows.columns, self.columns):
            project(rows, c, logits[:, c : c + self.columns])
        return load(rows.backend).statistics(rows.problem(logits, self.elementwise))

    def gradient(self, start: int, stop: int, column: Tensor, norm: Normaliser, coef: Coefficients) -> Tensor:
        rows, logits = self._rows(start, stop)
        problem = replace(rows, column=column).problem(logits, self.elementwise)
        return load(rows.backend).gradient_over(problem, norm, coef, rows.hidden.dtype)

    def _rows(self, start: int, stop: int) -> tuple[Projection, Tensor]:
        """Those rows, and the place of their logits."""
        rows = self.p.cut(start, stop)
        return rows, self.logits[: rows.num_rows * rows.columns].view(rows.num_rows, rows.columns)


@dataclass(frozen=True, eq=False)
class ExponentialsChunk:
    """16-bit exponentials of the logits.

    Attributes:
        p: the rows.
        held: memory of a chunk.
        tiles: on whose way it is filled.
    """

    p: Projection
    held: Exponentials
    tiles: Tiles

    @staticmethod
    def make(p: Projection, rows: int, tiles: Tiles) -> ExponentialsChunk:
        return ExponentialsChunk(p, Exponentials.empty(p, rows, tiles.columns), tiles)

    def statistics(self, start: int, stop: int) -> Tensor:
        held = self.held.cut(0, stop - start)
        # The first guess of a row is 0, and not what another row had here before it.
        held.reference[:1].zero_()
        stats, _ = sweep_statistics(self.p.cut(start, stop), self.tiles, exponentials=held)
        return stats

    def gradient(self, start: int, stop: int, column: Tensor, norm: Normaliser, coef: Coefficients) -> Tensor:
        held, rows = self.held.cut(0, stop - start), replace(self.p.cut(start, stop), column=column)
        held.write_gradient(rows, norm, coef, self.tiles.elementwise, 0, held.values)
        return held.values
