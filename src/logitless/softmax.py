"""The statistic everything reduces to, in plain torch on ``[R]`` vectors.

For any part of a row of (transformed) logits z keep four numbers:

    m  a reference near the largest z      s  sum of e^(z-m)      w  sum of e^(z-m) (z-m)      t  target's z

Two parts merge into one of the same form, so vocabulary tiles, split reductions and tensor-parallel ranks are
the same :func:`merge`. From the whole row

    log Z = m + log s        log p(target) = (t - m) - log s        entropy = log s - w / s

and for upstream gradients (g_l, g_H, g_Z) of log-prob, entropy and log Z the gradient of the row is

    dz = g_l onehot + p (b + c (z - m)),    b = g_Z - g_l + g_H w / s,    c = -g_H

since log p + H = (z - m) - w / s. A backward kernel needs p = exp((z - m) - log s) and three numbers per row, and
never the entropy itself, whose log s would only be rounded twice and cancelled. m and log s stay apart:
z - (m + log s) would round at the size of z.

A part that does not hold the target has t = NaN. If no part does, the target is not in the vocabulary, and the
whole row comes out NaN: a wrong id can never look like a plausible number.

Statistics of R rows travel as one ``[4, R]`` tensor, a line for each field of :class:`Statistic`.

The head's transformation of a logit x, ``z = gain x`` or ``z = gain tanh(squash x)``, is :func:`transform`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.spec import IGNORE

ELSEWHERE = -1
"""Target column of a row whose target is not in this part of the vocabulary."""

SKIP = -2
"""Target column of a row to leave out: its logits are not read and its gradient is zero."""

FLOOR = -1.0e30
"""Stands in for log 0 in products: finite, so that 0 * FLOOR is 0, and far below any log-probability."""


TINY = 2.0e-38
"""Stands in for 0 in a logarithm: the smallest round normal float32, multiplied by the 0 it stood in for."""


class Statistic(NamedTuple):
    """The lines of a ``[4, R]`` statistic, or of the parts ``[P, 4, R]`` of one, by name."""

    m: Tensor
    s: Tensor
    w: Tensor
    t: Tensor

    @staticmethod
    def of(lines: Tensor, dim: int = 0) -> Statistic:
        return Statistic(*lines.unbind(dim))

    def stacked(self, out: Tensor | None = None) -> Tensor:
        """The lines as one tensor."""
        return torch.stack(list(self), out=out)


WIDTH = 4
"""Lines of a statistic."""


def transform(x: Tensor, gain: Tensor, squash: float) -> tuple[Tensor, Tensor]:
    """``z`` of logits ``x`` and the slope ``dz/dx``; ``gain`` broadcasts over x, ``squash`` is 0 without a softcap."""
    if not squash:
        return x * gain, gain
    y = torch.tanh(x * squash)
    return y * gain, gain * squash * (1 - y * y)


def target_column(target: Tensor, start: int, columns: int) -> Tensor:
    """``[R]`` column of each target among the ``columns`` from ``start`` on, ``ELSEWHERE`` or ``SKIP``."""
    column = target - start if start else target
    column = column.masked_fill((column < 0) | (column >= columns), ELSEWHERE)
    return column.masked_fill_(target == IGNORE, SKIP)


class Normaliser(NamedTuple):
    """``[R]`` pieces of log Z, kept apart for precision: ``log Z = reference + log_sum``."""

    reference: Tensor
    log_sum: Tensor

    def cut(self, rows: slice | Tensor) -> Normaliser:
        return Normaliser(self.reference[rows], self.log_sum[rows])


class AtIds(NamedTuple):
    """Columns with an upstream gradient of their own log-prob: ``[R, K]``, a column more than once if asked so.

    Attributes:
        column: number of each among the columns of this shard, or ``ELSEWHERE``.
        upstream: gradient of the log-prob, the same total at every copy of a column.
        value: dx, finished: of the logit before the head's transformation.
    """

    column: Tensor
    upstream: Tensor
    value: Tensor

    def cut(self, rows: slice | Tensor) -> AtIds:
        return AtIds(self.column[rows], self.upstream[rows], self.value[rows])


class Coefficients(NamedTuple):
    """``[R]`` numbers a backward kernel needs: ``dz = p (plain + product (z - m))``, but ``at_target`` there.

    Attributes:
        plain, product, at_target: of that formula; no product, no such term.
        square: adds ``square p^2`` to dz, or None.
        constant: adds itself to dz of every column but those at -inf, or None.
        at_ids: columns whose dz is finished after the kernel, or None; kernels do not see them.
    """

    plain: Tensor
    product: Tensor | None
    at_target: Tensor
    square: Tensor | None = None
    constant: Tensor | None = None
    at_ids: AtIds | None = None

    def cut(self, rows: slice | Tensor) -> Coefficients:
        product, square, constant = (None if x is None else x[rows] for x in (self.product, self.square, self.constant))
        at_ids = None if self.at_ids is None else self.at_ids.cut(rows)
        return Coefficients(self.plain[rows], product, self.at_target[rows], square, constant, at_ids)

    def elsewhere(self, d: Tensor, p: Tensor, row: Any, own: Tensor | float = 0.0) -> Tensor:
        """dz of columns other than the target, from ``d = z - m`` and p.

        Args:
            row: indexes the numbers of their rows.
            own: upstream gradient of the columns' own log-probs, which ``plain`` has in its sum. The caller then adds
                ``own (1 - p)`` as ``-own expm1(log p)``, which stays small where p is nearly 1.
        """
        factor = self.plain[row] + own
        if self.product is not None:
            factor = factor + self.product[row] * d.clamp_min(FLOOR)
        if self.square is not None:
            factor = factor + self.square[row] * p
        dz = p * factor
        if self.constant is not None:
            dz = dz + torch.where(d == -torch.inf, 0.0, self.constant[row])
        return dz


def merge(parts: Tensor) -> Tensor:
    """One statistic from many: ``[P, 4, R]`` becomes ``[4, R]``.

    Associative up to rounding, and exact for a single part. Parts are added in order, so the same parts give
    the same bits wherever this runs.
    """
    part = Statistic.of(parts, 1)
    # An empty part (s = 0) that was merged before has reference 0, from the line below. That must not count as a
    # maximum next to logits far below 0.
    top = torch.where(part.s == 0, -torch.inf, part.m).amax(0)
    # A row of nothing but -inf has no finite reference; 0 keeps its sums at 0 instead of NaN.
    top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    # The shift is floored: next to logits masked with the dtype's lowest number, shift * s would overflow.
    shift = torch.where(part.s == 0, torch.zeros_like(part.m), (part.m - top).clamp_min(FLOOR))
    factor = torch.where(part.s == 0, torch.zeros_like(part.m), torch.exp(shift))
    s = (factor * part.s).sum(0)
    w = (factor * (part.w + shift * part.s)).sum(0)
    return Statistic(top, s, w, merge_targets(part.t)).stacked()


def merge_targets(t: Tensor) -> Tensor:
    """The target logit from the one part that holds it (``[P, R]`` to ``[R]``), or NaN if none does."""
    held = torch.where(t.isnan(), torch.full_like(t, -torch.inf), t).amax(0)
    return torch.where(t.isnan().all(0), torch.full_like(held, torch.nan), held)


def kl_of(s: Tensor, other: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``[R]`` KL of two models from sums that are made while neither normaliser is known, in their dtype.

    With d the second model's ``z - m`` less the first's, each with the reference of its statistic, and e of the first:

    Args:
        s, other: sums of ``e``, and of the second model's.
        a, b: sums of ``e (e^d - 1 - d)`` and of ``e d``.
    """
    whole, mean, ratio = a.double() / s.double(), b.double() / s.double(), other.double() / s.double()
    more = whole + mean
    # A KL near 0 is summed from small terms. A large one is not: a is as large as b there, and a + b would round.
    small = (whole < 0.5) & (more.abs() < 0.5)
    near = whole - (more - torch.log1p(torch.where(small, more, 0.0)))
    value = torch.where(small, near, ratio.log() - mean).clamp_min(0.0)
    # A column that only the first model has makes the KL infinite.
    return torch.where(b == -torch.inf, torch.inf, value).to(s.dtype)


