"""Results over the sampler's support alone: dot products with a few rows of the weight, and no matrix product.

    forward     x[e] = hidden[row[e]] . weight[id[e]]  for every kept id and target  ->  statistic of each row  ->
                one all_gather if sharded  ->  results
    backward    dx[e]  ->  d_hidden[row] = sum of dx[e] weight[id[e]]        entries in the order of rows
                           d_weight[id] = sum of dx[e] hidden[row[e]]        entries sorted by id, once

Everything is a flat vector over the entries, besides the operands and their gradients. Sums run over entries in a fixed
order and nothing is added atomically, so that results have the same bits on every run, whatever else is in the batch.
A row with one id has log-prob 0 and gradient 0: its operands are not read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.backends import load
from logitless.call import Call
from logitless.errors import no_second_derivative
from logitless.from_hidden.projection import gathered_tokens, reduced_gradient, require_weight
from logitless.notes import explained
from logitless.results import row_results
from logitless.softmax import Normaliser, coefficients
from logitless.spec import IGNORE, TokenStats
from logitless.support import Entries, KeptLogits, Support, support_gradient, support_statistic


def score_support(hidden: Tensor, weight: Tensor, call: Call) -> TokenStats:
    """``[R]`` results over the support, of a call that was checked."""
    logprob, *entropy = _SupportLogProbs.apply(hidden, weight, call.asked.bias, call)
    return TokenStats(logprob, entropy[0] if entropy else None, None)


class _Saved(NamedTuple):
    """What backward needs, by name."""

    hidden: Tensor
    weight: Tensor
    row: Tensor
    ids: Tensor
    first: Tensor
    is_target: Tensor
    raw: Tensor
    reference: Tensor
    log_sum: Tensor
    logprob: Tensor
    mean: Tensor | None

    @property
    def norm(self) -> Normaliser:
        return Normaliser(self.reference, self.log_sum)

    def support(self, call: Call) -> Support:
        """That of forward, not sorted again."""
        assert call.asked.kept is not None
        entries = Entries(self.row, self.ids, self.first, self.is_target)
        return Support(call.rows.target, entries, call.asked.kept.lengths + 1, call.start, call.vocab_size)


class _SupportLogProbs(torch.autograd.Function):
    """The seam to autograd: plain functions of this file do the work."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> tuple[Tensor, ...]:
        support = call.support()
        assert support is not None
        place = place_of(support, call)
        asked = place[0], place[1] & ~support.lone()
        raw = raw_logits(gathered_tokens(hidden, call), weight, bias, support, asked, call)
        statistic = support_statistic(support.transformed(raw, *place, call.gain, call.squash))
        results = row_results(statistic, None, call.rows.target == IGNORE, call.entropy, call.group)
        ctx.set_materialize_grads(False)
        if call.asked.entropy == "value":
            ctx.mark_non_differentiable(results.entropy)
        mean = results.mean if call.asked.entropy == "grad" else None
        saved = _Saved(hidden, weight, *support.entries, raw, *results.norm, results.logprob, mean)
        ctx.save_for_backward(*saved)
        # The buffer for the weight's gradient is in the call and not saved: others may add to it before backward does.
        ctx.call, ctx.bias_dtype = call, None if bias is None else bias.dtype
        return (results.logprob,) if results.entropy is None else (results.logprob, results.entropy)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, g_logprob: Tensor | None, g_entropy: Tensor | None = None
    ) -> Any:
        call: Call = ctx.call
        if torch.is_grad_enabled():
            raise no_second_derivative(call.asked.caller, ", or use torch.log_softmax for this term")
        saved = _Saved(*ctx.saved_tensors)
        want_hidden, want_weight, want_bias, _ = ctx.needs_input_grad
        with explained(call.asked.caller, call.asked.memory, weight_grad=call.asked.weight_grad):
            support = saved.support(call)
            logits = support.transformed(saved.raw, *place_of(support, call), call.gain, call.squash)
            d_raw = _raw_gradient(logits, saved, call, g_logprob, g_entropy)
            require_weight(saved.weight, call)
            d_hidden = tokens_gradient(logits, d_raw, saved.hidden, saved.weight, call) if want_hidden else None
            d_weight, d_bias = None, None
            if want_weight or want_bias:
                by_id = ById.of(logits, d_raw, call)
                # The bias first: where it fails, the caller's buffer is as it was.
                d_bias = by_id.bias_gradient(saved.weight, ctx.bias_dtype) if want_bias else None
                d_weight = by_id.weight_gradient(saved.hidden, saved.weight) if want_weight else None
            return d_hidden, d_weight, d_bias, None


