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
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from logitless.adapters.audit import Audit
from logitless.adapters.host import Host, Option, PassOn, Replacement
from logitless.adapters.nemo_rl_distillation import distillation
from logitless.adapters.nemo_rl_heads import filters, fused_forward, heads
from logitless.adapters.packs import packed_batch, padded_batch, ranks_in, with_target
from logitless.adapters.scoring import HALF, computed, entropy_of_logits, every_target, placed
from logitless.adapters.shards import check_ids, even_shard, shard_between, vocabulary_of
from logitless.collectives import gather_over
from logitless.errors import LogitlessError
from logitless.operands import Kept, Logits, shard_of
from logitless.rows import Rows
from logitless.score import logprobs
from logitless.seams import without_outside
from logitless.spec import Head, TokenStats, VocabShard, parse_memory

FILTERED_ROWS = 256
"""Rows that are sorted at a time under top-k or top-p, as NeMo-RL does."""


# From logits.


def make_unpacked(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``from_parallel_logits_to_logprobs``."""

    def from_parallel_logits_to_logprobs(
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
        more = (shard, cp_group, chunk_size, sampling_params, options)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            return _lines(vocab_parallel_logits, target, *more)

    return from_parallel_logits_to_logprobs


def make_packed(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``from_parallel_logits_to_logprobs_packed_sequences``: one collective for all sequences."""

    def from_parallel_logits_to_logprobs_packed_sequences(
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
        logits, shard = vocab_parallel_logits, shard_between(group, vocab_start_index, vocab_end_index)
        if logits.dim() != 3 or logits.shape[0] != 1:
            raise LogitlessError(f"vocab_parallel_logits must be [1, T / CP, V'] but is {list(logits.shape)}.")
        check_ids("target", target, (1, logits.shape[1] * (1 if target_is_pre_rolled else ranks_in(cp_group))))
        ids = None if target_is_pre_rolled else target
        batch = packed_batch(ids, cu_seqlens_padded, logits.shape[1], unpacked_seqlen, cp_group, logits.device)
        rows = with_target(batch.rows, batch.rows.take(target[0]).long()) if target_is_pre_rolled else batch.rows
        more = (shard, chunk_size, sampling_params, options)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            return batch.spread(_score("packed", logits, rows, *more), grad="sum")

    return from_parallel_logits_to_logprobs_packed_sequences


def make_next_token(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``get_next_token_logprobs_from_logits``."""

    def get_next_token_logprobs_from_logits(
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
        columns, shard, cp_group = next_token_logits.shape[-1], None, None
        if vocab_parallel_group is not None:
            if vocab_parallel_rank is None:
                raise LogitlessError("vocab_parallel_rank must be given with vocab_parallel_group but is None.")
            cp_group = context_parallel_group
            shard = even_shard(vocab_parallel_group, columns, vocab_parallel_rank)
        return _lines(next_token_logits, input_ids, shard, cp_group, chunk_size, sampling_params, options)

    return get_next_token_logprobs_from_logits


def make_dtensor(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``dtensor_from_parallel_logits_to_logprobs``: local logits, targets as a DTensor."""

    def dtensor_from_parallel_logits_to_logprobs(
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
        shard = shard_between(tp_group, vocab_start_index, vocab_end_index)
        more = (shard, chunk_size, sampling_params, options)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            if _cp_size(target) > 1:
                return _in_torch_order(vocab_parallel_logits, target, seq_index, *more)
            target = target.full_tensor() if hasattr(target, "full_tensor") else target
            return _lines(vocab_parallel_logits, target, shard, None, *more[1:])

    return dtensor_from_parallel_logits_to_logprobs


def _lines(
    logits: Tensor,
    target: Tensor,
    shard: VocabShard | None,
    cp_group: Any,
    chunk_size: int | None,
    sampling: Any,
    options: Mapping[str, Any],
) -> Tensor:
    """``[B, S - 1]`` from ``[B, S / CP, V']`` logits, zigzag over the context-parallel ranks, and ``[B, S]`` ids."""
    if logits.dim() != 3 or target.dim() != 2 or target.shape[0] != logits.shape[0]:
        raise LogitlessError(
            f"logits must be [B, S / CP, V'] and ids [B, S] but they are {list(logits.shape)} and {list(target.shape)}."
        )
    check_ids("ids", target, tuple(target.shape))
    batch = padded_batch(target, logits.shape[1], cp_group, logits.device)
    return batch.spread(_score("lines", logits, batch.rows, shard, chunk_size, sampling, options), grad="sum")


def _in_torch_order(
    logits: Tensor,
    target: Any,
    seq_index: Tensor | None,
    shard: VocabShard | None,
    chunk_size: int | None,
    sampling: Any,
    options: Mapping[str, Any],
) -> Tensor:
    """``[B, S - 1]`` from tokens in the order of torch's context parallelism: ``seq_index`` has the place of each."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if seq_index is None:
        raise LogitlessError("seq_index must say how the sequence is split over context-parallel ranks but is None.")
    order = seq_index.argsort()
    shifted = target.full_tensor()[:, order].roll(-1, dims=-1)[:, seq_index]
    ids = distribute_tensor(shifted, target.device_mesh, target.placements).to_local()
    check_ids("the local part of target", ids, tuple(logits.shape[:-1]))
    values = _score("torch order", logits, Rows.every(ids), shard, chunk_size, sampling, options)
    whole = DTensor.from_local(values.view(ids.shape), target.device_mesh, target.placements).full_tensor()
    return whole[:, order][:, :-1]


def _score(
    where: str,
    logits: Tensor,
    rows: Rows,
    shard: VocabShard | None,
    chunk_size: int | None,
    sampling: Any,
    options: Mapping[str, Any],
) -> Tensor:
    """``[R]`` float32 log-probs of the rows; -inf where the target is outside the support."""
    # NeMo-RL's chunk of rows, as bytes of float32 logits.
    memory = 4 * chunk_size * logits.shape[-1] if chunk_size else None
    operand = placed(logits, shard)
    shard = shard_of(operand)

    def score(ids: Tensor) -> TokenStats:
        known = with_target(rows, ids)
        if not filters(sampling):
            out = logprobs(operand, known, memory=memory)
            if options["audit"]:
                logprob = rows.expand(out.logprob.detach())
                options["audit"].of_logits(where, operand, every_target(known), logprob=logprob)
            return out
        kept, present = _filtered(logits, known, shard, sampling)
        out = logprobs(operand, known, kept=kept, memory=memory)
        return out._replace(logprob=out.logprob.masked_fill(~present, -torch.inf))

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


def make_hidden(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``from_parallel_hidden_states_to_logprobs``."""
    audit: Audit = options["audit"]

    def from_parallel_hidden_states_to_logprobs(
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
            audit.of_logits("hidden states", logits, ids, logprob=out.logprob, head=head)
            return out

        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            # The last position has no next token: it is scored with the first, and dropped.
            shifted = target.long().roll(-1, dims=-1).T.contiguous()
            values = without_outside(shifted, vocabulary_of(shard, weight.shape[0]), score)
        return values.float().T[:, :-1]

    return from_parallel_hidden_states_to_logprobs


def make_temperature(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``apply_temperature_scaling``: NeMo-RL scales logits, log-probs stay unchanged."""

    def apply_temperature_scaling(logits: Tensor, sampling_params: Any) -> Any:
        if logits.dim() != 2:
            return PassOn("logits")
        asked = 1.0 if sampling_params is None else sampling_params.temperature
        if asked != options["fused_temperature"]:
            raise LogitlessError(
                f"the fused head scored at temperature {options['fused_temperature']} but this run samples at {asked}. "
                f'Use install("nemo_rl", fused_temperature={asked}).'
            )
        return logits

    return apply_temperature_scaling


# The autograd classes behind these functions, for code that calls them directly: targets are shifted already.


def make_class(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``DistributedLogprob.apply``: ``[B, S]`` log-probs."""
    chunked = make_chunked_class(original, options)

    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        group: Any,
        inference_only: bool = False,
    ) -> Tensor:
        return chunked(vocab_parallel_logits, target, vocab_start_index, vocab_end_index, None, group, inference_only)

    return apply


def make_chunked_class(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``ChunkedDistributedLogprob.apply``."""

    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int | None,
        tp_group: Any,
        inference_only: bool = False,
    ) -> Tensor:
        check_ids("target", target, tuple(vocab_parallel_logits.shape[:-1]))
        shard = shard_between(tp_group, vocab_start_index, vocab_end_index)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            rows = Rows.every(target)
            values = _score("classes", vocab_parallel_logits, rows, shard, chunk_size, None, options)
            return values.view(target.shape)

    return apply


# Entropy.


def make_entropy(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``ChunkedDistributedEntropy.apply``: ``[B, S]`` of sum p log p."""

    def apply(vocab_parallel_logits: Tensor, chunk_size: int, tp_group: Any, inference_only: bool = False) -> Tensor:
        logits = vocab_parallel_logits
        if logits.dim() != 3:
            raise LogitlessError(f"vocab_parallel_logits must be [B, S, V'] but is {list(logits.shape)}.")
        shard = even_shard(tp_group, logits.shape[-1])
        return -entropy_of_logits("entropy", logits, options["audit"], grad=not inference_only, shard=shard).float()

    return apply


def _cp_size(target: Any) -> int:
    mesh = getattr(target, "device_mesh", None)
    names = () if mesh is None or mesh.mesh_dim_names is None else mesh.mesh_dim_names
    return mesh.shape[names.index("cp")] if mesh is not None and "cp" in names else 1


def _replacements(options: Mapping[str, Any]) -> list[Replacement]:
    Head(temperature=options["fused_temperature"])
    module, losses, train = (
        "nemo_rl.distributed.model_utils",
        "nemo_rl.algorithms.loss.utils",
        "nemo_rl.models.megatron.train",
    )
    bounds = "vocab_start_index, vocab_end_index"
    tail = "inference_only=False, cp_group=None, chunk_size=None"
    head = "tensor_parallel_hidden_states, output_weight_layer"
    next_token = (
        "input_ids, next_token_logits, seq_index=None, vocab_parallel_rank=None, vocab_parallel_group=None, "
        "context_parallel_group=None, sampling_params=None"
    )
    return [
        Replacement(
            module=module,
            name="from_parallel_logits_to_logprobs",
            signature=f"(vocab_parallel_logits, target, {bounds}, tp_group, {tail}, sampling_params=None)",
            make=make_unpacked,
            also_in=(train,),
        ),
        Replacement(
            module=module,
            name="from_parallel_logits_to_logprobs_packed_sequences",
            signature=f"(vocab_parallel_logits, target, cu_seqlens_padded, unpacked_seqlen, {bounds}, group, {tail}, "
            "sampling_params=None, target_is_pre_rolled=False)",
            make=make_packed,
            also_in=(losses, train),
        ),
        Replacement(
            module=module,
            name="get_next_token_logprobs_from_logits",
            signature={"0.7": f"({next_token}, chunk_size=None)", "0.6": f"({next_token})"},
            make=make_next_token,
            also_in=(losses,),
        ),
        Replacement(
            module=module,
            name="dtensor_from_parallel_logits_to_logprobs",
            signature=f"(vocab_parallel_logits, target, {bounds}, tp_group, inference_only=False, seq_index=None, "
            "chunk_size=None, sampling_params=None)",
            make=make_dtensor,
        ),
        Replacement(
            module=module,
            name="from_parallel_hidden_states_to_logprobs",
            signature={
                "0.7": f"({head}, runtime_gather_output, target, {bounds}, tp_group, {tail})",
                "0.6": f"({head}, output_weight, runtime_gather_output, target, {bounds}, tp_group, {tail})",
            },
            make=make_hidden,
        ),
        *_classes(module, bounds),
        *distillation(module, losses),
        fused_forward(),
        Replacement(
            module=train,
            name="apply_temperature_scaling",
            signature="(logits, sampling_params)",
            make=make_temperature,
            optional=True,
        ),
    ]


def _classes(module: str, bounds: str) -> list[Replacement]:
    return [
        Replacement(
            module=module,
            name="ChunkedDistributedEntropy.apply",
            signature="(ctx, vocab_parallel_logits, chunk_size, tp_group, inference_only=False)",
            signature_of="ChunkedDistributedEntropy.forward",
            make=make_entropy,
        ),
        Replacement(
            module=module,
            name="DistributedLogprob.apply",
            signature=f"(ctx, vocab_parallel_logits, target, {bounds}, group, inference_only=False)",
            signature_of="DistributedLogprob.forward",
            make=make_class,
        ),
        Replacement(
            module=module,
            name="ChunkedDistributedLogprob.apply",
            signature=f"(ctx, vocab_parallel_logits, target, {bounds}, chunk_size, tp_group, inference_only=False)",
            signature_of="ChunkedDistributedLogprob.forward",
            make=make_chunked_class,
        ),
    ]


HOST = Host(
    name="nemo_rl",
    package="nemo_rl",
    versions=("0.6", "0.7"),
    replacements=_replacements,
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
