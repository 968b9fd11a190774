"""Sums over a row that are merged from parts, of which the first may have no columns."""

from __future__ import annotations

import torch
import torch.distributed as dist
from close import assert_close_to_truth, assert_gradient_close_to_truth
from torch import Tensor

import logitless as ll

STATS = ("collision", "mean_logit", "logit_variance")
UPSTREAM = (0.7, -1.3)
"""Of the first two; the variance has no gradient."""


def in_torch(logits: Tensor, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    leaf = logits.detach().to(dtype, copy=True).requires_grad_()
    collision, mean = leaf.softmax(1).square().sum(1), leaf.mean(1)
    (UPSTREAM[0] * collision + UPSTREAM[1] * mean).sum().backward()
    assert leaf.grad is not None
    return [collision.detach(), mean.detach(), leaf.detach().var(1, correction=0)], leaf.grad


def score_shard(rank: int, world: int, logits: Tensor, target: Tensor, cuts: list[int]) -> tuple[list[Tensor], Tensor]:
    own = slice(cuts[rank], cuts[rank + 1])
    leaf = logits[:, own].clone().requires_grad_()
    shard = ll.VocabShard(own.start, own.stop, dist.group.WORLD)
    out = ll.logprobs(ll.Logits.given(leaf, shard=shard), target, stats=STATS)
    (UPSTREAM[0] * out.collision + UPSTREAM[1] * out.mean_logit).sum().backward()
    assert leaf.grad is not None
    return [getattr(out, name).detach() for name in STATS], leaf.grad


def test_far_from_zero_behind_an_empty_shard(ranks):
    """A rank without columns has no center that others could be measured from, and the offset costs no digits."""
    logits, target = torch.randn(13, 503) + 1e5, torch.randint(503, (13,))
    logits[:, 211:] += 5.0
    right, plain = (in_torch(logits, dtype) for dtype in (torch.float64, torch.float32))
    for cuts in ([0, 0, 211, 503], [0, 211, 211, 503]):
        for rank, (values, gradient) in enumerate(ranks(score_shard, 3, logits, target, cuts)):
            for name, ours, exact, usual in zip(STATS, values, right[0], plain[0], strict=True):
                assert_close_to_truth(ours, exact, usual, name=name)
            own = slice(cuts[rank], cuts[rank + 1])
            if own.start < own.stop:
                assert_gradient_close_to_truth(gradient, right[1][:, own], plain[1][:, own])
