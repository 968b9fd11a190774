"""Metrics of a loss, as sums and counts until :meth:`Metrics.compute` makes numbers of them.

A mean of means is wrong as soon as micro-batches differ in size, and reading a number stalls the device. So a metric
has a form that adds up over chunks, micro-batches and ranks; :meth:`Metrics.compute` alone waits for the device.

    sums       add up                       the loss and its parts
    means      (sum, count)                 clip fraction, approximate KL, entropy, ...
    maxima     largest, -inf without rows
    minima     smallest, inf without rows
    weights    (sum w, sum w^2, count)      effective sample size as a fraction: (sum w)^2 / sum w^2 / count
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from logitless.collectives import gather_over, resolve_group, table_over
from logitless.errors import LogitlessError
from logitless.errors.arguments import check_flags, instance, refused, sequence

KINDS = ("sums", "means", "maxima", "minima", "weights")


@dataclass(frozen=True, eq=False)
class Metrics:
    """Named quantities of some rows, in tensors. Each kind is a mapping from name to float64 tensor.

    >>> one = Metrics.of_rows({"ratio": torch.tensor([1.0, 3.0, 9.0])}, torch.tensor([True, True, False]))
    >>> two = Metrics.of_rows({"ratio": torch.tensor([5.0])}, torch.tensor([True]))
    >>> Metrics.merge([one, two]).compute()
    {'ratio': 3.0}
    """

    sums: Mapping[str, Tensor] = field(default_factory=dict)
    means: Mapping[str, Tensor] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    minima: Mapping[str, Tensor] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of_rows(
        means: Mapping[str, Tensor],
        counted: Tensor,
        *,
        extremes: Mapping[str, Tensor] | None = None,
        weights: Mapping[str, Tensor] | None = None,
        sums: Mapping[str, Tensor] | None = None,
    ) -> Metrics:
        """Metrics of ``[C]`` values at the counted rows.

        Args:
            means: values to average.
            extremes: values of which ``NAME_max`` and ``NAME_min`` are wanted.
            weights: importance weights of which the effective sample size is wanted.
            sums: 0-dim values that add up as they are.
        """
        extremes, weights, sums = ({} if x is None else x for x in (extremes, weights, sums))
        if not isinstance(counted, Tensor) or counted.layout != torch.strided or counted.dtype != torch.bool:
            raise refused("Metrics.of_rows: counted", "a tensor of True and False", counted)
        for name, x in {"means": means, "extremes": extremes, "weights": weights, "sums": sums}.items():
            _check_values(f"Metrics.of_rows: {name}", x, counted if name != "sums" else None)
        return metrics_of(means, counted, len(counted), counted.device, extremes, weights, sums)

    @staticmethod
    def merge(several: Sequence[Metrics]) -> Metrics:
        """The metrics of all rows together, from those of chunks or micro-batches of one objective."""
        if not all(
            isinstance(one, Metrics) for one in sequence(several, "Metrics.merge: several", "a list of Metrics")
        ):
            raise LogitlessError("Metrics.merge: several must be a list of Metrics, and of nothing else.")
        if not len(several):
            raise LogitlessError("Metrics.merge: several has no metrics; wanted at least one.")
        names = several[0]._names()
        for place, other in enumerate(several):
            if other._names() != names:
                odd = sorted({n for _, n in names} ^ {n for _, n in other._names()})
                raise LogitlessError(
                    f"Metrics.merge: entry {place} has other metrics than entry 0: they differ in {odd}. Merge metrics "
                    f"of one objective with the same fields."
                )
        return several[0]._from_parts(torch.stack([one._flat() for one in several]))

    def reduce(self, group: Any, *, check: bool = False) -> Metrics:
        """The metrics of all ranks of the group, which have different rows (DP x CP). One ``all_gather`` in all.

        Args:
            check: compare the names over the group first. Ranks with other metrics (another objective, a field that
                one rank lacks) end in an error on all of them, where a gather of other sizes would hang or abort. One
                more small collective.
        """
        check_flags("Metrics.reduce", check=check)
        group = resolve_group(group, "Metrics.reduce: group")
        if group is None:
            return self
        if check:
            _check_names(table_over(group, tuple(self._names())))
        return self._from_parts(gather_over(group, self._flat()))

    def compute(self) -> dict[str, float]:
        """Plain numbers: the one place that waits for the device. Without counted rows a mean or extreme is NaN."""
        numbers = iter(self._flat().tolist())
        out: dict[str, float] = {}
        for kind, name in self._names():
            out[name] = _NUMBER[kind](*[next(numbers) for _ in range(_WIDTH[kind])])
        return out

    def _names(self) -> list[tuple[str, str]]:
        return [(kind, name) for kind in KINDS for name in getattr(self, kind)]

    def _flat(self) -> Tensor:
        values = [getattr(self, kind)[name].reshape(-1) for kind, name in self._names()]
        return torch.cat(values) if values else torch.zeros(0, dtype=torch.float64, device="cpu")

    def _from_parts(self, parts: Tensor) -> Metrics:
        """One from ``[P, K]`` flat metrics of P micro-batches or ranks, all with the names of these."""
        if not parts.shape[1]:
            return self
        added, largest, smallest = parts.sum(0), parts.amax(0), parts.amin(0)
        kinds: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
        place = 0
        for kind, name in self._names():
            source = {"maxima": largest, "minima": smallest}.get(kind, added)
            values = source[place : place + _WIDTH[kind]]
            kinds[kind][name] = values[0] if _WIDTH[kind] == 1 else values
            place += _WIDTH[kind]
        return Metrics(**kinds)


Evaluate = Callable[[], tuple[Tensor, Metrics]]
"""Makes a loss and its metrics."""


def _check_names(table: Sequence[tuple[tuple[str, str], ...]]) -> None:
    """Every rank sees the same table, so every rank raises the same error, or none does."""
    for rank, names in enumerate(table):
        if names != table[0]:
            odd = sorted({n for _, n in names} ^ {n for _, n in table[0]})
            raise LogitlessError(
                f"Metrics.reduce: rank {rank} has other metrics than rank 0: they differ in {odd or 'their order'}. "
                f"Every rank reduces metrics of one objective with the same fields."
            )


def _check_values(argument: str, values: Any, counted: Tensor | None) -> None:
    """Raise unless these are real tensors by name, each with a value for every row; sums are numbers."""
    shape = torch.Size() if counted is None else counted.shape
    for x in values.values() if isinstance(values, dict) else instance(values, Mapping, argument).values():
        good = isinstance(x, Tensor) and x.layout == torch.strided and x.shape == shape and not x.is_complex()
        if not good or (counted is not None and x.device != counted.device):
            like = "a number" if counted is None else f"one value for each of {list(shape)} rows"
            raise refused(argument, f"tensors, {like},", x)


def metrics_of(
    means: Mapping[str, Tensor],
    counted: Tensor | None,
    num_rows: int,
    device: torch.device,
    extremes: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    sums: Mapping[str, Tensor],
) -> Metrics:
    """:meth:`Metrics.of_rows` of values that were checked; ``counted`` is None where all rows are known to count.

    All values are in one table, because on a GPU vectors this short cost launches and little else.
    """
    if counted is None:
        count = torch.full((), num_rows, dtype=torch.float64, device=device)
    else:
        count = counted.sum(dtype=torch.float64)
    added = len(means) + len(weights)
    rows = _stacked([*means.values(), *weights.values(), *extremes.values()], num_rows, device)
    table = _where_counted(rows[:added], counted, 0.0)
    total = table.sum(1)
    pairs = torch.stack([total, count.expand_as(total)], 1)[: len(means)]
    w = total[len(means) :]
    w2 = table[len(means) :].square().sum(1) if weights else w
    largest = smallest = total[:0]
    if extremes and num_rows:
        largest = _where_counted(rows[added:], counted, -math.inf).amax(1)
        smallest = _where_counted(rows[added:], counted, math.inf).amin(1)
    elif extremes:
        # torch takes no maxima over no elements.
        largest, smallest = (count.new_full((len(extremes),), x) for x in (-math.inf, math.inf))
    weighed = torch.stack([w, w2, count.expand_as(w)], 1) if weights else ()
    whole = torch.stack([x.detach() for x in sums.values()]).double() if sums else ()
    return Metrics(
        sums=dict(zip(sums, whole, strict=True)),
        means=dict(zip(means, pairs, strict=True)),
        maxima={f"{name}_max": x for name, x in zip(extremes, largest, strict=True)},
        minima={f"{name}_min": x for name, x in zip(extremes, smallest, strict=True)},
        weights=dict(zip(weights, weighed, strict=True)),
    )


def _stacked(values: list[Tensor], num_rows: int, device: torch.device) -> Tensor:
    """``[K, C]`` float64 values of all rows."""
    if not values:
        return torch.zeros((0, num_rows), dtype=torch.float64, device=device)
    alike = len({x.dtype for x in values}) == 1
    return torch.stack([x.detach() if alike else x.detach().double() for x in values]).double()


def _where_counted(rows: Tensor, counted: Tensor | None, other: float) -> Tensor:
    """The same with ``other`` at rows that are not counted."""
    return rows if counted is None else torch.where(counted, rows, other)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


_WIDTH = {"sums": 1, "means": 2, "maxima": 1, "minima": 1, "weights": 3}
_NUMBER: dict[str, Callable[..., float]] = {
    "sums": lambda x: x,
    "means": _ratio,
    "maxima": lambda x: math.nan if x == -math.inf else x,
    "minima": lambda x: math.nan if x == math.inf else x,
    # The effective sample size of weights that are all 0 is 0, not 0 / 0.
    "weights": lambda w, w2, count: _ratio(w * w, w2 * count) if w2 or not count else 0.0,
}
