"""SkyRL: log-probs and entropies of its Megatron and FSDP workers, from logits and from hidden states.

    {logits, hidden} x {padded, packed}    score the rows of the batch, put the results into [B, S-1]     (replaced)
    FSDP                                   logprobs_from_logits, chunked_entropy_from_logits              (replaced)

Only rows with a result are computed: none for the last token of a sequence, none for padding, and for the mean entropy
none with loss mask 0. SkyRL's conventions are followed:

* An id outside the vocabulary has log-prob 0 and pulls on the logits with -p g.
* The gradient of hidden states is this rank's part; the sequence-parallel gather's backward adds the parts up.
* Over the context-parallel group the padded form's backward sums gradients, and the packed form's does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.adapters.host import Host, Option, Replacement
from logitless.adapters.packs import Batch, packed_batch, padded_batch, ranks_in, with_target
from logitless.adapters.scoring import (
    entropy_mode,
    entropy_of_logits,
    every_target,
    make_logprobs_from_logits,
    score_hidden,
    without_outside,
)
from logitless.adapters.shards import check_ids, even_shard, shard_between, vocabulary_of
from logitless.errors import LogitlessError
from logitless.from_hidden.logprobs import linear_logprobs
from logitless.from_logits import logprobs
from logitless.rows import Rows
from logitless.rows.exchange import GradRule
from logitless.spec import Head, TokenStats, VocabShard

MODEL_UTILS = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
TORCH_UTILS = "skyrl.backends.skyrl_train.utils.torch_utils"
MEGATRON_WRAPPER = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"
FSDP_WRAPPER = "skyrl.backends.skyrl_train.workers.model_wrapper"


# Scoring rows.


def _from_logits(
    where: str,
    logits: Tensor,
    rows: Rows,
    shard: VocabShard | None,
    entropy: Any,
    options: Mapping[str, Any],
) -> TokenStats:
    logits = logits if logits.shape[-1] < 2 or logits.stride(-1) == 1 else logits.contiguous()
    out = logprobs(logits, rows, shard=shard, entropy=entropy)
    if options["audit"]:
        options["audit"].of_logits(where, logits, every_target(rows), **_every_result(rows, out), shard=shard)
    return out


def _from_hidden(
    where: str,
    operands: tuple[Tensor, Tensor, float],
    rows: Rows,
    shard: VocabShard | None,
    entropy: Any,
    options: Mapping[str, Any],
) -> TokenStats:
    hidden, weight, temperature = operands
    # As Megatron's output layer does: the head's dtype decides.
    hidden, head = hidden.to(weight.dtype), Head(temperature=temperature)
    out = linear_logprobs(
        hidden,
        weight,
        rows,
        entropy=entropy,
        head=head,
        shard=shard,
        hidden_grad="partial",
        memory=options["memory"],
    )
    if options["audit"]:
        results = _every_result(rows, out)
        options["audit"].of_hidden(where, hidden, weight, every_target(rows), **results, shard=shard, head=head)
    return out


def _every_result(rows: Rows, out: TokenStats) -> dict[str, Any]:
    """Results with one entry per local token, for the audit."""
    entropy = None if out.entropy is None else rows.expand(out.entropy.detach())
    return {"logprob": rows.expand(out.logprob.detach()), "entropy": entropy}


Scorer = Callable[..., TokenStats]
"""``score(rows, shard, entropy)``: results of the rows, from the logits or hidden states of the call."""

Vocabulary = tuple[VocabShard | None, int]
"""This rank's shard, and the number of columns over all ranks."""


