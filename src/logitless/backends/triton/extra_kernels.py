"""Kernels for statistics beyond the softmax. Each has a twin of a few lines in ``backends/reference.py``.

Names are those of ``kernels``. A column's key is its logit before the head's transformation, or minus that: the head
keeps its order, and equal logits have equal bits. NaN is no larger than anything here; such rows are NaN in the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from logitless.backends.triton.kernels import LOG2E, SKIP, finite_or_zero, transform

NO_COLUMN: tl.constexpr = tl.constexpr(16777216.0)  # contract.NO_COLUMN
FAR_OFF: tl.constexpr = tl.constexpr(16.0)  # from here on a mean loses digits that its differences need
BULK: tl.constexpr = tl.constexpr(1024.0)  # logits further below the largest may be masked, and no part of a center
NOWHERE: tl.constexpr = tl.constexpr(2147483647)  # beyond every column


@triton.jit
def row_of(logits, index, i_r, row_stride, INDEXED: tl.constexpr):
    """Pointer to the logits of row ``i_r``."""
    i_t = i_r
    if INDEXED:
        i_t = tl.load(index + i_r).to(tl.int64)
    return logits + i_t * row_stride


@triton.jit
def better(b_key, o_c, b_best, b_at, m):
    """``(key, column)`` of the better of two, lane by lane; a column that ``m`` leaves out is none."""
    wins = m & ((b_key > b_best) | ((b_key == b_best) & (o_c < b_at)))
    return tl.where(wins, b_key, b_best), tl.where(wins, o_c, b_at)


@triton.jit
def winner(b_best, b_at):
    """``(key, column)`` of the best of all lanes."""
    top = tl.max(b_best, axis=0)
    return top, tl.min(tl.where(b_best == top, b_at, NOWHERE), axis=0)


@triton.jit(do_not_specialize=["first", "k"])
def best_kernel(
    logits,
    index,
    column,
    out,
    row_stride,
    k_stride,
    half_stride,
    columns,
    first,
    k,
    INDEXED: tl.constexpr,
    NEGATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEEP: tl.constexpr,
):
    """One row per program: its k best columns, one after the other.

    Lane l has the columns ``l, l + BLOCK, ...`` and knows the best of them. The best lane wins, is written, and looks
    up its next best: of ``columns / BLOCK`` columns that the cache still has, those behind what was written.
    """
    i_r = tl.program_id(0).to(tl.int64)
    p_out = out + i_r
    o_b = tl.arange(0, BLOCK)
    b_best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    b_at = tl.full([BLOCK], NOWHERE, dtype=tl.int32)
    p_row = row_of(logits, index, i_r, row_stride, INDEXED)
    if tl.load(column + i_r) != SKIP:
        for c in range(0, columns, BLOCK):
            m_c = c + o_b < columns
            b_key = tl.load(p_row + c + o_b, mask=m_c, other=0.0).to(tl.float32)
            b_key = -b_key if NEGATIVE else b_key
            b_best, b_at = better(b_key, c + o_b, b_best, b_at, m_c)
    o_d = tl.arange(0, DEEP) * BLOCK
    for i in range(0, k):
        key, at = winner(b_best, b_at)
        tl.store(p_out + i * k_stride, key)
        tl.store(p_out + half_stride + i * k_stride, tl.where(at == NOWHERE, NO_COLUMN, (at + first).to(tl.float32)))
        o_c = at % BLOCK + o_d
        m_c = (o_c < columns) & (at != NOWHERE)
        b_key = tl.load(p_row + o_c, mask=m_c, other=0.0).to(tl.float32)
        b_key = -b_key if NEGATIVE else b_key
        behind = m_c & ((b_key < key) | ((b_key == key) & (o_c > at)))
        next_key, next_at = winner(tl.where(behind, b_key, float("-inf")), tl.where(behind, o_c, NOWHERE))
        here = (o_b == at % BLOCK) & (at != NOWHERE)
        b_best, b_at = tl.where(here, next_key, b_best), tl.where(here, next_at, b_at)


@triton.jit(do_not_specialize=["first"])
def ahead_kernel(
    logits,
    index,
    column,
    key,
    place,
    out,
    row_stride,
    columns,
    first,
    INDEXED: tl.constexpr,
    NEGATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row per program: how many columns have a larger key, or an equal one and a smaller number."""
    i_r = tl.program_id(0).to(tl.int64)
    o_b = tl.arange(0, BLOCK)
    b_n = tl.zeros([BLOCK], dtype=tl.int32)
    if tl.load(column + i_r) != SKIP:
        p_row = row_of(logits, index, i_r, row_stride, INDEXED)
        bar = tl.load(key + i_r)
        # As a number of this tile's, which may lie before or behind it.
        at = tl.load(place + i_r) - first
        for c in tl.range(0, columns, BLOCK, num_stages=STAGES):
            o_c = c + o_b
            m_c = o_c < columns
            b_key = tl.load(p_row + o_c, mask=m_c, other=0.0, eviction_policy="evict_first").to(tl.float32)
            b_key = -b_key if NEGATIVE else b_key
            b_n += (m_c & ((b_key > bar) | ((b_key == bar) & (o_c < at)))).to(tl.int32)
    tl.store(out + i_r, tl.sum(b_n, axis=0).to(tl.float32))


