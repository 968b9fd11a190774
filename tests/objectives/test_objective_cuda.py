"""Objectives on a GPU: nothing waits for the device, the same numbers as on the CPU, the same bits on every run."""

from __future__ import annotations

import pytest
import torch
from objective_truth import PROMPT_OF, draw, stats_of
from shared.objective_edges import ALL, EVERYTHING
from shared.objective_terms import PARTS

from logitless import Metrics
from logitless.objectives import count_over, gae, prompt_tokens_over, token_rewards, value_loss, whiten

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
]


def step(objective, rows, x, **options):
    stats = stats_of(x)
    loss, metrics = objective(stats, rows, **{name: x[name] for name in PARTS}, **options)
    (gradient,) = torch.autograd.grad(loss, stats.logprob)
    return loss, gradient, metrics


@pytest.mark.parametrize("objective", ALL)
def test_no_host_sync_and_the_same_numbers(objective, request):
    batch = draw([63, 0, 507, 1, 5, 3])
    host = batch.rows()
    x = batch.fields(host, torch.float64)
    wanted = step(objective, host, x)
    rows, there = batch.rows(device="cuda"), {name: value.cuda() for name, value in x.items()}
    request.getfixturevalue("no_sync")
    first = step(objective, rows, there, denominator=count_over([rows], objective.reduce))
    second = step(objective, rows, there)
    merged = Metrics.merge([first[2], second[2]])
    torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(first[0].cpu(), wanted[0], atol=1e-12, rtol=0)
    torch.testing.assert_close(first[1].cpu(), wanted[1], atol=1e-12, rtol=0)
    assert torch.equal(first[1], second[1])
    assert first[2].compute() == pytest.approx(wanted[2].compute(), abs=1e-12)
    assert merged.compute()["ratio_max"] == pytest.approx(wanted[2].compute()["ratio_max"])


def test_along_time(request):
    batch = draw([63, 0, 507, 1, 5, 3])
    host = batch.rows()
    x = batch.fields(host, torch.float64)
    rewards, prompts = torch.randn(6, dtype=torch.float64), torch.tensor(PROMPT_OF)

    def go(rows, x, rewards, prompts):
        per_token = token_rewards(rewards, rows, penalty=x["entropy"])
        advantage, returns = gae(per_token, x["ref_logprob"], rows, gamma=0.9)
        loss, _ = value_loss(x["logprob"], returns, old_values=x["old_logprob"], clip=0.2)
        return whiten(advantage, rows.counted), loss, *prompt_tokens_over(rows, prompts, 3)

    wanted = go(host, x, rewards, prompts)
    rows, there = batch.rows(device="cuda"), {name: value.cuda() for name, value in x.items()}
    rewards, prompts = rewards.cuda(), prompts.cuda()
    request.getfixturevalue("no_sync")
    ours = go(rows, there, rewards, prompts)
    torch.cuda.set_sync_debug_mode("default")
    for mine, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine.cpu(), other, atol=1e-12, rtol=1e-12)


def test_float32_stays_close_at_size():
    """16384 rows in 40 samples: the loss of the GPU in float32 against the CPU in float64."""
    batch = draw([409] * 40 + [24], masked=())
    host = batch.rows()
    wanted = step(EVERYTHING, host, batch.fields(host, torch.float64))
    rows = batch.rows(device="cuda")
    ours = step(EVERYTHING, rows, {name: x.cuda() for name, x in batch.fields(host, torch.float32).items()})
    torch.testing.assert_close(ours[0].double().cpu(), wanted[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ours[1].double().cpu(), wanted[1], atol=1e-10, rtol=1e-5)
