"""DeepSpeed: the cross entropy of its tensor-parallel language models, whose head keeps each rank's columns.

    vocab_parallel_cross_entropy(logits [..., V / ranks], target [...])     float32 [...], or its sum or mean

It is the loss that ``vocab_parallel_lm_head`` gives a model, with either ``vocab_parallel_ce_backend``. DeepSpeed holds
the exponentials of all logits in float32 between forward and backward, and asks the device in every call whether a
target is outside the vocabulary. Here the logits are read once in their own dtype and nothing but their gradient is
made. Shards may have any sizes. Where DeepSpeed has compared their bounds, nobody compares them again; where it has
not, its own function does.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.adapters.host import Host, PassOn
from logitless.adapters.replacing import Options, replaces
from logitless.adapters.scoring import score
from logitless.adapters.shards import known_shard
from logitless.spec import IGNORE

MODULE = "deepspeed.sequence.cross_entropy"


@replaces(MODULE)
def vocab_parallel_cross_entropy(
    options: Options,
    vocab_parallel_logits: Tensor,
    target: Tensor,
    tp_group: Any = None,
    sp_group: Any = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = IGNORE,
    reduction: str = "mean",
    gather_sequence_loss: bool = False,
    backend: str = "torch",
) -> Any:
    bounds: Any = (vocab_start_index, vocab_end_index, global_vocab_size)
    gathered = gather_sequence_loss and (reduction != "none" or sp_group is None)
    shapes = vocab_parallel_logits.shape[:-1] == target.shape
    named = reduction in ("none", "sum", "mean") and backend in ("torch", "liger")
    if gathered or not shapes or not named or not _told(bounds):
        return PassOn("a call that DeepSpeed refuses")
    host, columns = sys.modules[MODULE], vocab_parallel_logits.shape[-1]
    if global_vocab_size is None:
        device = vocab_parallel_logits.device
        bounds = host._resolve_vocab_metadata(columns, *bounds[:2], tp_group, device)
    shard = known_shard(tp_group, *bounds)
    wanted = target if ignore_index == IGNORE else _renamed(target, ignore_index)
    out = score("vocab_parallel_cross_entropy", vocab_parallel_logits, wanted, options["audit"], shard=shard)
    loss = -out.logprob.float()
    if reduction == "none":
        return host._GatherSequenceLoss.apply(loss, sp_group, True) if gather_sequence_loss else loss
    total = host._global_sp_sum(loss.sum(), sp_group)
    return total if reduction == "sum" else total / _counted(wanted, sp_group).to(total.dtype).clamp_min(1)


def _told(bounds: tuple[int | None, int | None, int | None]) -> bool:
    """Whether the bounds are given together, and with the size of the vocabulary, if at all."""
    start, stop, size = bounds
    return (start is None) == (stop is None) and (size is None or start is not None)


def _renamed(target: Tensor, ignored: int) -> Tensor:
    """The targets with -100 for the id that is to be ignored; an id of -100 stays one that is outside."""
    return torch.where(target == ignored, IGNORE, target.masked_fill(target == IGNORE, -1))


def _counted(target: Tensor, group: Any) -> Tensor:
    """Targets that count, over all sequence-parallel ranks."""
    count = (target != IGNORE).sum()
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(count, group=group)
    return count


HOST = Host(
    name="deepspeed",
    package="deepspeed",
    versions=("0.19",),
    replacements=lambda _: [vocab_parallel_cross_entropy],
)
