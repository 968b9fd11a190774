"""Matrix products that end in a softmax: float32 logits are made in registers and never reach memory.

    X [R, D] x W [C, D]^T  ->  a tile [BR, BC] in registers  ->  its statistic, its dZ or its exponentials

A program stays on its multiprocessor and works off one unit after the other. In the statistic a unit is a block of rows
and a group of TILES column tiles, whose ``(m, s, w, t)`` stay in registers and are stored once, as one part of the row;
a second kernel merges the parts in order. Which tiles make a part follows from the columns alone, so a row has the same
bits in every batch. Where the loops are flattened, loads of the next tile are under way while a tile ends.

Each multiprocessor's matrix units wait while a tile ends, so every operation per logit counts. The statistic is that of
``y = x`` (or ``tanh(squash x)``), with exponentials of ``gain (y - max y)``: the gain meets m, w and t when parts are
merged. Rows to skip, and targets in what is written, are looked for per tile, and few tiles have any.

Names as in ``kernels.py``. Operands come by descriptors, which fill what lies outside with zeros. Columns outside are
then logits of 0, and masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
def begun(fresh, m, s, lost, w):
    """The sums so far, or those of no columns where a unit is ``fresh``."""
    m, s = tl.where(fresh, float("-inf"), m), tl.where(fresh, 0.0, s)
    return m, s, tl.where(fresh, 0.0, lost), tl.where(fresh, 0.0, w)


@triton.jit
def merged(m, s, lost, w, part_m, part_s, part_w, a):
    """``(m, s, lost, w)`` of two parts of a row, m and w before the gain ``a``.

    A part of nothing but -inf has s = 0 and adds nothing, to the last bit. ``lost`` is what rounding took from s: where
    the target is nearly certain, s is 1 and hundreds of small parts, and all that is known of 1 - p.
    """
    top = tl.maximum(m, part_m)
    base = finite_or_zero(top)
    # Floored: 0 * FLOOR is 0, and what lies that far below has a factor of 0.
    shift, part_shift = tl.maximum(m - base, FLOOR), tl.maximum(part_m - base, FLOOR)
    factor, part_factor = tl.exp2(shift * (a * LOG2E)), tl.exp2(part_shift * (a * LOG2E))
    w = factor * (w + shift * s) + part_factor * (part_w + part_shift * part_s)
    s, part_s = factor * s, part_factor * part_s
    total = s + part_s
    added = total - s
    lost = factor * lost + ((s - (total - added)) + (part_s - added))
    return top, total, lost, w


@triton.jit
def tile_part(b_x, a, b_at, o_c, ENTROPY: tl.constexpr):
    """``(m, s, w, t)`` of a tile, m, w and t before the gain, and its exponentials."""
    top = tl.max(b_x, axis=1)
    # In every tile, though few have a target: a branch that reads the sums of a product would make the next product
    # wait for the whole tile, and what is derived from them, x - max x, was rounded at the size of that difference.
    t = tl.sum(tl.where(o_c[None, :] == b_at[:, None], b_x, 0.0), axis=1)
    t = tl.where(b_at == NO_TARGET, float("nan"), t)
    base = finite_or_zero(top)
    b_d = b_x - base[:, None]
    b_e = tl.exp2(b_d * (a * LOG2E)[:, None])
    s = tl.sum(b_e, axis=1)
    w = s * 0.0
    if ENTROPY:
        w = tl.sum(b_e * tl.maximum(b_d, FLOOR), axis=1)
    return top, s, w, t, b_e


@triton.jit
def best_column(b_best, wins, b_x, top, c, o_c, BC: tl.constexpr, TOP: tl.constexpr):
    """``[BR]`` column of each row's maximum so far, the first of several: where this tile ``wins``, its own."""
    if TOP:
        b_best = tl.where(wins, c + tl.min(tl.where(b_x == top[:, None], o_c[None, :], BC), axis=1), b_best)
    return b_best


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
    """The four lines of a part. Masked rather than branched around: most tiles store none."""
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


