"""What becomes of a tile of logits in registers: its statistic, its exponentials or its dZ.

    sums of a product  ->  finished  ->  shaped, tile_part  ->  merged              a part of the statistic
                                     ->  exponentials_of_tile, gradient_of_tile     16 bits of every element

The statistic is that of ``y = x`` (or ``tanh(squash x)``), with powers of two of ``k y - k max y``, one multiply-add,
where ``k = gain log2 e``: m and t are before the gain until parts are merged, w is in powers of two. Rows to skip, and
targets in what is written, are looked for per tile, and few tiles have any.

Nothing here says in which registers a tile lies, so that kernels of Triton and of Gluon share it. Names as in
``kernels.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from logitless.backends.triton.kernels import FLOOR, LOG2E, SKIP, finite_or_zero, gradient_block, tanh

NO_TARGET: tl.constexpr = tl.constexpr(-1)  # softmax.ELSEWHERE, within a tile


@triton.jit
def any_of(b):
    """Whether one of a vector of conditions holds."""
    return tl.max(b.to(tl.int32), axis=0) > 0


@triton.jit
def multiply_add(x, k, c, WIDEN: tl.constexpr):
    """``x k + c``, rounded once."""
    if WIDEN:
        # The interpreter rounds twice.
        return (x.to(tl.float64) * k.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    return tl.fma(x, k, c)


@triton.jit
def merged(m, s, lost, w, part_m, part_s, part_w, k):
    """``(m, s, lost, w)`` of two parts of a row: m before the gain, w of ``k (x - m)``.

    A part of nothing but -inf has s = 0 and adds nothing, to the last bit. ``lost`` is what rounding took from s: where
    the target is nearly certain, s is 1 and hundreds of small parts, and all that is known of 1 - p.
    """
    top = tl.maximum(m, part_m)
    base = finite_or_zero(top)
    # Floored: 0 * FLOOR is 0, and what lies that far below has a factor of 0.
    shift, part_shift = tl.maximum(m - base, FLOOR) * k, tl.maximum(part_m - base, FLOOR) * k
    factor, part_factor = tl.exp2(shift), tl.exp2(part_shift)
    w = tl.fma(factor, tl.fma(shift, s, w), part_factor * tl.fma(part_shift, part_s, part_w))
    s, part_s = factor * s, part_factor * part_s
    total = s + part_s
    added = total - s
    lost = tl.fma(factor, lost, (s - (total - added)) + (part_s - added))
    return top, total, lost, w


@triton.jit
def finished(b_x, bias, o_c, columns, BIASED: tl.constexpr, MATCH: tl.constexpr):
    """Raw logits of the columns ``o_c`` from the sums of their product: with the bias, and rounded to the dtype MATCH
    if that is one of 16 bits."""
    if BIASED:
        b_x += tl.load(bias + o_c, mask=o_c < columns, other=0.0).to(tl.float32)[None, :]
    if MATCH == "bfloat16":
        b_x = b_x.to(tl.bfloat16).to(tl.float32)
    elif MATCH == "float16":
        b_x = b_x.to(tl.float16).to(tl.float32)
    return b_x


@triton.jit
def shaped(b_x, a, squash, left, o_c, SOFTCAP: tl.constexpr, NEGATIVE: tl.constexpr, EVEN: tl.constexpr):
    """``y``, a positive gain such that ``z = gain y``, so that the largest y is the largest z, and ``gain log2 e``.

    Of the columns ``left`` of the tile; those past the last are -inf.
    """
    if SOFTCAP:
        b_x = tanh(b_x * squash)
    elif NEGATIVE:
        b_x, a = -b_x, tl.abs(a)
    if not EVEN:
        b_x = tl.where((o_c < left)[None, :], b_x, float("-inf"))
    return b_x, a, a * LOG2E


@triton.jit
def target_within(b_t, first, c, columns, BC: tl.constexpr):
    """Place of each row's target within a tile, or NO_TARGET: 32 bits, since every logit is compared with it."""
    b_t = b_t - first - c
    return tl.where((b_t >= 0) & (b_t < tl.minimum(columns - c, BC)), b_t, NO_TARGET).to(tl.int32)


@triton.jit
def tile_part(b_x, k, b_at, o_c, ENTROPY: tl.constexpr, FINITE: tl.constexpr, WIDEN: tl.constexpr):
    """``(m, s, w, t)`` of a tile, m and t before the gain, w of ``k (x - m)``; and its exponentials."""
    top = tl.max(b_x, axis=1)
    # In every tile, though few have a target: a branch that reads the sums of a product would make the next product
    # wait for the whole tile, and what is derived from them was rounded at the size of a difference.
    t = tl.sum(tl.where(o_c[None, :] == b_at[:, None], b_x, 0.0), axis=1)
    t = tl.where(b_at == NO_TARGET, float("nan"), t)
    base = finite_or_zero(top)
    # One operation for k (x - top), but for what rounding takes from k top, which the sums get back.
    minus = -(base * k)
    lost = multiply_add(base, k, minus, WIDEN)
    b_y = multiply_add(b_x, k[:, None], minus[:, None], WIDEN)
    b_e = tl.exp2(b_y)
    s = tl.sum(b_e, axis=1)
    w = s * 0.0
    if ENTROPY:
        # 0 times -inf is no number. Where no logit can be -inf, nothing is spent on it.
        w = tl.sum(b_e * (b_y if FINITE else tl.maximum(b_y, FLOOR)), axis=1)
    back = tl.exp2(-lost)
    return top, s * back, (w - lost * s) * back, t, b_e


