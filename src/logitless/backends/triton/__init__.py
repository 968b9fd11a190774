"""Triton kernels for NVIDIA GPUs, and for CPU tensors under Triton's interpreter.

``statistics`` reads each selected row once; ``gradient`` reads it once more and writes it once. Neither allocates
anything larger than a vector: rows are found by index, not gathered, and half-precision logits are widened in
registers.
"""

# pyright: reportArgumentType=false
# Triton's own annotations want tl.constexpr where every caller passes a plain bool or int.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless.backends.contract import MOMENTS, Listed, Problem, Running, over
from logitless.backends.triton import pairs as pairs
from logitless.backends.triton import products as products
from logitless.backends.triton.blocks import row_lines
from logitless.backends.triton.blocks import solved as solved
from logitless.backends.triton.divergences import divergence as divergence
from logitless.backends.triton.divergences import divergence_gradient as divergence_gradient
from logitless.backends.triton.launching import interpreted as interpreted
from logitless.backends.triton.launching import launch, of_rows, require
from logitless.backends.triton.launching import unavailable as unavailable
from logitless.backends.triton.parts import PART, Parts
from logitless.machine import (
    best_sizes,
    dots_sizes,
    exponentials_sizes,
    gradient_from_sizes,
    gradient_sizes,
    moments_sizes,
    multiprocessors,
    narrowing_sizes,
    statistics_sizes,
    sums_sizes,
)
from logitless.softmax import Coefficients, Normaliser

RESIDENT = 16
"""Programs per multiprocessor of a kernel that works off a list."""


WRITTEN = 1024
"""Entries of a list that one program writes."""


def statistics(problem: Problem, out: Tensor | None = None) -> Tensor:
    """Same as :func:`logitless.backends.reference.statistics`, in one read of the rows."""
    require(problem.logits)
    if problem.canonical:
        return row_lines(problem, out)
    stats = problem.empty_statistic() if out is None else out
    launch(
        "statistics_kernel",
        problem.num_rows,
        on=problem.logits,
        logits=problem.logits,
        index=problem.index,
        column=problem.column,
        gain=problem.gain,
        stats=stats,
        row_stride=problem.logits.stride(0),
        columns=problem.columns,
        first=problem.first,
        part_stride=stats.stride(0),
        squash=problem.squash,
        INDEXED=problem.index is not None,
        ENTROPY=problem.entropy,
        SOFTCAP=bool(problem.squash),
        **statistics_sizes(problem.logits.dtype, problem.columns),
    )
    return stats


