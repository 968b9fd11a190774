"""SkyRL's FSDP worker: its model's deferred head, its functions on logits, and which rows reach the head.

    HFModelWrapper.__call__          the head of its model is deferred before the first call
    HFModelWrapper.forward           has the model multiply the rows that are read, by ``logits_to_keep``     (wrapped)
    logprobs_from_logits             score these rows, with zeros at all others                              (replaced)
    chunked_entropy_from_logits

The worker cuts the last ``num_actions`` results out of every line of log-probs and entropies. Forwards left to SkyRL as
they are, and counted as passed on: models without ``logits_to_keep``, models of images, a list of several num_actions.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.adapters.heads import deferring
from logitless.adapters.host import PassOn, Replacement
from logitless.adapters.replacing import Options, held, replaces
from logitless.adapters.scoring import entropy_of_logits, score_overwriting
from logitless.errors import LogitlessError

TORCH_UTILS = "skyrl.backends.skyrl_train.utils.torch_utils"
WRAPPER = "skyrl.backends.skyrl_train.workers.model_wrapper"


class Read(NamedTuple):
    """The ``columns`` of the model's input, which has ``length``, whose results are read."""

    columns: Tensor
    length: int

    def spread(self, values: Tensor) -> Tensor:
        """``[B, length]`` with the values of the columns that are read, and zeros at all others."""
        return values.new_zeros(values.shape[0], self.length).index_copy(1, self.columns, values)


_read: ContextVar[Read | None] = ContextVar("rows that are read", default=None)
"""Rows that have logits, while a forward of SkyRL's wrapper runs; None for all."""


@replaces(
    WRAPPER,
    "HFModelWrapper.forward",
    "(self, sequences, num_actions, attention_mask=None, temperature=1.0, return_output=False, compute_entropy=False, "
    "entropy_requires_grad=True, pixel_values=None, image_grid_thw=None, mm_token_type_ids=None)",
    optional=True,
)
def forward(
    original: Callable[..., Any],
    self: Any,
    sequences: Tensor,
    num_actions: Any,
    attention_mask: Tensor | None = None,
    *rest: Any,
    **more: Any,
) -> Any:
    """The same forward, of a model that multiplies the rows that are read."""
    why = _cannot(self, num_actions)
    if why is not None:
        return PassOn(why)
    is_read = _is_read(self, sequences, num_actions, attention_mask)
    read = Read(is_read.nonzero().squeeze(1), len(is_read))
    hook = self.model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "logits_to_keep": read.columns}), with_kwargs=True
    )
    # A wrapper keeps the function of its making, which may be SkyRL's own, from before ours was installed.
    before = self.chunked_entropy_from_logits_fn
    self.chunked_entropy_from_logits_fn = sys.modules[WRAPPER].chunked_entropy_from_logits
    try:
        with held(_read, read):
            return original(self, sequences, num_actions, attention_mask, *rest, **more)
    finally:
        self.chunked_entropy_from_logits_fn = before
        hook.remove()


def _cannot(wrapper: Any, num_actions: Any) -> str | None:
    """Why all rows are multiplied."""
    if isinstance(num_actions, list) and len(num_actions) != 1:
        return "several num_actions"
    if wrapper.is_vlm:
        return "a model of images"
    heads = (x for x in wrapper.model.modules() if hasattr(x, "get_output_embeddings"))
    takes = any("logits_to_keep" in inspect.signature(type(x).forward).parameters for x in heads)
    return None if takes else "a model without logits_to_keep"


def _is_read(wrapper: Any, sequences: Tensor, num_actions: Any, attention_mask: Tensor | None) -> Tensor:
    """Whether the row of each column of the model's input is read, in this rank's part of the sequence."""
    actions = int(num_actions[0] if isinstance(num_actions, list) else num_actions)
    length = sequences.shape[1]
    column = torch.arange(length, device=sequences.device)
    read = (column >= length - 1 - actions) & (column < length - 1)
    if wrapper.remove_microbatch_padding:
        if attention_mask is None:
            raise LogitlessError("attention_mask must be given with remove_microbatch_padding but is None.")
        read = read.expand(attention_mask.shape)[attention_mask.bool()]
    if wrapper.sequence_parallel_size > 1:
        cut = sys.modules[WRAPPER].ulysses_pad_and_slice_inputs
        read = cut(read[None].long(), None, None, wrapper.sequence_parallel_size)[0][0].bool()
    return read


@replaces(TORCH_UTILS, also_in=(WRAPPER,))
def logprobs_from_logits(options: Options, logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Within a forward, of logits of the rows that are read."""
    read = _read.get()
    if read is None:
        return score_overwriting(options, logits, labels, inplace_backward)
    return read.spread(score_overwriting(options, logits, labels[:, read.columns], inplace_backward))


@replaces(TORCH_UTILS, also_in=(WRAPPER,))
def chunked_entropy_from_logits(
    options: Options,
    logits: Tensor,
    requires_grad: bool = False,
    attention_mask: Tensor | None = None,
    chunk_size: int = 1024,
) -> Tensor:
    """Positions with mask 0 are not computed."""
    if logits.dim() != 3:
        raise LogitlessError(f"logits must be [B, S, V] but is {list(logits.shape)}.")
    read = _read.get()
    if read is not None and attention_mask is not None:
        attention_mask = attention_mask[:, read.columns]
    if attention_mask is not None and attention_mask.shape != logits.shape[:-1]:
        raise LogitlessError(
            f"attention_mask shape {list(attention_mask.shape)} does not match logits shape {list(logits.shape)}: "
            f"it must be {list(logits.shape[:-1])}."
        )
    left_out = None if attention_mask is None else attention_mask == 0
    where, audit = "chunked_entropy_from_logits", options["audit"]
    entropy = entropy_of_logits(where, logits, audit, grad=requires_grad, leave_out=left_out)
    entropy = (entropy if attention_mask is None else entropy * attention_mask).to(logits.dtype)
    return entropy if read is None else read.spread(entropy)


def fsdp_replacements(options: Options) -> list[Replacement]:
    """The functions on logits and, with ``rows_before_head``, the wrapper's forward."""
    return [logprobs_from_logits, chunked_entropy_from_logits, *([forward] if options["rows_before_head"] else [])]


FSDP_HEAD = Replacement(
    module=WRAPPER,
    name="HFModelWrapper.__call__",
    signature="(self, *args, **kwargs)",
    make=deferring(lambda self, *_, **__: self.model),
    optional=True,
)
"""The wrapper of policies and references; SkyRL's critic is of another class. Its forward is replaced above."""
