"""On-policy distillation in one file of plain torch: ``python examples/distill_on_policy.py``.

A transformer of width 64 learns a task from examples. One of width 16, which knows nothing, then learns from it alone:

    the student samples responses  ->  the teacher reads them  ->  KL(student || teacher) of every response token
    ->  policy_loss(teacher=...), backward. Logits of neither model are stored.

Twice: from the teacher's hidden states and head, and from nothing but its four best log-probs of every token, as a
server sends them. ``--figure out/distillation`` draws both (matplotlib), light and dark.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from grpo_plain import PROMPT, RESPONSE, VOCAB, Policy, reward, sample
from torch import Tensor

import logitless as ll

BATCH, SENT = 48, 4  # responses of a step; log-probs that a server sends of each token
SFT, DISTILL = ll.Objective.recipe("sft"), ll.Objective.recipe("distill", divergence="reverse_kl")


class Curve(NamedTuple):
    """Of every step.

    Attributes:
        loss: KL(student || teacher) of what the student wrote.
        kl: KL(teacher || student) of what the teacher wrote, which the student never sees.
        reward: of what the student wrote.
    """

    loss: list[float]
    kl: list[float]
    reward: list[float]


def batch(model: Policy, chance: torch.Generator) -> tuple[Tensor, ll.Rows, Tensor]:
    """What a model writes: tokens, the rows of its responses, and rewards."""
    prompts = torch.randint(1, VOCAB, (BATCH, PROMPT), generator=chance)
    tokens, lengths = sample(model, prompts, torch.rand(BATCH, RESPONSE, VOCAB, generator=chance))
    rows = ll.Rows.padded(tokens, lengths, lengths=[PROMPT + n for n in lengths])
    return tokens, rows, reward(tokens, lengths)


def logits_of(model: Policy, tokens: Tensor) -> ll.Logits:
    """The model's logits, which are not computed."""
    return ll.Logits(model.hidden(tokens), model.head.weight)


def trained_teacher(steps: int = 60) -> Policy:
    """From examples: the last token of the prompt, over and over, and now and then any other."""
    torch.manual_seed(0)
    teacher, chance = Policy(width=64), torch.Generator().manual_seed(2)
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=3e-3)
    for _ in range(steps):
        prompts = torch.randint(1, VOCAB, (BATCH, PROMPT), generator=chance)
        answers = prompts[:, -1:].expand(BATCH, RESPONSE)
        other = torch.rand(answers.shape, generator=chance) < 0.1
        answers = torch.where(other, torch.randint(1, VOCAB, answers.shape, generator=chance), answers)
        tokens = torch.cat([prompts, answers], 1)
        rows = ll.Rows.padded(tokens, [RESPONSE] * BATCH, lengths=[PROMPT + RESPONSE] * BATCH)
        loss, _ = ll.policy_loss(logits_of(teacher, tokens), rows, SFT)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return teacher.requires_grad_(False)


def server(teacher: Policy, tokens: Tensor, rows: ll.Rows) -> ll.Teacher:
    """What is left of a teacher behind a server: its best few log-probs of each response token."""
    best = ll.logprobs(logits_of(teacher, tokens), rows, top_k=SENT)
    return ll.Teacher.from_top_k(best.top_k_logprobs, best.top_k_ids, tail="bucket")


def distil(teacher: Policy, steps: int, top_k: bool) -> Curve:
    """Train a student on what it writes itself."""
    torch.manual_seed(1)
    student, chance = Policy(width=16), torch.Generator().manual_seed(3)
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3)
    read, read_rows, _ = batch(teacher, torch.Generator().manual_seed(4))
    known = logits_of(teacher, read)
    curve = Curve([], [], [])
    for step in range(steps):
        tokens, rows, rewards = batch(student, chance)
        taught = server(teacher, tokens, rows) if top_k else logits_of(teacher, tokens)
        loss, _ = ll.policy_loss(logits_of(student, tokens), rows, DISTILL, teacher=taught)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        with torch.no_grad():
            kl = ll.logprobs(logits_of(student, read), read_rows, teacher=known, divergence="forward_kl").divergence
        for values, value in zip(curve, (loss.detach(), kl.mean(), rewards.mean()), strict=True):
            values.append(float(value))
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:3}  loss {curve.loss[-1]:.3f}  kl {curve.kl[-1]:.3f}  reward {curve.reward[-1]:.3f}")
    return curve


def draw(curves: dict[str, Curve], teacher_reward: float, path: Path) -> None:
    """``PATH-light.png`` and ``PATH-dark.png``."""
    import matplotlib.pyplot as plt

    from logitless.tools.style import DARK, LIGHT, WIDTH_INCHES, dress, name_lines, save

    titles = ("loss", "KL(teacher, student)", "reward")
    path.parent.mkdir(parents=True, exist_ok=True)
    for style in (LIGHT, DARK):
        figure, axes = plt.subplots(1, 3, figsize=(WIDTH_INCHES, 3.0), layout="constrained")
        for axis, (field, title) in zip(axes, zip(Curve._fields, titles, strict=True), strict=True):
            dress(axis, style, title)
            for (name, curve), colour in zip(curves.items(), (style.ours, style.mark), strict=True):
                axis.plot(getattr(curve, field), color=colour, linewidth=1.8, label=name)
            axis.set_xlabel("step")
            axis.set_ylim(bottom=0)
        axes[2].axhline(teacher_reward, color=style.others, linewidth=1.8, label="the teacher's", zorder=1)
        axes[2].set_ylim(top=1.1)
        name_lines(axes[2], style)
        save(figure, path.with_name(f"{path.name}-{style.name}.png"), style)


def main(steps: int, figure: Path | None) -> None:
    teacher = trained_teacher()
    own = float(batch(teacher, torch.Generator().manual_seed(5))[2].mean())
    print(f"the teacher's reward {own:.3f}")
    curves = {}
    for name, top_k in (("hidden states and head", False), (f"{SENT} log-probs of each token", True)):
        print(f"from its {name}")
        curves[name] = distil(teacher, steps, top_k)
    if figure is not None:
        draw(curves, own, figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--figure", type=Path, help="draw curves to FIGURE-light.png and FIGURE-dark.png")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.figure)
