"""Kernels of ``bits="canonical"``: the order-free sums of ``backends/blocks.py``, where their arithmetic is explained.

    product_blocks    X [R, D] x W [C, D]^T  ->  m, S, W, t of every block of 128 columns
    merge_blocks      those  ->  lines of the rows
    row_blocks        logits in memory  ->  lines of the rows
    solve             lines of all shards  ->  the statistic

Every path goes through ``terms`` and ``with_blocks``. They are launched without contraction, so that a
multiply-add is one where it is written, and nowhere else: the compiler decides on no bit. Names as in ``kernels.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from logitless.backends.triton.kernels import LN2, LOG2E, SKIP, tanh, target_logit
from logitless.backends.triton.product_kernels import logits_tile, place, store_tile
from logitless.backends.triton.tile_ends import multiply_add, shaped, store_part, target_within, without_targets

BLOCK: tl.constexpr = tl.constexpr(128)  # blocks.BLOCK
SPAN: tl.constexpr = tl.constexpr(16)  # blocks.SPAN
FAR: tl.constexpr = tl.constexpr(16777216.0)  # blocks.FAR
STEP: tl.constexpr = tl.constexpr(1.0 / 65536)  # a bin over the one above it
UNIT: tl.constexpr = tl.constexpr(1.0 / 8388608)  # of the sums
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)  # 0 times it is 0, which 0 times -inf is not


@triton.jit
def larger(a, b):
    """The larger of two, or NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(b_x, AXIS: tl.constexpr, WIDEN: tl.constexpr):
    """The largest along an axis, or NaN if there is one: sums of integers would not tell."""
    if WIDEN:
        # The interpreter has no such reduction, and warns of NaN in its own.
        wrong = tl.max((b_x != b_x).to(tl.int32), axis=AXIS) > 0
        return tl.where(wrong, float("nan"), tl.max(tl.where(b_x == b_x, b_x, float("-inf")), axis=AXIS))
    return tl.reduce(b_x, AXIS, larger)


@triton.jit
def exponent(m, k):
    """An integer above ``k m``, as float32; 0 where that is out of range."""
    y = tl.minimum(tl.maximum(m, LOWEST), -LOWEST) * k
    inside = tl.abs(y) < FAR
    return tl.where(inside, tl.floor(tl.where(inside, y, 0.0)) + 1.0, 0.0)


@triton.jit
def powers(b_y, WIDEN: tl.constexpr):
    """``2^y``; in the interpreter by float64, as in ``blocks.py``."""
    if WIDEN:
        return tl.exp2(b_y.to(tl.float64)).to(tl.float32)
    return tl.exp2(b_y)


@triton.jit
def pattern(b, BASE: tl.constexpr, WIDEN: tl.constexpr):
    """Bit patterns; in the interpreter, whose sums do not wrap around, less BASE."""
    b = b.to(tl.int32, bitcast=True)
    return b - BASE if WIDEN else b


@triton.jit
def terms(b_x, k, n, ENTROPY: tl.constexpr, FINITE: tl.constexpr, WIDEN: tl.constexpr):
    """Of every logit: its exponential, that as an integer, and as an integer what it adds to W."""
    if WIDEN:
        # The interpreter warns of numbers that are too low for it.
        b_x = tl.maximum(b_x, LOWEST)
    b_y = multiply_add(b_x, k, -n, WIDEN)
    b_e = powers(b_y, WIDEN)
    b_s = pattern(b_e + 1.0, 0x3F800000, WIDEN)
    b_w = b_s
    if ENTROPY:
        if not FINITE:
            b_y = tl.maximum(b_y, LOWEST)
        above = tl.full(b_e.shape, 1.75, dtype=tl.float32)
        b_w = pattern(multiply_add(b_e, b_y, above, WIDEN), 0x3FE00000, WIDEN)
    return b_e, b_s, b_w


@triton.jit
def totals(s, w, ENTROPY: tl.constexpr, WIDEN: tl.constexpr):
    """S and W from sums of 128 patterns: less 128 times that of 1, and of 1.75, modulo 2^32."""
    s, w = s.to(tl.int32), w.to(tl.int32)
    if not WIDEN:
        s, w = s + 1073741824, w + 268435456
    return s, w if ENTROPY else s * 0


