"""What a backend is given and what it must return: the seam between the mathematics and the machine.

A backend is a module, or any object, with the functions of :class:`Backend`: the statistic of rows and their gradient,
and what passes over hidden states, supports, teachers and further readings need besides. Its twin for reading is
``reference``: each docstring there says what a function returns.

Backends know nothing of samples, masks, shards or autograd. ``out`` may be the logits themselves, with
``out_index is problem.index``: a backend reads what it needs of a row before it writes there. An index of None means
all rows, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from logitless.backends.blocks import LINES
from logitless.backends.divergences import Divergence
from logitless.softmax import WIDTH, Coefficients, Normaliser


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
        unit: whether z is x itself, because every gain is 1 and there is no softcap. Nobody has to make use of it.
        found: whether every row is known to have its target among these columns. Nobody has to make use of it either.
        canonical: whether ``statistics`` gives lines as :mod:`logitless.backends.blocks` has them. The first column
            then begins a block.
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
    unit: bool = False
    found: bool = False
    canonical: bool = False

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
        """``[4, R]``, or ``[18, R]`` of a canonical one, to be filled."""
        return self.gain.new_empty((LINES if self.canonical else WIDTH, self.num_rows))


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
        share: ``[R]`` logarithm of the factor of the teacher's probabilities where the acceptance is read besides;
            None where it is not.
    """

    student: Problem
    teacher: Problem
    norm: Normaliser
    teacher_norm: Normaliser
    kind: Divergence
    share: Tensor | None = None

    @property
    def lines(self) -> int:
        """Of sums: terms and their ``p slope``; with the acceptance tv, its own ``p slope``, and itself."""
        return 2 if self.share is None else 5

    def cut(self, start: int, stop: int) -> Pair:
        """Rows ``start .. stop`` of it."""
        rows = slice(start, stop)
        norms = (self.norm.cut(rows), self.teacher_norm.cut(rows))
        share = None if self.share is None else self.share[rows]
        return Pair(self.student.cut(start, stop), self.teacher.cut(start, stop), *norms, self.kind, share)

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


