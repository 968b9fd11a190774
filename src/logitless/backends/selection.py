"""The k largest of each row in plain torch, of equal ones the first: exactly, and without sorting whole rows.

Columns are taken in groups. The k best columns lie in the k groups with the best maxima, ties in order: whatever is in
another group has k groups before it, each with a column as large, and to the left of it where equal. So two short lists
are sorted, one of maxima and one of candidates, together some ``2 sqrt(columns k)`` long.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def best_columns(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``[R, k]`` largest values of ``[R, C]``, descending, and their columns, ascending where equal. NaN comes first.

    >>> best_columns(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 3)
    (tensor([[3., 3., 2.]]), tensor([[1, 2, 3]]))
    """
    width = x.shape[1]
    group = group_size(width, k)
    if group == 1:
        return _first(x, k)
    whole = width // group * group
    # Buffers are filled in place: autocast would change the dtype of a concatenation.
    tops = x.new_empty((len(x), -(-width // group)))
    tops[:, : whole // group] = x[:, :whole].unflatten(1, (-1, group)).amax(2)
    if whole < width:
        tops[:, -1] = x[:, whole:].amax(1)
    # Candidates go back to the order of columns, so that a stable sort keeps equal ones in it.
    groups = _first(tops, k)[1].sort(1).values
    column = (groups[:, :, None] * group + torch.arange(group, device=x.device)).flatten(1)
    candidate = x.gather(1, column.clamp_max(width - 1)).masked_fill(column >= width, -torch.inf)
    value, place = _first(candidate, k)
    return value, column.gather(1, place)


def group_size(width: int, k: int) -> int:
    """Columns of a group such that as many maxima as candidates are sorted; 1 where groups do not pay."""
    group = 1 << max(0, round(math.log2(max(width, 1) / k) / 2))
    return group if -(-width // group) > k else 1


def _first(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    value, place = x.sort(dim=1, descending=True, stable=True)
    # Copies: a view would keep the whole sorted row alive.
    return value[:, :k].clone(), place[:, :k].clone()
