"""Backward: gradients of hidden rows, weight and bias, with the logits computed again one tile at a time.

    tile = X[rows] @ W[columns].T  ->  gradient kernel  ->  dZ in the operands' dtype  ->  dW and dX by two products

Where one kernel makes the logits and their dZ, there is no tile.

dZ of a block of rows and a slab of columns exists at a time. Where there are fewer rows than columns, one slab of dW
after the other is finished while dX accumulates in float32 (``[R, D]``); otherwise one block of dX after the other
while dW accumulates (``[V, D]``). Whichever accumulator is smaller is the one that exists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.machine import Tiles, pieces, row_stride
from logitless.passes.exponentials import Exponentials
from logitless.passes.pairs import write_pair_gradient
from logitless.passes.terms import Terms
from logitless.readings.ids import write_at_ids
from logitless.sources.linear import Projection
from logitless.sources.teachers import TeacherRows


class Gradients(NamedTuple):
    """Of hidden rows ``[R, D]``, weight ``[V, D]``, bias ``[V]`` and a LoRA's b ``[V, r]``; None where not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    low: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Beside:
    """What lies beside the tiles of logits in backward.

    Attributes:
        terms: what turns a tile of logits into a tile of dZ.
        stored: exponentials that forward stored of the first rows, or None.
        teacher: the teacher's logits of these rows, and flat memory of a tile of them, or None where they stay in the
            kernel that makes them; None without a teacher.
    """

    terms: Terms
    stored: Exponentials | None = None
    teacher: tuple[TeacherRows, Tensor | None] | None = None

    def cut(self, start: int, stop: int) -> Beside:
        """Those of rows ``start .. stop``. Stored exponentials stay those of all rows."""
        teacher = None if self.teacher is None else (self.teacher[0].cut(start, stop), self.teacher[1])
        return Beside(self.terms.cut(start, stop), self.stored, teacher)


def gradients(
    p: Projection, tiles: Tiles, beside: Beside, *, want: tuple[bool, bool, bool], weight_grad: Tensor | None = None
) -> Gradients:
    """Gradients of hidden, weight and bias, by slabs of columns or blocks of rows.

    Args:
        beside: what turns a tile of logits into a tile of dZ.
        want: which of the three are wanted. A LoRA's b has its gradient in any case, which is small.
        weight_grad: float32 buffer ``[V, D]`` to add the weight's gradient to; then none is returned for it.
    """
    if len(p.hidden) == 0 or p.call.columns == 0 or not (any(want) or p.low is not None):
        return _no_gradients(p, want, weight_grad)
    loop = _by_slabs if tiles.slabs else _by_blocks
    hidden, weight, bias, low = loop(p, tiles, beside, want, weight_grad)
    # Accumulators are rounded here, after the working memory of the loop is free.
    weight = None if weight is None else weight.to(p.weight_dtype)
    return Gradients(_as(hidden, p.hidden), weight, _as(bias, p.bias), _as(low, p.low))


def _by_slabs(
    p: Projection, tiles: Tiles, beside: Beside, want: tuple[bool, bool, bool], weight_grad: Tensor | None
) -> Gradients:
    want_hidden, want_weight, want_bias = want
    block = _Block.make(p, tiles, beside)
    d_hidden = p.gain.new_empty(p.hidden.shape) if want_hidden else None
    d_weight = p.like_weight() if want_weight and weight_grad is None else None
    d_bias = p.gain.new_zeros(p.weight.shape[0]) if want_bias else None
    d_low = None if p.low is None else p.gain.new_zeros(p.low.shape)
    # A single block writes each slab of dW once, in its final dtype; several blocks add up in float32 first.
    slab = None
    if d_weight is not None and len(p.hidden) > tiles.block:
        slab = p.gain.new_empty((tiles.columns, p.weight.shape[1]))
    for columns in pieces(p.call.columns, tiles.columns, p.hidden.is_meta):
        into = weight_grad if weight_grad is not None else d_weight
        if into is not None:
            into = into[columns] if slab is None else slab[: columns.stop - columns.start]
        for rows in pieces(len(p.hidden), tiles.block, p.hidden.is_meta):
            d_z = block.fill(rows, columns)
            if d_hidden is not None:
                p.times_weight(d_z, columns, d_hidden[rows], add=columns.start > 0)
            if d_bias is not None:
                p.add_rows(d_z, d_bias[columns])
            p.add_low(d_z, p.hidden[rows], None if d_low is None else d_low[columns])
            # dW comes last: `into` may be the caller's buffer, and a failure before this line leaves it untouched.
            if want_weight and into is not None:
                p.multiply(d_z.T, p.parts(p.hidden[rows])[0], into, add=weight_grad is not None or rows.start > 0)
        if slab is not None and d_weight is not None and into is not None:
            d_weight[columns] = into
    if d_weight is not None and p.call.columns < len(d_weight):
        d_weight[p.call.columns :].zero_()
    return Gradients(d_hidden, d_weight, d_bias, d_low)


