"""Kernels around products that end in a softmax: what becomes of the parts and exponentials that those leave behind.

    merge                 parts of the statistic  ->  the statistic
    follow                maxima of a slab  ->  references that keep exponentials in the range of 16 bits
    gradient_from_tiles   exponentials  ->  dZ

Names as in ``kernels.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from logitless.backends.triton.kernels import FLOOR, LN2, LOG2E, SKIP, TINY
from logitless.backends.triton.product_kernels import empty_part
from logitless.backends.triton.tile_ends import NO_TARGET, merged, store_part


@triton.jit(do_not_specialize=["rows", "num_groups", "part_stride"])
def merge_kernel(
    parts,
    column,
    gain,
    stats,
    rows,
    num_groups,
    part_stride,
    NEGATIVE: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The statistic of some rows from their parts, first to last; AHEAD parts are loaded at a time. With TOP two lines
    follow: m before the gain, and the number of its column."""
    o_r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_r = o_r < rows
    a = tl.load(gain + o_r, mask=m_r, other=1.0)
    if NEGATIVE:
        a = tl.abs(a)
    k = a * LOG2E
    b_m, b_s, b_lost, b_w, b_t = empty_part(BLOCK)  # pyright: ignore[reportGeneralTypeIssues]
    b_best = tl.zeros([BLOCK], dtype=tl.float32)
    p_part = parts + o_r
    for g in range(0, num_groups, AHEAD):
        for i in tl.static_range(AHEAD):
            m_part = m_r & (g + i < num_groups)
            part_m = tl.load(p_part, mask=m_part, other=float("-inf"))
            part_s = tl.load(p_part + rows, mask=m_part, other=0.0)
            part_w = tl.load(p_part + 2 * rows, mask=m_part, other=0.0)
            part_t = tl.load(p_part + 3 * rows, mask=m_part, other=float("nan"))
            if TOP:
                # By turns a part is of every second tile: of equal maxima the first column may come later.
                part_best = tl.load(p_part + 4 * rows, mask=m_part, other=0.0)
                first = tl.where(part_m == b_m, tl.minimum(b_best, part_best), b_best)
                b_best = tl.where(part_m > b_m, part_best, first)
            b_m, b_s, b_lost, b_w = merged(b_m, b_s, b_lost, b_w, part_m, part_s, part_w, k)
            b_t = tl.where(part_t == part_t, part_t, b_t)
            p_part += (4 + TOP) * rows
    # What a row to be left out was multiplied to does not matter.
    read = tl.load(column + o_r, mask=m_r, other=SKIP) != SKIP
    m, s = tl.where(read, b_m * a, 0.0), tl.where(read, b_s + b_lost, 1.0)
    w, t = tl.where(read, b_w * LN2, 0.0), b_t * a
    store_part(stats + o_r, part_stride, m, s, w, tl.where(read, t, 0.0), m_r)
    if TOP:
        tl.store(stats + o_r + 4 * part_stride, tl.where(read, b_m, 0.0), mask=m_r)
        tl.store(stats + o_r + 5 * part_stride, b_best, mask=m_r)


@triton.jit(do_not_specialize=["rows", "num_groups"])
def follow_kernel(
    parts,
    column,
    gain,
    references,
    sums,
    moved,
    rows,
    num_groups,
    sums_stride,
    WIDTH: tl.constexpr,
    SLACK: tl.constexpr,
    NEGATIVE: tl.constexpr,
    TOP: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row's reference moves to its maximum over a slab if that is out of range, and its sums with it.

    Above: more than SLACK beyond the reference. Below: in the FIRST slab only, since later ones have nothing to add.
    """
    i_r = tl.program_id(0).to(tl.int64)
    top = tl.full([], float("-inf"), dtype=tl.float32)
    for g in range(num_groups):
        top = tl.maximum(top, tl.load(parts + g * (4 + TOP) * rows.to(tl.int64) + i_r))
    a, before = tl.load(gain + i_r), tl.load(references + i_r)
    if NEGATIVE:
        a = tl.abs(a)
    top = top * a
    leaves = top > before + SLACK
    if FIRST:
        leaves = leaves | ((top < before - SLACK) & (top > float("-inf")))
    if leaves & (tl.load(column + i_r) != SKIP):
        tl.store(references + i_r, top)
        tl.store(moved, 1)
        if not FIRST:
            factor = tl.exp2((before - top) * LOG2E)
            for d in range(0, WIDTH, BLOCK):
                o_d = d + tl.arange(0, BLOCK)
                p_sums = sums + i_r * sums_stride + o_d
                m_d = o_d < WIDTH
                tl.store(p_sums, tl.load(p_sums, mask=m_d, other=0.0) * factor, mask=m_d)


# Whether columns are a multiple of 16 matters: only then are masked loads and stores as wide as they can be.
@triton.jit(do_not_specialize=["first", "moved_stride"])
def gradient_from_tiles_kernel(
    exponentials,
    column,
    gain,
    moved,
    reference,
    log_sum,
    plain,
    product,
    at_target,
    out,
    row_stride,
    out_stride,
    moved_stride,
    columns,
    first,
    PRODUCT: tl.constexpr,
    SLAB: tl.constexpr,
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
    FAST: tl.constexpr,
):
    """Some of a row's columns per program: the gradient from ``e^(z - moved)``, with a ``moved`` for each SLAB of them.

    As ``gradient_from_kernel``, which reads one such number for all of its columns.
    """
    num_parts = tl.cdiv(columns, SLAB * TILES * STEPS)
    i_r = (tl.program_id(0) // num_parts).to(tl.int64)
    begin = (tl.program_id(0) % num_parts) * TILES * STEPS
    end = tl.minimum(begin + TILES * STEPS, tl.cdiv(columns, SLAB))
    i_c = tl.load(column + i_r)
    read = i_c != SKIP
    a, m, log_s = tl.load(gain + i_r), tl.load(reference + i_r), tl.load(log_sum + i_r)
    k, target = tl.load(plain + i_r), tl.load(at_target + i_r) * a
    k_z = tl.load(product + i_r) if PRODUCT else 0.0
    i_at = tl.where((i_c >= first) & (i_c < first + columns), i_c - first, NO_TARGET).to(tl.int32)
    for tile in range(begin, end, TILES):
        o_t = tile + tl.arange(0, TILES)
        o_c = o_t[:, None] * SLAB + tl.arange(0, SLAB)[None, :]  # [TILES, SLAB]
        m_c = o_c < columns
        base = tl.load(moved + o_t.to(tl.int64) * moved_stride + i_r, mask=o_t * SLAB < columns, other=0.0)
        b_e = tl.load(exponentials + i_r * row_stride + o_c, mask=m_c & read, other=0.0).to(tl.float32)
        # Where all of a tile was -inf its exponentials are 0, and any shift will do that does not overflow.
        shift = tl.where(base == float("-inf"), 0.0, tl.maximum(base - m, FLOOR))
        scale = tl.exp2((shift - log_s) * LOG2E) * a
        b_k = ((k + k_z * shift) * scale)[:, None]
        if PRODUCT:
            b_e = tl.maximum(b_e, TINY)
            # What NVIDIA's hardware has, a few units of 2^-24 off: e has 2^-9 or 2^-12.
            b_log = libdevice.fast_log2f(b_e) if FAST else tl.log2(b_e)
            b_k = b_k + (k_z * LN2 * scale)[:, None] * b_log
        b_dz = tl.where(o_c == i_at, target, b_e * b_k)
        b_dz = tl.where(read, b_dz, 0.0)
        tl.store(out + i_r * out_stride + o_c, b_dz.to(out.dtype.element_ty), mask=m_c)
