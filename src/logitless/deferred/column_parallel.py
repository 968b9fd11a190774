"""Megatron's ``ColumnParallelLinear`` as a head that returns ``Logits``, with its group, sequence parallelism and
``main_grad``; and the loss of a Megatron model from such logits.

Nothing of Megatron is imported: the layer says what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from logitless.collectives import gather_rows_over, scatter_sum_over
from logitless.errors import LogitlessError
from logitless.operands import Logits
from logitless.score import logprobs
from logitless.spec import VocabShard

NAME = "ColumnParallelLinear"

PRODUCT = ("forward", "_forward_impl")
"""Methods of the layer that make its logits: a subclass with others may cap them, or round them in another way."""

LOSS = "compute_language_model_loss"
"""The method of Megatron's language models that calls one of its cross entropies, which write to their logits."""


def check_layer(layer: Any) -> None:
    """Raise for a layer that does more than multiply."""
    config, problem = getattr(layer, "config", None), None
    megatrons = next(kind for kind in type(layer).__mro__ if kind.__name__ == NAME)
    own = [name for name in PRODUCT if getattr(type(layer), name, None) is not getattr(megatrons, name, None)]
    if own:
        problem = f"a {own[0]} of its own, which may do more than multiply. Undo that"
    elif getattr(layer, "explicit_expert_comm", False):
        problem = "the communication of experts"
    elif getattr(config, "defer_embedding_wgrad_compute", False):
        problem = "defer_embedding_wgrad_compute=True, which multiplies hidden states again later. Turn it off"
    elif getattr(config, "fp8_output_proj", False):
        problem = "fp8_output_proj=True: its logits are not those of its weight. Turn it off"
    elif getattr(config, "cpu_offloading", False):
        problem = "cpu_offloading=True. Turn it off"
    if problem is not None:
        raise LogitlessError(
            f"defer: the head is a {type(layer).__name__} with {problem}, or keep the model's own logits."
        )


def shard_of_layer(layer: Any) -> VocabShard | None:
    """The columns of a layer here. A collective over its group."""
    size = layer.tp_group.size()
    return None if size == 1 else VocabShard.even(layer.output_size_per_partition * size, layer.tp_group)


def logits_of_layer(
    layer: Any, hidden: Tensor, weight: Tensor | None, shard: VocabShard | None, **options: Any
) -> Logits:
    """What the layer's forward stands for."""
    own = layer.weight if weight is None else weight
    partial = shard is not None and bool(layer.disable_grad_reduce)
    if shard is not None and layer.sequence_parallel:
        hidden, partial = _Gathered.apply(hidden, shard.group), True
    buffer = main_grad_of(layer, own)
    return Logits(
        hidden,
        own if buffer is None else into_main_grad(own),
        bias=None if layer.skip_bias_add else layer.bias,
        shard=shard,
        hidden_grad="partial" if partial else "reduced",
        weight_grad=buffer,
        **options,
    )


def wrap_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """``LOSS`` of a deferred model: ``[b, s]`` losses of its labels, also those of multi-token prediction."""

    def compute_language_model_loss(self: Any, labels: Tensor, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(logits, Logits):
            return original(self, labels, logits, *args, **kwargs)
        found = logprobs(logits, labels.transpose(0, 1).long())
        return -found.logprob.float().transpose(0, 1).contiguous()

    return compute_language_model_loss


class _Gathered(torch.autograd.Function):
    """``[s, b, h]`` hidden states of all ranks from ``[s / TP, b, h]``; their gradient is summed and scattered."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gather_rows_over(group, hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return scatter_sum_over(ctx.group, gradient.contiguous()), None


def main_grad_of(output_layer: Any, weight: Tensor) -> Tensor | None:
    """Megatron's float32 gradient buffer, if the layer is configured to add to it in backward."""
    buffer = getattr(weight, "main_grad", None)
    fused = getattr(output_layer, "gradient_accumulation_fusion", False) and weight.requires_grad
    # Megatron's hook fills a buffer of another dtype, from weight.grad.
    return buffer if fused and buffer is not None and buffer.dtype == torch.float32 else None


def into_main_grad(weight: Tensor) -> Tensor:
    """The weight, whose gradient somebody else adds to ``main_grad``."""
    return _IntoMainGrad.apply(weight)  # pyright: ignore[reportReturnType]


class _IntoMainGrad(torch.autograd.Function):
    """The weight unchanged; backward tells Megatron's hook that the gradient is in ``main_grad`` already."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.weight.grad_added_to_main_grad = True
        # Megatron's hook expects a gradient; this one has the memory of a single number.
        return torch.zeros((), dtype=ctx.weight.dtype, device=ctx.weight.device).expand_as(ctx.weight)
