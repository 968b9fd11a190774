"""The readings of a call beyond the softmax, as one: their lines side by side, in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from logitless.backends.contract import Backend, Problem
from logitless.readings.best import Best
from logitless.readings.ids import Ids
from logitless.readings.moments import Moments
from logitless.readings.rank import Rank
from logitless.readings.reading import Reading, Row, Upstream, told
from logitless.softmax import Coefficients

STATS = ("top1", "collision", "mean_logit", "logit_variance", "max_logit", "rank")
"""Names that ``stats=`` takes."""

TEACHER_STATS = ("acceptance", "teacher_log_z", "teacher_shared", "teacher_top1")
"""Names that ``stats=`` takes, too, where there is a teacher."""


@dataclass(frozen=True, eq=False)
class Table:
    """Readings in the order of their lines. Listed ids are the last: their gradient is finished from all others'."""

    readings: tuple[Reading, ...]

    @staticmethod
    def of(
        stats: Sequence[str], top_k: int, ids: Tensor | None, *, negative: bool, start: int, rest: bool = False
    ) -> Table | None:
        """The readings that are asked for; None for none."""
        readings: list[Reading] = []
        if top_k or {"top1", "max_logit"} & set(stats):
            readings.append(Best(tuple(stats), top_k, negative, start))
        if {"collision", "mean_logit", "logit_variance"} & set(stats):
            readings.append(Moments(tuple(stats)))
        if "rank" in stats:
            readings.append(Rank(negative, start))
        if ids is not None:
            readings.append(Ids(ids, negative, start, rest))
        return Table(tuple(readings)) if readings else None

    @property
    def width(self) -> int:
        return sum(x.width for x in self.readings)

    @property
    def differentiable(self) -> tuple[str, ...]:
        return tuple(name for x in self.readings for name in x.differentiable)

    @property
    def only_best(self) -> bool:
        """Whether the best column and its logit answer all that is asked for."""
        return len(self.readings) == 1 and isinstance(self.readings[0], Best) and self.readings[0].count == 1

    @property
    def rank(self) -> Rank | None:
        """The reading that takes a second look, or None."""
        return next((x for x in self.readings if isinstance(x, Rank)), None)

    @property
    def rest(self) -> bool:
        """Whether the log-prob of all columns but the listed ones is read."""
        return any(isinstance(x, Ids) and x.rest for x in self.readings)

    def cut(self, rows: slice | Tensor) -> Table:
        return Table(tuple(x.cut(rows) for x in self.readings))

    def padded(self, num_rows: int) -> Table:
        return Table(tuple(x.padded(num_rows) for x in self.readings))

    def lines(self, backend: Backend, tile: Problem, rows: slice) -> Tensor:
        """``[width, r]`` lines of a tile."""
        found = [x.lines(backend, tile, rows) for x in self.readings]
        return found[0] if len(found) == 1 else torch.cat(found)

    def merge(self, parts: Tensor) -> Tensor:
        """``[P, width, R]`` to ``[width, R]``, added in order."""
        split = parts.split([x.width for x in self.readings], 1)
        return torch.cat([x.merge(part) for x, part in zip(self.readings, split, strict=True)])

    def results(self, lines: Tensor, row: Row, ahead: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Results of the whole vocabulary by name, and tensors for backward. ``ahead`` ``[R]`` are the columns before
        the target, where a rank is asked for."""
        results, saved = {}, {}
        split = lines.split([x.width for x in self.readings])
        for reading, own in zip(self.readings, split, strict=True):
            own = ahead[None] if isinstance(reading, Rank) and ahead is not None else own
            of_reading = {name: told(x, row) for name, x in reading.results(own, row).items()}
            saved |= reading.saved(own, of_reading)
            results |= of_reading
        return results, saved

    def key(self, lines: Tensor) -> Tensor:
        """``[R]`` keys of the targets, against which a rank counts columns."""
        split = lines.split([x.width for x in self.readings])
        return next(own for x, own in zip(self.readings, split, strict=True) if isinstance(x, Rank))[0]

    def extend(self, coef: Coefficients, saved: Mapping[str, Tensor], row: Row, up: Upstream) -> Coefficients:
        """The coefficients of dZ, with those of the upstream gradients of all readings added."""
        for reading in self.readings:
            coef = reading.extend(coef, saved, row, up)
        return coef