def merge_kl(own: Tensor, other: Tensor, sums: Tensor, reverse: bool) -> Tensor:
    """``[2, R]`` sums (a, b) of :func:`kl_of` from those of parts ``[P, 2, R]``, between the references that
    :func:`merge` gives the statistics ``[P, 4, R]`` of student and teacher. In float64: a is a difference of what is
    much larger.

    Args:
        reverse: whether the student is the first model.
    """
    first, second = (own, other) if reverse else (other, own)
    s, a, b = (x.double() for x in (first[:, 1], *sums.unbind(1)))
    # Empty parts have no reference, and contribute nothing.
    there = [x[:, 1] > 0 for x in (first, second)]
    f, g = (
        torch.where(y, x[:, 0].double() - merge(x)[0].double(), 0.0)
        for x, y in zip((first, second), there, strict=True)
    )
    by_first, by_second = (torch.where(y, x.exp(), 0.0) for x, y in zip((f, g), there, strict=True))
    linear = b + (g - f) * s
    found = (by_second * (s + (a + b)) - by_first * (s + linear), by_first * linear)
    infinite = (b == -torch.inf).any(0)
    both = zip(found, (torch.inf, -torch.inf), strict=True)
    return torch.stack([torch.where(infinite, end, x.sum(0)).to(own.dtype) for x, end in both])


