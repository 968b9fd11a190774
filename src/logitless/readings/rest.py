"""The statistic of all columns but those listed: what is left of a row beside its ids.

Subtracting the listed probabilities from 1 would leave nothing but rounding where they are nearly all there is. So the
listed columns of a copy, a few rows at a time, are set to -inf, and a backend reads what is left.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from logitless.backends.contract import Listed, Problem
from logitless.machine import pieces
from logitless.softmax import WIDTH, transform


def rest_statistic(backend: Any, problem: Problem, column: Tensor, negative: bool) -> Tensor:
    """``[4, R]`` statistic of the columns other than ``column`` ``[R, K]``, which may be outside of the problem.

    Args:
        negative: whether the head turns the order of the logits around.
    """
    wide, out = problem.gain.dtype, problem.gain.new_empty((WIDTH, problem.num_rows))
    step = max(1, problem.memory // max(1, problem.columns * wide.itemsize))
    for rows in pieces(problem.num_rows, step, problem.logits.is_meta):
        part = problem.cut(rows.start, rows.stop)
        x = part.logits if part.index is None else part.logits[part.index]
        x = x[:, : part.columns].to(wide, copy=True)
        part = replace(part, logits=x, index=None, entropy=False, canonical=False)
        if part.squash or negative:
            # A head that makes another number of -inf has its say first.
            z, _ = transform(x, part.gain[:, None], part.squash)
            part = replace(part, logits=z, gain=torch.ones_like(part.gain), squash=0.0)
        at = column[rows]
        backend.write(Listed(at, torch.full_like(at, -torch.inf, dtype=wide), 0, part.columns), part.logits, None)
        out[:, rows] = backend.statistics(part)
    return out
