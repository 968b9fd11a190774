"""What a backend is given and what it must return: the seam between the mathematics and the machine.

A backend is a module with two functions that every path needs:

    statistics(problem, out=None) -> [4, R]                     the statistic of each row, into ``out`` if given
    gradient(problem, norm, coef, out, out_index) -> None       d logits, written over all of ``out``

five for the paths from hidden states:

    gradient_over(problem, norm, coef, dtype) -> [R, V]         d logits in a narrower dtype, over the logits themselves
    exponentials(problem, stats, running, out, slope) -> None   the statistic, and e^(z - reference), 0 at the target
    gradient_from(problem, references, slab, norm, coef, out)   d logits where problem.logits are such exponentials
    rescale(x, factor, out) -> None                             out = x * factor, row by row
    mix(x, by, y, index, times, out) -> None                    out = x * by + y[index] * times, row by row

two for a student beside its teacher:

    divergence(pair, out) -> None                               [2, R] divergence, and mean slope, over these columns
    divergence_gradient(pair, mean, by, coef, out, out_index)   d of the student's logits, written over all of ``out``

four for statistics beyond the softmax:

    best(problem, k, negative) -> [2, k, R]                     keys and columns of the k best columns of each row
    ahead(problem, key, place, negative) -> [R]                 how many columns come before that key and column
    moments(problem) -> [6, R]                                  maximum, sum of e^(2 (z - it)); count, mean, squares
    write(listed, out, out_index) -> None                       out[r, column[r, k]] = value[r, k] where there is one

and two for supports from hidden states, where there are no logits, on flat lists of pairs of rows:

    dots(x, at_x, y, at_y, out, memory) -> None                 out[e] = x[at_x[e]] . y[at_y[e]]
    sums(factor, x, at, starts, out, place, add, memory)        out[place[i]] = sum of factor[e] x[at[e]], e in part i

Backends know nothing of samples, masks, shards or autograd. ``out`` may be the logits themselves, with
``out_index is problem.index``: a backend reads what it needs of a row before it writes there. An index of None means
all rows, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.backends.divergences import Divergence
from logitless.softmax import WIDTH, Normaliser


@dataclass(frozen=True, eq=False)
class Problem:
    """Rows of a logits matrix and the transformation that makes a distribution of them.

    Attributes:
        logits: ``[T, V]``, last dimension contiguous, rows at any stride.
        index: ``[R]`` int64, the rows to use, each at most once; None for all of them, in order.
        column: ``[R]`` int64, the number of the target's column, or ``softmax.ELSEWHERE`` or ``softmax.SKIP``.
        gain: ``[R]`` ``a`` in ``z = a x``, or in ``z = a tanh(squash x)``.
        squash: factor inside tanh; 0 means no softcap.
        columns: true columns; the rest of V is padding, neither read nor given a gradient.
        first: number of the first column, where the logits are one tile of wider ones. A target in another tile counts
            as elsewhere.
        entropy: whether w is wanted (otherwise it may be anything finite).
        memory: bytes of working space allowed, for backends that need any.
        further: names of further sums (:data:`logitless.softmax.FURTHER`), each one more line of the statistic.
        unit: whether z is x itself, because every gain is 1 and there is no softcap. Nobody has to make use of it.
        found: whether every row is known to have its target among these columns. Nobody has to make use of it either.
    """

    logits: Tensor
    index: Tensor | None
    column: Tensor
    gain: Tensor
    squash: float
    columns: int
    entropy: bool
    memory: int
    first: int = 0
    further: tuple[str, ...] = ()
    unit: bool = False
    found: bool = False

    @property
    def num_rows(self) -> int:
        return self.column.numel()

    def cut(self, start: int, stop: int) -> Problem:
        """Rows ``start .. stop`` of the problem, also where an index says which they are."""
        if (start, stop) == (0, self.num_rows):
            return self
        where = "logits" if self.index is None else "index"
        return replace(self, **{name: getattr(self, name)[start:stop] for name in (where, "column", "gain")})

    def empty_statistic(self) -> Tensor:
        """``[4 + number of further sums, R]``, to be filled."""
        return self.gain.new_empty((WIDTH + len(self.further), self.num_rows))


class Listed(NamedTuple):
    """Values for a few columns of every row.

    Attributes:
        column: ``[R, K]`` int64; a column may stand there more than once, with the same value.
        value: ``[R, K]``.
        first, columns: which columns are there; all others are not written.
    """

    column: Tensor
    value: Tensor
    first: int
    columns: int


@dataclass(frozen=True, eq=False)
class Pair:
    """Logits of a student and of its teacher for the same rows and columns, both normalised.

    Attributes:
        student: with the target's column; a row to skip has no divergence.
        teacher: the same number of rows. It may have fewer columns: the rest have probability 0.
        norm, teacher_norm: of the two, over the whole vocabulary.
        kind: which divergence.
    """

    student: Problem
    teacher: Problem
    norm: Normaliser
    teacher_norm: Normaliser
    kind: Divergence

    def cut(self, start: int, stop: int) -> Pair:
        """Rows ``start .. stop`` of it."""
        rows = slice(start, stop)
        norms = (self.norm.cut(rows), self.teacher_norm.cut(rows))
        return Pair(self.student.cut(start, stop), self.teacher.cut(start, stop), *norms, self.kind)

    def within(self, columns: slice) -> Pair:
        """Those columns of it."""
        student, teacher = (
            replace(
                x,
                logits=x.logits[:, columns],
                columns=min(max(x.columns - columns.start, 0), columns.stop - columns.start),
                first=x.first + columns.start,
            )
            for x in (self.student, self.teacher)
        )
        return replace(self, student=student, teacher=teacher)

    @property
    def shift(self) -> Tensor:
        """``[R]`` what ``log q - log p`` is less than the difference of the two logits."""
        (m, log_sum), (teacher_m, teacher_log_sum) = self.norm, self.teacher_norm
        return (teacher_m - m) + (teacher_log_sum - log_sum)


NO_COLUMN = float(1 << 24)
"""Where there are fewer columns than asked for: behind all others, and the last integer that float32 counts up to."""


MOMENTS = 6
"""Lines of ``moments``: maximum and sum of squared exponentials; count, center, mean less the center, squares."""


SLACK = 8.0
"""How far a row's maximum may lie from its reference: e^8 is in range for float16 too, and moves are rare."""


class Running(NamedTuple):
    """A reference for exponentials that follows the rows' maximum from tile to tile.

    The reference only has to keep exponentials in range, so it is guessed from the tile before. A row is read twice
    only where the guess was wrong: its maximum lies more than ``slack`` above the guess, or more than ``drop`` below.

    Attributes:
        before: ``[R]`` the guess; -inf where all logits so far were -inf.
        reference: ``[R]`` receives the guess or, where it was wrong, the tile's maximum. May be ``before``.
        slack, drop: how wrong the guess may be.
        sums: ``[R, D]`` relative to the guess; multiplied by ``e^(before - reference)`` where the reference moved. Or
            None.
    """

    before: Tensor
    reference: Tensor
    slack: float = SLACK
    drop: float = SLACK
    sums: Tensor | None = None


def over(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """``[R, V]`` of ``dtype`` in the memory of contiguous ``[R, V]`` logits, each row at the start of the logits' row.

    >>> over(torch.zeros(2, 5), torch.bfloat16).stride()
    (10, 1)
    """
    return logits.view(dtype)[:, : logits.shape[1]]
