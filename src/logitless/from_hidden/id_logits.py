"""Logits of a few ids of every row, by dot products with those rows of the weight: no product with the vocabulary.

forward     x[e] = hidden[row[e]] . weight[id[e]] for all entries, one all_reduce if sharded
backward    d_hidden and d_weight from the entries' gradients, as over a sampler's support
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.call import Call
from logitless.collectives import sum_over
from logitless.errors import no_second_derivative
from logitless.from_hidden.projection import gathered_tokens, require_weight
from logitless.from_hidden.support import ById, place_of, raw_logits, tokens_gradient
from logitless.notes import explained
from logitless.spec import IGNORE
from logitless.support import Entries, Support


def id_logits(hidden: Tensor, weight: Tensor, ids: Tensor, call: Call) -> Tensor:
    """``[R, K]`` raw logits of ``ids``, each at most once in a row, with a graph; 0 where an id is negative."""
    support = _entries(ids, call)
    return entry_logits(hidden, weight, support, support.entries.first, call).view(ids.shape)


def entry_logits(hidden: Tensor, weight: Tensor, support: Support, read: Tensor, call: Call) -> Tensor:
    """``[E]`` raw logits of a support's entries, with a graph; 0 for second copies and where ``read`` is False."""
    vectors = (*support.entries, support.lengths, read)
    return _EntryLogits.apply(hidden, weight, call.asked.bias, *vectors, call)


class _Saved(NamedTuple):
    """What backward needs, by name."""

    hidden: Tensor
    weight: Tensor
    row: Tensor
    ids: Tensor
    first: Tensor
    is_target: Tensor
    lengths: Tensor
    read: Tensor

    def support(self, call: Call) -> Support:
        entries = Entries(self.row, self.ids, self.first, self.is_target)
        return Support(call.rows.target, entries, self.lengths, call.start, call.vocab_size)

    def place(self, call: Call) -> tuple[Tensor, Tensor]:
        """Of each entry among the columns here, and whether it is one of them and read."""
        column, here = place_of(self.support(call), call)
        return column, here & self.read


class _EntryLogits(torch.autograd.Function):
    """The seam to autograd: plain functions of ``support`` do the work."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, *vectors: Any) -> Tensor:
        *entries, call = vectors
        saved = _Saved(hidden, weight, *entries)
        raw = raw_logits(gathered_tokens(hidden, call), weight, bias, saved.support(call), saved.place(call), call)
        ctx.save_for_backward(*saved)
        # The buffer for the weight's gradient is in the call and not saved: others may add to it before backward does.
        ctx.call, ctx.bias_dtype = call, None if bias is None else bias.dtype
        # One rank has each id, and all others a 0.
        return raw if call.group is None else sum_over(call.group, raw)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        call: Call = ctx.call
        if torch.is_grad_enabled():
            raise no_second_derivative(call.asked.caller)
        saved = _Saved(*ctx.saved_tensors)
        want_hidden, want_weight, want_bias, *_ = ctx.needs_input_grad
        with explained(call.asked.caller, call.asked.memory, weight_grad=call.asked.weight_grad):
            ignored = (call.rows.target == IGNORE)[saved.row]
            d_raw = upstream.to(call.gain.dtype).masked_fill(ignored, 0.0)
            logits = saved.support(call).transformed(d_raw, *saved.place(call), call.gain, 0.0)
            d_raw = torch.where(logits.here, d_raw, 0.0)
            require_weight(saved.weight, call)
            d_hidden = tokens_gradient(logits, d_raw, saved.hidden, saved.weight, call) if want_hidden else None
            d_weight, d_bias = None, None
            if want_weight or want_bias:
                by_id = ById.of(logits, d_raw, call)
                # The bias first: where it fails, the caller's buffer is as it was.
                d_bias = by_id.bias_gradient(saved.weight, ctx.bias_dtype) if want_bias else None
                d_weight = by_id.weight_gradient(saved.hidden, saved.weight) if want_weight else None
            return d_hidden, d_weight, d_bias, *(None,) * 7


def _entries(ids: Tensor, call: Call) -> Support:
    """All places as entries of a support, in the order in which they stand."""
    rows, count = ids.shape
    row = torch.arange(rows, device=ids.device).repeat_interleave(count)
    once = torch.ones_like(row, dtype=torch.bool)
    entries = Entries(row, ids.flatten(), once, ~once)
    return Support(call.rows.target, entries, torch.full_like(row[:rows], count), call.start, call.vocab_size)
