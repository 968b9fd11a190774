"""``Stands``: what logits that are not computed stand for: a product, the options of its head, and a factor.

logit = gain * x,  or  gain * tanh(squash * x)  under a softcap of the model's own,  with  x = hidden @ weight.T + bias
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from logitless.errors import LogitlessError
from logitless.operands.graph import all_columns, graded_into, summed_in_backward
from logitless.operands.lora import LoRA
from logitless.operands.unit import Unit
from logitless.spec import VocabShard, has_values

Match = Literal["bfloat16", "float16"] | None
Bits = Literal["fast", "canonical"]
Precision = Literal["float32", "bfloat16x3", "tf32"]


@dataclass(frozen=True, eq=False)
class Linear:
    """Options of a head and of its product: the keyword arguments of :class:`Logits`."""

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
    """Dtype of the head's product: that of hidden states, unless autocast is off and the weight is wider."""
    kind = hidden.device.type
    cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return weight.dtype if wider(hidden, weight) and not cast else hidden.dtype


@dataclass(eq=False)
class Stands:
    """The product, head and factor that logits stand for. The gain alone may change, by ``logits /= temperature``.

    Attributes:
        hidden, weight, linear: the product.
        dtype: of the logits.
        gain: factor of all logits, or one for each row ``[...]``.
        squash: factor inside tanh; 0 without a softcap.
        part: whether code loops over these logits and their neighbours, as over the results of ``split``.
        few: up to so many rows are computed where they are picked without a graph, as by a step of generation.
        memory: working memory of a reading that is not told; None for the verb's default.
        unit: FSDP2's that holds the weight; None elsewhere.
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
    unit: Unit | None = None
    spread: Any = None
    watched: Watch | None = None

    @property
    def matrix(self) -> Tensor:
        """``[V, D]`` weight of the head, without a LoRA."""
        return self.weight.weight if isinstance(self.weight, LoRA) else self.weight

    def named(self) -> dict[str, Tensor]:
        """Everything that may need a gradient, by what errors call it."""
        weight, bias = self.weight, self.linear.bias
        named = {"hidden": self.hidden, "weight": self.matrix}
        if isinstance(weight, LoRA):
            named |= {"a of the LoRA": weight.a, "b of the LoRA": weight.b}
        return named if bias is None else {**named, "bias": bias}

    def tensors(self) -> tuple[Tensor, ...]:
        """Hidden states, weight, a LoRA's matrices and bias."""
        return tuple(self.named().values())

    def require(self, graph: bool = False) -> None:
        """Have the weight whole until the reading that is under way has ended, or raise: FSDP and ZeRO-3 let go of it
        where a module's forward ends.

        Args:
            graph: whether results of the reading have a gradient.
        """
        matrix = self.matrix
        if self.unit is not None:
            self.unit.require(_has_numbers(matrix), graph)
        if not _has_numbers(matrix):
            raise LogitlessError(
                f"Logits: the head's weight was let go of since its module's forward, and is {list(matrix.shape)} "
                f"without numbers now: FSDP1 and ZeRO-3 do so in backward, and where the head is a unit of its own at "
                f"the end of its forward. Read logits before backward(), leave the head in the root unit, use FSDP2 "
                f"(fully_shard), or use a PolicyHead, and call it through its wrapper."
            )

    def of(self, tensors: Sequence[Tensor]) -> Stands:
        """A copy with other tensors, in the order of :meth:`tensors`."""
        hidden, first, *rest = tensors
        weight: Tensor | LoRA = first
        if isinstance(self.weight, LoRA):
            weight = replace(self.weight, weight=first, a=rest.pop(0), b=rest.pop(0))
        linear = replace(self.linear, bias=rest[0]) if rest else self.linear
        return replace(self, hidden=hidden, weight=weight, linear=linear)

    def same_head(self, other: Stands) -> bool:
        """Whether the rows of both are rows of one product with one softcap."""
        if not is_same(self.weight, other.weight) or self.squash != other.squash:
            return False
        return all(is_same(getattr(self.linear, f.name), getattr(other.linear, f.name)) for f in fields(Linear))

    @property
    def shape(self) -> tuple[int, ...]:
        matrix, shard = self.matrix, self.linear.shard
        columns = matrix.shape[0] if matrix.dim() else 1
        return (*self.hidden.shape[:-1], columns if shard is None or self.spread is None else shard.vocab_size)

    @property
    def whole(self) -> bool:
        """Whether the logits have all columns of the vocabulary."""
        return self.linear.shard is None or self.spread is not None

    def shared(self, x: Tensor) -> Any:
        """``x``, whose gradient is summed over the group of a shard where the head sums that of its hidden states."""
        shard = self.linear.shard
        return x if shard is None or self.linear.hidden_grad != "reduced" else summed_in_backward(x, shard.group)

    def computed(self) -> Tensor:
        """The logits, computed as the head would, and with its gradients."""
        hidden, weight, linear, matrix = self.hidden, self.weight, self.linear, self.matrix
        if linear.sequence_parallel:
            raise LogitlessError(
                "Logits: sequence_parallel=True, so that hidden states are this rank's tokens, and logits of all "
                "tokens would have another shape. Gather the hidden states to compute logits, or read them by logprobs."
            )
        if linear.weight_grad is not None:
            matrix = graded_into(linear.weight_grad, matrix)
        hidden = hidden if isinstance(weight, LoRA) else hidden.to(product_dtype(hidden, matrix))
        x = torch.nn.functional.linear(self.shared(hidden), matrix, linear.bias)
        if isinstance(weight, LoRA):
            x = x + self.shared(weight.inner(hidden)).to(hidden.dtype) @ weight.b.to(hidden.dtype).T
        if linear.shard is not None and self.spread is not None:
            x = all_columns(x, linear.shard)
        if linear.match is not None:
            x = x.to(getattr(torch, linear.match))
        x = x.to(torch.promote_types(x.dtype, self.dtype))
        if self.squash:
            x = torch.tanh(x * self.squash)
        gain = self.gain[..., None] if isinstance(self.gain, Tensor) else self.gain
        return (x if isinstance(gain, float) and gain == 1.0 else x * gain).to(self.dtype)

    def computed_from(self, tensors: Sequence[Tensor]) -> Tensor:
        """The logits of other tensors, in the order of :meth:`tensors`, in backward."""
        if self.unit is not None:
            self.unit.gather_in_backward()
        return self.of(tensors).computed()


