"""The kernels. Each has a twin of a dozen lines in ``backends/reference.py``.

Names: ``i_`` program index, ``o_`` offsets, ``m_`` mask, ``b_`` block in registers, ``p_`` pointer; pointers are
lower case, compile-time constants upper case. Row offsets are int64 before they meet a stride: 14,134 rows of a
152k vocabulary already pass 2^31 elements. Every load is widened to float32 at once. No atomics, so the same input
gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
FLOOR: tl.constexpr = tl.constexpr(-1.0e30)  # softmax.FLOOR
TINY: tl.constexpr = tl.constexpr(2.0e-38)  # softmax.TINY
SKIP: tl.constexpr = tl.constexpr(-2)  # softmax.SKIP


@triton.jit
def tanh(x):
    """tanh to a few roundings of float32: near 0, where the closed form cancels, a least-squares polynomial in x^2."""
    y = x * x
    p = -0.05373915657401085 + y * (0.020637862384319305 + y * -0.005704042501747608)
    near = x + x * (y * (-0.3333328068256378 + y * (0.133314311504364 + y * p)))
    far = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def transform(x, a, squash, SOFTCAP: tl.constexpr):
    """``z`` from a raw logit."""
    if SOFTCAP:
        return tanh(x * squash) * a
    else:
        return x * a


@triton.jit
def accumulate(b_z, m, b_s, b_w, ENTROPY: tl.constexpr):
    """Merge one block into the running statistic ``(m, s, w)``; s and w stay spread over the block's lanes."""
    top = tl.max(b_z, axis=0)
    # A new maximum is rare after the first blocks, so the rescaling is branched around rather than multiplied by 1.
    if top > m:
        # Nothing finite so far means that the sums are still zero, and any finite shift will do.
        shift = tl.where(m == float("-inf"), 0.0, m - top)
        factor = tl.exp2(shift * LOG2E)
        if ENTROPY:
            b_w = factor * (b_w + shift * b_s)
        b_s = factor * b_s
        m = top
    # While there is only -inf, 0 stands in for the reference, so that -inf - (-inf) never occurs.
    b_d = b_z - tl.where(m == float("-inf"), 0.0, m)
    b_e = tl.exp2(b_d * LOG2E)
    if ENTROPY:
        b_w += b_e * tl.maximum(b_d, FLOOR)
    b_s += b_e
    return m, b_s, b_w


