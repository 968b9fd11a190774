"""Statistics and gradients of ``hidden @ weight.T`` without ever holding it: sweeps over tiles of the logits.

    forward    tile = X[r] @ W[c].T  ->  statistics kernel  ->  one part per column slab, merged at the end
    backward   tile again  ->  gradient kernel  ->  dZ in the operands' dtype  ->  dW and dX by two more products

Backward holds dZ of a slab of columns for a block of rows. Where there are fewer rows than columns it finishes one slab
of dW after the other while dX accumulates in float32 (``[R, D]``); otherwise one block of dX after the other while dW
accumulates (``[V, D]``). Whichever accumulator is smaller is the one that exists.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from logitless.backends import load
from logitless.backends.contract import Problem, Running
from logitless.from_hidden.gemm import add_rows, multiply
from logitless.from_hidden.plan import Tiles, smaller
from logitless.kept import Kept, KeptLogits, kept_gradient, kept_logits, kept_statistics, write_kept
from logitless.results import merge_kept
from logitless.softmax import ELSEWHERE, Coefficients, Normaliser, merge
from logitless.spec import IGNORE


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

    def cut(self, start: int, stop: int) -> Projection:
        """The same of some rows."""
        return replace(self, **{name: getattr(self, name)[start:stop] for name in ("hidden", "column", "gain")})

    def problem(self, logits: Tensor, memory: int, first: int = 0) -> Problem:
        """What backends work on, where ``logits`` are those of all rows and of the columns from ``first`` on."""
        return Problem(
            logits=logits,
            index=None,
            column=self.column,
            gain=self.gain,
            squash=self.squash,
            columns=logits.shape[1],
            entropy=self.entropy,
            memory=memory,
            first=first,
        )


@dataclass(frozen=True, eq=False)
class Space:
    """Working memory of a sweep.

    Attributes:
        tiles: its sizes.
        logits: the one tile of logits, as flat memory.
        extra: dZ of a block of rows and a slab, or the exponentials of a tile, in the operands' dtype; else empty.
    """

    tiles: Tiles
    logits: Tensor
    extra: Tensor

    @staticmethod
    def make(p: Projection, tiles: Tiles, extra: str | None) -> Space:
        device = p.hidden.device
        logits = torch.empty(tiles.rows * tiles.columns, dtype=p.logits_dtype, device=device)
        block = (min(tiles.block, p.num_rows), tiles.columns)
        shape = {None: (0, 0), "d_z": block, "exponentials": (tiles.rows, tiles.columns)}[extra]
        second = torch.empty(shape, dtype=p.hidden.dtype, device=device)
        return Space(tiles, logits, second)


@dataclass(frozen=True, eq=False)
class Exponentials:
    """What forward keeps of the first rows so that backward need not multiply again: ``e^(z - reference)`` in 16 bits.

    Probabilities, not logits: rounding them costs 2^-9 of each, as rounding dZ does, where a logit of 20 rounded to 16
    bits is off by 6 % in its probability. The target's place holds 0; its gradient is formed in float32.

    Attributes:
        values: ``[K, V]`` of the first K rows, in the operands' dtype.
        reference: ``[number of slabs, K]`` near the maximum of each row's part of a slab.
        columns: columns of a slab, in forward and backward alike.
    """

    values: Tensor
    reference: Tensor
    columns: int

    @staticmethod
    def empty(p: Projection, rows: int, columns: int) -> Exponentials:
        slabs = -(-p.columns // columns)
        return Exponentials(p.hidden.new_empty((rows, p.columns)), p.gain.new_zeros((slabs, rows)), columns)

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    def keep(self, backend: Any, tile: Problem, stats: Tensor, r: int) -> None:
        """Statistics of a tile whose first row is ``r``, and the exponentials of those of its rows that are kept."""
        count = max(0, min(tile.num_rows, self.rows - r))
        if count:
            slab, reference = tile.first // self.columns, self.reference[:, r : r + count]
            out = self.values[r : r + count, tile.first : tile.first + tile.columns]
            # The first guess is 0, then what the slab before had.
            running = Running(reference[max(slab - 1, 0)], reference[slab])
            kept, into = (tile, stats) if count == tile.num_rows else (_cut(tile, 0, count), stats[:, :count])
            backend.exponentials(kept, into, running, out, slope=False)
        if count < tile.num_rows:
            backend.statistics(_cut(tile, count, tile.num_rows), stats[:, count:])

    def cut(self, start: int, stop: int) -> Exponentials:
        """Those of some rows."""
        return Exponentials(self.values[start:stop], self.reference[:, start:stop], self.columns)

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
        load(p.backend).gradient_from(problem, references, self.columns, norm, coef, out)


@dataclass(frozen=True, eq=False)
class KeptIds:
    """Kept ids of the rows, and which columns of the vocabulary are here. Tiles then hold all rows at once."""

    kept: Kept
    target: Tensor
    start: int
    vocab_size: int

    def logits(self, tile: Problem) -> KeptLogits:
        """The kept logits that live in a tile."""
        return kept_logits(self.kept, self.target, tile, self.start + tile.first, self.vocab_size)


@dataclass(frozen=True, eq=False)
class Terms:
    """What turns a tile of logits into a tile of dZ.

    Attributes:
        norm, coef: as backends take them.
        kept: kept ids, with the normaliser over them, the log-prob and its upstream gradient; or None.
        exponentials: what forward kept of the first rows, or None.
    """

    norm: Normaliser
    coef: Coefficients
    kept: tuple[KeptIds, Normaliser, Tensor, Tensor] | None = None
    exponentials: Exponentials | None = None

    def cut(self, r: int, stop: int) -> tuple[Normaliser, Coefficients]:
        """Normaliser and coefficients of some rows."""
        return _rows_of(self.norm, r, stop), _rows_of(self.coef, r, stop)

    def write(self, backend: Any, tile: Problem, norm: Normaliser, coef: Coefficients, out: Tensor) -> None:
        """dZ of a tile into ``out``. With kept ids the tile holds all rows."""
        if self.kept is None:
            backend.gradient(tile, norm, coef, out, None)
            return
        ids, kept_norm, logprob, g_logprob = self.kept
        gathered = ids.logits(tile)
        values = kept_gradient(gathered, kept_norm, logprob, g_logprob, norm, coef, ids.target == IGNORE)
        backend.gradient(replace(tile, column=tile.column.clamp_max(ELSEWHERE)), norm, coef, out, None)
        write_kept(gathered, values, out, None)


class Gradients(NamedTuple):
    """Of hidden rows ``[R, D]``, weight ``[V, D]`` and bias ``[V]``; None where not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def sweep_statistics(
    p: Projection, tiles: Tiles, kept: KeptIds | None = None, exponentials: Exponentials | None = None
) -> tuple[Tensor, Tensor | None]:
    """``[4, R]`` (m, s, w, t) over all columns here, and ``[2, R]`` (m, s) of the kept ids if there are any."""
    stats = p.gain.new_empty((4, p.num_rows))
    kept_stats = None if kept is None else p.gain.new_empty((2, p.num_rows))
    space = allocate(p, tiles, fixed=_fixed_side(kept, exponentials))
    backend, slabs = load(p.backend), range(0, max(p.columns, 1), space.tiles.columns)
    for r in range(0, p.num_rows, space.tiles.rows):
        rows = p.cut(r, min(r + space.tiles.rows, p.num_rows))
        stop = r + rows.num_rows
        parts = p.gain.new_empty((len(slabs), 4, rows.num_rows))
        kept_parts = []
        for part, c in zip(parts.unbind(), slabs, strict=True):
            tile = tile_problem(rows, space, c)
            if exponentials is None:
                backend.statistics(tile, part)
            else:
                exponentials.keep(backend, tile, part, r)
            if kept is not None:
                kept_parts.append(kept_statistics(kept.logits(tile)))
        stats[:, r:stop] = parts[0] if len(slabs) == 1 else merge(parts)
        if kept_stats is not None:
            kept_stats[:, r:stop] = merge_kept(torch.stack(kept_parts), stats[3, r:stop])[:2]
    return stats, kept_stats


