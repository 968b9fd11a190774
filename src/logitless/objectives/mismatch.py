"""Train-inference mismatch: how far the engine that sampled the tokens is from the policy that trains on them.

With d = logprob - rollout_logprob at a token, and w = e^d its importance weight:

    KL(rollout || trainer)     k1 = mean of -d, k3 = mean of w - 1 - d
    how far                    largest and quantiles of |d|, the share of tokens beyond a bound
    effective sample size      (sum w)^2 / (n sum w^2) over tokens; over samples with the product of their weights
    who                        the worst samples, and the worst token of each

:func:`measures` are those that add up over chunks, micro-batches and ranks, which an objective logs; :func:`mismatch`
is the whole report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.collectives import gather_over, resolve_group, sum_over
from logitless.errors import LogitlessError
from logitless.errors.arguments import described, is_number, real_numbers, refused, sequence
from logitless.objectives.checks import check_rows, sequence_group
from logitless.objectives.inputs import bounded_exp
from logitless.objectives.kl import k3_of
from logitless.objectives.metrics import Metrics
from logitless.rows import Rows

BOUND = math.log(2.0)
"""A token is beyond it if its two probabilities differ by more than a factor of two."""

QUANTILES = (0.5, 0.9, 0.99, 0.999)


class Measures(NamedTuple):
    """``[C]`` values by name: to be averaged, of which extremes are wanted, and importance weights."""

    means: dict[str, Tensor]
    extremes: dict[str, Tensor]
    weights: dict[str, Tensor]


def measures(log_ratio: Tensor, bound: float = BOUND) -> Measures:
    """What adds up, from ``[C]`` log-ratios of the trainer to the rollout engine."""
    # Not "above": a NaN is beyond any bound.
    beyond = ~(log_ratio.abs() <= bound)
    kl = {"kl_k1": -log_ratio, "kl_k3": k3_of(-log_ratio)}
    return Measures(
        means={**kl, "beyond": beyond.to(log_ratio.dtype)},
        extremes={"log_ratio": log_ratio},
        weights={"effective_sample_size": bounded_exp(log_ratio)},
    )


@dataclass(frozen=True)
class Outlier:
    """A sample by its worst token.

    Attributes:
        sample: its number in the micro-batch.
        tokens, beyond: its tokens on this rank that count, and those of them beyond the bound.
        log_ratio: summed over the whole sample: the logarithm of its importance weight.
        position, token: place of its worst token in the response, and that token's id.
        logprob, rollout_logprob: of that token.
    """

    sample: int
    tokens: int
    beyond: int
    log_ratio: float
    position: int
    token: int
    logprob: float
    rollout_logprob: float


@dataclass(frozen=True)
class Mismatch:
    """What :func:`mismatch` found. Over all ranks of ``group``, but for ``quantiles`` and ``outliers``.

    Attributes:
        tokens, samples: how many count.
        not_finite: tokens whose log-ratio is infinite or NaN.
        kl_k1, kl_k3: estimates of KL(rollout || trainer) per token, in nats.
        largest: largest absolute log-ratio.
        quantiles: of the absolute log-ratio, on this rank.
        bound, beyond: the bound, and the share of tokens beyond it.
        effective_tokens, effective_samples: effective sample size over the number of tokens, and of samples.
        outliers: samples of this rank with the worst tokens, worst first.
    """

    tokens: int
    samples: int
    not_finite: int
    kl_k1: float
    kl_k3: float
    largest: float
    quantiles: Mapping[float, float]
    bound: float
    beyond: float
    effective_tokens: float
    effective_samples: float
    outliers: tuple[Outlier, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, as JSON takes them."""
        return {**asdict(self), "quantiles": {f"{q:g}": x for q, x in self.quantiles.items()}}

    def __str__(self) -> str:
        spread = ", ".join(f"{100 * q:g}% {x:.2e}" for q, x in self.quantiles.items())
        lines = [
            f"mismatch of {self.tokens:,} tokens in {self.samples:,} samples",
            f"  KL(rollout || trainer)   k1 {self.kl_k1:.3e}, k3 {self.kl_k3:.3e}",
            f"  |log ratio|              {spread + ', ' if spread else ''}largest {self.largest:.3g}",
            f"  beyond {self.bound:<18.3g}{100 * self.beyond:.3g}% of the tokens",
            f"  effective sample size    tokens {self.effective_tokens:.1%}, samples {self.effective_samples:.1%}",
        ]
        if self.not_finite:
            lines.append(f"  not finite               {self.not_finite:,} tokens")
        if self.outliers:
            lines.append("  sample  tokens  beyond  log ratio  worst at      id   trainer   rollout")
        lines += [
            f"  {x.sample:6}  {x.tokens:6}  {x.beyond:6}  {x.log_ratio:9.3g}  {x.position:8}  {x.token:6}"
            f"  {x.logprob:8.3f}  {x.rollout_logprob:8.3f}"
            for x in self.outliers
        ]
        return "\n".join(lines)


