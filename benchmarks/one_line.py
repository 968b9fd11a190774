"""Whole steps of code that reads a transformers model's logits, as it is written, before and after ``ll.defer(model)``.

    python benchmarks/one_line.py --out benchmarks/results/one-line.jsonl [--limit 420]
    python benchmarks/one_line.py --models 1.7B --only GRPO --steps-only
    python benchmarks/one_line.py --device cpu

Each contender is a loss on logits: SFT by labels, GRPO by ``log_softmax`` and ``gather``, DPO by a loop over sequences
as TRL wrote it before its fused head. The same lines run twice, on logits that the head computes and on logits that it
defers. Models, optimizer, batch and records are those of ``whole_step.py``; ``loss_ms`` is the head and the loss alone.
A peak is of the whole step, weights and state of the optimizer included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from whole_step import main
from whole_step_model import Batch, Trainer, clipped, make_model

import logitless as ll

BETA = 0.1
AFTER = ", deferred"


def sft(model: Any, logits: Tensor, batch: Batch) -> Tensor:
    """What ``model(ids, labels=labels).loss`` computes from its logits; the prompt has no labels."""
    labels = batch.tokens.clone()
    labels[:, : batch.prompt] = -100
    return model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size)


def grpo(model: Any, logits: Tensor, batch: Batch) -> Tensor:
    logp = torch.log_softmax(logits[:, batch.prompt - 1 : -1].float(), -1)
    return clipped(logp.gather(-1, batch.target[..., None]).squeeze(-1), batch.old, batch.advantage)


def dpo(model: Any, logits: Tensor, batch: Batch) -> Tensor:
    """Chosen sequences and then as many rejected; the reference's log-probs are given."""
    logits, found = logits[:, batch.prompt - 1 : -1], []
    for row, ids in zip(logits, batch.target, strict=True):
        found.append(F.log_softmax(row, -1).gather(-1, ids[:, None]).squeeze(-1))
    ratio = (torch.stack(found).float() - batch.old).sum(-1)
    # One sequence of an odd number is in no pair.
    chosen, rejected = ratio[: len(ratio) // 2 * 2].view(2, -1)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


LOSSES: dict[str, Callable[[Any, Tensor, Batch], Tensor]] = {
    "SFT by labels": sft,
    "GRPO by log_softmax and gather": grpo,
    "DPO by a loop of log_softmax": dpo,
}


class Unchanged(Trainer):
    """A model, its optimizer, and a step of code that reads its logits."""

    names = tuple(name + after for name in LOSSES for after in ("", AFTER))

    def made(self) -> Any:
        return make_model(self.shape, self.device)

    def first(self, contender: str) -> str:
        return contender.removesuffix(AFTER)

    def loss(self, contender: str, batch: Batch) -> Tensor:
        with self._head(contender):
            logits = self.model(batch.tokens, use_cache=False).logits
        return LOSSES[self.first(contender)](self.model, logits, batch)

    def loss_alone(self, contender: str, batch: Batch) -> Callable[[], None]:
        with torch.no_grad():
            hidden = self.model.model(batch.tokens, use_cache=False).last_hidden_state
        hidden.requires_grad_()

        def part() -> None:
            with self._head(contender):
                logits = self.model.lm_head(hidden)
            loss = LOSSES[self.first(contender)](self.model, logits, batch)
            torch.autograd.grad(loss, (hidden, self.model.lm_head.weight))

        return part

    def _head(self, contender: str) -> Any:
        """Whether a head defers is decided here, for one forward; a user's line is there once."""
        return ll.defer(self.model, strict=True) if contender.endswith(AFTER) else contextlib.nullcontext()


if __name__ == "__main__":
    main(Unchanged, __doc__)
