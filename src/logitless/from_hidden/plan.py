"""Which way a call of the linear path goes, and why.

    forward     1 product     nothing needs a gradient
    frozen      2 products    only hidden does, and entropy is not differentiated: unit gradients in forward
    keep        3 products    16-bit exponentials of all rows fit the budget: backward need not recompute logits
    recompute   4 products    everything else; with some rows kept, between 3 and 4

Decided from shapes, options and one memory budget, before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from logitless.errors import LogitlessError
from logitless.spec import EntropyMode

WORK = 512 << 20
"""Bytes that tiles get at most when the budget is large enough to keep something."""

FIXED_ROWS = 1024
"""Rows of a tile in batch-invariant mode, whatever the batch."""


@dataclass(frozen=True)
class LinearPlan:
    """The decision.

    Attributes:
        kind: which of the four ways.
        forward, backward: sizes of the two sweeps.
        kept_rows: how many rows' exponentials are kept.
        reason: why, in a sentence.
    """

    kind: Literal["forward", "frozen", "keep", "recompute"]
    forward: Tiles
    backward: Tiles
    kept_rows: int
    reason: str

    def __str__(self) -> str:
        products = {"forward": "1", "frozen": "2", "keep": "3", "recompute": "4"}[self.kind]
        if self.kind == "recompute" and self.kept_rows:
            products = "between 3 and 4"
        return (
            f"{self.kind}: {products} matrix products, because {self.reason}. Forward in tiles of {self.forward.rows} "
            f"x {self.forward.columns} logits, backward in tiles of {self.backward.rows} x {self.backward.columns} and "
            f"blocks of {self.backward.block} rows."
        )


@dataclass(frozen=True)
class Wishes:
    """What a call needs beyond its shape.

    Attributes:
        hidden, weight: whether they (or the bias, for weight) need a gradient.
        entropy_grad: whether entropy is differentiated.
        replay: whether there are kept ids.
        keepable: whether exponentials may be kept: half-precision operands, no softcap.
        invariant: whether tiles must not depend on the number of rows.
    """

    hidden: bool
    weight: bool
    entropy_grad: bool
    replay: bool
    keepable: bool
    invariant: bool

    @staticmethod
    def of(
        needs: Sequence[bool],
        *,
        entropy: EntropyMode,
        operand_bytes: int,
        capped: bool,
        replay: bool,
        invariant: bool,
    ) -> Wishes:
        """From what a call is asked for.

        Args:
            needs: whether hidden, weight and bias need a gradient.
            operand_bytes: of one element of hidden and weight.
            capped: whether there is a softcap.
        """
        hidden, weight, bias = needs
        return Wishes(
            hidden=hidden,
            weight=weight or bias,
            entropy_grad=entropy == "grad",
            replay=replay,
            keepable=operand_bytes == 2 and not capped,
            invariant=invariant,
        )


def choose_plan(shape: Shape, wishes: Wishes, memory: int) -> LinearPlan:
    """The cheapest way that the wishes and the budget allow."""
    spare = max(0, memory - WORK)
    work = min(memory, WORK)
    forward = _forward(shape, wishes, work)
    backward = backward_tiles(shape, work)
    if wishes.replay:
        forward, backward = _all_rows(forward, shape), _all_rows(backward, shape)
    if not (wishes.hidden or wishes.weight):
        return LinearPlan("forward", forward, backward, 0, "nothing needs a gradient")
    if wishes.hidden and not wishes.weight and not wishes.entropy_grad and not wishes.replay:
        reason = "the head needs no gradient and entropy is not differentiated"
        # The tile shares its budget with its exponentials in the operands' dtype.
        both = shape.logits_bytes + shape.operand_bytes
        return LinearPlan("frozen", _forward(shape._replace(logits_bytes=both), wishes, work), backward, 0, reason)
    kept_rows = 0 if wishes.replay or wishes.invariant or not wishes.keepable else _kept_rows(shape, backward, spare)
    if kept_rows:
        # Kept exponentials have one reference per slab, so both sweeps cut the columns alike.
        forward = forward._replace(columns=backward.columns)
    if kept_rows and kept_rows == shape.rows:
        reason = f"the exponentials of all {kept_rows} rows fit the budget"
        return LinearPlan("keep", forward, backward, kept_rows, reason)
    reason = f"gradients are needed, and the budget holds the exponentials of {kept_rows} of {shape.rows} rows"
    return LinearPlan("recompute", forward, backward, kept_rows, reason)


def _forward(shape: Shape, wishes: Wishes, memory: int) -> Tiles:
    """Tiles of the first sweep. Batch-invariant ones are those of a batch of one fixed size."""
    return forward_tiles(shape._replace(rows=FIXED_ROWS) if wishes.invariant else shape, memory)


def _kept_rows(shape: Shape, tiles: Tiles, spare: int) -> int:
    """How many rows of exponentials the spare bytes hold."""
    return min(shape.rows, spare // max(1, exponentials_row(shape, tiles.columns)))


def _all_rows(tiles: Tiles, shape: Shape) -> Tiles:
    """Kept ids are not split by row: tiles of all rows, and accordingly fewer columns."""
    if shape.rows == 0:
        return tiles
    columns = max(1, tiles.rows * tiles.columns // shape.rows)
    return tiles._replace(rows=shape.rows, columns=min(columns, max(shape.columns, 1)), block=shape.rows, slabs=True)


FILLING = 4224
"""33 * 128 columns: with 2048 rows, 528 output tiles of 128 x 128, four for each of 132 multiprocessors."""


LARGE = 4 << 30
"""Bytes from which on a chunk of rows is large beside any tile."""


class Tiles(NamedTuple):
    """Sizes of a sweep.

    Attributes:
        rows, columns: of the tile of logits that exists at a time.
        block: rows whose dZ is held together in backward, as wide as a tile.
        elementwise: bytes of working space for the plain-torch backend inside a tile.
        slabs: whether backward finishes one column slab after the other (otherwise one row block).
    """

    rows: int
    columns: int
    block: int
    elementwise: int
    slabs: bool = True


class Shape(NamedTuple):
    """What the sizes depend on.

    Attributes:
        rows, columns: R and the true columns V of the logits that are never stored.
        logits_bytes, operand_bytes: bytes of one logit of the tile, and of one element of dZ.
        on_gpu: whether tiles are sized for a GPU.
    """

    rows: int
    columns: int
    logits_bytes: int
    operand_bytes: int
    on_gpu: bool


def forward_tiles(shape: Shape, memory: int) -> Tiles:
    """A tile of logits within the budget, as tall and as wide as pays."""
    tall, wide = (4096, 8448) if shape.on_gpu else (1024, 4096)
    budget, elementwise = _divide(shape, memory)
    rows = min(tall, shape.rows)
    rows, columns = _fit(shape, budget, rows, _wider(shape, wide, tall, rows), per_column=0)
    return Tiles(rows, columns, rows, elementwise)


def backward_tiles(shape: Shape, memory: int) -> Tiles:
    """A tile of logits and the dZ of a block of rows and as many columns, together within the budget."""
    tall, wide, high = (2048, 8448, 16384) if shape.on_gpu else (1024, 4096, 16384)
    budget, elementwise = _divide(shape, memory)
    slabs = shape.rows < shape.columns
    block = max(1, min(shape.rows, high))
    if not slabs:
        # Blocks may be as low as leaves room for a slab of dZ that is worth a product.
        block = max(1, min(block, budget // 2 // (min(256, max(1, shape.columns)) * shape.operand_bytes)))
    rows = min(tall, block)
    wide = _wider(shape, wide, tall, rows)
    rows, columns = _fit(shape, budget, rows, wide, per_column=block * shape.operand_bytes)
    return Tiles(rows, columns, block, elementwise, slabs)


def chunk_tiles(shape: Shape, memory: int) -> Tiles:
    """A tile of logits on the way to a chunk of rows that has the rest of the budget: an eighth of it at most.

    On a GPU 4096 x 8448 are fastest, but the rows that their bytes would hold are worth more in all but large budgets;
    2048 x 4224 stay in L2.
    """
    tall, wide = (1024, 4096) if not shape.on_gpu else (4096, 8448) if memory >= LARGE else (2048, FILLING)
    budget = max(shape.logits_bytes, memory // 8)
    rows = max(1, min(tall, shape.rows, budget // shape.logits_bytes))
    rows, columns = _fit(shape, budget, rows, _wider(shape, wide, tall, rows), per_column=0)
    return Tiles(rows, columns, rows, memory if shape.on_gpu else max(1, memory // 2))


def exponentials_row(shape: Shape, slab: int) -> int:
    """Bytes of a row of exponentials: in the operands' dtype, with a float32 reference per slab of so many columns."""
    return shape.columns * shape.operand_bytes + 4 * -(-shape.columns // max(1, slab))


def smaller(tiles: Tiles, fixed: Literal["rows", "columns"] | None) -> Tiles | None:
    """About half the size, or None where there is no point in going on. What is fixed is left alone."""
    if fixed != "rows" and tiles.rows > (16 if fixed == "columns" else 256):
        rows = tiles.rows // 2
        return tiles._replace(rows=rows, block=max(rows, tiles.block // 2))
    if fixed != "columns" and tiles.columns > (1 if fixed == "rows" else 16):
        block = tiles.block if fixed == "rows" else max(tiles.rows, tiles.block // 2)
        return tiles._replace(columns=tiles.columns // 2, block=block)
    return None


def _wider(shape: Shape, wide: int, tall: int, rows: int) -> int:
    """Few rows get more columns, on a GPU: fewer launches, each with as much to do, for the host to keep up with."""
    return wide * tall // max(1, rows) if shape.on_gpu else wide


def _divide(shape: Shape, memory: int) -> tuple[int, int]:
    """Bytes for the tile, and for elementwise work inside it: a kernel needs none, plain torch half."""
    if shape.on_gpu:
        return memory, memory
    return max(1, memory // 2), max(1, memory // 2)


def _fit(shape: Shape, budget: int, rows: int, wide: int, per_column: int) -> tuple[int, int]:
    """Rows and columns such that a column costs ``rows * logits_bytes + per_column`` and all fit the budget."""
    rows = max(1, rows)
    columns = budget // (rows * shape.logits_bytes + per_column)
    while columns < min(256, shape.columns) and rows > 64:
        rows = rows // 2
        columns = budget // (rows * shape.logits_bytes + per_column)
    if columns < 1:
        needed = rows * shape.logits_bytes + per_column
        raise LogitlessError(
            f"memory: {budget} bytes of working space do not hold one column of {rows} rows, which takes {needed}. "
            f"Give more."
        )
    columns = min(columns, wide, max(shape.columns, 1))
    # Whole multiples of what fills the machine, or at least of what a matrix unit takes at a time.
    if columns < shape.columns:
        step = next((step for step in (FILLING, 128) if columns >= step), 1)
        columns -= columns % step
    return rows, columns
