"""Logits that are not computed, in autograd's graph: an edge to what they stand for, and their gradient.

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


class Form(NamedTuple):
    """What autograd compares of a gradient."""

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
    """Autograd's own addition, where logits are read more than once; one of the two may be an ordinary gradient."""
    like = one if isinstance(one, LogitsGradient) else other
    assert isinstance(like, LogitsGradient)
    parts = _added([x.parts for x in (one, other) if isinstance(x, LogitsGradient)])
    (dense,) = _added([(x.dense,) if isinstance(x, LogitsGradient) else (x,) for x in (one, other)])
    return LogitsGradient(Form.of(like), parts, dense)


def _added(several: Sequence[Gradients]) -> Gradients:
    first, *rest = several
    for others in rest:
        pairs = zip(first, others, strict=True)
        first = tuple(b if a is None else a if b is None else a + b for a, b in pairs)
    return first


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
        found: Gradients = (None,) * len(ctx.tensors)
        if isinstance(gradient, LogitsGradient):
            found, gradient = gradient.parts, gradient.dense
        if gradient is not None:
            found = _added([found, gradients_of(ctx.compute, ctx.tensors, ctx.needs_input_grad[2:], gradient)])
        return None, None, *found


def gradients_of(
    compute: Callable[[Sequence[Tensor]], Tensor], tensors: Sequence[Tensor], needs: Sequence[bool], gradient: Tensor
) -> Gradients:
    """Gradients of the tensors that need one, from an ordinary gradient of what ``compute`` makes of them."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]
    with torch.enable_grad():
        out = compute(leaves)
    # A weight whose gradient goes to a buffer has none of its own.
    needed = [x for x in leaves if x.requires_grad]
    found = iter(torch.autograd.grad(out, needed, gradient.to(out.dtype), allow_unused=True))
    return tuple(next(found) if x.requires_grad else None for x in leaves)


class Behind(torch.autograd.Function):
    """The tensors that logits stand for, with the logits before them in the graph."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.form = Form.of(logits)
        ctx.set_materialize_grads(False)
        found = tuple(x.detach() for x in tensors)
        # A checkpoint makes them where no gradient is recorded, and makes them again in backward, where one is.
        if tensors[0].requires_grad:
            ctx.mark_non_differentiable(*(y for x, y in zip(tensors, found, strict=True) if not x.requires_grad))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return LogitsGradient(ctx.form, gradients), None


class Summed(torch.autograd.Function):
    """A tensor as it is, whose gradient is summed over a vocabulary group: every rank has the part of its columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return sum_over(ctx.group, gradient.clone(memory_format=torch.contiguous_format)), None


class Total(torch.autograd.Function):
    """A number of this rank's columns, summed over a vocabulary group. Every rank goes on to the same loss, so that its
    gradient is that of each part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return sum_over(group, x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None


class Whole(torch.autograd.Function):
    """All columns of logits from those of each rank of a vocabulary group. Every rank goes on to the same loss, so that
    backward cuts this rank's columns out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: VocabShard) -> Tensor:
        ctx.shard = shard
        whole = x.new_zeros(*x.shape[:-1], shard.vocab_size)
        whole[..., shard.start : shard.stop] = x
        return sum_over(shard.group, whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient[..., ctx.shard.start : ctx.shard.stop], None


class IntoBuffer(torch.autograd.Function):
    """A weight as it is, whose gradient is added to a buffer of the caller's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, buffer: Tensor) -> Tensor:
        ctx.buffer = buffer
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.buffer.add_(gradient)
        return None, None
