"""Megatron-Core: its models' logits, its two cross entropies, and an output processor that scores hidden states.

    GPTModel.forward                                                        logits that are not computed, by install
    vocab_parallel_cross_entropy, fused_vocab_parallel_cross_entropy        replaced by install("megatron")
    GPTModel.forward(..., output_processor=output_processor, output_processor_context=Scoring(...))       from 0.18 on
    with scoring(model, Scoring(...)): model(...)                                                         before that

The output processor needs no install(): the model hands it the hidden states instead of multiplying them with the head,
and returns its results. A head in MXFP8 (``fp8_output_proj``) is refused. Calls with label smoothing are left to
Megatron and counted as passed on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from logitless.adapters.audit import Audit
from logitless.adapters.host import Host, Option, PassOn
from logitless.adapters.replacing import Options, replaces
from logitless.adapters.scoring import in_scope
from logitless.adapters.shards import check_ids, even_shard, tensor_group
from logitless.adapters.signatures import plain_signature
from logitless.deferred.column_parallel import LOSS, into_main_grad, main_grad_of
from logitless.errors import LogitlessError
from logitless.operands import Kept, Logits
from logitless.operands.kept import Scope
from logitless.rows import Rows
from logitless.score import logprobs
from logitless.seams import placed
from logitless.spec import EntropyMode, Head, TokenStats

OVERWRITE = ("float32", "always", "never")


# The cross entropies.


@replaces(
    "megatron.core.tensor_parallel.cross_entropy",
    signature={"0.19 - 0.20": (), "0.16 - 0.18": ("tp_group",)},
    also_in=("megatron.core.tensor_parallel",),
)
def vocab_parallel_cross_entropy(
    options: Options, vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None
) -> Any:
    """Without a group, over that of ``parallel_state``."""
    if label_smoothing != 0.0:
        return PassOn("label smoothing")
    group = tensor_group() if tp_group is None else tp_group
    return _cross_entropy("cross entropy", vocab_parallel_logits, target, group, options)


@replaces(
    "megatron.core.fusions.fused_cross_entropy",
    also_in=("megatron.core.models.common.language_module.language_module",),
)
def fused_vocab_parallel_cross_entropy(
    options: Options, vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any
) -> Tensor:
    """Gradients keep the dtype of the logits."""
    return _cross_entropy("fused cross entropy", vocab_parallel_logits, target, tp_group, options)


def _cross_entropy(where: str, logits: Tensor, target: Tensor, group: Any, options: Options) -> Tensor:
    """``[s, b]`` float32 losses from ``[s, b, V']`` logits."""
    audit: Audit = options["audit"]
    check_ids("target", target, tuple(logits.shape[:-1]))
    overwrite = _may_overwrite(logits, options["overwrite_logits"])
    operand, target = placed(logits, even_shard(group, logits.shape[-1]), overwrite=overwrite), target.long()
    out = logprobs(operand, target)
    audit.of_logits(where, operand, target, logprob=out.logprob)
    return -out.logprob.float()


def _may_overwrite(logits: Tensor, rule: str) -> bool:
    """Whether backward may overwrite the logits: never a leaf or a view, which other code can still read."""
    wanted = rule == "always" or (rule == "float32" and logits.dtype == torch.float32)
    return wanted and logits.requires_grad and not logits.is_leaf and not logits._is_view() and logits.is_contiguous()


# The models.


FORWARD = (
    "(self, input_ids, position_ids, attention_mask, decoder_input=None, labels=None, inference_context=None, "
    "packed_seq_params=None, extra_block_kwargs=None, runtime_gather_output=None, *, inference_params=None, "
    "loss_mask=None, padding_mask=None"
)


@replaces(
    "megatron.core.models.gpt.gpt_model",
    "GPTModel.forward",
    {
        "0.18 - 0.20": f"{FORWARD}, output_processor=None, output_processor_context=None)",
        "0.17": f"{FORWARD}, is_spec_decode=None)",
        "0.16": f"{FORWARD})",
    },
)
def forward(original: Callable[..., Any], options: Options, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The model is deferred, and then runs its own."""
    if options["heads"].defer(self) and not _uses_transformer_engine(self.config):
        # Losses go to the cross entropies above, which are counted and audited.
        vars(self).pop(LOSS, None)
    return original(self, *args, **kwargs)


def _uses_transformer_engine(config: Any) -> bool:
    return bool(config.cross_entropy_loss_fusion) and config.cross_entropy_fusion_impl == "te"


# The output processor.


@dataclass(frozen=True, eq=False)
class Scoring:
    """A request to the output processor: the ``output_processor_context`` of a forward pass.

    Args:
        rows: the rows to score, made for the local ``[b, s]`` batch (``Rows.padded``) or pack (``Rows.packed``);
            None scores every position against the ``labels`` given to the model.
        entropy, head, kept, memory: as for :func:`logitless.logprobs`.
        scope: what entropy and log Z are over, in place of the scope of ``kept``.
        match: as for :class:`logitless.Logits`.

    >>> Scoring(head=Head(temperature=0.7), entropy="value").entropy
    'value'
    """

    rows: Rows | None = None
    entropy: EntropyMode = None
    head: Head | None = None
    kept: Kept | None = None
    scope: Scope | None = None
    match: Literal["bfloat16", "float16"] | None = None
    memory: int | str = "256MiB"


def output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None = None,
    labels: Tensor | None = None,
    context: Scoring | None = None,
    scale_logits: Callable[[Tensor], Tensor] | None = None,
    **_: Any,
) -> TokenStats:
    """Log-probs, entropy and log Z from the hidden states of a ``GPTModel``, without its logits.

    Pass it to ``GPTModel.forward`` as ``output_processor``; Megatron gives it the keywords.

    Args:
        hidden_states: ``[s, b, h]``, ``[s / TP, b, h]`` under sequence parallelism.
        output_layer: the model's ``ColumnParallelLinear``; its group, sequence parallelism and gradient accumulation
            fusion are honoured.
        output_weight: the weight shared with the embedding, or None for the weight of ``output_layer``.
        labels: ``[b, s]`` next tokens, used where the context has no rows; -100 leaves a position out.
        context: :class:`Scoring`.
        scale_logits: the model's function that scales logits; it must be a multiplication.

    Returns:
        :class:`TokenStats` of ``[R]`` tensors in the order of the rows, or ``[b, s]`` for labels. Megatron's
        half-precision wrapper turns it into a plain tuple.
    """
    asked = Scoring() if context is None else context
    if not isinstance(asked, Scoring):
        raise LogitlessError(f"output_processor: context must be a Scoring or None but is {type(context).__name__}.")
    check_head("output_processor", getattr(output_layer, "config", None))
    if hidden_states.dim() != 3:
        raise LogitlessError(f"output_processor: hidden_states must be [s, b, h] but is {list(hidden_states.shape)}.")
    weight = output_layer.weight if output_weight is None else output_weight
    shard = even_shard(_group_of(output_layer), weight.shape[0])
    split = shard is not None and bool(output_layer.sequence_parallel)
    length = hidden_states.shape[0] * (shard.group.size() if shard is not None and split else 1)
    rows = _rows_or_labels(asked.rows, labels, length, hidden_states.shape[1])
    main_grad = main_grad_of(output_layer, weight)
    logits = Logits(
        hidden_states,
        weight if main_grad is None else into_main_grad(weight),
        bias=output_layer.bias,
        shard=shard,
        sequence_parallel=split,
        hidden_grad="partial" if getattr(output_layer, "disable_grad_reduce", False) else "reduced",
        weight_grad=main_grad,
        match=asked.match,
    )
    out = logprobs(
        logits,
        rows,
        entropy=asked.entropy,
        head=_scaled(asked.head or Head(), scale_logits),
        kept=in_scope("output_processor", asked.kept, asked.scope),
        memory=asked.memory,
    )
    return out if asked.rows is not None else out.each(lambda x: x.T.contiguous())


@contextmanager
def scoring(model: Any, context: Scoring) -> Iterator[None]:
    """For Megatron-Core before 0.18: inside the block, ``model(...)`` returns what :func:`output_processor` returns.

    Args:
        model: a ``GPTModel``, wrapped or not. Stages before the last are left alone.
        context: the request, as for :func:`output_processor`.
    """
    gpt = model
    while hasattr(gpt, "module"):
        gpt = gpt.module
    _check_model(gpt)

    def postprocess(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(type(gpt)._postprocess).bind(gpt, hidden_states, *args, **kwargs).arguments
        tied = gpt.shared_embedding_or_output_weight() if gpt.share_embeddings_and_output_weights else None
        labels = given.get("labels")
        shared = {"output_layer": gpt.output_layer, "output_weight": tied, "labels": labels, "context": context}
        return output_processor(hidden_states=hidden_states, **shared)

    if gpt.post_process:
        gpt._postprocess = postprocess
    try:
        yield
    finally:
        vars(gpt).pop("_postprocess", None)


POSTPROCESS = (
    "(self, hidden_states, input_ids, position_ids, labels, rotary_pos_emb, rotary_pos_cos, rotary_pos_sin, "
    "mtp_in_postprocess=None, loss_mask=None, decoder_input=None, attention_mask=None, inference_params=None, "
    "packed_seq_params=None, sequence_len_offset=None, runtime_gather_output=None, extra_block_kwargs=None, "
    "inference_context=None)"
)
"""Of 0.16; 0.17 has one more parameter."""


def _check_model(gpt: Any) -> None:
    method = getattr(type(gpt), "_postprocess", None)
    if method is None:
        raise LogitlessError(f"scoring: model must be a GPTModel, wrapped or not, but holds a {type(gpt).__name__}.")
    if "output_processor" in inspect.signature(type(gpt).forward).parameters:
        raise LogitlessError(
            "scoring: this Megatron-Core has the hook itself. Call the model with output_processor=output_processor, "
            "output_processor_context=context instead."
        )
    if plain_signature(method) not in (POSTPROCESS, POSTPROCESS.replace(")", ", is_spec_decode=None)")):
        raise LogitlessError(
            f"scoring: {type(gpt).__name__}._postprocess has the signature {plain_signature(method)}, but this stands "
            f"in for {POSTPROCESS}. Tested with Megatron-Core {', '.join(HOST.versions)}."
        )
    check_head("scoring", gpt.config)
    if getattr(gpt.config, "mtp_num_layers", None):
        raise LogitlessError("scoring: multi-token prediction is computed where scoring stands in. Turn it off.")
    if "_postprocess" in vars(gpt):
        raise LogitlessError("scoring: this model is being scored already. One block at a time.")


def check_head(caller: str, config: Any) -> None:
    """Raise where the model multiplies with an MXFP8 head, whose logits are not those of its weight."""
    if getattr(config, "fp8_output_proj", False):
        raise LogitlessError(
            f"{caller}: the model's config has fp8_output_proj=True, so its head multiplies in MXFP8, and scores from "
            f"hidden states and the weight would be of another distribution. Set fp8_output_proj=False, or score the "
            f"logits that the model returns."
        )


def check_model_head(caller: str, model: Any) -> None:
    """:func:`check_head` of a model, wrapped or not, or of the language model in it."""
    while hasattr(model, "module"):
        model = model.module
    check_head(caller, getattr(getattr(model, "language_model", model), "config", None))


def _rows_or_labels(rows: Rows | None, labels: Tensor | None, length: int, batch: int) -> Rows | Tensor:
    """Rows of ``[s, b]`` tokens from rows of a ``[b, s]`` batch, or labels transposed to ``[s, b]``."""
    if rows is None:
        if labels is None:
            raise LogitlessError("output_processor: nothing to score. Give Scoring(rows=...), or labels to the model.")
        check_ids("output_processor: labels", labels, (batch, length))
        return labels.long().T.contiguous()
    if rows.num_tokens is not None and rows.num_tokens != length * batch:
        raise LogitlessError(
            f"output_processor: rows were made for {rows.num_tokens} tokens ({list(rows.token_shape or ())}) but the "
            f"model has {batch} x {length}."
        )
    if batch == 1:
        return rows
    index = rows.index % length * batch + rows.index // length
    return replace(rows, index=index, token_shape=(length, batch), in_order=False)


def _group_of(output_layer: Any) -> Any:
    group = getattr(output_layer, "tp_group", None)
    return tensor_group() if group is None else group


def _scaled(head: Head, scale_logits: Callable[[Tensor], Tensor] | None) -> Head:
    if scale_logits is None:
        return head
    zero, one, two = scale_logits(torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)).tolist()
    if zero != 0 or one == 0 or two != 2 * one:
        raise LogitlessError(
            f"output_processor: scale_logits must multiply but turns 0, 1, 2 into {zero}, {one}, {two}. "
            f"Say what it does in Scoring(head=Head(...)) and pass scale_logits=None."
        )
    return replace(head, scale=head.scale * one)


HOST = Host(
    name="megatron",
    package="megatron.core",
    versions=("0.16 - 0.20",),
    replacements=lambda _: [vocab_parallel_cross_entropy, fused_vocab_parallel_cross_entropy],
    options={
        "overwrite_logits": Option(
            "float32",
            "which logits backward may overwrite with their gradient: float32 (as Megatron), always, never",
            OVERWRITE,
        ),
    },
    distribution="megatron-core",
    heads=lambda _: [forward],
    logits="deferred",
)
