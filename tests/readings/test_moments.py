"""Sums over a row that are merged from parts, of which the first may have no columns."""

from __future__ import annotations

import pytest
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


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("backend", ["reference", "tiled", "triton"])
@pytest.mark.parametrize(("offset", "spread"), [(0.0, 8.0), (3.0, 8.0), (-40.0, 3.0), (1e4, 1.0)])
def test_a_mean_keeps_its_digits(offset: float, spread: float, backend: str, device: torch.device):
    """Also about 0 below logits of 30, and where a few are masked by the dtype's lowest number or by -inf."""
    z = offset + spread * torch.randn(5, 2003)
    z[1, ::7], z[2, :40] = -torch.inf, -torch.inf
    there = z != -torch.inf
    truth = torch.stack([row[some].double().mean() for row, some in zip(z, there, strict=True)])
    squares = torch.stack([row[some].double().var(correction=0) for row, some in zip(z, there, strict=True)])
    target = torch.full((5,), 2001)
    out = ll.logprobs(z.to(device), target.to(device), stats=STATS, backend=backend)
    # Two roundings of the mean, and one of a logit.
    allowed = 2.0**-24 * (2 * truth.abs() + spread)
    assert ((out.mean_logit.double().cpu() - truth).abs() <= allowed).all()
    assert ((out.logit_variance.double().cpu() - squares).abs() <= 1e-6 * squares).all()
    # A masked logit is part of the mean, and no center.
    z[3, 5] = torch.finfo(torch.float32).min
    low = ll.logprobs(z.to(device), target.to(device), stats=("mean_logit",), backend=backend).mean_logit
    assert low[3].item() == pytest.approx(z[3].double().mean().item(), rel=1e-6)
    assert torch.equal(low[[0, 1, 2, 4]], out.mean_logit[[0, 1, 2, 4]])
