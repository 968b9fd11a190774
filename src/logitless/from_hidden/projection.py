"""Between the tokens of hidden states and the rows that are scored, there and back."""

from __future__ import annotations

import torch
from torch import Tensor

from logitless.call import Call
from logitless.collectives import gather_rows_over, scatter_sum_over, sum_over
from logitless.from_hidden.gradients import Projection


def selected_rows(hidden: Tensor, index: Tensor | None, call: Call) -> Tensor:
    """``[R, D]`` hidden states of the rows: a copy, small beside what it saves, unless the rows are all in order."""
    tokens = hidden.reshape(-1, hidden.shape[-1])
    if call.sequence_parallel:
        tokens = gather_rows_over(call.group, tokens)
    return tokens if index is None else tokens.index_select(0, index)


def projection_of(
    rows: Tensor, weight: Tensor, bias: Tensor | None, column: Tensor, gain: Tensor, call: Call
) -> Projection:
    return Projection(
        hidden=rows,
        weight=weight.detach(),
        bias=None if bias is None else bias.detach(),
        column=column,
        gain=gain,
        squash=call.squash,
        columns=call.columns,
        entropy=call.entropy is not None,
        logits_dtype=call.logits_dtype,
        tf32=call.tf32,
        backend=call.backend,
    )


def hidden_gradient(rows: Tensor, shape: torch.Size, index: Tensor | None, call: Call) -> Tensor:
    """Gradient of the tokens from that of the selected rows, summed over the group as the call asks."""
    size = call.group.size() if call.sequence_parallel else 1
    tokens = rows
    if index is not None:
        tokens = rows.new_zeros((shape[:-1].numel() * size, shape[-1])).index_copy_(0, index, rows)
    if call.sequence_parallel:
        tokens = scatter_sum_over(call.group, tokens)
    elif call.reduce_hidden and call.group is not None:
        tokens = sum_over(call.group, tokens)
    return tokens.view(shape)
