"""The protocol of a reading: results of a row beyond log-prob, entropy and log Z, and how they are carried.

    lines of a tile  ->  merged over tiles and ranks  ->  results by name          forward
    upstream gradients by name  ->  what they add to the coefficients of dZ        backward

Lines are numbers of the accumulation dtype, ids included, which float32 counts up to 2^24. All readings are over the
whole vocabulary, whatever the sampler kept. Columns are ordered by their logits before the head's transformation, which
keeps that order, and where equal by their ids: so ``top_k_ids``, ``top1_id`` and ``rank`` agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from logitless.backends.contract import Backend, Problem
from logitless.softmax import Coefficients, Normaliser, transform
from logitless.spec import IGNORE

LARGEST = 1 << 24
"""Columns that float32 can count."""


class Row(NamedTuple):
    """Inputs of results besides the lines: ``[R]`` each, of the whole vocabulary.

    Attributes:
        norm: pieces of log Z.
        target: token id.
        gain, squash: of the head.
    """

    norm: Normaliser
    target: Tensor
    gain: Tensor
    squash: float


class Upstream(NamedTuple):
    """Inputs of a reading's share of dZ.

    Attributes:
        logprob, g_logprob: ``[R]`` of the target over the vocabulary, as the coefficients were made from them.
        by: gradients of results that have one, by name.
    """

    logprob: Tensor
    g_logprob: Tensor
    by: Mapping[str, Tensor]


class Reading(Protocol):
    """One reading of R rows."""

    @property
    def names(self) -> tuple[str, ...]:
        """Fields of :class:`~logitless.spec.TokenStats` that the reading gives."""
        ...

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Those of ``names`` that have a gradient."""
        ...

    @property
    def width(self) -> int:
        """Lines per row."""
        ...

    def lines(self, backend: Backend, tile: Problem, rows: slice) -> Tensor:
        """``[width, r]`` lines of a tile; ``rows`` says which rows of the call its rows are."""
        ...

    def merge(self, parts: Tensor) -> Tensor:
        """Lines of all columns from those of parts of them: ``[P, width, R]`` becomes ``[width, R]``."""
        ...

    def results(self, lines: Tensor, row: Row) -> dict[str, Tensor]:
        """Results by name, from the lines of the whole vocabulary."""
        ...

    def saved(self, lines: Tensor, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors that backward needs, by name."""
        ...

    def extend(self, coef: Coefficients, saved: Mapping[str, Tensor], row: Row, up: Upstream) -> Coefficients:
        """The coefficients of dZ, with those of the upstream gradients of the reading's results added."""
        ...

    def cut(self, rows: slice | Tensor) -> Reading:
        """The reading of some of the rows."""
        ...

    def padded(self, num_rows: int) -> Reading:
        """The reading with empty rows after the last, ``num_rows`` in all."""
        ...


class Plain:
    """A reading without a gradient, the same for all rows."""

    differentiable: tuple[str, ...] = ()

    def saved(self, lines: Tensor, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {}

    def extend(self, coef: Coefficients, saved: Mapping[str, Tensor], row: Row, up: Upstream) -> Coefficients:
        return coef

    def cut(self, rows: slice | Tensor):
        return self

    def padded(self, num_rows: int):
        return self


def at_columns(problem: Problem, column: Tensor) -> Tensor:
    """``[R, K]`` logits at the columns ``[R, K]`` of the problem; NaN where it has no such column."""
    (height, _), (step, _) = problem.logits.shape, problem.logits.stride()
    if not (height and problem.columns):
        return torch.full_like(column, torch.nan, dtype=problem.gain.dtype)
    inside = (column >= 0) & (column < problem.columns)
    row = torch.arange(problem.num_rows, device=column.device) if problem.index is None else problem.index
    # Two indices would be copied on a GPU, each in the shape of both.
    place = column.clamp(0, problem.columns - 1).add_(row[:, None] * step)
    flat = problem.logits.as_strided(((height - 1) * step + problem.columns,), (1,))
    return torch.where(inside, flat[place].to(problem.gain.dtype), torch.nan)


def logprobs_of(x: Tensor, row: Row) -> tuple[Tensor, Tensor]:
    """``[R, K]`` transformed logits and log-probs, from logits ``x`` before the head's transformation."""
    z, _ = transform(x, row.gain[:, None], row.squash)
    return z, (z - row.norm.reference[:, None]) - row.norm.log_sum[:, None]


def told(x: Tensor, row: Row) -> Tensor:
    """A result with fillers in rows without one: 0 and id -1 in ignored rows, NaN and -1 where undefined.

    A row has no distribution where NaN or +inf is among its logits, where all are -inf, or where its target is no id.
    """
    valid, ignored = row.norm.log_sum.isfinite(), row.target == IGNORE
    valid, ignored = (flag[:, None] if x.dim() == 2 else flag for flag in (valid, ignored))
    if x.dtype == torch.bool:
        return x & ~ignored
    if x.dtype == torch.int64:
        return torch.where(valid & ~ignored, x, -1)
    return torch.where(valid, x, torch.nan).masked_fill(ignored, 0.0)
