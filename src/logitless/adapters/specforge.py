"""SpecForge: what its compact teacher reads of the target's whole vocabulary, and the losses of its drafts.

    tiled_logsumexp_argmax(hidden [..., D], weight [V, D])      float32 log Z [..., 1] and the most likely id [...]
    LogSoftmaxLoss.apply(logits [B, S, V], target, mask)        mean cross entropy against the target's probabilities
    _acceptance_rate_per_token_from_logits(logits, target)      [B, S] sum of min(p, q), of which LK losses are made
    SdpaLikeAdapter.step_view                                   the target's probabilities of a step: views, no copies

SpecForge multiplies a chunk of the vocabulary at a time and holds its float32 logits, twice. Here one product ends in
both numbers. Logits are rounded to the dtype of the hidden states first, as its linear layer rounds them, so that equal
ones are equal here, too. Of each of several steps ahead, it copies both of the target's probabilities and holds the
draft's until backward; here all steps read the same tensors, a few rows at a time.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from logitless.adapters.host import Host, Option
from logitless.adapters.replacing import Options, replaces
from logitless.adapters.scoring import HALF
from logitless.adapters.specforge_losses import acceptance, cross_entropy
from logitless.errors import LogitlessError
from logitless.operands import Logits
from logitless.score import logprobs
from logitless.spec import parse_memory

LOSS, LK, STEPS = (f"specforge.core.{name}" for name in ("loss", "lk_loss", "eagle3_adapters"))


@replaces("specforge.core.compact_teacher")
@torch.no_grad()
def tiled_logsumexp_argmax(
    options: Options, hidden: Tensor, weight: Tensor, *, chunk_size: int = 32768
) -> tuple[Tensor, Tensor]:
    if chunk_size <= 0:
        raise LogitlessError(f"chunk_size must be positive but is {chunk_size}.")
    logits = Logits(hidden, weight, match=HALF.get(hidden.dtype))
    first = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    out = logprobs(logits, first, stats=("top1",), memory=options["memory"])
    options["audit"].of_logits("tiled_logsumexp_argmax", logits, first, logprob=out.logprob)
    assert out.log_z is not None
    assert out.top1_id is not None
    return out.log_z.float()[..., None], out.top1_id


@replaces(LOSS, "LogSoftmaxLoss.apply")
def log_softmax_loss(options: Options, logits: Tensor, target: Tensor, position_mask: Tensor) -> Tensor:
    _check(logits, target, "target")
    if position_mask.numel() != logits.shape[:-1].numel():
        wanted = [*logits.shape[:-1], 1]
        raise LogitlessError(f"position_mask must be {wanted} but is {list(position_mask.shape)}.")
    # As SpecForge takes it: a row counts or does not.
    mask = position_mask.reshape(logits.shape[:-1]).bool().float()
    memory = parse_memory(options["memory"])
    return cross_entropy("LogSoftmaxLoss", logits, target, mask, memory, options["audit"]).mean()


@replaces(LK)
def _acceptance_rate_per_token_from_logits(options: Options, logits: Tensor, target_probs: Tensor) -> Tensor:
    _check(logits, target_probs, "target_probs")
    memory = parse_memory(options["memory"])
    return acceptance("compute_acceptance_rate", logits, target_probs, memory, options["audit"])


@replaces(STEPS, "SdpaLikeAdapter.step_view", optional=True)
def step_view(
    self: Any,
    *,
    idx: int,
    ttt_length: int,
    global_input_ids: Tensor,
    attention_mask: Tensor,
    loss_mask: Tensor,
    position_ids: Tensor,
    hidden_states: Tensor,
    target_p_padded: Tensor,
    target_p_on_draft_padded: Tensor | None = None,
    target_token_ids_padded: Tensor | None = None,
    position_mask: Tensor,
    seq_length: int,
) -> Any:
    step = slice(idx, idx + seq_length)
    shared = target_p_padded if target_p_on_draft_padded is None else target_p_on_draft_padded
    ids = target_p_padded.argmax(dim=-1) if target_token_ids_padded is None else target_token_ids_padded
    return sys.modules[STEPS].StepState(
        input_ids=global_input_ids,
        hidden_states=hidden_states,
        position_ids=position_ids,
        attention_mask=attention_mask,
        target_p=target_p_padded[:, step],
        target_p_on_draft=shared[:, step],
        target_token_ids=ids[:, step],
        position_mask=position_mask,
        loss_mask=loss_mask,
    )


def _check(logits: Tensor, probabilities: Tensor, name: str) -> None:
    if logits.dim() != 3 or probabilities.shape != logits.shape:
        raise LogitlessError(
            f"{name} must be {list(logits.shape)}, as the draft's logits, which are [B, S, V], but is "
            f"{list(probabilities.shape)}."
        )


HOST = Host(
    name="specforge",
    package="specforge",
    versions=("0.2",),
    replacements=lambda _: [
        tiled_logsumexp_argmax,
        log_softmax_loss,
        _acceptance_rate_per_token_from_logits,
        step_view,
    ],
    options={"memory": Option("256MiB", "working memory of a call", check=parse_memory)},
)
