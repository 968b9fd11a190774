"""Two products in one tile: a student's logits and its teacher's, in registers side by side, become their divergence.

    X W^T and Y U^T  ->  two tiles [BR, BC]  ->  dZ of the divergence, or the sums of a KL with both statistics

A KL needs no normaliser while it is summed. With ``d = (z_q - n) - (z_p - m)`` from the references of a tile

    KL(p || q) = log(1 + a + l) - l    s a = sum of e (e^d - 1 - d)    s l = sum of e d    s = sum of e

for ``e = e^(z_p - m)``, whatever the references. Where both models agree up to a constant, so do their maxima, d is
near 0 and so are all three: what is small is summed as such. Two parts of a row are brought to one pair of references
when they are merged, in float64 (``pair_part_kernels.py``). KL(q || p) is the same with the two exchanged.

Names as in ``kernels.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from logitless.backends.triton.divergence_kernels import accepted, compared
from logitless.backends.triton.kernels import LN2, LOG2E, SKIP, finite_or_zero, tanh
from logitless.backends.triton.product_kernels import place, store_tile
from logitless.backends.triton.tile_ends import NO_TARGET, any_of, multiply_add, row_number, store_part, target_within

NEAR: tl.constexpr = tl.constexpr(0.5)  # divergences.NEAR
NOTHING: tl.constexpr = tl.constexpr(-1000.0)  # whose exponential is 0


@triton.jit
def both_tiles(
    hidden,
    weight,
    other,
    other_weight,
    r,
    c,
    WIDTH: tl.constexpr,
    OTHER: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    JOINT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """``[BR, BC]`` raw logits of both models. JOINT, both are summed in one loop, which needs equal widths."""
    b_x = tl.zeros([BR, BC], dtype=tl.float32)
    b_y = tl.zeros([BR, BC], dtype=tl.float32)
    if JOINT:
        for d in range(0, WIDTH, BD):
            b_x = added(hidden.load([r, d]), weight.load([c, d]), b_x, WIDEN)
            b_y = added(other.load([r, d]), other_weight.load([c, d]), b_y, WIDEN)
    else:
        for d in range(0, WIDTH, BD):
            b_x = added(hidden.load([r, d]), weight.load([c, d]), b_x, WIDEN)
        for d in range(0, OTHER, BD):
            b_y = added(other.load([r, d]), other_weight.load([c, d]), b_y, WIDEN)
    return b_x, b_y


@triton.jit
def added(b_h, b_w, b_x, WIDEN: tl.constexpr):
    if WIDEN:
        # The interpreter multiplies the bit patterns of bfloat16.
        return tl.dot(b_h.to(tl.float32), b_w.to(tl.float32).T, b_x, input_precision="ieee")
    return tl.dot(b_h, b_w.T, b_x)


@triton.jit
def expm1_lean(d):
    """``e^d - 1`` for ``|d|`` up to 0.25, to the digits of 16 bits."""
    return d * (1.0 + d * (0.5 + d * (1.0 / 6 + d * (1.0 / 24))))


@triton.jit
def lean_slope(p, b_y, d, teacher_k, teacher_log_z, KIND: tl.constexpr, C: tl.constexpr):
    """``p slope`` of the KLs and of jsd, to the digits of 16 bits."""
    if KIND == "reverse_kl":
        return -p * d
    elif KIND == "forward_kl":
        q = tl.exp2(b_y * teacher_k - teacher_log_z)
        return tl.where(tl.abs(d) < 0.25, -p * expm1_lean(d), p - q)
    else:
        ratio = tl.exp2(tl.abs(d) * (-LOG2E))
        # log(m / p), by whichever of p and q is larger.
        rest = tl.log2(tl.where(d > 0, C + (1 - C) * ratio, (1 - C) + C * ratio)) * LN2
        over_p = tl.where(tl.abs(d) < 0.03, C * d * (1.0 + d * (0.5 - 0.5 * C)), rest + tl.maximum(d, 0.0))
        return (C - 1) * p * over_p


@triton.jit
def squashed(b_x, squash, SOFTCAP: tl.constexpr):
    """Raw logits, or what a softcap's tanh makes of them."""
    if SOFTCAP:
        b_x = tanh(b_x * squash)
    return b_x


@triton.jit
def two_numbers(x, y, o_r, m_r):
    """``[BR, 1]`` two numbers of some rows."""
    return row_number(x, o_r, m_r), row_number(y, o_r, m_r)


@triton.jit
def slope_of(
    b_x,
    b_y,
    a,
    b,
    base,
    teacher_base,
    shift,
    KIND: tl.constexpr,
    C: tl.constexpr,
    FACTOR: tl.constexpr,
    LEAN: tl.constexpr,
):
    """``p slope``, p, and where that is not LEAN q and d, of a tile. ``base`` is ``(m, log s)``."""
    if LEAN:
        # Differences of sums: off by 2^-24 of the size of z, nothing beside the rounding of dZ.
        p = tl.exp2(b_x * (a * LOG2E) - (base[0] + base[1]) * LOG2E)
        d = (b_y * b - b_x * a) - shift
        slope = lean_slope(p, b_y, d, b * LOG2E, (teacher_base[0] + teacher_base[1]) * LOG2E, KIND, C)
        return slope, p, p, d
    else:
        _, slope, p, q, d = compared(b_x * a, b_y * b, base, teacher_base, shift, KIND, C, FACTOR)  # pyright: ignore[reportGeneralTypeIssues]
        return slope, p, q, d


