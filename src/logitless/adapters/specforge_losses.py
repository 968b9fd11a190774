"""SpecForge's losses on a draft's logits and the target's probabilities of the draft's ids, a few rows at a time.

    cross_entropy     [B, S]: -sum of q log p, in the rows of a mask
    acceptance        [B, S]: sum of min(p, q)

p is the draft's softmax, q a tensor of probabilities, of which views are taken as they are. Nothing of the size of the
logits is made but their gradient: exponentials are of one chunk of rows, and made again in backward. Of logits that are
not computed, q is the teacher of a divergence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from logitless.adapters.audit import Audit
from logitless.adapters.scoring import soft_cross_entropy
from logitless.operands import Logits, Teacher
from logitless.score import logprobs

ALIVE = 4
"""Float32 tensors of a chunk's size that exist at a time."""


def cross_entropy(where: str, logits: Tensor, q: Tensor, mask: Tensor, memory: int, audit: Audit) -> Tensor:
    """Cross entropy of each row; 0 where the mask is 0."""
    if isinstance(logits, Logits):
        first = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
        return soft_cross_entropy(where, logits, q.detach().log(), first, audit) * mask
    rows, log_z = _CrossEntropy.apply(logits, q.detach(), mask, memory)  # pyright: ignore[reportGeneralTypeIssues]
    _audited(where, logits, log_z, audit)
    return rows


def acceptance(where: str, logits: Tensor, q: Tensor, memory: int, audit: Audit) -> Tensor:
    """Expected acceptance of each row."""
    if isinstance(logits, Logits):
        rest = (1 - q.detach().sum(-1, keepdim=True)).clamp_min(0)
        ids = torch.arange(q.shape[-1] + 1, device=q.device)
        ids[-1] = -1
        # The rows of padding have no probability at all: the smallest that has a logarithm.
        columns = torch.cat([q.detach(), rest], -1).clamp_min_(torch.finfo(torch.float32).tiny)
        teacher = Teacher(columns.log_(), ids=ids, tail="bucket")
        first = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
        found = logprobs(logits, first, teacher=teacher, divergence="acceptance").acceptance
        assert found is not None
        return found.float()
    rows, log_z = _Acceptance.apply(logits, q.detach(), memory)  # pyright: ignore[reportGeneralTypeIssues]
    _audited(where, logits, log_z, audit)
    return rows


def _audited(where: str, logits: Tensor, log_z: Tensor, audit: Audit) -> None:
    first = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    audit.of_logits(where, logits.detach(), first, logprob=logits.detach()[..., 0].float() - log_z)


def _chunks(logits: Tensor, memory: int) -> Iterator[tuple[int, slice]]:
    """Samples, and slices of their rows whose float32 logits fit."""
    count = max(1, memory // (4 * ALIVE * logits.shape[-1]))
    for sample in range(logits.shape[0]):
        for start in range(0, logits.shape[1], count):
            yield sample, slice(start, start + count)


def _log_p(logits: Tensor, log_z: Tensor) -> Tensor:
    return logits.float() - log_z[..., None]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, q: Tensor, mask: Tensor, memory: int) -> tuple[Tensor, Tensor]:
        rows, log_z = (torch.empty(logits.shape[:-1], device=logits.device) for _ in range(2))
        for c in _chunks(logits, memory):
            log_z[c] = logits[c].float().logsumexp(-1)
            rows[c] = _log_p(logits[c], log_z[c]).mul_(q[c]).sum(-1).neg_()
        ctx.save_for_backward(logits, q, mask, log_z)
        ctx.memory = memory
        ctx.mark_non_differentiable(log_z)
        return rows.mul_(mask), log_z

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, q, mask, log_z = ctx.saved_tensors
        gradient, upstream = torch.empty_like(logits), upstream * mask
        for c in _chunks(logits, ctx.memory):
            part = _log_p(logits[c], log_z[c]).exp_().mul_(q[c].sum(-1, keepdim=True)).sub_(q[c])
            gradient[c] = part.mul_(upstream[c][..., None])
        return gradient, None, None, None


class _Acceptance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, q: Tensor, memory: int) -> tuple[Tensor, Tensor]:
        rows, log_z = (torch.empty(logits.shape[:-1], device=logits.device) for _ in range(2))
        for c in _chunks(logits, memory):
            log_z[c] = logits[c].float().logsumexp(-1)
            rows[c] = torch.minimum(_log_p(logits[c], log_z[c]).exp_(), q[c]).sum(-1)
        ctx.save_for_backward(logits, q, log_z)
        ctx.memory = memory
        ctx.mark_non_differentiable(log_z)
        return rows, log_z

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, q, log_z = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for c in _chunks(logits, ctx.memory):
            p = _log_p(logits[c], log_z[c]).exp_()
            # 1 where p is the smaller, and at the kink the mean of both sides, as torch.minimum has it.
            slope = torch.sub(q[c], p).sign_().add_(1).mul_(0.5).mul_(p)
            gradient[c] = slope.sub_(p.mul_(slope.sum(-1, keepdim=True))).mul_(upstream[c][..., None])
        return gradient, None, None
