"""NeMo-RL's distillation: the student's log-probs of the K ids that its teacher sent, and its negative entropy; and the
cross entropy of a draft head against the policy's own distribution.

    get_distillation_topk_logprobs_from_logits    [B, S, V'] logits, [B, S, K] ids  ->  float32 [B, S - 1, K]
        zero_outside_topk=True                    over the vocabulary, and sum of p log p
        zero_outside_topk=False                   normalised over the K ids
    ChunkedDistributedGatherLogprob.apply         the class behind the first, for direct calls
    DistributedCrossEntropy.apply                 -sum of q log p of a draft, q the detached policy's

``DistillationLossFn`` itself reads K numbers of each token, and stays NeMo-RL's. Calls left to NeMo-RL and counted as
passed on: DTensor logits, and context parallelism; those reach the classes, which are replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless.adapters.host import PassOn
from logitless.adapters.nemo_rl_heads import LOSS_UTILS, MODEL_UTILS
from logitless.adapters.packs import ranks_in
from logitless.adapters.replacing import Options, replaces
from logitless.adapters.scoring import entropy_mode, score_ids, soft_cross_entropy, without_graph
from logitless.adapters.shards import check_ids, even_shard, shard_between
from logitless.collectives import sum_over
from logitless.errors import LogitlessError
from logitless.operands import Logits
from logitless.spec import IGNORE, VocabShard


@replaces(MODEL_UTILS, also_in=(LOSS_UTILS,))
def get_distillation_topk_logprobs_from_logits(
    options: Options,
    student_logits: Tensor,
    teacher_topk_logits: Tensor,
    teacher_topk_indices: Tensor,
    zero_outside_topk: bool,
    calculate_entropy: bool,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: Any = None,
    context_parallel_group: Any = None,
) -> Any:
    if vocab_parallel_group is None and hasattr(student_logits, "device_mesh"):
        return PassOn("DTensor")
    if ranks_in(context_parallel_group) > 1:
        return PassOn("context parallelism")
    if not teacher_topk_indices.shape[-1] or teacher_topk_indices.shape[:-1] != student_logits.shape[:-1]:
        return PassOn("ids of another shape")
    shard = part_of(vocab_parallel_group, vocab_parallel_rank, student_logits.shape[-1])
    ids, negative_entropy = teacher_topk_indices.to(student_logits.device), None
    if zero_outside_topk:
        own, negative_entropy = _over_vocabulary(student_logits, ids, shard, calculate_entropy, options)
    else:
        own = _over_ids(student_logits, ids, shard, options)
    other = teacher_topk_logits.to(own.device, own.dtype).log_softmax(-1)
    return own[:, :-1], other[:, :-1], None if negative_entropy is None else negative_entropy[:, :-1]


@replaces(MODEL_UTILS, "ChunkedDistributedGatherLogprob.apply")
def chunked_distributed_gather_logprob(
    options: Options,
    vocab_parallel_logits: Tensor,
    global_indices: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int,
    tp_group: Any,
    inference_only: bool = False,
) -> Tensor:
    """``[B, S, K]`` log-probs over the vocabulary."""
    logits = vocab_parallel_logits
    check_ids("global_indices", global_indices, (*logits.shape[:-1], global_indices.shape[-1]))
    shard = shard_between(tp_group, vocab_start_index, vocab_end_index)
    with without_graph(inference_only):
        found = score_ids("ids", logits, global_indices, options["audit"], shard=shard).ids_logprobs
    assert found is not None
    return found.float()


@replaces(MODEL_UTILS, "DistributedCrossEntropy.apply")
def distributed_cross_entropy(
    options: Options, student_logits: Tensor, target_logits: Tensor, group: Any, inference_only: bool = False
) -> Tensor:
    """NeMo-RL's holds the probabilities of both in float32."""
    if student_logits.shape != target_logits.shape:
        raise LogitlessError(
            f"student_logits and target_logits must have the same shape but are {list(student_logits.shape)} and "
            f"{list(target_logits.shape)}."
        )
    shard = even_shard(group, student_logits.shape[-1])
    target = torch.zeros(student_logits.shape[:-1], dtype=torch.int64, device=student_logits.device)
    with without_graph(inference_only):
        each = soft_cross_entropy("draft", student_logits, target_logits, target, options["audit"], shard)
    return each.float()


def part_of(group: Any, rank: int | None, columns: int) -> VocabShard | None:
    """The shard that NeMo-RL says is here; without a group the logits are whole."""
    if group is None:
        return None
    if rank is None:
        raise LogitlessError("vocab_parallel_rank must be given with vocab_parallel_group but is None.")
    return even_shard(group, columns, rank)


def _over_vocabulary(
    logits: Tensor, ids: Tensor, shard: VocabShard | None, with_entropy: bool, options: Options
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the ids and, if wanted, sum of p log p. The last token of a line is left out."""
    target = ids[..., 0].clone()
    target[:, -1] = IGNORE
    entropy = entropy_mode(True, logits) if with_entropy else None
    out = score_ids("distillation", logits, ids, options["audit"], target=target, shard=shard, entropy=entropy)
    assert out.ids_logprobs is not None
    return out.ids_logprobs.float(), None if out.entropy is None else -out.entropy.float()


def _over_ids(logits: Tensor, ids: Tensor, shard: VocabShard | None, options: Options) -> Tensor:
    """Log-probs normalised over the ids."""
    if isinstance(logits, Logits):
        # Of logits that are not computed there are log-probs of the ids, which differ from them by a number per row.
        return _over_vocabulary(logits, ids, shard, False, options)[0].log_softmax(-1)
    return _logits_at(logits, ids, shard).log_softmax(-1)


def _logits_at(logits: Tensor, ids: Tensor, shard: VocabShard | None) -> Tensor:
    """``[B, S, K]`` float32 logits of the ids; nothing of the size of the logits but their gradient."""
    start, columns = 0 if shard is None else shard.start, logits.shape[-1]
    here = (ids >= start) & (ids < start + columns)
    own = torch.where(here, logits.gather(-1, (ids - start).clamp(0, columns - 1)).float(), 0.0)
    if shard is None:
        return own
    # One rank has each id. The others' part has no graph here: the ranks compute the same loss.
    return own + (sum_over(shard.group, own.detach().clone()) - own).detach()
