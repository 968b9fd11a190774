"""Distillation of verl and of SkyRL's draft heads with and without ours, on their own code."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import load
from parity import assert_parity
from torch import Tensor

import logitless
from logitless import LogitlessError

V, K = 206, 6
LOSSES, FSDP, MEGATRON = (f"verl.trainer.distillation.{name}losses" for name in ("", "fsdp.", "megatron."))
SOFT_CE = "skyrl.backends.skyrl_train.mtp.soft_ce"
LOWEST = [None, -4.0]
"""``log_prob_min_clamp``: without, and so that some log-probs of either model are below it."""


# verl.


def sent(total: int, count: int = K) -> tuple[Tensor, Tensor]:
    logprobs, ids = (2 * torch.randn(total, V)).log_softmax(-1).topk(count)
    return logprobs, ids


def nested(x: Tensor, lengths: list[int]) -> Tensor:
    return torch.nested.nested_tensor(list(x.split(lengths)), layout=torch.jagged)


def forward_kl(z: Tensor, log_q: Tensor, ids: Tensor, lowest: float | None, clamped_mass: bool) -> tuple[Tensor, ...]:
    """verl's convention in plain torch: loss, both masses, overlap and its mean term."""
    log_p, log_q = z.log_softmax(-1).gather(-1, ids), log_q.to(z)
    masses = [x.exp().sum(-1) for x in (log_p, log_q)]
    if lowest is not None:
        log_p, log_q = log_p.clamp_min(lowest), log_q.clamp_min(lowest)
    if clamped_mass:
        masses = [x.exp().sum(-1) for x in (log_p, log_q)]
    terms = log_q.exp() * (log_q - log_p)
    shared = (ids[..., None] == z.topk(ids.shape[-1]).indices[..., None, :]).any(-1)
    mean = -(terms * shared).sum(-1) / shared.sum(-1).clamp_min(1)
    return terms.sum(-1), *masses, shared.sum(-1).double(), mean


def load_verl() -> None:
    """What the adapter looks into when it is installed, and verl's own loss."""
    for names in ((), (LOSSES, FSDP)):
        load("verl", *names)


def topk_loss(z: Tensor, log_q: Tensor, ids: Tensor, lengths: list[int], lowest: float | None, strategy: str) -> Any:
    """verl's function by its name, so that it is ours after install."""
    data = {"teacher_logprobs": nested(log_q, lengths), "teacher_ids": nested(ids, lengths)}
    wanted = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=lowest))
    config = SimpleNamespace(strategy=strategy)
    return sys.modules[LOSSES].compute_topk_loss(config, wanted, data, z, "thd")


