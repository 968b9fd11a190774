"""The two matrix products that dZ ends in: ``dX = dZ W`` and ``dW += dZ^T X``.

A program stays on its multiprocessor and works off one tile after the other; loads of the next are under way while a
tile is stored. They are for where the library is slow: rows whose tiles do not fill the card, and odd vocabularies.
Names as in ``kernels.py``; what lies outside of a matrix is loaded as 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from logitless.backends.triton.product_kernels import place


@triton.jit
def added(b_a, b_b, b_x, WIDEN: tl.constexpr):
    """``b_a @ b_b + b_x``."""
    if WIDEN:
        # The interpreter multiplies the bit patterns of bfloat16.
        return tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), b_x, input_precision="ieee")
    return tl.dot(b_a, b_b, b_x)


@triton.jit
def store_half(out, b_x, r, c, ADD: tl.constexpr, WIDEN: tl.constexpr):
    """Into a descriptor, or added to what is there: by memory itself, so that nothing is read and waited for."""
    if ADD and WIDEN:
        # The interpreter knows of no such addition.
        out.store([r, c], out.load([r, c]) + b_x)
    elif ADD:
        out.atomic_add([r, c], b_x)
    else:
        out.store([r, c], b_x.to(out.dtype))


@triton.jit
def store_halves(out, b_x, r, c, BR: tl.constexpr, BC: tl.constexpr, ADD: tl.constexpr, WIDEN: tl.constexpr):
    """A tile, one half of its columns after the other: both would not fit beside what is loaded for the next."""
    b_left, b_right = tl.split(tl.permute(tl.reshape(b_x, (BR, 2, BC // 2)), (0, 2, 1)))
    store_half(out, b_left, r, c, ADD, WIDEN)
    store_half(out, b_right, r, c + BC // 2, ADD, WIDEN)


@triton.jit(do_not_specialize=["rows", "depth"])
def product_rows_kernel(
    d_z,
    weight,
    out,
    rows,
    depth,
    WIDTH: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    PARTS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """``out[part] = d_z[:, part] @ weight[part]``, where part i of PARTS has the steps ``i depth .. (i + 1) depth`` of
    BD columns of d_z each, and ``out`` has whole blocks of rows for each part."""
    num_r, num_c = tl.cdiv(rows, BR), tl.cdiv(WIDTH, BC)
    tl.assume(depth > 0)
    for unit in tl.range(tl.program_id(0), num_r * num_c * PARTS, tl.num_programs(0), flatten=True):
        i_r, i_c = unit // num_c, unit % num_c  # row blocks of all parts
        r, c, first = i_r % num_r * BR, i_c * BC, i_r // num_r * depth
        b_x = tl.zeros([BR, BC], dtype=tl.float32)
        for step in range(depth):
            v = (first + step) * BD
            b_x = added(d_z.load([r, v]), weight.load([v, c]), b_x, WIDEN)
        store_halves(out, b_x, i_r * BR, c, BR, BC, False, WIDEN)


@triton.jit(do_not_specialize=["rows", "columns"])
def product_columns_kernel(
    d_z,
    hidden,
    out,
    rows,
    columns,
    WIDTH: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BAND: tl.constexpr,
    ADD: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """``out = d_z.T @ hidden``, or added to it: ``[columns, WIDTH]``."""
    num_r, num_c = tl.cdiv(columns, BR), tl.cdiv(WIDTH, BC)
    tl.assume(rows > 0)
    for tile in tl.range(tl.program_id(0), num_r * num_c, tl.num_programs(0), flatten=True):
        i_r, i_c = place(tile, num_r, num_c, BAND)
        r, c = i_r * BR, i_c * BC
        b_x = tl.zeros([BR, BC], dtype=tl.float32)
        for d in range(0, rows, BD):
            b_x = added(d_z.load([d, r]).T, hidden.load([d, c]), b_x, WIDEN)
        store_halves(out, b_x, r, c, BR, BC, ADD, WIDEN)
