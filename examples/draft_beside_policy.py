"""A draft head that learns beside its policy, in one file of plain torch: ``python examples/draft_beside_policy.py``.

The policy of ``grpo_plain.py`` learns its task. What it computes anyway teaches a draft, which joins it late, is to
guess what the policy says one and two tokens ahead, and has 12 of its 16 ids:

    sample, reward, policy_loss                              as in grpo_plain.py
    hidden states of the draft, both depths, [2, N, S, D]    ->  logprobs(teacher=Teacher(the policy's, ids=, at=))
    one backward of both losses

Nobody stores logits, and the policy's row beside two rows of the draft is multiplied once. The acceptance rate is that
of speculative decoding: how likely the policy accepts what the draft proposes. It can get as high as the policy's own
probability of the draft's ids. ``--figure out/draft`` draws both (matplotlib), light and dark.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from grpo_plain import GROUP, HEAD, OBJECTIVE, PROMPT, RESPONSE, VOCAB, Policy, new_prompts, reward, sample
from torch import Tensor, nn

import logitless as ll
from logitless.objectives import grpo_advantages

DRAFT, DEPTHS, WIDTH = 12, 2, 32  # ids that the draft has, how far it looks ahead, its width
LATER = 0.8  # weight of the second token ahead


class Draft(nn.Module):
    """One layer, once for every token ahead, on top of the policy's hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.step = nn.Sequential(nn.Linear(2 * WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, DRAFT, bias=False)
        # The ids that it has, as a map of the kind that EAGLE-3 checkpoints hold: id i is the policy's i + d2t[i].
        theirs = torch.tensor([i for i in range(VOCAB) if i % 4 != 3])
        self.register_buffer("d2t", theirs - torch.arange(DRAFT))

    def hidden(self, x: Tensor, tokens: Tensor) -> Tensor:
        """``[DEPTHS, N, S, D]``: after reading the next token, and the one after it."""
        found = []
        for depth in range(1, DEPTHS + 1):
            x = x + self.step(torch.cat([x, self.token(tokens.roll(-depth, 1))], -1))
            found.append(x)
        return torch.stack(found)


class Curve(NamedTuple):
    """Of every step, on prompts that are not trained on: the acceptance rate one and two tokens ahead, what it may be
    at most, and the policy's reward."""

    one: list[float]
    two: list[float]
    most: list[float]
    reward: list[float]


def compared(draft: Draft, hidden: Tensor, weight: Tensor, tokens: Tensor, rows: ll.Rows) -> ll.TokenStats:
    """The draft beside the policy, for every row of a response and both depths.

    The policy's row j predicts token j + 1. The draft guesses it from row j - 1 and token j, or from row j - 2 and two
    tokens: those are its rows beside row j.
    """
    hidden, count = hidden.detach(), tokens.numel()
    index = torch.cat([rows.index - depth + (depth - 1) * count for depth in range(1, DEPTHS + 1)])
    teacher = ll.Teacher(
        ll.Logits(hidden, weight),
        head=HEAD,
        ids=ll.Teacher.ids_from_d2t(draft.d2t, VOCAB),
        at=rows.index.repeat(DEPTHS),
    )
    logits = ll.Logits(draft.hidden(hidden, tokens), draft.head.weight)
    asked = {"teacher": teacher, "divergence": "lk_hybrid", "stats": ("teacher_shared",)}
    return ll.logprobs(logits, (index, torch.zeros_like(index)), head=HEAD, **asked)


def responses(policy: Policy, prompts: Tensor, uniform: Tensor) -> tuple[Tensor, ll.Rows, Tensor]:
    """What the policy writes: tokens, the rows of its responses, and rewards."""
    tokens, lengths = sample(policy, prompts, uniform)
    rows = ll.Rows.padded(tokens, lengths, lengths=[PROMPT + n for n in lengths])
    return tokens, rows, reward(tokens, lengths)


