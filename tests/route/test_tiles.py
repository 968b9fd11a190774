"""Tiles of products that end in their softmax: whole tiles of the product, within the bytes of a tile of logits."""

from __future__ import annotations

import pytest
import torch

from logitless.backends.contract import Problem
from logitless.backends.tiled import SMALL_TILE, tile_shape
from logitless.machine import H200, Machine
from logitless.product_table import product_sizes
from logitless.route.tiles import Shape, backward_tiles, forward_tiles, parts_row


def fused(rows: int, columns: int) -> Shape:
    return Shape(rows, columns, 4, 2, H200, product_sizes(columns, 64))


@pytest.mark.parametrize("memory", [1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26])
@pytest.mark.parametrize(("rows", "columns"), [(1000, 5003), (70, 151936), (9000, 151936), (300, 130)])
def test_forward(rows: int, columns: int, memory: int):
    shape = fused(rows, columns)
    product = shape.product
    assert product is not None
    tiles, plain = forward_tiles(shape, memory), forward_tiles(shape._replace(product=None), memory)
    each = parts_row(columns, product)
    room = max(1, min(rows, plain.rows * plain.columns * 4 // each))
    assert tiles.columns == columns
    assert tiles.fused
    # All that there is room for, in whole blocks of rows where there are several.
    assert tiles.rows == (room - room % product.rows if product.rows < room < rows else room)


def test_a_row_whose_parts_do_not_fit_is_alone():
    assert forward_tiles(fused(1000, 151936), 1 << 10).rows == 1


@pytest.mark.parametrize("memory", [1 << 16, 1 << 20, 1 << 24, 1 << 28])
@pytest.mark.parametrize(("rows", "columns"), [(1000, 5003), (70, 151936), (9000, 151936), (9000, 1001), (300, 130)])
def test_backward(rows: int, columns: int, memory: int):
    shape = fused(rows, columns)
    assert shape.product is not None
    tiles = backward_tiles(shape, memory)
    least = min(shape.product.columns, columns)
    assert tiles.columns % least == 0 or tiles.columns == columns
    assert tiles.slabs == (rows < columns)
    assert 1 <= tiles.block <= rows
    # What a tile of logits and its dZ may take.
    assert tiles.block * tiles.columns * 2 <= max(memory, 2 * least)


def test_blocks_of_a_narrow_head_leave_room_for_a_slab_of_dz():
    """Half of 64 KiB holds 64 rows of 256 columns in two bytes, or 163 of the 100 that there are."""
    assert backward_tiles(Shape(9000, 1001, 4, 2, H200), 1 << 16).block == 64
    assert backward_tiles(Shape(9000, 100, 4, 2, H200), 1 << 16).block == 163


def test_a_tile_is_small_beside_a_small_problem():
    """A budget that holds all of the logits is not taken: an eighth of them is enough for a tile, and no less pays."""

    def area(rows: int, columns: int, memory: int = 1 << 40) -> int:
        one = torch.ones(rows)
        problem = Problem(torch.empty(0), None, one.long(), one, 0.0, columns, True, memory)
        height, width = tile_shape(problem)
        assert height == 1 or width == columns
        return height * width

    assert area(4000, 1000) == 4000 * 1000 // 8
    assert area(40, 1000) == min(40 * 1000, SMALL_TILE // 1000 * 1000)
    # Two buffers of float32, or three under a softcap, are what the budget is for.
    assert area(4000, 1000, 8 * 100 * 1000) == 100 * 1000


def test_large_budgets_fill_chunks_by_larger_tiles():
    """From 4 GiB on, as measured."""
    for card, filling in ((H200, 4224), (Machine.card("A100", 108, 8), 3456)):
        assert [card.chunk_tile(memory) for memory in (1, (4 << 30) - 1)] == [(2048, filling)] * 2
        assert [card.chunk_tile(memory) for memory in (4 << 30, 9 << 29, 80 << 30)] == [(4096, 2 * filling)] * 3
