"""Single logits of a row: of the ids that a sampler kept, or that a teacher sent. No product with the vocabulary.

    forward     x[e] = hidden[row[e]] . weight[id[e]]  for every entry; where logits exist, a lookup
    backward    dx[e]  ->  d_hidden[row] = sum of dx[e] weight[id[e]]        entries in the order of rows
                           d_weight[id] = sum of dx[e] hidden[row[e]]        entries sorted by id, once

A LoRA's y and b are multiplied in the same way, and added.

Everything is a flat vector over the entries, besides the operands and their gradients. Sums run over entries in a fixed
order and nothing is added atomically, so that results have the same bits on every run, whatever else is in the batch.
A row with one id has log-prob 0 and gradient 0: its operands are not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.call import PLAIN, Call, Operands, members_of
from logitless.collectives import sum_over
from logitless.errors import LogitlessError, no_second_derivative
from logitless.notes import explained
from logitless.operands import Kept, Logits, Teacher, Teachers
from logitless.operands.teacher import columns_of_ids
from logitless.readings.support import Entries, KeptLogits, Support, rows_of, write_kept
from logitless.sources.given import as_matrix, given_problem, gradient_buffer
from logitless.sources.linear import gathered_tokens, is_split, reduced_gradient, require_weight
from logitless.sources.teachers import (
    named_twice,
    own_call,
    own_gain,
    own_operands,
    own_vocabulary,
    tokens_beside,
)
from logitless.spec import IGNORE


def entry_logits(operands: Operands, support: Support, read: Tensor, call: Call, whole: bool = True) -> Tensor:
    """``[E]`` raw logits of a support's entries, with a graph; 0 for second copies and where ``read`` is False. With
    ``whole`` they are summed over the shards of a vocabulary group; without, ids of other shards have 0, too."""
    vectors = (*support.entries, support.lengths, read)
    return _EntryLogits.apply(*operands, *vectors, call, whole)  # pyright: ignore[reportReturnType]


def id_logits(operands: Operands, ids: Tensor, call: Call) -> Tensor:
    """``[R, K]`` raw logits of ``ids``, each at most once in a row, with a graph; 0 where an id is negative."""
    rows, count = ids.shape
    row = torch.arange(rows, device=ids.device).repeat_interleave(count)
    once = torch.ones_like(row, dtype=torch.bool)
    entries = Entries(row, ids.flatten(), once, ~once)
    support = Support(call.rows.target, entries, torch.full_like(row[:rows], count), call.start, call.vocab_size)
    return entry_logits(operands, support, once, call).view(ids.shape)


class _Saved(NamedTuple):
    """Tensors for backward, by name."""

    logits: Tensor | None
    hidden: Tensor | None
    weight: Tensor | None
    y: Tensor | None
    b: Tensor | None
    row: Tensor
    ids: Tensor
    once: Tensor
    is_target: Tensor
    lengths: Tensor
    read: Tensor

    def support(self, call: Call) -> Support:
        entries = Entries(self.row, self.ids, self.once, self.is_target)
        return Support(call.rows.target, entries, self.lengths, call.start, call.vocab_size)

    def place(self, call: Call) -> tuple[Tensor, Tensor]:
        """The place of each entry among the columns here, and whether it is one of them and read."""
        column, here = place_of(self.support(call), call)
        return column, here & self.read


class _EntryLogits(torch.autograd.Function):
    """The seam between autograd and the plain functions of this file."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor | None,
        hidden: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        y: Tensor | None,
        b: Tensor | None,
        *vectors: Any,
    ) -> Tensor:
        *entries, call, whole = vectors
        saved = _Saved(logits, hidden, weight, y, b, *entries)
        support, place = saved.support(call), saved.place(call)
        if logits is None:
            raw = raw_logits(Operands(None, hidden, weight, bias, y, b), support, place, call)
        else:
            matrix, index = as_matrix(logits.detach(), call.index, call.caller)
            at = support.entries.row if index is None else index[support.entries.row]
            raw = matrix[at, place[0]].to(call.gain.dtype) if call.columns else call.gain.new_zeros(len(at))
            raw = torch.where(place[1], raw, 0.0)
        ctx.save_for_backward(*saved)
        # The buffer for the weight's gradient is in the call and not saved: others may add to it before backward does.
        ctx.unchanged = call.unchanged()
        ctx.call, ctx.bias_dtype, ctx.spent = call, None if bias is None else bias.dtype, False
        return sum_over(call.group, raw) if whole and call.group is not None else raw

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        call: Call = ctx.call
        if torch.is_grad_enabled():
            raise no_second_derivative(call.caller, ", or use torch.log_softmax of computed logits for this term")
        if ctx.spent:
            raise spent(call.caller)
        ctx.unchanged.check()
        saved = _Saved(*ctx.saved_tensors)
        buffer = None if call.linear is None else call.linear.weight_grad
        over = saved.logits if call.overwrite else None
        with explained(call.caller, call.budget, weight_grad=buffer, logits=over):
            ctx.spent = call.overwrite
            ignored = (call.rows.target == IGNORE)[saved.row]
            d_raw = upstream.to(call.gain.dtype).masked_fill(ignored, 0.0)
            entries = saved.support(call).transformed(d_raw, *saved.place(call), call.gain, 0.0)
            d_raw = torch.where(entries.here, d_raw, 0.0)
            if saved.logits is not None:
                return _given_gradient(entries, d_raw, saved.logits, call), *(None,) * 13
            found = _head_gradients(ctx, entries, d_raw, saved, call)
            return None, *found, *(None,) * 8


