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
from triton.language.extra import libdevice

from logitless.backends.triton.kernels import FLOOR, LN2, LOG2E, SKIP, TINY, finite_or_zero, gradient_block, tanh

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
def shaped(b_x, a, squash, SOFTCAP: tl.constexpr, NEGATIVE: tl.constexpr):
    """``y`` and a positive gain such that ``z = gain y``: the largest y is then the largest z."""
    if SOFTCAP:
        b_x = tanh(b_x * squash)
    elif NEGATIVE:
        b_x, a = -b_x, tl.abs(a)
    return b_x, a


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
    GIVEN: tl.constexpr,
    AGAIN: tl.constexpr,
    SLACK: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Part ``[4, R]`` of each group of TILES column tiles; and, if asked for, ``e^(z - reference)``, 0 at the target.

    The reference is the row's maximum within a tile; -inf where there is nothing else. Or it is GIVEN, one for each
    row, and exponentials are times the slope of a softcap. AGAIN: nothing is done unless a reference has ``moved``.
    """
    num_blocks, num_tiles = tl.cdiv(rows, BR), tl.cdiv(columns, BC)
    num_groups = tl.cdiv(num_tiles, TILES)
    num_units = tl.cdiv(num_blocks * num_groups - tl.program_id(0), tl.num_programs(0))
    if AGAIN:
        num_units = tl.where(tl.load(moved) != 0, num_units, 0)
    b_m, b_s, b_lost, b_w, b_t = empty_part(BR)
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
        b_x, a = shaped(b_x, a, squash, SOFTCAP, NEGATIVE)
        k = a * LOG2E
        if not EVEN:
            b_x = tl.where((c + o_c < columns)[None, :], b_x, float("-inf"))
        top, part_s, part_w, part_t, b_e = tile_part(b_x, k, b_at, o_c, ENTROPY, FINITE, WIDEN)
        # From the second tile of a unit on, the sums so far are those of the same rows.
        fresh = i_f == 0
        b_m, b_w = tl.where(fresh, float("-inf"), b_m), tl.where(fresh, 0.0, b_w)
        b_s, b_lost = tl.where(fresh, 0.0, b_s), tl.where(fresh, 0.0, b_lost)
        b_t = tl.where(part_t == part_t, part_t, tl.where(fresh, float("nan"), b_t))
        # The last unit may have tiles past the last column.
        here = i_c < num_tiles
        part_m, part_s = tl.where(here, top, float("-inf")), tl.where(here, part_s, 0.0)
        b_m, b_s, b_lost, b_w = merged(b_m, b_s, b_lost, b_w, part_m, part_s, tl.where(here, part_w, 0.0), k)
        b_sum, m_last = b_s + b_lost, m_r & (i_f == TILES - 1)
        store_part(parts + i_g.to(tl.int64) * 4 * rows + o_r, rows, b_m, b_sum, b_w, b_t, m_last)
        if EXPONENTIALS:
            if GIVEN:
                given = tl.load(references + o_r, mask=m_r, other=0.0)
                # What is further off is made again: up to there, in range.
                b_e = b_e * tl.exp2(tl.minimum(finite_or_zero(top) * k - given * LOG2E, SLACK * LOG2E + 1.0))[:, None]
                if SOFTCAP:
                    b_y = tl.maximum(b_x, -1.0)  # past the last column it is -inf
                    b_e = b_e * (1.0 - b_y * b_y)
            skipped = b_target == SKIP
            if any_of(skipped | (b_at != NO_TARGET)):
                # Loaded again, or the statistic's comparisons would be kept for these: a bit of every logit.
                b_again = target_within(tl.load(column + o_r, mask=m_r, other=SKIP), first, c, columns, BC)
                b_e = tl.where((o_c[None, :] == b_again[:, None]) | skipped[:, None], 0.0, b_e)
            store_tile(out, b_e, r, c, rows, columns, out_stride, BR, BC, DESCRIBED)
            if not GIVEN:
                p_reference = references + i_c.to(tl.int64) * references_stride + o_r
                tl.store(p_reference, tl.where(skipped, 0.0, top * a), mask=m_r & here)


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
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row's reference moves to its maximum over a slab if that is out of range, and its sums with it.

    Above: more than SLACK beyond the reference. Below: in the FIRST slab only, since later ones have nothing to add.
    """
    i_r = tl.program_id(0).to(tl.int64)
    top = tl.full([], float("-inf"), dtype=tl.float32)
    for g in range(num_groups):
        top = tl.maximum(top, tl.load(parts + g * 4 * rows.to(tl.int64) + i_r))
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
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The statistic of some rows from their parts, first to last; AHEAD parts are loaded at a time."""
    o_r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_r = o_r < rows
    a = tl.load(gain + o_r, mask=m_r, other=1.0)
    if NEGATIVE:
        a = tl.abs(a)
    k = a * LOG2E
    b_m, b_s, b_lost, b_w, b_t = empty_part(BLOCK)
    p_part = parts + o_r
    for g in range(0, num_groups, AHEAD):
        for i in tl.static_range(AHEAD):
            m_part = m_r & (g + i < num_groups)
            part_m = tl.load(p_part, mask=m_part, other=float("-inf"))
            part_s = tl.load(p_part + rows, mask=m_part, other=0.0)
            part_w = tl.load(p_part + 2 * rows, mask=m_part, other=0.0)
            part_t = tl.load(p_part + 3 * rows, mask=m_part, other=float("nan"))
            b_m, b_s, b_lost, b_w = merged(b_m, b_s, b_lost, b_w, part_m, part_s, part_w, k)
            b_t = tl.where(part_t == part_t, part_t, b_t)
            p_part += 4 * rows
    # What a row to be left out was multiplied to does not matter.
    read = tl.load(column + o_r, mask=m_r, other=SKIP) != SKIP
    m, s = tl.where(read, b_m * a, 0.0), tl.where(read, b_s + b_lost, 1.0)
    w, t = tl.where(read, b_w * LN2, 0.0), b_t * a
    store_part(stats + o_r, part_stride, m, s, w, tl.where(read, t, 0.0), m_r)


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
    WIDEN: tl.constexpr,
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
            # What the hardware has, a few units of 2^-24 off: e has 2^-9 or 2^-12.
            b_log = tl.log2(b_e) if WIDEN else libdevice.fast_log2f(b_e)
            b_k = b_k + (k_z * LN2 * scale)[:, None] * b_log
        b_dz = tl.where(o_c == i_at, target, b_e * b_k)
        b_dz = tl.where(read, b_dz, 0.0)
        tl.store(out + i_r * out_stride + o_c, b_dz.to(out.dtype.element_ty), mask=m_c)
