"""Arguments of a verb on the meta device, without numbers: from real ones (``Meta``), or from sizes (``sized``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from logitless.collectives import DryGroup
from logitless.operands import Linear, Logits, LoRA, Teachers
from logitless.operands.graph import WithBackward
from logitless.operands.logits import like
from logitless.rows import Rows
from logitless.spec import ImaginedShard, VocabShard


class Meta:
    """Turns arguments into arguments of the same shapes, dtypes and needs for a gradient.

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
            return self._empty(x, name, leaf=False)
        if isinstance(x, VocabShard | ImaginedShard) and x.group is not None:
            return ImaginedShard(x.start, x.stop, x.vocab_size, DryGroup(x.group.size(), self.copies))
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

    def _empty(self, x: Tensor | None, name: str, leaf: bool = True) -> Any:
        """A tensor like ``x``. One that needs a gradient is a leaf or, without ``leaf``, like a model's output."""
        if x is None:
            return None
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        if x.requires_grad:
            made = self.leaves[name] = made.requires_grad_() if leaf else hand_over(made)
        return made

    def _logits(self, x: Logits) -> Logits:
        """Deferred logits of operands without numbers."""
        linear, weight = x.linear, x.weight
        if isinstance(weight, LoRA):
            weight = LoRA(**{name: self._empty(getattr(weight, name), name) for name in ("weight", "a", "b")})
        else:
            weight = self._empty(weight, "weight")
        options = {f.name: getattr(linear, f.name) for f in fields(Linear)}
        options["bias"] = self._empty(linear.bias, "bias")
        if linear.weight_grad is not None:
            options["weight_grad"] = self._empty(linear.weight_grad.detach(), "weight_grad")
        options["shard"] = self(linear.shard, "shard")
        options["grad_scale"] = linear.grad_scale if isinstance(linear.grad_scale, float | int) else 1.0
        made = Logits(self._empty(x.hidden, "hidden"), weight, **options)
        gain, stands = self(x.gain, "gain"), x._stands
        return like(made, gain=gain, squash=x.squash, dtype=stands.dtype, memory=stands.memory)


def _has_tensors(x: Any) -> bool:
    values = [getattr(x, f.name) for f in fields(x)]
    kinds = (Tensor, VocabShard, ImaginedShard)
    return any(isinstance(v, kinds) or (is_dataclass(v) and _has_tensors(v)) for v in values)


def sized(
    tokens: int,
    vocab: int,
    hidden: int | None = None,
    *,
    rows: int | None = None,
    dtype: str = "bfloat16",
    needs_grad: tuple[str, ...] = ("logits", "hidden", "weight", "bias", "a", "b"),
    bias: bool = False,
    lora_rank: int | None = None,
    tensor_parallel: int = 1,
    weight_grad: bool = False,
    **linear: Any,
) -> tuple[Any, Rows | Tensor]:
    """Logits and rows of these sizes, without numbers.

    Args:
        tokens, vocab, hidden: T, V of all ranks together, and D; without D, logits that exist.
        rows: R, selected rows; None where targets of all tokens are given in order.
        needs_grad: names of tensors that need a gradient. Names of tensors that are not there are passed over.
        tensor_parallel: ranks that share the vocabulary in equal parts.
        linear: other options of :class:`Logits`.

    >>> logits, rows = sized(16384, 151936, 4096)
    >>> logits, rows.shape
    (Logits([16384, 151936], torch.bfloat16), torch.Size([16384]))
    """

    def empty(name: str, *shape: int) -> Tensor:
        kind = getattr(torch, dtype)
        return torch.empty(shape, dtype=kind, device="meta", requires_grad=name in needs_grad)

    columns = -(-vocab // tensor_parallel)
    shard = VocabShard.imagined(vocab, tensor_parallel) if tensor_parallel > 1 else None
    scored = sized_rows(tokens, rows)
    if hidden is None:
        return Logits.given(empty("logits", tokens, columns), shard=shard, **linear), scored
    here = tokens // tensor_parallel if linear.get("sequence_parallel") else tokens
    weight: Any = empty("weight", columns, hidden)
    if weight_grad:
        linear["weight_grad"] = torch.empty(weight.shape, device="meta")
    if lora_rank is not None:
        weight = LoRA(weight, empty("a", lora_rank, hidden), empty("b", columns, lora_rank))
    own = empty("bias", columns) if bias else None
    return Logits(empty("hidden", here, hidden), weight, bias=own, shard=shard, **linear), scored


def sized_rows(tokens: int, rows: int | None = None, counts: tuple[int, ...] | None = None) -> Rows | Tensor:
    """Targets of all tokens; or some rows of them, of samples that have ``counts`` rows each."""
    if rows is None and counts is None:
        return torch.empty(tokens, dtype=torch.int64, device="meta")
    counts = (rows or 0,) if counts is None else tuple(counts)
    index = torch.arange(sum(counts), device="meta")
    lengths = torch.empty(len(counts), dtype=torch.int64, device="meta")
    return Rows(
        index=index,
        target=torch.empty_like(index),
        sample=torch.empty_like(index),
        position=index,
        token_shape=(tokens,),
        held=counts,
        counts=counts,
        totals=lengths,
        response_lengths=counts,
    )


def hand_over(buffer: Tensor) -> Tensor:
    """The buffer as a model's output would arrive: it requires a gradient and is neither a leaf nor a view.

    No copy is made, so whoever overwrites it overwrites ``buffer``.
    """
    handle = torch.zeros((), device=buffer.device, requires_grad=True)
    # The gradient is taken at the output, and goes no further.
    return WithBackward.apply(handle, lambda _: buffer.detach(), lambda _: None)  # pyright: ignore[reportReturnType]


def backward(outputs: list[Tensor], upstream: list[Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the leaves, by name, where the outputs get these upstream gradients."""
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
