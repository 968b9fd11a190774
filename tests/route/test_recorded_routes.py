"""Sizes and routes as recorded, most for two machines that nobody measures: a change of the rules is made knowingly.

Results do not depend on tiles and chunks, so that no other test sees a rule that is off by one: only time and memory
would tell. ``python tests/route/test_recorded_routes.py`` records them anew; the difference in ``recorded.json`` is
what a change does.
"""

from __future__ import annotations

import inspect
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch

from logitless import machine, product_table
from logitless.errors import LogitlessError
from logitless.machine import ALIGNED, Costs, Machine
from logitless.product_table import product_sizes
from logitless.route.costs import LossShape, one_pass_seconds, two_pass_seconds
from logitless.route.loss import choose_loss_plan, whole_samples
from logitless.route.tiles import Shape, all_rows, backward_tiles, chunk_tiles, even_chunks, forward_tiles, parts_row

RECORDED = Path(__file__).with_name("recorded.json")
COSTS = Costs(
    flops=7e14, bandwidth=4e12, adding=3e12, launch=9e-6, tile=2e-5, statistic=1e-12, gradient=3e-12, exponentials=2e-12
)
CARD = Machine(
    name="a card",
    wide_products=True,
    epilogues=True,
    elementwise=0.0,
    filling=4224,
    forward_tile=(4096, 8448),
    backward_tile=(4096, 8448),
    block=16384,
    chunk_tiles=((4 << 30, (4096, 8448)), (0, (2048, 4224))),
    stretch=True,
    same_tiles=False,
    costs=COSTS,
)
HOST = Machine(
    name="a host",
    wide_products=False,
    epilogues=True,
    elementwise=0.5,
    filling=4224,
    forward_tile=(1024, 4096),
    backward_tile=(1024, 4096),
    block=16384,
    chunk_tiles=((0, (1024, 4096)),),
    stretch=False,
    same_tiles=True,
    costs=None,
)
ROWS, COLUMNS = (0, 1, 3, 70, 257, 1000, 9000, 16384, 40961), (1, 2, 100, 130, 1001, 5003, 32768, 151936)
MEMORY = (1, 100, 3000, 1 << 14, 1 << 16, 300_000, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30, 6 << 30)


def shapes(r: random.Random) -> Iterator[tuple[Shape, int]]:
    while True:
        rows, columns, (wide, narrow) = r.choice(ROWS), r.choice(COLUMNS), r.choice([(4, 2), (4, 4), (2, 2), (8, 8)])
        product = product_sizes(columns, 64) if r.random() < 0.4 else None
        shape = Shape(rows, columns, wide, narrow, r.choice([CARD, HOST]), product, r.choice([4, 5]), r.random() < 0.2)
        yield shape, r.choice(MEMORY)


def tiles_of(function: Callable[[Shape, int], Any], count: int = 150) -> list[list[int] | str]:
    drawn = shapes(random.Random(0))
    return [_tiles(function, *next(drawn)) for _ in range(count)]


def _tiles(function: Callable[[Shape, int], Any], shape: Shape, memory: int) -> list[int] | str:
    """The sizes, or how a budget that is too small is refused."""
    try:
        return [int(x) for x in function(shape, memory)]
    except LogitlessError as error:
        return str(error)


def loss_shapes(r: random.Random) -> Iterator[tuple[LossShape, int, bool]]:
    while True:
        counts = tuple(r.choice([1, 40, 300, 3000]) for _ in range(r.choice([1, 3, 8])))
        dtype, wide = r.choice([(torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.bfloat16,) * 2])
        flags = {name: r.random() < 0.3 for name in ("bias", "capped", "fused")} | {"trained": r.random() < 0.7}
        sizes = {"dtype": dtype, "logits_dtype": wide, "machine": r.choice([CARD, HOST]), **flags}
        yield LossShape.of(counts, r.choice(COLUMNS), r.choice([64, 4096]), **sizes), r.choice(MEMORY), r.random() < 0.5


def loss_plans() -> list[list[Any]]:
    found, drawn = [], loss_shapes(random.Random(0))
    for _ in range(150):
        shape, memory, by_sample = next(drawn)
        plan = choose_loss_plan(shape, by_sample, None, memory)
        tiles = None if plan.tiles is None else [int(x) for x in plan.tiles]
        sizes = [plan.products, len(plan.chunks), plan.rows, plan.columns, plan.elementwise, plan.whole_samples]
        found.append([plan.kind, *(int(x) for x in sizes), tiles])
    return found


