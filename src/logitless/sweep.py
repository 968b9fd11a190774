"""Statistics and gradients of ``hidden @ weight.T`` without ever holding it: sweeps over tiles of the logits.

    forward    tile = X[r] @ W[c].T  ->  statistics kernel  ->  one part per column slab, merged at the end
    backward   tile again  ->  gradient kernel  ->  dZ in the operands' dtype  ->  dW and dX by two more products

Backward goes over column slabs, each slab of dW finished in one product while dX accumulates in float32 (``[R, D]``);
or, where there are more rows than columns, over row blocks, each block of dX finished in one product while dW
accumulates (``[V, D]``). Whichever accumulator is smaller is the one that exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.backends import load
from logitless.backends.contract import Problem
from logitless.gemm import multiply
from logitless.softmax import Coefficients, Normaliser, merge


class Tiles(NamedTuple):
    """Sizes of a sweep.

    Attributes:
        rows, columns: of the tile of logits that exists at a time.
        block: rows whose dZ is held together in backward.
        elementwise: bytes of working space for the plain-torch backend inside a tile.
    """

    rows: int
    columns: int
    block: int
    elementwise: int


@dataclass(frozen=True, eq=False)
class Projection:
    """The logits that are never stored: ``hidden @ weight.T + bias``.

    Attributes:
        hidden: ``[R, D]`` selected rows.
        weight: ``[V, D]``, hidden's dtype.
        bias: ``[V]`` or None.
        column, gain, squash, columns: as in :class:`~logitless.backends.contract.Problem`.
        logits_dtype: float32 (or float64), or a half dtype to round the logits to.
        tf32: whether float32 operands may be multiplied in TF32.
        backend: name of the backend that works on tiles.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    column: Tensor
    gain: Tensor
    squash: float
    columns: int
    entropy: bool
    logits_dtype: torch.dtype
    tf32: bool
    backend: str

    @property
    def num_rows(self) -> int:
        return self.hidden.shape[0]


class Space(NamedTuple):
    """The one tile of logits, as flat memory, and the row numbers 0, 1, 2, ... of a tile."""

    logits: Tensor
    row: Tensor