def spent(caller: str) -> LogitlessError:
    """The error of a second backward through overwritten logits."""
    return LogitlessError(
        f"{caller}: second backward through a call with overwrite=True, but the first one has replaced the logits by "
        f"their gradient, or begun to. Use overwrite=False to keep the graph, or run forward again."
    )


def _given_gradient(entries: KeptLogits, d_raw: Tensor, logits: Tensor, call: Call) -> Tensor:
    """Gradient of logits that exist: 0 but at the entries, in a buffer of its own or over the logits."""
    problem = given_problem(logits, call.index, call.column, call.gain, call)
    out, out_index = gradient_buffer(logits, call.index, problem, logits.dtype, call.overwrite)
    out.zero_()
    write_kept(entries, d_raw, out, out_index)
    return logits.detach() if call.overwrite else out.view(logits.shape)


def _head_gradients(ctx: Any, entries: KeptLogits, d_raw: Tensor, saved: _Saved, call: Call) -> tuple[Any, ...]:
    """Gradients of hidden states, weight, bias and a LoRA's two factors."""
    hidden, weight, low = saved.hidden, saved.weight, Operands(y=saved.y, b=saved.b).low
    assert hidden is not None
    assert weight is not None
    _, want_hidden, want_weight, want_bias, want_y, want_b, *_ = ctx.needs_input_grad
    require_weight(weight, call)
    d_hidden = tokens_gradient(entries, d_raw, hidden, weight, call) if want_hidden else None
    d_y = tokens_gradient(entries, d_raw, *low, call) if low and want_y else None
    d_weight = d_bias = d_b = None
    if want_weight or want_bias or want_b:
        by_id = ById.of(entries, d_raw, call)
        # The weight comes last: where another one fails, the caller's buffer is as it was.
        d_bias = by_id.bias_gradient(weight, ctx.bias_dtype) if want_bias else None
        d_b = by_id.rows_gradient(*low) if low and want_b else None
        d_weight = by_id.weight_gradient(hidden, weight) if want_weight else None
    return d_hidden, d_weight, d_bias, d_y, d_b


def raw_logits(operands: Operands, support: Support, place: tuple[Tensor, Tensor], call: Call) -> Tensor:
    """``[E]`` logits of all entries as the head's product would have them; 0 where ``place`` says they are not here."""
    column, asked = place
    hidden, weight, bias, low = operands.hidden, operands.weight, operands.bias, operands.low
    assert hidden is not None
    assert weight is not None
    tokens, raw = gathered_tokens(hidden, call), call.gain.new_zeros(len(column))
    if call.columns:
        at = support.entries.row if call.index is None else call.index[support.entries.row]
        read = torch.where(asked, column, -1)
        call.backend.dots(tokens, at, weight.detach(), read, raw, memory=call.memory)
        if low is not None:
            (y, b), more = low, torch.zeros_like(raw)
            call.backend.dots(gathered_tokens(y, call), at, b.detach(), read, more, memory=call.memory)
            raw += more
        if bias is not None:
            raw += torch.where(asked, bias.detach()[column].to(raw.dtype), 0.0)
    return raw.to(call.logits_dtype).to(call.gain.dtype)


def place_of(support: Support, call: Call) -> tuple[Tensor, Tensor]:
    """Each id's place among the columns here, and whether it is one of them. A second copy of an id is not."""
    column, here = support.place(0, call.columns)
    return column, here & support.entries.once


def tokens_gradient(logits: KeptLogits, d_raw: Tensor, hidden: Tensor, weight: Tensor, call: Call) -> Tensor:
    """Gradient of hidden (or y of a LoRA, with its b for a weight), in its shape, from that of the entries' logits."""
    shape, split = hidden.shape, is_split(call)
    num_tokens = shape[:-1].numel() * (call.group.size() if split else 1)
    tokens = torch.empty((num_tokens, shape[-1]), dtype=hidden.dtype, device=hidden.device)
    ends = torch.nn.functional.pad(logits.lengths.cumsum(0), (1, 0))
    if call.columns and call.num_rows:
        column, index = logits.column, call.index
        call.backend.sums(d_raw, weight.detach(), column, ends, tokens, index, add=False, memory=call.memory)
    else:
        tokens.zero_()
    return reduced_gradient(tokens, shape, call)


