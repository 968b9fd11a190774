"""``Lazy``: a tensor of known shape that is made of ``Logits`` and computed only if somebody reads it.

It has an edge in autograd's graph to what the logits stand for, so that the gradient is not lost whatever is done with
it. A subclass says which functions of torch it answers by itself; any other computes the logits, which is counted.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.notes import place
from logitless.operands.applied import applied, in_our_names
from logitless.operands.graph import Edge, WithBackward, wrapper
from logitless.operands.logits import (
    ATTRIBUTE_NAMES,
    ATTRIBUTES,
    VALUES,
    Logits,
    attribute,
    count_made,
    no_gradient,
    refuse_change,
)
from logitless.operands.passed_on import BLANKS
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
        return self.joined(self.computed())

    def severed(self) -> bool:
        """Whether this is in a graph that its source is not in. A reentrant checkpoint makes both where no gradient is
        recorded, and then puts what its function returns into the graph."""
        with torch._C.DisableTorchFunctionSubclass():
            own = self.requires_grad
        return torch.is_grad_enabled() and own and not self.source.requires_grad

    def joined(self, value: Tensor) -> Any:
        """The tensor that was computed, with a graph that goes on from this one where the source has none."""
        return WithBackward.apply(self, lambda _: value.clone(), lambda g: g) if self.severed() else value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return graph_break(cls.__torch_function__, func, types, args, kwargs)
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        own = func in ATTRIBUTES or name in ATTRIBUTE_NAMES
        if name == "__get__":
            name = attribute(func)
            own = name not in VALUES
        first = next((x for x in _flat([*args, *kwargs.values()]) if isinstance(x, Lazy)), None)
        if first is not None and (name in OF_GRAPH or func is torch.autograd.grad):
            return first.of_graph(func, name, args, kwargs)
        if own:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if first is not None and not first.severed():
            given, named = in_our_names(args, kwargs)
            blank = BLANKS.get(name) if given and given[0] is first else None
            found = first.answer(name, given, named) if blank is None else applied(blank, given, named)
            if found is not NotImplemented:
                return found
        refuse_change(func, name, args, kwargs)
        return func(*_real(args, name), **_real(kwargs, name))

    def of_graph(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A function that asks for the tensor's place in the graph. Readings do not pass it: what is hooked to it, or
        asked for its gradient, would be lost."""
        asks = name in ("register_hook", "requires_grad_") and not (name == "requires_grad_" and self.requires_grad)
        if asks or func is torch.autograd.grad:
            raise no_gradient(self, name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise LogitlessError(
            f"Logits: {func} reached what was made of logits that were not computed below torch's Python functions, at "
            f"{place()}. Keep the model's own logits there: logitless.defer(model) is reversible."
        )


OF_GRAPH = frozenset(
    {
        *("requires_grad", "grad_fn", "grad", "is_leaf", "retains_grad", "output_nr"),
        *("requires_grad_", "backward", "register_hook"),
    }
)
"""Attributes and methods that are about a tensor's place in the graph."""


class Waiting(Lazy):
    """Numbers of each row that are read when somebody uses them, once.

    Attributes:
        read: gives the numbers.
        value: the numbers, once they were used.
        steps: what was made of the numbers while they waited, such as a slice. Torch would have made it at once, so it
            is made before anybody can change the numbers.
    """

    in_memory = True
    read: Callable[[], Tensor]
    value: Tensor | None
    steps: list[weakref.ref[Waiting]]

    def computed(self) -> Tensor:
        if self.value is None:
            # Whoever uses it first may be a metric, where no graph is recorded.
            with ordinary(graph=self.requires_grad):
                found = self.joined(self.read())
            # One that waited for this has been computed with it, if that is how this one was asked.
            self.value = found if self.value is None else self.value
            for step in (x() for x in self.steps):
                if step is not None:
                    step.computed()
        assert self.value is not None
        # It may have been read before a checkpoint put this into the graph.
        found = self.value = self.value if self.value.requires_grad else self.joined(self.value)
        return found

    def counted(self, name: str) -> Tensor:
        """A reading: no logits are computed."""
        return self.computed()

    def waits_with(self, step: Waiting) -> Waiting:
        """``step``, which is made of these numbers."""
        self.steps.append(weakref.ref(step))
        if self.value is not None:
            step.computed()
        return step

    def of_graph(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Of the numbers, which the graph passes through; before they were read, attributes are the wrapper's."""
        called = func is torch.autograd.grad or name in ("requires_grad_", "backward", "register_hook")
        if called or self.value is not None:
            return func(*_real(args, name), **_real(kwargs, name))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


@contextlib.contextmanager
def ordinary(*, graph: bool) -> Iterator[None]:
    """For numbers that outlast the code that asks for them first: with a graph or without, and never of inference mode,
    whose tensors no graph may hold."""
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(graph))
        yield


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
