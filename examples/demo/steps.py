"""The loss steps that the demo compares: from hidden states and the head to a loss and its gradients.

All are PPO's clipped loss with an entropy bonus over the response tokens of a batch; they differ in the tensors they
store. Three are plain torch as frameworks write it. ``deferred_step`` is the first of them with one line more, and
``logitless_step`` is one call of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from logitless.deferred import defer
from logitless.loss import policy_loss
from logitless.objectives import Objective
from logitless.operands import Logits
from logitless.rows import Rows
from logitless.spec import VocabShard

LossStep = Callable[[Tensor, nn.Linear, Rows, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""``f(hidden, head, rows, advantage, old_logprob)`` returns the loss and the ``[R]`` log-probs without graph.

``old_logprob=None`` stands for the log-probs of this very call: the first update after a rollout."""

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
ENTROPY_COEF = 0.001
OBJECTIVE = Objective(clip=(CLIP_LOW, CLIP_HIGH), entropy_coef=ENTROPY_COEF)

MEMORY = "8MiB"
"""Bytes that our steps may take for a chunk of logits."""


def plain_step(hidden: Tensor, head: nn.Linear, rows: Rows, advantage: Tensor, old: Tensor | None) -> Any:
    """Plain torch, on response rows only."""
    return _clipped_loss(*_plain_stats(head(rows.take(hidden)), rows.target), advantage, old)


def deferred_step(hidden: Tensor, head: nn.Linear, rows: Rows, advantage: Tensor, old: Tensor | None) -> Any:
    """Plain torch on every token, as it is written below, with one line before it: nobody computes the logits."""
    with defer(head, head=head, memory=MEMORY):
        return plain_step_of_all_rows(hidden, head, rows, advantage, old)


def plain_step_by_halves(hidden: Tensor, head: nn.Linear, rows: Rows, advantage: Tensor, old: Tensor | None) -> Any:
    """Plain torch with other roundings: each half of the vocabulary by itself, then merged."""
    parts = [rows.take(hidden) @ half.T for half in head.weight.chunk(2)]
    sums = torch.stack([torch.logsumexp(logits.float(), -1) for logits in parts])
    log_z = torch.logsumexp(sums, 0)
    means = [(torch.softmax(logits.float(), -1) * logits).sum(-1) for logits in parts]
    entropy = log_z - (torch.stack(means) * torch.exp(sums - log_z)).sum(0)
    target = torch.cat(parts, 1).gather(1, rows.target[:, None]).squeeze(1)
    return _clipped_loss(target - log_z, entropy, advantage, old)


def plain_step_of_all_rows(hidden: Tensor, head: nn.Linear, rows: Rows, advantage: Tensor, old: Tensor | None) -> Any:
    """Plain torch on every token, prompts included, as with logits from the model's forward."""
    target = torch.zeros(rows.token_shape or (), dtype=torch.int64).flatten().index_copy(0, rows.index, rows.target)
    logprob, entropy = _plain_stats(head(hidden).flatten(0, -2), target)
    return _clipped_loss(logprob[rows.index], entropy[rows.index], advantage, old)


def logitless_step(
    hidden: Tensor,
    head: nn.Linear,
    rows: Rows,
    advantage: Tensor,
    old: Tensor | None,
    *,
    shard: VocabShard | None = None,
    denominator: Tensor | None = None,
) -> Any:
    """Ours: the same loss and gradients, from one chunk of logits at a time."""
    loss, _, stats = policy_loss(
        Logits(hidden, head.weight, shard=shard),
        rows,
        OBJECTIVE,
        old_logprob="current" if old is None else old,
        advantage=advantage,
        denominator=denominator,
        memory=MEMORY,
        return_stats=True,
    )
    return loss, stats.logprob


def _plain_stats(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy, ``[R]`` each, with whole ``[R, V]`` tensors.

    By logsumexp, because log_softmax on CPU is off by 1e-5 at this vocabulary: enough to sample another token now and
    then, and with it to learn along another curve.
    """
    logits = logits.float()
    log_z = torch.logsumexp(logits, -1)
    entropy = log_z - (torch.softmax(logits, -1) * logits).sum(-1)
    return logits.gather(1, target[:, None]).squeeze(1) - log_z, entropy


def _clipped_loss(logprob: Tensor, entropy: Tensor, advantage: Tensor, old: Tensor | None) -> tuple[Tensor, Tensor]:
    """The loss in plain torch, without :class:`Objective`, so that the comparison covers ``Objective`` too."""
    ratio = (logprob - (logprob.detach() if old is None else old)).exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    loss = torch.maximum(-advantage * ratio, -advantage * clipped).mean()
    return loss - ENTROPY_COEF * entropy.mean(), logprob.detach()