class Gradients(NamedTuple):
    """Of hidden rows ``[R, D]``, weight ``[V, D]`` and bias ``[V]``; None where not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def sweep_statistics(p: Projection, tiles: Tiles) -> Tensor:
    """``[4, R]`` (m, s, w, t) over all columns here; see :mod:`logitless.softmax`."""
    slabs = range(0, max(p.columns, 1), tiles.columns)
    parts = p.gain.new_empty((len(slabs), 4, p.num_rows))
    space, backend = _tile_space(p, tiles), load(p.backend)
    for i, c in enumerate(slabs):
        for r in range(0, p.num_rows, tiles.rows):
            backend.statistics(tile_problem(p, tiles, space, r, c), parts[i, :, r : r + tiles.rows])
    return parts[0] if len(slabs) == 1 else merge(parts)


def sweep_gradients(
    p: Projection,
    tiles: Tiles,
    norm: Normaliser,
    coef: Coefficients,
    *,
    want: tuple[bool, bool, bool],
    weight_grad: Tensor | None = None,
) -> Gradients:
    """Gradients of hidden, weight and bias, by column slabs or row blocks.

    Args:
        want: which of the three are wanted.
        weight_grad: float32 buffer ``[V, D]`` to add the weight's gradient to; then none is returned for it.
    """
    sweep = _by_slabs if p.num_rows < p.columns else _by_blocks
    return sweep(p, tiles, norm, coef, want, weight_grad)


def _by_slabs(
    p: Projection,
    tiles: Tiles,
    norm: Normaliser,
    coef: Coefficients,
    want: tuple[bool, bool, bool],
    weight_grad: Tensor | None,
) -> Gradients:
    want_hidden, want_weight, want_bias = want
    space, d_z = _tile_space(p, tiles), p.hidden.new_empty((min(tiles.block, p.num_rows), tiles.columns))
    d_hidden = p.gain.new_empty(p.hidden.shape) if want_hidden else None
    d_weight = torch.empty_like(p.weight) if want_weight and weight_grad is None else None
    d_bias = p.gain.new_zeros(p.weight.shape[0]) if want_bias else None
    # One block writes a slab of dW once, in its own dtype. Several add up in float32 first.
    slab = (
        p.gain.new_empty((tiles.columns, p.weight.shape[1]))
        if d_weight is not None and p.num_rows > tiles.block
        else None
    )
    for c in range(0, p.columns, tiles.columns):
        width = min(tiles.columns, p.columns - c)
        weight = p.weight[c : c + width]
        for b in range(0, p.num_rows, tiles.block):
            rows = slice(b, min(b + tiles.block, p.num_rows))
            block = d_z[: rows.stop - rows.start, :width]
            _fill_block(p, tiles, space, norm, coef, rows, c, block)
            if weight_grad is not None:
                multiply(block.T, p.hidden[rows], weight_grad[c : c + width], add=True, tf32=p.tf32)
            elif d_weight is not None:
                into = d_weight[c : c + width] if slab is None else slab[:width]
                multiply(block.T, p.hidden[rows], into, add=slab is not None and b > 0, tf32=p.tf32)
            if d_hidden is not None:
                multiply(block, weight, d_hidden[rows], add=c > 0, tf32=p.tf32)
            if d_bias is not None:
                d_bias[c : c + width] += block.sum(0, dtype=d_bias.dtype)
        if slab is not None and d_weight is not None:
            d_weight[c : c + width] = slab[:width]
    del space, d_z, slab
    if d_weight is not None:
        d_weight[p.columns :].zero_()
    return Gradients(None if d_hidden is None else d_hidden.to(p.hidden.dtype), d_weight, _as(d_bias, p.bias))


def _by_blocks(
    p: Projection,
    tiles: Tiles,
    norm: Normaliser,
    coef: Coefficients,
    want: tuple[bool, bool, bool],
    weight_grad: Tensor | None,
) -> Gradients:
    want_hidden, want_weight, want_bias = want
    space, d_z = _tile_space(p, tiles), p.hidden.new_empty((min(tiles.block, p.num_rows), p.columns))
    d_hidden = torch.empty_like(p.hidden) if want_hidden else None
    d_weight = p.gain.new_zeros(p.weight.shape) if want_weight and weight_grad is None else weight_grad
    d_bias = p.gain.new_zeros(p.weight.shape[0]) if want_bias else None
    for b in range(0, p.num_rows, tiles.block):
        rows = slice(b, min(b + tiles.block, p.num_rows))
        block = d_z[: rows.stop - rows.start]
        for c in range(0, p.columns, tiles.columns):
            _fill_block(p, tiles, space, norm, coef, rows, c, block[:, c : c + tiles.columns])
        if d_hidden is not None:
            multiply(block, p.weight[: p.columns], d_hidden[rows], tf32=p.tf32)
        if want_weight and d_weight is not None:
            multiply(block.T, p.hidden[rows], d_weight[: p.columns], add=True, tf32=p.tf32)
        if d_bias is not None:
            d_bias[: p.columns] += block.sum(0, dtype=d_bias.dtype)
    del space, d_z
    returned = None if weight_grad is not None or d_weight is None else d_weight.to(p.weight.dtype)
    return Gradients(d_hidden, returned, _as(d_bias, p.bias))


def _fill_block(
    p: Projection,
    tiles: Tiles,
    space: Space,
    norm: Normaliser,
    coef: Coefficients,
    rows: slice,
    c: int,
    out: Tensor,
) -> None:
    """dZ of the given rows and of the columns from ``c`` on, into ``out``."""
    for r in range(rows.start, rows.stop, tiles.rows):
        stop = min(r + tiles.rows, rows.stop)
        tile = tile_problem(p, tiles, space, r, c, stop)
        part = out[r - rows.start : stop - rows.start]
        load(p.backend).gradient(tile, _rows_of(norm, r, stop), _rows_of(coef, r, stop), part, None)


def tile_problem(p: Projection, tiles: Tiles, space: Space, r: int, c: int, stop: int | None = None) -> Problem:
    """The logits of rows from ``r`` and columns from ``c``, computed into ``space``, as a backend sees them."""
    stop = min(r + tiles.rows, p.num_rows) if stop is None else stop
    width = min(tiles.columns, p.columns - c)
    logits = space.logits[: (stop - r) * width].view(stop - r, width)
    multiply(p.hidden[r:stop], p.weight[c : c + width].T, logits, tf32=p.tf32)
    if p.bias is not None:
        logits.add_(p.bias[c : c + width])
    return Problem(
        logits=logits,
        index=space.row[: stop - r],
        column=p.column[r:stop],
        gain=p.gain[r:stop],
        squash=p.squash,
        columns=width,
        entropy=p.entropy,
        memory=tiles.elementwise,
        first=c,
    )


def _tile_space(p: Projection, tiles: Tiles) -> Space:
    logits = torch.empty(tiles.rows * tiles.columns, dtype=p.logits_dtype, device=p.hidden.device)
    return Space(logits, torch.arange(tiles.rows, device=p.hidden.device))


def _rows_of(vectors: Any, r: int, stop: int) -> Any:
    """The same named vectors, cut to some rows."""
    return type(vectors)(*(None if x is None else x[r:stop] for x in vectors))


def _as(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if gradient is None or like is None else gradient.to(like.dtype)