def _logprobs(score: Scorer, batch: Batch, vocabulary: Vocabulary, grad: GradRule, no_graph: bool) -> Tensor:
    """``[B, S - 1]`` float32 log-probs of the next tokens."""
    shard, size = vocabulary
    rows = batch.rows
    with torch.no_grad() if no_graph else nullcontext():
        values = without_outside(rows.target, size, lambda ids: score(with_target(rows, ids), shard, None))
        return batch.spread(values.float(), grad)


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
        logits = _check_batch("vocab_parallel_logits", vocab_parallel_logits, target)
        batch = padded_batch(target, logits.shape[1], cp_group, logits.device)
        vocabulary = _vocabulary(tp_group, vocab_start_index, vocab_end_index, logits.shape[-1])
        score = functools.partial(_from_logits, where, logits, options=options)
        return _logprobs(score, batch, vocabulary, "sum", inference_only)

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
        logits = _check_pack("vocab_parallel_logits", vocab_parallel_logits, target, cp_group)
        layout = (logits.shape[1], unpacked_seqlen, cp_group, logits.device, attention_mask, sub_seq_lengths)
        batch = packed_batch(target, cu_seqlens_padded, *layout)
        vocabulary = _vocabulary(group, vocab_start_index, vocab_end_index, logits.shape[-1])
        score = functools.partial(_from_logits, where, logits, options=options)
        return _logprobs(score, batch, vocabulary, "slice", inference_only)

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
        hidden = _check_batch("hidden", hidden, target)
        batch = padded_batch(target, hidden.shape[1], cp_group, hidden.device)
        vocabulary = _vocabulary(tp_group, vocab_start_index, vocab_end_index, lm_head_weight.shape[0])
        operands = (hidden, lm_head_weight, temperature)
        score = functools.partial(_from_hidden, where, operands, options=options)
        return _logprobs(score, batch, vocabulary, "sum", inference_only)

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
        hidden = _check_pack("hidden", hidden, target, cp_group)
        layout = (hidden.shape[1], unpacked_seqlen, cp_group, hidden.device, attention_mask, sub_seq_lengths)
        batch = packed_batch(target, cu_seqlens_padded, *layout)
        vocabulary = _vocabulary(group, vocab_start_index, vocab_end_index, lm_head_weight.shape[0])
        operands = (hidden, lm_head_weight, temperature)
        score = functools.partial(_from_hidden, where, operands, options=options)
        return _logprobs(score, batch, vocabulary, "slice", inference_only)

    return from_parallel_hidden_to_logprobs_packed_sequences


# Entropy.


