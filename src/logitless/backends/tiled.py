"""Plain torch in tiles: any device, working space bounded by ``memory``.

A tile is some rows by some columns. Whole rows are preferred (``[r, V]``); when one row does not fit the budget,
columns are cut too, and the parts are merged like those of tensor-parallel ranks. Two buffers of a tile's size in the
accumulation dtype are alive at a time (three under a softcap), reused in place.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from logitless.backends import blocks
from logitless.backends import reference as whole
from logitless.backends.contract import MOMENTS, NO_COLUMN, Listed, Pair, Problem, Running
from logitless.backends.selection import best_columns
from logitless.machine import BLOCK, pieces
from logitless.softmax import FLOOR, SKIP, WIDTH, Coefficients, Normaliser, Statistic, merge

products = None

PAIR_TILE = 1 << 15
"""Elements of a tile in which a student is compared with its teacher."""
SMALL_TILE = 1 << 17
"""Elements of a tile that is not made smaller to save memory: below, the calls of torch take longer than the work."""
FAR = -1.0e4
"""Stands in for differences so far below that their exponential is 0 in any dtype: times a large gain, still finite."""


def tile_shape(problem: Problem, more: int = 0) -> tuple[int, int]:
    """Rows and columns of a tile: as much as fits in the memory budget, with so many more buffers; at least one.

    Of a small problem an eighth at most, so that its tile is small beside it too, and stays in a cache.
    """
    buffers = more + (3 if problem.squash else 2)
    num_rows = len(problem.column)
    share = max(SMALL_TILE, num_rows * problem.columns // 8)
    elements = max(1, min(problem.memory // (buffers * problem.gain.itemsize), share))
    width = max(1, min(problem.columns, elements))
    return max(1, min(num_rows, elements // width)), width


def statistics(problem: Problem, out: Tensor | None = None) -> Tensor:
    """Same as :func:`logitless.backends.reference.statistics`, one tile at a time."""
    num_rows, dry = len(problem.column), problem.logits.is_meta
    if problem.canonical:
        return _canonical(problem, problem.empty_statistic() if out is None else out)
    out = problem.gain.new_empty((WIDTH, num_rows)) if out is None else out
    height, width = tile_shape(problem)
    for rows in pieces(num_rows, height, dry) if height < num_rows else [slice(0, num_rows)]:
        if width >= problem.columns:
            _tile_statistics(problem, rows, slice(0, width), out[:, rows])
            continue
        parts = out.new_empty((-(-problem.columns // width), *out[:, rows].shape))
        for columns in pieces(problem.columns, width, dry):
            _tile_statistics(problem, rows, columns, parts[columns.start // width])
        out[:, rows] = merge(parts)
    return out


def _canonical(problem: Problem, out: Tensor) -> Tensor:
    """The lines of a canonical problem, some rows and whole blocks of columns at a time."""
    # Ten buffers of a tile in the accumulation dtype are alive at a time.
    elements = max(blocks.BLOCK, min(problem.memory // (10 * problem.gain.itemsize), SMALL_TILE))
    width = min(elements - elements % blocks.BLOCK, max(problem.columns, 1))
    for rows in pieces(problem.num_rows, max(1, elements // width), problem.logits.is_meta):
        some = problem.cut(rows.start, rows.stop)
        parts = []
        for columns in pieces(max(problem.columns, 1), width, problem.logits.is_meta):
            number = min(columns.stop, problem.columns) - columns.start
            tile = replace(some, logits=some.logits[:, columns], columns=number, first=some.first + columns.start)
            parts.append(blocks.lines(tile))
        out[:, rows] = parts[0] if len(parts) == 1 else blocks.merge(torch.stack(parts), some.gain)
    return out


def solved(lines: Tensor, gain: Tensor) -> Tensor:
    """Same as :func:`logitless.backends.reference.solved`."""
    return blocks.solved(lines, gain)


def gradient(problem: Problem, norm: Normaliser, coef: Coefficients, out: Tensor, out_index: Tensor | None) -> None:
    """Same as :func:`logitless.backends.reference.gradient`, one tile at a time."""
    height, width = tile_shape(problem, 0 if coef.square is None and coef.constant is None else 3)
    dry, wide = problem.logits.is_meta, out.dtype == problem.gain.dtype
    coef, reference = _relative(problem, norm, coef), norm.reference
    # Writing a slice is three times as fast as writing indexed rows, which need a buffer in the gradient's dtype.
    sliced = out_index is None or (wide and _is_in_order(out_index, len(out)))
    num_rows = len(problem.column)
    heights = [slice(0, num_rows)] if height >= num_rows else pieces(num_rows, height, dry)
    widths = [slice(0, problem.columns)] if width == problem.columns else pieces(problem.columns, width, dry)
    for rows in heights:
        for columns in widths:
            if sliced and wide:
                _tile_gradient(problem, reference, coef, rows, columns, out[rows, columns])
                continue
            into = rows if sliced or out_index is None else out_index[rows]
            # The tile has no name here: a name would keep it alive while the next one is computed.
            _write_tile(out, into, columns.start, _tile_gradient(problem, reference, coef, rows, columns))
    if out_index is not None or problem.columns < out.shape[1]:
        zero_the_rest(out, out_index, problem.columns)


def gradient_over(problem: Problem, norm: Normaliser, coef: Coefficients, dtype: torch.dtype) -> Tensor:
    """Same as :func:`logitless.backends.reference.gradient_over`. Tiles ascend, so what is written was read before."""
    out = problem.logits.view(dtype)[:, : problem.logits.shape[1]]
    gradient(problem, norm, coef, out, None)
    return out


def _tile_statistics(problem: Problem, rows: slice, columns: slice, out: Tensor) -> None:
    z, _, owned = _tile(problem, rows, columns)
    if not z.shape[1]:
        none = z.new_zeros(z.shape[0])
        Statistic(none - torch.inf, none, none, none + torch.nan).stacked(out)
        return
    column, inside = _target_columns(problem, rows, columns)
    t = z.gather(1, column)
    t = (t if inside is None else torch.where(inside, t, torch.nan)).squeeze(1)
    m = z.amax(1)
    # The lowest number stands in for -inf: -inf - (-inf) would be NaN.
    reference = m.clamp_min(torch.finfo(m.dtype).min)[:, None]
    d = torch.sub(z, reference, out=z if owned else None)
    # Without the sum of e (z - m) the exponentials take the place of the differences.
    e = d.exp() if problem.entropy else d.exp_()
    s = e.sum(1)
    # Nobody reads w where entropy is not wanted.
    w = e.mul_(d.clamp_min_(FLOOR)).sum(1) if problem.entropy else s
    torch.stack([m, s, w, t], out=out)


def _relative(problem: Problem, norm: Normaliser, coef: Coefficients) -> Coefficients:
    """The coefficients for ``e^(z - m)`` in place of p, times the gain: what is the same for a whole row is multiplied
    here, and not in every column."""
    share = (-norm.log_sum).exp_()
    by = share if problem.unit else share * problem.gain
    product = None if coef.product is None else coef.product * by
    square = None if coef.square is None else coef.square * (by * share)
    at_target, constant = coef.at_target, coef.constant
    if not problem.unit:
        at_target, constant = at_target * problem.gain, None if constant is None else constant * problem.gain
    return Coefficients(coef.plain * by, product, at_target, square, constant)


def _tile_gradient(
    problem: Problem, reference: Tensor, coef: Coefficients, rows: slice, columns: slice, out: Tensor | None = None
) -> Tensor:
    """d logits of a tile, in ``out`` if given, which may be where its logits are; coefficients as above."""
    z, squashed, owned = _tile(problem, rows, columns)
    further = coef.square is not None or coef.constant is not None
    alone = coef.product is None and not further
    d = torch.sub(z, reference[rows, None], out=z if owned else out if alone else None)
    # Without a product, exponentials take the place of the differences.
    e = torch.exp(d, out=d if alone else out)
    if further:
        dz = coef.elsewhere(d, e, (rows, None))
    elif coef.product is None:
        dz = e.mul_(coef.plain[rows, None])
    else:
        dz = e.mul_(torch.addcmul(coef.plain[rows, None], d.clamp_min_(FAR), coef.product[rows, None], out=d))
    column, inside = _target_columns(problem, rows, columns)
    value = coef.at_target[rows, None]
    # No device sync: where the target is in another tile, a column is overwritten with its own value.
    dz.scatter_(1, column, value if inside is None else torch.where(inside, value, dz.gather(1, column)))
    if squashed is not None:
        dz.mul_(squashed.square_().neg_().add_(1.0).mul_(problem.squash))
    if not problem.found:
        _zero_skipped(dz, problem.column[rows] == SKIP)
    return dz if out is None or dz is out else out.copy_(dz)


def _zero_skipped(dz: Tensor, skipped: Tensor) -> None:
    if skipped.device.type == "cpu" and not isinstance(skipped, FakeTensor):
        # Rows are zeroed by index: a broadcast mask takes as long as the exponentials. On a GPU an index would sync.
        dz.index_fill_(0, skipped.nonzero().squeeze(1), 0.0)
    else:
        dz.masked_fill_(skipped[:, None], 0.0)


def _target_columns(problem: Problem, rows: slice, columns: slice) -> tuple[Tensor, Tensor | None]:
    """``[r, 1]`` column of each row's target in a tile, or the nearest one, and whether it is there; None for all."""
    width = min(columns.stop, problem.columns) - columns.start
    column, first = problem.column[rows, None], problem.first + columns.start
    column = column - first if first else column
    if problem.found and width == problem.columns:
        return column, None
    return column.clamp(0, width - 1), (column >= 0) & (column < width)


