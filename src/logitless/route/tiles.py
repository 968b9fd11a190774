"""How large tiles, blocks and chunks are within a budget: from shapes, dtypes and the table of ``machine``."""

from __future__ import annotations

from typing import NamedTuple

import torch

from logitless.call import Call
from logitless.errors import LogitlessError
from logitless.machine import ALIGNED, Machine, Tiles, row_stride
from logitless.product_table import PairSizes, ProductSizes, product_sizes
from logitless.softmax import WIDTH

FIXED_ROWS = 1024
"""Rows of a tile with ``bits="canonical"``, whatever the batch."""


class Shape(NamedTuple):
    """What the sizes of tiles depend on.

    Attributes:
        rows, columns: R and the true columns V of the logits that are never stored.
        logits_bytes, operand_bytes: bytes of one logit of the tile, and of one element of dZ.
        machine: which table of sizes applies.
        product: of products that end in a softmax, of one model or of two; None where they are apart.
        lines: of a part of the statistic that such a product leaves behind.
        blocks: whether tiles are whole blocks of columns, as order-free sums ask for.
        elsewhere: columns of each rank of a vocabulary group; empty where there is none.
    """

    rows: int
    columns: int
    logits_bytes: int
    operand_bytes: int
    machine: Machine
    product: ProductSizes | PairSizes | None = None
    lines: int = WIDTH
    blocks: bool = False
    elsewhere: tuple[int, ...] = ()

    @staticmethod
    def of(call: Call) -> Shape:
        product = product_sizes(call.columns, call.depth, turns=call.machine.turns) if call.apart is None else None
        sizes = (call.logits_dtype.itemsize, call.dtype.itemsize)
        lines = WIDTH + (call.table is not None)
        elsewhere = () if call.group is None else call.columns_by_rank
        return Shape(call.num_rows, call.columns, *sizes, call.machine, product, lines, elsewhere=elsewhere)


