"""Plain torch in tiles: any device, working space bounded by ``memory``.

A tile is some rows by some columns. Whole rows are preferred (``[r, V]``); when the budget is below one row,
columns are cut too and the parts go through the same merge as tensor-parallel ranks. Two tiles in the accumulation
dtype are alive at a time (three under a softcap), reused in place.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from logitless.backends import reference as whole
from logitless.backends.contract import Problem, Running, accumulation_dtype, over
from logitless.softmax import FLOOR, SKIP, Coefficients, Normaliser, merge


def tile_shape(problem: Problem) -> tuple[int, int]:
    """Rows and columns of a tile: as much as fits in the memory budget, at least one element."""
    buffers = 3 if problem.squash else 2
    elements = max(1, problem.memory // (buffers * accumulation_dtype(problem.logits.dtype).itemsize))
    width = max(1, min(problem.columns, elements))
    return max(1, min(problem.num_rows, elements // width)), width


BLOCK = 1024
"""Rows of a matrix as wide as the hidden states that are worked on at a time."""


def statistics(problem: Problem, out: Tensor | None = None) -> Tensor:
    """Same as :func:`logitless.backends.reference.statistics`, one tile at a time."""
    dtype, num_rows = accumulation_dtype(problem.logits.dtype), problem.num_rows
    if out is None:
        out = torch.empty((4, num_rows), dtype=dtype, device=problem.logits.device)
    rows, width = tile_shape(problem)
    for r in range(0, num_rows, rows):
        parts = [_tile_statistics(problem, r, rows, c, width) for c in range(0, max(problem.columns, 1), width)]
        out[:, r : r + rows] = parts[0] if len(parts) == 1 else merge(torch.stack(parts))
    return out


def gradient(problem: Problem, norm: Normaliser, coef: Coefficients, out: Tensor, out_index: Tensor | None) -> None:
    """Same as :func:`logitless.backends.reference.gradient`, one tile at a time."""
    rows, width = tile_shape(problem)
    for r in range(0, problem.num_rows, rows):
        into = slice(r, r + rows) if out_index is None else out_index[r : r + rows]
        for c in range(0, problem.columns, width):
            # Passed on unnamed: a name would keep this tile alive while the next one is computed.
            _write_tile(out, into, c, _tile_gradient(problem, norm, coef, r, rows, c, width))
    _zero_the_rest(out, out_index, problem.columns)


def gradient_over(problem: Problem, norm: Normaliser, coef: Coefficients, dtype: torch.dtype) -> Tensor:
    """Same as :func:`logitless.backends.reference.gradient_over`. Tiles ascend, so what is written was read before."""
    out = over(problem.logits, dtype)
    gradient(problem, norm, coef, out, None)
    return out


def _tile_statistics(problem: Problem, r: int, rows: int, c: int, width: int) -> Tensor:
    z, _ = _tile(problem, r, rows, c, width)
    column = problem.column[r : r + rows] - (problem.first + c)
    inside = (column >= 0) & (column < z.shape[1])
    if not z.shape[1]:
        none = z.new_zeros(z.shape[0])
        return torch.stack([none - torch.inf, none, none, none + torch.nan])
    at_target = z.gather(1, column.clamp(0, z.shape[1] - 1)[:, None]).squeeze(1)
    m = z.amax(1)
    z.sub_(torch.where(m == -torch.inf, torch.zeros_like(m), m)[:, None])
    e = z.exp()
    s = e.sum(1)
    w = e.mul_(z.clamp_min_(FLOOR)).sum(1) if problem.entropy else torch.zeros_like(s)
    return torch.stack([m, s, w, torch.where(inside, at_target, torch.nan)])


def _tile_gradient(
    problem: Problem, norm: Normaliser, coef: Coefficients, r: int, rows: int, c: int, width: int
) -> Tensor:
    z, squashed = _tile(problem, r, rows, c, width)
    d = z.sub_(norm.reference[r : r + rows, None])
    p = (d - norm.log_sum[r : r + rows, None]).exp_()
    if coef.product is None:
        dz = p.mul_(coef.plain[r : r + rows, None])
    else:
        inner = d.clamp_min_(FLOOR).mul_(coef.product[r : r + rows, None]).add_(coef.plain[r : r + rows, None])
        dz = p.mul_(inner)
    _place_targets(dz, problem.column[r : r + rows] - (problem.first + c), coef.at_target[r : r + rows])
    dz.mul_(problem.gain[r : r + rows, None])
    if squashed is not None:
        dz.mul_(squashed.square_().neg_().add_(1.0).mul_(problem.squash))
    return dz.masked_fill_((problem.column[r : r + rows] == SKIP)[:, None], 0.0)


def _tile(problem: Problem, r: int, rows: int, c: int, width: int) -> tuple[Tensor, Tensor | None]:
    """``z`` of a tile in a buffer of its own, and under a softcap ``tanh(squash x)``."""
    columns = slice(c, min(c + width, problem.columns))
    x = problem.logits[:, columns]
    x = x[r : r + rows] if problem.index is None else x.index_select(0, problem.index[r : r + rows])
    # A copy even where the dtype is right already: the tile is worked on in place.
    x = x.to(accumulation_dtype(x.dtype), copy=problem.index is None)
    gain = problem.gain[r : r + rows, None]
    if not problem.squash:
        return x.mul_(gain), None
    y = x.mul_(problem.squash).tanh_()
    return y * gain, y


def _write_tile(out: Tensor, rows: Tensor | slice, c: int, tile: Tensor) -> None:
    columns = out[:, c : c + tile.shape[1]]
    if isinstance(rows, slice):
        columns[rows] = tile
    else:
        columns.index_copy_(0, rows, tile.to(out.dtype))


def _place_targets(dz: Tensor, column: Tensor, value: Tensor) -> None:
    """``dz[i, column[i]] = value[i]`` for the columns inside the tile, with no device sync."""
    inside = ((column >= 0) & (column < dz.shape[1]))[:, None]
    column = column.clamp(0, dz.shape[1] - 1)[:, None]
    dz.scatter_(1, column, torch.where(inside, value[:, None], dz.gather(1, column)))


def _zero_the_rest(out: Tensor, out_index: Tensor | None, columns: int) -> None:
    if out_index is not None and out_index.numel() < out.shape[0]:
        rest = torch.ones(out.shape[0], dtype=torch.bool, device=out.device).index_fill_(0, out_index, False)
        out.masked_fill_(rest[:, None], 0.0)
    out[:, columns:].zero_()


def exponentials(problem: Problem, stats: Tensor, running: Running, out: Tensor, slope: bool) -> None:
    """Same as :func:`logitless.backends.reference.exponentials`, some rows at a time."""
    for rows in _row_chunks(problem, out.shape[1]):
        sums = None if running.sums is None else running.sums[rows]
        part = running._replace(before=running.before[rows], reference=running.reference[rows], sums=sums)
        whole.exponentials(_rows_of(problem, rows), stats[:, rows], part, out[rows], slope)


def gradient_from(
    problem: Problem, references: Tensor, slab: int, norm: Normaliser, coef: Coefficients, out: Tensor
) -> None:
    """Same as :func:`logitless.backends.reference.gradient_from`, some rows at a time."""
    for rows in _row_chunks(problem, min(slab, problem.columns)):
        norm_part = Normaliser(*(x[rows] for x in norm))
        coef_part = Coefficients(*(None if x is None else x[rows] for x in coef))  # pyright: ignore[reportArgumentType]
        whole.gradient_from(_rows_of(problem, rows), references[:, rows], slab, norm_part, coef_part, out[rows])


def rescale(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """Same as :func:`logitless.backends.reference.rescale`, some rows at a time."""
    for r in range(0, len(x), BLOCK):
        rows = slice(r, r + BLOCK)
        whole.rescale(x[rows], factor[rows] if factor.dim() else factor, out[rows])


def mix(x: Tensor, by: Tensor, y: Tensor, index: Tensor, times: Tensor, out: Tensor) -> None:
    """Same as :func:`logitless.backends.reference.mix`, some rows at a time."""
    for r in range(0, len(x), BLOCK):
        rows = slice(r, r + BLOCK)
        whole.mix(x[rows], by[rows], y, index[rows], times[rows], out[rows])


def _row_chunks(problem: Problem, width: int) -> list[slice]:
    """Rows such that the half dozen temporaries of the whole-tensor twin, so wide, stay within the budget."""
    num_rows = problem.num_rows
    rows = max(1, problem.memory // (6 * max(1, width) * problem.gain.element_size()))
    return [slice(r, min(r + rows, num_rows)) for r in range(0, num_rows, rows)]


def _rows_of(problem: Problem, rows: slice) -> Problem:
    """The same problem for some of its rows, which are all in order."""
    assert problem.index is None
    return replace(problem, logits=problem.logits[rows], column=problem.column[rows], gain=problem.gain[rows])
