"""``sized``: logits and rows by their sizes, on the meta device, for a call that is only estimated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless.operands import Logits, LoRA
from logitless.rows import Rows
from logitless.spec import VocabShard


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
        needs_grad: what needs a gradient. Names of what is not there are passed over.
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
