"""Extras from tiles of logits: their lines while a tile exists, and the rank of each target, which takes a second look.

A rank counts the logits above the target's own, which is known when all tiles have been seen, on every rank. So the
tiles are made once more: the same products in the same sizes, and therefore the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from logitless.backends.contract import Problem
from logitless.extras import Extras
from logitless.from_hidden.plan import Tiles
from logitless.from_hidden.projection import Projection
from logitless.machine import pieces


@dataclass(frozen=True, eq=False)
class ExtraLines:
    """Lines of all rows, filled tile by tile.

    Attributes:
        p: whose tiles they are.
        extras: what is asked for.
        values: ``[L, R]``.
    """

    p: Projection
    extras: Extras
    values: Tensor

    @staticmethod
    def empty(p: Projection) -> ExtraLines | None:
        """To be filled; None where nothing is asked for."""
        extras = p.call.extras
        return None if extras is None else ExtraLines(p, extras, p.gain.new_empty((sum(extras.counts), len(p.hidden))))

    def add(self, tile: Problem, rows: slice) -> None:
        """Those of a tile of these rows; tiles of the same rows come from left to right."""
        found, so_far = self.extras.lines(self.p.backend, tile, rows), self.values[:, rows]
        so_far.copy_(self.extras.merge(torch.stack([so_far, found])) if tile.first else found)

    def take(self, best: Tensor) -> None:
        """``[2, R]`` key and column of the best column of all, where nothing else is asked for."""
        assert self.extras.only_best
        self.values.copy_(best)
        self.values[1] += self.extras.start


def count_ahead(p: Projection, tiles: Tiles, key: Tensor, place: Tensor, negative: bool) -> Tensor:
    """``[R]`` columns here that come before one with this key and this number, from all tiles once more."""
    num_rows, total = len(key), p.gain.new_zeros(len(p.hidden))
    key, place = (torch.nn.functional.pad(x, (0, len(p.hidden) - num_rows)) for x in (key, place))
    memory = p.empty_tile(tiles)
    for rows in pieces(len(p.hidden), tiles.rows, p.hidden.is_meta):
        part = p.cut(rows.start, rows.stop)
        for columns in pieces(p.call.columns, tiles.columns, p.hidden.is_meta):
            tile = part.tile(memory, tiles, columns.start)
            total[rows] += p.backend.ahead(tile, key[rows], place[rows], negative)
    return total[:num_rows]
