"""Shared by the tests of shards and those that build on them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Counts the collectives that really run: (operator, elements sent), whoever asked for them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            is_gather = "allgather" in func._opname
            sent = args[1] if is_gather else args[0]
            count = sum(x.numel() for x in ([sent] if isinstance(sent, Tensor) else sent))
            self.calls.append(("all_gather" if is_gather else func._opname, count))
        return func(*args, **(kwargs or {}))


def bits(x: Tensor) -> Tensor:
    return x.view({4: torch.int32, 8: torch.int64}[x.element_size()])