@triton.jit
def moments_kernel(
    logits,
    index,
    column,
    gain,
    out,
    row_stride,
    part_stride,
    columns,
    squash,
    INDEXED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row per program: ``m = max z; sum e^(2 (z - m))``; count, center, mean and squares of all z but -inf.

    Each lane keeps a mean of its own and corrects it with every z. Where logits lie far from 0, it is relative to the
    middle of the first block: their distances from it are small, and the mean of these keeps all digits. The largest is
    no center: above logits that lie about 0 it would cost a digit.
    """
    i_r = tl.program_id(0).to(tl.int64)
    o_b = tl.arange(0, BLOCK)
    m = float("-inf")
    center = 0.0
    b_q = tl.zeros([BLOCK], dtype=tl.float32)
    b_n = tl.zeros([BLOCK], dtype=tl.float32)
    b_mean = tl.zeros([BLOCK], dtype=tl.float32)
    b_squares = tl.zeros([BLOCK], dtype=tl.float32)
    if tl.load(column + i_r) != SKIP:
        p_row = row_of(logits, index, i_r, row_stride, INDEXED)
        a = tl.load(gain + i_r)
        for c in tl.range(0, columns, BLOCK, num_stages=STAGES):
            m_c = c + o_b < columns
            b_x = tl.load(p_row + c + o_b, mask=m_c, other=0.0, eviction_policy="evict_first").to(tl.float32)
            b_z = tl.where(m_c, transform(b_x, a, squash, SOFTCAP), float("-inf"))
            top = tl.max(b_z, axis=0)
            if c == 0:
                b_bulk = b_z > top - BULK
                number = tl.maximum(tl.sum(tl.where(b_bulk, 1.0, 0.0), axis=0), 1.0)
                # Divided first: logits near the end of the range have no finite sum.
                middle = tl.sum(tl.where(b_bulk, b_z / number, 0.0), axis=0)
                if tl.abs(middle) >= FAR_OFF:
                    center = middle
            if top > m:
                # Nothing finite so far means that the sums are still zero, and any finite shift will do.
                b_q *= tl.exp2(tl.where(m == float("-inf"), 0.0, m - top) * (2.0 * LOG2E))
                m = top
            b_q += tl.exp2((b_z - finite_or_zero(m)) * (2.0 * LOG2E))
            there = b_z != float("-inf")
            b_n += tl.where(there, 1.0, 0.0)
            # What is not there is no way off the mean.
            b_d = tl.where(there, b_z - center, b_mean)
            b_off = b_d - b_mean
            b_mean += b_off / tl.maximum(b_n, 1.0)
            b_squares += b_off * (b_d - b_mean)
    n = tl.sum(b_n, axis=0)
    # Lanes without a column have a mean of 0, and weigh nothing.
    mean = tl.sum(b_mean * (b_n / tl.maximum(n, 1.0)), axis=0)
    b_off = b_mean - mean
    tl.store(out + i_r, m)
    tl.store(out + i_r + part_stride, tl.sum(b_q, axis=0))
    tl.store(out + i_r + 2 * part_stride, n)
    tl.store(out + i_r + 3 * part_stride, center)
    tl.store(out + i_r + 4 * part_stride, mean)
    tl.store(out + i_r + 5 * part_stride, tl.sum(b_squares + b_n * b_off * b_off, axis=0))


@triton.jit(do_not_specialize=["first", "columns", "count", "k"])
def write_kernel(
    column,
    value,
    index,
    out,
    out_stride,
    count,
    k,
    first,
    columns,
    INDEXED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Entry ``r k + j``: ``out[index[r], column[r, j] - first] = value[r, j]``, if that column is there.

    Entries of one row and column have one value, so that it does not matter which of them writes last.
    """
    o_e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o_c = tl.load(column + o_e, mask=o_e < count, other=-1) - first
    m_e = (o_e < count) & (o_c >= 0) & (o_c < columns)
    i_r = o_e // k
    if INDEXED:
        i_r = tl.load(index + i_r, mask=m_e, other=0)
    b_x = tl.load(value + o_e, mask=m_e, other=0.0)
    tl.store(out + i_r * out_stride + o_c, b_x.to(out.dtype.element_ty), mask=m_e)
