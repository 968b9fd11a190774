"""Seconds of a route, term by term, with numbers that can be added up by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from logitless.machine import H200, Costs, Tiles
from logitless.product_table import product_sizes
from logitless.route.costs import LossShape, one_pass_seconds, two_pass_seconds
from logitless.route.tiles import Shape

COSTS = Costs(
    flops=1000.0, bandwidth=100.0, adding=10.0, launch=3.0, tile=7.0, statistic=0.5, gradient=0.25, exponentials=0.125
)
MACHINE = replace(H200, costs=COSTS, forward_tile=(8, 10), backward_tile=(20, 10))
# 5,000 logits in float32, operands of two bytes: a product of D = 10 takes 100 s.
SIZES = Shape(100, 50, 4, 2, MACHINE)
SHAPE = LossShape((60, 40), 10, SIZES, exponentials=True, widened=False)
CHUNKS = ((0, 40), (40, 80), (80, 100))
TILES = Tiles(16, 20, 16, 0)
FUSED = SIZES._replace(product=product_sizes(50, 10))
TAUGHT = {"beside": 4, "teacher": 20}


@pytest.mark.parametrize(
    ("more", "tiles", "costs", "seconds"),
    [
        # The product, logits moved (10 bytes each), two gradients, and dW read and written for each chunk.
        ({}, None, {}, 100 + 500 + 200 + 1200),
        ({"trained": False}, None, {}, 100 + 500 + 100),
        # The teacher's product at D = 20, and both logits once more, with the divergence's own.
        (TAUGHT, None, {}, 100 + 200 + 1300 + 200 + 1200),
        ({**TAUGHT, "teacher": 0}, None, {}, 100 + 1300 + 200 + 1200),
        # Exponentials of both: both products with their writing, three times moved, then gradients.
        ({"paired": True, "teacher": 20}, None, {"pair_stored": 0.1}, 100 + 200 + 500 + 300 + 200 + 1200),
        # Eight rows of tiles by three, each with its launch; exponentials overwritten by dZ.
        ({}, TILES, {}, 100 + 300 + 24 * 3 + 200 + 200 + 1200),
        # Where launching takes longer than the work.
        ({}, TILES, {"tile": 70.0}, 24 * 70 + 200 + 200 + 1200),
        ({"sizes": FUSED}, TILES, {}, 100 + 625 + 200 + 200 + 1200),
        ({"sizes": FUSED, "trained": False}, TILES, {}, 100 + 625 + 200 + 100),
    ],
)
def test_one_pass(more: dict[str, Any], tiles: Tiles | None, costs: dict[str, float], seconds: float):
    assert one_pass_seconds(COSTS._replace(**costs), replace(SHAPE, **more), CHUNKS, tiles) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("more", "work", "seconds"),
    [
        # Four products, three of a frozen head; 63 tiles of 80 logits in forward, 100 of 50 in backward.
        ({}, 400, 400 + 500 + 163 * 3),
        ({"trained": False}, 400, 300 + 500 + 163 * 3),
        # A budget for whole tiles: 63 of 80, 25 of 200. One that holds no logit: tiles of one.
        ({}, 1 << 20, 400 + 500 + 88 * 3),
        ({}, 1, 400 + 500 + 10_000 * 3),
        (TAUGHT, 400, 400 + 2 * 200 + 1300),
        ({"sizes": FUSED}, 400, 400 + 5000 * 0.75),
    ],
)
def test_two_passes(more: dict[str, Any], work: int, seconds: float):
    assert two_pass_seconds(COSTS, replace(SHAPE, **more), work) == pytest.approx(seconds)
