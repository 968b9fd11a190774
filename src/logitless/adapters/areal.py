"""AReaL: log-probs and entropies of its FSDP, Megatron and Archon engines; logits of the first two are not computed.

    FSDPEngine.forward_backward_batch                                  the head of its model is deferred
    get_forward_backward_func of the Megatron engine                   the same
    unpad_logits(logits, padding_length, cu_seqlens, old_cu_seqlens)   rows of deferred logits, which AReaL would copy
    gather_logprobs(logits, labels, temperature, tp_group)             [..., V'] logits  ->  float32 [...]
    gather_logprobs_entropy(logits, labels, temperature, tp_group)     the same, and entropies

One pass over the logits for both results; the temperature makes no copy, and AReaL's chunk of rows bounds the working
memory in backward too. With ``reuse_logits``, which ``enable_chunked_logits`` of its Megatron engine sets, backward
writes the gradient over the logits. No call is left to AReaL.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from logitless.adapters.heads import deferring
from logitless.adapters.host import Host, Option, Replacement
from logitless.adapters.replacing import Options, replaces
from logitless.adapters.schedules import in_schedule
from logitless.adapters.scoring import entropy_mode, score, taken_over
from logitless.adapters.shards import check_ids, even_shard
from logitless.operands import Logits
from logitless.spec import Head, TokenStats

MODULE = "areal.utils.functional.vocab_parallel"


@replaces(MODULE)
def gather_logprobs(
    options: Options,
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    tp_group: Any = None,
    chunk_size: int = 1024,
) -> Tensor:
    check_ids("labels", labels, tuple(logits.shape[:-1]))
    return _score("gather_logprobs", logits, labels, temperature, tp_group, chunk_size, options).logprob.float()


@replaces(MODULE, signature={"main": (), "1.0 - 2.0": ("reuse_logits",)})
def gather_logprobs_entropy(
    options: Options,
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    tp_group: Any = None,
    chunk_size: int = 1024,
    reuse_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    where, whole = "gather_logprobs_entropy", taken_over(logits) if reuse_logits else None
    check_ids("labels", labels, tuple(logits.shape[:-1]))
    shape, labels = labels.shape, labels if whole is None else labels.reshape(whole.shape[:-1])
    # AReaL's own entropy has no graph where it writes over the logits.
    entropy = entropy_mode(options["entropy_grad"] and whole is None, logits)
    shared: dict[str, Any] = {"entropy": entropy, "overwrite": whole is not None}
    given = logits if whole is None else whole
    out = _score(where, given, labels, temperature, tp_group, chunk_size, options, **shared)
    assert out.entropy is not None
    return out.logprob.float().view(shape), out.entropy.float().view(shape)


@replaces("areal.utils.data", optional=True)
def unpad_logits(
    original: Callable[..., Any], logits: Any, padding_length: int, cu_seqlens: Any = None, old_cu_seqlens: Any = None
) -> Any:
    """Rows of logits that are not computed: AReaL copies those of each sequence."""
    if not isinstance(logits, Logits) or old_cu_seqlens is None:
        return original(logits, padding_length, cu_seqlens, old_cu_seqlens)
    starts, ends = cu_seqlens.tolist(), old_cu_seqlens.tolist()
    lengths = [b - a for a, b in itertools.pairwise(ends)]
    # Sequences are in the same order, and a last one may be padding.
    rows = [torch.arange(a, a + n) for a, n in zip(starts[: len(lengths)], lengths, strict=True)]
    return logits[torch.cat(rows).to(logits.device)]


def _score(
    where: str,
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    tp_group: Any,
    chunk_size: int,
    options: Options,
    **asked: Any,
) -> TokenStats:
    width = logits.shape[-1]
    # AReaL's chunk of rows, as bytes of float32 logits.
    asked |= {"memory": 4 * chunk_size * width, "shard": even_shard(tp_group, width)}
    return score(where, logits, labels, options["audit"], head=Head(temperature=temperature), **asked)


def _heads(_: Options) -> list[Replacement]:
    signature = "(self, mb_list, process_output_fn, forward_only=False)"
    # A critic's head gives one number.
    model = deferring(lambda self, *_, **__: None if self.config.is_critic else self.model)
    engine = "areal.engine.fsdp_engine"
    return [
        Replacement(engine, "FSDPEngine.forward_backward_batch", signature, model, optional=True),
        in_schedule("areal.engine.megatron_engine", optional=True),
        unpad_logits,
    ]


HOST = Host(
    name="areal",
    package="areal",
    versions=("1.0", "2.0"),
    replacements=lambda _: [gather_logprobs, gather_logprobs_entropy],
    heads=_heads,
    logits="deferred",
    placed=True,
    options={
        "entropy_grad": Option(True, "False: no entropy bonus is trained, so entropy is a metric without a graph"),
    },
)
