"""Logits that are not computed, in autograd's graph: an edge to the tensors behind them, and their gradient.

    hidden, weight  --Edge-->  Logits  --(DDP's sink, a checkpoint, hooks)-->  Logits  --Behind-->  hidden, weight

Wrappers walk the graph from a model's output and register hooks on it. ``Edge`` gives them a node to find. Where nobody
watches the logits, a reading takes hidden states and weight themselves, and backward does not come by. Where somebody
does, the reading stands behind the logits: ``Behind`` hands their gradients on as one :class:`LogitsGradient`, which
has the shape of the logits' gradient and the memory of none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.collectives import sum_over
from logitless.errors import LogitlessError
from logitless.spec import VocabShard

aten = torch.ops.aten

Gradients = tuple[Tensor | None, ...]


def wrapper(cls: type[Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor without memory. C++ code that asks for its address raises, instead of being given none."""
    new = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)  # pyright: ignore[reportAttributeAccessIssue]
    torch._C._set_throw_on_mutable_data_ptr(new)  # pyright: ignore[reportAttributeAccessIssue]
    return new


def laid_out(shape: Sequence[int]) -> Tensor:
    """Rows of that leading shape as they lie in memory, with two columns, of which a cut has one: a tensor without any,
    which tells views from copies. No mode that counts allocations sees it."""
    with torch._C._DisableTorchDispatch():  # pyright: ignore[reportAttributeAccessIssue]
        return torch.empty((*shape, 2), dtype=torch.uint8, device="meta")


def span(x: Tensor) -> tuple[int, int]:
    """First and last place of a tensor in its storage."""
    first = int(x.storage_offset())
    return first, first + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))


def views_of(x: Tensor, found: Any) -> list[tuple[str, Tensor, int]]:
    """Name, counter and version of each result that is a view of ``x``: tensors without memory whose version tells
    whether somebody has written to it."""
    views = []
    for view in found if isinstance(found, (tuple, list)) else (found,):
        plain = type(view) is Tensor and not view.is_inference()
        if plain and torch._C._is_alias_of(x, view):  # pyright: ignore[reportAttributeAccessIssue]
            counter = view.detach()
            counter.data = view.new_empty(0)
            views.append(("a view of them", counter, counter._version))
    return views


def without_result(hook: Callable[[Tensor], Any]) -> None:
    """Run a hook where the gradient of the logits does not come by, which it therefore may not change."""
    gradient = torch.empty(0)
    found = hook(gradient)
    if found is not None and found is not gradient:
        raise LogitlessError(
            "Logits: a hook that was registered after logits were read has changed their gradient, which does not come "
            "by them. Register it before they are read."
        )


