"""GRPO in one file of plain torch: ``python examples/grpo_plain.py``.

A two-layer transformer, made here, learns to repeat the last token of its prompt. One step:

    sample a group of responses per prompt  ->  reward  ->  advantage within the group
    ->  two updates: hidden states, policy_loss, backward. Logits of the update are never stored.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import logitless as ll
from logitless.objectives import grpo_advantages

VOCAB, END = 16, 0  # ids; END ends a response
PROMPTS, GROUP, PROMPT, RESPONSE = 16, 8, 4, 6  # prompts per step, samples of each, lengths in tokens
HEAD = ll.Head(temperature=0.9)  # the distribution that is sampled from is the one that is trained
CLIP_NORM = 1.0  # of the gradient
OBJECTIVE = ll.Objective.recipe("dapo", entropy_coef=0.003)


class Policy(nn.Module):
    """A causal transformer; ``forward`` applies the head to the hidden states."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, width)
        self.place = nn.Embedding(PROMPT + RESPONSE, width)
        layer = {"nhead": 2, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, **layer) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        """``[N, S, D]`` hidden states of ``[N, S]`` tokens."""
        length = tokens.shape[1]
        x = self.token(tokens) + self.place.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.norm(x)

    def forward(self, tokens: Tensor, *args, **options):
        return self.head(self.hidden(tokens), *args, **options)


@torch.no_grad()
def sample(policy: nn.Module, prompts: Tensor, uniform: Tensor) -> tuple[Tensor, list[int]]:
    """``[N, S]`` prompts with responses, and the length of each response, END included.

    All randomness is in ``uniform`` ``[N, RESPONSE, VOCAB]``: the same numbers give the same tokens.
    """
    tokens = prompts
    for step in range(RESPONSE):
        gumbel = -torch.log(-torch.log(uniform[:, step]))
        drawn = (policy(tokens)[:, -1] / HEAD.temperature + gumbel).argmax(-1)
        tokens = torch.cat([tokens, drawn[:, None]], dim=1)
    before_end = (tokens[:, PROMPT:] != END).cumprod(1).sum(1)
    return tokens, (before_end + 1).clamp(max=RESPONSE).tolist()


def reward(tokens: Tensor, response_lengths: list[int]) -> Tensor:
    """``[N]``: how much of the longest response repeats the last token of the prompt."""
    inside = torch.arange(RESPONSE) < torch.tensor(response_lengths)[:, None]
    right = tokens[:, PROMPT:] == tokens[:, PROMPT - 1 : PROMPT]
    return (right & inside).sum(1) / RESPONSE


def new_prompts(chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """The prompts of a step, each GROUP times, side by side, and the random numbers that draw their responses."""
    prompts = torch.randint(1, VOCAB, (PROMPTS, PROMPT), generator=chance).repeat_interleave(GROUP, 0)
    return prompts, torch.rand(len(prompts), RESPONSE, VOCAB, generator=chance)


def report(step: int, mean_reward: float, metrics: ll.Metrics, norm: Tensor) -> None:
    entropy = metrics.compute()["entropy"]
    print(f"step {step:3}  reward {mean_reward:.3f}  entropy {entropy:.3f}  gradient {float(norm):.4f}")


def train(steps: int) -> list[float]:
    """Mean reward of every step."""
    torch.manual_seed(0)
    policy, chance = Policy(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    curve = []
    for step in range(steps):
        tokens, response_lengths = sample(policy, *new_prompts(chance))
        rewards = reward(tokens, response_lengths)
        rows = ll.Rows.padded(tokens, response_lengths, lengths=[PROMPT + n for n in response_lengths])
        advantage = grpo_advantages(rewards, groups=GROUP)[rows.sample]

        old = "current"  # the first update is on policy: its old log-probs are the ones it computes
        for _ in range(2):
            logits = ll.Logits(policy.hidden(tokens), policy.head.weight)
            fields = {"old_logprob": old, "advantage": advantage}
            loss, metrics, stats = ll.policy_loss(logits, rows, OBJECTIVE, head=HEAD, return_stats=True, **fields)
            old = stats.logprob if isinstance(old, str) else old
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(policy.parameters(), CLIP_NORM)
            optimizer.step()

        curve.append(float(rewards.mean()))
        if step % 10 == 0 or step == steps - 1:
            report(step, curve[-1], metrics, norm)
    return curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    train(parser.parse_args().steps)
