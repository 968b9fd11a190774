"""What logits stand for that are not computed: a product, what the head is besides, and a factor.

logit = gain * x,  or  gain * tanh(squash * x)  under a softcap of the model's own,  with  x = hidden @ weight.T + bias
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.operands.graph import IntoBuffer, Summed, Whole
from logitless.operands.lora import LoRA
from logitless.operands.watch import Watch
from logitless.spec import VocabShard, has_values

Match = Literal["bfloat16", "float16"] | None
Bits = Literal["fast", "canonical"]
Precision = Literal["float32", "bfloat16x3", "tf32"]


@dataclass(frozen=True, eq=False)
class Linear:
    """What a head is and how its product is made: the keyword arguments of :class:`Logits`."""

    bias: Tensor | None = None
    shard: VocabShard | None = None
    sequence_parallel: bool = False
    hidden_grad: Literal["reduced", "partial"] = "reduced"
    weight_grad: Tensor | None = None
    grad_scale: float | Tensor = 1.0
    sparse_weight_grad: bool = False
    match: Match = None
    tf32: bool = False
    precision: Precision = "float32"
    bits: Bits = "fast"
    strict: bool = False


def wider(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the head is in float32 above hidden states in 16 bits."""
    return weight.dtype == torch.float32 and hidden.dtype in (torch.bfloat16, torch.float16)


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Of the head's product: that of hidden states, unless autocast is off and the weight is wider."""
    kind = hidden.device.type
    cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return weight.dtype if wider(hidden, weight) and not cast else hidden.dtype