def forward_tiles(shape: Shape, memory: int) -> Tiles:
    """A tile of logits within the budget, as tall and as wide as pays; or rows whose parts of the statistic fit it."""
    budget, elementwise = divide(shape.machine, memory)
    tile = shape.machine.forward_tile
    rows, columns = _fit(shape, budget, tile, min(tile[0], shape.rows), per_column=0)
    if shape.product is None:
        if shape.blocks and columns < shape.columns and columns % ALIGNED:
            narrow, columns = columns, max(ALIGNED, columns - columns % ALIGNED)
            rows = max(1, rows * narrow // columns) if narrow < columns else rows
        return Tiles(rows, columns, rows, elementwise)
    # Parts of the statistic get the bytes of a tile of logits; rows are cut to whole blocks of the product.
    assert isinstance(shape.product, ProductSizes)
    room = rows * columns * shape.logits_bytes // max(1, parts_row(shape.columns, shape.product, shape.lines))
    rows = max(1, min(room, shape.rows))
    rows -= rows % shape.product.rows if shape.product.rows < rows < shape.rows else 0
    return Tiles(rows, max(1, shape.columns), rows, elementwise, fused=True)


def backward_tiles(shape: Shape, memory: int) -> Tiles:
    """A tile of logits and the dZ of a block of rows and as many columns, together within the budget. A budget that is
    too small on one rank is refused on all of them: otherwise some would wait for it."""
    for columns in shape.elsewhere:
        _backward_tiles(shape._replace(columns=columns), memory)
    return _backward_tiles(shape, memory)


def _backward_tiles(shape: Shape, memory: int) -> Tiles:
    """The same for one rank."""
    budget, elementwise = divide(shape.machine, memory)
    slabs, tile = shape.rows < shape.columns, shape.machine.backward_tile
    block = max(1, min(shape.rows, shape.machine.block))
    if not slabs:
        # The block shrinks until a slab of at least 256 columns of dZ fits into half of the budget.
        block = max(1, min(block, budget // 2 // (min(256, max(1, shape.columns)) * shape.operand_bytes)))
    per_column = block * shape.operand_bytes
    rows, columns = _fit(shape, budget, tile, min(tile[0], block), per_column)
    if shape.product is None:
        return Tiles(rows, columns, block, elementwise, slabs)
    # Without a tile of logits dZ gets its bytes, too, in whole tiles of the product.
    columns = min(shape.columns, columns * (rows * shape.logits_bytes + per_column) // per_column)
    least = min(shape.product.columns, shape.columns)
    if columns < least:
        # A product computes a whole tile even for fewer columns, so rows are given up instead.
        columns, block = least, max(1, block * columns // least)
    columns -= columns % least if columns < shape.columns else 0
    return Tiles(block, max(1, columns), block, elementwise, slabs, fused=True)


def chunk_tiles(shape: Shape, memory: int) -> Tiles:
    """A tile of logits on the way to a chunk of rows that has the rest of the budget: an eighth of it at most."""
    tile, budget = shape.machine.chunk_tile(memory), max(shape.logits_bytes, memory // 8)
    rows = max(1, min(tile[0], shape.rows, budget // shape.logits_bytes))
    rows, columns = _fit(shape, budget, tile, rows, per_column=0)
    return Tiles(rows, columns, rows, divide(shape.machine, memory)[1])


def even_chunks(num_rows: int, most: int) -> tuple[tuple[int, int], ...]:
    """As few chunks of at most ``most`` rows as will do, all about as long.

    >>> even_chunks(1000, 300)
    ((0, 256), (256, 512), (512, 768), (768, 1000))
    """
    if num_rows == 0:
        return ()
    rows = -(-num_rows // -(-num_rows // most))
    filled = -(-rows // ALIGNED) * ALIGNED
    rows = filled if filled <= most else max(1, most - most % ALIGNED) if most >= ALIGNED else rows
    return tuple((start, min(start + rows, num_rows)) for start in range(0, num_rows, rows))


def exponentials_row(shape: Shape, slab: int) -> int:
    """Bytes of a row of exponentials: in the operands' dtype, with a float32 reference per slab of so many columns, or
    per tile of a product that writes them."""
    slab = slab if shape.product is None else shape.product.columns
    values = row_stride(shape.columns, shape.operand_bytes) * shape.operand_bytes
    return values + torch.float32.itemsize * -(-shape.columns // max(1, slab))


def parts_row(columns: int, sizes: ProductSizes, lines: int = WIDTH) -> int:
    """Bytes of the parts of a row's statistic that a product leaves behind."""
    return torch.float32.itemsize * lines * sizes.groups(columns)


def divide(machine: Machine, memory: int) -> tuple[int, int]:
    """Bytes for the tile, and for elementwise work inside it: a kernel needs none, plain torch a share."""
    if not machine.elementwise:
        return memory, memory
    share = max(1, int(memory * machine.elementwise))
    return max(1, memory - share), share


def _fit(shape: Shape, budget: int, tile: tuple[int, int], rows: int, per_column: int) -> tuple[int, int]:
    """Rows and columns such that a column costs ``rows * logits_bytes + per_column`` and all fit the budget."""
    rows = max(1, rows)
    wide = tile[1] * tile[0] // rows if shape.machine.stretch else tile[1]
    columns = budget // (rows * shape.logits_bytes + per_column)
    # Without columns it is as for one: what is refused elsewhere is refused here.
    while columns < min(256, max(1, shape.columns)) and rows > 64:
        rows = rows // 2
        columns = budget // (rows * shape.logits_bytes + per_column)
    if columns < 1:
        needed = rows * shape.logits_bytes + per_column
        raise LogitlessError(
            f"memory: {budget} bytes of working space do not hold one column of {rows} rows, which takes {needed}. "
            f"Give more."
        )
    return rows, _whole(shape, min(columns, wide))


def _whole(shape: Shape, columns: int) -> int:
    """All columns; or whole multiples of what fills the machine, or at least of what a matrix unit takes at a time."""
    if columns >= shape.columns:
        return max(shape.columns, 1)
    step = next((step for step in (shape.machine.filling, ALIGNED) if columns >= step), 1)
    return columns - columns % step


def exponentials_alone(tiles: Tiles, shape: Shape) -> Tiles:
    """Where no logits are stored, exponentials of more columns in the bytes of both; whole tiles of the product."""
    if shape.product is None:
        return tiles
    columns = tiles.columns * (shape.logits_bytes + shape.operand_bytes) // shape.operand_bytes
    columns -= columns % shape.product.columns if columns > shape.product.columns else 0
    return tiles._replace(columns=max(1, min(columns, shape.columns)), fused=True)


def all_rows(tiles: Tiles, shape: Shape) -> Tiles:
    """Supports are not split by row: tiles of all rows, and accordingly fewer columns."""
    if shape.rows == 0:
        return tiles
    columns = max(1, tiles.rows * tiles.columns // shape.rows)
    return tiles._replace(rows=shape.rows, columns=min(columns, max(shape.columns, 1)), block=shape.rows, slabs=True)
