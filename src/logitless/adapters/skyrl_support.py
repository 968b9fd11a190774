"""SkyRL's replay of a sampler's support, from 0.4 on: log-probs and entropies over the ids that the sampler kept.

    sample_support_scores                    from logits, or from hidden states and the head's weight       (replaced)
    vocab_parallel_entropy_weighted_sum      entropies of the rows whose weight is not 0                    (replaced)

From hidden states there is a dot product with each id of a support and no logits. A row without a support has log-prob
and entropy 0, as SkyRL's. Calls that SkyRL refuses are left to it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from logitless.adapters.host import PassOn
from logitless.adapters.replacing import Options, replaces
from logitless.adapters.scoring import entropy_mode, entropy_of_logits
from logitless.adapters.shards import even_shard, shard_between, tensor_group
from logitless.adapters.skyrl_rows import MODEL_UTILS, from_hidden
from logitless.operands import Kept
from logitless.score import logprobs
from logitless.seams import placed
from logitless.spec import Head

MODULE = "skyrl.backends.skyrl_train.utils.sample_support_replay"
SINCE = {"0.4": (), "0.3": None}


@replaces(MODULE, signature=SINCE, optional=True)
def sample_support_scores(
    options: Options,
    logits_or_hidden: Tensor,
    sampled_ids: Tensor,
    support_ids: Tensor,
    *,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    compute_entropy: bool = False,
    entropy_requires_grad: bool = False,
    lm_head_weight: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> Any:
    source, lead = logits_or_hidden, sampled_ids.shape
    columns = source.shape[-1] if lm_head_weight is None else lm_head_weight.shape[0]
    same = source.shape[:-1] == lead == support_ids.shape[:-1] and columns == vocab_end_index - vocab_start_index
    if not same or support_ids.dtype != torch.int32 or temperature <= 0 or entropy_requires_grad > compute_entropy:
        return PassOn("a call that SkyRL refuses")
    flat, sampled = source.reshape(-1, source.shape[-1]), sampled_ids.reshape(-1).long()
    shard = shard_between(tp_group, vocab_start_index, vocab_end_index)
    # SkyRL's callers divide logits by the temperature themselves.
    logits = flat if lm_head_weight is None else from_hidden(flat, lm_head_weight, options)
    head = Head(temperature=1.0 if lm_head_weight is None else temperature)
    entropy = entropy_mode(entropy_requires_grad, flat, lm_head_weight) if compute_entropy else None
    kept, valid = _kept(support_ids.reshape(-1, support_ids.shape[-1]).long(), sampled)
    out = logprobs(placed(logits, shard), sampled, kept=kept, entropy=entropy, head=head)
    return sys.modules[MODULE].SampleSupportScores(
        logprobs=out.logprob.view(lead),
        entropy=None if out.entropy is None else out.entropy.view(lead),
        valid_mask=valid.view(lead),
    )


def _kept(support: Tensor, sampled: Tensor) -> tuple[Kept, Tensor]:
    """The support of each row, and whether it has one. The sampled id stands for padding: an id twice counts once."""
    real = support >= 0
    ids = torch.where(real, support, sampled[:, None])
    lengths = torch.full_like(sampled, support.shape[1])
    return Kept(ids.reshape(-1), lengths, "support"), real.any(1)


@replaces(MODEL_UTILS, signature=SINCE, optional=True)
def vocab_parallel_entropy_weighted_sum(
    options: Options,
    vocab_parallel_logits: Tensor,
    weights: Tensor,
    chunk_size: int | None = None,
    chunk_memory_mb: int = 512,
) -> Tensor:
    """Rows of weight 0 are not read."""
    where = "vocab_parallel_entropy_weighted_sum"
    logits, shard = vocab_parallel_logits, even_shard(tensor_group(), vocab_parallel_logits.shape[-1])
    nothing = (weights == 0).expand(logits.shape[:-1])
    entropy = entropy_of_logits(where, logits, options["audit"], shard=shard, leave_out=nothing)
    return (entropy.to(logits.dtype) * weights).sum()