def _by_blocks(
    p: Projection, tiles: Tiles, beside: Beside, want: tuple[bool, bool, bool], weight_grad: Tensor | None
) -> Gradients:
    want_hidden, want_weight, want_bias = want
    block = _Block.make(p, tiles, beside)
    d_hidden = torch.empty_like(p.hidden, memory_format=torch.contiguous_format) if want_hidden else None
    # Slabs add up in float32, in place where that is the dtype of d_hidden.
    narrow = d_hidden is not None and d_hidden.dtype != p.gain.dtype
    sums = p.gain.new_empty((min(tiles.block, len(p.hidden)), p.hidden.shape[1])) if narrow else None
    # dW is summed in float32 over all blocks, in the caller's buffer where there is one.
    d_weight = p.gain.new_empty(p.weight.shape) if want_weight and weight_grad is None else weight_grad
    d_bias = p.gain.new_zeros(p.weight.shape[0]) if want_bias else None
    d_low = None if p.low is None else p.gain.new_zeros(p.low.shape)
    for rows in pieces(len(p.hidden), tiles.block, p.hidden.is_meta):
        into = d_hidden if d_hidden is None else d_hidden[rows] if sums is None else sums[: rows.stop - rows.start]
        for columns in pieces(p.call.columns, tiles.columns, p.hidden.is_meta):
            d_z = block.fill(rows, columns)
            if into is not None:
                p.times_weight(d_z, columns, into, add=columns.start > 0)
            if d_bias is not None:
                p.add_rows(d_z, d_bias[columns])
            p.add_low(d_z, p.hidden[rows], None if d_low is None else d_low[columns])
            if want_weight and d_weight is not None:
                add = weight_grad is not None or rows.start > 0
                p.multiply(d_z.T, p.parts(p.hidden[rows])[0], d_weight[columns], add=add)
        if sums is not None and d_hidden is not None and into is not None:
            d_hidden[rows] = into
    if want_weight and d_weight is not None and weight_grad is None:
        d_weight[p.call.columns :].zero_()
    return Gradients(d_hidden, d_weight if weight_grad is None else None, d_bias, d_low)


@dataclass(frozen=True, eq=False)
class _Block:
    """dZ of a block of rows and a slab of columns, made tile by tile.

    Attributes:
        p, tiles, beside: of the loop.
        logits: memory of a tile; None where there is none.
        d_z: memory of the block.
        cut: ``(start, stop)`` to those rows of ``p``, and what lies beside them. Remembered: cutting takes the CPU
            as long as a launch, and the same rows come again with every slab.
    """

    p: Projection
    tiles: Tiles
    beside: Beside
    logits: Tensor | None
    d_z: Tensor
    cut: Callable[[int, int], tuple[Projection, Beside]]

    @staticmethod
    def make(p: Projection, tiles: Tiles, beside: Beside) -> _Block:
        def cut(start: int, stop: int) -> tuple[Projection, Beside]:
            return p.cut(start, stop), beside.cut(start, stop)

        width = row_stride(tiles.columns, p.hidden.dtype.itemsize)
        d_z = p.empty((min(tiles.block, len(p.hidden)), width), p.hidden.dtype)
        logits = None if tiles.fused else p.empty_tile(tiles)
        return _Block(p, tiles, beside, logits, d_z, functools.cache(cut))

    def fill(self, rows: slice, columns: slice) -> Tensor:
        """dZ of those rows and columns: first from stored exponentials, then from logits."""
        out = self.d_z[: rows.stop - rows.start, : columns.stop - columns.start]
        stored, start = self.beside.stored, rows.start
        if stored is not None and start < stored.rows:
            start = min(rows.stop, stored.rows)
            p, beside = self.cut(rows.start, start)
            into, terms = out[: start - rows.start], beside.terms
            memory = self.tiles.elementwise
            stored.cut(rows.start, start).write_gradient(p, terms.norm, terms.coef, memory, columns.start, into)
        for some in pieces(rows.stop - start, self.tiles.rows, self.p.hidden.is_meta):
            first = start - rows.start + some.start
            self._write(start + some.start, start + some.stop, columns, out[first : first + some.stop - some.start])
        if self.beside.terms.listed and self.beside.teacher is None:
            # Listed ids are written once per block: their values are finished and do not depend on the tiles.
            coef = self.cut(rows.start, rows.stop)[1].terms.coef
            write_at_ids(self.p.backend, coef, columns.start, columns.stop - columns.start, out)
        return out

    def _write(self, start: int, stop: int, columns: slice, into: Tensor) -> None:
        """dZ of a tile."""
        p, beside = self.cut(start, stop)
        if self.logits is None and beside.teacher is not None:
            write_pair_gradient(p, beside.teacher[0], beside.terms, columns, into)
            return
        if self.logits is None:
            p.products.gradient(p.product(columns), beside.terms.norm, beside.terms.coef, into)
            return
        tile, teacher = p.tile(self.logits, self.tiles, columns.start), None
        if beside.teacher is not None:
            rows, memory = beside.teacher
            assert memory is not None
            teacher = rows.problem(memory, tile.first, tile)
        beside.terms.write(p.call, tile, into, None, teacher)


def _no_gradients(p: Projection, want: tuple[bool, bool, bool], weight_grad: Tensor | None) -> Gradients:
    hidden, weight, bias = want
    return Gradients(
        torch.zeros_like(p.hidden, memory_format=torch.contiguous_format) if hidden else None,
        p.like_weight().zero_() if weight and weight_grad is None else None,
        torch.zeros_like(p.bias) if bias and p.bias is not None else None,
        None if p.low is None else torch.zeros_like(p.low),
    )


def _as(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if gradient is None or like is None else gradient.to(like.dtype)
