"""A student's logits beside its teacher's: their divergence, and its gradient. One row per program.

The formulas are those of ``backends/divergences.py``; names as in ``kernels.py``. ``d = log q - log p`` is made from
the difference of the logits, which is exact where they are close. Numbers of the acceptance lie behind those of the
divergence: ``shift``, ``mean`` and ``by`` are ``[R]`` without it and ``[2, R]`` with it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from logitless.backends.triton.kernels import FLOOR, LN2, LOG2E, SKIP, tanh, transform

NEAR: tl.constexpr = tl.constexpr(0.5)  # divergences.NEAR
NEAR_MIXED: tl.constexpr = tl.constexpr(0.1)
SAME: tl.constexpr = tl.constexpr(2.0**-17)  # divergences.SAME


@triton.jit
def series(d, C: tl.constexpr):
    """``sum over k of d^k / k! (1 + C + ... + C^(k-2))``, up to 9."""
    C2: tl.constexpr = 1 + C
    C3: tl.constexpr = 1 + C * C2
    C4: tl.constexpr = 1 + C * C3
    C5: tl.constexpr = 1 + C * C4
    C6: tl.constexpr = 1 + C * C5
    C7: tl.constexpr = 1 + C * C6
    C8: tl.constexpr = 1 + C * C7
    t = C7 / 40320 + d * (C8 / 362880)
    t = C5 / 720 + d * (C6 / 5040 + d * t)
    t = C3 / 24 + d * (C4 / 120 + d * t)
    return d * d * (0.5 + d * (C2 / 6 + d * t))


@triton.jit
def expm1_near(d):
    """``e^d - 1`` for ``|d|`` up to 0.5."""
    t = 1.0 / 720 + d * (1.0 / 5040 + d * (1.0 / 40320 + d * (1.0 / 362880)))
    t = 1.0 / 6 + d * (1.0 / 24 + d * (1.0 / 120 + d * t))
    return d * (1.0 + d * (0.5 + d * t))


@triton.jit
def log1p_near(x):
    """``log(1 + x)`` for ``|x|`` up to 0.11."""
    t = 1.0 / 5 + x * (-1.0 / 6 + x * (1.0 / 7 + x * (-1.0 / 8)))
    return x * (1.0 + x * (-0.5 + x * (1.0 / 3 + x * (-0.25 + x * t))))


@triton.jit
def h_near(x):
    """``(1 + x) log(1 + x) - x`` for ``|x|`` up to 0.11."""
    t = 1.0 / 30 + x * (-1.0 / 42 + x * (1.0 / 56 + x * (-1.0 / 72)))
    return x * x * (0.5 + x * (-1.0 / 6 + x * (1.0 / 12 + x * (-1.0 / 20 + x * t))))


@triton.jit
def log(x):
    return tl.log2(x) * LN2


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def family(p, q, log_p, log_q, d, C: tl.constexpr, FACTOR: tl.constexpr):
    """Term and ``p slope`` of the KLs and their kin."""
    near = tl.abs(d) < NEAR
    small = tl.where(near, d, 0.0)
    if C == 1.0:
        slope = p - q
        far = tl.where(q > 0, q * d, 0.0) + slope
        slope = tl.where(near, -p * expm1_near(small), slope)
    elif C == 0.0:
        slope = tl.where(p > 0, -p * d, 0.0)
        far = slope - (p - q)
    else:
        between = tl.where((p > 0) & (q > 0), exp((1 - C) * log_p + C * log_q), 0.0)
        far = ((1 - C) * p + C * q - between) / (C * (1 - C))
        slope = tl.where(near, -p * expm1_near(C * small) / C, (p - between) / C)
    term = tl.where(near, p * series(small, C), far)
    return FACTOR * term, FACTOR * slope


@triton.jit
def jensen_shannon(p, q, d, B: tl.constexpr):
    near = tl.abs(d) < NEAR_MIXED
    x = expm1_near(tl.where(near, d, 0.0))
    ratio = exp(-tl.abs(d))
    # log(m / p) and log(q / m), by whichever of p and q is larger.
    rest = log(tl.where(d > 0, B + (1 - B) * ratio, (1 - B) + B * ratio))
    over_p, over_q = tl.where(d > 0, d + rest, rest), tl.where(d > 0, -rest, d - rest)
    far = tl.where(q > 0, B * q * over_q, 0.0) - tl.where(p > 0, (1 - B) * p * over_p, 0.0)
    term = tl.where(near, p * (B * h_near(x) - h_near(B * x)), far)
    slope = tl.where(p > 0, (B - 1) * p * tl.where(near, log1p_near(B * x), over_p), 0.0)
    return term, slope


@triton.jit
def total_variation(p, q, d):
    near = tl.abs(d) < NEAR
    difference = tl.where(near, p * expm1_near(tl.where(near, d, 0.0)), q - p)
    sign = tl.where(d >= SAME, 1.0, 0.0) - tl.where(d <= -SAME, 1.0, 0.0)
    return 0.5 * tl.abs(difference), -0.5 * p * sign


@triton.jit
def compared(b_z, b_y, base, teacher_base, shift, KIND: tl.constexpr, C: tl.constexpr, FACTOR: tl.constexpr):
    """Term, ``p slope`` and p of a block. ``base`` is ``(m, log s)``."""
    log_p = (b_z - base[0]) - base[1]
    log_q = (b_y - teacher_base[0]) - teacher_base[1]
    p, q = exp(log_p), exp(log_q)
    # Where both are -inf, p and q are 0 and any finite d will do.
    nowhere = (b_z == float("-inf")) & (b_y == float("-inf"))
    d = (tl.where(nowhere, 0.0, b_y) - tl.where(nowhere, 0.0, b_z)) - shift
    if KIND == "family":
        term, slope = family(p, q, log_p, log_q, d, C, FACTOR)
    elif KIND == "jsd":
        term, slope = jensen_shannon(p, q, d, C)
    elif KIND == "tv":
        term, slope = total_variation(p, q, d)
    else:
        term, slope = p * 0.0, p * 0.0
    return term, slope, p, q, d


@triton.jit
def accepted(p, q, d, share):
    """Term of tv, the acceptance's ``p slope``, and what is accepted; the teacher's probabilities have a factor."""
    q, d = q * exp(share), d + share
    term, _ = total_variation(p, q, d)
    return term, p * tl.where(d >= SAME, 1.0, tl.where(d <= -SAME, 0.0, 0.5)), tl.minimum(p, q)


@triton.jit
def student_block(p_row, o_c, m_c, a, squash, SOFTCAP: tl.constexpr):
    """The student's logits, under a softcap its tanh of them, and ``z``."""
    b_s = tl.load(p_row + o_c, mask=m_c, other=0.0).to(tl.float32)
    if SOFTCAP:
        b_s = tanh(b_s * squash)
    return b_s, tl.where(m_c, b_s * a, float("-inf"))


