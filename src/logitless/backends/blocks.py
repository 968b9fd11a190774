"""Sums whose bits do not depend on their order: the statistic of ``bits="canonical"``, in plain torch.

Columns are cut into blocks of 128 by global id. With ``k = |gain| log2 e``, y = k x and n an integer just above the
largest y of a block, ``e = 2^(y - n)`` lies in [0, 1]. So ``e + 1`` lies in [1, 2], and its bit pattern *is* e in fixed
point, in units of 2^-23. Integers add up to the same sum in every order; so do those of ``e (y - n)``, which lies in
[-0.54, 0], and 1.75 is added to it.

    S = sum of e        W = sum of e (y - n)        both 2^23 times, of one block        sum of 2^y = S 2^(n - 23)

Blocks add up without rounding, too, since their exponents n are integers. A bin holds the blocks of 16 neighbouring
exponents, ``n = 16 j + r``, as the integers ``S 2^r`` and ``(W + r S) 2^r``. The four bins from that of the row's
maximum downwards are kept, and what lies 2^-48 below the maximum is not. So the lines of a row are exact, whatever was
added first: batches, chunks, tiles, kernels and tensor-parallel ranks give the same bits, if shards begin at multiples
of 128.

    lines [18, R]     m, before the gain; the target's z; 8 sums of 64 bits, low and high halves, as float32 patterns
    solved [4, R]     a statistic as :mod:`logitless.softmax` has it, from the lines of all shards

Logits z beyond 1.1e7 (k x of 2^24) count as infinite. Exponentials are rounded to 2^-23, where the largest is between a
half and 1: columns that all lie just below half a unit are lost, 1.6e-5 of the sum at worst.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.softmax import SKIP, Statistic, merge_targets

BLOCK = 128
"""Columns of a block."""

BINS = 4
"""Bins that are kept, from the one of the row's maximum downwards."""

SPAN = 16
"""Exponents of a bin."""

LINES = 2 + 4 * BINS
"""Lines of a row: m, t, and two sums of each bin in two halves."""

LARGEST = 1 << 21
"""Columns whose sums fit 64 bits, were they all equal."""

FAR = 2.0**24
"""Where logits in powers of two end: the last of which the next integer is a float32."""

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453


