"""verl: which rows reach its fused heads, under ``install("verl", rows_before_head=True)``.

    FSDP      prepare_model_inputs                                     shift_labels of the packed batch      (replaced)
    Megatron  prepare_model_inputs                                     remembers the response tokens         (replaced)
              get_mcore_forward_fused_model_engine_fn                  labels of the fused forward           (replaced)

A label becomes -100 where verl cuts its result away: it reads those of response tokens, and of tokens in the loss mask
in supervised training. The fused heads multiply the other rows alone, and put zeros here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from logitless.adapters.replacing import replaces
from logitless.errors import LogitlessError
from logitless.spec import IGNORE

MEGATRON_ENGINE = "verl.workers.engine.megatron.transformer_impl"

READ = "_logitless_read"
"""Attribute of a batch's ids, from the Megatron engine's inputs to its forward: the tokens whose results are read."""


def response_tokens(batch: Any) -> Tensor | None:
    """``[T]`` of a packed batch: whether a token is one of its response; None where a batch has no responses.

    The lengths are those that verl itself cuts results with: of nested responses, or of the attention mask.
    """
    prompts, responses = batch.get("prompts", None), batch.get("responses", None)
    if prompts is None or responses is None:
        return None
    if responses.is_nested:
        counts = responses.offsets().diff()
    else:
        counts = batch["attention_mask"][:, prompts.shape[1] :].sum(dim=1)
    ids = batch["input_ids"]
    stop, lengths, total = ids.offsets()[1:], ids.offsets().diff(), ids.values().shape[0]
    first = torch.repeat_interleave(stop - counts.to(stop), lengths, output_size=total)
    return torch.arange(total, device=first.device) >= first


def tokens_in_loss(batch: Any) -> Tensor | None:
    """``[T]`` loss mask of a supervised batch, which has one over whole sequences; None for any other mask."""
    mask, ids = batch.get("loss_mask", None), batch["input_ids"]
    if mask is None or not mask.is_nested or mask.values().shape != ids.values().shape:
        return None
    return mask.values() != 0


@replaces("verl.workers.engine.fsdp.transformer_impl", "FSDPEngineWithLMHead.prepare_model_inputs")
def fsdp_inputs(original: Callable[..., Any], self: Any, micro_batch: Any) -> Any:
    """The engine gives fused heads their shifted labels."""
    inputs, output_args = original(self, micro_batch)
    labels = inputs.get("shift_labels")
    if labels is None:
        return inputs, output_args
    tokens = response_tokens(micro_batch)
    tokens = tokens_in_loss(micro_batch) if tokens is None else tokens
    if tokens is not None:
        # A row is that of the token before; verl shifts its labels, and the loss mask, by the same roll.
        # Without Ulysses verl 0.8 pads nothing, and says nothing of it.
        rows = functional.pad(tokens.roll(-1), (0, output_args.get("pad_size", 0)))
        inputs["shift_labels"] = labels.masked_fill(~_local(rows, labels), IGNORE)
    return inputs, output_args


def _local(rows: Tensor, labels: Tensor) -> Tensor:
    """This rank's part of the rows, where Ulysses cuts the packed batch into equal parts."""
    here = labels.shape[-1]
    if rows.shape[0] == here:
        return rows
    start = importlib.import_module("verl.utils.ulysses").get_ulysses_sequence_parallel_rank() * here
    if rows.shape[0] % here or start + here > rows.shape[0]:
        raise LogitlessError(f"rows_before_head: shift_labels has {here} labels, of a batch of {rows.shape[0]}.")
    return rows[start : start + here]


@replaces(MEGATRON_ENGINE, "MegatronEngineWithLMHead.prepare_model_inputs", optional=True)
def megatron_inputs(original: Callable[..., Any], self: Any, batch: Any) -> Any:
    """The ids know which of them are read."""
    inputs = original(self, batch)
    # Layers that predict further tokens take the labels too, and have no word for "left out".
    if not getattr(getattr(self, "tf_config", None), "mtp_num_layers", None):
        setattr(inputs["input_ids"], READ, response_tokens(batch))
    return inputs


@replaces("verl.models.mcore.registry", also_in=("verl.models.mcore",), optional=True)
def get_mcore_forward_fused_model_engine_fn(original: Callable[..., Any], hf_config: Any) -> Callable[..., Any]:
    """The forward gets labels for the tokens that are read.

    The labels are the batch's ids; verl shifts them where it packs them.
    """
    forward = original(hf_config)

    def fused_forward(*args: Any, input_ids: Any, labels: Any, **others: Any) -> Any:
        read = getattr(input_ids, READ, None)
        if read is not None:
            values = labels.values().masked_fill(~read, IGNORE)
            labels = torch.nested.nested_tensor_from_jagged(values, labels.offsets())
        return forward(*args, input_ids=input_ids, labels=labels, **others)

    return fused_forward


BEFORE_THE_HEAD = (fsdp_inputs, megatron_inputs, get_mcore_forward_fused_model_engine_fn)
