"""Kernels around two products in one tile: what becomes of the parts and 16-bit numbers that those leave behind.

    pair_merge           parts of both statistics and of a KL  ->  both statistics, and the sums of the KL
    pair_gradient_from   the student's exponentials and what lies beside them  ->  dZ

Names as in ``kernels.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from logitless.backends.triton.kernels import LN2, LOG2E, SKIP, TINY, finite_or_zero


@triton.jit
def maximum_of(p_part, part_stride, o_g, m_r, num_parts, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    """``[BLOCK]`` the largest of a line over all parts; AHEAD parts are loaded at a time."""
    top = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for g in range(0, num_parts, AHEAD):
        mask = (g + o_g < num_parts)[:, None] & m_r[None, :]
        p = p_part[None, :] + (g + o_g).to(tl.int64)[:, None] * part_stride
        top = tl.maximum(top, tl.max(tl.load(p, mask=mask, other=float("-inf")), axis=0))
    return top


@triton.jit
def line(p_part, i, rows, mask):
    """A line of some parts in float64; nothing outside."""
    return tl.load(p_part + i * rows, mask=mask, other=0.0).to(tl.float64)


@triton.jit
def logarithm(b_m, a, reference):
    """Of the factor that brings sums relative to the rounded ``m a`` to the row's reference."""
    return (b_m * a).to(tl.float64) - reference.to(tl.float64)


@triton.jit
def target_of(p_part, mask):
    """The target's logit from the one part that has it, and whether one has."""
    b_t = tl.load(p_part, mask=mask, other=float("nan"))
    has = b_t == b_t
    return tl.sum(tl.where(has, b_t, 0.0), axis=0), tl.max(has.to(tl.int32), axis=0)


@triton.jit
def store_statistic(p, stride, m, s, w, t, has, a, read, mask):
    """The four lines of a statistic; of a row that is left out, those that stand for nothing."""
    tl.store(p, tl.where(read, m, 0.0), mask=mask)
    tl.store(p + stride, tl.where(read, s.to(tl.float32), 1.0), mask=mask)
    tl.store(p + 2 * stride, tl.where(read, w.to(tl.float32), 0.0), mask=mask)
    tl.store(p + 3 * stride, tl.where(read, tl.where(has > 0, t * a, float("nan")), 0.0), mask=mask)


@triton.jit(do_not_specialize=["rows", "num_parts", "out_stride"])
def pair_merge_kernel(
    parts,
    column,
    gain,
    teacher_gain,
    out,
    rows,
    num_parts,
    out_stride,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """``[10, R]``: both statistics, and ``(a, l)`` of the KL between their references, in float64 until stored.

    Numbers that are small beside s, as those of a KL near 0 are, are differences here; float64 has the digits.
    """
    o_r, o_g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, AHEAD)
    m_r = o_r < rows
    part_stride = rows.to(tl.int64) * 10
    p_row = parts + o_r
    a, b = tl.load(gain + o_r, mask=m_r, other=1.0), tl.load(teacher_gain + o_r, mask=m_r, other=1.0)
    m = maximum_of(p_row, part_stride, o_g, m_r, num_parts, BLOCK, AHEAD) * a
    n = maximum_of(p_row + 4 * rows, part_stride, o_g, m_r, num_parts, BLOCK, AHEAD) * b
    base, teacher_base = finite_or_zero(m), finite_or_zero(n)
    zero = tl.zeros([BLOCK], dtype=tl.float64)
    s, w, q, v, sum_a, sum_l = zero, zero, zero, zero, zero, zero
    t, teacher_t = tl.zeros([BLOCK], dtype=tl.float32), tl.zeros([BLOCK], dtype=tl.float32)
    has, teacher_has = tl.zeros([BLOCK], dtype=tl.int32), tl.zeros([BLOCK], dtype=tl.int32)
    for g in range(0, num_parts, AHEAD):
        mask = (g + o_g < num_parts)[:, None] & m_r[None, :]
        p_part = p_row[None, :] + (g + o_g).to(tl.int64)[:, None] * part_stride
        b_m, b_n = tl.load(p_part, mask=mask, other=0.0), tl.load(p_part + 4 * rows, mask=mask, other=0.0)
        log_f = logarithm(b_m, a[None, :], base[None, :])
        log_g = logarithm(b_n, b[None, :], teacher_base[None, :])
        f, h = tl.where(mask, tl.exp(log_f), 0.0), tl.where(mask, tl.exp(log_g), 0.0)
        b_s, b_q = line(p_part, 1, rows, mask), line(p_part, 5, rows, mask)
        s += tl.sum(f * b_s, axis=0)
        q += tl.sum(h * b_q, axis=0)
        w += tl.sum(f * (line(p_part, 2, rows, mask) + log_f * b_s), axis=0)
        v += tl.sum(h * (line(p_part, 6, rows, mask) + log_g * b_q), axis=0)
        b_a, b_l = line(p_part, 8, rows, mask), line(p_part, 9, rows, mask)
        if REVERSE:
            delta = log_g - log_f
            sum_l += tl.sum(f * (b_l + delta * b_s), axis=0)
            sum_a += tl.sum(h * (b_s + (b_a + b_l)) - f * (b_s + (b_l + delta * b_s)), axis=0)
        else:
            delta = log_f - log_g
            sum_l += tl.sum(h * (b_l + delta * b_q), axis=0)
            sum_a += tl.sum(f * (b_q + (b_a + b_l)) - h * (b_q + (b_l + delta * b_q)), axis=0)
        part_t, part_has = target_of(p_part + 3 * rows, mask)
        t, has = t + part_t, has + part_has
        part_t, part_has = target_of(p_part + 7 * rows, mask)
        teacher_t, teacher_has = teacher_t + part_t, teacher_has + part_has
    # What a row to be left out was multiplied to does not matter.
    read = tl.load(column + o_r, mask=m_r, other=SKIP) != SKIP
    p_out = out + o_r
    store_statistic(p_out, out_stride, m, s, w, t, has, a, read, m_r)
    store_statistic(p_out + 4 * out_stride, out_stride, n, q, v, teacher_t, teacher_has, b, read, m_r)
    tl.store(p_out + 8 * out_stride, tl.where(read, sum_a.to(tl.float32), 0.0), mask=m_r)
    tl.store(p_out + 9 * out_stride, tl.where(read, sum_l.to(tl.float32), 0.0), mask=m_r)


