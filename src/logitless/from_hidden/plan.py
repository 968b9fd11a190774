"""Which route a call from hidden states takes, in which tiles, and why.

    forward     1 product     nothing needs a gradient
    frozen      2 products    only hidden does, and entropy is not differentiated: unit gradients in forward
    keep        3 products    16-bit exponentials of all rows fit the budget: backward need not recompute logits
    recompute   4 products    everything else; with the exponentials of some rows stored, between 3 and 4
    support     0 products    scope="support": the sampler kept few ids, and nothing else is asked for

One product fewer where only hidden, or only the head, needs a gradient. Decided from shapes, options and one memory
budget, before anything runs. How large a tile should be is in ``machine``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from logitless.call import Call
from logitless.errors import LogitlessError
from logitless.machine import ALIGNED, WORK, Machine, ProductSizes, product_sizes
from logitless.softmax import WIDTH

FIXED_ROWS = 1024
"""Rows of a tile in batch-invariant mode, whatever the batch."""


class Tiles(NamedTuple):
    """Sizes of a tile loop.

    Attributes:
        rows, columns: of the tile of logits that exists at a time.
        block: rows whose dZ is held together in backward, as wide as a tile.
        elementwise: bytes of working space for the plain-torch backend inside a tile.
        slabs: whether backward finishes one slab of columns after the other (otherwise one block of rows).
        fused: whether the logits of a tile stay in the kernel that makes them, and the tile takes no memory.
    """

    rows: int
    columns: int
    block: int
    elementwise: int
    slabs: bool = True
    fused: bool = False


class Shape(NamedTuple):
    """What the sizes of tiles depend on.

    Attributes:
        rows, columns: R and the true columns V of the logits that are never stored.
        logits_bytes, operand_bytes: bytes of one logit of the tile, and of one element of dZ.
        machine: which table of sizes applies.
        product: of products that end in a softmax; None where product and softmax are apart.
        lines: of a part of the statistic that such a product leaves behind.
    """

    rows: int
    columns: int
    logits_bytes: int
    operand_bytes: int
    machine: Machine
    product: ProductSizes | None = None
    lines: int = WIDTH

    @staticmethod
    def of(call: Call) -> Shape:
        product = product_sizes(call.columns, call.width) if call.apart is None and not call.further else None
        sizes = (call.logits_dtype.itemsize, call.dtype.itemsize)
        lines = WIDTH + (call.extras is not None)
        return Shape(call.num_rows, call.columns, *sizes, call.machine, product, lines)


@dataclass(frozen=True)
class LinearPlan:
    """The decision.

    Attributes:
        kind: which of the four routes.
        forward, backward: sizes of the two tile loops; no backward where nothing is multiplied there.
        kept_rows: how many rows' exponentials are stored for backward.
        reason: why, in a sentence.
        products: matrix products of forward and backward together, of the size of the logits.
        apart: why logits go through memory between a product and its softmax; None where one kernel does both.
        ranked: whether all logits are made once more, to count those above the target's.
    """

    kind: Literal["forward", "frozen", "keep", "recompute"]
    forward: Tiles
    backward: Tiles | None
    kept_rows: int
    reason: str
    products: int
    apart: str | None = None
    ranked: bool = False

    def __str__(self) -> str:
        products = str(self.products)
        if self.kind == "recompute" and self.kept_rows:
            products = f"between {self.products - 1} and {self.products}"
        what = "products" if self.forward.fused else "tiles"
        tiles = f"Forward in {what} of {self.forward.rows} x {self.forward.columns} logits"
        if self.backward is not None:
            rows, columns, block, *_ = self.backward
            tiles += f", backward in {what} of {rows} x {columns} and blocks of {block} rows"
        noun = "product" if products == "1" else "products"
        logits = f"Logits go through memory, because {self.apart}"
        if self.apart is None:
            logits = "Logits stay in the kernels that make them"
        if self.ranked:
            logits += ". They are made once more to count those above the target's"
        return f"{self.kind}: {products} matrix {noun}, because {self.reason}. {tiles}. {logits}."


ONLY_SUPPORT = "only the ids that the sampler kept and the targets are asked for"


@dataclass(frozen=True)
class SupportPlan:
    """The route that multiplies single rows of the weight.

    Attributes:
        ids: kept ids and targets of all rows together.
        reason: why, in a sentence.
    """

    ids: int
    reason: str = ONLY_SUPPORT
    kind: Literal["support"] = "support"
    products: int = 0

    def __str__(self) -> str:
        return f"support: no matrix product, because {self.reason}. {self.ids} dot products."


def choose_plan(call: Call, needs: Sequence[bool]) -> LinearPlan | SupportPlan:
    """The route with the fewest products that the call and its budget allow.

    Args:
        needs: whether hidden, weight, bias and a LoRA's b need a gradient.
    """
    plan = _choose(call, needs)
    if call.extras is None or not call.extras.ranked or isinstance(plan, SupportPlan):
        return plan
    return replace(plan, products=plan.products + 1, ranked=True)


def _choose(call: Call, needs: Sequence[bool]) -> LinearPlan | SupportPlan:
    """The route but for ranks."""
    if call.over_support:
        assert call.asked.kept is not None
        return SupportPlan(call.asked.kept.ids.numel() + call.num_rows)
    asked, shape = call.asked, Shape.of(call)
    hidden, head = needs[0], any(needs[1:])
    differentiated = () if call.extras is None else call.extras.differentiable
    spare, work = max(0, call.memory - WORK), min(call.memory, WORK)
    # Batch-invariant tiles are those of a batch of one fixed size; kernels that multiply have no others.
    apart = shape._replace(rows=FIXED_ROWS if asked.batch_invariant else shape.rows, product=None)
    first = apart if shape.product is None else shape
    if not (hidden or head):
        forward = forward_tiles(first, work)
        forward = forward if asked.kept is None else _all_rows(forward, shape)
        return LinearPlan("forward", forward, None, 0, "nothing needs a gradient", 1, call.apart)
    plain = asked.kept is None and asked.low_rank is None and not differentiated
    if hidden and not head and asked.entropy != "grad" and plain:
        reason = "the head needs no gradient and entropy is not differentiated"
        # The tile shares its budget with its exponentials in the operands' dtype.
        forward = forward_tiles(apart._replace(logits_bytes=shape.logits_bytes + shape.operand_bytes), work)
        return LinearPlan("frozen", _exponentials_alone(forward, shape), None, 0, reason, 2, call.apart)
    forward, backward = forward_tiles(first, work), backward_tiles(shape, work)
    if call.machine.same_tiles and not asked.batch_invariant and not forward.fused:
        forward = forward._replace(rows=backward.rows, columns=backward.columns)
    if asked.kept is not None:
        forward, backward = _all_rows(forward, shape), _all_rows(backward, shape)
    # The products for a LoRA's b are not of the size of the logits.
    kept_rows, gradients = 0, hidden + any(needs[1:3])
    # The gradient of a mean logit is the same for all columns but those at -inf, which exponentials do not tell.
    # What all columns but a few have of a gradient is divided by their probability, which may be below 16 bits.
    exact = "mean_logit" in differentiated or (call.extras is not None and call.extras.rest)
    storable = shape.operand_bytes == 2 and not call.squash and not exact
    if asked.kept is None and not asked.batch_invariant and storable:
        kept_rows = min(shape.rows, spare // max(1, exponentials_row(shape, backward.columns)))
    if kept_rows and not forward.fused:
        # Stored exponentials have one reference per slab, so both loops cut the columns alike.
        forward = forward._replace(columns=backward.columns)
    if kept_rows and kept_rows == shape.rows:
        reason = f"the exponentials of all {kept_rows} rows fit the budget"
        return LinearPlan("keep", forward, backward, kept_rows, reason, 1 + gradients, call.apart)
    reason = f"gradients are needed, and the budget holds the exponentials of {kept_rows} of {shape.rows} rows"
    return LinearPlan("recompute", forward, backward, kept_rows, reason, 2 + gradients, call.apart)


def forward_tiles(shape: Shape, memory: int) -> Tiles:
    """A tile of logits within the budget, as tall and as wide as pays; or rows whose parts of the statistic fit it."""
    budget, elementwise = _divide(shape.machine, memory)
    tile = shape.machine.forward_tile
    rows, columns = _fit(shape, budget, tile, min(tile[0], shape.rows), per_column=0)
    if shape.product is None:
        return Tiles(rows, columns, rows, elementwise)
    # No more bytes than a tile of logits, and whole blocks of rows where there is more than one.
    room = rows * columns * shape.logits_bytes // max(1, parts_row(shape.columns, shape.product, shape.lines))
    rows = max(1, min(room, shape.rows))
    rows -= rows % shape.product.rows if shape.product.rows < rows < shape.rows else 0
    return Tiles(rows, max(1, shape.columns), rows, elementwise, fused=True)


def backward_tiles(shape: Shape, memory: int) -> Tiles:
    """A tile of logits and the dZ of a block of rows and as many columns, together within the budget."""
    budget, elementwise = _divide(shape.machine, memory)
    slabs, tile = shape.rows < shape.columns, shape.machine.backward_tile
    block = max(1, min(shape.rows, shape.machine.block))
    if not slabs:
        # Blocks may be as low as leaves room for a slab of dZ that is worth a product.
        block = max(1, min(block, budget // 2 // (min(256, max(1, shape.columns)) * shape.operand_bytes)))
    per_column = block * shape.operand_bytes
    rows, columns = _fit(shape, budget, tile, min(tile[0], block), per_column)
    if shape.product is None:
        return Tiles(rows, columns, block, elementwise, slabs)
    # No more bytes than with a tile of logits: dZ gets what that would have taken, in whole tiles of the product.
    columns = min(shape.columns, columns * (rows * shape.logits_bytes + per_column) // per_column)
    least = min(shape.product.columns, shape.columns)
    if columns < least:
        # Fewer columns than a tile would be a tile all the same: fewer rows instead.
        columns, block = least, max(1, block * columns // least)
    columns -= columns % least if columns < shape.columns else 0
    return Tiles(block, max(1, columns), block, elementwise, slabs, fused=True)


def chunk_tiles(shape: Shape, memory: int) -> Tiles:
    """A tile of logits on the way to a chunk of rows that has the rest of the budget: an eighth of it at most."""
    tile, budget = shape.machine.chunk_tile(memory), max(shape.logits_bytes, memory // 8)
    rows = max(1, min(tile[0], shape.rows, budget // shape.logits_bytes))
    rows, columns = _fit(shape, budget, tile, rows, per_column=0)
    return Tiles(rows, columns, rows, _divide(shape.machine, memory)[1])


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
    return shape.columns * shape.operand_bytes + torch.float32.itemsize * -(-shape.columns // max(1, slab))


def parts_row(columns: int, sizes: ProductSizes, lines: int = WIDTH) -> int:
    """Bytes of the parts of a row's statistic that a product leaves behind."""
    return torch.float32.itemsize * lines * sizes.groups(columns)


def _divide(machine: Machine, memory: int) -> tuple[int, int]:
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
    while columns < min(256, shape.columns) and rows > 64:
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


def _exponentials_alone(tiles: Tiles, shape: Shape) -> Tiles:
    """Where no logits are stored, exponentials of more columns in the bytes of both; whole tiles of the product."""
    if shape.product is None:
        return tiles
    columns = tiles.columns * (shape.logits_bytes + shape.operand_bytes) // shape.operand_bytes
    columns -= columns % shape.product.columns if columns > shape.product.columns else 0
    return tiles._replace(columns=max(1, min(columns, shape.columns)), fused=True)


def _all_rows(tiles: Tiles, shape: Shape) -> Tiles:
    """Supports are not split by row: tiles of all rows, and accordingly fewer columns."""
    if shape.rows == 0:
        return tiles
    columns = max(1, tiles.rows * tiles.columns // shape.rows)
    return tiles._replace(rows=shape.rows, columns=min(columns, max(shape.columns, 1)), block=shape.rows, slabs=True)