@triton.jit
def divergence_part(slope, p, q, d, shift, mean, by, o_r, m_r, rows, ACCEPT: tl.constexpr):
    """``by (p slope - p mean)``; with the acceptance, whose numbers lie behind those of the divergence, its own."""
    b_mean, b_by = row_number(mean, o_r, m_r), row_number(by, o_r, m_r)
    b_dz = b_by * (slope - p * b_mean)
    if ACCEPT:
        _, rising, _ = accepted(p, q, d, row_number(shift + rows, o_r, m_r))
        b_mean, b_by = row_number(mean + rows, o_r, m_r), row_number(by + rows, o_r, m_r)
        b_dz += b_by * (rising - p * b_mean)
    return b_dz


@triton.jit
def own_part(b_x, p, a, m, plain, product, o_r, m_r, PRODUCT: tl.constexpr):
    """``p (plain + product (z - m))``."""
    b_k = row_number(plain, o_r, m_r)
    if PRODUCT:
        b_product = row_number(product, o_r, m_r)
        return p * (b_x * (b_product * a) + (b_k - b_product * m))
    else:
        return p * b_k


@triton.jit
def with_own(b_dz, b_own, b_there, b_target, first, c, columns, BC: tl.constexpr):
    """dZ of the divergence and the other terms, with those of the targets in their places and none in rows to skip."""
    b_at, skipped = target_within(b_target, first, c, columns, BC), b_target == SKIP
    if any_of(skipped | (b_at != NO_TARGET)):
        b_own = tl.where(tl.arange(0, BC)[None, :] == b_at[:, None], b_there, b_own)
        b_own, b_dz = tl.where(skipped[:, None], 0.0, b_own), tl.where(skipped[:, None], 0.0, b_dz)
    return b_dz + b_own