@pytest.mark.parametrize("lowest", LOWEST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verl_fsdp(dtype: torch.dtype, lowest: float | None):
    load_verl()
    log_q, ids = sent(17)

    def function(z: Tensor) -> list[Tensor]:
        out = topk_loss(z, log_q, ids, [5, 9, 3], lowest, "fsdp")
        return [x if x.is_floating_point() else x.float() for x in out.values()]

    assert_parity(
        "verl",
        function,
        lambda z: list(forward_kl(z, log_q[None], ids[None], lowest, clamped_mass=False)),
        [(3 * torch.randn(1, 17, V)).to(dtype)],
    )


def test_what_is_left_to_verl():
    load_verl()
    logitless.install("verl")
    topk_loss(torch.randn(1, 4, V), *sent(4, 130), [4], None, "fsdp")
    with pytest.raises(NotImplementedError, match="Unsupported strategy"):
        topk_loss(torch.randn(1, 4, V), *sent(4), [4], None, "another")
    (entry,) = [x for x in logitless.status().hosts[0].replaced if x.name == f"{LOSSES}.compute_topk_loss"]
    assert entry.why == {"more than 128 ids": 1, "strategy another": 1}


def verl_shards(rank: int, world: int, logits: Tensor, log_q: Tensor, ids: Tensor, upstream: Tensor) -> Any:
    """Before and after install, for each lowest log-prob; sequences of 5, 4 and 3 tokens, the odd ones padded."""
    *_, parallel_state = load("verl", LOSSES, MEGATRON, "megatron.core.parallel_state")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    width = V // world
    part = logits[..., rank * width : (rank + 1) * width].contiguous()

    def scores() -> list[Any]:
        found = []
        for lowest in LOWEST:
            leaf = part.clone().requires_grad_()
            out = list(topk_loss(leaf, log_q, ids, [5, 4, 3], lowest, "megatron").values())
            assert [x.requires_grad for x in out] == [True] + [False] * 4
            found.append(([x.detach() for x in out], torch.autograd.grad(out[0], leaf, upstream)[0]))
        return found

    try:
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = scores()
        logitless.install("verl", audit=3)
        ours = scores()
        (status,) = logitless.status().hosts
        assert status.audit is not None
        assert status.audit.passed
        assert status.audit.rows
        assert not any(entry.passed_on for entry in status.replaced)
    finally:
        for entry in logitless.status().hosts:
            logitless.uninstall(entry.host)
        parallel_state.destroy_model_parallel()
    return theirs, ours


def test_verl_megatron(ranks):
    logits, upstream, (log_q, ids) = 3 * torch.randn(1, 14, V), torch.randn(1, 14), sent(12)
    results = ranks(verl_shards, 2, logits, log_q, ids, upstream, timeout=180)
    # Padding has log-prob 0 and the first id.
    place = torch.tensor([0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12])
    wide_q, wide_ids = (x.new_zeros(14, K).index_copy(0, place, x)[None] for x in (log_q, ids))
    for i, lowest in enumerate(LOWEST):
        exact = logits.double().requires_grad_()
        wanted = forward_kl(exact, wide_q, wide_ids, lowest, clamped_mass=True)
        (gradient,) = torch.autograd.grad(wanted[0], exact, upstream.double())
        for rank, (theirs, ours) in enumerate(results):
            own = slice(rank * V // 2, (rank + 1) * V // 2)
            for mine, other, right in zip(ours[i][0], theirs[i][0], wanted, strict=True):
                assert mine.dtype == other.dtype
                assert_close_to_truth(mine.float(), right.detach(), other)
            assert_gradient_close_to_truth(ours[i][1], gradient[..., own], theirs[i][1])


# SkyRL.


def soft_ce(student: Tensor, teacher: Tensor, mask: Tensor, count: Tensor | None) -> Tensor:
    each = -(teacher.to(student).softmax(-1) * student.log_softmax(-1)).sum(-1)
    return (each * mask).sum() / (mask.sum() if count is None else count)


@pytest.mark.parametrize(("dtype", "count", "chunk"), [(torch.float32, None, None), (torch.bfloat16, 31.0, 4)])
def test_skyrl_draft_heads(dtype: torch.dtype, count: float | None, chunk: int | None):
    (module,) = load("skyrl", SOFT_CE)
    student, teacher = ((2 * torch.randn(3, 9, V)).to(dtype) for _ in range(2))
    mask, factor = (torch.rand(3, 9) < 0.7).float(), None if count is None else torch.tensor(count)
    assert_parity(
        "skyrl",
        lambda z: module.draft_soft_ce(z, teacher, mask, factor, chunk_size=chunk)[None],
        lambda z: soft_ce(z, teacher, mask, factor)[None],
        [student],
    )
    with pytest.raises(LogitlessError, match="teacher_logits must be detached"):
        module.draft_soft_ce(student, student.clone().requires_grad_(), mask)


def skyrl_shards(rank: int, world: int, student: Tensor, teacher: Tensor, mask: Tensor) -> Any:
    (module,) = load("skyrl", SOFT_CE)
    # The last rank's columns end where the padding began.
    own = slice(0, 120) if rank == 0 else slice(120, V)

    def score() -> tuple[Tensor, Tensor]:
        leaf = student[..., own].clone().requires_grad_()
        group = torch.distributed.group.WORLD
        loss = module.draft_soft_ce(leaf, teacher[..., own], mask, vocab_parallel_group=group)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    theirs = score()
    logitless.install("skyrl", audit=2)
    try:
        ours = score()
        (status,) = logitless.status().hosts
        assert status.audit is not None
        assert status.audit.passed
        assert sum(entry.calls for entry in status.replaced) == 1
    finally:
        logitless.uninstall("skyrl")
    return theirs, ours


def test_skyrl_draft_heads_over_shards(ranks):
    student, teacher = (2 * torch.randn(2, 7, V) for _ in range(2))
    mask = (torch.rand(2, 7) < 0.7).float()
    exact = student.double().requires_grad_()
    loss = soft_ce(exact, teacher.double(), mask, None)
    (gradient,) = torch.autograd.grad(loss, exact)
    results = ranks(skyrl_shards, 2, student, teacher, mask, timeout=180)
    for (theirs, ours), own in zip(results, (slice(0, 120), slice(120, V)), strict=True):
        assert_close_to_truth(ours[0][None], loss.detach()[None], theirs[0][None])
        assert_gradient_close_to_truth(ours[1], gradient[..., own], theirs[1])
