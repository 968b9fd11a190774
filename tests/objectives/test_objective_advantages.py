"""Advantages, returns, whitening and the value loss, against Python loops and by hand."""

from __future__ import annotations

import math
import re

import pytest
import torch
from objective_truth import LENGTHS, draw

from logitless import LogitlessError, Rows
from logitless.objectives import (
    discounted_returns,
    dr_grpo_advantages,
    gae,
    grpo_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    rloo_advantages,
    token_rewards,
    value_loss,
    whiten,
)

GROUPED = {"grpo": grpo_advantages, "dr_grpo": dr_grpo_advantages, "rloo": rloo_advantages}


def grouped_by_loop(kind: str, rewards: list[float], groups: list[int], eps: float = 1e-6) -> list[float]:
    out = []
    for i, reward in enumerate(rewards):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == groups[i]]
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == groups[i] and j != i]
        mean = sum(members) / len(members)
        if len(members) == 1:
            out.append(0.0)
        elif kind == "grpo":
            deviation = math.sqrt(sum((r - mean) ** 2 for r in members) / (len(members) - 1))
            out.append((reward - mean) / (deviation + eps))
        else:
            out.append(reward - (mean if kind == "dr_grpo" else sum(others) / len(others)))
    return out


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_group_advantages(kind, dtype):
    groups = [5, -2, 5, 7, -2, 5, 9, 7, 5]
    rewards = torch.randn(9, dtype=dtype)
    ours = GROUPED[kind](rewards, torch.tensor(groups))
    assert ours.dtype == dtype
    expected = grouped_by_loop(kind, rewards.double().tolist(), groups)
    torch.testing.assert_close(
        ours, torch.tensor(expected, dtype=dtype), atol=1e-6 if dtype == torch.float32 else 1e-14, rtol=0
    )
    side_by_side = GROUPED[kind](rewards, 3)
    assert torch.equal(side_by_side, GROUPED[kind](rewards, torch.arange(9) // 3))


def test_group_advantages_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.0, 3.0])
    assert dr_grpo_advantages(rewards, 4).tolist() == [0.0, -1.0, -1.0, 2.0]
    assert rloo_advantages(rewards, 4).tolist() == pytest.approx([0.0, -4 / 3, -4 / 3, 8 / 3])
    assert grpo_advantages(rewards, 4, eps=0.0).tolist() == pytest.approx([0.0, *[-1 / math.sqrt(2)] * 2, math.sqrt(2)])


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("size", [1, 3, 7])
def test_equal_rewards_give_exactly_nothing(kind, size):
    """0.1 three times has a mean that is not 0.1, and a deviation of rounding errors."""
    assert not GROUPED[kind](torch.full((size,), 0.1, dtype=torch.float64), size).any()
    mixed = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0], dtype=torch.float64)
    assert not GROUPED[kind](mixed, torch.tensor([0, 0, 0, 1, 1]))[:3].any()
    assert GROUPED[kind](mixed, torch.tensor([0, 0, 0, 1, 1]))[3:].all()