def normaliser(row: Statistic) -> Normaliser:
    """The pieces of log Z; NaN where the row has no target in the vocabulary."""
    return Normaliser(row.m, torch.where(row.t.isnan(), row.t, torch.log(row.s)))


def mean_shift(row: Statistic) -> Tensor:
    """``w / s``: the mean of ``z - m`` under the row's distribution."""
    return row.w / row.s


def entropy(norm: Normaliser, mean: Tensor) -> Tensor:
    """``log s - w / s``, never below zero (a one-hot row rounds to a hair below)."""
    return (norm.log_sum - mean).clamp_min(0.0)


def solved(lines: Tensor, checked: bool, wanted: bool) -> tuple[Normaliser, Tensor, Tensor | None, Tensor | None]:
    """Pieces of log Z, the target's z and, if wanted, ``w / s`` and the entropy, from the lines of a whole row.

    Args:
        checked: whether every row is known to have a target in the vocabulary; otherwise NaN where it has none.
        wanted: whether there is a w.
    """
    m, s, w, t = lines.unbind(0)
    norm = Normaliser(m, s.log() if checked else torch.where(t.isnan(), t, s.log()))
    if not wanted:
        return norm, t, None, None
    mean = w / s
    return norm, t, mean, entropy(norm, mean)


def coefficients(
    logprob: Tensor,
    norm: Normaliser,
    mean: Tensor | None,
    g_logprob: Tensor,
    g_entropy: Tensor | None,
    g_log_z: Tensor | None,
) -> Coefficients:
    """What the backward kernel needs, from the row's statistics and upstream gradients.

    The target's own element is ``g_l (1 - p) + p (g_Z + g_H w / s + c (t - m))``, with ``1 - p = -expm1(log p)``: small
    terms stay small, whether the target is nearly certain or nearly impossible.
    """
    if g_entropy is None and g_log_z is None:
        plain = -g_logprob
        return Coefficients(plain, None, plain * torch.expm1(logprob))
    product, rest, at_target = None, g_log_z, g_log_z
    if g_entropy is not None:
        assert mean is not None
        product = -g_entropy
        rest = g_entropy * mean if g_log_z is None else g_log_z + g_entropy * mean
        at_target = torch.addcmul(rest, product, (logprob + norm.log_sum).clamp_min_(FLOOR))
    assert rest is not None
    assert at_target is not None
    there = torch.addcmul(logprob.exp() * at_target, g_logprob, torch.expm1(logprob), value=-1)
    return Coefficients(rest - g_logprob, product, there)
