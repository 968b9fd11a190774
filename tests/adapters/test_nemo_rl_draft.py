"""The cross entropy of NeMo-RL's draft heads with and without ours, on a double or on NeMo-RL itself (see hosts.py)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import load, put_first
from torch import Tensor

import logitless
from benchmarks.bench.measure import peak_bytes

DOUBLE = not put_first("nemo_rl")
if DOUBLE:
    sys.path.append(str(Path(__file__).parent / "doubles"))

V = 212


def module() -> Any:
    if DOUBLE:
        return importlib.import_module("nemo_rl.distributed.model_utils")
    return load("nemo_rl")[1]


def shards(rank: int, world: int, student: Tensor, teacher: Tensor, upstream: Tensor) -> Any:
    own, group = slice(rank * V // world, (rank + 1) * V // world), torch.distributed.group.WORLD
    function = module().DistributedCrossEntropy

    def score() -> tuple[Tensor, Tensor]:
        leaf = student[..., own].clone().requires_grad_()
        rows = function.apply(leaf, teacher[..., own], group, False)
        return rows.detach(), torch.autograd.grad(rows, leaf, upstream)[0]

    theirs = score()
    logitless.install("nemo_rl", audit=2)
    try:
        ours = score()
        (status,) = logitless.status().hosts
        assert status.audit is not None
        assert status.audit.passed
        assert {x.name.split(".")[-2]: x.calls for x in status.replaced}["DistributedCrossEntropy"] == 1
        assert not function.apply(student[..., own], teacher[..., own], group, True).requires_grad
    finally:
        logitless.uninstall("nemo_rl")
    return theirs, ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_draft_over_shards(ranks, dtype: torch.dtype):
    student, teacher = ((2 * torch.randn(2, 7, V)).to(dtype) for _ in range(2))
    upstream, exact = torch.randn(2, 7), student.double().requires_grad_()
    rows = -(teacher.double().softmax(-1) * exact.log_softmax(-1)).sum(-1)
    (gradient,) = torch.autograd.grad(rows, exact, upstream.double())
    for rank, (theirs, ours) in enumerate(ranks(shards, 2, student, teacher, upstream, timeout=180)):
        own = slice(rank * V // 2, (rank + 1) * V // 2)
        assert ours[0].dtype == theirs[0].dtype == torch.float32
        assert_close_to_truth(ours[0], rows.detach(), theirs[0])
        assert_gradient_close_to_truth(ours[1], gradient[..., own], theirs[1])


def peaks(rank: int, world: int, student: Tensor, teacher: Tensor) -> list[float]:
    """Bytes per logit at the peak of forward and backward, before and after."""
    leaf, function = student.requires_grad_(), module().DistributedCrossEntropy

    def step() -> Tensor:
        rows = function.apply(leaf, teacher, torch.distributed.group.WORLD, False)
        return torch.autograd.grad(rows.sum(), leaf)[0]

    before = peak_bytes(step, leaf.device)
    logitless.install("nemo_rl")
    try:
        return [x / leaf.numel() for x in (before, peak_bytes(step, leaf.device))]
    finally:
        logitless.uninstall("nemo_rl")


def test_probabilities_are_not_held(ranks):
    """Nothing of the size of the logits but their gradient, of two bytes each, and a tile."""
    ((before, after),) = ranks(peaks, 1, *((2 * torch.randn(1, 256, 9000)).bfloat16() for _ in range(2)), timeout=180)
    assert before > 8
    assert after < 3