def test_no_rewards():
    for function in GROUPED.values():
        assert function(torch.zeros(0), 4).shape == (0,)
        assert function(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_wrong_groups():
    rewards = torch.zeros(6)
    with pytest.raises(LogitlessError, match=re.escape("a size that divides 6 rewards but is 4.")):
        grpo_advantages(rewards, 4)
    with pytest.raises(
        LogitlessError, match=re.escape("groups must be a size or integer ids of shape [6] but are [5]")
    ):
        rloo_advantages(rewards, torch.zeros(5, dtype=torch.int64))
    with pytest.raises(
        LogitlessError,
        match=re.escape("one per sample, but is a tensor [6] torch.int64"),
    ):
        dr_grpo_advantages(torch.zeros(6, dtype=torch.int64), 2)


# Along time.


def gae_by_loop(batch, rewards, values, gamma, lam):
    """Per sample, over the counted tokens only, backwards."""
    advantages, returns = [], []
    for i, length in enumerate(batch.lengths):
        advantage, result, following, carried = [0.0] * length, [0.0] * length, 0.0, 0.0
        for t in reversed(range(length)):
            if batch.masks[i][t]:
                carried = rewards[i][t] + gamma * following - values[i][t] + gamma * lam * carried
                following = values[i][t]
                advantage[t], result[t] = carried, carried + values[i][t]
        advantages += advantage
        returns += result
    return torch.tensor(advantages, dtype=torch.float64), torch.tensor(returns, dtype=torch.float64)


@pytest.mark.parametrize("mask_only", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.99, 0.5), (0.0, 0.3), (1.0, 0.0), (1.0, 1.0)])
def test_gae(gamma, lam, mask_only):
    batch = draw([63, 0, 1, 507, 5, 3, 2], masked=(5,))
    rewards, values = ([torch.randn(n, dtype=torch.float64) for n in batch.lengths] for _ in range(2))
    rows = batch.rows(loss_mask_only=mask_only)
    advantage, returns = gae(rows.from_responses(rewards), rows.from_responses(values), rows, gamma=gamma, lam=lam)
    expected = gae_by_loop(batch, *([x.tolist() for x in given] for given in (rewards, values)), gamma, lam)
    torch.testing.assert_close(advantage, expected[0][rows.response], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(returns, expected[1][rows.response], atol=1e-12, rtol=1e-12)


def test_gae_by_hand():
    rows = Rows.packed([[0] * 4], [3], [[1, 0, 1]])
    advantage, returns = gae(torch.tensor([1.0, 9.0, 2.0]), torch.tensor([0.5, 9.0, 1.0]), rows, gamma=0.5, lam=0.5)
    # Last: 2 - 1 = 1. First: 1 + 0.5 * 1 - 0.5 = 1, plus 0.25 * 1.
    assert advantage.tolist() == [1.25, 0.0, 1.0]
    assert returns.tolist() == [1.75, 0.0, 2.0]


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_discounted_returns(gamma):
    batch = draw([63, 0, 1, 100, 5])
    rewards = [torch.randn(n, dtype=torch.float64) for n in batch.lengths]
    rows = batch.rows()
    zeros = [[0.0] * n for n in batch.lengths]
    expected = gae_by_loop(batch, [x.tolist() for x in rewards], zeros, gamma, 1.0)[0]
    ours = discounted_returns(rows.from_responses(rewards), rows, gamma=gamma)
    torch.testing.assert_close(ours, expected[rows.response], atol=1e-12, rtol=1e-12)


def test_a_nan_stays_in_its_sample():
    rows = Rows.packed([[0] * 4, [0] * 4, [0] * 4], [3, 3, 3])
    rewards = torch.ones(9)
    rewards[4] = math.nan
    assert discounted_returns(rewards, rows).isnan().tolist() == [False] * 3 + [True, True] + [False] * 4
    assert gae(rewards, torch.ones(9), rows)[0].isnan().tolist() == [False] * 3 + [True, True] + [False] * 4


def test_time_without_tokens():
    rows = Rows.packed([], [])
    assert gae(torch.zeros(0), torch.zeros(0), rows)[0].shape == (0,)
    rows = Rows.packed([[1, 2]], [0])
    assert discounted_returns(torch.zeros(0), rows).shape == (0,)
    assert token_rewards(torch.ones(1), rows).shape == (0,)


def test_token_rewards_are_at_the_last_token_that_counts():
    rows = Rows.packed([[0] * 4, [0] * 3, [0] * 2], [3, 2, 1], [[1, 1, 0], [1, 1], [0]])
    rewards = torch.tensor([5.0, 7.0, 9.0])
    assert token_rewards(rewards, rows).tolist() == [0.0, 5.0, 0.0, 0.0, 7.0, 0.0]
    penalty = torch.tensor([0.5, 0.25, math.nan, 1.0, 2.0, 3.0])
    assert token_rewards(rewards, rows, penalty=penalty).tolist() == [-0.5, 4.75, 0.0, -1.0, 5.0, 0.0]
    fewer = Rows.packed([[0] * 4, [0] * 3, [0] * 2], [3, 2, 1], [[1, 1, 0], [1, 1], [0]], loss_mask_only=True)
    assert token_rewards(rewards, fewer).tolist() == [0.0, 5.0, 0.0, 7.0]


def test_wrong_times():
    rows = Rows.packed([[0] * 4], [3])
    with pytest.raises(LogitlessError, match=re.escape("gae: gamma must be a number in 0 .. 1 but is 1.5.")):
        gae(torch.zeros(3), torch.zeros(3), rows, gamma=1.5)
    with pytest.raises(
        LogitlessError,
        match=re.escape("gae: values must be a tensor of numbers, one per row, [3],"),
    ):
        gae(torch.zeros(3), torch.zeros(2), rows)
    with pytest.raises(LogitlessError, match=re.escape("rewards must be a tensor of numbers, one per sample, [1]")):
        token_rewards(torch.zeros(3), rows)
    with pytest.raises(LogitlessError, match="know of no samples"):
        gae(torch.zeros(3), torch.zeros(3), Rows.every(torch.zeros(3, dtype=torch.int64)))


# Whitening.


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_whiten(offset):
    x = offset + torch.randn(101, dtype=torch.float64)
    counted = torch.rand(101) < 0.6
    x[~counted] = math.nan
    own = x[counted]
    ours = whiten(x, counted)
    assert not ours[~counted].any()
    torch.testing.assert_close(ours[counted], (own - own.mean()) / (own.var() + 1e-8).sqrt(), atol=1e-8, rtol=0)
    kept = whiten(x, counted, shift=False)
    torch.testing.assert_close(kept[counted] - own.mean(), ours[counted], atol=1e-8, rtol=0)


@pytest.mark.parametrize("num", [0, 1])
def test_whiten_next_to_nothing(num):
    counted = torch.arange(5) < num
    assert not whiten(torch.full((5,), 3.0), counted).any()
    with pytest.raises(LogitlessError, match=re.escape("counted must be bool of shape [5] on cpu but is torch.int64")):
        whiten(torch.zeros(5), torch.ones(5, dtype=torch.int64))


def test_reinforce_plus_plus():
    batch = draw()
    rows = batch.rows()
    rewards, penalty = torch.randn(len(LENGTHS), dtype=torch.float64), torch.rand(len(rows), dtype=torch.float64)
    ours = reinforce_pp_advantages(rewards, rows, penalty=penalty, gamma=0.9)
    returns = discounted_returns(token_rewards(rewards, rows, penalty=penalty), rows, gamma=0.9)
    own = returns[rows.counted]
    torch.testing.assert_close(ours[rows.counted], (own - own.mean()) / (own.var() + 1e-8).sqrt())
    assert not ours[~rows.counted].any()
    based = reinforce_pp_baseline_advantages(rewards, 2, rows)
    pairs = rewards.view(-1, 2)
    own = (pairs - pairs.mean(1, keepdim=True)).flatten()[rows.sample][rows.counted]
    torch.testing.assert_close(based[rows.counted], (own - own.mean()) / (own.var() + 1e-8).sqrt())


# Values.


def test_value_loss():
    values = torch.randn(507, dtype=torch.float64, requires_grad=True)
    old, returns = torch.randn(2, 507, dtype=torch.float64)
    loss, clipped = value_loss(values, returns, old_values=old, clip=0.4)
    upstream = torch.randn(507, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(loss, values, upstream)
    for i in range(507):
        v, o, r = values[i].item(), old[i].item(), returns[i].item()
        kept = min(max(v, o - 0.4), o + 0.4)
        assert loss[i].item() == pytest.approx(max((v - r) ** 2, (kept - r) ** 2) / 2)
        active = (kept - r) ** 2 > (v - r) ** 2
        assert clipped[i].item() == active
        assert gradient[i].item() == pytest.approx(0.0 if active else upstream[i].item() * (v - r))
    assert 0.05 < clipped.mean() < 0.95
    plain = value_loss(values, returns)
    torch.testing.assert_close(plain.loss, (values - returns).square() / 2)
    assert not plain.clip_fraction.any()


def test_wrong_value_losses():
    x = torch.zeros(3)
    with pytest.raises(LogitlessError, match="clip and old_values go together"):
        value_loss(x, x, clip=0.2)
    with pytest.raises(LogitlessError, match=re.escape("clip must be a positive number or None but is 0.0.")):
        value_loss(x, x, old_values=x, clip=0.0)
