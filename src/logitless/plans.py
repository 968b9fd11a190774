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
from typing import Literal

from logitless.spec import EntropyMode
from logitless.tiles import Shape, Tiles, backward_tiles, exponentials_row, forward_tiles

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