def seconds() -> list[list[str]]:
    """Of both routes, in six digits."""
    found, drawn = [], loss_shapes(random.Random(1))
    for _ in range(60):
        shape, memory, _ = next(drawn)
        chunks = even_chunks(sum(shape.counts), 700)
        tiles = None if memory % 3 else forward_tiles(shape.sizes._replace(product=None), 1 << 20)
        both = one_pass_seconds(COSTS, shape, chunks, tiles), two_pass_seconds(COSTS, shape, memory)
        found.append([f"{x:.5e}" for x in both])
    return found


def chunks() -> list[list[list[int]]]:
    r = random.Random(0)
    pairs = [even_chunks(r.choice(ROWS), r.choice([1, 7, 1024, 5000])) for _ in range(25)]
    pairs = [x for x in pairs if len(x) < 20]
    counts = [tuple(r.choice([0, 1, 5, 40]) for _ in range(r.choice([1, 4, 9]))) for _ in range(25)]
    return [[list(x) for x in one] for one in (*pairs, *(whole_samples(x, 45) for x in counts))]


def kernels() -> list[list[Any]]:
    """Sizes of every Triton kernel, on both sides of each bound."""
    grids = {
        "dtype": [torch.float32, torch.bfloat16],
        "canonical": [False, True],
        "slab": [128, 256, 512, 513],
        "other": [64, 2048],
        "turns": [False, True],
        "width": [1, 17, 64, 65, 512, 1535, 1536, 3071, 3072, machine.TILE, machine.TILE + 1],
        "columns": [1, 17, 255, 256, 1000, machine.SMALL, machine.SMALL + 1, machine.TILE, machine.TILE + 1, 151936],
    }
    found = []
    functions = {name: x for module in (machine, product_table) for name, x in vars(module).items()}
    for name in sorted(name for name in functions if name.endswith("_sizes")):
        function = functions[name]
        for values in itertools.product(*(grids[argument] for argument in inspect.signature(function).parameters)):
            sizes = function(*values)
            found.append([name, *map(str, values), list(sizes.values() if isinstance(sizes, dict) else sizes)])
    return found


def cards() -> list[list[Any]]:
    """An H200, cards that nobody measured, and a CPU."""
    known = [
        Machine.card(f"a card of {n}", n, capability) for n, capability in ((132, 9), (132, 8), (114, 9), (108, 8))
    ]
    return [list(astuple(x)) for x in (*known, machine.CPU)]


NOW: dict[str, Callable[[], list[Any]]] = {
    "forward": lambda: tiles_of(forward_tiles),
    "backward": lambda: tiles_of(backward_tiles),
    "on the way to a chunk": lambda: tiles_of(chunk_tiles),
    "all rows": lambda: tiles_of(lambda shape, memory: all_rows(forward_tiles(shape, memory), shape)),
    "parts": lambda: [[parts_row(n, product_sizes(n, 64), lines)] for n in COLUMNS for lines in (4, 5)],
    "loss": loss_plans,
    "seconds": seconds,
    "chunks": chunks,
    "kernels": kernels,
    "cards": cards,
}


@pytest.mark.parametrize("name", NOW)
def test_sizes_and_routes_are_as_recorded(name: str):
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))[name]
    found = json.loads(json.dumps(NOW[name]()))
    assert len(found) == len(recorded)
    wrong = [f"{i}: {b}, recorded {a}" for i, (a, b) in enumerate(zip(recorded, found, strict=True)) if a != b]
    assert not wrong, "\n".join(["python tests/route/test_recorded_routes.py records them anew", *wrong[:10]])


def test_sizes_keep_to_their_budget():
    """Whatever is recorded: a tile of logits, with the parts or the dZ beside it, is within it, or a single row."""
    drawn = shapes(random.Random(2))
    for _ in range(400):
        shape, memory = next(drawn)
        found = _tiles(forward_tiles, shape, memory)
        if isinstance(found, str):
            assert memory < 1 << 16
            continue
        rows, columns, *_ = found
        assert 1 <= columns <= max(shape.columns, ALIGNED if shape.blocks else 1)
        if shape.product is None and rows * columns > 128:
            assert rows * columns * shape.logits_bytes <= max(memory, 128 * shape.logits_bytes)


def record() -> None:
    found = {name: make() for name, make in NOW.items()}
    lines = [
        f" {json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(x)}" for x in found[name]) + "\n ]" for name in NOW
    ]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(record())