def raw_logits(
    tokens: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    support: Support,
    place: tuple[Tensor, Tensor],
    call: Call,
) -> Tensor:
    """``[E]`` logits of all entries as the head's product would have them; 0 where ``place`` says they are not here."""
    column, asked = place
    raw = call.gain.new_zeros(len(column))
    if call.columns:
        at = support.entries.row if call.index is None else call.index[support.entries.row]
        read = torch.where(asked, column, -1)
        load(call.backend).dots(tokens, at, weight.detach(), read, raw, memory=call.memory)
        if bias is not None:
            raw += torch.where(asked, bias.detach()[column].to(raw.dtype), 0.0)
    return raw.to(call.logits_dtype).to(call.gain.dtype)


def place_of(support: Support, call: Call) -> tuple[Tensor, Tensor]:
    """Each id's place among the columns here, and whether it is one of them. A second copy of an id is nowhere."""
    column, here = support.place(0, call.columns)
    return column, here & support.entries.first


def _raw_gradient(
    logits: KeptLogits, saved: _Saved, call: Call, g_logprob: Tensor | None, g_entropy: Tensor | None
) -> Tensor:
    """``[E]`` gradient of the raw logits: once per id, and 0 for ids that are elsewhere."""
    g_logprob = torch.zeros_like(saved.logprob) if g_logprob is None else g_logprob.contiguous()
    coef = coefficients(saved.logprob, saved.norm, saved.mean, g_logprob, g_entropy, None)
    d_raw = support_gradient(logits, saved.norm, coef, call.rows.target == IGNORE)
    return torch.where(logits.here, d_raw, 0.0)


def tokens_gradient(logits: KeptLogits, d_raw: Tensor, hidden: Tensor, weight: Tensor, call: Call) -> Tensor:
    """Of hidden, in its shape, from that of the entries' logits."""
    shape, split = hidden.shape, call.asked.sequence_parallel
    num_tokens = shape[:-1].numel() * (call.group.size() if split else 1)
    tokens = torch.empty((num_tokens, shape[-1]), dtype=hidden.dtype, device=hidden.device)
    ends = torch.nn.functional.pad(logits.lengths.cumsum(0), (1, 0))
    if call.columns and call.num_rows:
        load(call.backend).sums(
            d_raw, weight.detach(), logits.column, ends, tokens, call.index, add=False, memory=call.memory
        )
    else:
        tokens.zero_()
    return reduced_gradient(tokens, shape, call)


class ById(NamedTuple):
    """Entries sorted by the id's column here; those that are elsewhere, second copies or left out come last.

    Attributes:
        d_raw, row: of the sorted entries.
        column: sorted.
        starts: ``[columns + 1]`` where the entries of each column begin.
        call: what was asked for.
    """

    d_raw: Tensor
    row: Tensor
    column: Tensor
    starts: Tensor
    call: Call

    @staticmethod
    def of(logits: KeptLogits, d_raw: Tensor, call: Call) -> ById:
        # Half the bits take half the passes of a sort.
        column = torch.where(logits.here, logits.column, call.columns).to(torch.int32)
        column, order = column.sort(stable=True)
        bounds = torch.arange(call.columns + 1, device=column.device, dtype=torch.int32)
        starts = torch.searchsorted(column, bounds)
        return ById(d_raw[order], logits.row[order], column, starts, call)

    def bias_gradient(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        d_bias = self.d_raw.new_zeros(len(weight))
        inside = self.d_raw.masked_fill(self.column == self.call.columns, 0.0)
        lengths = torch.cat([self.starts.diff(), (len(inside) - self.starts[-1:])])
        total = torch.segment_reduce(inside, "sum", lengths=lengths, unsafe=True)
        d_bias[: self.call.columns] = total[:-1]
        return d_bias.to(dtype)

    def weight_gradient(self, hidden: Tensor, weight: Tensor) -> Tensor | None:
        """Dense, unless rows were asked for; None where it was added to the caller's buffer."""
        call, backend = self.call, load(self.call.backend)
        tokens = gathered_tokens(hidden, call)
        at = self.row if call.index is None else call.index[self.row]
        buffer = call.asked.weight_grad
        if buffer is not None:
            if call.columns:
                out = buffer[: call.columns]
                backend.sums(self.d_raw, tokens, at, self.starts, out, add=True, memory=call.memory, uneven=True)
            return None
        if call.asked.sparse_weight_grad:
            # The one place that asks the device how many different ids there are.
            ids = self.column[: int(self.starts[-1])].unique_consecutive().to(torch.int64)
            starts = torch.cat([self.starts[ids], self.starts[-1:]])
            values = torch.empty((len(ids), weight.shape[1]), dtype=weight.dtype, device=weight.device)
            if len(ids):
                backend.sums(self.d_raw, tokens, at, starts, values, add=False, memory=call.memory, uneven=True)
            # In so many words, or torch warns that nobody said whether to check.
            with torch.sparse.check_sparse_tensor_invariants(False):
                return torch.sparse_coo_tensor(ids[None], values, weight.shape, is_coalesced=True)
        out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        if call.columns:
            into = out[: call.columns]
            backend.sums(self.d_raw, tokens, at, self.starts, into, add=False, memory=call.memory, uneven=True)
        out[call.columns :].zero_()
        return out