@triton.jit
def without_targets(b_e, b_at, skipped, o_c):
    """Exponentials with 0 at the target, and in rows to skip."""
    if any_of(skipped | (b_at != NO_TARGET)):
        b_e = tl.where((o_c[None, :] == b_at[:, None]) | skipped[:, None], 0.0, b_e)
    return b_e


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
    EXPONENTIALS: tl.constexpr,
    TOP: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Part ``[4, R]`` of each group of TILES column tiles, ``[5, R]`` with TOP; if asked for, ``e^(z - reference)``, 0
    at the target. The reference is the row's maximum within a tile; -inf where there is nothing else."""
    num_blocks, num_tiles = tl.cdiv(rows, BR), tl.cdiv(columns, BC)
    num_groups = tl.cdiv(num_tiles, TILES)
    num_units = tl.cdiv(num_blocks * num_groups - tl.program_id(0), tl.num_programs(0))
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
        b_x, a = shaped(b_x, a, squash, SOFTCAP, NEGATIVE)
        if not EVEN:
            b_x = tl.where((c + o_c < columns)[None, :], b_x, float("-inf"))
        top, part_s, part_w, part_t, b_e = tile_part(b_x, a, b_at, o_c, ENTROPY)
        # From the second tile of a unit on, the sums so far are those of the same rows.
        fresh = i_f == 0
        b_m, b_s, b_lost, b_w = begun(fresh, b_m, b_s, b_lost, b_w)
        b_t = tl.where(part_t == part_t, part_t, tl.where(fresh, float("nan"), b_t))
        # The last unit may have tiles past the last column.
        here = i_c < num_tiles
        part_m, part_s = tl.where(here, top, float("-inf")), tl.where(here, part_s, 0.0)
        b_best = best_column(b_best, fresh | (part_m > b_m), b_x, top, c, o_c, BC, TOP)
        b_m, b_s, b_lost, b_w = merged(b_m, b_s, b_lost, b_w, part_m, part_s, tl.where(here, part_w, 0.0), a)
        p_part = parts + i_g.to(tl.int64) * (4 + TOP) * rows + o_r
        store_lines(p_part, rows, b_m, b_s + b_lost, b_w, b_t, first + b_best, m_r & (i_f == TILES - 1), TOP)
        if EXPONENTIALS:
            b_e = without_targets(b_e, b_at, b_target == SKIP, o_c)
            store_tile(out, b_e, r, c, rows, columns, out_stride, BR, BC, DESCRIBED)
            p_reference = references + i_c.to(tl.int64) * references_stride + o_r
            tl.store(p_reference, tl.where(b_target == SKIP, 0.0, top * a), mask=m_r & here)


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
    b_m, b_s, b_lost, b_w, b_t = empty_part(BLOCK)
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
                b_best = tl.where(part_m > b_m, tl.load(p_part + 4 * rows, mask=m_part, other=0.0), b_best)
            b_m, b_s, b_lost, b_w = merged(b_m, b_s, b_lost, b_w, part_m, part_s, part_w, a)
            b_t = tl.where(part_t == part_t, part_t, b_t)
            p_part += (4 + TOP) * rows
    # What a row to be left out was multiplied to does not matter.
    read = tl.load(column + o_r, mask=m_r, other=SKIP) != SKIP
    m, s = tl.where(read, b_m * a, 0.0), tl.where(read, b_s + b_lost, 1.0)
    w, t = tl.where(read, b_w * a, 0.0), b_t * a
    store_part(stats + o_r, part_stride, m, s, w, tl.where(read, t, 0.0), m_r)
    if TOP:
        tl.store(stats + o_r + 4 * part_stride, tl.where(read, b_m, 0.0), mask=m_r)
        tl.store(stats + o_r + 5 * part_stride, b_best, mask=m_r)


@triton.jit
def row_number(x, o_r, m_r):
    """``[BR, 1]`` numbers of some rows."""
    return tl.load(x + o_r, mask=m_r, other=0.0)[:, None]


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
        a, b_y = row_number(gain, o_r, m_r), row_number(at_target, o_r, m_r)
        b_dz = gradient_block(
            b_x,
            # A softcap's slope at the target is that of the target's own logit.
            at if SOFTCAP else False,
            a,
            row_number(reference, o_r, m_r),
            row_number(log_sum, o_r, m_r),
            row_number(plain, o_r, m_r),
            row_number(product, o_r, m_r) if PRODUCT else 0.0,
            b_y,
            0.0,
            0.0,
            squash,
            PRODUCT,
            False,
            False,
            SOFTCAP,
        )
        skipped = b_target == SKIP
        if any_of(skipped | (b_at != NO_TARGET)):
            if not SOFTCAP:
                b_dz = tl.where(at, b_y * a, b_dz)
            b_dz = tl.where(skipped[:, None], 0.0, b_dz)
        store_tile(out, b_dz, r, c, rows, columns, out_stride, BR, BC, DESCRIBED)


@triton.jit(do_not_specialize=["first", "columns", "moved_stride"])
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
            b_k = b_k + (k_z * LN2 * scale)[:, None] * tl.log2(tl.maximum(b_e, TINY))
        b_dz = tl.where(o_c + first == i_c, target, b_e * b_k)
        b_dz = tl.where(read, b_dz, 0.0)
        tl.store(out + i_r * out_stride + o_c, b_dz.to(out.dtype.element_ty), mask=m_c)
