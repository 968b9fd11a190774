"""SkyRL's draft heads: cross-entropy of a multi-token-prediction head against the policy's own distribution.

    draft_soft_ce    -sum of q log p, q the detached policy's probability     KL(q, p) + entropy of q     (replaced)

SkyRL holds the probabilities of both until backward, or makes them again in chunks; here nothing of the size of the
logits is held but their gradient. ``draft_soft_ce_topk`` has no such work, and stays SkyRL's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless.adapters.replacing import Options, replaces
from logitless.adapters.scoring import soft_cross_entropy
from logitless.adapters.shards import check_ids, packed_shard
from logitless.adapters.skyrl_rows import MEGATRON_WRAPPER
from logitless.errors import LogitlessError
from logitless.spec import IGNORE


@replaces("skyrl.backends.skyrl_train.mtp.soft_ce", also_in=(MEGATRON_WRAPPER,), optional=True)
def draft_soft_ce(
    options: Options,
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    global_normalization_factor: Tensor | None = None,
    vocab_parallel_group: Any = None,
    chunk_size: int | None = None,
) -> Tensor:
    """The masked mean, of rows whose mask is not 0."""
    if teacher_logits.requires_grad:
        raise LogitlessError("teacher_logits must be detached: the draft head's loss is not the policy's.")
    target = torch.where(mask == 0, IGNORE, 0)
    check_ids("mask", target, student_logits.shape[:-1])
    # SkyRL has cut the padding off the last ranks' parts.
    shard = packed_shard(vocab_parallel_group, student_logits.shape[-1])
    each = soft_cross_entropy("draft_soft_ce", student_logits, teacher_logits, target, options["audit"], shard)
    total = (each * mask).sum()
    count = mask.sum() if global_normalization_factor is None else global_normalization_factor
    return total / count.clamp(min=1.0)
