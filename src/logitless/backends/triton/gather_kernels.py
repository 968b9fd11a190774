"""Kernels over listed pairs of rows: dot products of them, and sums of rows with factors, of two rows included.

Written as those of ``kernels.py``. A list is cut into programs by its entries, or by what its entries are summed into,
and each sum runs over its entries in their order: the same bits on every run, and whatever else is in the list.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dots_kernel(
    x,
    at_x,
    y,
    at_y,
    out,
    count,
    x_stride,
    y_stride,
    x_step,
    y_step,
    width,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``out[e] = x[at_x[e]] . y[at_y[e]]``; a negative ``at_y`` reads nothing and gives 0. One program: ENTRIES."""
    o_e = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    i_x = tl.load(at_x + o_e, mask=o_e < count, other=-1)
    i_y = tl.load(at_y + o_e, mask=o_e < count, other=-1)
    m_e = i_y >= 0
    # Entries are sorted by row, so that neighbours mostly read the same row of x, from the cache.
    p_x = x + i_x[:, None] * x_stride
    p_y = y + i_y[:, None] * y_stride
    o_c = tl.arange(0, BLOCK)
    b_sum = tl.zeros([ENTRIES, BLOCK], dtype=tl.float32)
    if tl.max(i_y, axis=0) >= 0:
        for c in tl.range(0, width, BLOCK, num_stages=STAGES):
            mask = m_e[:, None] & (c + o_c < width)[None, :]
            b_x = tl.load(p_x + (c + o_c)[None, :] * x_step, mask=mask, other=0.0).to(tl.float32)
            b_y = tl.load(p_y + (c + o_c)[None, :] * y_step, mask=mask, other=0.0).to(tl.float32)
            b_sum += b_x * b_y
    tl.store(out + o_e, tl.sum(b_sum, axis=1), mask=o_e < count)


@triton.jit
def sums_kernel(
    factor,
    x,
    at,
    starts,
    stops,
    place,
    out,
    x_stride,
    x_step,
    out_stride,
    width,
    blocks,
    items,
    PLACED: tl.constexpr,
    ADD: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``out[place[i]]`` is, or gets, the sum of ``factor[e] x[at[e]]`` over ``e`` in ``starts[i] .. stops[i]``, if any.

    An item is one sum, BLOCK columns of it, and a program takes every so-manieth: most sums of a vocabulary are empty,
    and a program for each would take longer to start than to run. Entries whose factor is 0 read nothing.
    """
    o_e = tl.arange(0, ENTRIES)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        i = item // blocks
        start = tl.load(starts + i)
        stop = tl.load(stops + i)
        if start < stop:
            o_c = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
            b_sum = tl.zeros([ENTRIES, BLOCK], dtype=tl.float32)
            for e in tl.range(start, stop, ENTRIES, num_stages=STAGES):
                m_e = e + o_e < stop
                b_f = tl.load(factor + e + o_e, mask=m_e, other=0.0)
                i_x = tl.load(at + e + o_e, mask=m_e, other=0)
                p_x = x + i_x[:, None] * x_stride + o_c[None, :] * x_step
                b_x = tl.load(p_x, mask=(b_f != 0.0)[:, None] & (o_c < width)[None, :], other=0.0).to(tl.float32)
                b_sum += b_f[:, None] * b_x
            b_out = tl.sum(b_sum, axis=0)
            i_out = i.to(tl.int64)
            if PLACED:
                i_out = tl.load(place + i)
            p_out = out + i_out * out_stride + o_c
            if ADD:
                b_out += tl.load(p_out, mask=o_c < width, other=0.0)
            tl.store(p_out, b_out.to(out.dtype.element_ty), mask=o_c < width)


@triton.jit
def rescale_kernel(x, factor, out, row_stride, out_stride, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """``out[i] = x[i] * factor[i]``, one row per program."""
    i_r = tl.program_id(0).to(tl.int64)
    f = tl.load(factor + i_r) if ROWS else tl.load(factor)
    for c in range(0, columns, BLOCK):
        o_c = c + tl.arange(0, BLOCK)
        m_c = o_c < columns
        b_x = tl.load(x + i_r * row_stride + o_c, mask=m_c, other=0.0).to(tl.float32)
        tl.store(out + i_r * out_stride + o_c, (b_x * f).to(out.dtype.element_ty), mask=m_c)


@triton.jit
def mix_kernel(x, by, y, index, times, out, x_stride, y_stride, y_step, out_stride, columns, BLOCK: tl.constexpr):
    """``out[i] = x[i] * by[i] + y[index[i]] * times[i]``, one row per program."""
    i_r = tl.program_id(0).to(tl.int64)
    i_y = tl.load(index + i_r).to(tl.int64)
    b, t = tl.load(by + i_r), tl.load(times + i_r)
    for c in range(0, columns, BLOCK):
        o_c = c + tl.arange(0, BLOCK)
        m_c = o_c < columns
        b_x = tl.load(x + i_r * x_stride + o_c, mask=m_c, other=0.0).to(tl.float32)
        # In a weight that is stored the other way round, columns are as far apart as rows are elsewhere.
        b_y = tl.load(y + i_y * y_stride + o_c.to(tl.int64) * y_step, mask=m_c, other=0.0).to(tl.float32)
        tl.store(out + i_r * out_stride + o_c, (b_x * b + b_y * t).to(out.dtype.element_ty), mask=m_c)
