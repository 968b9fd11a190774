"""verl's distillation from the teacher's K best log-probs: the forward KL over those ids, from logits.

    compute_topk_loss    strategy fsdp, veomni     logits of whole rows, Ulysses' part of the tokens     (replaced)
                         strategy megatron         vocabulary cut over the tensor-parallel group         (replaced)

verl's convention: the sum of ``q (log q - log p)`` over the K ids alone, p and q over the whole vocabulary, with
logarithms no lower than ``log_prob_min_clamp``. Neither the rest of the vocabulary nor a normaliser comes in: it may be
negative. Both strategies also report how many of the ids are among the student's own K best. Calls left to verl and
counted as passed on: more than 128 ids, and other strategies.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.adapters.host import PassOn
from logitless.adapters.replacing import Options, replaces
from logitless.adapters.scoring import score_ids
from logitless.adapters.shards import check_ids, even_shard, tensor_group
from logitless.readings.best import MOST
from logitless.spec import VocabShard


@replaces("verl.trainer.distillation.losses", optional=True)
def compute_topk_loss(
    options: Options, config: Any, distillation_config: Any, data: Any, student_logits: Tensor, data_format: str
) -> Any:
    """Log-probs are float32 whatever the logits are."""
    megatron, logits = config.strategy == "megatron", student_logits
    if not megatron and config.strategy not in ("fsdp", "veomni"):
        return PassOn(f"strategy {config.strategy}")
    log_q, ids = data["teacher_logprobs"], data["teacher_ids"]
    if ids.shape[-1] > MOST:
        return PassOn(f"more than {MOST} ids")
    log_q, ids = (_tokens_here(x, data_format, megatron) for x in (log_q, ids))
    shard = even_shard(tensor_group(), logits.shape[-1]) if megatron else None
    log_p, best = _student(logits, ids, shard, options)
    lowest = distillation_config.distillation_loss.log_prob_min_clamp
    p, q = (x if lowest is None else x.clamp_min(lowest) for x in (log_p, log_q))
    # Masses are of clamped log-probs, in float32 and without a graph, in Megatron's strategy alone.
    mass, other_mass = (x.exp().sum(-1) for x in ((p, q) if megatron else (log_p, log_q)))
    found = _forward_kl(p, q, ids, best)
    return {
        "distillation_losses": found.loss,
        "student_mass": mass.detach().float() if megatron else mass.to(logits.dtype),
        "teacher_mass": other_mass.float() if megatron else other_mass,
        "overlap_count": found.overlap,
        "overlap_token_advantage": found.advantage.detach() if megatron else found.advantage,
    }


def _tokens_here(x: Any, data_format: str, megatron: bool) -> Tensor:
    """``[B, T, K]`` of this rank's tokens, from a nested tensor of whole sequences, as verl cuts them."""
    if megatron:
        util = importlib.import_module("verl.models.mcore.util")
        cut = util.preprocess_thd_engine if data_format == "thd" else util.preprocess_bshd_engine
        return cut(x, pre_process=True)[0]
    ulysses, x = importlib.import_module("verl.utils.ulysses"), x.values().unsqueeze(0)
    return ulysses.slice_input_tensor(x, dim=1) if ulysses.get_ulysses_sequence_parallel_world_size() > 1 else x


class _Found(NamedTuple):
    """Per token: the divergence, how many ids the student would have named too, and minus the mean term of those."""

    loss: Tensor
    overlap: Tensor
    advantage: Tensor


def _student(logits: Tensor, ids: Tensor, shard: VocabShard | None, options: Options) -> tuple[Tensor, Tensor]:
    """``[B, T, K]`` log-probs of the teacher's ids, and the student's own best ids."""
    check_ids("the teacher's ids", ids, (*logits.shape[:-1], ids.shape[-1]))
    out = score_ids("compute_topk_loss", logits, ids, options["audit"], shard=shard, top_k=ids.shape[-1])
    assert out.ids_logprobs is not None
    assert out.top_k_ids is not None
    return out.ids_logprobs, out.top_k_ids


def _forward_kl(log_p: Tensor, log_q: Tensor, ids: Tensor, best: Tensor) -> _Found:
    log_p, log_q = log_p.float(), log_q.float()
    terms = log_q.exp() * (log_q - log_p)
    shared = (ids.unsqueeze(-1) == best.unsqueeze(-2)).any(-1)
    count = shared.sum(-1)
    advantage = -torch.where(shared, terms, 0.0).sum(-1) / count.clamp_min(1)
    return _Found(terms.sum(-1), count, advantage)
