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
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.adapters.host import Host, Option, Replacement
from logitless.adapters.packs import Batch, packed_batch, padded_batch
from logitless.adapters.schedules import in_schedule
from logitless.adapters.scoring import entropy_mode, entropy_of_logits
from logitless.adapters.shards import even_shard, tensor_group
from logitless.adapters.skyrl_draft import draft
from logitless.adapters.skyrl_fsdp import fsdp_heads, fsdp_replacements
from logitless.adapters.skyrl_rows import (
    Scorer,
    check_batch,
    check_pack,
    check_packed_tokens,
    from_hidden,
    logprob_of_every,
    logprobs_of_batch,
    make_with_actions,
    read_results,
    score_rows,
    vocabulary_between,
    weigh_read,
)
from logitless.adapters.skyrl_support import support_replacements
from logitless.errors import LogitlessError
from logitless.operands import Logits
from logitless.operands.logits import like
from logitless.spec import Head, VocabShard, parse_memory

MODEL_UTILS = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
MEGATRON_WRAPPER = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"


# Log-probs.


def make_logits_padded(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``from_parallel_logits_to_logprobs``."""
    where = "from_parallel_logits_to_logprobs"

    def from_parallel_logits_to_logprobs(
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
        score = functools.partial(score_rows, where, vocab_parallel_logits, options=options)
        bounds = (tp_group, vocab_start_index, vocab_end_index)
        return _padded(vocab_parallel_logits, score, target, bounds, cp_group, inference_only)

    return from_parallel_logits_to_logprobs


def make_logits_packed(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``from_parallel_logits_to_logprobs_packed_sequences``."""
    where = "from_parallel_logits_to_logprobs_packed_sequences"

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
        attention_mask: Tensor | None = None,
        sub_seq_lengths: list[list[int]] | None = None,
    ) -> Tensor:
        logits = vocab_parallel_logits
        check_pack("vocab_parallel_logits", logits, target, cp_group)
        layout = (logits.shape[1], unpacked_seqlen, cp_group, logits.device, attention_mask, sub_seq_lengths)
        batch = packed_batch(target, cu_seqlens_padded, *layout, weigh_read(logits.device))
        vocabulary = vocabulary_between(group, vocab_start_index, vocab_end_index, logits.shape[-1])
        score = functools.partial(score_rows, where, logits, options=options)
        return logprobs_of_batch(score, batch, vocabulary, "slice", inference_only)

    return from_parallel_logits_to_logprobs_packed_sequences