@triton.jit
def block_sums(b_x, k, ENTROPY: tl.constexpr, FINITE: tl.constexpr, WIDEN: tl.constexpr):
    """``m, n, S, W`` of blocks along the second axis, and their exponentials."""
    m = largest(b_x, 1, WIDEN)
    n = exponent(m, k)
    b_e, b_s, b_w = terms(b_x, k[:, None], n[:, None], ENTROPY, FINITE, WIDEN)
    s, w = totals(tl.sum(b_s, axis=1), tl.sum(b_w, axis=1), ENTROPY, WIDEN)
    return m, n, s, w, b_e


@triton.jit
def with_blocks(a0, a1, a2, a3, b0, b1, b2, b3, s, w, n, own):
    """The sums of the four bins, and their products, with further blocks; all lie in the lanes of their blocks."""
    n = n.to(tl.int32)
    r, lower = (n & (SPAN - 1)).to(tl.int64), own - (n >> 4)
    s = s.to(tl.int64) << r
    w = (w.to(tl.int64) << r) + s * r
    a0, b0 = a0 + tl.where(lower == 0, s, 0), b0 + tl.where(lower == 0, w, 0)
    a1, b1 = a1 + tl.where(lower == 1, s, 0), b1 + tl.where(lower == 1, w, 0)
    a2, b2 = a2 + tl.where(lower == 2, s, 0), b2 + tl.where(lower == 2, w, 0)
    a3, b3 = a3 + tl.where(lower == 3, s, 0), b3 + tl.where(lower == 3, w, 0)
    return a0, a1, a2, a3, b0, b1, b2, b3


@triton.jit
def added(a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3):
    """Two times eight sums."""
    return a0 + c0, a1 + c1, a2 + c2, a3 + c3, b0 + d0, b1 + d1, b2 + d2, b3 + d3


@triton.jit
def store_bins(p_out, part_stride, m, t, a0, a1, a2, a3, b0, b1, b2, b3, read, mask, WIDEN: tl.constexpr):
    """The lines of rows from bins that lie in lanes of the first axis."""
    if WIDEN:
        # The interpreter takes long for sums that it does not know.
        a0, a1, a2, a3 = tl.sum(a0, axis=0), tl.sum(a1, axis=0), tl.sum(a2, axis=0), tl.sum(a3, axis=0)
        b0, b1, b2, b3 = tl.sum(b0, axis=0), tl.sum(b1, axis=0), tl.sum(b2, axis=0), tl.sum(b3, axis=0)
    else:
        # All at once: threads wait for each other once.
        a0, a1, a2, a3, b0, b1, b2, b3 = tl.reduce((a0, a1, a2, a3, b0, b1, b2, b3), 0, added)
    store_row(p_out, part_stride, m, t, a0, a1, a2, a3, b0, b1, b2, b3, read, mask)


@triton.jit
def store_halves(p_line, part_stride, x, mask):
    """A sum of 64 bits as two lines."""
    low, high = (x & 0xFFFFFFFF).to(tl.int32), (x >> 32).to(tl.int32)
    tl.store(p_line, low.to(tl.float32, bitcast=True), mask=mask)
    tl.store(p_line + part_stride, high.to(tl.float32, bitcast=True), mask=mask)


@triton.jit
def load_halves(p_line, part_stride, mask):
    """A sum of 64 bits from its two lines."""
    low = tl.load(p_line, mask=mask, other=0.0).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(p_line + part_stride, mask=mask, other=0.0).to(tl.int32, bitcast=True).to(tl.int64)
    return low | (high << 32)