@dataclass(eq=False)
class Stands:
    """What logits stand for. The gain alone may change, by ``logits /= temperature``.

    Attributes:
        hidden, weight, linear: the product.
        dtype: of the logits.
        gain: factor of all logits, or one for each row ``[...]``.
        squash: factor inside tanh; 0 without a softcap.
        part: whether code loops over these logits and their neighbours, as over the results of ``split``.
        few: up to so many rows are computed where they are picked without a graph, as by a step of generation.
        memory: working memory of a reading that is not told; None for the verb's default.
        gather: makes the weight whole again where a wrapper let go of it when the head's forward ended; None elsewhere.
        spread: under a shard, the DeviceMesh or group over which logits of all columns are spread; None where they are
            the columns of the shard alone.
        watched: the parameters that weight and bias are, or are gathered from; None where nobody knows them.
    """

    hidden: Tensor
    weight: Tensor | LoRA
    linear: Linear
    dtype: torch.dtype
    gain: float | Tensor = 1.0
    squash: float = 0.0
    part: bool = False
    few: int = 0
    memory: int | str | None = None
    gather: Callable[[], None] | None = None
    spread: Any = None
    watched: Watch | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that may need a gradient."""
        weight, bias = self.weight, self.linear.bias
        of = (weight.weight, weight.a, weight.b) if isinstance(weight, LoRA) else (weight,)
        return (self.hidden, *of) if bias is None else (self.hidden, *of, bias)

    def require(self) -> None:
        """Have the weight whole, or raise: FSDP and ZeRO-3 let go of it where a module's forward ends."""
        matrix = self.weight.weight if isinstance(self.weight, LoRA) else self.weight
        if _there(matrix):
            return
        if self.gather is not None:
            self.gather()
        if not _there(matrix):
            raise LogitlessError(
                f"Logits: the head's weight was let go of when its module's forward ended, and is {list(matrix.shape)} "
                f"without numbers now: FSDP1 and ZeRO-3 do so where the head is a unit of its own. Leave the head in "
                f"the root unit, use FSDP2 (fully_shard), or use a PolicyHead, and call it through its wrapper."
            )

    def names(self) -> tuple[str, ...]:
        """The arguments that these are, for errors."""
        lora = ("a of the LoRA", "b of the LoRA") if isinstance(self.weight, LoRA) else ()
        return ("hidden", "weight", *lora, *(() if self.linear.bias is None else ("bias",)))

    def of(self, tensors: Sequence[Tensor]) -> Stands:
        """The same with other tensors, in the order of :meth:`tensors`."""
        hidden, first, *rest = tensors
        weight: Tensor | LoRA = first
        if isinstance(self.weight, LoRA):
            weight = replace(self.weight, weight=first, a=rest.pop(0), b=rest.pop(0))
        linear = replace(self.linear, bias=rest[0]) if rest else self.linear
        return replace(self, hidden=hidden, weight=weight, linear=linear)

    def same_head(self, other: Stands) -> bool:
        """Whether the rows of both are rows of one product with one softcap."""
        if not _is_same(self.weight, other.weight) or self.squash != other.squash:
            return False
        return all(_is_same(getattr(self.linear, f.name), getattr(other.linear, f.name)) for f in fields(Linear))

    @property
    def shape(self) -> tuple[int, ...]:
        matrix = self.weight.weight if isinstance(self.weight, LoRA) else self.weight
        shard = self.linear.shard
        columns = matrix.shape[0] if matrix.dim() else 1
        return (*self.hidden.shape[:-1], columns if shard is None or self.spread is None else shard.vocab_size)

    @property
    def whole(self) -> bool:
        """Whether the logits have all columns of the vocabulary."""
        return self.linear.shard is None or self.spread is not None

    def shared(self, x: Tensor) -> Any:
        """``x``, whose gradient is summed over the group of a shard where the head sums that of its hidden states."""
        shard = self.linear.shard
        return x if shard is None or self.linear.hidden_grad != "reduced" else Summed.apply(x, shard.group)

    def computed(self) -> Tensor:
        """The logits, computed as the head would, and with its gradients."""
        hidden, weight, linear = self.hidden, self.weight, self.linear
        if linear.sequence_parallel:
            raise LogitlessError(
                "Logits: sequence_parallel=True, so that hidden states are this rank's tokens, and logits of all "
                "tokens would have another shape. Gather the hidden states to compute logits, or read them by logprobs."
            )
        matrix = weight.weight if isinstance(weight, LoRA) else weight
        if linear.weight_grad is not None:
            matrix = IntoBuffer.apply(matrix, linear.weight_grad)
        hidden = hidden if isinstance(weight, LoRA) else hidden.to(product_dtype(hidden, matrix))
        x = torch.nn.functional.linear(self.shared(hidden), matrix, linear.bias)  # pyright: ignore[reportArgumentType]
        if isinstance(weight, LoRA):
            x = x + self.shared(weight.inner(hidden)).to(hidden.dtype) @ weight.b.to(hidden.dtype).T
        if linear.shard is not None and self.spread is not None:
            x = Whole.apply(x, linear.shard)
        if self.linear.match is not None:
            x = x.to(getattr(torch, self.linear.match))
        x = x.to(torch.promote_types(x.dtype, self.dtype))
        if self.squash:
            x = torch.tanh(x * self.squash)
        gain = self.gain[..., None] if isinstance(self.gain, Tensor) else self.gain
        return (x if isinstance(gain, float) and gain == 1.0 else x * gain).to(self.dtype)

    def computed_from(self, tensors: Sequence[Tensor]) -> Tensor:
        """The logits of other tensors, in the order of :meth:`tensors`."""
        return self.of(tensors).computed()


def _is_same(a: Any, b: Any) -> bool:
    """Whether two operands or options are the same; without a graph, also two views of the same numbers."""
    if a is b or not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)
    if a.requires_grad or b.requires_grad or type(a) is not Tensor or type(b) is not Tensor:
        return False
    alike = (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
    return alike and not a.is_meta and a.data_ptr() == b.data_ptr()


def _there(weight: Tensor) -> bool:
    """Whether the weight has numbers; one of another shape is for checks of the call to refuse."""
    if weight.numel() == 0:
        return weight.dim() == 2
    return hasattr(weight, "placements") or not has_values(weight) or weight.untyped_storage().size() > 0
