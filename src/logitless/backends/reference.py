"""The readable twin of every kernel: whole tensors, plain torch, any float dtype.

Float64 logits are computed in float64, all others in float32. Copies the selected rows several times over; use it to
check, not to train.
"""

from __future__ import annotations

import torch
from torch import Tensor

from logitless.backends import blocks
from logitless.backends.contract import NO_COLUMN, Listed, Pair, Problem, Running, over
from logitless.backends.divergences import Element, accepted, elements
from logitless.machine import pieces
from logitless.softmax import FLOOR, SKIP, TINY, Coefficients, Normaliser, Statistic, transform

products = None


def statistics(problem: Problem, out: Tensor | None = None) -> Tensor:
    """``[4, R]`` statistic of the selected rows; see :mod:`logitless.softmax`."""
    if problem.canonical:
        lines = blocks.lines(problem)
        return lines if out is None else out.copy_(lines)
    z, _ = transformed(problem)
    m = z.amax(-1) if z.shape[-1] else z.new_full(z.shape[:1], -torch.inf)
    reference = torch.where(m == -torch.inf, torch.zeros_like(m), m)
    d = z - reference[:, None]
    e = d.exp()
    t = z.new_full(m.shape, torch.nan)
    if z.shape[-1]:
        column = problem.column - problem.first
        inside = (column >= 0) & (column < problem.columns)
        at_target = z.gather(-1, column.clamp(0, problem.columns - 1)[:, None]).squeeze(-1)
        t = torch.where(inside, at_target, t)
    return Statistic(m, e.sum(-1), (e * d.clamp_min(FLOOR)).sum(-1), t).stacked(out)


def solved(lines: Tensor, gain: Tensor) -> Tensor:
    """``[4, R]`` statistic of rows from the canonical lines ``[P, 18, R]`` of all their parts."""
    return blocks.solved(lines, gain)


def gradient(problem: Problem, norm: Normaliser, coef: Coefficients, out: Tensor, out_index: Tensor | None) -> None:
    """Write d logits into ``out``: the formula at rows ``out_index``, zero everywhere else."""
    z, slope = transformed(problem)
    d = z - norm.reference[:, None]
    p = (d - norm.log_sum[:, None]).exp()
    dz = coef.elsewhere(d, p, (slice(None), None))
    dz = torch.where(is_target(problem), coef.at_target[:, None], dz)
    dz = torch.where((problem.column == SKIP)[:, None], torch.zeros_like(dz), dz * slope)
    out.zero_()
    out[slice(None) if out_index is None else out_index, : problem.columns] = dz.to(out.dtype)


def gradient_over(problem: Problem, norm: Normaliser, coef: Coefficients, dtype: torch.dtype) -> Tensor:
    """:func:`gradient` in a narrower dtype, over the start of each row of the logits, which are lost."""
    out = over(problem.logits, dtype)
    gradient(problem, norm, coef, out, None)
    return out


def transformed(problem: Problem) -> tuple[Tensor, Tensor]:
    """``z`` of the selected rows over the true columns, and ``dz/dx``."""
    rows = problem.logits if problem.index is None else problem.logits[problem.index]
    return transform(rows[:, : problem.columns].to(problem.gain.dtype), problem.gain[:, None], problem.squash)


def is_target(problem: Problem) -> Tensor:
    """``[R, V]`` which column is the row's target."""
    columns = torch.arange(problem.first, problem.first + problem.columns, device=problem.column.device)
    return columns == problem.column[:, None]


def best(problem: Problem, k: int, negative: bool) -> Tensor:
    """``[2, k, R]``: the k best keys of each row, descending, and their columns, ascending where keys are equal.

    A key is the logit before the head's transformation, with its sign changed if ``negative``: all that the head does
    keeps that order, and equal logits are equal bits. Places without a column have key -inf and column ``NO_COLUMN``.
    """
    key, column = keys(problem, negative).sort(dim=1, descending=True, stable=True)
    found = min(k, problem.columns)
    out = key.new_empty((2, k, problem.num_rows))
    out[0, found:], out[1, found:] = -torch.inf, NO_COLUMN
    out[0, :found], out[1, :found] = key[:, :found].T, column[:, :found].T + problem.first
    return out


