"""Numbers of each row that frameworks log: the largest and the smallest logit, the mean and the norm.

They have no gradient and no fused kernel, and come one by one: the first that is asked for takes them all from one walk
over the logits, of a few rows at a time, and the logits and their detached copies remember them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.call.resolve import MEMORY
from logitless.deferred.lazy import ordinary
from logitless.deferred.read import versions
from logitless.operands import Logits
from logitless.operands.logits import METRICS
from logitless.spec import accumulation_dtype, parse_memory


class Metrics(NamedTuple):
    """``[...]`` of each row; ``max`` and ``min`` with the columns, as torch returns them."""

    max: Any
    min: Any
    mean: Tensor
    norm: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return *self.max, *self.min, self.mean, self.norm


def untracked(x: Logits) -> bool:
    """Whether a number of these logits has no graph."""
    return not (torch.is_grad_enabled() and x.requires_grad)


def walked(x: Logits) -> bool:
    """Whether the logits remember their metrics."""
    return bool(x._memo.get(METRICS))


def metric(x: Logits, name: str, dtype: torch.dtype | None = None) -> Any:
    """One of the fields of :class:`Metrics`; None where it would have a graph, needs the columns of other ranks, or is
    summed in another dtype than this one."""
    if not untracked(x) or x.linear.shard is not None or dtype not in (None, x.dtype, accumulation_dtype(x.dtype)):
        return None
    memo = x._memo.setdefault(METRICS, [])
    if memo and versions(memo[0].tensors()) == memo[1]:
        # A copy, since torch's functions return a new tensor each time.
        known = getattr(memo[0], name)
        return known.clone() if isinstance(known, Tensor) else type(known)(y.clone() for y in known)
    with ordinary(graph=False):
        found = _walk(x)
    # What somebody wrote to is forgotten; others share the list.
    memo[:] = found, versions(found.tensors())
    return getattr(found, name)


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
