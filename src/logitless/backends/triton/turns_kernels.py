"""Products that end in a softmax, by turns: while one group of warps ends its tile, the other one multiplies.

    one warp      X, W  ->  a ring of steps [BR, BD] and [BC, BD] in shared memory
    two groups    D / BD steps of the ring  ->  a tile of logits in registers  ->  its statistic, exponentials or dZ

In ``product_kernels.py`` all warps share a tile, and the matrix units wait while it ends. Here tiles belong to the
groups by turns, in one order for all of them, in which the ring is filled, too. What becomes of a tile is the same code
(``tile_ends.py``), so dZ has the same bits as there. Written in Gluon, since Triton has no word for groups of warps on
cards of capability 9.

The ring has two barriers for each of its places: ``full`` once a step has arrived, ``empty`` once it was multiplied. A
wait tells a barrier's present round from the one before and from nothing else, so no group may wait for a step that is
two rounds away: it waits for its turn first, when the other group has seen all steps before.

Names as in ``kernels.py``; operands come by descriptors. What is passed on together is a tuple: ``ring``, ``units``
(blocks of rows, groups of columns, column tiles), and the numbers and compile-time constants of a kernel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from logitless.backends.triton.kernels import SKIP
from logitless.backends.triton.product_kernels import place
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

# Triton 3.9 has other names for the two directions.
copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

GROUP: gl.constexpr = gl.constexpr(4)  # warps that take turns with as many others
REGISTERS: gl.constexpr = gl.constexpr(240)  # of a thread that multiplies: 128 are sums of its tile
FEW: gl.constexpr = gl.constexpr(24)  # of a thread that loads


@gluon.jit
def unit_of(i, units, BAND: gl.constexpr):
    """Row block and column group of this program's unit number i."""
    return place(gl.program_id(0) + i * gl.num_programs(0), units[0], units[1], BAND)