def _tile(problem: Problem, rows: slice, columns: slice) -> tuple[Tensor, Tensor | None, bool]:
    """``z`` of a tile, under a softcap ``tanh(squash x)``, and whether z is a buffer that may be worked on in place:
    otherwise it is the logits themselves."""
    columns = slice(columns.start, min(columns.stop, problem.columns))
    if problem.index is None:
        x = problem.logits[rows, columns]
    else:
        x = problem.logits[:, columns].index_select(0, problem.index[rows])
    owned = problem.index is not None or x.dtype != problem.gain.dtype
    x = x.to(problem.gain.dtype)
    if problem.unit:
        return x, None, owned
    gain = problem.gain[rows, None]
    if not problem.squash:
        return torch.mul(x, gain, out=x if owned else None), None, True
    y = torch.mul(x, problem.squash, out=x if owned else None).tanh_()
    return y * gain, y, True


def _is_in_order(index: Tensor, count: int) -> bool:
    """Whether the index is 0, 1, ... of all rows. Asked on a CPU alone: elsewhere it would wait for the device."""
    return (
        index.device.type == "cpu"
        and len(index) == count
        and torch.equal(index, torch.arange(count, device=index.device))
    )


def _write_tile(out: Tensor, rows: Tensor | slice, c: int, tile: Tensor) -> None:
    columns = out[:, c : c + tile.shape[1]]
    if isinstance(rows, slice):
        columns[rows] = tile
    else:
        columns.index_copy_(0, rows, tile.to(out.dtype))