def sweep_gradients(
    p: Projection,
    tiles: Tiles,
    terms: Terms,
    *,
    want: tuple[bool, bool, bool],
    weight_grad: Tensor | None = None,
) -> Gradients:
    """Gradients of hidden, weight and bias, by column slabs or row blocks.

    Args:
        terms: what turns a tile of logits into a tile of dZ.
        want: which of the three are wanted.
        weight_grad: float32 buffer ``[V, D]`` to add the weight's gradient to; then none is returned for it.
    """
    if p.num_rows == 0 or p.columns == 0 or not any(want):
        return _no_gradients(p, want, weight_grad)
    sweep = _by_slabs if tiles.slabs else _by_blocks
    hidden, weight, bias = sweep(p, tiles, terms, want, weight_grad)
    # Accumulators are rounded here, where the sweep's working memory is free again.
    return Gradients(_as(hidden, p.hidden), _as(weight, p.weight), _as(bias, p.bias))


def _by_slabs(
    p: Projection,
    tiles: Tiles,
    terms: Terms,
    want: tuple[bool, bool, bool],
    weight_grad: Tensor | None,
) -> Gradients:
    want_hidden, want_weight, want_bias = want
    block = _Block.make(p, tiles, terms)
    tiles = block.space.tiles
    d_hidden = p.gain.new_empty(p.hidden.shape) if want_hidden else None
    d_weight = torch.empty_like(p.weight) if want_weight and weight_grad is None else None
    d_bias = p.gain.new_zeros(p.weight.shape[0]) if want_bias else None
    # One block writes a slab of dW once, in its own dtype. Several add up in float32 first.
    slab = (
        p.gain.new_empty((tiles.columns, p.weight.shape[1]))
        if d_weight is not None and p.num_rows > tiles.block
        else None
    )
    for columns in _pieces(p.columns, tiles.columns):
        into = weight_grad if weight_grad is not None else d_weight
        if into is not None:
            into = into[columns] if slab is None else slab[: columns.stop - columns.start]
        for rows in _pieces(p.num_rows, tiles.block):
            d_z = block.fill(rows, columns)
            if want_weight and into is not None:
                add = weight_grad is not None or rows.start > 0
                multiply(d_z.T, p.hidden[rows], into, add=add, tf32=p.tf32)
            if d_hidden is not None:
                multiply(d_z, p.weight[columns], d_hidden[rows], add=columns.start > 0, tf32=p.tf32)
            if d_bias is not None:
                add_rows(d_z, d_bias[columns])
        if slab is not None and d_weight is not None and into is not None:
            d_weight[columns] = into
    if d_weight is not None:
        d_weight[p.columns :].zero_()
    return Gradients(d_hidden, d_weight, d_bias)