@gluon.jit
def units_here(units):
    """How many of all units are this program's."""
    return gl.cdiv(units[0] * units[1] - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def tiles_of(i_g, units, TILES: gl.constexpr):
    """Tiles of a group of columns; the last one may have fewer."""
    return gl.minimum(units[2] - i_g * TILES, TILES)


@gluon.jit
def new_ring(hidden, weight, BR: gl.constexpr, BC: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr):
    """Places for STAGES steps of both operands, their barriers, and the barriers of the two groups' turns."""
    b_h = gl.allocate_shared_memory(hidden.dtype, [STAGES, BR, BD], hidden.layout)
    b_w = gl.allocate_shared_memory(weight.dtype, [STAGES, BC, BD], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    fence_async_shared()
    return b_h, b_w, full, empty, turns


@gluon.jit
def new_stages(out, ring, BR: gl.constexpr, BC: gl.constexpr, DESCRIBED: gl.constexpr):
    """Shared memory for a tile of either group on its way to a descriptor; elsewhere nobody asks for it."""
    if DESCRIBED:
        one = gl.allocate_shared_memory(out.dtype, [BR, BC], out.layout)
        other = gl.allocate_shared_memory(out.dtype, [BR, BC], out.layout)
    else:
        one, other = ring[0], ring[0]
    return one, other


@gluon.jit
def load_steps(hidden, weight, ring, units, STEPS: gl.constexpr, TILES: gl.constexpr, BAND: gl.constexpr):
    """All steps of this program's tiles into the ring, in the order of the turns."""
    b_h, b_w, full, empty, _ = ring
    STAGES: gl.constexpr = b_h.shape[0]
    BR: gl.constexpr = b_h.shape[1]
    BC: gl.constexpr = b_w.shape[1]
    BD: gl.constexpr = b_w.shape[2]
    step = 0
    for i in range(units_here(units)):
        i_r, i_g = unit_of(i, units, BAND)
        for f in range(tiles_of(i_g, units, TILES)):
            for d in range(STEPS):
                s = step % STAGES
                mbarrier.wait(empty.index(s), (step // STAGES & 1) ^ 1)
                mbarrier.expect(full.index(s), (BR + BC) * BD * 2)
                copy_in(hidden, [i_r * BR, d * BD], full.index(s), b_h.index(s))
                copy_in(weight, [(i_g * TILES + f) * BC, d * BD], full.index(s), b_w.index(s))
                step += 1


@gluon.jit
def multiplied(ring, tile, b_x, MINE: gl.constexpr, STEPS: gl.constexpr):
    """``[BR, BC]`` float32 sums of this program's tile of that number, a turn of group MINE, 0 or 1."""
    b_h, b_w, full, empty, turns = ring
    STAGES: gl.constexpr = b_h.shape[0]
    mbarrier.wait(turns.index(MINE), (tile // 2 & 1) ^ (1 - MINE))
    begin = tile * STEPS
    mbarrier.wait(full.index(begin % STAGES), begin // STAGES & 1)
    b_x = with_step(b_h, b_w, begin % STAGES, b_x, False)
    for step in range(begin + 1, begin + STEPS):
        mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
        b_x = with_step(b_h, b_w, step % STAGES, b_x, True)
        mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
    mbarrier.arrive(turns.index(1 - MINE), count=1)
    b_x = warpgroup_mma_wait(0, [b_x])
    mbarrier.arrive(empty.index((begin + STEPS - 1) % STAGES), count=1)
    return b_x


@gluon.jit
def with_step(b_h, b_w, s, b_x, ADD: gl.constexpr):
    """The product at place s, which is under way; the one before it is there."""
    b_x = warpgroup_mma(b_h.index(s), b_w.index(s).permute((1, 0)), b_x, use_acc=ADD, is_async=True)
    return warpgroup_mma_wait(1, [b_x])


@gluon.jit
def write_tile(out, staged, b_out, r, c, o_r, o_c, rows, columns, out_stride, DESCRIBED: gl.constexpr):
    """A tile into ``out``, a descriptor or, where that has no right to be one, a pointer."""
    if DESCRIBED:
        # What was staged before has left.
        tma.store_wait(0)
        staged.store(b_out.to(out.dtype))
        fence_async_shared()
        copy_out(out, [r, c], staged)
    else:
        p_out = out + o_r.to(gl.int64)[:, None] * out_stride + (c + o_c)[None, :]
        gl.store(p_out, b_out.to(out.dtype.element_ty), mask=(o_r < rows)[:, None] & (c + o_c < columns)[None, :])


@gluon.jit
def end_in_parts(
    ring,
    staged,
    operands,
    numbers,
    units,
    MINE: gl.constexpr,
    STEPS: gl.constexpr,
    TILES: gl.constexpr,
    BAND: gl.constexpr,
    BIASED: gl.constexpr,
    MATCH: gl.constexpr,
    ENTROPY: gl.constexpr,
    SOFTCAP: gl.constexpr,
    NEGATIVE: gl.constexpr,
    EVEN: gl.constexpr,
    FINITE: gl.constexpr,
    EXPONENTIALS: gl.constexpr,
    TOP: gl.constexpr,
    SLACK: gl.constexpr,
    DESCRIBED: gl.constexpr,
):
    """A group's tiles: the statistic of every second tile of a unit, as one part of the rows; and the exponentials."""
    bias, column, gain, parts, out, references = operands
    rows, columns, first, out_stride, references_stride, squash = numbers
    BR: gl.constexpr = ring[0].shape[1]
    BC: gl.constexpr = ring[1].shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [GROUP, 1], [16, BC, 16])
    o_c = gl.arange(0, BC, layout=gl.SliceLayout(0, LAYOUT))
    before = 0
    for i in range(units_here(units)):
        i_r, i_g = unit_of(i, units, BAND)
        r = i_r * BR
        o_r = r + gl.arange(0, BR, layout=gl.SliceLayout(1, LAYOUT))
        m_r = o_r < rows
        b_gain, b_target = gl.load(gain + o_r, mask=m_r, other=1.0), gl.load(column + o_r, mask=m_r, other=SKIP)
        b_s = gl.zeros([BR], gl.float32, layout=gl.SliceLayout(1, LAYOUT))
        b_m, b_t, b_lost, b_w, b_best = b_s + float("-inf"), b_s + float("nan"), b_s, b_s, b_s.to(gl.int32)
        count = tiles_of(i_g, units, TILES)
        # Turns go on from one unit to the next. Which tiles make a part does not depend on whose turn it is.
        start = (before + MINE) & 1
        for f in range(start, count, 2):
            i_c = i_g * TILES + f
            c = i_c * BC
            b_x = multiplied(ring, before + f, gl.zeros([BR, BC], gl.float32, layout=LAYOUT), MINE, STEPS)
            b_x = finished(b_x, bias, c + o_c, columns, BIASED, MATCH)
            b_at = target_within(b_target, first, c, columns, BC)
            b_x, a, k = shaped(b_x, b_gain, squash, columns - c, o_c, SOFTCAP, NEGATIVE, EVEN)
            top, part_s, part_w, part_t, b_e = tile_part(b_x, k, b_at, o_c, ENTROPY, FINITE, False)
            b_best = best_column(b_best, top > b_m, b_x, top, c, o_c, BC, TOP)
            b_t = gl.where(part_t == part_t, part_t, b_t)
            b_m, b_s, b_lost, b_w = merged(b_m, b_s, b_lost, b_w, top, part_s, part_w, k)
            if EXPONENTIALS:
                places = (references, references_stride, o_r, m_r, m_r, first, c, o_c, i_c, columns)
                b_e = exponentials_of_tile(b_e, b_x, top, a, k, b_target, b_at, column, *places, BC, SLACK, SOFTCAP)
                write_tile(out, staged, b_e, r, c, o_r, o_c, rows, columns, out_stride, DESCRIBED)
        p_part = parts + (2 * i_g + start).to(gl.int64) * (4 + TOP) * rows + o_r
        store_lines(p_part, rows, b_m, b_s + b_lost, b_w, b_t, first + b_best, m_r, TOP)
        before += count
    if DESCRIBED:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "columns", "first", "references_stride"])
def turns_statistics_kernel(
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
    WIDTH: gl.constexpr,
    BR: gl.constexpr,
    BC: gl.constexpr,
    BD: gl.constexpr,
    TILES: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
    BIASED: gl.constexpr,
    MATCH: gl.constexpr,
    ENTROPY: gl.constexpr,
    SOFTCAP: gl.constexpr,
    NEGATIVE: gl.constexpr,
    EVEN: gl.constexpr,
    FINITE: gl.constexpr,
    EXPONENTIALS: gl.constexpr,
    TOP: gl.constexpr,
    SLACK: gl.constexpr,
    DESCRIBED: gl.constexpr,
):
    """As ``product_statistics_kernel``, but a unit of TILES tiles has two parts, of its even and of its odd tiles."""
    STEPS: gl.constexpr = (WIDTH + BD - 1) // BD
    num_blocks = gl.cdiv(rows, BR)
    if moved is not None:
        num_blocks = gl.where(gl.load(moved) != 0, num_blocks, 0)
    units = (num_blocks, gl.cdiv(columns, BC * TILES), gl.cdiv(columns, BC))
    ring = new_ring(hidden, weight, BR, BC, BD, STAGES)
    one, other = new_stages(out, ring, BR, BC, DESCRIBED)
    operands = (bias, column, gain, parts, out, references)
    numbers = (rows, columns, first, out_stride, references_stride, squash)
    # fmt: off
    gl.warp_specialize(
        [
            (end_in_parts, (ring, one, operands, numbers, units, 0, STEPS, TILES, BAND, BIASED, MATCH, ENTROPY,
                            SOFTCAP, NEGATIVE, EVEN, FINITE, EXPONENTIALS, TOP, SLACK, DESCRIBED)),
            (end_in_parts, (ring, other, operands, numbers, units, 1, STEPS, TILES, BAND, BIASED, MATCH, ENTROPY,
                            SOFTCAP, NEGATIVE, EVEN, FINITE, EXPONENTIALS, TOP, SLACK, DESCRIBED)),
            (load_steps, (hidden, weight, ring, units, STEPS, TILES, BAND)),
        ],
        [GROUP, 1],
        [REGISTERS, FEW],
    )
    # fmt: on


@gluon.jit
def end_in_gradients(
    ring,
    staged,
    operands,
    numbers,
    units,
    MINE: gl.constexpr,
    STEPS: gl.constexpr,
    BAND: gl.constexpr,
    BIASED: gl.constexpr,
    MATCH: gl.constexpr,
    PRODUCT: gl.constexpr,
    SOFTCAP: gl.constexpr,
    FINITE: gl.constexpr,
    DESCRIBED: gl.constexpr,
):
    """A group's tiles of dZ."""
    bias, column, gain, reference, log_sum, plain, product, at_target, out = operands
    rows, columns, first, out_stride, squash = numbers
    BR: gl.constexpr = ring[0].shape[1]
    BC: gl.constexpr = ring[1].shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [GROUP, 1], [16, BC, 16])
    o_c = gl.arange(0, BC, layout=gl.SliceLayout(0, LAYOUT))
    for i in range(MINE, units_here(units), 2):
        i_r, i_c = unit_of(i, units, BAND)
        r, c = i_r * BR, i_c * BC
        o_r = r + gl.arange(0, BR, layout=gl.SliceLayout(1, LAYOUT))
        m_r = o_r < rows
        # Loads of the rows' numbers are under way while the tile is multiplied.
        b_target = gl.load(column + o_r, mask=m_r, other=SKIP)
        a, m, log_s = row_number(gain, o_r, m_r), row_number(reference, o_r, m_r), row_number(log_sum, o_r, m_r)
        b_plain, b_there = row_number(plain, o_r, m_r), row_number(at_target, o_r, m_r)
        b_product = row_number(product, o_r, m_r) if PRODUCT else 0.0
        b_x = multiplied(ring, i, gl.zeros([BR, BC], gl.float32, layout=LAYOUT), MINE, STEPS)
        b_x = finished(b_x, bias, c + o_c, columns, BIASED, MATCH)
        places = (squash, first, c, o_c, columns)
        b_dz = gradient_of_tile(
            b_x, b_target, a, m, log_s, b_plain, b_product, b_there, *places, BC, PRODUCT, SOFTCAP, FINITE
        )
        write_tile(out, staged, b_dz, r, c, o_r, o_c, rows, columns, out_stride, DESCRIBED)
    if DESCRIBED:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "columns", "first"])
def turns_gradient_kernel(
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
    WIDTH: gl.constexpr,
    BR: gl.constexpr,
    BC: gl.constexpr,
    BD: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
    BIASED: gl.constexpr,
    MATCH: gl.constexpr,
    PRODUCT: gl.constexpr,
    SOFTCAP: gl.constexpr,
    FINITE: gl.constexpr,
    DESCRIBED: gl.constexpr,
):
    """As ``product_gradient_kernel``; every tile is a unit."""
    STEPS: gl.constexpr = (WIDTH + BD - 1) // BD
    num_tiles = gl.cdiv(columns, BC)
    units = (gl.cdiv(rows, BR), num_tiles, num_tiles)
    ring = new_ring(hidden, weight, BR, BC, BD, STAGES)
    one, other = new_stages(out, ring, BR, BC, DESCRIBED)
    operands = (bias, column, gain, reference, log_sum, plain, product, at_target, out)
    numbers = (rows, columns, first, out_stride, squash)
    # fmt: off
    gl.warp_specialize(
        [
            (end_in_gradients, (ring, one, operands, numbers, units, 0, STEPS, BAND, BIASED, MATCH, PRODUCT, SOFTCAP,
                                FINITE, DESCRIBED)),
            (end_in_gradients, (ring, other, operands, numbers, units, 1, STEPS, BAND, BIASED, MATCH, PRODUCT, SOFTCAP,
                                FINITE, DESCRIBED)),
            (load_steps, (hidden, weight, ring, units, STEPS, 1, BAND)),
        ],
        [GROUP, 1],
        [REGISTERS, FEW],
    )
    # fmt: on