def ahead(problem: Problem, key: Tensor, place: Tensor, negative: bool) -> Tensor:
    """``[R]`` columns that come before one with this key and this number: those with a larger key, or an equal one and
    a smaller number."""
    columns = torch.arange(problem.first, problem.first + problem.columns, device=key.device)
    x, key = keys(problem, negative), key[:, None]
    return ((x > key) | ((x == key) & (columns < place[:, None]))).sum(1).to(key.dtype)


def moments(problem: Problem) -> Tensor:
    """``[6, R]``: the largest z, the sum of ``e^(2 (z - it))``; and of all z but those at -inf their number, a center,
    the mean less the center, and the squares about the mean.

    Two numbers for the mean: where logits lie far from 0, one would leave few digits to the differences of means.
    """
    z, _ = transformed(problem)
    m = z.amax(-1) if z.shape[-1] else z.new_full(z.shape[:1], -torch.inf)
    there = z != -torch.inf
    count = there.sum(-1).to(z.dtype)
    # Logits are divided before they are added: a few that are masked with the lowest number have no finite sum.
    share = 1 / count.clamp_min(1.0)[:, None]
    center = torch.where(there, z * share, 0.0).sum(-1)
    off = torch.where(there, z - center[:, None], 0.0)
    mean = (off * share).sum(-1)
    squares = torch.where(there, off - mean[:, None], 0.0).square().sum(-1)
    doubled = (2 * (z - finite_or_zero(m)[:, None])).exp().sum(-1)
    return torch.stack([m, doubled, count, center, mean, squares])


def keys(problem: Problem, negative: bool) -> Tensor:
    """``[R, V]`` what columns are ordered by."""
    rows = problem.logits if problem.index is None else problem.logits[problem.index]
    x = rows[:, : problem.columns].to(problem.gain.dtype)
    return -x if negative else x


def exponentials(problem: Problem, stats: Tensor, running: Running, out: Tensor, slope: bool) -> None:
    """The statistic into ``stats``, and ``e^(z - reference)`` of every element into ``out``, but 0 at the target.

    The reference is moved first. ``slope`` multiplies by ``1 - tanh^2`` under a softcap. The target is left out because
    its gradient is formed in float32 and must not be rounded to 16 bits.
    """
    statistics(problem, stats)
    move(running, Statistic.of(stats).m, problem.column == SKIP)
    z, dz_dx = transformed(problem)
    e = (z - finite_or_zero(running.reference)[:, None]).exp()
    if slope and problem.squash:
        e = e * dz_dx / (problem.gain[:, None] * problem.squash)
    out.copy_(e.masked_fill(is_target(problem) | (problem.column == SKIP)[:, None], 0.0))


def move(running: Running, maximum: Tensor, skip: Tensor) -> None:
    """Move each reference to the maximum where that lies too far from the guess."""
    before = running.before
    moves = ((maximum > before + running.slack) | (maximum < before - running.drop)) & ~skip
    moved = torch.where(moves, maximum, before)
    if running.sums is not None:
        running.sums.mul_(torch.where(moves, (before - moved).exp(), torch.ones_like(moved))[:, None])
    running.reference.copy_(moved)


def finite_or_zero(reference: Tensor) -> Tensor:
    """The reference; 0 for a row whose logits so far were all -inf."""
    return torch.where(reference == -torch.inf, 0.0, reference)