def factors_of_rows(gain: Tensor, like: Tensor) -> Tensor:
    """``[T]`` one factor for each row, in the dtype of another. On an accelerator nobody looked whether all are above
    0; one that is not would turn the order of its row around, and makes it NaN."""
    factor = gain.detach().reshape(-1).to(like)
    return torch.where((factor > 0) & factor.isfinite(), factor, torch.nan)


def is_same(a: Any, b: Any) -> bool:
    """Whether two operands or options are the same, or two views of the same numbers with the same graph or none."""
    if a is b or not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)
    if type(a) is not Tensor or type(b) is not Tensor:
        return False
    graphs = [x.grad_fn is not None and x._base is not None for x in (a, b)]
    if (a.requires_grad or b.requires_grad) and (not all(graphs) or a._base is not b._base):
        return False
    alike = (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
    return alike and not a.is_meta and a.data_ptr() == b.data_ptr()


def _has_numbers(weight: Tensor) -> bool:
    """Whether the weight has numbers; a weight of a wrong shape is for the checks of the call to refuse."""
    if weight.numel() == 0:
        return weight.dim() == 2
    return hasattr(weight, "placements") or not has_values(weight) or weight.untyped_storage().size() > 0


# Whether the parameters behind logits have changed since.

_STEPS = WeakTensorKeyDictionary()
"""How often an optimizer has stepped, for each parameter that is watched."""

_hooks: list[Any] = []


class Watch:
    """Parameters as they are now, to ask later whether they have changed.

    A tensor's version counts what is written to it, but not all of it: a fused optimizer counts nothing, one that
    writes to many DTensors at once (foreach) neither, and FSDP2 gathers the weight of after a step where logits of
    before are read. So the steps of optimizers are counted as well. What is written through ``.data`` is seen by
    neither; Megatron's and DeepSpeed's optimizers write so, and the float32 copies are watched that they step first.

    Args:
        parameters: tensors that optimizers know.
        also: returns what else the logits depend on, such as the names of merged adapters.
    """

    def __init__(self, parameters: Sequence[Tensor], also: Callable[[], Any] | None = None) -> None:
        if not _hooks:
            _hooks.append(register_optimizer_step_post_hook(_count))
        known = [y for x in parameters for y in (x, *_copies(x))]
        # An inference tensor has no version.
        self._parameters, self._also = [x for x in known if not x.is_inference()], also
        for x in self._parameters:
            _STEPS.setdefault(x, 0)
        self._before = self._now()

    def changed(self) -> bool:
        """Whether something was written to one of the parameters since."""
        return self._now() != self._before

    def _now(self) -> Any:
        return [(x._version, _STEPS[x]) for x in self._parameters], None if self._also is None else self._also()


def _copies(parameter: Any) -> list[Tensor]:
    """The float32 copy of a parameter, or its part here, where Megatron's or DeepSpeed's optimizer has made one; what
    FSDP1 has made it a view of, and gives to optimizers, whole or by its parts."""
    fragment = getattr(getattr(parameter, "_hp_mapping", None), "hp_fragment", None)
    flat: Any = getattr(parameter, "_base", None)
    of_fsdp1 = [flat, *(flat._params or ())] if getattr(flat, "_is_flat_param", False) else []
    return [x for x in (getattr(parameter, "main_param", None), fragment, *of_fsdp1) if isinstance(x, Tensor)]


def _count(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _STEPS:
                _STEPS[parameter] += 1
