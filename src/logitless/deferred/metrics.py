"""Numbers of each row that frameworks log: the largest and the smallest logit, the mean and the norm.

They have no gradient and no fused kernel, and come one by one: the first that is asked for takes them all from one walk
over the logits, of a few rows at a time, and the logits and their detached copies remember them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.call.resolve import MEMORY
from logitless.operands import Logits
from logitless.operands.logits import METRICS
from logitless.spec import accumulation_dtype, parse_memory


class Metrics(NamedTuple):
    """``[...]`` of each row; ``max`` and ``min`` with the columns, as torch returns them."""

    max: Any
    min: Any
    mean: Tensor
    norm: Tensor


def untracked(x: Logits) -> bool:
    """Whether a number of these logits has no graph."""
    return not (torch.is_grad_enabled() and x.requires_grad)


def walked(x: Logits) -> bool:
    """Whether the logits remember their metrics."""
    return bool(x._memo.get(METRICS))


def metrics(x: Logits, dtype: torch.dtype | None = None) -> Metrics | None:
    """All of them; None where they would have a graph, need the columns of other ranks, or are summed in another dtype
    than this one."""
    if not untracked(x) or x.linear.shard is not None or dtype not in (None, x.dtype, accumulation_dtype(x.dtype)):
        return None
    found = x._memo.setdefault(METRICS, [])
    if not found:
        found.append(_walk(x))
    return found[0]


def _walk(x: Logits) -> Metrics:
    wide = accumulation_dtype(x.dtype)
    parts: list[list[Any]] = []
    for part in in_parts(x):
        z = part.computed()
        norm = torch.linalg.vector_norm(z, dim=-1, dtype=wide)
        parts.append([*z.max(-1), *z.min(-1), z.mean(-1, dtype=wide), norm])
    largest, best, smallest, worst, mean, norm = (torch.cat(y).reshape(x.shape[:-1]) for y in zip(*parts, strict=True))
    return Metrics(torch.return_types.max((largest, best)), torch.return_types.min((smallest, worst)), mean, norm)


def in_parts(x: Logits) -> Any:
    """Rows whose logits fit the budget: of chunks, since products of few rows are slow."""
    columns = x.shape[-1]
    rows = parse_memory(x._stands.memory or MEMORY["chunk"]) // (x.dtype.itemsize * columns)
    # Products are made in blocks of 128 rows.
    return x.detach().reshape(-1, columns).split(max(1, rows // 128 * 128 or rows))