@triton.jit(do_not_specialize=["rows", "columns", "first"])
def pair_gradient_kernel(
    hidden,
    weight,
    other,
    other_weight,
    column,
    gain,
    teacher_gain,
    reference,
    log_sum,
    teacher_reference,
    teacher_log_sum,
    shift,
    mean,
    by,
    plain,
    product,
    at_target,
    out,
    rows,
    columns,
    first,
    out_stride,
    squash,
    teacher_squash,
    WIDTH: tl.constexpr,
    OTHER: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BAND: tl.constexpr,
    JOINT: tl.constexpr,
    WIDEN: tl.constexpr,
    FLATTEN: tl.constexpr,
    KIND: tl.constexpr,
    C: tl.constexpr,
    FACTOR: tl.constexpr,
    LEAN: tl.constexpr,
    ACCEPT: tl.constexpr,
    PRODUCT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """``by (p slope - p mean)`` and the terms of log-prob, entropy and log Z, of all rows and columns."""
    num_blocks, num_tiles = tl.cdiv(rows, BR), tl.cdiv(columns, BC)
    for tile in tl.range(tl.program_id(0), num_blocks * num_tiles, tl.num_programs(0), flatten=FLATTEN):
        i_r, i_c = place(tile, num_blocks, num_tiles, BAND)
        r, c = i_r * BR, i_c * BC
        b_x, b_y = both_tiles(hidden, weight, other, other_weight, r, c, WIDTH, OTHER, BR, BC, BD, JOINT, WIDEN)
        b_x, b_y = squashed(b_x, squash, SOFTCAP), squashed(b_y, teacher_squash, TEACHER_SOFTCAP)
        o_r = r + tl.arange(0, BR)
        m_r = o_r < rows
        a, b = two_numbers(gain, teacher_gain, o_r, m_r)
        base, teacher_base = (
            two_numbers(reference, log_sum, o_r, m_r),
            two_numbers(teacher_reference, teacher_log_sum, o_r, m_r),
        )
        b_shift = row_number(shift, o_r, m_r)
        slope, p, q, d = slope_of(b_x, b_y, a, b, base, teacher_base, b_shift, KIND, C, FACTOR, LEAN)
        b_dz = divergence_part(slope, p, q, d, shift, mean, by, o_r, m_r, rows, ACCEPT)
        b_own = own_part(b_x, p, a, base[0], plain, product, o_r, m_r, PRODUCT)
        b_there = row_number(at_target, o_r, m_r)
        b_target = tl.load(column + o_r, mask=m_r, other=SKIP)
        b_dz = with_own(b_dz, b_own, b_there, b_target, first, c, columns, BC) * a
        if SOFTCAP:
            b_dz = b_dz * (squash * (1.0 - b_x * b_x))
        store_tile(out, b_dz, r, c, rows, columns, out_stride, BR, BC, DESCRIBED)


@triton.jit
def from_maximum(b_x, a, left, o_c, EVEN: tl.constexpr, WIDEN: tl.constexpr):
    """Each row's maximum, ``a (x - maximum)``, and e to that power; nothing past the last column.

    Not in powers of two: a rounded ``a log2 e`` would scale all logits of a row, and their divergence with them.
    """
    if not EVEN:
        b_x = tl.where((o_c < left)[None, :], b_x, float("-inf"))
    base = finite_or_zero(tl.max(b_x, axis=1))
    b_u = multiply_add(b_x, a[:, None], (-(base * a))[:, None], WIDEN)
    if not EVEN:
        b_u = tl.maximum(b_u, NOTHING)
    return base, b_u, tl.exp2(b_u * LOG2E)


@triton.jit
def target_logit(b_x, b_at, o_c):
    t = tl.sum(tl.where(o_c[None, :] == b_at[:, None], b_x, 0.0), axis=1)
    return tl.where(b_at == NO_TARGET, float("nan"), t)


@triton.jit
def kl_sums(b_e, b_f, d):
    """``(a, l)`` of a tile, from the first model's e and the second's f."""
    near = tl.abs(d) < NEAR
    t = 1.0 / 720 + d * (1.0 / 5040 + d * (1.0 / 40320 + d * (1.0 / 362880)))
    t = d * d * (0.5 + d * (1.0 / 6 + d * (1.0 / 24 + d * (1.0 / 120 + d * t))))
    b_l = b_e * d
    return tl.sum(tl.where(near, b_e * t, (b_f - b_e) - b_l), axis=1), tl.sum(b_l, axis=1)


@triton.jit(do_not_specialize=["rows", "columns", "first"])
def pair_sums_kernel(
    hidden,
    weight,
    other,
    other_weight,
    column,
    gain,
    teacher_gain,
    parts,
    values,
    beside,
    rows,
    columns,
    first,
    values_stride,
    beside_stride,
    squash,
    teacher_squash,
    WIDTH: tl.constexpr,
    OTHER: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BAND: tl.constexpr,
    JOINT: tl.constexpr,
    WIDEN: tl.constexpr,
    FLATTEN: tl.constexpr,
    REVERSE: tl.constexpr,
    ENTROPY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    EVEN: tl.constexpr,
    STORED: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Part ``[10, R]`` of each column tile: ``(m, s, w, t)`` of the student, of the teacher, and ``(a, l)``.

    m and t are before the gain, sums relative to the rounded ``m a``. STORED, the student's exponentials
    go to ``values``; to ``beside`` go ``d`` for the reverse KL, and the teacher's exponentials less the student's for
    the forward one.
    """
    num_blocks, num_tiles = tl.cdiv(rows, BR), tl.cdiv(columns, BC)
    for tile in tl.range(tl.program_id(0), num_blocks * num_tiles, tl.num_programs(0), flatten=FLATTEN):
        i_r, i_c = place(tile, num_blocks, num_tiles, BAND)
        r, c = i_r * BR, i_c * BC
        b_x, b_y = both_tiles(hidden, weight, other, other_weight, r, c, WIDTH, OTHER, BR, BC, BD, JOINT, WIDEN)
        o_r, o_c = r + tl.arange(0, BR), tl.arange(0, BC)
        m_r = o_r < rows
        b_at = target_within(tl.load(column + o_r, mask=m_r, other=SKIP), first, c, columns, BC)
        a, b = tl.load(gain + o_r, mask=m_r, other=1.0), tl.load(teacher_gain + o_r, mask=m_r, other=1.0)
        b_x, b_y = squashed(b_x, squash, SOFTCAP), squashed(b_y, teacher_squash, TEACHER_SOFTCAP)
        t, teacher_t = target_logit(b_x, b_at, o_c), target_logit(b_y, b_at, o_c)
        m, b_u, b_e = from_maximum(b_x, a, columns - c, o_c, EVEN, WIDEN)
        n, b_v, b_f = from_maximum(b_y, b, columns - c, o_c, EVEN, WIDEN)
        p_part = parts + i_c.to(tl.int64) * 10 * rows + o_r
        w = tl.sum(b_e * b_u, axis=1) if ENTROPY else m * 0.0
        store_part(p_part, rows, m, tl.sum(b_e, axis=1), w, t, m_r)
        store_part(p_part + 4 * rows, rows, n, tl.sum(b_f, axis=1), tl.sum(b_f * b_v, axis=1), teacher_t, m_r)
        if REVERSE:
            b_d = b_v - b_u
            sum_a, sum_l = kl_sums(b_e, b_f, b_d)
        else:
            b_d = b_u - b_v
            sum_a, sum_l = kl_sums(b_f, b_e, b_d)
        tl.store(p_part + 8 * rows, sum_a, mask=m_r)
        tl.store(p_part + 9 * rows, sum_l, mask=m_r)
        if STORED:
            if not REVERSE:
                b_d = tl.where(tl.abs(b_d) < 0.25, -b_f * expm1_lean(b_d), b_f - b_e)
            store_tile(values, b_e, r, c, rows, columns, values_stride, BR, BC, DESCRIBED)
            store_tile(beside, b_d, r, c, rows, columns, beside_stride, BR, BC, DESCRIBED)