def zero_the_rest(out: Tensor, out_index: Tensor | None, columns: int) -> None:
    """Zeros in the rows that have no gradient, and in the columns from ``columns`` on."""
    if out_index is not None and out_index.numel() < out.shape[0]:
        rest = torch.ones(out.shape[0], dtype=torch.bool, device=out.device).index_fill_(0, out_index, False)
        out.masked_fill_(rest[:, None], 0.0)
    if columns < out.shape[1]:
        out[:, columns:].zero_()


def best(problem: Problem, k: int, negative: bool) -> Tensor:
    """Same as :func:`logitless.backends.reference.best`, some rows at a time, and without sorting all of them."""
    found = min(k, problem.columns)
    out = problem.gain.new_empty((2, k, problem.num_rows))
    out[0, found:], out[1, found:] = -torch.inf, NO_COLUMN
    for rows in _row_pieces(problem, problem.columns):
        x = problem.logits[rows] if problem.index is None else problem.logits.index_select(0, problem.index[rows])
        x = x[:, : problem.columns]
        if found:
            key, column = best_columns(-x if negative else x, found)
            out[0, :found, rows], out[1, :found, rows] = key.T, column.T + problem.first
    return out


def ahead(problem: Problem, key: Tensor, place: Tensor, negative: bool) -> Tensor:
    """Same as :func:`logitless.backends.reference.ahead`, some rows at a time."""
    out = torch.empty_like(key)
    for rows in _row_pieces(problem, problem.columns):
        out[rows] = whole.ahead(problem.cut(rows.start, rows.stop), key[rows], place[rows], negative)
    return out


def moments(problem: Problem) -> Tensor:
    """Same as :func:`logitless.backends.reference.moments`, some rows at a time."""
    out = problem.gain.new_empty((MOMENTS, problem.num_rows))
    for rows in _row_pieces(problem, problem.columns):
        out[:, rows] = whole.moments(problem.cut(rows.start, rows.stop))
    return out


# The functions below run the whole-tensor twin on some rows at a time. The problem's rows are all in order.


def exponentials(problem: Problem, stats: Tensor, running: Running, out: Tensor, slope: bool) -> None:
    """Same as :func:`logitless.backends.reference.exponentials`, some rows at a time."""
    for rows in _row_pieces(problem, out.shape[1]):
        sums = None if running.sums is None else running.sums[rows]
        part = running._replace(before=running.before[rows], reference=running.reference[rows], sums=sums)
        whole.exponentials(problem.cut(rows.start, rows.stop), stats[:, rows], part, out[rows], slope)


def gradient_from(
    problem: Problem, references: Tensor, slab: int, norm: Normaliser, coef: Coefficients, out: Tensor
) -> None:
    """Same as :func:`logitless.backends.reference.gradient_from`, some rows at a time."""
    for rows in _row_pieces(problem, min(slab, problem.columns)):
        part, norm_part, coef_part = problem.cut(rows.start, rows.stop), norm.cut(rows), coef.cut(rows)
        whole.gradient_from(part, references[:, rows], slab, norm_part, coef_part, out[rows])


