"""Ids, places and sizes that a caller gives: whole numbers, or an error that names the argument.

A float would be cut to an integer, and a bool be taken for 0 or 1, without a word. Neither is an id, a place or a size.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.errors.arguments import LARGEST, dense, described, refused


def integers(x: Any, argument: str, numbers: bool = False) -> Tensor:
    """``[n]`` int64 out of a tensor, an array or a list; a tensor stays on its device, the others go to the CPU.

    ``numbers`` says that they will be read, so that a tensor on the meta device is refused.
    """
    if not isinstance(x, Tensor):
        if not hasattr(x, "__array__"):
            return joined([x], lambda _: argument)
        x = torch.as_tensor(x, device="cpu")
    if hasattr(x, "placements"):
        raise LogitlessError(f"{argument} is a DTensor. Rows are plain tensors, the same on every rank of a shard.")
    if dense(x, argument, "a plain list or tensor of integers", numbers=numbers).dim() != 1:
        raise LogitlessError(f"{argument} must be one-dimensional but has shape {list(x.shape)}.")
    if not holds_integers(x):
        raise LogitlessError(f"{argument} must hold integers but has dtype {x.dtype}.")
    return x.to(torch.int64)


def joined(parts: Sequence[Any], name: Callable[[int], str]) -> Tensor:
    """Integers of all parts, end to end; ``name(i)`` is what errors call part i."""
    if any(isinstance(part, Tensor) for part in parts):
        device, found = device_of(parts), [integers(part, name(i)) for i, part in enumerate(parts)]
        # Lists go to the device of the tensors; tensors on two devices are torch's error.
        return torch.cat([x if isinstance(y, Tensor) else x.to(device) for x, y in zip(found, parts, strict=True)])
    # An array is filled at C speed; torch.tensor inspects every Python integer.
    values = array("q")
    for i, part in enumerate(parts):
        _append(values, part, name(i))
    # frombuffer refuses an empty array.
    empty = torch.zeros(0, dtype=torch.int64, device="cpu")
    return torch.frombuffer(values, dtype=torch.int64).clone() if values else empty


def whole_number(x: Any, argument: str) -> int:
    """A size, as an integer."""
    if not _is_whole(x) or not -LARGEST <= operator.index(x) <= LARGEST:
        raise refused(argument, "an integer of 64 bits", x)
    return operator.index(x)


def holds_integers(x: Tensor) -> bool:
    """Whether a tensor's dtype is one of integers."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def device_of(x: Any) -> torch.device:
    """The device of a tensor, or of the first in a list; torch's default where there are lists alone."""
    parts = [x] if isinstance(x, Tensor) or not isinstance(x, Iterable) else x
    found = next((part for part in parts if isinstance(part, Tensor)), None)
    return torch.get_default_device() if found is None else found.device


def _append(values: array[int], x: Any, argument: str) -> None:
    if hasattr(x, "__array__"):
        x = integers(x, argument).tolist()
    if not isinstance(x, Iterable) or isinstance(x, str | bytes | dict | set):
        raise LogitlessError(f"{argument} must be a list or 1-D tensor of integers but is {described(x)}.")
    x = x if type(x) is list else list(x)
    # Most lists hold nothing but integers: the set of their types spares a look at each.
    for place, value in enumerate(x if set(map(type, x)) - {int} else ()):
        if not _is_whole(value):
            raise LogitlessError(f"{argument} must hold integers but entry {place} is {value!r}.")
    try:
        values.fromlist(x)
    except OverflowError:
        place, value = next((i, n) for i, n in enumerate(x) if not -(2**63) <= operator.index(n) < 2**63)
        raise LogitlessError(f"{argument} must hold 64-bit integers but entry {place} is {value!r}.") from None


def _is_whole(x: Any) -> bool:
    if isinstance(x, bool) or getattr(x, "dtype", None) == torch.bool:
        return False
    try:
        operator.index(x)
    except TypeError:
        return False
    return True


def check_distinct(index: Tensor, num_tokens: int | None) -> int:
    """One past the largest index of ``Rows.at``; raises where one is negative, there twice, or past ``num_tokens``."""
    ordered = index.cpu().sort().values
    if ordered.numel() and int(ordered[0]) < 0:
        raise LogitlessError(f"Rows.at: index must be 0 or more but has {int(ordered[0])}.")
    twice = (ordered[1:] == ordered[:-1]).nonzero()
    if twice.numel():
        raise LogitlessError(
            f"Rows.at: index holds row {int(ordered[twice[0, 0]])} more than once. "
            f"A row has one target; score other targets in calls of their own."
        )
    past = int(ordered[-1]) + 1 if ordered.numel() else 0
    if num_tokens is not None and num_tokens < past:
        raise LogitlessError(f"Rows.at: index reaches row {past - 1} but num_tokens is {num_tokens}.")
    return past
