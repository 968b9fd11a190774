"""The inputs of an objective's terms: ``[C]`` vectors of some rows, and means over whole samples.

A term is a plain function of :class:`Inputs` that returns one value per row. It sees no logits, ranks or micro-batches:

    def advantage_times_ratio(inputs):
        return -inputs.advantage * bounded_exp(inputs.log_ratio)

Terms see zeros at rows that are not counted, so that their values reach neither the loss nor its gradient. ``C`` is the
number of rows: all R of them, or those of one chunk.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.collectives import sum_over
from logitless.errors import LogitlessError, no_second_derivative
from logitless.errors.arguments import FLOATS, INTEGERS, real_numbers, refused

KNOWN_FIELDS = ("old_logprob", "advantage", "ref_logprob", "rollout_logprob")
"""Fields that named terms read. Users' own terms may read others."""

NUMBERS = (*KNOWN_FIELDS, "token_weight")
"""Fields that are computed with, so that integers become floating-point numbers: a negated uint8 would wrap around."""

RESULTS = ("logprob", "entropy", "divergence", "log_z", "mean_logit")
"""Results of rows that a loss may have terms on."""

LARGEST_LOG_RATIO = 20.0
"""A ratio of two probabilities is taken to be at most e^20, about 5e8: beyond it a ratio tells nothing and its gradient
is 0. Without a bound float32 overflows at e^88, and the gradient of a clipped row would be 0 * inf."""


STATISTICS = ("top1_hit", "top1_logprob", "collision", "mean_logit", "logit_variance", "max_logit", "rank")
"""Results that are averaged as metrics where they are there."""


def statistics_of(stats: Any, but: tuple[str, ...]) -> dict[str, Tensor]:
    """Further results of rows, for metrics; but for those that a term of the objective asks for itself."""
    found = {name: getattr(stats, name, None) for name in STATISTICS if name not in but}
    return {name: x.detach().to(stats.logprob.dtype) for name, x in found.items() if x is not None}


def widened(stats: Any) -> Any:
    """Results of rows in float32 at least, with their graph: in 16 bits a ratio near 1 would have two digits."""
    dtype = torch.promote_types(stats.logprob.dtype, torch.float32)
    found = {name: getattr(stats, name, None) for name in RESULTS}
    narrow = {name: x.to(dtype) for name, x in found.items() if x is not None and x.dtype != dtype}
    return stats._replace(**narrow) if narrow else stats


def results_of(stats: Any, objective: Any) -> dict[str, Any]:
    """Of :class:`Inputs`, what comes from results of the rows."""
    stats = widened(stats)
    return {
        "logprob": stats.logprob,
        "entropy": stats.entropy,
        "divergence": getattr(stats, "divergence", None),
        "log_z": stats.log_z if objective.log_z else None,
        "mean_logit": stats.mean_logit if objective.stats else None,
        "statistics": statistics_of(stats, objective.stats),
    }


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """``exp(log_ratio)``, constant from e^20 on."""
    if not isinstance(log_ratio, Tensor) or log_ratio.dtype not in FLOATS or log_ratio.layout != torch.strided:
        real_numbers(log_ratio, "bounded_exp: log_ratio")
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


