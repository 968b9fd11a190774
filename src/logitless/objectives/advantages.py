"""Advantages from rewards of whole samples, without a value model: how much better a sample did than others.

``rewards`` is ``[N]``; samples of one prompt form a group. ``groups`` is the size of a group if its samples lie side by
side, or one id per sample in any order. A group must be whole: first gather the rewards of a prompt that is spread over
ranks. Results are ``[N]``; ``advantage[rows.sample]`` is one per row.

    grpo_advantages      (r - mean) / (std + eps) of the group
    dr_grpo_advantages   r - mean of the group
    rloo_advantages      r - mean of the other samples of the group
    reinforce_pp_advantages            returns per token, whitened over the batch
    reinforce_pp_baseline_advantages   r - mean of the group, per token, whitened over the batch

In a group of equal rewards, or of one sample, advantages are exactly 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.errors.arguments import FLOATS, dense, described, real_numbers, refused
from logitless.objectives.checks import at_least_zero, check_rows
from logitless.objectives.values import discounted_returns, token_rewards, whiten
from logitless.rows import Rows
from logitless.rows.integers import holds_integers

REWARDS = "a tensor of floating-point numbers, [N], one per sample,"
"""What rewards are, as errors say it."""


def grpo_advantages(rewards: Tensor, groups: int | Tensor, *, eps: float = 1e-6) -> Tensor:
    """``(r - mean) / (std + eps)``, with the unbiased standard deviation. Shao et al. 2024 (DeepSeekMath).

    Args:
        eps: 0 or more.

    >>> grpo_advantages(torch.tensor([0.0, 1.0, 5.0, 5.0]), 2, eps=0.0)
    tensor([-0.7071,  0.7071,  0.0000,  0.0000])
    """
    at_least_zero("eps", eps, "grpo_advantages")
    group = _grouped(rewards, groups)
    variance = group.sum((group.rewards - group.mean).square()) / (group.size - 1).clamp_min(1)
    return group.result((group.rewards - group.mean) / (variance.sqrt() + eps))


def dr_grpo_advantages(rewards: Tensor, groups: int | Tensor) -> Tensor:
    """``r - mean``: dividing by the deviation would favour prompts that are too easy or too hard. Liu et al. 2025."""
    group = _grouped(rewards, groups)
    return group.result(group.rewards - group.mean)


def rloo_advantages(rewards: Tensor, groups: int | Tensor) -> Tensor:
    """``r`` minus the mean of the other samples of the group. Kool et al. 2019; Ahmadian et al. 2024 (RLOO)."""
    group = _grouped(rewards, groups)
    return group.result((group.rewards - group.mean) * group.size / (group.size - 1).clamp_min(1))


def reinforce_pp_advantages(
    rewards: Tensor,
    rows: Rows,
    *,
    penalty: Tensor | None = None,
    gamma: float = 1.0,
    cp_group: Any = None,
    group: Any = None,
) -> Tensor:
    """REINFORCE++: discounted returns of each token, whitened over all tokens of the batch. Hu 2025.

    Args:
        rewards: ``[N]``.
        rows: the rows of this rank; join micro-batches first, because the mean is over all of them.
        penalty: ``[R]`` subtracted from each token's reward, for example ``0.01 * kl_penalty(...)``.
        gamma: discount, in 0 .. 1.
        cp_group: context-parallel group; None if the rows are not split.
        group: all ranks that have a part of the batch (DP x CP); None if this process has all of it.

    Returns:
        ``[R]``.
    """
    per_token = token_rewards(rewards, rows, penalty=penalty, group=cp_group)
    returns = discounted_returns(per_token, rows, gamma=gamma, group=cp_group)
    return whiten(returns, rows.counted, group=group)


def reinforce_pp_baseline_advantages(rewards: Tensor, groups: int | Tensor, rows: Rows, *, group: Any = None) -> Tensor:
    """REINFORCE++ with the group's mean as baseline, whitened over all tokens of the batch: ``[R]``. Hu 2025.

    Arguments as for :func:`grpo_advantages` and :func:`reinforce_pp_advantages`.
    """
    name = "reinforce_pp_baseline_advantages"
    check_rows(name, rows)
    real_numbers(rewards, f"{name}: rewards", (len(rows.counts),), "sample", rows.target.device)
    return whiten(dr_grpo_advantages(rewards, groups)[rows.sample], rows.counted, group=group)


class _Grouped(NamedTuple):
    """Rewards in float64, ordered so that groups lie side by side, and the group of each entry."""

    rewards: Tensor
    order: Tensor
    lengths: Tensor
    of_entry: Tensor
    dtype: torch.dtype

    def sum(self, x: Tensor) -> Tensor:
        """Each entry's group sum. Segment sums: the same bits on every run."""
        return torch.segment_reduce(x, "sum", lengths=self.lengths, unsafe=True)[self.of_entry]

    @property
    def size(self) -> Tensor:
        return self.lengths[self.of_entry]

    @property
    def mean(self) -> Tensor:
        return self.sum(self.rewards) / self.size

    def result(self, advantage: Tensor) -> Tensor:
        """In the caller's order and dtype, exactly 0 in groups of equal rewards, where only rounding is left."""
        largest = torch.segment_reduce(self.rewards, "max", lengths=self.lengths, unsafe=True)[self.of_entry]
        smallest = torch.segment_reduce(self.rewards, "min", lengths=self.lengths, unsafe=True)[self.of_entry]
        advantage = torch.where(largest == smallest, 0.0, advantage)
        return torch.zeros_like(advantage).index_copy(0, self.order, advantage).to(self.dtype)


def _grouped(rewards: Tensor, groups: int | Tensor) -> _Grouped:
    # Ids are sorted, so that their numbers and those of the rewards are read.
    dense(rewards, "advantages: rewards", REWARDS, numbers=isinstance(groups, Tensor))
    if rewards.dim() != 1 or rewards.dtype not in FLOATS:
        raise refused("advantages: rewards", REWARDS, rewards)
    num, device, wide = rewards.shape[0], rewards.device, rewards.detach().double()
    if isinstance(groups, Tensor):
        dense(groups, "advantages: groups", f"a size or integer ids of shape [{num}]", numbers=True)
        if tuple(groups.shape) != (num,) or not holds_integers(groups):
            raise LogitlessError(
                f"advantages: groups must be a size or integer ids of shape [{num}] but are {list(groups.shape)} "
                f"{groups.dtype}."
            )
        # The number of groups decides a shape, so this waits for the ids: groups and rewards are best on the CPU.
        _, inverse, lengths = torch.unique(groups.to(device), return_inverse=True, return_counts=True)
        order = torch.argsort(inverse, stable=True)
        return _Grouped(wide[order], order, lengths, inverse[order], rewards.dtype)
    if type(groups) is not int or groups < 1 or num % groups:
        raise LogitlessError(
            f"advantages: groups must be ids of shape [{num}] or a size that divides {num} rewards but is "
            f"{described(groups)}."
        )
    entries = torch.arange(num, device=device)
    lengths = torch.full((num // groups,), groups, dtype=torch.int64, device=device)
    return _Grouped(wide, entries, lengths, entries // groups, rewards.dtype)