class Form(NamedTuple):
    """Shape, dtype and device of a tensor, which autograd compares with those of its gradient."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: Tensor) -> Form:
        return Form(x.shape, x.dtype, x.device)


class LogitsGradient(Tensor):
    """The gradient of logits that were not computed, as gradients of the tensors that they stand for.

    Attributes:
        parts: gradients of these tensors, in their order.
        dense: what code that computed the logits has added, with the numbers of all columns; None where none has.
    """

    parts: Gradients
    dense: Tensor | None

    @staticmethod
    def __new__(cls, form: Form, parts: Gradients, dense: Tensor | None = None) -> LogitsGradient:
        new = wrapper(cls, form.shape, form.dtype, form.device)
        new.parts, new.dense = parts, dense
        return new

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    def __repr__(self, **_: Any) -> str:
        return f"LogitsGradient({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.add.Tensor, aten.add_.Tensor) and not kwargs:
            return _sum(*args)
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            return LogitsGradient(Form.of(args[0]), args[0].parts, args[0].dense)
        if func in (aten.mul.Tensor, aten.div.Tensor) and not isinstance(args[1], LogitsGradient):
            x, by = args
            if not isinstance(by, Tensor) or by.dim() == 0:
                parts = (None if p is None else func(p, by) for p in x.parts)
                return LogitsGradient(Form.of(x), tuple(parts), None if x.dense is None else func(x.dense, by))
        raise LogitlessError(
            f"Logits: {func} reads the gradient of logits that were not computed. Keep the model's own logits there: "
            f"logitless.defer(model) is reversible."
        )


def _sum(one: Tensor, other: Tensor) -> LogitsGradient:
    """The sum that autograd makes where logits are read more than once; one of the two may be an ordinary gradient."""
    like = one if isinstance(one, LogitsGradient) else other
    assert isinstance(like, LogitsGradient)
    parts = _added([x.parts for x in (one, other) if isinstance(x, LogitsGradient)])
    (dense,) = _added([(x.dense,) if isinstance(x, LogitsGradient) else (x,) for x in (one, other)])
    return LogitsGradient(Form.of(like), parts, dense)


def _added(several: Sequence[Gradients]) -> Gradients:
    total, *rest = several
    for other in rest:
        total = tuple(b if a is None else a if b is None else a + b for a, b in zip(total, other, strict=True))
    return total


class Edge(torch.autograd.Function):
    """A tensor that is not computed, with an edge to each of the tensors that it is made of.

    ``made`` is a list of it alone, which autograd does not look into. ``compute`` computes it from the tensors; it runs
    in backward alone, where code below torch's functions made an ordinary gradient. The tensors are not saved through
    autograd: nothing reads them as a rule, and whoever packs saved tensors would copy the weight.
    """

    @staticmethod
    def forward(
        ctx: Any, made: list[Tensor], compute: Callable[[Sequence[Tensor]], Tensor], *tensors: Tensor
    ) -> Tensor:
        ctx.compute, ctx.tensors = compute, tensors
        ctx.set_materialize_grads(False)
        return made[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        parts: Gradients = (None,) * len(ctx.tensors)
        if isinstance(gradient, LogitsGradient):
            parts, gradient = gradient.parts, gradient.dense
        if gradient is not None:
            parts = _added([parts, _gradients(ctx, gradient)])
        return None, None, *parts


def _gradients(ctx: Any, gradient: Tensor) -> Gradients:
    """Gradients of the tensors of an edge that need one, from an ordinary gradient of what they compute."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip(ctx.tensors, ctx.needs_input_grad[2:], strict=True)]
    with torch.enable_grad():
        out = ctx.compute(leaves)
    # A weight whose gradient goes to a buffer has none of its own.
    needed = [x for x in leaves if x.requires_grad]
    gradients = iter(torch.autograd.grad(out, needed, gradient.to(out.dtype), allow_unused=True))
    return tuple(next(gradients) if x.requires_grad else None for x in leaves)


class Behind(torch.autograd.Function):
    """The tensors that logits stand for, with the logits before them in the graph."""

    @staticmethod
    def forward(ctx: Any, logits: Any, tensors: Sequence[Tensor], needs: Sequence[bool]) -> tuple[Tensor, ...]:
        ctx.form, ctx.unit = Form.of(logits), logits._stands.unit if logits._watched else None
        ctx.set_materialize_grads(False)
        copies = tuple(x.detach() for x in tensors)
        # A checkpoint makes logits where no gradient is recorded, and makes them again in backward, where one is.
        if needs[0]:
            ctx.mark_non_differentiable(*(x for x, need in zip(copies, needs, strict=True) if not need))
        return copies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.unit is not None:
            ctx.unit.comes_by()
        return LogitsGradient(ctx.form, gradients), None, None


class WithBackward(torch.autograd.Function):
    """``forward(x)``, whose gradient by x is ``backward(gradient)``. Nothing is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Any]) -> Tensor:
        ctx.gradient_of = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.gradient_of(gradient), None, None


def summed_in_backward(x: Tensor, group: Any) -> Any:
    """``x`` as it is; its gradient, of which every rank has its columns' part, is summed over a vocabulary group."""

    def backward(gradient: Tensor) -> Tensor:
        return sum_over(group, gradient.clone(memory_format=torch.contiguous_format))

    return WithBackward.apply(x, lambda x: x.view_as(x), backward)


def total_over(x: Tensor, group: Any) -> Any:
    """A number of this rank's columns, summed over a vocabulary group. Every rank goes on to the same loss, so that the
    gradient of the sum is that of each part."""
    return WithBackward.apply(x, lambda x: sum_over(group, x.clone()), lambda gradient: gradient)


def all_columns(x: Tensor, shard: VocabShard) -> Any:
    """Logits of all columns from those of each rank of a vocabulary group. Every rank goes on to the same loss, so that
    backward cuts this rank's columns out."""
    here = slice(shard.start, shard.stop)

    def forward(x: Tensor) -> Tensor:
        whole = x.new_zeros(*x.shape[:-1], shard.vocab_size)
        whole[..., here] = x
        return sum_over(shard.group, whole)

    return WithBackward.apply(x, forward, lambda gradient: gradient[..., here])


def graded_into(buffer: Tensor, weight: Tensor) -> Any:
    """The weight as it is; its gradient is added to a buffer of the caller's, and goes nowhere else."""

    def backward(gradient: Tensor) -> None:
        buffer.add_(gradient)

    return WithBackward.apply(weight, lambda weight: weight.view_as(weight), backward)
