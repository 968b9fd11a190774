"""What a backend is given and what it must return: the seam between the mathematics and the machine.

A backend is a module with two functions that every path needs:

    statistics(problem, out=None) -> [4, R]                     m, s, w, t of each row, into ``out`` if given
    gradient(problem, norm, coef, out, out_index) -> None       d logits, written over all of ``out``

and four for sweeps that keep something of the first pass for the second:

    exponentials(problem, reference, out) -> None               e^(z - reference), 0 at the target
    gradient_from(exponentials, problem, ...) -> None           d logits from those instead of from logits
    move(reference, maximum, slack, factor) -> None             a running reference, and by how much it moved
    rescale(x, factor) -> None                                  x *= factor, row by row, in place

Backends know nothing of samples, masks, shards or autograd. ``out`` may be the logits themselves, with
``out_index is problem.index``: a backend reads what it needs of a row before it writes there. ``out_index`` None means
that the problem's rows and those of ``out`` are the same, all of them and in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Problem:
    """Rows of a logits matrix and the transformation that makes a distribution of them.

    Attributes:
        logits: ``[T, V]``, last dimension contiguous, rows at any stride.
        index: ``[R]`` int64, the rows to use, each at most once.
        column: ``[R]`` int64, the number of the target's column, or ``softmax.ELSEWHERE`` or ``softmax.SKIP``.
        gain: ``[R]`` ``a`` in ``z = a x``, or in ``z = a tanh(squash x)``.
        squash: factor inside tanh; 0 means no softcap.
        columns: true columns; the rest of V is padding, neither read nor given a gradient.
        first: number of the first column, where the logits are one tile of wider ones. A target in another tile counts
            as elsewhere.
        entropy: whether w is wanted (otherwise it may be anything finite).
        memory: bytes of working space allowed, for backends that need any.
    """

    logits: Tensor
    index: Tensor
    column: Tensor
    gain: Tensor
    squash: float
    columns: int
    entropy: bool
    memory: int
    first: int = 0


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64; every other float is summed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