@dataclass(frozen=True, eq=False)
class Product:
    """Rows, some columns of the head, and the transformation that makes a distribution of their logits.

    Attributes:
        hidden: ``[R, D]`` bfloat16 or float16.
        weight: ``[C, D]`` of the same dtype.
        bias: ``[C]`` or None.
        column, gain, squash, first: as in :class:`~logitless.backends.contract.Problem`.
        negative: whether gains are negative, as a head's negative scale makes them.
        entropy: whether w is wanted.
        top: whether two lines follow the statistic: the largest logit, or minus the smallest where gains are negative,
            and the number of its column, the first of several.
        logits_dtype: what logits are rounded to, after the bias; float32 leaves them as they are.
        canonical: whether the statistic is lines as :mod:`logitless.backends.blocks` has them, its parts being blocks.
        turns: whether the product is made by turns, as the machine says.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    column: Tensor
    gain: Tensor
    squash: float = 0.0
    first: int = 0
    negative: bool = False
    entropy: bool = True
    top: bool = False
    logits_dtype: torch.dtype = torch.float32
    canonical: bool = False
    turns: bool = False

    @property
    def rows(self) -> int:
        return self.hidden.shape[0]

    @property
    def columns(self) -> int:
        return self.weight.shape[0]


class Couple(NamedTuple):
    """A student's product beside its teacher's: the same rows and columns, each with its own gain, squash and width.

    Attributes:
        student: with the target's column; a row to skip has no divergence.
        teacher: of whose column nothing is read.
    """

    student: Product
    teacher: Product


class Products(Protocol):
    """Matrix products that end in a softmax: logits stay in the kernel that makes them.

    Same as the product in float32, and then the function of that name in :class:`Backend`.
    """

    def takes(self, hidden: Tensor, weight: Tensor, copied: bool = False) -> str | None: ...
    def takes_sizes(self, dtype: torch.dtype, width: int) -> str | None: ...
    def num_parts(self, p: Product) -> int: ...
    def statistics(self, p: Product, out: Tensor | None = None) -> Tensor: ...
    def exponentials(self, p: Product, values: Tensor, references: Tensor, out: Tensor | None = None) -> Tensor: ...
    def gradient(self, p: Product, norm: Normaliser, coef: Coefficients, out: Tensor) -> None: ...
    def towards(self, p: Product, parts: Tensor, values: Tensor, reference: Tensor, sums: Tensor | None) -> None: ...
    def merge(self, p: Product, parts: Tensor, out: Tensor | None = None) -> Tensor: ...
    def gradient_from(
        self, problem: Problem, references: Tensor, slab: int, norm: Normaliser, coef: Coefficients, out: Tensor
    ) -> None: ...
    # Products that dZ ends in, where Machine.dz_programs is above 0; those that end in "pay" say whether to call them.
    def rows_pay(self, d_z: Tensor, weight: Tensor, out: Tensor, programs: int) -> bool: ...
    def columns_pay(self, d_z: Tensor, hidden: Tensor, out: Tensor) -> bool: ...
    def times_weight(self, d_z: Tensor, weight: Tensor, out: Tensor, programs: int) -> None: ...
    def add_outer(self, d_z: Tensor, hidden: Tensor, out: Tensor, add: bool, programs: int) -> None: ...


class Pairs(Protocol):
    """Two matrix products in one tile: both models' logits stay in the kernel that makes them.

    Same as both products in float32, then ``statistics``, ``divergence`` or ``divergence_gradient`` of them. Operands
    are such as :class:`Products` take.
    """

    def parts(
        self, couple: Couple, reverse: bool, out: Tensor | None = None, stored: tuple[Tensor, Tensor] | None = None
    ) -> Tensor: ...
    def merge(self, couple: Couple, reverse: bool, parts: Tensor, out: Tensor) -> None: ...
    def gradient(
        self,
        couple: Couple,
        norms: tuple[Normaliser, Normaliser],
        kind: Divergence,
        row: tuple[Tensor, Tensor, Tensor],
        coef: Coefficients,
        out: Tensor,
    ) -> None: ...
    def gradient_from(
        self,
        couple: Couple,
        parts: Tensor,
        stored: tuple[Tensor, Tensor],
        norms: tuple[Normaliser, Normaliser],
        reverse: bool,
        row: tuple[Tensor, Tensor],
        coef: Coefficients,
    ) -> None: ...


class Backend(Protocol):
    """What every path calls. ``products`` is None where a product and its softmax are two kernels, or none; ``pairs``,
    which need not be there, where those of two models are."""

    @property
    def products(self) -> Any: ...

    # The statistic of each row and its gradient.
    def statistics(self, problem: Problem, out: Tensor | None = None) -> Tensor: ...
    def solved(self, lines: Tensor, gain: Tensor) -> Tensor: ...
    def gradient(
        self, problem: Problem, norm: Normaliser, coef: Coefficients, out: Tensor, out_index: Tensor | None
    ) -> None: ...

    # From hidden states: dZ over the logits, 16-bit exponentials, rows that are scaled and mixed.
    def gradient_over(self, problem: Problem, norm: Normaliser, coef: Coefficients, dtype: torch.dtype) -> Tensor: ...
    def exponentials(self, problem: Problem, stats: Tensor, running: Running, out: Tensor, slope: bool) -> None: ...
    def gradient_from(
        self, problem: Problem, references: Tensor, slab: int, norm: Normaliser, coef: Coefficients, out: Tensor
    ) -> None: ...
    def rescale(self, x: Tensor, factor: Tensor, out: Tensor) -> None: ...
    def mix(self, x: Tensor, by: Tensor, y: Tensor, index: Tensor, times: Tensor, out: Tensor) -> None: ...

    # A student beside its teacher.
    def divergence(self, pair: Pair, out: Tensor) -> None: ...
    def divergence_gradient(
        self, pair: Pair, mean: Tensor, by: Tensor, coef: Coefficients | None, out: Tensor, out_index: Tensor | None
    ) -> None: ...

    # Readings beyond the softmax.
    def best(self, problem: Problem, k: int, negative: bool) -> Tensor: ...
    def ahead(self, problem: Problem, key: Tensor, place: Tensor, negative: bool) -> Tensor: ...
    def moments(self, problem: Problem) -> Tensor: ...
    def write(self, listed: Listed, out: Tensor, out_index: Tensor | None) -> None: ...

    # Listed rows of a head: pairs of rows in flat lists.
    def dots(self, x: Tensor, at_x: Tensor, y: Tensor, at_y: Tensor, out: Tensor, memory: int) -> None: ...
    def sums(
        self,
        factor: Tensor,
        x: Tensor,
        at: Tensor,
        starts: Tensor,
        out: Tensor,
        place: Tensor | None = None,
        *,
        add: bool,
        memory: int,
        uneven: bool = False,
    ) -> None: ...