@torch.no_grad()
def measured(policy: Policy, draft: Draft) -> tuple[Tensor, ...]:
    """A point of the curve: on prompts whose last tokens, the answers, are all ids in turn."""
    chance = torch.Generator().manual_seed(2)
    prompts = torch.randint(1, VOCAB, (90, PROMPT), generator=chance)
    prompts[:, -1] = torch.arange(90) % (VOCAB - 1) + 1
    tokens, rows, rewards = responses(policy, prompts, torch.rand(90, RESPONSE, VOCAB, generator=chance))
    out = compared(draft, policy.hidden(tokens), policy.head.weight, tokens, rows)
    return *(x.mean() for x in out.acceptance.chunk(DEPTHS)), out.teacher_shared.mean(), rewards.mean()


def train(steps: int, alone: int) -> Curve:
    torch.manual_seed(0)
    policy, draft, chance = Policy(WIDTH), Draft(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW([*policy.parameters(), *draft.parameters()], lr=3e-3)
    curve = Curve([], [], [], [])
    for step in range(steps):
        tokens, rows, rewards = responses(policy, *new_prompts(chance))
        fields = {"old_logprob": "current", "advantage": grpo_advantages(rewards, groups=GROUP)[rows.sample]}
        hidden = policy.hidden(tokens)
        loss, _ = ll.policy_loss(ll.Logits(hidden, policy.head.weight), rows, OBJECTIVE, head=HEAD, **fields)
        if step >= alone:
            one, two = compared(draft, hidden, policy.head.weight, tokens, rows).divergence.chunk(DEPTHS)
            loss = loss + (one + LATER * two).mean()  # no gradient reaches the policy from here
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        for values, value in zip(curve, measured(policy, draft), strict=True):
            values.append(float(value))
        if step % 20 == 0 or step == steps - 1:
            ahead = "  ".join(f"{x[-1]:.3f}" for x in (curve.one, curve.two))
            print(f"step {step:3}  accepted {ahead}  at most {curve.most[-1]:.3f}  reward {curve.reward[-1]:.3f}")
    return curve


def draw(curve: Curve, alone: int, path: Path) -> None:
    """``PATH-light.png`` and ``PATH-dark.png``."""
    import matplotlib.pyplot as plt

    from logitless.tools.style import DARK, LIGHT, WIDTH_INCHES, dress, name_lines, save

    path.parent.mkdir(parents=True, exist_ok=True)
    for style in (LIGHT, DARK):
        figure, axes = plt.subplots(1, 2, figsize=(WIDTH_INCHES, 3.0), layout="constrained")
        for axis, title in zip(axes, ("acceptance rate of the draft", "reward of the policy"), strict=True):
            dress(axis, style, title)
            axis.axvline(alone, color=style.others, linewidth=1.2, label="_")
            axis.set_xlabel("step")
            axis.set_ylim(0, 1.05)
        look = {"textcoords": "offset points", "fontsize": 9, "color": style.quiet}
        axes[0].annotate("the draft begins", (alone, 0), (5, 6), **look)
        axes[0].plot(curve.most, color=style.others, linewidth=1.8, label="upper bound")
        axes[0].plot(curve.one, color=style.ours, linewidth=1.8, label="one token ahead")
        axes[0].plot(curve.two, color=style.mark, linewidth=1.8, label="two tokens ahead")
        axes[1].plot(curve.reward, color=style.ours, linewidth=1.8)
        name_lines(axes[0], style)
        save(figure, path.with_name(f"{path.name}-{style.name}.png"), style)


def main(steps: int, alone: int, figure: Path | None) -> None:
    curve = train(steps, alone)
    if figure is not None:
        draw(curve, alone, figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--alone", type=int, default=80, help="steps of the policy before the draft begins")
    parser.add_argument("--figure", type=Path, help="draw curves to FIGURE-light.png and FIGURE-dark.png")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.alone, arguments.figure)