@dataclass(frozen=True, eq=False)
class Inputs:
    """``[C]`` vectors of some rows. Fields read as attributes: ``inputs.advantage``.

    Attributes:
        logprob: differentiable.
        entropy: or None where it was not computed.
        fields: what the caller gave by name; no gradient flows to them.
        counted: bool, whether the row counts in the loss.
        weight: of each row in the loss, 0 where it is not counted: the loss is ``sum(weight * row loss)``.
        sample: number of the row's sample, among all of the batch.
        totals: ``[N]`` counted response tokens of each sample, over all ranks and chunks.
        counts: rows of each sample among these, on the CPU; None if these rows may cut through a sample, or if no term
            of the objective takes means over samples.
        group: process group that per-sample sums run over, or None if samples are not split.
        on_policy: the old log-probs are these log-probs: the ratio is 1, its gradient is not.
        divergence: of the row's distribution from its teacher's, differentiable; None where there is no teacher.
        log_z, mean_logit: differentiable; None unless the objective has a term on them.
        statistics: further results of the rows by name, for metrics alone.
        batch: tensors by name that belong to samples, to pairs of them, or to all.
        owners: of such tensors, the ascending number of the sample that each entry goes with when rows are cut; those
            that are not named here are cut nowhere.
        first: number of the first sample of ``counts``.
        complete: whether every row is known to be counted.
        _ready, _clean: whether fields and weight, or all vectors, are as :meth:`cleaned` makes them.
    """

    logprob: Tensor
    entropy: Tensor | None
    fields: Mapping[str, Tensor]
    counted: Tensor
    weight: Tensor
    sample: Tensor
    totals: Tensor
    counts: tuple[int, ...] | None
    group: dist.ProcessGroup | None = None
    on_policy: bool = False
    divergence: Tensor | None = None
    log_z: Tensor | None = None
    mean_logit: Tensor | None = None
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    batch: Mapping[str, Tensor] = field(default_factory=dict)
    owners: Mapping[str, Sequence[int]] = field(default_factory=dict)
    first: int = 0
    complete: bool = False
    _ready: bool = False
    _clean: bool = False

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_"):
            raise AttributeError(name)
        if name == "old_logprob" and self.on_policy:
            return self.logprob.detach()
        if name not in self.fields:
            came = ", ".join(self.fields) or "none"
            raise LogitlessError(
                f"Objective: a term reads the field {name!r}, which was not given (fields here: {came}). "
                f"Pass {name}= with the loss, and name it in needs= so that its absence is seen before anything runs."
            )
        return self.fields[name]

    def __len__(self) -> int:
        return self.logprob.shape[0]

    def has(self, name: str) -> bool:
        """Whether a field can be read."""
        if not isinstance(name, str):
            raise refused("Inputs.has: name", "the name of a field", name)
        return name in self.fields or (name == "old_logprob" and self.on_policy)

    @property
    def log_ratio(self) -> Tensor:
        """``logprob - old_logprob``; differentiable."""
        return self.logprob - self.old_logprob

    def mean_by_sample(self, x: Tensor) -> Tensor:
        """Mean of ``x`` over the counted tokens of each row's sample, at every counted row; 0 at the others.

        Differentiable. Over a sequence group: one all-reduce of ``[N]``, and one in backward, because each rank has a
        part of the loss. Same bits on every run: segment sums, no atomics, forward and backward.
        """
        lengths, totals = self._lengths(x), self.totals[self.first : self.first + len(self.counts or ())]
        return _MeanBySample.apply(x, self.counted, self.sample - self.first, totals, lengths, self.group)  # pyright: ignore[reportReturnType]

    def sum_by_sample(self, x: Tensor) -> Tensor:
        """As :meth:`mean_by_sample`, but a sum."""
        mean = self.mean_by_sample(x)
        return mean * self.totals[self.sample].to(mean.dtype)

    def sums(self, x: Tensor) -> Tensor:
        """``[N]`` sum of ``x`` over the counted tokens of each sample: what compares samples, where a term on rows does
        not. Differentiable, over the group and with the same bits on every run, as :meth:`mean_by_sample`."""
        here = self.sums_here(x)
        return torch.nn.functional.pad(here, (self.first, len(self.totals) - self.first - len(here)))

    def sums_here(self, x: Tensor) -> Tensor:
        """The same of the samples that have rows here, from number ``first`` on."""
        return _Sums.apply(x, self.counted, self.sample - self.first, self._lengths(x), self.group)  # pyright: ignore[reportReturnType]

    def _lengths(self, x: Tensor) -> Tensor:
        """``[N]`` rows of each sample, for sums of ``x`` over them."""
        real_numbers(x, "Inputs: x", (len(self),), "row", self.counted.device, (*FLOATS, *INTEGERS, torch.bool))
        if self.counts is None:
            raise LogitlessError(
                "Objective: a term takes a mean over samples, but may be given rows that cut through them. "
                'Declare Objective(level="sequence"), and it will see whole samples.'
            )
        return torch.tensor(self.counts, dtype=torch.int64, device="cpu").to(x.device, non_blocking=True)

    def cut(self, start: int, stop: int, whole_samples: bool) -> Inputs:
        """The rows ``start .. stop``.

        Args:
            whole_samples: the caller promises that the cut falls between samples; sums over samples are then possible.
                Checked against the rows here. Not where samples are split over a group.
        """
        of_samples = self._of_samples(self._samples(start, stop)) if whole_samples else {"counts": None}
        part = slice(start, stop)
        return replace(
            self,
            **{name: x[part] for name, x in self._results().items()},
            fields={name: x[part] for name, x in self.fields.items()},
            statistics={name: x[part] for name, x in self.statistics.items()},
            counted=self.counted[part],
            weight=self.weight[part],
            sample=self.sample[part],
            **of_samples,
        )

    def _results(self) -> dict[str, Tensor]:
        """The log-probs, and the other results that are there."""
        return {name: x for name in RESULTS if (x := getattr(self, name)) is not None}

    @functools.cached_property
    def _ends(self) -> list[int]:
        """Rows up to the end of each sample: found once, and not for every cut."""
        return list(itertools.accumulate(self.counts or ()))

    def _samples(self, start: int, stop: int) -> slice:
        """Places in ``counts`` of the samples that rows ``start .. stop`` are, those without rows at either end among
        them: a pair may be of one that has rows and one that has none."""
        if self.counts is None:
            raise LogitlessError("Inputs.cut: whole_samples=True, but these rows may already cut through a sample.")
        if self.group is not None and self.group.size() > 1:
            raise LogitlessError("Inputs.cut: whole_samples=True, but samples are split over the ranks of a group.")
        ends = self._ends
        # Of samples without rows as many as end where the rows begin.
        low, high = bisect_left(ends, start), bisect_right(ends, stop)
        low += low < len(ends) and self.counts[low] > 0 and ends[low] == start
        for sample in {low, high} & set(range(len(ends))):
            begin, end = ends[sample] - self.counts[sample], ends[sample]
            part = max(0, min(end, stop) - max(begin, start))
            if part not in (0, end - begin):
                raise LogitlessError(
                    f"Inputs.cut: whole_samples=True, but rows {start} .. {stop} hold {part} of the {end - begin} rows "
                    f"of sample {self.first + sample}, which are {begin} .. {end}. Cut between samples."
                )
        return slice(low, high)

    def _of_samples(self, samples: slice) -> dict[str, Any]:
        """What there is of some of the samples: their rows, their number, and what belongs to them."""
        batch, owners = dict(self.batch), dict(self.owners)
        for name, numbers in self.owners.items():
            low, high = (bisect_left(numbers, self.first + place) for place in (samples.start, samples.stop))
            batch[name], owners[name] = batch[name][low:high], numbers[low:high]
        counts = None if self.counts is None else self.counts[samples]
        return {"counts": counts, "first": self.first + samples.start, "batch": batch, "owners": owners}

    def ordered(self, order: Tensor) -> Inputs:
        """The same rows in another order, which may cut through samples."""
        vectors = {name: getattr(self, name)[order] for name in ("logprob", "counted", "weight", "sample")}
        return replace(self, **vectors, fields={name: x[order] for name, x in self.fields.items()}, counts=None)

    def cleaned(self) -> Inputs:
        """The same rows with zeros where they are not counted, floating-point fields in the dtype of the log-probs.

        By selection, not by multiplication: a NaN at a row that is left out reaches neither value nor gradient.
        """
        ready, counted = self.readied(self.logprob.dtype), self.counted
        if self.complete:
            return replace(ready, _clean=True)
        results = {name: torch.where(counted, x, 0.0) for name, x in self._results().items()}
        return replace(ready, **results, _clean=True)

    def readied(self, dtype: torch.dtype) -> Inputs:
        """The same rows with fields and weights as :meth:`cleaned` makes them, of log-probs that will have a dtype: no
        chunk of rows has to, then."""
        if self._ready:
            return self
        fields = {n: x.to(dtype) if x.is_floating_point() or n in NUMBERS else x for n, x in self.fields.items()}
        if not self.complete:
            fields = {name: torch.where(self.counted, x, torch.zeros_like(x)) for name, x in fields.items()}
        return replace(self, fields=fields, weight=self.weight.to(dtype), _ready=True)