# Whether columns are a multiple of 16 matters: only then are masked loads and stores as wide as they can be.
@triton.jit(do_not_specialize=["rows", "first"])
def pair_gradient_from_kernel(
    values,
    beside,
    parts,
    column,
    gain,
    teacher_gain,
    reference,
    log_sum,
    teacher_reference,
    teacher_log_sum,
    mean,
    by,
    plain,
    product,
    at_target,
    out,
    rows,
    columns,
    first,
    values_stride,
    beside_stride,
    out_stride,
    REVERSE: tl.constexpr,
    PRODUCT: tl.constexpr,
    SLAB: tl.constexpr,
    TILES: tl.constexpr,
):
    """dZ of TILES column tiles of a row, over the exponentials if ``out`` is where they are."""
    i_r, i_g = (tl.program_id(0) % rows).to(tl.int64), tl.program_id(0) // rows * TILES
    o_g, o_c = i_g + tl.arange(0, TILES), tl.arange(0, SLAB)
    a, b = tl.load(gain + i_r), tl.load(teacher_gain + i_r)
    log_z = tl.load(reference + i_r) + tl.load(log_sum + i_r)
    log_q = tl.load(teacher_reference + i_r) + tl.load(teacher_log_sum + i_r)
    m_g = o_g * SLAB < columns
    p_part = parts + o_g.to(tl.int64) * 10 * rows + i_r
    moved = tl.load(p_part, mask=m_g, other=0.0) * a - log_z
    teacher_moved = tl.load(p_part + 4 * rows, mask=m_g, other=0.0) * b - log_q
    i_c, row_mean, row_by = tl.load(column + i_r), tl.load(mean + i_r), tl.load(by + i_r)
    k, there = tl.load(plain + i_r), tl.load(at_target + i_r)
    o_v = o_g[:, None] * SLAB + o_c[None, :]
    m_v = o_v < columns
    b_e = tl.load(values + i_r * values_stride + o_v, mask=m_v, other=0.0).to(tl.float32)
    b_d = tl.load(beside + i_r * beside_stride + o_v, mask=m_v, other=0.0).to(tl.float32)
    factor = tl.exp2(moved * LOG2E)[:, None]
    p = b_e * factor
    if REVERSE:
        slope = -p * (b_d + (teacher_moved - moved)[:, None])
    else:
        teacher_factor = tl.exp2(teacher_moved * LOG2E)[:, None]
        slope = b_e * (factor - teacher_factor) - b_d * teacher_factor
    b_dz = row_by * (slope - p * row_mean)
    if PRODUCT:
        # Of z - m: the logarithm of what is stored, and of its factor, from log Z to the reference.
        z = tl.log2(tl.maximum(b_e, TINY)) * LN2 + (moved + tl.load(log_sum + i_r))[:, None]
        b_own = p * (k + tl.load(product + i_r) * z)
    else:
        b_own = p * k
    b_dz += tl.where(o_v + first == i_c, there, b_own)
    b_dz = tl.where(i_c == SKIP, 0.0, b_dz * a)
    tl.store(out + i_r * out_stride + o_v, b_dz.to(out.dtype.element_ty), mask=m_v)
