"""The rank of the target: how many columns come before it. A second look counts them, once its logit is known."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from logitless.backends.contract import Backend, Problem
from logitless.readings.reading import Plain, Row, at_columns
from logitless.softmax import merge_targets


@dataclass(frozen=True, eq=False)
class Rank(Plain):
    """The first look finds the target's key, and the second counts the columns of a tile that come before it.

    Attributes:
        negative: whether the head has a negative scale, which turns the order of the logits around.
        start: first column here.
    """

    negative: bool
    start: int

    width = 1
    names = ("rank",)

    def lines(self, backend: Backend, tile: Problem, rows: slice) -> Tensor:
        key = at_columns(tile, tile.column[:, None] - tile.first)
        return (-key if self.negative else key).T

    def merge(self, parts: Tensor) -> Tensor:
        return merge_targets(parts)

    def again(self, backend: Backend, tile: Problem, key: Tensor, target: Tensor) -> Tensor:
        """``[r]`` columns of the tile that come before the target, by its key from the first look."""
        return backend.ahead(tile, key, target - self.start, self.negative)

    def results(self, lines: Tensor, row: Row) -> dict[str, Tensor]:
        """The rank; ``lines`` are the counts of the second look, in place of the keys."""
        return {"rank": lines[0].long()}
