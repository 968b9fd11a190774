"""Matrix products that end in a softmax: float32 logits are made in registers and never reach memory.

    X [R, D] x W [C, D]^T  ->  a tile [BR, BC] in registers  ->  its statistic, its dZ or its exponentials

A program stays on its multiprocessor and works off one unit after the other. In the statistic a unit is a block of rows
and a group of TILES column tiles, whose ``(m, s, w, t)`` stay in registers and are stored once, as one part of the row;
a second kernel merges the parts in order. Which tiles make a part follows from the columns alone, so a row has the same
bits in every batch. Where the loops are flattened, loads of the next tile are under way while a tile ends.

Each multiprocessor's matrix units wait while a tile ends, so every operation per logit counts (``tile_ends.py``); in
``turns_kernels.py`` they need not.

Names as in ``kernels.py``. Operands come by descriptors, which fill what lies outside with zeros. Columns outside are
then logits of 0, and masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from logitless.backends.triton.kernels import SKIP
from logitless.backends.triton.tile_ends import (
    best_column,
    exponentials_of_tile,
    finished,
    gradient_of_tile,
    merged,
    row_number,
    shaped,
    store_lines,
    target_within,
    tile_part,
)


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
    return finished(b_x, bias, c + tl.arange(0, BC), columns, BIASED, MATCH)


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
            places = (references, references_stride, o_r, m_r, m_r & here, first, c, o_c, i_c, columns)
            b_e = exponentials_of_tile(b_e, b_x, top, a, k, b_target, b_at, column, *places, BC, SLACK, SOFTCAP)
            store_tile(out, b_e, r, c, rows, columns, out_stride, BR, BC, DESCRIBED)


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
        a, m, log_s = row_number(gain, o_r, m_r), row_number(reference, o_r, m_r), row_number(log_sum, o_r, m_r)
        b_plain, b_there = row_number(plain, o_r, m_r), row_number(at_target, o_r, m_r)
        b_product = row_number(product, o_r, m_r) if PRODUCT else 0.0
        places = (squash, first, c, tl.arange(0, BC), columns)
        b_dz = gradient_of_tile(
            b_x, b_target, a, m, log_s, b_plain, b_product, b_there, *places, BC, PRODUCT, SOFTCAP, FINITE
        )
        store_tile(out, b_dz, r, c, rows, columns, out_stride, BR, BC, DESCRIBED)
