"""Shared by the tests of shards and those that build on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Counts the collectives that really run, whoever asked for them.

    Attributes:
        calls: (operator, elements sent) of each.
        sent: (kind as ``explain`` calls it, bytes that this rank hands in) of each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            is_gather = "allgather" in func._opname
            sent = args[1] if is_gather else args[0]
            tensors = [sent] if isinstance(sent, Tensor) else sent
            self.calls.append(("all_gather" if is_gather else func._opname, sum(x.numel() for x in tensors)))
            self.sent.append(self._kind_and_bytes(func._opname, args))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _kind_and_bytes(name: str, args: tuple) -> tuple[str, int]:
        """Of a gather and of a reduce_scatter the second argument goes in, the first comes out."""
        kind = {"allgather": "all_gather", "reduce_scatter": "reduce_scatter", "allreduce": "all_reduce"}
        (known,) = (kind[x] for x in kind if x in name)
        given = args[0] if known == "all_reduce" else args[1]
        return known, sum(x.nbytes for x in ([given] if isinstance(given, Tensor) else given))


def as_told(plan: Any, when: str) -> list[tuple[str, int]]:
    """What ``explain`` says is sent in forward or in backward, as :attr:`Collectives.sent` has it."""
    return [(x.kind, x.bytes) for x in plan.collectives if x.when == when]


def bits(x: Tensor) -> Tensor:
    return x.view({4: torch.int32, 8: torch.int64}[x.element_size()])
