"""``Lazy``: a tensor of known shape that is made of ``Logits`` and computed only if somebody reads it.

It has an edge in autograd's graph to what the logits stand for, so that the gradient is not lost whatever is done with
it. A subclass says which functions of torch it answers by itself; any other computes the logits, which is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.operands.graph import Edge, wrapper
from logitless.operands.logits import (
    ATTRIBUTE_NAMES,
    ATTRIBUTES,
    VALUES,
    Logits,
    attribute,
    count_made,
    place,
    refuse_change,
)
from logitless.spec import graph_break


class Lazy(Tensor):
    """A tensor that is made of ``source`` when it is read.

    Attributes:
        source: the logits.
        in_memory: whether it is computed once, so that it may be written to and has an address.
    """

    in_memory = False
    source: Logits

    @classmethod
    def made(
        cls, source: Logits, compute: Callable[[Tensor], Tensor], shape: Sequence[int], dtype: torch.dtype, **more: Any
    ) -> Any:
        """One of that shape, with an edge; ``compute`` makes it of computed logits. The source is a copy of its own
        (:func:`~logitless.operands.passed_on.same`): what changes the logits in place afterwards does not change it.
        """
        new = wrapper(cls, shape, dtype, source.device)
        stands = source.stands()
        tensors = stands.tensors()
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            new = Edge.apply([new], lambda leaves: compute(stands.computed_from(leaves)).to(dtype), *tensors)
        new.source = source
        for name, x in more.items():
            setattr(new, name, x)
        return new

    def __repr__(self, **_: Any) -> str:
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype})"

    def answer(self, name: str, args: Any, kwargs: Any) -> Any:
        """What torch's function of that name gives, without the logits; or NotImplemented."""
        raise NotImplementedError

    def computed(self) -> Tensor:
        """The tensor, computed, with a graph."""
        raise NotImplementedError

    def counted(self, name: str) -> Tensor:
        """The tensor, computed and counted."""
        count_made(self.source, name)
        return self.computed()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return graph_break(cls.__torch_function__, func, types, args, kwargs)
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        own = func in ATTRIBUTES or name in ATTRIBUTE_NAMES
        if name == "__get__":
            name = attribute(func)
            own = name not in VALUES
        if own:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = next((x for x in _flat([*args, *kwargs.values()]) if isinstance(x, Lazy)), None)
        if first is not None:
            found = first.answer(name, args, kwargs)
            if found is not NotImplemented:
                return found
        refuse_change(func, name, args, kwargs)
        return func(*_real(args, name), **_real(kwargs, name))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise LogitlessError(
            f"Logits: {func} reached what was made of logits that were not computed below torch's Python functions, at "
            f"{place()}. Keep the model's own logits there: logitless.defer(model) is reversible."
        )


def _flat(args: Any) -> Any:
    for x in args:
        if isinstance(x, (list, tuple)):
            yield from _flat(x)
        else:
            yield x


def _real(x: Any, name: str) -> Any:
    """Arguments of a function with all that is lazy in them computed, and counted."""
    if isinstance(x, Lazy):
        return x.counted(name)
    if isinstance(x, (list, tuple)):
        return type(x)(_real(item, name) for item in x)
    if isinstance(x, dict):
        return {key: _real(item, name) for key, item in x.items()}
    return x