@triton.jit(do_not_specialize=["part_stride", "first"])
def statistics_kernel(
    logits,
    index,
    column,
    gain,
    stats,
    row_stride,
    columns,
    first,
    part_stride,
    squash,
    ENTROPY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row per program: ``m = max z; s = exp(z - m).sum(); w = (exp(z - m) * (z - m)).sum(); t = z[column]``."""
    i_r = tl.program_id(0).to(tl.int64)
    i_c = tl.load(column + i_r)
    p_out = stats + i_r
    if i_c == SKIP:
        tl.store(p_out, 0.0)
        tl.store(p_out + part_stride, 1.0)
        tl.store(p_out + 2 * part_stride, 0.0)
        tl.store(p_out + 3 * part_stride, 0.0)
    else:
        p_row = logits + tl.load(index + i_r).to(tl.int64) * row_stride
        a = tl.load(gain + i_r)
        o_c = tl.arange(0, BLOCK)
        m = float("-inf")
        b_s = tl.zeros([BLOCK], dtype=tl.float32)
        b_w = tl.zeros([BLOCK], dtype=tl.float32)
        whole = (columns // BLOCK) * BLOCK
        for c in tl.range(0, whole, BLOCK, num_stages=STAGES):
            b_x = tl.load(p_row + c + o_c, eviction_policy="evict_first").to(tl.float32)
            m, b_s, b_w = accumulate(transform(b_x, a, squash, SOFTCAP), m, b_s, b_w, ENTROPY)
        if whole < columns:
            m_c = whole + o_c < columns
            b_x = tl.load(p_row + whole + o_c, mask=m_c, other=0.0).to(tl.float32)
            b_z = tl.where(m_c, transform(b_x, a, squash, SOFTCAP), float("-inf"))
            m, b_s, b_w = accumulate(b_z, m, b_s, b_w, ENTROPY)
        t = float("nan")
        i_c -= first
        if (i_c >= 0) & (i_c < columns):
            t = transform(tl.load(p_row + i_c).to(tl.float32), a, squash, SOFTCAP)
        tl.store(p_out, m)
        tl.store(p_out + part_stride, tl.sum(b_s, axis=0))
        tl.store(p_out + 2 * part_stride, tl.sum(b_w, axis=0))
        tl.store(p_out + 3 * part_stride, t)


@triton.jit(do_not_specialize=["first"])
def gradient_kernel(
    logits,
    index,
    column,
    gain,
    reference,
    log_sum,
    plain,
    product,
    at_target,
    slot,
    out,
    row_stride,
    out_stride,
    columns,
    first,
    width,
    squash,
    PRODUCT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one row of ``out`` per program: ``dz = p * (plain + product * (z - m))``, ``at_target`` there.

    The block is read before the same place is written, so ``out`` may be ``logits``. Rows without a slot, skipped
    rows and padding columns get zero.
    """
    num_blocks = tl.cdiv(width, BLOCK)
    i_t = (tl.program_id(0) // num_blocks).to(tl.int64)
    o_c = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    m_out = o_c < width
    p_out = out + i_t * out_stride + o_c
    i_r = tl.load(slot + i_t)
    i_c = tl.full([], SKIP, dtype=tl.int64)
    if i_r >= 0:
        i_c = tl.load(column + i_r)
    if i_c == SKIP:
        tl.store(p_out, tl.zeros([BLOCK], dtype=out.dtype.element_ty), mask=m_out)
    else:
        a = tl.load(gain + i_r)
        m_c = o_c < columns
        p_row = logits + tl.load(index + i_r).to(tl.int64) * row_stride
        b_x = tl.load(p_row + o_c, mask=m_c, other=0.0, eviction_policy="evict_first").to(tl.float32)
        b_y = b_x
        if SOFTCAP:
            b_y = tanh(b_x * squash)
        b_d = b_y * a - tl.load(reference + i_r)
        b_p = tl.exp2((b_d - tl.load(log_sum + i_r)) * LOG2E)
        b_k = tl.load(plain + i_r)
        if PRODUCT:
            b_k += tl.load(product + i_r) * tl.maximum(b_d, FLOOR)
        b_dz = b_p * b_k
        b_dz = tl.where(o_c + first == i_c, tl.load(at_target + i_r), b_dz) * a
        if SOFTCAP:
            b_dz = b_dz * (squash * (1.0 - b_y * b_y))
        b_dz = tl.where(m_c, b_dz, 0.0)
        tl.store(p_out, b_dz.to(out.dtype.element_ty), mask=m_out, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["first"])
def exponentials_kernel(
    logits,
    column,
    gain,
    reference,
    out,
    row_stride,
    out_stride,
    columns,
    first,
    squash,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one row per program: ``e^(z - reference)``, times ``1 - tanh^2`` if softcapped, 0 at the target."""
    num_blocks = tl.cdiv(columns, BLOCK)
    i_r = (tl.program_id(0) // num_blocks).to(tl.int64)
    o_c = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < columns
    i_c = tl.load(column + i_r)
    b_x = tl.load(logits + i_r * row_stride + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_y = b_x
    if SOFTCAP:
        b_y = tanh(b_x * squash)
    b_e = tl.exp2((b_y * tl.load(gain + i_r) - tl.load(reference + i_r)) * LOG2E)
    if SOFTCAP:
        b_e = b_e * (1.0 - b_y * b_y)
    b_e = tl.where((o_c + first == i_c) | (i_c == SKIP), 0.0, b_e)
    tl.store(out + i_r * out_stride + o_c, b_e.to(out.dtype.element_ty), mask=m_c)


@triton.jit(do_not_specialize=["first"])
def gradient_from_kernel(
    exponentials,
    column,
    gain,
    shift,
    scale,
    plain,
    product,
    at_target,
    out,
    row_stride,
    out_stride,
    columns,
    first,
    PRODUCT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one row per program: ``dz = e scale (plain + product (log e + shift))``, ``at_target`` there."""
    num_blocks = tl.cdiv(columns, BLOCK)
    i_r = (tl.program_id(0) // num_blocks).to(tl.int64)
    o_c = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < columns
    i_c = tl.load(column + i_r)
    b_e = tl.load(exponentials + i_r * row_stride + o_c, mask=m_c, other=1.0).to(tl.float32)
    b_k = tl.load(plain + i_r)
    if PRODUCT:
        b_k += tl.load(product + i_r) * (tl.log2(tl.maximum(b_e, TINY)) * LN2 + tl.load(shift + i_r))
    b_dz = b_e * tl.load(scale + i_r) * b_k
    b_dz = tl.where(o_c + first == i_c, tl.load(at_target + i_r), b_dz) * tl.load(gain + i_r)
    b_dz = tl.where(i_c == SKIP, 0.0, b_dz)
    tl.store(out + i_r * out_stride + o_c, b_dz.to(out.dtype.element_ty), mask=m_c)


@triton.jit(do_not_specialize=["num_rows"])
def move_kernel(reference, maximum, factor, num_rows, slack, BLOCK: tl.constexpr):
    """A running reference: up to the maximum where that exceeds it by more than slack; ``factor = e^(old - new)``."""
    o_r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_r = o_r < num_rows
    b_old = tl.load(reference + o_r, mask=m_r, other=0.0)
    b_top = tl.load(maximum + o_r, mask=m_r, other=0.0)
    b_moves = (b_top > b_old + slack) & (b_top != float("-inf"))
    b_new = tl.where(b_moves, b_top, b_old)
    tl.store(reference + o_r, b_new, mask=m_r)
    tl.store(factor + o_r, tl.where(b_moves, tl.exp2((b_old - b_new) * LOG2E), 1.0), mask=m_r)


@triton.jit
def rescale_kernel(x, factor, row_stride, columns, BLOCK: tl.constexpr):
    """``x[i] *= factor[i]``, one row per program; rows with factor 1, nearly all of them, are not read."""
    i_r = tl.program_id(0).to(tl.int64)
    f = tl.load(factor + i_r)
    if f != 1.0:
        for c in range(0, columns, BLOCK):
            o_c = c + tl.arange(0, BLOCK)
            p_x = x + i_r * row_stride + o_c
            tl.store(p_x, tl.load(p_x, mask=o_c < columns, other=0.0) * f, mask=o_c < columns)
