"""Exponentials of whole rows in 16 bits, so that the logits need not be multiplied again.

    forward     a tile of logits  ->  its statistic, and e^(z - reference) of the stored rows
    backward    e^(z - reference)  ->  dZ, possibly over the exponentials themselves

Probabilities are stored and not logits: rounding them costs 2^-9 of each, as rounding dZ does, where a logit of 20
rounded to 16 bits is off by 6 % in its probability. The target's place holds 0; its gradient is formed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from logitless.backends.contract import Problem, Running
from logitless.machine import Tiles, row_stride
from logitless.product_table import product_sizes
from logitless.softmax import Coefficients, Normaliser
from logitless.sources.linear import Projection


@dataclass(frozen=True, eq=False)
class Exponentials:
    """``e^(z - reference)`` of the first K rows of a projection.

    Attributes:
        values: ``[K, V]`` in the operands' dtype, or wider, so that every row begins where products are fast.
        reference: ``[number of slabs, K]`` near the maximum of each row's part of a slab.
        columns: columns of a slab, in forward and backward alike.
        fused: whether the product itself writes them: a slab is then one of its tiles.
    """

    values: Tensor
    reference: Tensor
    columns: int
    fused: bool = False

    @staticmethod
    def empty(p: Projection, rows: int, tiles: Tiles) -> Exponentials:
        """Room for so many rows, to be filled in those tiles."""
        columns = _slab(p, tiles)
        # A shard of padding alone has one slab, of no columns.
        slabs = -(-p.call.columns // columns) if tiles.fused else max(1, -(-p.call.columns // columns))
        values = p.empty((rows, row_stride(p.call.columns, p.hidden.dtype.itemsize)), p.hidden.dtype)
        return Exponentials(values, p.gain.new_zeros((slabs, rows)), columns, tiles.fused)

    @staticmethod
    def of(p: Projection, values: Tensor, reference: Tensor, tiles: Tiles) -> Exponentials:
        """Those that were filled in those tiles."""
        return Exponentials(values, reference, _slab(p, tiles), tiles.fused)

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    def store(self, p: Projection, tile: Problem, out: Tensor, r: int) -> None:
        """The statistic of a tile whose first row is ``r`` into ``out``, and the exponentials of its stored rows."""
        count = max(0, min(tile.num_rows, self.rows - r))
        if count:
            slab, reference = tile.first // self.columns, self.reference[:, r : r + count]
            values = self.values[r : r + count, tile.first : tile.first + tile.columns]
            # The guess of a slab's reference is that of the slab before; the first guess is 0.
            running = Running(reference[max(slab - 1, 0)], reference[slab])
            stored, into = (tile, out) if count == tile.num_rows else (tile.cut(0, count), out[:, :count])
            p.backend.exponentials(stored, into, running, values, slope=False)
        if count < tile.num_rows:
            p.backend.statistics(tile.cut(count, tile.num_rows), out[:, count:])

    def cut(self, start: int, stop: int) -> Exponentials:
        """Rows ``start .. stop`` of them."""
        return replace(self, values=self.values[start:stop], reference=self.reference[:, start:stop])

    def write_gradient(
        self, p: Projection, norm: Normaliser, coef: Coefficients, memory: int, first: int, out: Tensor
    ) -> None:
        """dZ of the rows of ``p``, whose exponentials these are, and of as many columns as ``out`` has.

        Args:
            memory: bytes of working space for the plain-torch backend.
            first: number of the first column, which begins a slab.
            out: may be the exponentials themselves.
        """
        problem = p.problem(self.values[:, first : first + out.shape[1]], memory, first)
        references = self.reference[first // self.columns :]
        write = p.products.gradient_from if self.fused else p.backend.gradient_from
        write(problem, references, self.columns, norm, coef, out)


def _slab(p: Projection, tiles: Tiles) -> int:
    """Columns that share a reference."""
    if not tiles.fused:
        return tiles.columns
    return product_sizes(p.call.columns, p.call.depth, turns=p.call.machine.turns).columns
