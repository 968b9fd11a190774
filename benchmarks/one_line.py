"""Whole steps of code that reads a transformers model's logits, as it is written, before and after ``ll.defer(model)``.

    python benchmarks/one_line.py --out benchmarks/results/one-line.jsonl [--limit 420]
    python benchmarks/one_line.py --models 1.7B --only GRPO --steps-only
    python benchmarks/one_line.py --device cpu

Each contender is a loss on logits: SFT by labels, GRPO by ``log_softmax`` and ``gather``, DPO by a loop over sequences
as TRL wrote it before its fused head, distillation by ``kl_div`` from a teacher of the same shape. The same lines run
twice, on logits that the head computes and on logits that it defers. Models, optimizer, batch and records are those of
``whole_step.py``; ``loss_ms`` is the head and the loss alone. A peak is of the whole step, weights and state of the
optimizer included.
"""

from __future__ import annotations

import contextlib
import functools
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


def sft(model: Any, logits: Tensor, batch: Batch, _: Any) -> Tensor:
    """What ``model(ids, labels=labels).loss`` computes from its logits; the prompt has no labels."""
    labels = batch.tokens.clone()
    labels[:, : batch.prompt] = -100
    return model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size)


def grpo(model: Any, logits: Tensor, batch: Batch, _: Any) -> Tensor:
    logp = torch.log_softmax(logits[:, batch.prompt - 1 : -1].float(), -1)
    return clipped(logp.gather(-1, batch.target[..., None]).squeeze(-1), batch.old, batch.advantage)


def dpo(model: Any, logits: Tensor, batch: Batch, _: Any) -> Tensor:
    """Chosen sequences and then as many rejected; the reference's log-probs are given."""
    logits, found = logits[:, batch.prompt - 1 : -1], []
    for row, ids in zip(logits, batch.target, strict=True):
        found.append(F.log_softmax(row, -1).gather(-1, ids[:, None]).squeeze(-1))
    ratio = (torch.stack(found).float() - batch.old).sum(-1)
    # One sequence of an odd number is in no pair.
    chosen, rejected = ratio[: len(ratio) // 2 * 2].view(2, -1)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def distil(model: Any, logits: Tensor, batch: Batch, teacher: Tensor) -> Tensor:
    """Of every token, as the documentation of ``kl_div`` has it."""
    columns = logits.shape[-1]
    log_p, q = (z.float().view(-1, columns).log_softmax(-1) for z in (logits, teacher))
    return F.kl_div(log_p, q, reduction="batchmean", log_target=True)


DISTIL = "distillation by kl_div"

LOSSES: dict[str, Callable[[Any, Tensor, Batch, Any], Tensor]] = {
    "SFT by labels": sft,
    "GRPO by log_softmax and gather": grpo,
    "DPO by a loop of log_softmax": dpo,
    DISTIL: distil,
}


class Unchanged(Trainer):
    """A model, its optimizer, and a step of code that reads its logits."""

    names = tuple(name + after for name in LOSSES for after in ("", AFTER))

    def made(self) -> Any:
        return make_model(self.shape, self.device)

    def first(self, contender: str) -> str:
        return contender.removesuffix(AFTER)

    @functools.cached_property
    def teacher(self) -> Any:
        """Frozen, with other weights."""
        teacher = make_model(self.shape, self.device, seed=3).requires_grad_(False)
        return teacher.eval()

    def loss(self, contender: str, batch: Batch) -> Tensor:
        teacher = None
        if self.first(contender) == DISTIL:
            with torch.no_grad(), self._head(contender, self.teacher):
                teacher = self.teacher(batch.tokens, use_cache=False).logits
        with self._head(contender, self.model):
            logits = self.model(batch.tokens, use_cache=False).logits
        return LOSSES[self.first(contender)](self.model, logits, batch, teacher)

    def loss_alone(self, contender: str, batch: Batch) -> Callable[[], None]:
        models = (self.model, self.teacher) if self.first(contender) == DISTIL else (self.model,)
        with torch.no_grad():
            hidden, *of_teacher = (x.model(batch.tokens, use_cache=False).last_hidden_state for x in models)
        hidden.requires_grad_()

        def part() -> None:
            teacher = None
            for x in of_teacher:
                with torch.no_grad(), self._head(contender, self.teacher):
                    teacher = self.teacher.lm_head(x)
            with self._head(contender, self.model):
                logits = self.model.lm_head(hidden)
            loss = LOSSES[self.first(contender)](self.model, logits, batch, teacher)
            torch.autograd.grad(loss, (hidden, self.model.lm_head.weight))

        return part

    def _head(self, contender: str, model: Any) -> Any:
        """Whether a head defers is decided here, for one forward; a user's line is there once."""
        return ll.defer(model, strict=True) if contender.endswith(AFTER) else contextlib.nullcontext()


if __name__ == "__main__":
    main(Unchanged, __doc__)
