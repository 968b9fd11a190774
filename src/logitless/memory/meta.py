"""Arguments of a verb on the meta device: the same shapes, dtypes and needs for a gradient, and no numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from logitless.collectives import DryGroup
from logitless.operands import Linear, Logits, LoRA, Teachers
from logitless.operands.logits import like
from logitless.rows import Rows
from logitless.spec import ImaginedShard, VocabShard


class Meta:
    """Turns arguments into such ones.

    Attributes:
        leaves: tensors that need a gradient, by the name of their argument.
        copies: whether a group's collectives work on copies, as gloo's do.
    """

    def __init__(self, copies: bool) -> None:
        self.leaves: dict[str, Tensor] = {}
        self.copies = copies

    def __call__(self, x: Any, name: str) -> Any:
        """The argument ``x`` of that name."""
        if name == "teacher":
            # It has a hidden and a weight of its own, and no gradient flows to them.
            return Meta(self.copies)(x, "")
        if isinstance(x, Logits):
            return self._logits(x)
        if isinstance(x, Tensor):
            return self._tensor(x, name)
        if isinstance(x, VocabShard | ImaginedShard):
            group = None if x.group is None else DryGroup(x.group.size(), self.copies)
            return x if group is None else ImaginedShard(x.start, x.stop, x.vocab_size, group)
        if isinstance(x, Rows):
            x = replace(x, batch=None)
        if isinstance(x, Teachers):
            return Teachers([self(member, name) for member in x.members], self(x.which, name))
        if is_dataclass(x) and not isinstance(x, type) and _has_tensors(x):
            return replace(x, **{f.name: self(getattr(x, f.name), f.name) for f in fields(x) if f.init})
        if isinstance(x, tuple | list) and not hasattr(x, "_fields"):
            return type(x)(self(item, name) for item in x)
        if isinstance(x, Mapping):
            return {key: self(item, str(key)) for key, item in x.items()}
        return x

    def _tensor(self, x: Tensor, name: str) -> Tensor:
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        if not x.requires_grad:
            return made
        # As a model's output arrives: it requires a gradient and is neither a leaf nor a view.
        made = hand_over(made)
        self.leaves[name] = made
        return made

    def _leaf(self, x: Tensor | None, name: str, graded: bool = True) -> Any:
        if x is None:
            return None
        made = torch.empty_strided(
            x.shape, x.stride(), dtype=x.dtype, device="meta", requires_grad=graded and x.requires_grad
        )
        if made.requires_grad:
            self.leaves[name] = made
        return made

    def _logits(self, x: Logits) -> Logits:
        """Deferred logits of such operands."""
        linear, weight = x.linear, x.weight
        own: Any = self._leaf(weight, "weight") if isinstance(weight, Tensor) else None
        if isinstance(weight, LoRA):
            parts = {name: self._leaf(getattr(weight, name), name) for name in ("weight", "a", "b")}
            own = LoRA(**parts, scale=1.0)
        options = {f.name: getattr(linear, f.name) for f in fields(Linear)}
        options["bias"] = self._leaf(linear.bias, "bias")
        options["weight_grad"] = self._leaf(linear.weight_grad, "weight_grad", graded=False)
        options["shard"] = self(linear.shard, "shard")
        options["grad_scale"] = linear.grad_scale if isinstance(linear.grad_scale, float | int) else 1.0
        made = Logits(self._leaf(x.hidden, "hidden"), own, **options)
        return like(made, gain=self(x.gain, "gain"), squash=x.squash)


def _has_tensors(x: Any) -> bool:
    values = [getattr(x, f.name) for f in fields(x)]
    return any(
        isinstance(v, Tensor | VocabShard | ImaginedShard) or (is_dataclass(v) and _has_tensors(v)) for v in values
    )


def hand_over(buffer: Tensor) -> Tensor:
    """The buffer as a model's output would arrive: it requires a gradient and is neither a leaf nor a view.

    No copy is made, so whoever overwrites it overwrites ``buffer``.
    """
    handle = torch.zeros((), device=buffer.device, requires_grad=True)
    return _HandOver.apply(handle, buffer)  # pyright: ignore[reportReturnType]


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, handle: Tensor, buffer: Tensor) -> Tensor:
        return buffer.detach()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[None, None]:
        # The gradient is taken at the output; what lies before it does not matter here.
        return None, None


def backward(outputs: list[Tensor], upstream: list[Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the leaves by name, of outputs that get these upstream gradients."""
    if not leaves or not outputs:
        return {}
    root = _Root.apply(tuple(upstream), *outputs)
    found = torch.autograd.grad(root, list(leaves.values()), allow_unused=True)  # pyright: ignore[reportArgumentType]
    return {name: x for name, x in zip(leaves, found, strict=True) if x is not None}


class _Root(torch.autograd.Function):
    """A number that hands every output its upstream gradient. Handing them to autograd itself imports sympy."""

    @staticmethod
    def forward(ctx: Any, upstream: tuple[Tensor, ...], *outputs: Tensor) -> Tensor:
        ctx.save_for_backward(*upstream)
        return upstream[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.saved_tensors
