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
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.backends.contract import Problem
from logitless.backends.triton import products
from logitless.extras import upstream_at, write_at_ids
from logitless.from_hidden.exponentials import Exponentials
from logitless.from_hidden.plan import Tiles
from logitless.from_hidden.projection import Projection
from logitless.machine import pieces
from logitless.softmax import ELSEWHERE, Coefficients, Normaliser
from logitless.spec import IGNORE
from logitless.support import Support, kept_gradient, write_kept


class Gradients(NamedTuple):
    """Of hidden rows ``[R, D]``, weight ``[V, D]``, bias ``[V]`` and a LoRA's b ``[V, r]``; None where not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    low: Tensor | None = None


class SupportTerms(NamedTuple):
    """What dZ needs besides where log-probs are normalised over a support.

    Attributes:
        support: the ids.
        norm: normaliser over them.
        logprob, g_logprob: ``[R]`` log-prob over the support, and its upstream gradient.
    """

    support: Support
    norm: Normaliser
    logprob: Tensor
    g_logprob: Tensor


@dataclass(frozen=True, eq=False)
class Terms:
    """What turns a tile of logits into a tile of dZ.

    Attributes:
        norm, coef: as backends take them.
        support: further terms, or None.
        exponentials: those that forward stored of the first rows, or None.
    """

    norm: Normaliser
    coef: Coefficients
    support: SupportTerms | None = None
    exponentials: Exponentials | None = None

    def cut(self, start: int, stop: int) -> Terms:
        """Those of rows ``start .. stop``. A support, and stored exponentials, stay those of all rows."""
        if (start, stop) == (0, len(self.coef.plain)):
            return self
        rows = slice(start, stop)
        return replace(self, norm=self.norm.cut(rows), coef=self.coef.cut(rows))

    def write(self, p: Projection, tile: Problem, out: Tensor) -> None:
        """dZ of a tile, whose rows these terms are of, into ``out``. With a support, the tile holds all rows."""
        norm, coef = self.norm, self.coef
        if self.support is None:
            p.backend.gradient(tile, norm, coef, out, None)
            return
        support, kept_norm, logprob, g_logprob = self.support
        gathered = support.logits(tile)
        further, ignored = upstream_at(coef, gathered.row, gathered.column + tile.first), support.target == IGNORE
        values = kept_gradient(gathered, kept_norm, logprob, g_logprob, norm, coef, ignored, further)
        no_target = replace(tile, column=tile.column.clamp_max(ELSEWHERE), found=False)
        p.backend.gradient(no_target, norm, coef, out, None)
        write_at_ids(p.backend, coef, tile.first, tile.columns, out)
        write_kept(gathered, values, out, None)


def gradients(
    p: Projection, tiles: Tiles, terms: Terms, *, want: tuple[bool, bool, bool], weight_grad: Tensor | None = None
) -> Gradients:
    """Gradients of hidden, weight and bias, by slabs of columns or blocks of rows.

    Args:
        terms: what turns a tile of logits into a tile of dZ.
        want: which of the three are wanted. A LoRA's b has its gradient in any case, which is small.
        weight_grad: float32 buffer ``[V, D]`` to add the weight's gradient to; then none is returned for it.
    """
    if len(p.hidden) == 0 or p.call.columns == 0 or not (any(want) or p.low is not None):
        return _no_gradients(p, want, weight_grad)
    loop = _by_slabs if tiles.slabs else _by_blocks
    hidden, weight, bias, low = loop(p, tiles, terms, want, weight_grad)
    # Accumulators are rounded here, where the working memory of the loop is free again.
    return Gradients(_as(hidden, p.hidden), _as(weight, p.weight), _as(bias, p.bias), _as(low, p.low))


def _by_slabs(
    p: Projection, tiles: Tiles, terms: Terms, want: tuple[bool, bool, bool], weight_grad: Tensor | None
) -> Gradients:
    want_hidden, want_weight, want_bias = want
    block = _Block.make(p, tiles, terms)
    d_hidden = p.gain.new_empty(p.hidden.shape) if want_hidden else None
    d_weight = torch.empty_like(p.weight) if want_weight and weight_grad is None else None
    d_bias = p.gain.new_zeros(p.weight.shape[0]) if want_bias else None
    d_low = None if p.low is None else p.gain.new_zeros(p.low.shape)
    # One block writes a slab of dW once, in its own dtype. Several add up in float32 first.
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
            # Last, because into may be the caller's: what fails before leaves it alone.
            if want_weight and into is not None:
                p.multiply(d_z.T, p.parts(p.hidden[rows])[0], into, add=weight_grad is not None or rows.start > 0)
        if slab is not None and d_weight is not None and into is not None:
            d_weight[columns] = into
    if d_weight is not None:
        d_weight[p.call.columns :].zero_()
    return Gradients(d_hidden, d_weight, d_bias, d_low)


def _by_blocks(
    p: Projection, tiles: Tiles, terms: Terms, want: tuple[bool, bool, bool], weight_grad: Tensor | None
) -> Gradients:
    want_hidden, want_weight, want_bias = want
    block = _Block.make(p, tiles, terms)
    d_hidden = torch.empty_like(p.hidden, memory_format=torch.contiguous_format) if want_hidden else None
    # Slabs add up in float32, in place where that is the dtype of d_hidden.
    narrow = d_hidden is not None and d_hidden.dtype != p.gain.dtype
    sums = p.gain.new_empty((min(tiles.block, len(p.hidden)), p.hidden.shape[1])) if narrow else None
    # Float32 over all blocks, unless the caller's buffer is.
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
        p, tiles, terms: of the loop.
        logits: memory of a tile; None where there is none.
        d_z: memory of the block.
        cut: ``(start, stop)`` to those rows of ``p``, and their terms. Remembered: cutting takes the CPU
            as long as a launch, and the same rows come again with every slab.
    """

    p: Projection
    tiles: Tiles
    terms: Terms
    logits: Tensor | None
    d_z: Tensor
    cut: Callable[[int, int], tuple[Projection, Terms]]

    @staticmethod
    def make(p: Projection, tiles: Tiles, terms: Terms) -> _Block:
        def cut(start: int, stop: int) -> tuple[Projection, Terms]:
            return p.cut(start, stop), terms.cut(start, stop)

        d_z = p.empty((min(tiles.block, len(p.hidden)), tiles.columns), p.hidden.dtype)
        logits = None if tiles.fused else p.empty_tile(tiles)
        return _Block(p, tiles, terms, logits, d_z, functools.cache(cut))

    def fill(self, rows: slice, columns: slice) -> Tensor:
        """dZ of those rows and columns: first from stored exponentials, then from logits."""
        out = self.d_z[: rows.stop - rows.start, : columns.stop - columns.start]
        stored, start = self.terms.exponentials, rows.start
        if stored is not None and start < stored.rows:
            start = min(rows.stop, stored.rows)
            p, terms = self.cut(rows.start, start)
            into = out[: start - rows.start]
            memory = self.tiles.elementwise
            stored.cut(rows.start, start).write_gradient(p, terms.norm, terms.coef, memory, columns.start, into)
        for some in pieces(rows.stop - start, self.tiles.rows, self.p.hidden.is_meta):
            p, terms = self.cut(start + some.start, start + some.stop)
            first = start - rows.start + some.start
            into = out[first : first + len(p.hidden)]
            if self.logits is None:
                products.gradient(p.product(columns), terms.norm, terms.coef, into)
            else:
                terms.write(p, p.tile(self.logits, self.tiles, columns.start), into)
        if self.terms.support is None:
            # Once for all tiles of the block: they are finished already, whatever the tiles hold.
            coef = self.cut(rows.start, rows.stop)[1].coef
            write_at_ids(self.p.backend, coef, columns.start, columns.stop - columns.start, out)
        return out


def _no_gradients(p: Projection, want: tuple[bool, bool, bool], weight_grad: Tensor | None) -> Gradients:
    hidden, weight, bias = want
    return Gradients(
        torch.zeros_like(p.hidden) if hidden else None,
        torch.zeros_like(p.weight) if weight and weight_grad is None else None,
        torch.zeros_like(p.bias) if bias and p.bias is not None else None,
        None if p.low is None else torch.zeros_like(p.low),
    )


def _as(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if gradient is None or like is None else gradient.to(like.dtype)
