"""Rows whose gradient is exactly zero are left out of backward: prompts and padding, which a loss masks.

log-probs of all rows  ->  the host's loss, with a mask  ->  zeros upstream  ->  the rows that stay, packed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from logitless.call import Call
from logitless.machine import ASKED, FEW, Tiles
from logitless.passes.back import Beside, Gradients
from logitless.route import Plan
from logitless.sources.linear import Projection


def staying_rows(call: Call, plan: Plan, saved: Mapping[str, Any], up: Mapping[str, Tensor | None]) -> Tensor | None:
    """``[S]`` numbers of the rows with a gradient, in order; None where all stay, or asking is not worth it.

    The device is asked how many they are, and waited for: not while a CUDA graph is recorded, nor for little work.
    Exponentials that forward stored are those of its own rows, which then all stay.
    """
    plain = call.kept is None and call.asked.teacher is None and call.table is None and "exponentials" not in saved
    given = [x for x in up.values() if x is not None]
    if not plain or not given or plan.backward is None:
        return None
    first = given[0]
    if first.is_meta or isinstance(first, FakeTensor):
        return None
    if first.is_cuda and (call.num_rows * call.columns < ASKED or torch.cuda.is_current_stream_capturing()):
        return None
    stays = first != 0
    for x in given[1:]:
        stays = stays | (x != 0)
    if call.machine.same_tiles:
        stays = _in_whole_tiles(stays, plan.backward)
    index = stays.nonzero().squeeze(1)
    return index if len(index) <= (1 - FEW) * call.num_rows else None


def _in_whole_tiles(stays: Tensor, tiles: Tiles) -> Tensor:
    """All rows of a tile with one that stays: a product of another height would be rounded in another way."""
    tile = torch.arange(len(stays), device=stays.device) // tiles.rows
    return torch.isin(tile, tile[stays])


def packed(p: Projection, beside: Beside, index: Tensor) -> tuple[Projection, Beside]:
    """Those rows of hidden states, and what lies beside them."""
    rows = {name: getattr(p, name) for name in ("hidden", "row_parts", "column", "gain")}
    p = replace(p, **{name: x.index_select(0, index) for name, x in rows.items() if x is not None})
    terms = beside.terms
    return p, Beside(replace(terms, norm=terms.norm.cut(index), coef=terms.coef.cut(index)))


def unpacked(found: Gradients, index: Tensor, rows: int) -> Gradients:
    """With the gradient of all hidden rows: zeros for those that were left out."""
    if found.hidden is None:
        return found
    whole = found.hidden.new_zeros((rows, found.hidden.shape[1]))
    return found._replace(hidden=whole.index_copy_(0, index, found.hidden))
