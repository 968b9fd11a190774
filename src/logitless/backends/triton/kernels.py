"""The kernels. Each has a twin of a dozen lines in ``backends/reference.py``.

Names: ``i_`` program index, ``o_`` offsets, ``m_`` mask, ``b_`` block in registers, ``p_`` pointer; pointers are
lower case, compile-time constants upper case. Row offsets are int64 before they meet a stride: 14,134 rows of a
152k vocabulary already pass 2^31 elements. Every load is widened to float32 at once. No atomics, so the same input
gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
FLOOR: tl.constexpr = tl.constexpr(-1.0e30)  # softmax.FLOOR
TINY: tl.constexpr = tl.constexpr(2.0e-38)  # softmax.TINY
SKIP: tl.constexpr = tl.constexpr(-2)  # softmax.SKIP
FAR: tl.constexpr = tl.constexpr(40.0)  # e^-40 of a row's sum is nothing, and in range


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
        shift = tl.where(m == float("-inf"), 0.0, tl.maximum(m - top, FLOOR))
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


@triton.jit
def row_statistics(
    p_row,
    columns,
    a,
    squash,
    ENTROPY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``(m, s, w)`` of one row in one read."""
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
    return m, tl.sum(b_s, axis=0), tl.sum(b_w, axis=0)


@triton.jit
def target_logit(p_row, i_c, columns, a, squash, SOFTCAP: tl.constexpr):
    """``z`` at column ``i_c``, or NaN if it is not one of these columns."""
    t = float("nan")
    if (i_c >= 0) & (i_c < columns):
        t = transform(tl.load(p_row + i_c).to(tl.float32), a, squash, SOFTCAP)
    return t


@triton.jit
def store_statistics(p_out, part_stride, m, s, w, t):
    tl.store(p_out, m)
    tl.store(p_out + part_stride, s)
    tl.store(p_out + 2 * part_stride, w)
    tl.store(p_out + 3 * part_stride, t)


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
    INDEXED: tl.constexpr,
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
        store_statistics(p_out, part_stride, 0.0, 1.0, 0.0, 0.0)
    else:
        i_t = i_r
        if INDEXED:
            i_t = tl.load(index + i_r).to(tl.int64)
        p_row = logits + i_t * row_stride
        a = tl.load(gain + i_r)
        m, s, w = row_statistics(p_row, columns, a, squash, ENTROPY, SOFTCAP, BLOCK, STAGES)
        t = target_logit(p_row, i_c - first, columns, a, squash, SOFTCAP)
        store_statistics(p_out, part_stride, m, s, w, t)


