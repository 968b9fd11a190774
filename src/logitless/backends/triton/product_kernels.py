"""Matrix products that end in a softmax: float32 logits are made in registers and never reach memory.

    X [R, D] x W [C, D]^T  ->  a tile [BR, BC] in registers  ->  its statistic, its dZ or its exponentials

A program stays on its multiprocessor and works off one unit after the other. In the statistic a unit is a block of rows
and a group of TILES column tiles, whose ``(m, s, w, t)`` stay in registers and are stored once, as one part of the row;
a second kernel merges the parts in order. Which tiles make a part follows from the columns alone, so a row has the same
bits in every batch. Where the loops are flattened, loads of the next tile are under way while a tile ends.

Each multiprocessor's matrix units wait while a tile ends, so every operation per logit counts. The statistic is that of
``y = x`` (or ``tanh(squash x)``), with powers of two of ``k y - k max y``, one multiply-add, where ``k = gain log2 e``:
m and t are before the gain until parts are merged, w is in powers of two. Rows to skip, and targets in what is written,
are looked for per tile, and few tiles have any.

Names as in ``kernels.py``. Operands come by descriptors, which fill what lies outside with zeros. Columns outside are
then logits of 0, and masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from logitless.backends.triton.kernels import FLOOR, LOG2E, SKIP, finite_or_zero, gradient_block, tanh

NO_TARGET: tl.constexpr = tl.constexpr(-1)  # softmax.ELSEWHERE, within a tile


@triton.jit
def place(unit, num_blocks, num_groups, BAND: tl.constexpr):
    """Row block and column group of a unit: BAND row blocks share their columns in L2, then come the next columns."""
    first = unit // (BAND * num_groups) * BAND
    height = tl.minimum(num_blocks - first, BAND)
    rest = unit % (BAND * num_groups)
    return first + rest % height, rest // height


@triton.jit
def logits_tile(
    hidden,
    weight,
    bias,
    r,
    c,
    columns,
    WIDTH: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BIASED: tl.constexpr,
    MATCH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """``[BR, BC]`` raw logits from row r and column c on, rounded to the dtype MATCH if that is one of 16 bits."""
    b_x = tl.zeros([BR, BC], dtype=tl.float32)
    for d in range(0, WIDTH, BD):
        b_h = hidden.load([r, d])  # [BR, BD]
        b_w = weight.load([c, d])  # [BC, BD]
        if WIDEN:
            # The interpreter multiplies the bit patterns of bfloat16.
            b_x = tl.dot(b_h.to(tl.float32), b_w.to(tl.float32).T, b_x, input_precision="ieee")
        else:
            b_x = tl.dot(b_h, b_w.T, b_x)
    if BIASED:
        o_c = c + tl.arange(0, BC)
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
def any_of(b):
    """Whether one of a vector of conditions holds."""
    return tl.max(b.to(tl.int32), axis=0) > 0


@triton.jit
def empty_part(BLOCK: tl.constexpr):
    """``(m, s, lost, w, t)`` of no columns, for a block of rows."""
    b_m = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    b_s = tl.zeros([BLOCK], dtype=tl.float32)
    b_lost = tl.zeros([BLOCK], dtype=tl.float32)
    b_w = tl.zeros([BLOCK], dtype=tl.float32)
    b_t = tl.full([BLOCK], float("nan"), dtype=tl.float32)
    return b_m, b_s, b_lost, b_w, b_t


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
    w = factor * (w + shift * s) + part_factor * (part_w + part_shift * part_s)
    s, part_s = factor * s, part_factor * part_s
    total = s + part_s
    added = total - s
    lost = factor * lost + ((s - (total - added)) + (part_s - added))
    return top, total, lost, w


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
def with_tile(
    b_m,
    b_s,
    b_lost,
    b_w,
    b_t,
    b_best,
    top,
    part_s,
    part_w,
    part_t,
    b_x,
    k,
    c,
    o_c,
    fresh,
    here,
    BC: tl.constexpr,
    TOP: tl.constexpr,
):
    """The sums of a unit and of its next tile. Those so far do not count where the tile is the first, ``fresh``, and it
    does not unless it is ``here``: the last unit may have tiles past the last column."""
    b_m, b_w = tl.where(fresh, float("-inf"), b_m), tl.where(fresh, 0.0, b_w)
    b_s, b_lost = tl.where(fresh, 0.0, b_s), tl.where(fresh, 0.0, b_lost)
    b_t = tl.where(part_t == part_t, part_t, tl.where(fresh, float("nan"), b_t))
    part_m, part_s = tl.where(here, top, float("-inf")), tl.where(here, part_s, 0.0)
    b_best = best_column(b_best, fresh | (part_m > b_m), b_x, top, c, o_c, BC, TOP)
    b_m, b_s, b_lost, b_w = merged(b_m, b_s, b_lost, b_w, part_m, part_s, tl.where(here, part_w, 0.0), k)
    return b_m, b_s, b_lost, b_w, b_t, b_best


@triton.jit
def from_reference(b_e, b_x, top, k, references, o_r, m_r, SLACK: tl.constexpr, SOFTCAP: tl.constexpr):
    """Exponentials relative to the row's reference instead of the tile's maximum, times the slope of a softcap."""
    given = tl.load(references + o_r, mask=m_r, other=0.0)
    # What is further off than the slack is made again. Until then it is in range.
    shift = tl.minimum(finite_or_zero(top) * k - given * LOG2E, SLACK * LOG2E + 1.0)
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
def store_tile(
    out, b_out, r, c, rows, columns, out_stride, BR: tl.constexpr, BC: tl.constexpr, DESCRIBED: tl.constexpr
):
    """A tile into ``out``, a descriptor or, where that has no right to be one, a pointer."""
    if DESCRIBED:
        out.store([r, c], b_out.to(out.dtype))
    else:
        o_r, o_c = r + tl.arange(0, BR), c + tl.arange(0, BC)
        p_out = out + o_r.to(tl.int64)[:, None] * out_stride + o_c[None, :]
        m_out = (o_r < rows)[:, None] & (o_c < columns)[None, :]
        tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_out)


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


@triton.jit(do_not_specialize=["rows", "columns", "first", "references_stride"])
def product_statistics_kernel(
    hidden,
    weight,
    bias,
    column,
    gain,
    parts,
    out,
    references,
    moved,
    rows,
    columns,
    first,
    out_stride,
    references_stride,
    squash,
    WIDTH: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    TILES: tl.constexpr,
    BAND: tl.constexpr,
    BIASED: tl.constexpr,
    MATCH: tl.constexpr,
    WIDEN: tl.constexpr,
    FLATTEN: tl.constexpr,
    ENTROPY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NEGATIVE: tl.constexpr,
    EVEN: tl.constexpr,
    FINITE: tl.constexpr,
    EXPONENTIALS: tl.constexpr,
    TOP: tl.constexpr,
    SLACK: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Part ``[4, R]`` of each group of TILES column tiles, ``[5, R]`` with TOP; if asked for, ``e^(z - reference)``, 0
    at the target.

    The reference is the row's maximum within a tile; -inf where there is nothing else. With a SLACK it is given, one
    for each row, and exponentials are times the slope of a softcap. With ``moved``, nothing is done unless that is set.
    """
    num_blocks, num_tiles, num_groups = tl.cdiv(rows, BR), tl.cdiv(columns, BC), tl.cdiv(columns, BC * TILES)
    num_units = tl.cdiv(num_blocks * num_groups - tl.program_id(0), tl.num_programs(0))
    if moved is not None:
        num_units = tl.where(tl.load(moved) != 0, num_units, 0)
    b_m, b_s, b_lost, b_w, b_t = empty_part(BR)
    b_best = tl.zeros([BR], dtype=tl.int32)
    # One loop over units and their tiles: a second one between this and that of the product would not be flattened.
    for step in tl.range(0, num_units * TILES, flatten=FLATTEN):
        i_f = step % TILES
        i_r, i_g = place(tl.program_id(0) + step // TILES * tl.num_programs(0), num_blocks, num_groups, BAND)
        i_c = i_g * TILES + i_f
        r, c = i_r * BR, i_c * BC
        b_x = logits_tile(hidden, weight, bias, r, c, columns, WIDTH, BR, BC, BD, BIASED, MATCH, WIDEN)
        o_r, o_c = r + tl.arange(0, BR), tl.arange(0, BC)
        m_r = o_r < rows
        a, b_target = tl.load(gain + o_r, mask=m_r, other=1.0), tl.load(column + o_r, mask=m_r, other=SKIP)
        b_at = target_within(b_target, first, c, columns, BC)
        b_x, a, k = shaped(b_x, a, squash, columns - c, o_c, SOFTCAP, NEGATIVE, EVEN)
        top, part_s, part_w, part_t, b_e = tile_part(b_x, k, b_at, o_c, ENTROPY, FINITE, WIDEN)
        here = i_c < num_tiles
        b_m, b_s, b_lost, b_w, b_t, b_best = with_tile(
            b_m, b_s, b_lost, b_w, b_t, b_best, top, part_s, part_w, part_t, b_x, k, c, o_c, i_f == 0, here, BC, TOP
        )
        p_part = parts + i_g.to(tl.int64) * (4 + TOP) * rows + o_r
        store_lines(p_part, rows, b_m, b_s + b_lost, b_w, b_t, first + b_best, m_r & (i_f == TILES - 1), TOP)
        if EXPONENTIALS:
            if SLACK > 0:
                b_e = from_reference(b_e, b_x, top, k, references, o_r, m_r, SLACK, SOFTCAP)
            else:
                p_reference = references + i_c.to(tl.int64) * references_stride + o_r
                tl.store(p_reference, tl.where(b_target == SKIP, 0.0, top * a), mask=m_r & here)
            b_e = without_targets(b_e, b_target, b_at, column, o_r, m_r, first, c, o_c, columns, BC)
            store_tile(out, b_e, r, c, rows, columns, out_stride, BR, BC, DESCRIBED)


@triton.jit
def row_number(x, o_r, m_r):
    """``[BR, 1]`` numbers of some rows."""
    return tl.load(x + o_r, mask=m_r, other=0.0)[:, None]


@triton.jit
def lean_gradient(b_x, a, m, log_sum, plain, product, PRODUCT: tl.constexpr, FINITE: tl.constexpr):
    """``dz = p * (plain + product * (z - m))`` in three operations and a power of two per logit.

    Differences of sums, so both factors are off by 2^-24 of the size of z: nothing beside the 2^-9 or 2^-12 of dZ.
    """
    if not FINITE:
        b_x = tl.maximum(b_x, FLOOR)  # 0 times -inf is no number
    b_p = tl.exp2(b_x * (a * LOG2E) - (m + log_sum) * LOG2E)
    if PRODUCT:
        return b_p * (b_x * (product * a * a) + (plain - product * m) * a)
    return b_p * (plain * a)


@triton.jit(do_not_specialize=["rows", "columns", "first"])
def product_gradient_kernel(
    hidden,
    weight,
    bias,
    column,
    gain,
    reference,
    log_sum,
    plain,
    product,
    at_target,
    out,
    rows,
    columns,
    first,
    out_stride,
    squash,
    WIDTH: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BAND: tl.constexpr,
    BIASED: tl.constexpr,
    MATCH: tl.constexpr,
    WIDEN: tl.constexpr,
    FLATTEN: tl.constexpr,
    PRODUCT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FINITE: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """dZ of all rows and columns: ``dz = p * (plain + product * (z - m))``, ``at_target`` there, skipped rows zero."""
    num_blocks, num_tiles = tl.cdiv(rows, BR), tl.cdiv(columns, BC)
    for tile in tl.range(tl.program_id(0), num_blocks * num_tiles, tl.num_programs(0), flatten=FLATTEN):
        i_r, i_c = place(tile, num_blocks, num_tiles, BAND)
        r, c = i_r * BR, i_c * BC
        b_x = logits_tile(hidden, weight, bias, r, c, columns, WIDTH, BR, BC, BD, BIASED, MATCH, WIDEN)
        o_r = r + tl.arange(0, BR)
        m_r = o_r < rows
        b_target = tl.load(column + o_r, mask=m_r, other=SKIP)
        b_at = target_within(b_target, first, c, columns, BC)
        at = tl.arange(0, BC)[None, :] == b_at[:, None]
        a, m, log_s = row_number(gain, o_r, m_r), row_number(reference, o_r, m_r), row_number(log_sum, o_r, m_r)
        b_plain, b_there = row_number(plain, o_r, m_r), row_number(at_target, o_r, m_r)
        b_product = row_number(product, o_r, m_r) if PRODUCT else 0.0
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
        store_tile(out, b_dz, r, c, rows, columns, out_stride, BR, BC, DESCRIBED)
