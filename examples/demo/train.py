"""GRPO: sample groups of responses, compare rewards within each group, take two updates on every batch.

A run starts from a policy that has learned to answer with random digits, which earn a reward of 0.1. Prompts and the
seeds of samples come from one generator, so two runs differ only by how their loss step rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from examples.demo.grid import Grid
from examples.demo.policy import Policy, hidden_states, new_policy, sample_responses
from examples.demo.steps import OBJECTIVE, LossStep, logitless_step
from examples.demo.task import draw_digits, draw_prompts, rewards_of
from logitless.errors import LogitlessError
from logitless.objectives import count_over
from logitless.objectives.advantages import grpo_advantages
from logitless.operands import Logits
from logitless.rows import Rows
from logitless.score import logprobs


@dataclass(frozen=True)
class Setting:
    """What is trained, and for how long.

    Attributes:
        steps: rollouts, each followed by ``updates`` updates.
        seed: seed of weights, prompts and samples.
        vocab: number of token ids, of which the task uses eleven.
        length: number of digits to repeat.
        prompts, group: prompts of a batch, responses to each.
        updates: updates on each batch.
        warm_steps, warm_rate: supervised updates before GRPO, towards random digits, and their learning rate.
        learning_rate: low enough that a rounding error grows slowly; at three times as much, runs soon part.
        clip_norm: largest norm of the gradient.
    """

    steps: int = 100
    seed: int = 0
    vocab: int = 4096
    length: int = 4
    prompts: int = 16
    group: int = 16
    updates: int = 2
    warm_steps: int = 40
    learning_rate: float = 1e-3
    warm_rate: float = 3e-3
    clip_norm: float = 0.5

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise LogitlessError(f"demo: steps must be a positive number but is {self.steps}.")

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    def check_grid(self, grid: Grid) -> None:
        """Raise unless the work divides evenly over the ranks."""
        for what, num, ranks in (("ids", self.vocab, grid.tp), ("samples", self.samples, grid.size)):
            if num % ranks:
                raise LogitlessError(f"demo: {num} {what} cannot be shared evenly by {ranks} ranks. Use powers of two.")


@dataclass(frozen=True, eq=False)
class Curve:
    """A training run.

    Attributes:
        name: name of the run.
        rewards: mean reward of each step's rollout.
        tokens: ``[steps, N, S]`` prompts and sampled tokens.
        seconds: duration of the whole run.
        processor_seconds: time that processors worked for it, on all threads: the same on a busy machine.
        last: the loss step and its inputs at the end, to measure its memory.
        waited: share of the duration in which the thread that computes did not run. It waits for nothing but the
            processor where the run has one rank, so this is what other programs took.
    """

    name: str
    rewards: list[float]
    tokens: Tensor
    seconds: float
    processor_seconds: float
    last: tuple[LossStep, Tensor, Tensor, Rows, Tensor]
    waited: float = 0.0

    def difference(self, other: Curve) -> float:
        """Largest difference of a step's mean reward."""
        return max(abs(a - b) for a, b in zip(self.rewards, other.rewards, strict=True))

    @property
    def first_reward(self) -> float:
        """Mean over the first tenth of the run."""
        return _mean(self.rewards[: max(1, len(self.rewards) // 10)])

    @property
    def last_reward(self) -> float:
        """Mean over the last tenth."""
        return _mean(self.rewards[-max(1, len(self.rewards) // 10) :])


def warm_start(setting: Setting) -> Policy:
    """A policy that answers with digits at random."""
    policy, generator = new_policy(setting.vocab, setting.seed), torch.Generator().manual_seed(setting.seed)
    adam = _optimizer(policy, setting.warm_rate)
    num, length = 64, setting.length
    for _ in range(setting.warm_steps):
        digits = draw_digits(num, length, generator)
        tokens = torch.cat([draw_prompts(num, length, generator), digits], 1)
        rows = Rows.padded(list(tokens), [length] * num)
        logits = Logits(hidden_states(policy, tokens, Grid()), policy.head)
        loss = -logprobs(logits, rows).logprob.mean()
        _update(policy, adam, loss, setting, Grid())
    return policy


def train(
    name: str, start: Policy, step: LossStep, setting: Setting, report: Callable[[str], None], grid: Grid | None = None
) -> Curve:
    """GRPO from ``start``, which stays as it is. A grid of several ranks needs :func:`logitless_step`."""
    grid = grid or Grid()
    policy = start.copy(grid.columns(setting.vocab))
    if grid.size > 1:
        step = partial(logitless_step, shard=grid.shard(setting.vocab))
    adam, generator = _optimizer(policy, setting.learning_rate), torch.Generator().manual_seed(setting.seed + 1)
    rewards, sampled = [], []
    began, worked, ran = time.perf_counter(), time.process_time(), time.thread_time()
    for turn in range(setting.steps):
        prompts = draw_prompts(setting.prompts, setting.length, generator).repeat_interleave(setting.group, 0)
        seeds = torch.randint(2**62, (len(prompts),), generator=generator)
        tokens = sample_responses(policy, prompts, seeds, setting.length, grid)
        reward = rewards_of(tokens)
        rows = Rows.padded(list(tokens), [setting.length] * len(tokens), cp=grid.scheme)
        if grid.size > 1:
            step = partial(step, denominator=count_over(rows, OBJECTIVE.reduce, grid.cp_group if grid.cp > 1 else None))
        advantage = grpo_advantages(reward, setting.group)[rows.sample]
        old = None
        for _ in range(setting.updates):
            hidden = hidden_states(policy, tokens, grid)
            loss, logprob = step(hidden, policy.lm_head, rows, advantage, old)
            old = logprob if old is None else old
            _update(policy, adam, loss, setting, grid)
        rewards.append(float(reward.mean()))
        sampled.append(tokens)
        if (turn + 1) % REPORT_EVERY == 0 or turn + 1 == setting.steps:
            report(f"{name}: step {turn + 1} of {setting.steps}, reward {rewards[-1]:.2f}")
    last = step, hidden.detach(), policy.head.detach(), rows, advantage  # pyright: ignore[reportPossiblyUnboundVariable]
    seconds, worked, ran = time.perf_counter() - began, time.process_time() - worked, time.thread_time() - ran
    return Curve(name, rewards, torch.stack(sampled), seconds, worked, last, max(0.0, 1 - ran / seconds))


REPORT_EVERY = 5


def num_reports(setting: Setting) -> int:
    """How often :func:`train` reports."""
    return -(-setting.steps // REPORT_EVERY)


def _optimizer(policy: Policy, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(policy.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)


def _update(policy: Policy, adam: torch.optim.Optimizer, loss: Tensor, setting: Setting, grid: Grid) -> None:
    """One step of Adam on the gradients of all ranks, clipped by their joint norm."""
    adam.zero_grad()
    loss.backward()
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    grid.sum_parts(gradients)
    # The body is the same on every rank that shares the vocabulary; the head is not.
    squares = [g.double().square().sum() for g in gradients]
    norm = (sum(squares[:-1]) + grid.sum_shards(squares[-1])).sqrt()
    scale = float((setting.clip_norm / norm).clamp_max(1.0))
    for g in gradients:
        g.mul_(scale)
    adam.step()


def _mean(x: list[float]) -> float:
    return sum(x) / len(x)