def make_entropy(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``vocab_parallel_entropy``. Backward does not overwrite the logits."""

    def vocab_parallel_entropy(
        vocab_parallel_logits: Tensor, chunk_size: int | None = None, chunk_memory_mb: int = 512
    ) -> Tensor:
        logits, shard = vocab_parallel_logits, even_shard(_tensor_group(), vocab_parallel_logits.shape[-1])
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
        _check_packed_tokens("vocab_parallel_logits", logits)
        layout = (logits.shape[1], unpacked_seqlen, cp_group, logits.device, attention_mask, sub_seq_lengths)
        weigh = functools.partial(_action_weights, num_actions, loss_mask, logits.device)
        batch = packed_batch(None, cu_seqlens_padded, *layout, weigh)
        score = functools.partial(_from_logits, where, logits, options=options)
        shard = even_shard(_tensor_group(), logits.shape[-1])
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
        target = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
        out = score_hidden(
            "_fused_vocab_parallel_entropy_from_hidden",
            hidden.to(lm_head_weight.dtype),
            lm_head_weight,
            target,
            options["audit"],
            entropy=entropy_mode(True, hidden, lm_head_weight),
            head=Head(temperature=temperature),
            shard=even_shard(tp_group, lm_head_weight.shape[0]),
            hidden_grad="partial",
            memory=options["memory"],
        )
        assert out.entropy is not None
        return out.entropy.float()

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
        _check_packed_tokens("hidden", hidden)
        layout = (hidden.shape[1], unpacked_seqlen, cp_group, hidden.device, attention_mask, sub_seq_lengths)
        weigh = functools.partial(_action_weights, num_actions, loss_mask, hidden.device)
        batch = packed_batch(None, cu_seqlens_padded, *layout, weigh)
        operands = (hidden, lm_head_weight, temperature)
        score = functools.partial(_from_hidden, where, operands, options=options)
        shard = even_shard(tp_group, lm_head_weight.shape[0])
        return _mean_entropy(score, batch, shard, hidden, lm_head_weight)

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


def _mean_entropy(score: Scorer, batch: Batch, shard: VocabShard | None, *sources: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean over all ranks, without a graph; and this rank's part of that mean, with one."""
    out = score(batch.rows, shard, entropy_mode(True, *sources))
    assert out.entropy is not None
    assert batch.weights is not None
    part = (out.entropy.float() * batch.weights).sum()
    totals = torch.stack([part.detach(), batch.weights.sum()])
    if batch.group is not None:
        dist.all_reduce(totals, group=batch.group)
    count = totals[1].clamp(min=1.0)
    return totals[0] / count, part / count


# FSDP.


def make_chunked_entropy(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``chunked_entropy_from_logits``: positions with mask 0 are not computed."""

    def chunked_entropy_from_logits(
        logits: Tensor, requires_grad: bool = False, attention_mask: Tensor | None = None, chunk_size: int = 1024
    ) -> Tensor:
        if logits.dim() != 3:
            raise LogitlessError(f"logits must be [B, S, V] but is {list(logits.shape)}.")
        if attention_mask is not None and attention_mask.shape != logits.shape[:-1]:
            raise LogitlessError(
                f"attention_mask must be {list(logits.shape[:-1])} to go with logits of shape {list(logits.shape)} but "
                f"is {list(attention_mask.shape)}."
            )
        left_out = None if attention_mask is None else attention_mask == 0
        where = "chunked_entropy_from_logits"
        entropy = entropy_of_logits(where, logits, options["audit"], grad=requires_grad, leave_out=left_out)
        return (entropy if attention_mask is None else entropy * attention_mask).to(logits.dtype)

    return chunked_entropy_from_logits


# Checks.


def _check_batch(name: str, x: Tensor, target: Tensor) -> Tensor:
    if x.dim() != 3 or target.dim() != 2 or x.shape[0] != target.shape[0]:
        raise LogitlessError(
            f"{name} must be [B, S / CP, ...] and target [B, S] but they are {list(x.shape)} and {list(target.shape)}."
        )
    check_ids("target", target, target.shape)
    return x


def _check_pack(name: str, x: Tensor, target: Tensor, cp_group: Any) -> Tensor:
    _check_packed_tokens(name, x)
    check_ids("target", target, (1, x.shape[1] * ranks_in(cp_group)))
    return x


def _check_packed_tokens(name: str, x: Tensor) -> None:
    if x.dim() != 3 or x.shape[0] != 1:
        raise LogitlessError(f"{name} must be [1, T / CP, ...], one pack, but is {list(x.shape)}.")


def _vocabulary(group: Any, start: int, stop: int, width: int) -> Vocabulary:
    if stop - start != width:
        raise LogitlessError(
            f"vocab_start_index {start} and vocab_end_index {stop} describe {stop - start} columns, not {width}."
        )
    # To SkyRL, as to torch, None is the default group.
    shard = shard_between(dist.group.WORLD if group is None else group, start, stop)
    return shard, vocabulary_of(shard, width)


def _tensor_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


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
            {"main": f"(vocab_parallel_logits, {chunks})", "0.3": "(vocab_parallel_logits)"},
            make_entropy,
        ),
        "vocab_parallel_entropy_packed_sequences": (
            {
                "main": f"(vocab_parallel_logits, {actions}, sub_seq_lengths=None, {chunks})",
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
    fsdp = {
        "logprobs_from_logits": ("(logits, labels, inplace_backward=True)", make_logprobs_from_logits),
        "chunked_entropy_from_logits": (
            "(logits, requires_grad=False, attention_mask=None, chunk_size=1024)",
            make_chunked_entropy,
        ),
    }
    return [
        *(
            Replacement(MODEL_UTILS, name, signature, make, (MEGATRON_WRAPPER,), optional=True)
            for name, (signature, make) in megatron.items()
        ),
        *(Replacement(TORCH_UTILS, name, *how, (FSDP_WRAPPER,)) for name, how in fsdp.items()),
    ]


HOST = Host(
    name="skyrl",
    package="skyrl",
    versions=("0.3",),
    replacements=_replacements,
    options={
        "inplace_backward": Option(
            False, "True: FSDP's backward may write the gradient over the logits; for runs without an entropy bonus"
        ),
        "memory": Option("256MiB", "working memory of the functions that take hidden states"),
    },
)