RESERVED = frozenset({*vars(Inputs), *Inputs.__dataclass_fields__})
"""Names that fields cannot have: a term would read what :class:`Inputs` has by that name."""


def facts_of_results(inputs: Inputs) -> dict[str, Any]:
    """What ranks that have parts of the same samples must agree on of the results that each of them gives."""
    return {
        "whether a gradient is recorded": inputs.logprob.requires_grad,
        "the dtype of logprob": str(inputs.logprob.dtype),
    }


class _MeanBySample(torch.autograd.Function):
    """Backward is the same function, because it reads counted rows only and writes to counted rows only."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, counted: Tensor, sample: Tensor, totals: Tensor, lengths: Tensor, group: Any
    ) -> Tensor:
        ctx.save_for_backward(counted, sample, totals, lengths)
        ctx.group = group
        return _mean_by_sample(x, counted, sample, totals, lengths, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise no_second_derivative("Inputs.mean_by_sample")
        counted, sample, totals, lengths = ctx.saved_tensors
        return _mean_by_sample(gradient, counted, sample, totals, lengths, ctx.group), None, None, None, None, None


def _mean_by_sample(
    x: Tensor, counted: Tensor, sample: Tensor, totals: Tensor, lengths: Tensor, group: dist.ProcessGroup | None
) -> Tensor:
    sums = _segment_sums(x, counted, lengths, group)
    return torch.where(counted, (sums / totals.clamp_min(1))[sample], 0.0)


class _Sums(torch.autograd.Function):
    """Backward hands every counted row the gradient of its sample, summed over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counted: Tensor, sample: Tensor, lengths: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(counted, sample)
        ctx.group = group
        return _segment_sums(x, counted, lengths, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise no_second_derivative("Inputs.sums")
        counted, sample = ctx.saved_tensors
        if ctx.group is not None:
            gradient = sum_over(ctx.group, gradient.clone())
        return torch.where(counted, gradient[sample], 0.0), None, None, None, None


def _segment_sums(x: Tensor, counted: Tensor, lengths: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """``[N]`` over the counted rows of each sample, on all ranks of the group."""
    x = torch.where(counted, x, 0.0)
    sums = torch.segment_reduce(x, "sum", lengths=lengths, unsafe=True, initial=0)
    return sums if group is None else sum_over(group, sums)
