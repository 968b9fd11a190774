"""Long sums in parts: one program for thousands of entries would take longer than all others for the rest."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PART, PARTS = 256, 2048
"""Entries that one program adds up at least before a sum is made in parts, and how many parts there are at most."""


class Parts(NamedTuple):
    """Parts of the sums that are longer than one part: more of them than there can be, the rest empty.

    Attributes:
        length: entries of a part.
        begin, end: ``[P]`` entries of each part.
        sum: ``[P]`` which sum it is a part of.
        first, last: ``[P]`` the parts of that sum, where this one is the first of them; otherwise none.
    """

    length: int
    begin: Tensor
    end: Tensor
    sum: Tensor
    first: Tensor
    last: Tensor

    @staticmethod
    def of(begin: Tensor, end: Tensor, entries: int) -> Parts:
        length = max(PART, 2 * entries // PARTS)
        slot = torch.arange(min(PARTS, 2 * entries // length), device=begin.device)
        count = torch.where(end - begin > length, (end - begin + length - 1) // length, 0)
        offset = count.cumsum(0)
        which = torch.searchsorted(offset, slot, right=True)
        real = which < len(offset)
        which = which.clamp_max(len(offset) - 1)
        number = slot - (offset[which] - count[which])
        first = begin[which] + length * number
        begin, end = torch.where(real, first, 0), torch.where(real, torch.minimum(first + length, end[which]), 0)
        opens = real & (number == 0)
        return Parts(length, begin, end, which, torch.where(opens, slot, 0), torch.where(opens, offset[which], 0))
