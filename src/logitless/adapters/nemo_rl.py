"""NeMo-RL: next-token log-probs of its Megatron and DTensor policies, and its negative entropy.

    from_parallel_logits_to_logprobs, ..._packed_sequences      [B, S / CP, V'] logits  ->  float32 [B, S - 1]
    get_next_token_logprobs_from_logits                         the same values, also without process groups
    dtensor_from_parallel_logits_to_logprobs                    the order of torch's context parallelism (seq_index)
    from_parallel_hidden_states_to_logprobs                     [S / TP, B, H] hidden states, without logits
    DistributedLogprob.apply, ChunkedDistributedLogprob.apply   the classes behind these, for direct calls
    ChunkedDistributedEntropy.apply                             sum of p log p: minus the entropy
    apply_temperature_scaling                                   leaves log-probs unchanged

NeMo-RL's filter makes the support of top-k and top-p, for 256 rows at a time; a target outside it has log-prob -inf.
NeMo-RL divides the log-probs of its fused head by the temperature. This adapter divides the logits instead, by
``fused_temperature``, and refuses a run with another temperature. Calls left to NeMo-RL and counted as passed on: the
scaling of logits, and DTensor logits on their way to ``dtensor_from_parallel_logits_to_logprobs``. Distillation from K
logits of a teacher is in nemo_rl_distillation.py.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.adapters.host import Host, Option, PassOn
from logitless.adapters.nemo_rl_distillation import (
    chunked_distributed_gather_logprob,
    distributed_cross_entropy,
    get_distillation_topk_logprobs_from_logits,
    part_of,
)
from logitless.adapters.nemo_rl_heads import LOSS_UTILS, MODEL_UTILS, TRAIN, filters, heads, model_forward
from logitless.adapters.packs import packed_batch, padded_batch, ranks_in, with_target
from logitless.adapters.replacing import Options, replaces
from logitless.adapters.scoring import HALF, computed, entropy_of_logits, every_target, without_graph
from logitless.adapters.shards import check_ids, even_shard, shard_between, vocabulary_of
from logitless.collectives import gather_over
from logitless.errors import LogitlessError
from logitless.operands import Kept, Logits, shard_of
from logitless.rows import Rows
from logitless.score import logprobs
from logitless.seams import placed, without_outside
from logitless.spec import Head, TokenStats, VocabShard, parse_memory

FILTERED_ROWS = 256
"""Rows that are sorted at a time under top-k or top-p, as NeMo-RL does."""


# From logits.


@replaces(MODEL_UTILS, also_in=(TRAIN,))
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
    sampling_params: Any = None,
) -> Tensor:
    shard = shard_between(tp_group, vocab_start_index, vocab_end_index)
    source = Source(vocab_parallel_logits, shard, options, chunk_size, sampling_params, inference_only)
    return _lines(source, target, cp_group)


@replaces(MODEL_UTILS, also_in=(LOSS_UTILS, TRAIN))
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
    sampling_params: Any = None,
    target_is_pre_rolled: bool = False,
) -> Tensor:
    """One collective for all sequences."""
    logits, shard = vocab_parallel_logits, shard_between(group, vocab_start_index, vocab_end_index)
    if logits.dim() != 3 or logits.shape[0] != 1:
        raise LogitlessError(f"vocab_parallel_logits must be [1, T / CP, V'] but is {list(logits.shape)}.")
    check_ids("target", target, (1, logits.shape[1] * (1 if target_is_pre_rolled else ranks_in(cp_group))))
    ids = None if target_is_pre_rolled else target
    batch = packed_batch(ids, cu_seqlens_padded, logits.shape[1], unpacked_seqlen, cp_group, logits.device)
    rows = with_target(batch.rows, batch.rows.take(target[0]).long()) if target_is_pre_rolled else batch.rows
    source = Source(logits, shard, options, chunk_size, sampling_params, inference_only)
    return batch.spread(source.score("packed", rows), grad="sum")


@replaces(MODEL_UTILS, signature={"0.7": (), "0.6": ("chunk_size",)}, also_in=(LOSS_UTILS,))
def get_next_token_logprobs_from_logits(
    options: Options,
    input_ids: Tensor,
    next_token_logits: Tensor,
    seq_index: Tensor | None = None,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: Any = None,
    context_parallel_group: Any = None,
    sampling_params: Any = None,
    chunk_size: int | None = None,
) -> Any:
    if vocab_parallel_group is None and hasattr(next_token_logits, "device_mesh"):
        return PassOn("DTensor")
    shard = part_of(vocab_parallel_group, vocab_parallel_rank, next_token_logits.shape[-1])
    cp_group = None if vocab_parallel_group is None else context_parallel_group
    return _lines(Source(next_token_logits, shard, options, chunk_size, sampling_params), input_ids, cp_group)


@replaces(MODEL_UTILS)
def dtensor_from_parallel_logits_to_logprobs(
    options: Options,
    vocab_parallel_logits: Tensor,
    target: Any,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    seq_index: Tensor | None = None,
    chunk_size: int | None = None,
    sampling_params: Any = None,
) -> Tensor:
    """Local logits, targets as a DTensor."""
    shard = shard_between(tp_group, vocab_start_index, vocab_end_index)
    source = Source(vocab_parallel_logits, shard, options, chunk_size, sampling_params, inference_only)
    if _cp_size(target) > 1:
        return _in_torch_order(source, target, seq_index)
    return _lines(source, target.full_tensor() if hasattr(target, "full_tensor") else target, None)


def _lines(source: Source, target: Tensor, cp_group: Any) -> Tensor:
    """``[B, S - 1]`` from ``[B, S / CP, V']`` logits, zigzag over the context-parallel ranks, and ``[B, S]`` ids."""
    logits = source.logits
    if logits.dim() != 3 or target.dim() != 2 or target.shape[0] != logits.shape[0]:
        raise LogitlessError(
            f"logits must be [B, S / CP, V'] and ids [B, S] but they are {list(logits.shape)} and {list(target.shape)}."
        )
    check_ids("ids", target, tuple(target.shape))
    batch = padded_batch(target, logits.shape[1], cp_group, logits.device)
    return batch.spread(source.score("lines", batch.rows), grad="sum")


def _in_torch_order(source: Source, target: Any, seq_index: Tensor | None) -> Tensor:
    """``[B, S - 1]`` from tokens in the order of torch's context parallelism: ``seq_index`` has the place of each."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if seq_index is None:
        raise LogitlessError("seq_index must say how the sequence is split over context-parallel ranks but is None.")
    order = seq_index.argsort()
    shifted = target.full_tensor()[:, order].roll(-1, dims=-1)[:, seq_index]
    ids = distribute_tensor(shifted, target.device_mesh, target.placements).to_local()
    check_ids("the local part of target", ids, tuple(source.logits.shape[:-1]))
    values = source.score("torch order", Rows.every(ids))
    whole = DTensor.from_local(values.view(ids.shape), target.device_mesh, target.placements).full_tensor()
    return whole[:, order][:, :-1]


class Source(NamedTuple):
    """The logits of a call here, and what its arguments say of them."""

    logits: Tensor
    shard: VocabShard | None
    options: Options
    chunk_size: int | None = None
    sampling: Any = None
    inference_only: bool = False

    def score(self, where: str, rows: Rows) -> Tensor:
        """``[R]`` float32 log-probs of the rows; -inf where the target is outside the support."""
        logits, audit, operand = self.logits, self.options["audit"], placed(self.logits, self.shard)
        # NeMo-RL's chunk of rows, as bytes of float32 logits.
        memory = 4 * self.chunk_size * logits.shape[-1] if self.chunk_size else None
        shard = shard_of(operand)

        def score(ids: Tensor) -> TokenStats:
            known = with_target(rows, ids)
            if not filters(self.sampling):
                out = logprobs(operand, known, memory=memory)
                if audit:
                    audit.of_logits(where, operand, every_target(known), logprob=rows.expand(out.logprob.detach()))
                return out
            kept, present = _filtered(logits, known, shard, self.sampling)
            out = logprobs(operand, known, kept=kept, memory=memory)
            return out._replace(logprob=out.logprob.masked_fill(~present, -torch.inf))

        with without_graph(self.inference_only):
            return without_outside(rows.target, vocabulary_of(shard, logits.shape[-1]), score).float()


@torch.no_grad()
def _filtered(logits: Tensor, rows: Rows, shard: VocabShard | None, sampling: Any) -> tuple[Kept, Tensor]:
    """The support by NeMo-RL's filter, in this shard's columns; and whether the whole support has each row's target."""
    keep_of = importlib.import_module("nemo_rl.algorithms.logits_sampling_utils").apply_top_k_top_p
    start, width = 0 if shard is None else shard.start, logits.shape[-1]
    flat, nothing = logits.reshape(-1, width), rows.index[:0]
    ids, lengths, present = [nothing], [nothing], [nothing.bool()]
    for index, target in zip(rows.index.split(FILTERED_ROWS), rows.target.split(FILTERED_ROWS), strict=True):
        part = computed(flat[index]).float()
        whole = part if shard is None else gather_over(shard.group, part).transpose(0, 1).flatten(1)
        keep = keep_of(whole, top_k=sampling.top_k, top_p=sampling.top_p)[1]
        here = keep[:, start : start + width]
        ids.append(here.nonzero()[:, 1] + start)
        lengths.append(here.sum(1))
        present.append(keep.gather(1, target[:, None])[:, 0])
    return Kept(torch.cat(ids), torch.cat(lengths)), torch.cat(present)


# From hidden states.


@replaces(
    MODEL_UTILS,
    signature={
        "0.7": ("output_weight",),
        "0.6": "(tensor_parallel_hidden_states, output_weight_layer, output_weight, runtime_gather_output, target, "
        "vocab_start_index, vocab_end_index, tp_group, inference_only=False, cp_group=None, chunk_size=None)",
    },
)
def from_parallel_hidden_states_to_logprobs(
    options: Options,
    tensor_parallel_hidden_states: Tensor,
    output_weight_layer: Tensor,
    runtime_gather_output: bool,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
    output_weight: Any = None,
) -> Tensor:
    # output_weight of 0.6 says that the weight is tied; NeMo-RL itself does not read it.
    hidden, weight = tensor_parallel_hidden_states, output_weight_layer
    if ranks_in(cp_group) > 1:
        raise LogitlessError("the fused head knows no context parallelism: cp_group must be None or of one rank.")
    shard = shard_between(tp_group, vocab_start_index, vocab_end_index)
    ranks = 1 if shard is None else shard.group.size()
    check_ids("target", target, (hidden.shape[1], hidden.shape[0] * ranks))
    match = None if options["accurate"] else HALF.get(hidden.dtype)
    logits = Logits(hidden, weight, shard=shard, sequence_parallel=shard is not None, match=match)
    head = Head(options["fused_temperature"])

    def score(ids: Tensor) -> TokenStats:
        out = logprobs(logits, ids, head=head, memory=options["memory"])
        options["audit"].of_logits("hidden states", logits, ids, logprob=out.logprob, head=head)
        return out

    with without_graph(inference_only):
        # The last position has no next token: it is scored with the first, and dropped.
        shifted = target.long().roll(-1, dims=-1).T.contiguous()
        values = without_outside(shifted, vocabulary_of(shard, weight.shape[0]), score)
    return values.float().T[:, :-1]


@replaces(TRAIN, optional=True)
def apply_temperature_scaling(options: Options, logits: Tensor, sampling_params: Any) -> Any:
    """NeMo-RL scales logits, log-probs stay unchanged."""
    if logits.dim() != 2:
        return PassOn("logits")
    asked = 1.0 if sampling_params is None else sampling_params.temperature
    if asked != options["fused_temperature"]:
        raise LogitlessError(
            f"the fused head scored at temperature {options['fused_temperature']} but this run samples at {asked}. "
            f'Use install("nemo_rl", fused_temperature={asked}).'
        )
    return logits


# The autograd classes behind these functions, for code that calls them directly: targets are shifted already.


@replaces(MODEL_UTILS, "DistributedLogprob.apply")
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
    shard = shard_between(group, vocab_start_index, vocab_end_index)
    return _every(Source(vocab_parallel_logits, shard, options, inference_only=inference_only), target)


@replaces(MODEL_UTILS, "ChunkedDistributedLogprob.apply")
def chunked_distributed_logprob(
    options: Options,
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int | None,
    tp_group: Any,
    inference_only: bool = False,
) -> Tensor:
    shard = shard_between(tp_group, vocab_start_index, vocab_end_index)
    return _every(Source(vocab_parallel_logits, shard, options, chunk_size, inference_only=inference_only), target)


def _every(source: Source, target: Tensor) -> Tensor:
    """Log-probs in the shape of the targets, one for each row of logits."""
    check_ids("target", target, tuple(source.logits.shape[:-1]))
    return source.score("classes", Rows.every(target)).view(target.shape)


# Entropy.


@replaces(MODEL_UTILS, "ChunkedDistributedEntropy.apply")
def chunked_distributed_entropy(
    options: Options, vocab_parallel_logits: Tensor, chunk_size: int, tp_group: Any, inference_only: bool = False
) -> Tensor:
    """``[B, S]`` of sum p log p."""
    logits = vocab_parallel_logits
    if logits.dim() != 3:
        raise LogitlessError(f"vocab_parallel_logits must be [B, S, V'] but is {list(logits.shape)}.")
    shard = even_shard(tp_group, logits.shape[-1])
    return -entropy_of_logits("entropy", logits, options["audit"], grad=not inference_only, shard=shard).float()


def _cp_size(target: Any) -> int:
    mesh = getattr(target, "device_mesh", None)
    names = () if mesh is None or mesh.mesh_dim_names is None else mesh.mesh_dim_names
    return mesh.shape[names.index("cp")] if mesh is not None and "cp" in names else 1


FUNCTIONS = (
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
    get_next_token_logprobs_from_logits,
    dtensor_from_parallel_logits_to_logprobs,
    from_parallel_hidden_states_to_logprobs,
    chunked_distributed_entropy,
    distributed_logprob,
    chunked_distributed_logprob,
    get_distillation_topk_logprobs_from_logits,
    chunked_distributed_gather_logprob,
    distributed_cross_entropy,
    model_forward,
    apply_temperature_scaling,
)


HOST = Host(
    name="nemo_rl",
    package="nemo_rl",
    versions=("0.6", "0.7"),
    replacements=lambda _: FUNCTIONS,
    options={
        "accurate": Option(False, "float32 logits of half-precision hidden states instead of NeMo-RL's rounding"),
        "fused_temperature": Option(
            1.0, "sampling temperature, for the fused head: it divides the logits", check=lambda x: Head(temperature=x)
        ),
        "memory": Option("256MiB", "working memory of the fused head", check=parse_memory),
    },
    distribution="nemo-rl",
    heads=heads,
    logits="deferred",
    placed=True,
)