def _by_blocks(
    p: Projection,
    tiles: Tiles,
    terms: Terms,
    want: tuple[bool, bool, bool],
    weight_grad: Tensor | None,
) -> Gradients:
    want_hidden, want_weight, want_bias = want
    block = _Block.make(p, tiles, terms)
    tiles = block.space.tiles
    d_hidden = torch.empty_like(p.hidden, memory_format=torch.contiguous_format) if want_hidden else None
    # Slabs add up in float32, in place where that is the dtype of d_hidden.
    narrow = d_hidden is not None and d_hidden.dtype != p.gain.dtype
    sums = p.gain.new_empty((min(tiles.block, p.num_rows), p.hidden.shape[1])) if narrow else None
    # Float32 over all blocks, unless the caller's buffer is.
    d_weight = p.gain.new_empty(p.weight.shape) if want_weight and weight_grad is None else weight_grad
    d_bias = p.gain.new_zeros(p.weight.shape[0]) if want_bias else None
    for rows in _pieces(p.num_rows, tiles.block):
        into = d_hidden if d_hidden is None else d_hidden[rows] if sums is None else sums[: rows.stop - rows.start]
        for columns in _pieces(p.columns, tiles.columns):
            d_z = block.fill(rows, columns)
            if into is not None:
                multiply(d_z, p.weight[columns], into, add=columns.start > 0, tf32=p.tf32)
            if want_weight and d_weight is not None:
                add = weight_grad is not None or rows.start > 0
                multiply(d_z.T, p.hidden[rows], d_weight[columns], add=add, tf32=p.tf32)
            if d_bias is not None:
                add_rows(d_z, d_bias[columns])
        if sums is not None and d_hidden is not None and into is not None:
            d_hidden[rows] = into
    if want_weight and d_weight is not None and weight_grad is None:
        d_weight[p.columns :].zero_()
    return Gradients(d_hidden, d_weight if weight_grad is None else None, d_bias)


def _pieces(whole: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, whole)) for start in range(0, whole, step)]