def write(listed: Listed, out: Tensor, out_index: Tensor | None) -> None:
    """Same as :func:`logitless.backends.reference.write`."""
    whole.write(listed, out, out_index)


def divergence(pair: Pair, out: Tensor) -> None:
    """Same as :func:`logitless.backends.reference.divergence`, one tile at a time."""
    height, width = _pair_tile(pair)
    for rows in pieces(pair.student.num_rows, height, pair.student.logits.is_meta):
        some, sums = pair.cut(rows.start, rows.stop), out[:, rows].zero_()
        part = torch.empty_like(sums)
        for columns in pieces(pair.student.columns, width, pair.student.logits.is_meta):
            whole.divergence(some.within(columns), part)
            sums.add_(part)


def divergence_gradient(
    pair: Pair, mean: Tensor, by: Tensor, coef: Coefficients | None, out: Tensor, out_index: Tensor | None
) -> None:
    """Same as :func:`logitless.backends.reference.divergence_gradient`, one tile at a time. Tiles ascend, so that what
    is written was read before."""
    height, width = _pair_tile(pair)
    for rows in pieces(pair.student.num_rows, height, pair.student.logits.is_meta):
        some, coef_part = pair.cut(rows.start, rows.stop), None if coef is None else coef.cut(rows)
        for columns in pieces(pair.student.columns, width, pair.student.logits.is_meta):
            tile = pair.norm.reference.new_empty((rows.stop - rows.start, columns.stop - columns.start))
            whole.divergence_gradient(some.within(columns), mean[..., rows], by[..., rows], coef_part, tile, None)
            _write_tile(out, rows if out_index is None else out_index[rows], columns.start, tile)
    zero_the_rest(out, out_index, pair.student.columns)


def _pair_tile(pair: Pair) -> tuple[int, int]:
    """Rows and columns for which two dozen temporaries of the whole-tensor twin fit the budget, and mostly a cache."""
    problem = pair.student
    elements = max(1, min(PAIR_TILE, problem.memory // (24 * problem.gain.element_size())))
    width = max(1, min(problem.columns, elements))
    return max(1, min(problem.num_rows, elements // width)), width


def rescale(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """Same as :func:`logitless.backends.reference.rescale`, some rows at a time."""
    for rows in pieces(len(x), BLOCK, x.is_meta):
        whole.rescale(x[rows], factor[rows] if factor.dim() else factor, out[rows])


def mix(x: Tensor, by: Tensor, y: Tensor, index: Tensor, times: Tensor, out: Tensor) -> None:
    """Same as :func:`logitless.backends.reference.mix`, some rows at a time."""
    for rows in pieces(len(x), BLOCK, x.is_meta):
        whole.mix(x[rows], by[rows], y, index[rows], times[rows], out[rows])


def dots(x: Tensor, at_x: Tensor, y: Tensor, at_y: Tensor, out: Tensor, memory: int) -> None:
    """Same as :func:`logitless.backends.reference.dots`, some entries at a time."""
    for some in _entry_pieces(x, out, memory):
        whole.dots(x, at_x[some], y, at_y[some], out[some], memory)


def sums(
    factor: Tensor,
    x: Tensor,
    at: Tensor,
    starts: Tensor,
    out: Tensor,
    place: Tensor | None = None,
    *,
    add: bool,
    memory: int,
    uneven: bool = False,
) -> None:
    """Same as :func:`logitless.backends.reference.sums`, some entries at a time."""
    direct = out.dtype == factor.dtype
    total = out if direct else torch.zeros(out.shape, dtype=factor.dtype, device=out.device)
    if direct and not add:
        out.zero_()
    to = whole.segments(starts, len(factor), place)
    for some in _entry_pieces(x, factor, memory):
        whole.add_entries(factor[some], x, at[some], to[some], total)
    if not direct:
        out.add_(total) if add else out.copy_(total)


def _entry_pieces(x: Tensor, entries: Tensor, memory: int) -> list[slice]:
    """Ranges of entries whose rows of x, gathered, widened and multiplied, fit the budget, and mostly a cache."""
    each = x.shape[1] * (2 * x.element_size() + 3 * entries.element_size())
    return pieces(len(entries), min(BLOCK, max(1, memory // max(1, each))), x.is_meta)


def _row_pieces(problem: Problem, width: int) -> list[slice]:
    """Ranges of rows for which the half dozen temporaries of the whole-tensor twin, of this width, fit the budget."""
    rows = max(1, problem.memory // (6 * max(1, width) * problem.gain.element_size()))
    return pieces(problem.num_rows, rows, problem.logits.is_meta)
