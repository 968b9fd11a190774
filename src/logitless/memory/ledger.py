"""``Ledger``: which storages are alive at the fullest moment of a run, and what each is for.

A dispatch mode sees every tensor that torch makes, on any device, and a weak reference tells when its storage is gone.
What a storage is for follows from the function of this package that asked for it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from logitless.memory.shapes import result_of

NAMES = {
    "sources.linear:Projection.empty_tile": "tile of logits",
    "sources.linear:Projection.padded": "hidden rows, padded",
    "sources.linear:selected_rows": "hidden rows",
    "sources.linear:hidden_gradient": "d_hidden of all tokens",
    "sources.gemm": "operands and result of a product",
    "sources.given:gradient_buffer": "d_logits",
    "sources.listed": "support",
    "sources.teachers": "the teacher's rows",
    "passes.exponentials:Exponentials.empty": "exponentials",
    "passes.back:_Block.make": "dZ",
    "passes.back:gradients": "gradients, added up",
    "passes.frozen:lines_with_unit": "unit gradients",
    "passes.chunk:empty_chunk": "chunk of rows",
    "passes.one_pass:OnePass.over": "gradients, added up",
    "passes.one_pass:OnePass._multiply": "rows that stay",
    "passes.one_pass": "vectors of the objective",
    "loss:_scaled": "gradients, scaled",
    "loss": "vectors of the objective",
    "objectives": "vectors of the objective",
    "collectives": "between ranks",
    "operands.kept": "support",
    "readings.support": "support",
    "readings.over_support": "support",
    "readings": "readings of each row",
    "backends.triton.products:statistic_parts": "parts of the statistic",
    "backends": "work of the backend",
    "": "vectors of each row",
}
"""Purposes of the allocations of a function, a module or a package. The innermost that is named here counts."""

IN_PLACE = {
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
}
"""Operators of autograd's formulas that write into zeros of their own in place; under a dispatch mode they copy."""

SCRATCH = {torch.ops.aten.sort.stable: {"cpu": 8, "gpu": 24}}
"""Bytes per element that an operator takes besides its results, measured; the GPU is an H200. A CPU sorts floats in
place."""

SUMS = (torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList)
"""Sums. Where a result has another dtype than the operand, as of truth values, a CPU copies the operand to it first."""


class Item(NamedTuple):
    """Bytes that are alive at the fullest moment, by what they are for. The phase is ``"kept"`` for tensors that
    forward leaves to backward; ``output`` says that they go to the caller."""

    name: str
    bytes: int
    phase: Literal["forward", "kept", "backward"]
    output: bool = False


@dataclass(eq=False)
class Entry:
    """A storage: its size, the shape it was made in, what it is for, and when it lives."""

    bytes: int
    shape: torch.Size
    name: str
    phase: Literal["forward", "kept", "backward"]
    alive: weakref.ref[Any] | None = None
    output: bool = False


class Ledger(TorchDispatchMode):
    """Writes down every storage that is made while it is on; those made before are not counted. All are on meta."""

    def __init__(self, on_gpu: bool = False) -> None:
        super().__init__()
        self._on_gpu = on_gpu
        self._scratch = {op: by_device["gpu" if on_gpu else "cpu"] for op, by_device in SCRATCH.items()}
        self._entries: dict[int, Entry] = {}
        self._bytes = 0
        self._phase: Literal["forward", "backward"] = "forward"
        self._fullest: dict[str, tuple[int, list[Entry]]] = {"forward": (0, []), "backward": (0, [])}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and asking torch would import the compiler.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = result_of(IN_PLACE.get(func) or func, args, kwargs or {})
        for x in tensors_in(out):
            key = _key(x)
            # A view, or a tensor that was written in place, came in with the inputs.
            if key not in self._entries and key not in map(_key, tensors_in((args, kwargs))):
                self._write_down(x, func)
        scratch = 0
        if func in SUMS and not self._on_gpu and args[0].dtype != out.dtype:
            scratch = args[0].numel() * out.element_size()
        if func in self._scratch and (self._on_gpu or not args[0].is_floating_point()):
            scratch = self._scratch[func] * args[0].numel()
        if scratch:
            # The scratch is alive with the results, and gone when the operator returns.
            self._write_down(torch.empty(scratch, dtype=torch.uint8, device="meta"), func)
        return out

    def start_backward(self) -> None:
        """End forward: all storages that are alive now are kept for backward."""
        for entry in self._entries.values():
            entry.phase = "kept"
        self._phase = "backward"
        self._note_fullest()

    def name_output(self, name: str, *tensors: Tensor) -> None:
        """Name tensors that go to the caller."""
        for x in tensors:
            entry = self._entries.get(_key(x))
            if entry is not None:
                entry.name, entry.output = name, True

    def items(self, phase: Literal["forward", "backward"]) -> tuple[Item, ...]:
        """The fullest moment: one item for all storages of one purpose, with its shape if it is one matrix."""
        groups: dict[tuple[str, str, bool], list[Entry]] = {}
        for entry in self._fullest[phase][1]:
            groups.setdefault((entry.name, entry.phase, entry.output), []).append(entry)
        return tuple(_item(group) for group in groups.values() if any(entry.bytes for entry in group))

    def _write_down(self, x: Tensor, func: Any) -> None:
        name, key, storage = _purpose(), _key(x), x.untyped_storage()
        if name is None:
            # A matrix of a function from outside this package is named by its operator.
            name = NAMES[""] if x.dim() < 2 else f"result of {func.overloadpacket.__name__}"
        entry = Entry(storage.nbytes(), x.shape, name, self._phase)

        def let_go(_: object) -> None:
            self._entries.pop(key)
            self._bytes -= entry.bytes

        entry.alive = weakref.ref(storage, let_go)
        self._entries[key] = entry
        self._bytes += entry.bytes
        self._note_fullest()

    def _note_fullest(self) -> None:
        if self._bytes > self._fullest[self._phase][0]:
            self._fullest[self._phase] = (self._bytes, list(self._entries.values()))


def _key(x: Tensor) -> int:
    """The address of the storage of a tensor."""
    return x.untyped_storage()._cdata


def _item(group: list[Entry]) -> Item:
    first, shape = group[0], ""
    if len(group) == 1 and len(first.shape) > 1:
        shape = f" {list(first.shape)}"
    # Tensors that wait for backward have a name of their own, so that no line of the table is there twice.
    saved = ", saved" if first.phase == "kept" and not first.output else ""
    return Item(first.name + shape + saved, sum(entry.bytes for entry in group), first.phase, first.output)


def tensors_in(x: Any) -> Iterator[Tensor]:
    """Tensors in arguments or results, also within lists, tuples and dictionaries; any other object is passed over."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for part in x:
            yield from tensors_in(part)
    elif isinstance(x, dict):
        yield from tensors_in(list(x.values()))


def _purpose() -> str | None:
    """The purpose, by :data:`NAMES`, of the innermost function of this package that is named there; None outside."""
    frame, outside = sys._getframe(3), True
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("logitless."):
            name = module.removeprefix("logitless.")
            for key in (f"{name}:{frame.f_code.co_qualname}", name, name.split(".")[0]):
                if key in NAMES:
                    return NAMES[key]
            outside = outside and name.startswith(("memory.", "tools."))
        frame = frame.f_back
    return None if outside else NAMES[""]
