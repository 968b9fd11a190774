"""Results of common operators on the meta device: their shape and dtype, and nothing else.

Torch's own meta functions are Python too, take ten times as long, and import the compiler, which takes longer than an
estimate. Whatever is not here is theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def result_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of ``func(*args, **kwargs)`` where all tensors are on the meta device."""
    if func in SHAPES:
        return SHAPES[func](*args, **kwargs)
    name = func._schema.name
    if name.endswith("_") and not name.endswith("__"):
        # An operator in place returns its first argument.
        return args[0]
    if torch.Tag.pointwise in func.tags and args and isinstance(args[0], Tensor):
        return _pointwise(func, args, kwargs)
    return func(*args, **kwargs)


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The broadcast shape, in the dtype that the operator gives to no elements at all."""
    if "out" in kwargs:
        return kwargs["out"]
    shape = _broadcast([x.shape for x in args if isinstance(x, Tensor)])
    return _empty(shape, func(*map(_without_elements, args), **kwargs).dtype)


def _broadcast(shapes: Sequence[torch.Size]) -> list[int]:
    """The shape that shapes are broadcast to. Torch's own function imports sympy."""
    out = [1] * max(map(len, shapes))
    for shape in shapes:
        for i, size in enumerate(reversed(shape), 1):
            out[-i] = out[-i] if size == 1 else size
    return out


def _without_elements(x: Any) -> Any:
    """An empty tensor of as many dimensions on the CPU. One without dimensions has a number: it promotes dtypes so."""
    return torch.ones([0] * x.dim(), dtype=x.dtype) if isinstance(x, Tensor) else x


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _like(x: Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Tensor:
    return _empty(x.shape, dtype or x.dtype)


def _new(x: Tensor, shape: Sequence[int], *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Tensor:
    return _empty(shape, dtype or x.dtype)


def _filled(shape: Sequence[int], *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Tensor:
    return _empty(shape, dtype or torch.get_default_dtype())


def _arange(start: int, stop: int | None = None, step: int = 1, **kwargs: Any) -> Tensor:
    first, last = (0, start) if stop is None else (start, stop)
    return _empty((max(0, math.ceil((last - first) / step)),), kwargs.get("dtype") or torch.int64)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim % (len(shape) + 1), len(tensors))
    return _empty(shape, tensors[0].dtype)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return _empty(shape, tensors[0].dtype)


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """One run of integer indices, as all of ours are."""
    given = [i for i in indices if i is not None]
    first = next(n for n, i in enumerate(indices) if i is not None)
    return _empty([*x.shape[:first], *_broadcast([i.shape for i in given]), *x.shape[first + len(given) :]], x.dtype)


def _reduced(
    x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    """A sum or an extreme over some dimensions; none named are all."""
    named = range(x.dim()) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    gone = {dim % max(x.dim(), 1) for dim in named}
    shape = [1 if i in gone else n for i, n in enumerate(x.shape) if keepdim or i not in gone]
    return _empty(shape, dtype or x.dtype)


def _summed(x: Tensor, *args: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Sums of integers and truth values are int64."""
    return _reduced(x, *args, dtype=dtype or (x.dtype if x.is_floating_point() else torch.int64))


SHAPES: dict[Any, Callable[..., Tensor]] = {}
for _names, _rule in (
    ("empty_like zeros_like ones_like full_like _log_softmax _log_softmax_backward_data", _like),
    ("new_empty new_zeros new_ones", _new),
    ("zeros ones", _filled),
    ("arange arange.start arange.start_step", _arange),
    ("stack", _stack),
    ("cat", _cat),
    ("index.Tensor", _index),
    ("all.dim amax amin", _reduced),
    ("sum sum.dim_IntList", _summed),
    ("mm", lambda a, b: _empty((a.shape[0], b.shape[1]), a.dtype)),
):
    for _name, _, _overload in (name.partition(".") for name in _names.split()):
        SHAPES[getattr(getattr(aten, _name), _overload or "default")] = _rule
