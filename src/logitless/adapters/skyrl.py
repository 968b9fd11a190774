"""SkyRL: log-probs and entropies of its Megatron and FSDP workers, from logits and from hidden states.

    {logits, hidden} x {padded, packed}    score the rows of the batch, put the results into [B, S-1]     (replaced)
    FSDP                                   logprobs_from_logits, chunked_entropy_from_logits              (replaced)
    replay of a sampler's support          sample_support_scores, from 0.4 on                             (replaced)

Only rows with a result are computed: none for the last token of a sequence, none for padding, and for the mean entropy
none with loss mask 0. In Megatron's workers log-probs of prompts are left out too: they read those of the last
``num_actions`` tokens alone. SkyRL's conventions are followed:

* An id outside the vocabulary has log-prob 0 and pulls on the logits with -p g.
* The gradient of hidden states is this rank's part; the sequence-parallel gather's backward adds the parts up.
* Over the context-parallel group the padded form's backward sums gradients, and the packed form's does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.adapters.host import Host, Option, Replacement
from logitless.adapters.packs import Batch, packed_batch, padded_batch
from logitless.adapters.replacing import Options, replaces
from logitless.adapters.schedules import in_schedule
from logitless.adapters.scoring import entropy_mode, entropy_of_logits
from logitless.adapters.shards import even_shard, tensor_group
from logitless.adapters.skyrl_draft import draft_soft_ce
from logitless.adapters.skyrl_fsdp import FSDP_HEAD, fsdp_replacements
from logitless.adapters.skyrl_rows import (
    MEGATRON_WRAPPER,
    MODEL_UTILS,
    Source,
    both_passes,
    check_batch,
    check_pack,
    check_packed_tokens,
    from_hidden,
    logprob_of_every,
    logprobs_of_batch,
    read_results,
    vocabulary_between,
    weigh_read,
    with_actions,
)
from logitless.adapters.skyrl_support import sample_support_scores, vocab_parallel_entropy_weighted_sum
from logitless.errors import LogitlessError
from logitless.operands import Logits
from logitless.operands.logits import like
from logitless.spec import Head, VocabShard, parse_memory

_of_megatron = functools.partial(replaces, MODEL_UTILS, also_in=(MEGATRON_WRAPPER,), optional=True)


# Log-probs.


@_of_megatron()
def from_parallel_logits_to_logprobs(
    options: Options,
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
) -> Tensor:
    check_batch("vocab_parallel_logits", vocab_parallel_logits, target)
    source = Source("from_parallel_logits_to_logprobs", vocab_parallel_logits, options)
    return _padded(source, target, (tp_group, vocab_start_index, vocab_end_index), cp_group, inference_only)


@_of_megatron()
def from_parallel_logits_to_logprobs_packed_sequences(
    options: Options,
    vocab_parallel_logits: Tensor,
    target: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    vocab_start_index: int,
    vocab_end_index: int,
    group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
    attention_mask: Tensor | None = None,
    sub_seq_lengths: list[list[int]] | None = None,
) -> Tensor:
    where, logits = "from_parallel_logits_to_logprobs_packed_sequences", vocab_parallel_logits
    check_pack("vocab_parallel_logits", logits, target, cp_group)
    layout = (logits.shape[1], unpacked_seqlen, cp_group, logits.device, attention_mask, sub_seq_lengths)
    batch = packed_batch(target, cu_seqlens_padded, *layout, weigh_read(logits.device))
    vocabulary = vocabulary_between(group, vocab_start_index, vocab_end_index, logits.shape[-1])
    return logprobs_of_batch(Source(where, logits, options), batch, vocabulary, "slice", inference_only)


@_of_megatron()
def from_parallel_hidden_to_logprobs(
    options: Options,
    hidden: Tensor,
    lm_head_weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
    temperature: float = 1.0,
    fused_backend: str = "torch",
) -> Tensor:
    check_batch("hidden", hidden, target)
    logits = from_hidden(hidden, lm_head_weight, options)
    source = Source("from_parallel_hidden_to_logprobs", logits, options, temperature)
    return _padded(source, target, (tp_group, vocab_start_index, vocab_end_index), cp_group, inference_only)


@_of_megatron()
def from_parallel_hidden_to_logprobs_packed_sequences(
    options: Options,
    hidden: Tensor,
    lm_head_weight: Tensor,
    target: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    vocab_start_index: int,
    vocab_end_index: int,
    group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
    attention_mask: Tensor | None = None,
    sub_seq_lengths: list[list[int]] | None = None,
    temperature: float = 1.0,
    fused_backend: str = "torch",
) -> Tensor:
    check_pack("hidden", hidden, target, cp_group)
    layout = (hidden.shape[1], unpacked_seqlen, cp_group, hidden.device, attention_mask, sub_seq_lengths)
    batch = packed_batch(target, cu_seqlens_padded, *layout, weigh_read(hidden.device))
    vocabulary = vocabulary_between(group, vocab_start_index, vocab_end_index, lm_head_weight.shape[0])
    where, logits = "from_parallel_hidden_to_logprobs_packed_sequences", from_hidden(hidden, lm_head_weight, options)
    return logprobs_of_batch(Source(where, logits, options, temperature), batch, vocabulary, "slice", inference_only)


def _padded(
    source: Source, target: Tensor, bounds: tuple[Any, int, int], cp_group: Any, inference_only: bool
) -> Tensor:
    """``[B, S - 1]`` of padded lines; ``bounds`` are the vocabulary's group, and this rank's columns."""
    logits = source.logits
    batch = padded_batch(target, logits.shape[1], cp_group, logits.device, read_results())
    vocabulary = vocabulary_between(*bounds, logits.shape[-1])
    return logprobs_of_batch(source, batch, vocabulary, "sum", inference_only)


# The autograd classes behind these functions, for code that calls them directly: targets are shifted already.

_of_class = functools.partial(replaces, MODEL_UTILS, optional=True)


@_of_class("DistributedLogprob.apply")
def distributed_logprob(
    options: Options,
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    group: Any,
    inference_only: bool = False,
) -> Tensor:
    """``[B, S]`` log-probs."""
    source = Source("DistributedLogprob", vocab_parallel_logits, options)
    return _every(source, target, (group, vocab_start_index, vocab_end_index), inference_only)


@_of_class("ChunkedDistributedLogprob.apply")
def chunked_distributed_logprob(
    options: Options,
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int,
    tp_group: Any,
    inference_only: bool = False,
) -> Tensor:
    source = Source("DistributedLogprob", vocab_parallel_logits, options)
    return _every(source, target, (tp_group, vocab_start_index, vocab_end_index), inference_only)


@_of_class("FusedLinearChunkedDistributedLogprob.apply")
def fused_linear_chunked_distributed_logprob(
    options: Options,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int,
    tp_group: Any,
    inference_only: bool = False,
) -> Tensor:
    source = Source("FusedLinearChunkedDistributedLogprob", from_hidden(hidden, weight, options), options)
    return _every(source, target, (tp_group, vocab_start_index, vocab_end_index), inference_only)


def _every(source: Source, target: Tensor, bounds: tuple[Any, int, int], inference_only: bool) -> Tensor:
    """Log-probs in the shape of the targets; ``bounds`` as for :func:`_padded`."""
    return logprob_of_every(source, target, vocabulary_between(*bounds, source.logits.shape[-1]), inference_only)


# Entropy.


@_of_megatron(signature={"0.4": (), "0.3": ("chunk_size", "chunk_memory_mb")})
def vocab_parallel_entropy(
    options: Options, vocab_parallel_logits: Tensor, chunk_size: int | None = None, chunk_memory_mb: int = 512
) -> Tensor:
    """Backward does not overwrite the logits."""
    logits, shard = vocab_parallel_logits, even_shard(tensor_group(), vocab_parallel_logits.shape[-1])
    return entropy_of_logits("vocab_parallel_entropy", logits, options["audit"], shard=shard).to(logits.dtype)


@_of_megatron(signature={"0.4": (), "0.3": ("chunk_size", "chunk_memory_mb")})
def vocab_parallel_entropy_packed_sequences(
    options: Options,
    vocab_parallel_logits: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    num_actions: int,
    attention_mask: Tensor,
    loss_mask: Tensor | None,
    cp_group: Any,
    sub_seq_lengths: list[list[int]] | None = None,
    chunk_size: int | None = None,
    chunk_memory_mb: int = 512,
) -> tuple[Tensor, Tensor]:
    """The mean as a metric, and this rank's part of it."""
    where, logits = "vocab_parallel_entropy_packed_sequences", vocab_parallel_logits
    check_packed_tokens("vocab_parallel_logits", logits)
    layout = (logits.shape[1], unpacked_seqlen, cp_group, logits.device, attention_mask, sub_seq_lengths)
    weigh = functools.partial(_action_weights, num_actions, loss_mask, logits.device)
    batch = packed_batch(None, cu_seqlens_padded, *layout, weigh)
    return _mean_entropy(Source(where, logits, options), batch, even_shard(tensor_group(), logits.shape[-1]))