def make_hidden_padded(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``from_parallel_hidden_to_logprobs``."""
    where = "from_parallel_hidden_to_logprobs"

    def from_parallel_hidden_to_logprobs(
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
        score = functools.partial(score_rows, where, logits, options=options, temperature=temperature)
        bounds = (tp_group, vocab_start_index, vocab_end_index)
        return _padded(logits, score, target, bounds, cp_group, inference_only)

    return from_parallel_hidden_to_logprobs


def make_hidden_packed(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``from_parallel_hidden_to_logprobs_packed_sequences``."""
    where = "from_parallel_hidden_to_logprobs_packed_sequences"

    def from_parallel_hidden_to_logprobs_packed_sequences(
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
        logits = from_hidden(hidden, lm_head_weight, options)
        score = functools.partial(score_rows, where, logits, options=options, temperature=temperature)
        return logprobs_of_batch(score, batch, vocabulary, "slice", inference_only)

    return from_parallel_hidden_to_logprobs_packed_sequences


def _padded(
    logits: Tensor, score: Scorer, target: Tensor, bounds: tuple[Any, int, int], cp_group: Any, inference_only: bool
) -> Tensor:
    """``[B, S - 1]`` of padded lines; ``bounds`` are the vocabulary's group, and this rank's columns."""
    batch = padded_batch(target, logits.shape[1], cp_group, logits.device, read_results())
    vocabulary = vocabulary_between(*bounds, logits.shape[-1])
    return logprobs_of_batch(score, batch, vocabulary, "sum", inference_only)


# The autograd classes behind these functions, for code that calls them directly: targets are shifted already.


def make_class(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``DistributedLogprob.apply``: ``[B, S]`` log-probs."""
    score = functools.partial(score_rows, "DistributedLogprob")

    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        group: Any,
        inference_only: bool = False,
    ) -> Tensor:
        logits = vocab_parallel_logits
        vocabulary = vocabulary_between(group, vocab_start_index, vocab_end_index, logits.shape[-1])
        return logprob_of_every(functools.partial(score, logits, options=options), target, vocabulary, inference_only)

    return apply


def make_chunked_class(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``ChunkedDistributedLogprob.apply``."""
    plain = make_class(original, options)

    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: Any,
        inference_only: bool = False,
    ) -> Tensor:
        return plain(vocab_parallel_logits, target, vocab_start_index, vocab_end_index, tp_group, inference_only)

    return apply


def make_fused_class(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``FusedLinearChunkedDistributedLogprob.apply``: from hidden states."""
    score = functools.partial(score_rows, "FusedLinearChunkedDistributedLogprob")

    def apply(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: Any,
        inference_only: bool = False,
    ) -> Tensor:
        vocabulary = vocabulary_between(tp_group, vocab_start_index, vocab_end_index, weight.shape[0])
        bound = functools.partial(score, from_hidden(hidden, weight, options), options=options)
        return logprob_of_every(bound, target, vocabulary, inference_only)

    return apply


# Entropy.


def make_entropy(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``vocab_parallel_entropy``. Backward does not overwrite the logits."""

    def vocab_parallel_entropy(
        vocab_parallel_logits: Tensor, chunk_size: int | None = None, chunk_memory_mb: int = 512
    ) -> Tensor:
        logits, shard = vocab_parallel_logits, even_shard(tensor_group(), vocab_parallel_logits.shape[-1])
        return entropy_of_logits("vocab_parallel_entropy", logits, options["audit"], shard=shard).to(logits.dtype)

    return vocab_parallel_entropy


def make_entropy_packed(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``vocab_parallel_entropy_packed_sequences``: the mean as a metric, and this rank's part of it."""
    where = "vocab_parallel_entropy_packed_sequences"

    def vocab_parallel_entropy_packed_sequences(
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
        logits = vocab_parallel_logits
        check_packed_tokens("vocab_parallel_logits", logits)
        layout = (logits.shape[1], unpacked_seqlen, cp_group, logits.device, attention_mask, sub_seq_lengths)
        weigh = functools.partial(_action_weights, num_actions, loss_mask, logits.device)
        batch = packed_batch(None, cu_seqlens_padded, *layout, weigh)
        score = functools.partial(score_rows, where, logits, options=options)
        shard = even_shard(tensor_group(), logits.shape[-1])
        return _mean_entropy(score, batch, shard, logits)

    return vocab_parallel_entropy_packed_sequences


def make_entropy_from_hidden(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``_fused_vocab_parallel_entropy_from_hidden``, and has a gradient, unlike SkyRL's."""

    def _fused_vocab_parallel_entropy_from_hidden(
        hidden: Tensor,
        lm_head_weight: Tensor,
        tp_group: Any,
        chunk_size: int | None = None,
        temperature: float = 1.0,
    ) -> Tensor:
        where, logits = "_fused_vocab_parallel_entropy_from_hidden", from_hidden(hidden, lm_head_weight, options)
        shard = even_shard(tp_group, lm_head_weight.shape[0])
        asked: dict[str, Any] = {"shard": shard, "head": Head(temperature=temperature), "memory": options["memory"]}
        return entropy_of_logits(where, logits, options["audit"], **asked).float()

    return _fused_vocab_parallel_entropy_from_hidden


def make_entropy_from_hidden_packed(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``from_parallel_hidden_to_entropy_packed_sequences``, and has a gradient, unlike SkyRL's."""
    where = "from_parallel_hidden_to_entropy_packed_sequences"

    def from_parallel_hidden_to_entropy_packed_sequences(
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
        check_packed_tokens("hidden", hidden)
        layout = (hidden.shape[1], unpacked_seqlen, cp_group, hidden.device, attention_mask, sub_seq_lengths)
        weigh = functools.partial(_action_weights, num_actions, loss_mask, hidden.device)
        batch = packed_batch(None, cu_seqlens_padded, *layout, weigh)
        logits = from_hidden(hidden, lm_head_weight, options)
        score = functools.partial(score_rows, where, logits, options=options, temperature=temperature)
        shard = even_shard(tp_group, lm_head_weight.shape[0])
        return _mean_entropy(score, batch, shard, logits)

    return from_parallel_hidden_to_entropy_packed_sequences


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


def _mean_entropy(score: Scorer, batch: Batch, shard: VocabShard | None, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean over all ranks, without a graph; and this rank's part of that mean, with one."""
    out = score(batch.rows, shard, entropy_mode(True, logits))
    assert out.entropy is not None
    assert batch.weights is not None
    part = (out.entropy.float() * batch.weights).sum()
    totals = torch.stack([part.detach(), batch.weights.sum()])
    if batch.group is not None:
        dist.all_reduce(totals, group=batch.group)
    count = totals[1].clamp(min=1.0)
    return totals[0] / count, part / count


# FSDP.


def _replacements(options: Mapping[str, Any]) -> list[Replacement]:
    padded = (
        "target, vocab_start_index, vocab_end_index, tp_group, inference_only=False, cp_group=None, chunk_size=None"
    )
    packed = (
        "target, cu_seqlens_padded, unpacked_seqlen, vocab_start_index, vocab_end_index, group, inference_only=False, "
        "cp_group=None, chunk_size=None, attention_mask=None, sub_seq_lengths=None"
    )
    actions = "cu_seqlens_padded, unpacked_seqlen, num_actions, attention_mask, loss_mask, cp_group"
    fused = "temperature=1.0, fused_backend='torch'"
    chunks = "chunk_size=None, chunk_memory_mb=512"
    megatron: dict[str, tuple[str | dict[str, str | None], Callable[..., Any]]] = {
        "from_parallel_logits_to_logprobs": (f"(vocab_parallel_logits, {padded})", make_logits_padded),
        "from_parallel_logits_to_logprobs_packed_sequences": (f"(vocab_parallel_logits, {packed})", make_logits_packed),
        "from_parallel_hidden_to_logprobs": (f"(hidden, lm_head_weight, {padded}, {fused})", make_hidden_padded),
        "from_parallel_hidden_to_logprobs_packed_sequences": (
            f"(hidden, lm_head_weight, {packed}, {fused})",
            make_hidden_packed,
        ),
        "vocab_parallel_entropy": (
            {"0.4": f"(vocab_parallel_logits, {chunks})", "0.3": "(vocab_parallel_logits)"},
            make_entropy,
        ),
        "vocab_parallel_entropy_packed_sequences": (
            {
                "0.4": f"(vocab_parallel_logits, {actions}, sub_seq_lengths=None, {chunks})",
                "0.3": f"(vocab_parallel_logits, {actions}, sub_seq_lengths=None)",
            },
            make_entropy_packed,
        ),
        "_fused_vocab_parallel_entropy_from_hidden": (
            "(hidden, lm_head_weight, tp_group, chunk_size=None, temperature=1.0)",
            make_entropy_from_hidden,
        ),
        "from_parallel_hidden_to_entropy_packed_sequences": (
            f"(hidden, lm_head_weight, {actions}, tp_group, sub_seq_lengths=None, chunk_size=None, temperature=1.0)",
            make_entropy_from_hidden_packed,
        ),
    }
    return [
        *(
            Replacement(MODEL_UTILS, name, signature, make, (MEGATRON_WRAPPER,), optional=True)
            for name, (signature, make) in megatron.items()
        ),
        *_classes(),
        *draft(MEGATRON_WRAPPER),
        *support_replacements(MODEL_UTILS),
        *(_passes() if options["rows_before_head"] else ()),
        *fsdp_replacements(options),
    ]


def _passes() -> list[Replacement]:
    head = "(self, micro_batches, seq_len, micro_batch_size, temperature=1.0"
    both = f"{head}, loss_fn=None, loss_fn_config=None, forward_only=False"
    signatures: dict[str, str | dict[str, str | None]] = {
        "forward": f"{head})",
        "forward_backward_mini_batch": {"0.4": f"{both}, return_per_token_outputs=True)", "0.3": f"{both})"},
    }
    return [
        Replacement(MEGATRON_WRAPPER, f"MegatronModelWrapper.{name}", signature, make_with_actions, optional=True)
        for name, signature in signatures.items()
    ]


def _classes() -> list[Replacement]:
    tail = "vocab_start_index, vocab_end_index"
    classes = {
        "DistributedLogprob": (
            f"(ctx, vocab_parallel_logits, target, {tail}, group, inference_only=False)",
            make_class,
        ),
        "ChunkedDistributedLogprob": (
            f"(ctx, vocab_parallel_logits, target, {tail}, chunk_size, tp_group, inference_only=False)",
            make_chunked_class,
        ),
        "FusedLinearChunkedDistributedLogprob": (
            f"(ctx, hidden, weight, target, {tail}, chunk_size, tp_group, inference_only=False)",
            make_fused_class,
        ),
    }
    return [
        Replacement(MODEL_UTILS, f"{name}.apply", *how, optional=True, signature_of=f"{name}.forward")
        for name, how in classes.items()
    ]


# Logits that are not computed.


def make_recover(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``recover_left_padding``, which writes rows into zeros: of deferred logits, their hidden states."""

    def recover_left_padding(
        result: Tensor,
        attention_mask: Tensor,
        original_attention_mask: Tensor,
        origin_seqlen: int,
        post_process: bool = True,
    ) -> Any:
        places = (attention_mask, original_attention_mask, origin_seqlen, post_process)
        if not isinstance(result, Logits):
            return original(result, *places)
        return like(result, original(result.hidden, *places))

    return recover_left_padding


def _heads(options: Mapping[str, Any]) -> list[Replacement]:
    padded = Replacement(
        module="skyrl.backends.skyrl_train.distributed.megatron.megatron_utils",
        name="recover_left_padding",
        signature="(result, attention_mask, original_attention_mask, origin_seqlen, post_process=True)",
        make=make_recover,
        optional=True,
    )
    return [*fsdp_heads(), in_schedule(MEGATRON_WRAPPER, optional=True), padded]


HOST = Host(
    name="skyrl",
    package="skyrl",
    versions=("0.3", "0.4"),
    replacements=_replacements,
    heads=_heads,
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