@triton.jit
def teacher_block(p_row, o_c, m_c, teacher_columns, a, squash, SOFTCAP: tl.constexpr):
    """The teacher's ``z``; -inf where it has no column."""
    m_t = m_c & (o_c < teacher_columns)
    b_y = tl.load(p_row + o_c, mask=m_t, other=0.0, eviction_policy="evict_first").to(tl.float32)
    return tl.where(m_t, transform(b_y, a, squash, SOFTCAP), float("-inf"))


@triton.jit
def row_at(index, i_r, INDEXED: tl.constexpr):
    """Which row of a matrix row ``i_r`` of the problem is."""
    if INDEXED:
        return tl.load(index + i_r).to(tl.int64)
    else:
        return i_r


@triton.jit
def number(x, i_r, GIVEN: tl.constexpr):
    """A row's number, or 0 where none is given."""
    if GIVEN:
        return tl.load(x + i_r)
    else:
        return 0.0


@triton.jit
def three_of(x, y, z, i_r, GIVEN: tl.constexpr):
    return number(x, i_r, GIVEN), number(y, i_r, GIVEN), number(z, i_r, GIVEN)


@triton.jit
def pair_of(x, y, i_r):
    return tl.load(x + i_r), tl.load(y + i_r)


@triton.jit
def store_sums(p_out, stride, term, slope, tv, rising, overlap, ACCEPT: tl.constexpr):
    """The lines of a row; the last three with the acceptance."""
    tl.store(p_out, term)
    tl.store(p_out + stride, slope)
    if ACCEPT:
        tl.store(p_out + 2 * stride, tv)
        tl.store(p_out + 3 * stride, rising)
        tl.store(p_out + 4 * stride, overlap)