@dataclass(frozen=True, eq=False)
class _Block:
    """dZ of a block of rows and a slab of columns, made tile by tile.

    Attributes:
        p, terms: of all rows.
        space: memory of a tile and of the block.
        cut: ``(start, stop)`` to those rows of ``p``, normaliser and coefficients. Remembered: cutting takes the host
            as long as a launch, and the same rows come again with every slab.
    """

    p: Projection
    terms: Terms
    space: Space
    cut: Callable[[int, int], tuple[Projection, Normaliser, Coefficients]]

    @staticmethod
    def make(p: Projection, tiles: Tiles, terms: Terms) -> _Block:
        space = allocate(p, tiles, "d_z", _fixed_side(terms.kept, terms.exponentials))
        return _Block(p, terms, space, functools.cache(lambda r, stop: (p.cut(r, stop), *terms.cut(r, stop))))

    def fill(self, rows: slice, columns: slice) -> Tensor:
        """dZ of those rows and columns."""
        terms, tiles, start = self.terms, self.space.tiles, rows.start
        out = self.space.extra[: rows.stop - start, : columns.stop - columns.start]
        held, backend = terms.exponentials, load(self.p.backend)
        if held is not None and start < held.rows:
            start = min(rows.stop, held.rows)
            part, norm, coef = self.cut(rows.start, start)
            into = out[: start - rows.start]
            held.cut(rows.start, start).write_gradient(part, norm, coef, tiles.elementwise, columns.start, into)
        for r in range(start, rows.stop, tiles.rows):
            part, norm, coef = self.cut(r, min(r + tiles.rows, rows.stop))
            tile = tile_problem(part, self.space, columns.start)
            terms.write(backend, tile, norm, coef, out[r - rows.start : r - rows.start + part.num_rows])
        return out


def tile_problem(p: Projection, space: Space, c: int) -> Problem:
    """The logits of all rows of ``p`` and of the columns from ``c`` on, computed into ``space``."""
    rows, width = p.num_rows, min(space.tiles.columns, p.columns - c)
    logits = space.logits[: rows * width].view(rows, width)
    project(p, c, logits)
    return p.problem(logits, space.tiles.elementwise, c)


def project(p: Projection, c: int, out: Tensor) -> None:
    """The logits of all rows of ``p`` and of the columns from ``c`` on, as many as ``out`` has, into ``out``."""
    if not out.numel():
        return
    columns = slice(c, c + out.shape[1])
    # Logits that are rounded to half precision are rounded once, after the bias.
    wide = out if p.bias is None else out.to(p.gain.dtype)
    multiply(p.hidden, p.weight[columns].T, wide, tf32=p.tf32)
    if p.bias is not None:
        out.copy_(wide.add_(p.bias[columns]))


def allocate(
    p: Projection,
    tiles: Tiles,
    extra: Literal["d_z", "exponentials"] | None = None,
    fixed: Literal["rows", "columns"] | None = None,
) -> Space:
    """Working memory of a sweep. Out of memory, tiles are halved until they fit or cannot be halved any more.

    Args:
        extra: a second buffer: dZ of a block, or the exponentials of a tile.
        fixed: what must stay as it is, see :func:`_fixed_side`.
    """
    while True:
        try:
            return Space.make(p, tiles, extra)
        except torch.OutOfMemoryError:
            less = smaller(tiles, fixed)
            if less is None:
                raise
            warnings.warn(
                f"linear_logprobs: out of memory for tiles of {tiles.rows} x {tiles.columns} logits; going on with "
                f"{less.rows} x {less.columns}. A smaller memory= avoids the attempt.",
                stacklevel=2,
            )
            tiles = less


def _fixed_side(kept: object, exponentials: object) -> Literal["rows", "columns"] | None:
    """Kept ids need all rows in a tile; kept exponentials have one reference per slab, whose width must then stay."""
    if kept is not None:
        return "rows"
    return None if exponentials is None else "columns"


def _no_gradients(p: Projection, want: tuple[bool, bool, bool], weight_grad: Tensor | None) -> Gradients:
    hidden, weight, bias = want
    return Gradients(
        torch.zeros_like(p.hidden) if hidden else None,
        torch.zeros_like(p.weight) if weight and weight_grad is None else None,
        torch.zeros_like(p.bias) if bias and p.bias is not None else None,
    )


def _cut(tile: Problem, start: int, stop: int) -> Problem:
    """Some rows of a tile."""
    rows = {name: getattr(tile, name)[start:stop] for name in ("logits", "column", "gain")}
    return replace(tile, **rows)


def _rows_of(vectors: Any, r: int, stop: int) -> Any:
    """The same named vectors, cut to some rows."""
    return type(vectors)(*(None if x is None else x[r:stop] for x in vectors))


def _as(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if gradient is None or like is None else gradient.to(like.dtype)