@triton.jit
def best_column(b_best, wins, b_x, top, c, o_c, BC: tl.constexpr, TOP: tl.constexpr):
    """``[BR]`` column of each row's maximum so far, the first of several: where this tile ``wins``, its own."""
    if TOP:
        b_best = tl.where(wins, c + tl.min(tl.where(b_x == top[:, None], o_c[None, :], BC), axis=1), b_best)
    return b_best


@triton.jit
def from_reference(b_e, b_x, top, k, references, o_r, m_r, SLACK: tl.constexpr, SOFTCAP: tl.constexpr):
    """Exponentials relative to the row's reference instead of the tile's maximum, times the slope of a softcap."""
    given = tl.load(references + o_r, mask=m_r, other=0.0)
    # What is further off than the slack is made again. Until then it is in range.
    shift = tl.minimum(tl.fma(finite_or_zero(top), k, -(given * LOG2E)), SLACK * LOG2E + 1.0)
    b_e = b_e * tl.exp2(shift)[:, None]
    if SOFTCAP:
        b_y = tl.maximum(b_x, -1.0)  # past the last column it is -inf
        b_e = b_e * (1.0 - b_y * b_y)
    return b_e


@triton.jit
def without_targets(b_e, b_target, b_at, column, o_r, m_r, first, c, o_c, columns, BC: tl.constexpr):
    """Exponentials with 0 at the target, and in rows to skip."""
    skipped = b_target == SKIP
    if any_of(skipped | (b_at != NO_TARGET)):
        # Loaded again, or the statistic's comparisons would be kept for these: a bit of every logit.
        b_again = target_within(tl.load(column + o_r, mask=m_r, other=SKIP), first, c, columns, BC)
        b_e = tl.where((o_c[None, :] == b_again[:, None]) | skipped[:, None], 0.0, b_e)
    return b_e


@triton.jit
def exponentials_of_tile(
    b_e,
    b_x,
    top,
    a,
    k,
    b_target,
    b_at,
    column,
    references,
    references_stride,
    o_r,
    m_r,
    m_reference,
    first,
    c,
    o_c,
    i_c,
    columns,
    BC: tl.constexpr,
    SLACK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Exponentials of a tile as they are stored: relative to the references that are given with a SLACK; otherwise to
    the tile's maximum, which becomes its reference where the mask says so."""
    if SLACK > 0:
        b_e = from_reference(b_e, b_x, top, k, references, o_r, m_r, SLACK, SOFTCAP)
    else:
        p_reference = references + i_c.to(tl.int64) * references_stride + o_r
        tl.store(p_reference, tl.where(b_target == SKIP, 0.0, top * a), mask=m_reference)
    return without_targets(b_e, b_target, b_at, column, o_r, m_r, first, c, o_c, columns, BC)


@triton.jit
def row_number(x, o_r, m_r):
    """``[BR, 1]`` numbers of some rows."""
    return tl.load(x + o_r, mask=m_r, other=0.0)[:, None]


@triton.jit
def lean_gradient(b_x, a, m, log_sum, plain, product, PRODUCT: tl.constexpr, FINITE: tl.constexpr):
    """``dz = p * (plain + product * (z - m))`` in three operations and a power of two per logit.

    Differences of sums, so both factors are off by 2^-24 of the size of z: nothing beside the 2^-9 or 2^-12 of dZ. What
    is rounded once is said: a compiler may choose either product of a sum of two, here this one and there that one.
    """
    if not FINITE:
        b_x = tl.maximum(b_x, FLOOR)  # 0 times -inf is no number
    b_p = tl.exp2(tl.fma(b_x, a * LOG2E, -(m + log_sum) * LOG2E))
    if PRODUCT:
        return b_p * tl.fma(b_x, product * a * a, tl.fma(-product, m, plain) * a)
    return b_p * (plain * a)


@triton.jit
def gradient_of_tile(
    b_x,
    b_target,
    a,
    m,
    log_s,
    b_plain,
    b_product,
    b_there,
    squash,
    first,
    c,
    o_c,
    columns,
    BC: tl.constexpr,
    PRODUCT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FINITE: tl.constexpr,
):
    """dZ of a tile from its raw logits, and from numbers of its rows ``[BR, 1]``."""
    b_at = target_within(b_target, first, c, columns, BC)
    at = o_c[None, :] == b_at[:, None]
    if SOFTCAP:
        # Its slope at the target is that of the target's own logit.
        b_dz = gradient_block(
            b_x, at, a, m, log_s, b_plain, b_product, b_there, 0.0, 0.0, squash, PRODUCT, False, False, True
        )
    else:
        b_dz = lean_gradient(b_x, a, m, log_s, b_plain, b_product, PRODUCT, FINITE)
    skipped = b_target == SKIP
    if any_of(skipped | (b_at != NO_TARGET)):
        if not SOFTCAP:
            b_dz = tl.where(at, b_there * a, b_dz)
        b_dz = tl.where(skipped[:, None], 0.0, b_dz)
    return b_dz


@triton.jit
def store_part(p_part, part_stride, m, s, w, t, mask):
    """The four lines of a part. Masked, though most tiles store none: loops with a branch around it do not flatten."""
    tl.store(p_part, m, mask=mask)
    tl.store(p_part + part_stride, s, mask=mask)
    tl.store(p_part + 2 * part_stride, w, mask=mask)
    tl.store(p_part + 3 * part_stride, t, mask=mask)


@triton.jit
def store_lines(p_part, part_stride, m, s, w, t, best, mask, TOP: tl.constexpr):
    """A part and, if it has one, its fifth line: the number of the column that m is of."""
    store_part(p_part, part_stride, m, s, w, t, mask)
    if TOP:
        tl.store(p_part + 4 * part_stride, best.to(tl.float32), mask=mask)