@triton.jit
def divergence_kernel(
    logits,
    index,
    column,
    gain,
    reference,
    log_sum,
    teacher,
    teacher_index,
    teacher_gain,
    teacher_reference,
    teacher_log_sum,
    shift,
    out,
    row_stride,
    teacher_stride,
    out_stride,
    columns,
    teacher_columns,
    squash,
    teacher_squash,
    INDEXED: tl.constexpr,
    TEACHER_INDEXED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    KIND: tl.constexpr,
    C: tl.constexpr,
    FACTOR: tl.constexpr,
    ACCEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The sums of a row's terms, and of its ``p slope``; with the acceptance its three."""
    i_r = tl.program_id(0).to(tl.int64)
    if tl.load(column + i_r) == SKIP:
        store_sums(out + i_r, out_stride, 0.0, 0.0, 0.0, 0.0, 0.0, ACCEPT)
    else:
        i_t, i_y = row_at(index, i_r, INDEXED), row_at(teacher_index, i_r, TEACHER_INDEXED)
        a, teacher_a = pair_of(gain, teacher_gain, i_r)
        base, teacher_base = pair_of(reference, log_sum, i_r), pair_of(teacher_reference, teacher_log_sum, i_r)
        moved, row_share = tl.load(shift + i_r), number(shift, i_r + tl.num_programs(0), ACCEPT)
        b_term = tl.zeros([BLOCK], dtype=tl.float32)
        b_slope = tl.zeros([BLOCK], dtype=tl.float32)
        b_tv = tl.zeros([BLOCK], dtype=tl.float32)
        b_rising = tl.zeros([BLOCK], dtype=tl.float32)
        b_accepted = tl.zeros([BLOCK], dtype=tl.float32)
        for c in tl.range(0, columns, BLOCK, num_stages=STAGES):
            o_c = c + tl.arange(0, BLOCK)
            m_c = o_c < columns
            b_x = tl.load(logits + i_t * row_stride + o_c, mask=m_c, other=0.0, eviction_policy="evict_first")
            b_z = tl.where(m_c, transform(b_x.to(tl.float32), a, squash, SOFTCAP), float("-inf"))
            p_y = teacher + i_y * teacher_stride
            b_y = teacher_block(p_y, o_c, m_c, teacher_columns, teacher_a, teacher_squash, TEACHER_SOFTCAP)
            term, slope, p, q, d = compared(b_z, b_y, base, teacher_base, moved, KIND, C, FACTOR)
            b_term += tl.where(m_c, term, 0.0)
            b_slope += tl.where(m_c, slope, 0.0)
            if ACCEPT:
                tv, rising, overlap = accepted(p, q, d, row_share)
                b_tv += tl.where(m_c, tv, 0.0)
                b_rising += tl.where(m_c, rising, 0.0)
                b_accepted += tl.where(m_c, overlap, 0.0)
        term, slope = tl.sum(b_term, axis=0), tl.sum(b_slope, axis=0)
        tv, rising, overlap = tl.sum(b_tv, axis=0), tl.sum(b_rising, axis=0), tl.sum(b_accepted, axis=0)
        store_sums(out + i_r, out_stride, term, slope, tv, rising, overlap, ACCEPT)


@triton.jit(do_not_specialize=["first"])
def divergence_gradient_kernel(
    logits,
    index,
    column,
    gain,
    reference,
    log_sum,
    teacher,
    teacher_index,
    teacher_gain,
    teacher_reference,
    teacher_log_sum,
    shift,
    mean,
    by,
    plain,
    product,
    at_target,
    out_index,
    out,
    row_stride,
    teacher_stride,
    out_stride,
    columns,
    teacher_columns,
    width,
    first,
    squash,
    teacher_squash,
    INDEXED: tl.constexpr,
    TEACHER_INDEXED: tl.constexpr,
    OUT_INDEXED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    TERMS: tl.constexpr,
    PRODUCT: tl.constexpr,
    KIND: tl.constexpr,
    C: tl.constexpr,
    FACTOR: tl.constexpr,
    ACCEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``by (p slope - p mean)``, and the terms of log-prob, entropy and log Z if there are any, of one row.

    ``out`` may lie over the logits, in fewer bytes per element too: blocks ascend, and are read before they are
    written.
    """
    i_r = tl.program_id(0).to(tl.int64)
    i_t, p_y = row_at(index, i_r, INDEXED), teacher + row_at(teacher_index, i_r, TEACHER_INDEXED) * teacher_stride
    p_out, i_c = out + row_at(out_index, i_r, OUT_INDEXED) * out_stride, tl.load(column + i_r)
    a, teacher_a = pair_of(gain, teacher_gain, i_r)
    base, teacher_base = pair_of(reference, log_sum, i_r), pair_of(teacher_reference, teacher_log_sum, i_r)
    moved, row_mean, row_by = three_of(shift, mean, by, i_r, True)
    row_share, mean_rising, by_accepted = three_of(shift, mean, by, i_r + tl.num_programs(0), ACCEPT)
    k, k_z, target = number(plain, i_r, TERMS), number(product, i_r, PRODUCT), number(at_target, i_r, TERMS)
    for c in range(0, width, BLOCK):
        o_c = c + tl.arange(0, BLOCK)
        m_c = (o_c < columns) & (i_c != SKIP)
        b_s, b_z = student_block(logits + i_t * row_stride, o_c, m_c, a, squash, SOFTCAP)
        b_y = teacher_block(p_y, o_c, m_c, teacher_columns, teacher_a, teacher_squash, TEACHER_SOFTCAP)
        _, slope, p, q, d = compared(b_z, b_y, base, teacher_base, moved, KIND, C, FACTOR)
        b_dz = tl.where(row_by == 0, 0.0, row_by * (slope - p * row_mean))
        if ACCEPT:
            _, rising, _ = accepted(p, q, d, row_share)
            b_dz += tl.where(by_accepted == 0, 0.0, by_accepted * (rising - p * mean_rising))
        if TERMS:
            b_k = k + k_z * tl.maximum(b_z - base[0], FLOOR) if PRODUCT else k
            b_dz += tl.where(o_c + first == i_c, target, p * b_k)
        b_dz = b_dz * a
        if SOFTCAP:
            b_dz = b_dz * (squash * (1.0 - b_s * b_s))
        # All of the block's threads must have read before any of them writes.
        tl.debug_barrier()
        tl.store(p_out + o_c, tl.where(m_c, b_dz, 0.0).to(out.dtype.element_ty), mask=o_c < width)