class Bins(NamedTuple):
    """Lines of rows by name: ``m`` and ``t`` ``[..., R]``, ``sums`` and ``products`` ``[..., BINS, R]`` int64."""

    m: Tensor
    t: Tensor
    sums: Tensor
    products: Tensor

    @staticmethod
    def of(lines: Tensor) -> Bins:
        """Of lines ``[..., 18, R]``."""
        halves = lines[..., 2:, :].contiguous().view(torch.int32).long()
        low, high = halves[..., 0::2, :] & 0xFFFFFFFF, halves[..., 1::2, :]
        whole = low | (high << 32)
        return Bins(lines[..., 0, :], lines[..., 1, :], whole[..., :BINS, :], whole[..., BINS:, :])

    def lines(self) -> Tensor:
        """``[18, R]``."""
        whole = torch.cat([self.sums, self.products])
        low = (((whole & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).int()
        halves = torch.stack([low, (whole >> 32).int()], 1).flatten(0, 1)
        return torch.cat([self.m[None], self.t[None], halves.view(torch.float32)])


def factor(gain: Tensor) -> Tensor:
    """``k``: what a logit, with the sign of its gain, is multiplied by to be an exponent of two."""
    return gain.abs() * LOG2E


def exponent(m: Tensor, k: Tensor) -> Tensor:
    """An integer above ``k m``, as float32; 0 where that is out of range."""
    y = m * k
    return torch.where(y.abs() < FAR, torch.floor(y) + 1.0, 0.0)


def lines(problem: Any) -> Tensor:
    """``[18, R]`` lines of the rows of a :class:`~logitless.backends.contract.Problem`."""
    x = problem.logits if problem.index is None else problem.logits[problem.index]
    x = x[:, : problem.columns].float()
    x = torch.tanh(x * problem.squash) if problem.squash else x
    column, t = problem.column - problem.first, problem.gain.new_full(problem.gain.shape, torch.nan)
    if problem.columns:
        inside = (column >= 0) & (column < problem.columns)
        at_target = x.gather(1, column.clamp(0, problem.columns - 1)[:, None]).squeeze(1) * problem.gain
        t = torch.where(inside, at_target, t)
    return skipped(lines_of(x, t, problem.gain), problem.column)


def lines_of(x: Tensor, t: Tensor, gain: Tensor) -> Tensor:
    """``[18, R]`` lines of whole blocks, the last of which may be short.

    Args:
        x: ``[R, C]`` float32 logits after a softcap's tanh, and before the gain.
        t: ``[R]`` the target's z; NaN where it is not among the columns.
    """
    k, sign = factor(gain), torch.where(gain < 0, -1.0, 1.0)
    x = torch.nn.functional.pad(x * sign[:, None], (0, -x.shape[1] % BLOCK), value=-torch.inf)
    x = x.view(len(x), x.shape[1] // BLOCK, BLOCK)
    m = x.amax(2)
    n = exponent(m, k[:, None])
    y = (x.double() * k.double()[:, None, None] - n.double()[:, :, None]).float()
    # float64 makes the result correctly rounded: its bits do not depend on a math library.
    e = torch.exp2(y.double())
    product = (e.float().double() * y.clamp_min(-1.0e30).double() + 1.75).float()
    sums = _pattern_sum(e.float() + 1.0, 0x3F800000)
    return _binned(m, t, sums, _pattern_sum(product, 0x3FE00000), n.long(), k).lines()


def _pattern_sum(x: Tensor, base: int) -> Tensor:
    return (x.view(torch.int32).long() - base).sum(2)


def _binned(m: Tensor, t: Tensor, sums: Tensor, products: Tensor, n: Tensor, k: Tensor) -> Bins:
    """Bins of rows from their blocks ``[R, B]``."""
    top = m.amax(1) if m.shape[1] else m.new_full(m.shape[:1], -torch.inf)
    j, r, own = n >> 4, n & (SPAN - 1), exponent(top, k).long() >> 4
    found = []
    for x in (sums << r, (products + sums * r) << r):
        found.append(torch.stack([torch.where(j == own[:, None] - i, x, 0).sum(1) for i in range(BINS)]))
    return Bins(top, t, *found)


def skipped(lines: Tensor, column: Tensor) -> Tensor:
    """The lines, where those of rows to leave out are of one logit that is 0."""
    one = torch.zeros_like(lines[:, :1]).view(torch.int32)
    one[2] = 1 << 23
    return torch.where((column == SKIP)[None], one.view(torch.float32), lines)


def merge(parts: Tensor, gain: Tensor) -> Tensor:
    """Lines of all columns from those of parts of them, in any order: ``[P, 18, R]`` becomes ``[18, R]``."""
    part, k = Bins.of(parts), factor(gain)
    m = part.m.amax(0)
    lower = (exponent(m, k).long() >> 4) - (exponent(part.m, k).long() >> 4)
    found = []
    for x in (part.sums, part.products):
        moved = [[torch.where(lower == i - b, x[:, b], 0).sum(0) for b in range(i + 1)] for i in range(BINS)]
        found.append(torch.stack([sum(own[1:], start=own[0]) for own in moved]))
    return Bins(m, merge_targets(part.t), *found).lines()


def solved(parts: Tensor, gain: Tensor) -> Tensor:
    """``[4, R]`` statistic from the lines ``[P, 18, R]`` of all parts of the rows, by float64 and rounded once."""
    row, k = Bins.of(merge(parts, gain)), factor(gain)
    m = torch.where(row.m == -torch.inf, 0.0, row.m)
    base = (exponent(m, k).long() >> 4) * SPAN
    off = base.double() - m.double() * k.double()
    a, b = row.sums.double(), row.products.double()
    total, mean = torch.zeros_like(a[0]), torch.zeros_like(a[0])
    for i in reversed(range(BINS)):
        total = total * 2.0**-SPAN + a[i]
        mean = mean * 2.0**-SPAN + (b[i] - SPAN * i * a[i])
    scale = torch.exp2(off) * 2.0**-23
    scale = torch.where((m * k).abs() < FAR, scale, torch.nan)
    w = (mean + total * off) * scale * LN2
    return Statistic(m * gain.abs(), (total * scale).float(), w.float(), row.t).stacked()