@_of_megatron()
def _fused_vocab_parallel_entropy_from_hidden(
    options: Options,
    hidden: Tensor,
    lm_head_weight: Tensor,
    tp_group: Any,
    chunk_size: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Has a gradient, unlike SkyRL's."""
    where, logits = "_fused_vocab_parallel_entropy_from_hidden", from_hidden(hidden, lm_head_weight, options)
    shard = even_shard(tp_group, lm_head_weight.shape[0])
    asked: dict[str, Any] = {"shard": shard, "head": Head(temperature=temperature), "memory": options["memory"]}
    return entropy_of_logits(where, logits, options["audit"], **asked).float()


@_of_megatron()
def from_parallel_hidden_to_entropy_packed_sequences(
    options: Options,
    hidden: Tensor,
    lm_head_weight: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    num_actions: int,
    attention_mask: Tensor,
    loss_mask: Tensor | None,
    cp_group: Any,
    tp_group: Any,
    sub_seq_lengths: list[list[int]] | None = None,
    chunk_size: int | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Has a gradient, unlike SkyRL's."""
    check_packed_tokens("hidden", hidden)
    layout = (hidden.shape[1], unpacked_seqlen, cp_group, hidden.device, attention_mask, sub_seq_lengths)
    weigh = functools.partial(_action_weights, num_actions, loss_mask, hidden.device)
    batch = packed_batch(None, cu_seqlens_padded, *layout, weigh)
    where, logits = "from_parallel_hidden_to_entropy_packed_sequences", from_hidden(hidden, lm_head_weight, options)
    shard = even_shard(tp_group, lm_head_weight.shape[0])
    return _mean_entropy(Source(where, logits, options, temperature), batch, shard)


def _action_weights(num_actions: int, loss_mask: Tensor | None, device: torch.device, shape: tuple[int, int]) -> Tensor:
    """``[B, S - 1]`` weight of every result: the loss mask at the last ``num_actions`` of a line, zeros before."""
    lines, length = shape
    if not 1 <= num_actions <= length:
        raise LogitlessError(f"num_actions must be between 1 and {length} but is {num_actions}.")
    if loss_mask is not None and tuple(loss_mask.shape) != (lines, num_actions):
        raise LogitlessError(f"loss_mask must be {[lines, num_actions]} but is {list(loss_mask.shape)}.")
    weights = torch.zeros(shape, device=device)
    weights[:, -num_actions:] = 1.0 if loss_mask is None else loss_mask.detach().to(weights)
    return weights


def _mean_entropy(source: Source, batch: Batch, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """Weighted mean over all ranks, without a graph; and this rank's part of that mean, with one."""
    out = source.score(batch.rows, shard, entropy_mode(True, source.logits))
    assert out.entropy is not None
    assert batch.weights is not None
    part = (out.entropy.float() * batch.weights).sum()
    totals = torch.stack([part.detach(), batch.weights.sum()])
    if batch.group is not None:
        dist.all_reduce(totals, group=batch.group)
    count = totals[1].clamp(min=1.0)
    return totals[0] / count, part / count


def _replacements(options: Options) -> list[Replacement]:
    return [
        from_parallel_logits_to_logprobs,
        from_parallel_logits_to_logprobs_packed_sequences,
        from_parallel_hidden_to_logprobs,
        from_parallel_hidden_to_logprobs_packed_sequences,
        vocab_parallel_entropy,
        vocab_parallel_entropy_packed_sequences,
        _fused_vocab_parallel_entropy_from_hidden,
        from_parallel_hidden_to_entropy_packed_sequences,
        distributed_logprob,
        chunked_distributed_logprob,
        fused_linear_chunked_distributed_logprob,
        draft_soft_ce,
        sample_support_scores,
        vocab_parallel_entropy_weighted_sum,
        *((with_actions, both_passes) if options["rows_before_head"] else ()),
        *fsdp_replacements(options),
    ]


# Logits that are not computed.


@replaces("skyrl.backends.skyrl_train.distributed.megatron.megatron_utils", optional=True)
def recover_left_padding(
    original: Callable[..., Any],
    result: Tensor,
    attention_mask: Tensor,
    original_attention_mask: Tensor,
    origin_seqlen: int,
    post_process: bool = True,
) -> Any:
    """SkyRL's writes rows into zeros: of deferred logits, their hidden states."""
    places = (attention_mask, original_attention_mask, origin_seqlen, post_process)
    if not isinstance(result, Logits):
        return original(result, *places)
    return like(result, original(result.hidden, *places))


HOST = Host(
    name="skyrl",
    package="skyrl",
    versions=("0.3", "0.4"),
    replacements=_replacements,
    heads=lambda _: [FSDP_HEAD, in_schedule(MEGATRON_WRAPPER, optional=True), recover_left_padding],
    logits="deferred",
    options={
        "accurate": Option(False, "float32 logits of half-precision hidden states instead of SkyRL's rounding"),
        "inplace_backward": Option(
            False, "True: FSDP's backward may write the gradient over the logits; for runs without an entropy bonus"
        ),
        "memory": Option("256MiB", "working memory of the functions that take hidden states", check=parse_memory),
        "rows_before_head": Option(True, "False: workers score prompts too, whose results they cut away"),
    },
)