def mismatch(
    logprob: Tensor,
    rollout_logprob: Tensor,
    rows: Rows,
    *,
    bound: float = BOUND,
    quantiles: Sequence[float] = QUANTILES,
    worst: int = 8,
    cp_group: Any = None,
    group: Any = None,
) -> Mismatch:
    """Report how far the rollout engine is from the policy that trains on its tokens. Waits for the device.

    Args:
        logprob: ``[R]`` log-probs of the trainer, before the update.
        rollout_logprob: ``[R]`` log-probs that the engine reported.
        rows: the rows; those that do not count are left out.
        bound: absolute log-ratio that a token should not exceed.
        quantiles: of the absolute log-ratio, each in 0 .. 1.
        worst: most samples to list.
        cp_group: context-parallel group; None if the rows are not split. One all-reduce of ``[N]``.
        group: all ranks that have a part of the batch (DP x CP); None if this process has all of it. Two gathers of a
            few numbers: quantiles and outliers stay those of the rank.

    >>> rows = Rows.packed([[1, 2, 3], [4, 5]], [2, 1])
    >>> found = mismatch(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.5, -3.0]), rows, worst=1)
    >>> round(found.largest, 3), found.outliers[0].token
    (0.5, 3)
    """
    _check(logprob, rollout_logprob, rows, bound, quantiles, worst)
    cp_group = sequence_group("mismatch", rows, cp_group, needed=True)
    group = resolve_group(group, "mismatch: group")
    counted = rows.counted
    trainer, rollout = (torch.where(counted, x.detach().double(), 0.0) for x in (logprob, rollout_logprob))
    ratio = trainer - rollout
    by_sample = rows.sum_by_sample(ratio)
    if cp_group is not None:
        sum_over(cp_group, by_sample)
    copies = 1 if cp_group is None else cp_group.size()
    numbers = _numbers(ratio, by_sample, counted, rows.totals > 0, bound, copies, group)
    distance = ratio.abs()[counted]
    return Mismatch(
        tokens=round(numbers["tokens"]),
        samples=round(numbers["samples"]),
        not_finite=round(numbers["not_finite"]),
        kl_k1=numbers["kl_k1"],
        kl_k3=numbers["kl_k3"],
        largest=max(numbers["log_ratio_max"], -numbers["log_ratio_min"]),
        quantiles=_quantiles(distance, quantiles),
        bound=bound,
        beyond=numbers["beyond"],
        effective_tokens=numbers["effective_sample_size"],
        effective_samples=numbers["samples_effective"],
        outliers=_outliers(trainer, rollout, by_sample, rows, bound, worst),
    )


