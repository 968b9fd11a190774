"""Logits that exist: the rows of a call as a matrix, and the buffer of their gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from logitless.backends.contract import Problem
from logitless.call import Call
from logitless.errors import LogitlessError


def given_problem(logits: Tensor, index: Tensor | None, column: Tensor, gain: Tensor, call: Call) -> Problem:
    """The selected rows of logits, as backends take them."""
    matrix, index = as_matrix(logits, index, call.caller)
    return Problem(
        logits=matrix,
        index=index,
        column=column,
        gain=gain,
        squash=call.squash,
        columns=call.columns,
        entropy=call.entropy,
        memory=call.memory,
        unit=call.unit,
        found=call.found_here,
        canonical=call.canonical,
    )


def as_matrix(logits: Tensor, index: Tensor | None, caller: str) -> tuple[Tensor, Tensor | None]:
    """``[T, V]`` view of ``[..., V]`` logits, and the index into it, None for all rows in order. Never a copy.

    Leading dimensions that do not collapse, as in ``x[:, :-1]``, become rows with gaps between them: the view spans the
    gaps and the index steps over them.
    """
    lead, width = logits.shape[:-1], logits.shape[-1]
    if logits.is_contiguous():
        return logits.view(lead.numel(), width), index
    strides = logits.stride()[:-1]
    long = [n for n, size in zip(strides, lead, strict=True) if size > 1]
    row_stride = min([n for n in long if n > 0] or [max(width, 1)])
    if any(n % row_stride for n in long):
        raise LogitlessError(
            f"{caller}: logits of shape {list(logits.shape)} have strides {list(logits.stride())}, which are not whole "
            f"steps of one row. Pass logits.contiguous() (a copy), or the tensor this view was cut from."
        )
    rest = torch.arange(lead.numel(), device=logits.device) if index is None else index
    row = torch.zeros_like(rest)
    for size, stride in zip(reversed(lead), reversed(strides), strict=True):
        row, rest = row + rest % size * (stride // row_stride), rest // size
    last = sum((size - 1) * (stride // row_stride) for size, stride in zip(lead, strides, strict=True) if size > 1)
    return logits.as_strided((last + 1, width), (row_stride, 1)), row


def gradient_buffer(
    logits: Tensor, index: Tensor | None, problem: Problem, dtype: torch.dtype, overwrite: bool
) -> tuple[Tensor, Tensor | None]:
    """The matrix that receives the gradient, and the rows of it that correspond to the problem's rows."""
    if overwrite:
        return problem.logits, problem.index
    shape = (logits.shape[:-1].numel(), logits.shape[-1])
    if index is None and problem.index is not None:
        # All rows are scored in order, but the logits have gaps between their rows, and the buffer has none.
        index = torch.arange(shape[0], device=logits.device)
    return torch.empty(shape, dtype=dtype, device=logits.device), index
