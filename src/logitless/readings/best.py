"""The most likely tokens of a row: ``stats=("top1", "max_logit")`` and ``top_k=``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from logitless.backends.contract import Backend, Problem
from logitless.readings.reading import Plain, Row, logprobs_of

MOST = 128
"""Largest ``top_k``."""


@dataclass(frozen=True, eq=False)
class Best(Plain):
    """The k best columns: k lines of keys, and k lines of column numbers.

    Attributes:
        stats: ``"top1"`` and ``"max_logit"`` as asked for.
        top_k: how many of the most likely tokens are results; 0 for none.
        negative: whether the head has a negative scale, which turns the order of the logits around.
        start: first column here.
    """

    stats: tuple[str, ...]
    top_k: int
    negative: bool
    start: int

    @property
    def count(self) -> int:
        return max(self.top_k, 1)

    @property
    def width(self) -> int:
        return 2 * self.count

    @property
    def names(self) -> tuple[str, ...]:
        top1 = ("top1_id", "top1_logprob", "top1_hit") if "top1" in self.stats else ()
        largest = ("max_logit",) if "max_logit" in self.stats else ()
        return (*top1, *largest, *(("top_k_ids", "top_k_logprobs") if self.top_k else ()))

    def lines(self, backend: Backend, tile: Problem, rows: slice) -> Tensor:
        key, column = backend.best(tile, self.count, self.negative)
        return torch.cat([key, column + self.start])

    def merge(self, parts: Tensor) -> Tensor:
        return merged_best(parts, self.count)

    def results(self, lines: Tensor, row: Row) -> dict[str, Tensor]:
        keys, columns = lines.split(self.count)
        ids = columns.T.to(torch.int64)
        z, logprob = logprobs_of(-keys.T if self.negative else keys.T, row)
        results = {
            "top1_id": ids[:, 0],
            "top1_logprob": logprob[:, 0],
            "top1_hit": (ids[:, 0] == row.target) & row.norm.log_sum.isfinite(),
            "max_logit": z[:, 0],
            "top_k_ids": ids[:, : self.top_k],
            "top_k_logprobs": logprob[:, : self.top_k],
        }
        return {name: results[name] for name in self.names}


def merged_best(parts: Tensor, count: int) -> Tensor:
    """The best ``count`` of lists ``[P, 2 count, R]`` that are each best first: by key, and where equal by id."""
    keys, ids = (x.flatten(0, 1) for x in parts.split(count, 1))
    order = ids.argsort(0)
    order = order.gather(0, keys.gather(0, order).argsort(dim=0, descending=True, stable=True))[:count]
    return torch.cat([keys.gather(0, order), ids.gather(0, order)])
