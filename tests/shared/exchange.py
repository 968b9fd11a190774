"""Shared by the tests of exchange."""

from __future__ import annotations

from cuts import Batch
from schemes import Layout
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

BATCH = Batch([11, 3, 5, 8, 2], [6, 2, 1, 7, 0], [[1, 0, 0, 1, 1, 1], [0, 1], [1], [0, 0, 1, 1, 0, 1, 1], []])
"""Sixteen response tokens of five samples, the last without a response."""


class Collectives(TorchDispatchMode):
    """Records the collectives that really run, whoever asks for them: (operator, elements)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            sent = args[0] if isinstance(args[0], Tensor) else args[0][0]
            self.calls.append((func._opname, sent.numel()))
        return func(*args, **(kwargs or {}))


def sources(world: int) -> list[Layout]:
    return [
        Layout("zigzag", world),
        Layout("zigzag", world, align=4 * world, absorb=1, extra=3),
        Layout("contiguous", world),
        # So much padding that rank 0 holds every token, and the others none.
        Layout("contiguous", world, extra=30),
        Layout("zigzag lines", world, extra=2),
        Layout("zigzag lines", world, padding="left"),
    ]
