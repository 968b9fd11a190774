"""Sums over a row: ``stats=("collision", "mean_logit", "logit_variance")``.

The gradient of the collision is ``2 g p (p - collision)``; that of the mean logit ``g / number of columns``, 0 at -inf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from logitless.backends.contract import MOMENTS, Backend, Problem
from logitless.readings.reading import Plain, Row, Upstream
from logitless.softmax import Coefficients

STATS = ("collision", "mean_logit", "logit_variance")


@dataclass(frozen=True, eq=False)
class Moments(Plain):
    """Maximum and sum of squared exponentials; count, center, mean less the center, and squares about the mean."""

    stats: tuple[str, ...]

    width = MOMENTS

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in STATS if name in self.stats)

    @property
    def differentiable(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(name for name in self.names if name != "logit_variance")

    def lines(self, backend: Backend, tile: Problem, rows: slice) -> Tensor:
        return backend.moments(tile)

    def merge(self, parts: Tensor) -> Tensor:
        """Means are merged by their counts, about one of the centers, and squares about the new mean."""
        m, q, count, center, mean, squares = parts.unbind(1)
        top = m.amax(0)
        shift = torch.where(m == -torch.inf, 0.0, m - top)
        total = count.sum(0)
        # The base is the center of a part that has columns: that of an empty one is 0, and may be far away.
        base = center.gather(0, count.argmax(0, keepdim=True))
        mean = torch.where(count == 0, 0.0, (center - base) + mean)
        new = (count / total.clamp_min(1.0) * mean).sum(0)
        squares = torch.where(count == 0, 0.0, squares + count * (mean - new).square()).sum(0)
        return torch.stack([top, (q * (2 * shift).exp()).sum(0), total, base[0], new, squares])

    def results(self, lines: Tensor, row: Row) -> dict[str, Tensor]:
        m, q, count, center, mean, squares = lines
        results = {
            "collision": q * (2 * ((m - row.norm.reference) - row.norm.log_sum)).exp(),
            "mean_logit": center + mean,
            "logit_variance": squares / count,
        }
        return {name: results[name] for name in self.names}

    def saved(self, lines: Tensor, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        counted = {"counted": lines[2]} if "mean_logit" in self.stats else {}
        return counted | ({"collision": results["collision"]} if "collision" in self.stats else {})

    def extend(self, coef: Coefficients, saved: Mapping[str, Tensor], row: Row, up: Upstream) -> Coefficients:
        p = up.logprob.exp()
        if "collision" in up.by:
            square = 2 * up.by["collision"]
            less = square * saved["collision"]
            at_target = coef.at_target + p * (square * p - less)
            coef = coef._replace(plain=coef.plain - less, at_target=at_target, square=square)
        if "mean_logit" in up.by:
            constant = up.by["mean_logit"] / saved["counted"]
            at_target = coef.at_target + torch.where(up.logprob == -torch.inf, 0.0, constant)
            coef = coef._replace(at_target=at_target, constant=constant)
        return coef