def _numbers(
    ratio: Tensor, by_sample: Tensor, counted: Tensor, present: Tensor, bound: float, copies: int, group: Any
) -> dict[str, float]:
    """Everything that adds up, over the ranks of the group."""
    # A product over a sample may overflow. An effective size knows no scale, so the largest product is made 1.
    largest = torch.nn.functional.pad(by_sample.masked_fill(~present, -torch.inf), (0, 1), value=-torch.inf).amax()
    if group is not None:
        largest = gather_over(group, largest[None]).amax()
    means, extremes, weights = measures(ratio, bound)
    tokens = Metrics.of_rows(
        means,
        counted,
        extremes=extremes,
        weights=weights,
        sums={
            "tokens": counted.sum(),
            "not_finite": (counted & ~ratio.isfinite()).sum(),
            # Every context-parallel rank of a sample has it.
            "samples": present.sum() / copies,
        },
    )
    samples = Metrics.of_rows({}, present, weights={"samples_effective": (by_sample - largest).exp()})
    both = replace(tokens, weights={**tokens.weights, **samples.weights})
    return both.reduce(group).compute()


def _quantiles(distance: Tensor, wanted: Sequence[float]) -> dict[float, float]:
    """Quantiles with linear interpolation, NaN without tokens. Sorted, because ``torch.quantile`` takes 16M at most."""
    if not len(distance):
        return dict.fromkeys(wanted, math.nan)
    ordered, out = distance.sort().values, {}
    for q in wanted:
        below = math.floor(q * (len(ordered) - 1))
        part = q * (len(ordered) - 1) - below
        low = float(ordered[below])
        # Not a product alone: between two infinite distances there is no difference.
        out[q] = low + part * (float(ordered[below + 1]) - low) if part else low
    return out


def _outliers(
    trainer: Tensor, rollout: Tensor, by_sample: Tensor, rows: Rows, bound: float, worst: int
) -> tuple[Outlier, ...]:
    counted = rows.counted
    distance = torch.where(counted, (trainer - rollout).abs(), -1.0).nan_to_num(torch.inf, torch.inf)
    lengths = torch.tensor(rows.counts, dtype=torch.int64, device="cpu")
    starts = lengths.cumsum(0) - lengths
    per_sample = torch.segment_reduce(distance, "max", lengths=lengths.to(distance.device), unsafe=True, initial=-1)
    found = []
    for sample in per_sample.cpu().argsort(descending=True, stable=True)[:worst].tolist():
        span = slice(int(starts[sample]), int(starts[sample] + lengths[sample]))
        if not bool(counted[span].any()):
            break
        at = span.start + int(distance[span].argmax())
        found.append(
            Outlier(
                sample=sample,
                tokens=int(counted[span].sum()),
                beyond=int((distance[span] > bound).sum()),
                log_ratio=float(by_sample[sample]),
                position=int(rows.position[at]),
                token=int(rows.target[at]),
                logprob=float(trainer[at]),
                rollout_logprob=float(rollout[at]),
            )
        )
    return tuple(found)


def _check(
    logprob: Tensor, rollout_logprob: Tensor, rows: Rows, bound: float, quantiles: Sequence[float], worst: int
) -> None:
    check_rows("mismatch", rows)
    for name, x in (("logprob", logprob), ("rollout_logprob", rollout_logprob)):
        if tuple(real_numbers(x, f"mismatch: {name}").shape) != (len(rows),):
            raise LogitlessError(
                f"mismatch: {name} has shape {list(x.shape)} but there are {len(rows)} rows. Values of whole "
                f"responses are rows.from_responses(...)."
            )
        if x.device != rows.target.device:
            raise LogitlessError(f"mismatch: {name} is on {x.device} but the rows are on {rows.target.device}.")
    # An infinite bound is one that no token exceeds.
    if not (is_number(bound) or (isinstance(bound, float) and bound == math.inf)) or bound < 0:
        raise refused("mismatch: bound", "a number of 0 or more", bound)
    for q in sequence(quantiles, "mismatch: quantiles", "a list of numbers in 0 .. 1"):
        if not is_number(q) or not 0 <= q <= 1:
            raise LogitlessError(f"mismatch: quantiles must be numbers in 0 .. 1 but one is {described(q)}.")
    if type(worst) is not int or worst < 0:
        raise LogitlessError(f"mismatch: worst must be a number of samples, 0 or more, but is {worst!r}.")