def gradient(problem: Problem, norm: Normaliser, coef: Coefficients, out: Tensor, out_index: Tensor | None) -> None:
    """Same as :func:`logitless.backends.reference.gradient`: one read of the rows, one write of ``out``."""
    require(problem.logits)
    num_rows, (num_tokens, width) = problem.num_rows, out.shape
    if num_rows == 0 or width == 0:
        out.zero_()
        return
    slot = None
    if out_index is not None:
        slot = torch.full((num_tokens,), -1, dtype=torch.int64, device=out.device)
        slot.index_copy_(0, out_index, torch.arange(num_rows, device=out.device))
    sizes = gradient_sizes(problem.logits.dtype, width)
    launch(
        "gradient_kernel",
        num_tokens * -(-width // sizes["BLOCK"]),
        on=problem.logits,
        logits=problem.logits,
        index=problem.index,
        **of_rows(problem, norm, coef),
        slot=slot,
        out=out,
        row_stride=problem.logits.stride(0),
        out_stride=out.stride(0),
        width=width,
        squash=problem.squash,
        square=coef.square,
        constant=coef.constant,
        INDEXED=slot is not None,
        SOFTCAP=bool(problem.squash),
        SQUARE=coef.square is not None,
        CONSTANT=coef.constant is not None,
        **sizes,
    )


def gradient_over(problem: Problem, norm: Normaliser, coef: Coefficients, dtype: torch.dtype) -> Tensor:
    """Same as :func:`logitless.backends.reference.gradient_over`: one read, one write, no second buffer."""
    out = over(problem.logits, dtype)
    if out.dtype == problem.logits.dtype:
        gradient(problem, norm, coef, out, None)
        return out
    require(problem.logits)
    launch(
        "narrowing_kernel",
        problem.num_rows if problem.columns else 0,
        on=out,
        logits=problem.logits,
        **of_rows(problem, norm, coef),
        out=out,
        row_stride=problem.logits.stride(0),
        out_stride=out.stride(0),
        squash=problem.squash,
        square=coef.square,
        constant=coef.constant,
        SQUARE=coef.square is not None,
        CONSTANT=coef.constant is not None,
        SOFTCAP=bool(problem.squash),
        **narrowing_sizes(problem.columns),
    )
    return out


def best(problem: Problem, k: int, negative: bool) -> Tensor:
    """Same as :func:`logitless.backends.reference.best`: one read of the rows, and of a lane's columns per place."""
    out = problem.gain.new_empty((2, k, problem.num_rows))
    _of_logits(
        "best_kernel",
        problem,
        out=out,
        k_stride=out.stride(1),
        half_stride=out.stride(0),
        k=k,
        first=problem.first,
        NEGATIVE=negative,
        **best_sizes(problem.columns),
    )
    return out


def ahead(problem: Problem, key: Tensor, place: Tensor, negative: bool) -> Tensor:
    """Same as :func:`logitless.backends.reference.ahead`, in one read of the rows."""
    out = torch.empty_like(key)
    sizes = statistics_sizes(problem.logits.dtype, problem.columns)
    _of_logits("ahead_kernel", problem, key=key, place=place, out=out, first=problem.first, NEGATIVE=negative, **sizes)
    return out


def moments(problem: Problem) -> Tensor:
    """Same as :func:`logitless.backends.reference.moments`, in one read of the rows."""
    out = problem.gain.new_empty((MOMENTS, problem.num_rows))
    _of_logits(
        "moments_kernel",
        problem,
        gain=problem.gain,
        out=out,
        part_stride=out.stride(0),
        squash=problem.squash,
        SOFTCAP=bool(problem.squash),
        **moments_sizes(problem.columns),
    )
    return out


def write(listed: Listed, out: Tensor, out_index: Tensor | None) -> None:
    """Same as :func:`logitless.backends.reference.write`, in one launch that reads the list once."""
    column, value = listed.column, listed.value
    launch(
        "write_kernel",
        -(-column.numel() // WRITTEN) if listed.columns else 0,
        on=out,
        module="extra_kernels",
        column=column.contiguous(),
        value=value.contiguous(),
        index=out_index,
        out=out,
        out_stride=out.stride(0),
        count=column.numel(),
        k=column.shape[1],
        first=listed.first,
        columns=listed.columns,
        INDEXED=out_index is not None,
        BLOCK=WRITTEN,
    )


def _of_logits(kernel: str, problem: Problem, **arguments: Any) -> None:
    """Launch a kernel with a program for every row."""
    require(problem.logits)
    launch(
        kernel,
        problem.num_rows,
        on=problem.logits,
        module="extra_kernels",
        logits=problem.logits,
        index=problem.index,
        column=problem.column,
        row_stride=problem.logits.stride(0),
        columns=problem.columns,
        INDEXED=problem.index is not None,
        **arguments,
    )


def exponentials(problem: Problem, stats: Tensor, running: Running, out: Tensor, slope: bool) -> None:
    """Same as :func:`logitless.backends.reference.exponentials`, in one launch."""
    sums = running.sums
    launch(
        "exponentials_kernel",
        problem.num_rows,
        on=out,
        logits=problem.logits,
        column=problem.column,
        gain=problem.gain,
        stats=stats,
        before=running.before,
        reference=running.reference,
        sums=sums,
        out=out,
        row_stride=problem.logits.stride(0),
        out_stride=out.stride(0),
        sums_stride=0 if sums is None else sums.stride(0),
        columns=problem.columns,
        first=problem.first,
        part_stride=stats.stride(0),
        sums_columns=0 if sums is None else sums.shape[1],
        squash=problem.squash,
        slack=running.slack,
        drop=running.drop,
        ENTROPY=problem.entropy,
        SOFTCAP=bool(problem.squash),
        SLOPE=slope and bool(problem.squash),
        SUMS=sums is not None,
        **exponentials_sizes(problem.columns),
    )


def gradient_from(
    problem: Problem, references: Tensor, slab: int, norm: Normaliser, coef: Coefficients, out: Tensor
) -> None:
    """Same as :func:`logitless.backends.reference.gradient_from`, in one launch for all slabs."""
    launch(
        "gradient_from_kernel",
        problem.num_rows * -(-problem.columns // slab),
        on=out,
        exponentials=problem.logits,
        moved=references,
        **of_rows(problem, norm, coef),
        out=out,
        row_stride=problem.logits.stride(0),
        out_stride=out.stride(0),
        moved_stride=references.stride(0),
        slab=slab,
        square=coef.square,
        SQUARE=coef.square is not None,
        **gradient_from_sizes(min(slab, problem.columns)),
    )


def rescale(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """Same as :func:`logitless.backends.reference.rescale`."""
    launch(
        "rescale_kernel",
        len(x) if x.numel() else 0,
        on=x,
        module="gather_kernels",
        x=x,
        factor=factor,
        out=out,
        row_stride=x.stride(0),
        out_stride=out.stride(0),
        columns=x.shape[1],
        ROWS=factor.dim() > 0,
        BLOCK=1024,
    )


def mix(x: Tensor, by: Tensor, y: Tensor, index: Tensor, times: Tensor, out: Tensor) -> None:
    """Same as :func:`logitless.backends.reference.mix`."""
    launch(
        "mix_kernel",
        len(x) if x.numel() else 0,
        on=x,
        module="gather_kernels",
        x=x,
        by=by,
        y=y,
        index=index,
        times=times,
        out=out,
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        y_step=y.stride(1),
        out_stride=out.stride(0),
        columns=x.shape[1],
        BLOCK=1024,
    )


def dots(x: Tensor, at_x: Tensor, y: Tensor, at_y: Tensor, out: Tensor, memory: int) -> None:
    """Same as :func:`logitless.backends.reference.dots`; takes no working memory."""
    sizes = dots_sizes(x.shape[1])
    launch(
        "dots_kernel",
        -(-len(out) // sizes["ENTRIES"]),
        on=out,
        module="gather_kernels",
        x=x,
        at_x=at_x,
        y=y,
        at_y=at_y,
        out=out,
        count=len(out),
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        x_step=x.stride(1),
        y_step=y.stride(1),
        width=x.shape[1],
        **sizes,
    )


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
    """Same as :func:`logitless.backends.reference.sums`; takes no working memory, but for parts of uneven sums.

    One program would take longer for a sum of thousands of entries than all others for the rest, so that long sums are
    made in parts of a fixed number of entries, and those are added up in order.
    """
    if not add:
        out.zero_()
    begin, end = starts[:-1], starts[1:]
    if uneven and len(factor) > PART:
        parts = Parts.of(begin, end, len(factor))
        partial = torch.empty((len(parts.begin), x.shape[1]), dtype=torch.float32, device=x.device)
        _sums(factor, x, at, parts.begin, parts.end, partial, None, False)
        ones, slot = torch.ones_like(parts.begin, dtype=torch.float32), torch.arange(len(partial), device=x.device)
        into = parts.sum if place is None else place[parts.sum]
        _sums(ones, partial, slot, parts.first, parts.last, out, into, add)
        end = torch.where(end - begin > parts.length, begin, end)
    _sums(factor, x, at, begin, end, out, place, add)


def _sums(
    factor: Tensor, x: Tensor, at: Tensor, begin: Tensor, end: Tensor, out: Tensor, place: Tensor | None, add: bool
) -> None:
    sizes = sums_sizes(x.shape[1])
    blocks = -(-x.shape[1] // sizes["BLOCK"])
    items = len(begin) * blocks
    launch(
        "sums_kernel",
        min(items, RESIDENT * multiprocessors(x.device)),
        on=out,
        module="gather_kernels",
        factor=factor,
        x=x,
        at=at,
        starts=begin,
        stops=end,
        place=place,
        out=out,
        x_stride=x.stride(0),
        x_step=x.stride(1),
        out_stride=out.stride(0),
        width=x.shape[1],
        blocks=blocks,
        items=items,
        PLACED=place is not None,
        ADD=add,
        **sizes,
    )
