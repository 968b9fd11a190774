"""The rank of the target: how many columns come before it. It takes a second look, when the target's logit is known."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from logitless.backends.contract import Backend, Problem
from logitless.readings.reading import Plain, Row, at_columns
from logitless.softmax import merge_targets


@dataclass(frozen=True, eq=False)
class Rank(Plain):
    """The target's key in the first look, and in the second how many columns of a tile come before it.

    Attributes:
        negative: whether the head turns the order of the logits around.
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
        """``[r]`` columns of the tile that come before the target, whose key is known by now."""
        return backend.ahead(tile, key, target - self.start, self.negative)

    def results(self, lines: Tensor, row: Row) -> dict[str, Tensor]:
        """From the count over all columns, in place of the key."""
        return {"rank": lines[0].long()}