class ById(NamedTuple):
    """Entries sorted by the id's column here; ids of other shards, second copies and rows left out come last.

    ``starts`` ``[columns + 1]`` says where the entries of each column begin.
    """

    d_raw: Tensor
    row: Tensor
    column: Tensor
    starts: Tensor
    call: Call

    @staticmethod
    def of(logits: KeptLogits, d_raw: Tensor, call: Call) -> ById:
        # Columns of half the bits take half the passes of a sort.
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
        linear = self.call.linear
        assert linear is not None
        if linear.weight_grad is not None:
            self.write(hidden, self.starts, linear.weight_grad[: self.call.columns], add=True)
            return None
        if not linear.sparse_weight_grad:
            return self.rows_gradient(hidden, weight)
        # A sparse gradient is the one place that asks the device how many different ids there are.
        ids = self.column[: int(self.starts[-1])].unique_consecutive().to(torch.int64)
        values = torch.empty((len(ids), weight.shape[1]), dtype=weight.dtype, device=weight.device)
        self.write(hidden, torch.cat([self.starts[ids], self.starts[-1:]]), values)
        # Torch warns where nobody says whether to check.
        with torch.sparse.check_sparse_tensor_invariants(False):
            return torch.sparse_coo_tensor(ids[None], values, weight.shape, is_coalesced=True)

    def rows_gradient(self, x: Tensor, weight: Tensor) -> Tensor:
        """``[V, D]`` gradient of what is multiplied by ``x``: the weight, or b of a LoRA."""
        out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        self.write(x, self.starts, out[: self.call.columns])
        out[self.call.columns :].zero_()
        return out

    def write(self, x: Tensor, starts: Tensor, out: Tensor, add: bool = False) -> None:
        """The gradient of one row of the weight for each row of ``out``."""
        call = self.call
        # A rank without columns has its part of the tokens, too.
        tokens = gathered_tokens(x, call)
        if len(out):
            at = self.row if call.index is None else call.index[self.row]
            call.backend.sums(self.d_raw, tokens, at, starts, out, add=add, memory=call.memory, uneven=True)


# Single logits of teachers, over the ids that samplers kept.


def entries_of(given: Teacher | Teachers, support: Support, read: Tensor, call: Call) -> Tensor:
    """``[E]`` logits in float64 of each row's own teacher, transformed; -inf for ids that the teacher does not have."""
    members, row = members_of(given), support.entries.row
    total = call.gain.new_zeros((2, len(row)))
    gain, squash = torch.ones_like(total[0], dtype=torch.float64), torch.zeros_like(total[0], dtype=torch.float64)
    for number, member in enumerate(members):
        mine = torch.ones_like(read) if isinstance(given, Teacher) else given.which[row] == number
        total += torch.where(mine, _member_entries(member, support, read & mine, call), 0.0)
        gain = torch.where(mine, own_gain(member, call, torch.float64)[row], gain)
        squash = torch.where(mine, (member.head or PLAIN).squash, squash)
    if call.group is not None:
        total = sum_over(call.group, total)
        total[0].masked_fill_(named_twice(total[1], call.caller), torch.nan)
    raw, has = total.double()
    z = gain * torch.where(squash == 0, raw, torch.tanh(raw * squash))
    return torch.where(has > 0, z, -torch.inf)


def _member_entries(teacher: Teacher, support: Support, read: Tensor, call: Call) -> Tensor:
    """``[2, E]`` raw logits of one teacher's columns that are here, and 1 where the column is here."""
    _, columns = own_vocabulary(teacher, call)
    column, here = support.place(0, columns)
    if teacher.ids is not None:
        ids, source = support.entries.ids, columns_of_ids(teacher.ids[:columns], call.vocab_size)
        column = torch.where((ids >= 0) & (ids < len(source)), source[ids.clamp(0, len(source) - 1)], -1)
        here, column = column >= 0, column.clamp_min(0)
    index = tokens_beside(teacher, call)
    if isinstance(teacher.logits, Logits):
        own = replace(own_call(teacher, call, columns, call.gain), index=index)
        raw = raw_logits(own_operands(teacher), support, (column, here & read), own)
    else:
        logits = teacher.tokens.reshape(teacher.tokens.shape[:-1].numel(), teacher.width)
        at = index[support.entries.row]
        raw = logits[at, column].to(call.gain.dtype) if columns else call.gain.new_zeros(len(at))
    return torch.stack([torch.where(here & read, raw, 0.0), here.to(raw.dtype)])


def kept_of(given: Teacher | Teachers) -> Kept | None:
    """The ids that each row's own teacher kept; None where it is taken over the student's ids."""
    kept = [x.kept for x in members_of(given) if x.kept is not None]
    if isinstance(given, Teacher) or not kept:
        return kept[0] if kept else None
    row = torch.cat([rows_of(x, torch.arange(len(x.lengths), device=x.ids.device)) for x in kept])
    number = torch.cat([torch.full_like(x.ids, i) for i, x in enumerate(kept)])
    mine = number == given.which[row]
    order = row[mine].argsort(stable=True)
    lengths = torch.stack([x.lengths for x in kept]).gather(0, given.which[None])[0]
    return Kept(torch.cat([x.ids for x in kept])[mine][order], lengths)