@triton.jit
def gradient_block(
    b_x,
    at,
    a,
    m,
    log_sum,
    plain,
    product,
    at_target,
    square,
    constant,
    squash,
    PRODUCT: tl.constexpr,
    SQUARE: tl.constexpr,
    CONSTANT: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """``dz = p * (plain + product * (z - m) + square * p) + constant`` of a block of logits, times the slope.

    At the target it is ``at_target``; where z is -inf there is no constant.
    """
    b_y = b_x
    if SOFTCAP:
        b_y = tanh(b_x * squash)
    b_d = b_y * a - m
    # The gain goes to the row's numbers, and not to each of its elements.
    b_k = plain * a
    if PRODUCT:
        b_k = b_k + product * a * tl.maximum(b_d, FLOOR)
    b_p = tl.exp2((b_d - log_sum) * LOG2E)
    if SQUARE:
        b_k = b_k + square * a * b_p
    b_dz = b_p * b_k
    if CONSTANT:
        b_dz += tl.where(b_d == float("-inf"), 0.0, constant * a)
    b_dz = tl.where(at, at_target * a, b_dz)
    if SOFTCAP:
        b_dz = b_dz * (squash * (1.0 - b_y * b_y))
    return b_dz


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
    square,
    constant,
    slot,
    out,
    row_stride,
    out_stride,
    columns,
    first,
    width,
    squash,
    INDEXED: tl.constexpr,
    PRODUCT: tl.constexpr,
    SQUARE: tl.constexpr,
    CONSTANT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one row of ``out`` per program: ``dz = p * (plain + product * (z - m))``, ``at_target`` there.

    The block is read before the same place is written, so ``out`` may be ``logits``. Rows without a slot, skipped
    rows and padding columns get zero. Without an index the load of the block waits for no other load.
    """
    num_blocks = tl.cdiv(width, BLOCK)
    i_t = (tl.program_id(0) // num_blocks).to(tl.int64)
    o_c = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    m_out = o_c < width
    p_out = out + i_t * out_stride + o_c
    i_r = i_t
    if INDEXED:
        i_r = tl.load(slot + i_t)
        i_c = tl.full([], SKIP, dtype=tl.int64)
        if i_r >= 0:
            i_c = tl.load(column + i_r)
        if i_c != SKIP:
            i_t = tl.load(index + i_r).to(tl.int64)
        i_r = tl.maximum(i_r, 0)
    else:
        i_c = tl.load(column + i_r)
    # Rows that are not scored get zeros and, where that is known before, are not read.
    num_c = tl.where(i_c != SKIP, columns, 0)
    m_c = o_c < (num_c if INDEXED else columns)
    b_x = tl.load(logits + i_t * row_stride + o_c, mask=m_c, other=0.0, eviction_policy="evict_first").to(tl.float32)
    b_dz = gradient_block(
        b_x,
        o_c + first == i_c,
        tl.load(gain + i_r),
        tl.load(reference + i_r),
        tl.load(log_sum + i_r),
        tl.load(plain + i_r),
        tl.load(product + i_r) if PRODUCT else 0.0,
        tl.load(at_target + i_r),
        tl.load(square + i_r) if SQUARE else 0.0,
        tl.load(constant + i_r) if CONSTANT else 0.0,
        squash,
        PRODUCT,
        SQUARE,
        CONSTANT,
        SOFTCAP,
    )
    b_dz = tl.where(o_c < num_c, b_dz, 0.0)
    tl.store(p_out, b_dz.to(out.dtype.element_ty), mask=m_out, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["first"])
def narrowing_kernel(
    logits,
    column,
    gain,
    reference,
    log_sum,
    plain,
    product,
    at_target,
    square,
    constant,
    out,
    row_stride,
    out_stride,
    columns,
    first,
    squash,
    PRODUCT: tl.constexpr,
    SQUARE: tl.constexpr,
    CONSTANT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row per program: its gradient, in fewer bytes per element, over the start of the row's own memory.

    Blocks ascend, and a block is in registers before it is written: its place was read by then.
    """
    i_r = tl.program_id(0).to(tl.int64)
    i_c = tl.load(column + i_r)
    a, m, s = tl.load(gain + i_r), tl.load(reference + i_r), tl.load(log_sum + i_r)
    k, target = tl.load(plain + i_r), tl.load(at_target + i_r)
    k_z = tl.load(product + i_r) if PRODUCT else 0.0
    k_p = tl.load(square + i_r) if SQUARE else 0.0
    k_1 = tl.load(constant + i_r) if CONSTANT else 0.0
    o_b = tl.arange(0, BLOCK)
    for c in range(0, columns, BLOCK):
        o_c = c + o_b
        m_c = o_c < columns
        b_x = tl.load(logits + i_r * row_stride + o_c, mask=m_c, other=0.0).to(tl.float32)
        at = o_c + first == i_c
        b_dz = gradient_block(b_x, at, a, m, s, k, k_z, target, k_p, k_1, squash, PRODUCT, SQUARE, CONSTANT, SOFTCAP)
        b_dz = tl.where(i_c == SKIP, 0.0, b_dz)
        # All of the block's threads must have read before any of them writes.
        tl.debug_barrier()
        tl.store(out + i_r * out_stride + o_c, b_dz.to(out.dtype.element_ty), mask=m_c)


@triton.jit
def row_exponentials(
    p_row,
    p_out,
    i_c,
    columns,
    a,
    squash,
    base,
    most,
    ENTROPY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One read and one write of a row: with ``d = z - base``, but ``most`` at most, ``(max z, sum e^d, sum e^d d)``.

    Writes ``e^d``, times ``1 - tanh^2`` if asked for, and 0 at column ``i_c``.
    """
    b_m = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    b_s = tl.zeros([BLOCK], dtype=tl.float32)
    b_w = tl.zeros([BLOCK], dtype=tl.float32)
    for c in tl.range(0, columns, BLOCK, num_stages=STAGES):
        o_c = c + tl.arange(0, BLOCK)
        m_c = o_c < columns
        b_y = tl.load(p_row + o_c, mask=m_c, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if SOFTCAP:
            b_y = tanh(b_y * squash)
        b_z = tl.where(m_c, b_y * a, float("-inf"))
        b_d = tl.minimum(b_z - base, most, propagate_nan=tl.PropagateNan.ALL)
        b_e = tl.exp2(b_d * LOG2E)
        b_m = tl.maximum(b_m, b_z)
        b_s += b_e
        if ENTROPY:
            b_w += b_e * tl.maximum(b_d, FLOOR)
        if SLOPE:
            b_e = b_e * (1.0 - b_y * b_y)
        tl.store(p_out + o_c, tl.where(o_c == i_c, 0.0, b_e).to(p_out.dtype.element_ty), mask=m_c)
    return tl.max(b_m, axis=0), tl.sum(b_s, axis=0), tl.sum(b_w, axis=0)


@triton.jit
def finite_or_zero(x):
    """The reference; 0 for a row whose logits so far were all -inf."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit(do_not_specialize=["part_stride", "first"])
def exponentials_kernel(
    logits,
    column,
    gain,
    stats,
    before,
    reference,
    sums,
    out,
    row_stride,
    out_stride,
    sums_stride,
    columns,
    first,
    part_stride,
    sums_columns,
    squash,
    slack,
    drop,
    ENTROPY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SLOPE: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row per program: its statistic and ``e^(z - reference)``, in one read if the reference is near enough.

    The reference comes from the row's earlier tiles. Where the row's maximum lies too far from it, the row is done
    again with that maximum. The target's place gets 0, and so does all of a skipped row.
    """
    i_r = tl.program_id(0).to(tl.int64)
    i_c = tl.load(column + i_r)
    old = tl.load(before + i_r)
    p_row, p_out = logits + i_r * row_stride, out + i_r * out_stride
    if i_c == SKIP:
        o_c = tl.arange(0, BLOCK)
        for c in range(0, columns, BLOCK):
            tl.store(p_out + c + o_c, tl.zeros([BLOCK], dtype=out.dtype.element_ty), mask=c + o_c < columns)
        store_statistics(stats + i_r, part_stride, 0.0, 1.0, 0.0, 0.0)
        tl.store(reference + i_r, old)
    else:
        a = tl.load(gain + i_r)
        new, base = old, finite_or_zero(old)
        # Past the slack the row is done again, so there is no need to let its exponentials overflow.
        most = slack + 1.0
        m, s, w = row_exponentials(
            p_row, p_out, i_c - first, columns, a, squash, base, most, ENTROPY, SOFTCAP, SLOPE, BLOCK, STAGES
        )
        if (m > old + slack) | (m < old - drop):
            new, base = m, finite_or_zero(m)
            m, s, w = row_exponentials(
                p_row, p_out, i_c - first, columns, a, squash, base, most, ENTROPY, SOFTCAP, SLOPE, BLOCK, 1
            )
            if SUMS:
                factor = tl.exp2((old - new) * LOG2E)
                o_d = tl.arange(0, BLOCK)
                for d in range(0, sums_columns, BLOCK):
                    p_sum = sums + i_r * sums_stride + d + o_d
                    b_sum = tl.load(p_sum, mask=d + o_d < sums_columns, other=0.0)
                    tl.store(p_sum, b_sum * factor, mask=d + o_d < sums_columns)
        tl.store(reference + i_r, new)
        # The statistic is relative to the maximum, or to the reference if the tile lies too far below it to matter.
        shift = tl.where(base - m <= FAR, base - m, 0.0)
        factor = tl.exp2(shift * LOG2E)
        top = tl.where(base - m <= FAR, m, new)
        t = target_logit(p_row, i_c - first, columns, a, squash, SOFTCAP)
        store_statistics(stats + i_r, part_stride, top, factor * s, factor * (w + shift * s), t)


@triton.jit(do_not_specialize=["first"])
def gradient_from_kernel(
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
    slab,
    first,
    square,
    PRODUCT: tl.constexpr,
    SQUARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One slab of one row per program: the gradient from ``e^(z - moved)``, ``at_target`` at the target.

    ``p = e e^(moved - m) / s`` and ``z - m = log e + moved - m``. ``out`` may be the exponentials themselves.
    """
    num_slabs = tl.cdiv(columns, slab)
    i_r = (tl.program_id(0) // num_slabs).to(tl.int64)
    i_s = tl.program_id(0) % num_slabs
    i_c = tl.load(column + i_r)
    start, stop = i_s * slab, tl.minimum(columns, (i_s + 1) * slab)
    if i_c == SKIP:
        for c in range(start, stop, BLOCK):
            o_c = c + tl.arange(0, BLOCK)
            tl.store(out + i_r * out_stride + o_c, tl.zeros([BLOCK], dtype=out.dtype.element_ty), mask=o_c < stop)
    else:
        a = tl.load(gain + i_r)
        base = tl.load(moved + i_s * moved_stride + i_r)
        # Where all of a slab was -inf its exponentials are 0, and any shift will do that does not overflow.
        shift = tl.where(base == float("-inf"), 0.0, tl.maximum(base - tl.load(reference + i_r), FLOOR))
        scale = tl.exp2((shift - tl.load(log_sum + i_r)) * LOG2E) * a
        k, target = tl.load(plain + i_r), tl.load(at_target + i_r) * a
        k_z = 0.0
        if PRODUCT:
            k_z = tl.load(product + i_r)
            k += k_z * shift
            k_z *= LN2 * scale
        k *= scale
        k_p = 0.0
        if SQUARE:
            k_p = tl.load(square + i_r) * scale * tl.exp2((shift - tl.load(log_sum + i_r)) * LOG2E)
        for c in range(start, stop, BLOCK):
            o_c = c + tl.arange(0, BLOCK)
            m_c = o_c < stop
            b_e = tl.load(exponentials + i_r * row_stride + o_c, mask=m_c, other=1.0).to(tl.float32)
            b_k = k
            if PRODUCT:
                b_k = k + k_z * tl.log2(tl.maximum(b_e, TINY))
            if SQUARE:
                b_k = b_k + k_p * b_e
            b_dz = tl.where(o_c + first == i_c, target, b_e * b_k)
            tl.store(out + i_r * out_stride + o_c, b_dz.to(out.dtype.element_ty), mask=m_c)


INTERPRETED = not isinstance(statistics_kernel, JITFunction)
"""Whether the kernels run on CPU, in Triton's interpreter."""