@triton.jit
def store_row(p_out, part_stride, m, t, a0, a1, a2, a3, b0, b1, b2, b3, read, mask):
    """The lines of rows; those of a row to leave out are of one logit that is 0."""
    tl.store(p_out, tl.where(read, m, 0.0), mask=mask)
    tl.store(p_out + part_stride, tl.where(read, t, 0.0), mask=mask)
    p_out += 2 * part_stride
    store_halves(p_out, part_stride, tl.where(read, a0, 8388608), mask)
    store_halves(p_out + 2 * part_stride, part_stride, tl.where(read, a1, 0), mask)
    store_halves(p_out + 4 * part_stride, part_stride, tl.where(read, a2, 0), mask)
    store_halves(p_out + 6 * part_stride, part_stride, tl.where(read, a3, 0), mask)
    store_halves(p_out + 8 * part_stride, part_stride, tl.where(read, b0, 0), mask)
    store_halves(p_out + 10 * part_stride, part_stride, tl.where(read, b1, 0), mask)
    store_halves(p_out + 12 * part_stride, part_stride, tl.where(read, b2, 0), mask)
    store_halves(p_out + 14 * part_stride, part_stride, tl.where(read, b3, 0), mask)


@triton.jit(do_not_specialize=["rows", "columns", "first"])
def product_blocks_kernel(
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
    ENTROPY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NEGATIVE: tl.constexpr,
    EVEN: tl.constexpr,
    FINITE: tl.constexpr,
    TOP: tl.constexpr,
    SLACK: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """``m, S, W, t`` of each block of each row, ``[blocks, 4, R]``, and with TOP the column that m is of; with a SLACK
    also ``e^(z - reference)``, as in ``product_statistics_kernel``.

    A tile is as wide as a block, and nothing is carried from tile to tile.
    """
    num_blocks, num_tiles = tl.cdiv(rows, BR), tl.cdiv(columns, BC)
    num_units = num_blocks * num_tiles
    if moved is not None:
        num_units = tl.where(tl.load(moved) != 0, num_units, 0)
    for tile in tl.range(tl.program_id(0), num_units, tl.num_programs(0), flatten=FLATTEN):
        i_r, i_c = place(tile, num_blocks, num_tiles, BAND)  # pyright: ignore[reportGeneralTypeIssues]
        r, c = i_r * BR, i_c * BC
        b_x = logits_tile(hidden, weight, bias, r, c, columns, WIDTH, BR, BC, BD, BIASED, MATCH, WIDEN)
        o_r, o_c = r + tl.arange(0, BR), tl.arange(0, BC)
        m_r = o_r < rows
        a, b_target = tl.load(gain + o_r, mask=m_r, other=1.0), tl.load(column + o_r, mask=m_r, other=SKIP)
        b_at = target_within(b_target, first, c, columns, BC)
        b_x, a, k = shaped(b_x, a, squash, columns - c, o_c, SOFTCAP, NEGATIVE, EVEN)
        # In every tile, though few have a target: a branch would make the next product wait for the whole tile.
        t = tl.sum(tl.where(o_c[None, :] == b_at[:, None], b_x, 0.0), axis=1)
        t = tl.where(b_at < 0, float("nan"), t)
        m, n, s, w, b_e = block_sums(b_x, k, ENTROPY, FINITE, WIDEN)
        p_part = parts + i_c.to(tl.int64) * (4 + TOP) * rows + o_r
        store_part(p_part, rows, m, s.to(tl.float32, bitcast=True), w.to(tl.float32, bitcast=True), t, m_r)
        if TOP:
            best = tl.min(tl.where(b_x == m[:, None], o_c[None, :], BC), axis=1)
            tl.store(p_part + 4 * rows, (first + c + best).to(tl.float32), mask=m_r)
        if SLACK > 0:
            given = tl.load(references + o_r, mask=m_r, other=0.0)
            # What is further off than the slack is made again. Until then it is in range.
            b_e = b_e * tl.exp2(tl.minimum(n - given * LOG2E, SLACK * LOG2E + 1.0))[:, None]
            if SOFTCAP:
                b_y = tl.maximum(b_x, -1.0)  # past the last column it is -inf
                b_e = b_e * (1.0 - b_y * b_y)
            b_e = without_targets(b_e, b_target, b_at, column, o_r, m_r, first, c, o_c, columns, BC)
            store_tile(out, b_e, r, c, rows, columns, out_stride, BR, BC, DESCRIBED)


@triton.jit(do_not_specialize=["rows", "num_blocks", "part_stride"])
def merge_blocks_kernel(
    parts,
    column,
    gain,
    stats,
    rows,
    num_blocks,
    part_stride,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Lines of some rows from their blocks, AHEAD of them at a time. With TOP two lines follow: m, and the number of
    its column. The maximum is looked for first, then come the bins below it."""
    o_r, o_b = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, AHEAD)
    m_r = o_r < rows
    a = tl.abs(tl.load(gain + o_r, mask=m_r, other=1.0))
    k, step = a * LOG2E, (4 + TOP) * rows.to(tl.int64)
    m = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    t, best = m, -m
    held = tl.zeros([ROWS], dtype=tl.int32)
    p_parts = parts + o_b.to(tl.int64)[:, None] * step + o_r[None, :]
    for b in tl.range(0, num_blocks, AHEAD, num_stages=3):
        p_part, mask = p_parts + b * step, m_r[None, :] & (b + o_b < num_blocks)[:, None]
        b_m = tl.load(p_part, mask=mask, other=float("-inf"))
        b_t = tl.load(p_part + 3 * rows, mask=mask, other=float("nan"))
        top = largest(b_m, 0, WIDEN)
        if TOP:
            b_best = tl.load(p_part + 4 * rows, mask=mask, other=0.0)
            found = tl.min(tl.where(b_m == top[None, :], b_best, float("inf")), axis=0)
            best = tl.where(top > m, found, tl.where(top == m, tl.minimum(best, found), best))
        m = tl.where((top != top) | (m != m), float("nan"), tl.maximum(top, m))
        t = tl.maximum(t, tl.max(tl.where(b_t == b_t, b_t, float("-inf")), axis=0))
        held = tl.maximum(held, tl.max((b_t == b_t).to(tl.int32), axis=0))
    own = exponent(m, k).to(tl.int32) >> 4
    a0 = tl.zeros([AHEAD, ROWS], dtype=tl.int64)
    a1, a2, a3, b0, b1, b2, b3 = a0, a0, a0, a0, a0, a0, a0
    for b in tl.range(0, num_blocks, AHEAD, num_stages=3):
        p_part, mask = p_parts + b * step, m_r[None, :] & (b + o_b < num_blocks)[:, None]
        n = exponent(tl.load(p_part, mask=mask, other=float("-inf")), k[None, :])
        s = tl.load(p_part + rows, mask=mask, other=0.0).to(tl.int32, bitcast=True)
        w = tl.load(p_part + 2 * rows, mask=mask, other=0.0).to(tl.int32, bitcast=True)
        a0, a1, a2, a3, b0, b1, b2, b3 = with_blocks(a0, a1, a2, a3, b0, b1, b2, b3, s, w, n, own[None, :])
    read = tl.load(column + o_r, mask=m_r, other=SKIP) != SKIP
    t = tl.where(held > 0, t * a, float("nan"))
    store_bins(stats + o_r, part_stride, m, t, a0, a1, a2, a3, b0, b1, b2, b3, read, m_r, WIDEN)
    if TOP:
        tl.store(stats + o_r + 18 * part_stride, tl.where(read, m, 0.0), mask=m_r)
        tl.store(stats + o_r + 19 * part_stride, tl.where(best < float("inf"), best, 0.0), mask=m_r)


@triton.jit
def row_step(
    b_m,
    p_row,
    p_blocks,
    c,
    columns,
    sign,
    k,
    squash,
    num_blocks,
    WHOLE: tl.constexpr,
    ENTROPY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PER: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """``m, S, W`` of PER blocks of a row, from column c on, into memory; and the maxima so far."""
    o_b = tl.arange(0, PER)
    o_c = c + o_b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if WHOLE:
        b_x = tl.load(p_row + o_c, eviction_policy="evict_first").to(tl.float32)
    else:
        b_x = tl.load(p_row + o_c, mask=o_c < columns, other=0.0).to(tl.float32)
    if SOFTCAP:
        b_x = tanh(b_x * squash)
    b_x = b_x * sign
    if not WHOLE:
        b_x = tl.where(o_c < columns, b_x, float("-inf"))
    k = tl.full([PER], 1.0, dtype=tl.float32) * k
    m, _, s, w, _ = block_sums(b_x, k, ENTROPY, False, WIDEN)  # pyright: ignore[reportGeneralTypeIssues]
    p_block, mask = p_blocks + c // BLOCK + o_b, c + o_b * BLOCK < columns
    tl.store(p_block, m, mask=mask)
    tl.store(p_block + num_blocks, s.to(tl.float32, bitcast=True), mask=mask)
    tl.store(p_block + 2 * num_blocks, w.to(tl.float32, bitcast=True), mask=mask)
    return tl.where((m != m) | (b_m != b_m), float("nan"), tl.maximum(m, b_m))


@triton.jit(do_not_specialize=["rows", "part_stride", "first"])
def row_blocks_kernel(
    logits,
    index,
    column,
    gain,
    stats,
    blocks,
    rows,
    row_stride,
    columns,
    first,
    part_stride,
    squash,
    INDEXED: tl.constexpr,
    ENTROPY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PER: tl.constexpr,
    AHEAD: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Lines of one row after the other, in one read. A program writes the blocks of a row to memory of its own, which
    stays in a cache, and reads them again, one thread to a block."""
    num_blocks = tl.cdiv(columns, BLOCK)
    p_blocks = blocks + tl.program_id(0).to(tl.int64) * 3 * num_blocks
    whole = (columns // (PER * BLOCK)) * (PER * BLOCK)
    o_b = tl.arange(0, AHEAD)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        i_r = tl.zeros([], dtype=tl.int64) + row
        i_c = tl.load(column + i_r)
        read = i_c != SKIP
        i_t = i_r
        if INDEXED:
            i_t = tl.load(index + i_r).to(tl.int64)
        p_row = logits + i_t * row_stride
        a = tl.load(gain + i_r)
        sign = tl.where(a < 0, -1.0, 1.0)
        k = tl.abs(a) * LOG2E
        # A row to leave out is not read.
        end = tl.where(read, columns, 0)
        t = target_logit(p_row, i_c - first, end, a, squash, SOFTCAP)
        b_m = tl.full([PER], float("-inf"), dtype=tl.float32)
        for c in tl.range(0, tl.where(read, whole, 0), PER * BLOCK, num_stages=1):
            b_m = row_step(
                b_m, p_row, p_blocks, c, end, sign, k, squash, num_blocks, True, ENTROPY, SOFTCAP, PER, WIDEN
            )
        if whole < end:
            b_m = row_step(
                b_m, p_row, p_blocks, whole, end, sign, k, squash, num_blocks, False, ENTROPY, SOFTCAP, PER, WIDEN
            )
        tl.debug_barrier()
        here = tl.where(read, num_blocks, 0)
        m = largest(b_m, 0, WIDEN)
        own = exponent(m, k).to(tl.int32) >> 4
        a0 = tl.zeros([AHEAD], dtype=tl.int64)
        a1, a2, a3, b0, b1, b2, b3 = a0, a0, a0, a0, a0, a0, a0
        for b in tl.range(0, here, AHEAD, num_stages=3):
            p_block, mask = p_blocks + b + o_b, b + o_b < here
            n = exponent(tl.load(p_block, mask=mask, other=float("-inf")), k)
            s = tl.load(p_block + num_blocks, mask=mask, other=0.0).to(tl.int32, bitcast=True)
            w = tl.load(p_block + 2 * num_blocks, mask=mask, other=0.0).to(tl.int32, bitcast=True)
            a0, a1, a2, a3, b0, b1, b2, b3 = with_blocks(a0, a1, a2, a3, b0, b1, b2, b3, s, w, n, own)
        store_bins(stats + i_r, part_stride, m, t, a0, a1, a2, a3, b0, b1, b2, b3, read, i_r >= 0, WIDEN)
        # The next row's blocks go where these were read.
        tl.debug_barrier()


@triton.jit
def moved_down(x0, x1, x2, x3, lower):
    """Four bins as seen from ``lower`` bins above."""
    none = x0 * 0
    y0 = tl.where(lower == 0, x0, none)
    y1 = tl.where(lower == 0, x1, tl.where(lower == 1, x0, none))
    y2 = tl.where(lower == 0, x2, tl.where(lower == 1, x1, tl.where(lower == 2, x0, none)))
    y3 = tl.where(lower == 2, x1, tl.where(lower == 3, x0, none))
    y3 = tl.where(lower == 0, x3, tl.where(lower == 1, x2, y3))
    return y0, y1, y2, y3


@triton.jit(do_not_specialize=["rows", "num_parts", "line_stride", "shard_stride"])
def solve_kernel(lines, gain, stats, rows, num_parts, line_stride, shard_stride, ROWS: tl.constexpr):
    """The statistic ``[4, R]`` from the lines ``[P, 18, R]`` of all parts of the rows, by float64 and rounded once."""
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_r = o_r < rows
    a = tl.abs(tl.load(gain + o_r, mask=m_r, other=1.0))
    k = a * LOG2E
    m = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    t = tl.full([ROWS], float("nan"), dtype=tl.float32)
    for i in range(num_parts):
        p_line = lines + i * shard_stride.to(tl.int64) + o_r
        part = tl.load(p_line, mask=m_r, other=0.0)
        own_t = tl.load(p_line + line_stride, mask=m_r, other=0.0)
        m = tl.where((part != part) | (m != m), float("nan"), tl.maximum(part, m))
        t = tl.where(own_t == own_t, own_t, t)
    own = exponent(m, k).to(tl.int32) >> 4
    a0 = tl.zeros([ROWS], dtype=tl.int64)
    a1, a2, a3, b0, b1, b2, b3 = a0, a0, a0, a0, a0, a0, a0
    for i in range(num_parts):
        p_line = lines + i * shard_stride.to(tl.int64) + o_r
        part = tl.load(p_line, mask=m_r, other=0.0)
        lower = own - (exponent(part, k).to(tl.int32) >> 4)
        p_line += 2 * line_stride
        x0, x1 = load_halves(p_line, line_stride, m_r), load_halves(p_line + 2 * line_stride, line_stride, m_r)
        p_line += 4 * line_stride
        x2, x3 = load_halves(p_line, line_stride, m_r), load_halves(p_line + 2 * line_stride, line_stride, m_r)
        x0, x1, x2, x3 = moved_down(x0, x1, x2, x3, lower)
        a0, a1, a2, a3 = a0 + x0, a1 + x1, a2 + x2, a3 + x3
        p_line += 4 * line_stride
        x0, x1 = load_halves(p_line, line_stride, m_r), load_halves(p_line + 2 * line_stride, line_stride, m_r)
        p_line += 4 * line_stride
        x2, x3 = load_halves(p_line, line_stride, m_r), load_halves(p_line + 2 * line_stride, line_stride, m_r)
        x0, x1, x2, x3 = moved_down(x0, x1, x2, x3, lower)
        b0, b1, b2, b3 = b0 + x0, b1 + x1, b2 + x2, b3 + x3
    m = tl.where(m == float("-inf"), 0.0, m)
    base = (exponent(m, k).to(tl.int32) >> 4) * SPAN
    off = base.to(tl.float64) - m.to(tl.float64) * k.to(tl.float64)
    d0, d1, d2, d3 = a0.to(tl.float64), a1.to(tl.float64), a2.to(tl.float64), a3.to(tl.float64)
    total = ((d3 * STEP + d2) * STEP + d1) * STEP + d0
    mean = (b3.to(tl.float64) - 48.0 * d3) * STEP + (b2.to(tl.float64) - 32.0 * d2)
    mean = (mean * STEP + (b1.to(tl.float64) - 16.0 * d1)) * STEP + b0.to(tl.float64)
    inside = tl.abs(tl.minimum(tl.maximum(m, LOWEST), -LOWEST) * k) < FAR
    scale = tl.where(inside & (m == m), tl.exp2(off) * UNIT, float("nan"))
    w = (mean + total * off) * scale * LN2
    tl.store(stats + o_r, m * a, mask=m_r)
    tl.store(stats + rows + o_r, (total * scale).to(tl.float32), mask=m_r)
    tl.store(stats + 2 * rows + o_r, w.to(tl.float32), mask=m_r)
    tl.store(stats + 3 * rows + o_r, t, mask=m_r)
