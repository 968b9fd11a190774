"""Shared by the tests of parallel and those that build on them."""

from __future__ import annotations

from cuts import Batch
from schemes import Layout
from split_model import LOSSES, Setup, divisible

SPLITS = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 4: [(4, 1), (2, 2)], 8: [(4, 2)]}
"""(context-parallel, tensor-parallel) ranks of each world size."""


RAGGED = Batch([11, 3, 5, 8], [6, 2, 1, 0], [[1, 0, 0, 1, 1, 1], [0, 1], [1], []])


SHORT = Batch([2, 1, 3], [1, 0, 2], [[1], [], [0, 1]])
"""Samples shorter than the number of chunks; with four ranks some have no rows."""


def schemes(size: int) -> list[Layout]:
    """Every scheme over so many context-parallel ranks."""
    split = [
        Layout("zigzag", size),
        Layout("zigzag", size, extra=3),
        Layout("zigzag", size, align=4 * size),
        Layout("zigzag", size, align=4 * size, absorb=1),
        Layout("contiguous", size),
        Layout("contiguous", size, extra=2),
        Layout("contiguous", size, align=2 * size),
        Layout("zigzag lines", size, extra=1),
        Layout("zigzag lines", size, padding="left"),
    ]
    whole = [
        Layout("packed"),
        Layout("packed", extra=5),
        Layout("packed", align=4, absorb=1),
        Layout("lines"),
        Layout("lines", extra=1, padding="left"),
    ]
    return split + whole if size == 1 else split


def setups(world: int, batch: Batch, losses: tuple[str, ...] = LOSSES) -> list[Setup]:
    found = []
    for size, tp in SPLITS[world]:
        for place, layout in enumerate(schemes(size)):
            for step, loss in enumerate(losses):
                # Half of the cases score only the rows whose mask counts; the answer is the same.
                mask_only = (place + step) % 2 == 1
                found.append(Setup(layout, tp, loss, mask_only=mask_only))
                if tp > 1 and loss in ("tokens", "sum"):
                    found.append(Setup(divisible(layout, batch, tp), tp, loss, True, mask_only))
    return found