def gradient_from(
    problem: Problem, references: Tensor, slab: int, norm: Normaliser, coef: Coefficients, out: Tensor
) -> None:
    """d logits where the problem's logits are ``e^(z - reference)``: ``p`` and ``z`` both follow from them.

    Args:
        problem: without a softcap.
        references: ``[S, R]``, one for each slab of columns.
        slab: columns of each slab but the last.
    """
    for piece in pieces(problem.columns, slab, problem.logits.is_meta):
        e = problem.logits[:, piece].to(problem.gain.dtype)
        reference = references[piece.start // slab]
        # A slab of -inf has exponentials of 0, for which any finite shift will do.
        shift = torch.where(reference == -torch.inf, 0.0, reference - norm.reference).clamp_min(FLOOR)[:, None]
        p = e * (shift - norm.log_sum[:, None]).exp()
        # An exponential of 0 does not tell -inf from a logit far below, so there is no constant term here.
        assert coef.constant is None
        d = p if coef.product is None else e.clamp_min(TINY).log() + shift
        dz = coef.elsewhere(d, p, (slice(None), None))
        columns = torch.arange(problem.first + piece.start, problem.first + piece.stop, device=e.device)
        dz = torch.where(columns == problem.column[:, None], coef.at_target[:, None], dz) * problem.gain[:, None]
        out[:, piece] = dz.masked_fill((problem.column == SKIP)[:, None], 0.0)


def divergence(pair: Pair, out: Tensor) -> None:
    """Sums of each row over these columns: of terms, and of ``p slope``; 0 of a row to skip.

    Where the acceptance is read besides: tv, the acceptance's ``p slope``, and the acceptance.
    """
    element, more, _, _ = _compared(pair)
    skipped = pair.student.column == SKIP
    for line, x in zip(out, (*element, *more), strict=True):
        line.copy_(x.sum(-1).masked_fill(skipped, 0.0))


def divergence_gradient(
    pair: Pair, mean: Tensor, by: Tensor, coef: Coefficients | None, out: Tensor, out_index: Tensor | None
) -> None:
    """d logits of the student: ``by`` times that of the divergence, and what ``coef`` says, as in :func:`gradient`.

    Args:
        mean, by: ``[R]`` sum of ``p slope`` over the whole vocabulary, and the gradient of the sum of terms. With the
            acceptance ``[2, R]``, its own second.
        coef: for log-prob, entropy and log Z, or None.
        out: may lie over the student's logits, in a narrower dtype too.
    """
    problem = pair.student
    element, more, p, slope = _compared(pair)
    slopes = (element.weighted_slope, *more[1:2])
    dz = torch.zeros_like(p)
    for weighted, own_mean, own_by in zip(slopes, torch.atleast_2d(mean), torch.atleast_2d(by), strict=True):
        # `where` and not a product: a row without a gradient must not see an infinite slope.
        dz += torch.where((own_by == 0)[:, None], 0.0, own_by[:, None] * (weighted - p * own_mean[:, None]))
    if coef is not None:
        z, _ = transformed(problem)
        inner = coef.plain[:, None]
        if coef.product is not None:
            inner = inner + coef.product[:, None] * (z - pair.norm.reference[:, None]).clamp_min(FLOOR)
        dz = dz + torch.where(is_target(problem), coef.at_target[:, None], p * inner)
    dz = dz * slope
    dz = dz.masked_fill((problem.column == SKIP)[:, None], 0.0).to(out.dtype)
    out.zero_()
    out[slice(None) if out_index is None else out_index, : problem.columns] = dz


def _compared(pair: Pair) -> tuple[Element, tuple[Tensor, ...], Tensor, Tensor]:
    """Every element's share of the divergence, and of the acceptance where it is read, p, and ``dz/dx``."""
    (z, slope), (y, _) = transformed(pair.student), transformed(pair.teacher)
    y = torch.nn.functional.pad(y, (0, z.shape[1] - y.shape[1]), value=-torch.inf)
    log_p = (z - pair.norm.reference[:, None]) - pair.norm.log_sum[:, None]
    log_q = (y - pair.teacher_norm.reference[:, None]) - pair.teacher_norm.log_sum[:, None]
    d = (y - z) - pair.shift[:, None]
    more = ()
    if pair.share is not None:
        share = pair.share[:, None]
        more = accepted(log_p, log_q + share, d + share)
    return elements(log_p, log_q, d, pair.kind), more, log_p.exp(), slope


def write(listed: Listed, out: Tensor, out_index: Tensor | None) -> None:
    """``out[out_index[r], column[r, k] - first] = value[r, k]``, but for columns that are not there.

    Those must not write. Because their number is not fetched from the device, each of them repeats the write of a
    column of its row that is there, or, where there is none, writes the value of column 0 once more.
    """
    if not listed.columns or not listed.column.numel():
        return
    column = listed.column - listed.first
    here = (column >= 0) & (column < listed.columns)
    some = here.any(1, keepdim=True)
    place = torch.where(here, torch.arange(here.shape[1], device=out.device), here.int().argmax(1, keepdim=True))
    column = torch.where(some, column.gather(1, place), 0)
    row = torch.arange(len(column), device=out.device) if out_index is None else out_index
    value = listed.value.to(out.dtype).gather(1, place)
    out[row[:, None], column] = torch.where(some, value, out[row, 0][:, None])


def rescale(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """``out[i] = x[i] * factor[i]``, rounded once. ``out`` may be ``x``; ``factor`` is ``[R]``, or one for all rows."""
    # A GPU rounds a 0-dim factor to the dtype of x first, which makes a loss scale past 65504 infinite in float16.
    x, factor = x.to(factor.dtype), factor[:, None] if factor.dim() else factor
    torch.mul(x, factor, out=out) if out.dtype == x.dtype else out.copy_(x * factor)


def mix(x: Tensor, by: Tensor, y: Tensor, index: Tensor, times: Tensor, out: Tensor) -> None:
    """``out[i] = x[i] * by[i] + y[index[i]] * times[i]``, summed in the dtype of ``by`` and rounded once."""
    wide = by.dtype
    out.copy_(x.to(wide) * by[:, None] + y.index_select(0, index).to(wide) * times[:, None])


def dots(x: Tensor, at_x: Tensor, y: Tensor, at_y: Tensor, out: Tensor, memory: int) -> None:
    """``out[e] = x[at_x[e]] . y[at_y[e]]``, summed in ``out``'s dtype; 0 where ``at_y`` is negative."""
    product = x[at_x].to(out.dtype) * y[at_y.clamp_min(0)].to(out.dtype)
    out.copy_(product.sum(-1).masked_fill(at_y < 0, 0.0))


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
    """Row ``place[i]`` of ``out`` is the sum of ``factor[e] x[at[e]]`` over ``e`` in ``starts[i] .. starts[i + 1]``.

    Summed in ``factor``'s dtype and in the order of the entries, and rounded once. With ``add`` the sum is added to
    what is there; otherwise rows that have no sum become 0. ``uneven`` says that some may be far longer than others.
    """
    total = torch.zeros(out.shape, dtype=factor.dtype, device=out.device)
    add_entries(factor, x, at, segments(starts, len(factor), place), total)
    out.add_(total) if add else out.copy_(total)


def segments(starts: Tensor, count: int, place: Tensor | None) -> Tensor:
    """``[count]`` row that each entry is added to; -1 for entries behind the last sum."""
    entry = torch.arange(count, device=starts.device)
    segment = torch.searchsorted(starts, entry, right=True) - 1
    inside = segment < len(starts) - 1
    segment = segment.clamp_max(max(len(starts) - 2, 0))
    return torch.where(inside, segment if place is None else place[segment], -1)


def add_entries(factor: Tensor, x: Tensor, at: Tensor, to: Tensor, out: Tensor) -> None:
    """``out[to[e]] += factor[e] x[at[e]]`` in order. Where the factor is 0, x is not looked at."""
    rows = x[at].to(factor.dtype)
    terms = torch.where((factor == 0)[:, None], 0.0, rows * factor[:, None])
    # Deterministic sums: on a GPU index_put sorts first where index_add is atomic; on a CPU index_add is in order.
    into = to.clamp_min(0)
    out.index_put_((into,), terms, accumulate=True) if out.is_cuda else out.index_add_(0, into, terms)
