"""``LoRA``: a head's weight with a low-rank adapter, ``weight + scale * b @ a``, which is never made.

    logits = X W.T + Y B.T      with  Y = scale * X A.T, [T, r], once per call

Y is made here, outside of the calls' autograd Functions: they return its gradient, and ``_Inner`` makes those of A and
of X from it. Inside of them, B is more columns of the weight, which multiply Y as the weight multiplies X.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from logitless.errors import ELSEWHERE, LogitlessError
from logitless.errors.arguments import FLOATS, refused
from logitless.spec import inspectable


@dataclass(frozen=True, eq=False)
class LoRA:
    """A head with a low-rank adapter, to be passed for ``weight``: the same as ``weight + scale * b @ a``.

    Gradients go to whichever of hidden states, weight, a and b need one; where the weight needs none, its product is
    not made. Logits take one small product more per tile. Neither a merged weight nor one with more columns exists.

    Args:
        weight: ``[V, D]`` of the head, frozen or not; under a shard, the shard's part.
        a: ``[r, D]``, the same on all ranks of a shard's group.
        b: ``[V, r]``; under a shard, the shard's part.
        scale: of the adapter: peft's ``lora_alpha / r``, or over the root of r. A finite number, or a 0-dim tensor
            without gradient; a learned scale goes into b, as ``LoRA(weight, a, scale * b)``.
        dropout: applied to the hidden states that a sees, in training; None for none.

    >>> weight, a, b = torch.zeros(10, 4), torch.ones(2, 4), torch.zeros(10, 2)
    >>> LoRA(weight, a, b, scale=2.0)
    LoRA(10 x 4, rank 2, scale=2.0)
    """

    weight: Tensor
    a: Tensor
    b: Tensor
    scale: float | Tensor = 1.0
    dropout: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        for name in ("weight", "a", "b"):
            x = getattr(self, name)
            if not isinstance(x, Tensor) or x.layout != torch.strided or x.dim() != 2 or x.dtype not in FLOATS:
                hint = " A layer goes in as its weight." if isinstance(getattr(x, "weight", None), Tensor) else ""
                hint = f" {ELSEWHERE}" if isinstance(x, Tensor) and x.dim() == 1 else hint
                raise refused(f"LoRA: {name}", "a matrix of floats", x, hint)
        (columns, size), rank = self.weight.shape, self.a.shape[0]
        if tuple(self.a.shape) != (rank, size) or tuple(self.b.shape) != (columns, rank):
            raise LogitlessError(
                f"LoRA: a must be [r, {size}] and b [{columns}, r] to go with weight {[columns, size]}, but they are "
                f"{list(self.a.shape)} and {list(self.b.shape)}. As in peft, a comes first: b @ a."
            )
        if not rank:
            raise LogitlessError("LoRA: a and b have rank 0, so that there is no adapter. Pass the weight itself.")
        _check_scale(self.scale)
        if self.dropout is not None and not callable(self.dropout):
            raise refused("LoRA: dropout", "a function of hidden states, or None,", self.dropout)

    def __repr__(self) -> str:
        columns, size = self.weight.shape
        return f"LoRA({columns} x {size}, rank {self.a.shape[0]}, scale={self.scale})"

    def detached(self) -> LoRA:
        """The LoRA without a graph."""
        return replace(self, weight=self.weight.detach(), a=self.a.detach(), b=self.b.detach())

    def inner(self, hidden: Tensor) -> Tensor:
        """``[..., r]`` ``scale * hidden @ a.T``, in the wider of both dtypes, as peft computes it."""
        return _Inner.apply(hidden if self.dropout is None else self.dropout(hidden), self.a, self.scale)


def _check_scale(scale: Any) -> None:
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise LogitlessError(
            "LoRA: scale requires grad, but no gradient flows to it. Fold it into b, as LoRA(weight, a, scale * b), or "
            "pass scale.detach()."
        )
    if isinstance(scale, Tensor):
        # On an accelerator a look at the value would stall the stream; there a bad one makes the logits NaN.
        number = scale.dim() == 0 and scale.dtype != torch.bool and not scale.is_complex()
        good = number and (not inspectable(scale) or bool(scale.isfinite()))
        came = f"a tensor of shape {list(scale.shape)}" if scale.dim() else repr(scale)
    else:
        good = isinstance(scale, Real) and not isinstance(scale, bool) and math.isfinite(scale)
        came = repr(scale)
    if not good:
        raise LogitlessError(
            f"LoRA: scale must be a finite number, or a 0-dim tensor of one, but is {came}. A scale per column of b "
            f"goes into b."
        )


class _Inner(torch.autograd.Function):
    """``scale * x @ a.T``. A token that nobody scored has no part in the gradient of a, not even if it is NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, scale: float | Tensor) -> Tensor:
        ctx.save_for_backward(x, a)
        # The caller may write to its tensor before backward.
        ctx.scale = scale.clone() if isinstance(scale, Tensor) else scale
        dtype = torch.promote_types(x.dtype, a.dtype)
        return torch.nn.functional.linear(x.to(dtype), a.to(dtype)) * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, a = ctx.saved_tensors
        # A single token has no leading dimension to flatten.
        g = (upstream * ctx.scale).reshape(-1, len(a))
        d_x = d_a = None
        if ctx.needs_input_grad[0]:
            d_x = (g @ a.to(g.dtype)).to(x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            scored = torch.where((g != 0).any(1, keepdim=True), x.reshape(-1, a.shape[1]).to(g.dtype), 0.0)
            d_a = (g.T @ scored).to(a.dtype)
        return d_x, d_a, None
