"""``Preference``: a loss that compares whole samples, of which one was preferred to another.

    scores     [N] sums of log-probs of each sample, against a reference or not      ``Inputs.sums``
    losses     [P] of each pair of samples, or of each sample (kto)                 ``preference_terms``
    loss       their mean, and the chosen samples' cross-entropy where asked for

All of it in float64, on a few numbers beside the rows that they come from. Pairs whose samples lie side by side are
worked off in one pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from logitless.collectives import agree_if, fingerprint
from logitless.errors import LogitlessError, did_you_mean
from logitless.errors.arguments import check_flags, dense
from logitless.objectives.checks import check_field, check_known_name, check_rows, check_stats, finite, sequence_group
from logitless.objectives.inputs import Inputs, facts_of_results, results_of
from logitless.objectives.metrics import Evaluate, Metrics
from logitless.objectives.preference_terms import KINDS, Scores, Settings, kto
from logitless.objectives.reduction import check_denominator, inverse
from logitless.rows import Rows
from logitless.spec import TokenStats

NAME = "Preference"
PLACES = ("chosen", "rejected")
KindName = Literal["dpo", "ipo", "hinge", "simpo", "cpo", "orpo", "kto"]
"""Names of :data:`KINDS`, for editors and type checkers."""


@dataclass(frozen=True, eq=False)
class Preference:
    """A loss on samples that were preferred to others, by name. Validated when made.

    It goes where an :class:`Objective` goes: ``preference(stats, rows, ref_logprob=...)``, ``policy_loss``,
    ``explain`` and ``estimate``. Settings that are None have the kind's own default.

    Args:
        kind: one of ``KINDS``.
        beta: how much a difference weighs; 0.1, and 2 for simpo.
        label_smoothing: share of pairs that are labelled the wrong way round, below 0.5 (dpo, cpo).
        gamma: margin that simpo wants between the two; 1.
        per_token: whether scores are divided by the number of tokens. Not of orpo and kto.
        sft_coef: coefficient of the chosen samples' cross-entropy, a mean over each one's tokens; 1 for orpo and cpo.
        desirable, undesirable: weights of the two kinds of sample in kto; 1.
        chosen, rejected: sample numbers, see :meth:`pairs`.

    >>> rows = Rows.packed([[1, 2, 3], [1, 4]], [2, 1])
    >>> stats = TokenStats(torch.tensor([-1.0, -2.0, -3.0]), None, None)
    >>> loss, metrics = Preference("dpo", beta=0.5)(stats, rows, ref_logprob=torch.tensor([-1.5, -2.0, -2.0]))
    >>> round(float(loss), 4), metrics.compute()["reward_margin"]
    (0.3869, 0.75)
    """

    kind: KindName | str
    beta: float | None = None
    label_smoothing: float | None = None
    gamma: float | None = None
    per_token: bool | None = None
    sft_coef: float | None = None
    desirable: float | None = None
    undesirable: float | None = None
    chosen: tuple[int, ...] | None = None
    rejected: tuple[int, ...] | None = None

    # What a route asks of an objective.
    entropy: ClassVar[Literal["value"]] = "value"
    log_z: ClassVar[bool] = False
    stats: ClassVar[tuple[str, ...]] = ()
    sequence_level: ClassVar[bool] = True
    by_sample: ClassVar[bool] = True
    batch_level: ClassVar[bool] = False
    modules: ClassVar[bool] = False
    own_terms: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_known_name(self.kind, KINDS, f"{NAME}: kind")
        takes = KINDS[self.kind].takes
        for name in Settings._fields:
            if getattr(self, name) is not None and name not in takes:
                raise LogitlessError(f"{NAME}: {self.kind!r} does not take {name}. It takes: {', '.join(takes)}.")
            if getattr(self, name) is not None and name != "per_token":
                finite(name, getattr(self, name), NAME)
        if self.per_token is not None and not isinstance(self.per_token, bool):
            raise LogitlessError(f"{NAME}: per_token must be True or False but is {self.per_token!r}.")
        if self.settings.beta <= 0:
            raise LogitlessError(f"{NAME}: beta must be above 0 but is {self.beta!r}.")
        if not 0 <= self.settings.label_smoothing < 0.5:
            raise LogitlessError(f"{NAME}: label_smoothing must be in 0 .. 0.5 but is {self.label_smoothing!r}.")
        self._check_pairs()

    def pairs(self, chosen: Iterable[int] | Tensor, rejected: Iterable[int] | Tensor) -> Preference:
        """The same loss on these samples of a batch: ``chosen[i]`` was preferred to ``rejected[i]``.

        Without it, samples lie side by side: sample 0 was preferred to 1, 2 to 3. With kto, which has no pairs, these
        are the desirable samples and the undesirable ones.

        >>> Preference("dpo").pairs([0, 1], [2, 3]).chosen
        (0, 1)
        """
        return replace(self, chosen=chosen, rejected=rejected)

    @property
    def settings(self) -> Settings:
        """What was given, and the kind's defaults for the rest."""
        given = {name: getattr(self, name) for name in Settings._fields}
        return KINDS[self.kind].settings._replace(**{name: x for name, x in given.items() if x is not None})

    @property
    def required(self) -> tuple[str, ...]:
        """Names of the fields that must be given; a reference may also come per sample."""
        return ("ref_logprob",) if KINDS[self.kind].reference else ()

    def described(self) -> str:
        """The settings, the same on every rank."""
        chosen = self.settings._asdict()
        shown = ", ".join(f"{name}={chosen[name]!r}" for name in KINDS[self.kind].takes)
        return f"{NAME}({self.kind!r}, {shown})"

    def kept_together(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Rows of the shortest runs of samples that no pair leads out of, for samples of so many rows.

        >>> Preference("dpo").pairs([0, 2], [1, 4]).kept_together((3, 2, 1, 1, 5, 2))
        (5, 7, 2)
        """
        reach = list(range(len(counts)))
        for pair in zip(*self._samples(len(counts)), strict=True) if self.kind != "kto" else ():
            reach[min(pair)] = max(reach[min(pair)], *pair)
        runs, rows, end = [], 0, 0
        for sample, count in enumerate(counts):
            rows, end = rows + count, max(end, reach[sample])
            if sample == end:
                runs.append(rows)
                rows, end = 0, sample + 1
        return tuple(runs)

    def inputs(
        self,
        stats: TokenStats | None,
        rows: Rows,
        fields: Mapping[str, Tensor | str | None],
        *,
        denominator: float | Tensor | None = None,
        prompt_tokens: Tensor | None = None,
        group: Any = None,
    ) -> Inputs:
        """The vectors of these rows, and what belongs to their samples. All checks are made here."""
        if check_rows(NAME, rows).response_lengths is None:
            raise LogitlessError(
                f"{NAME}: it compares whole samples, but rows given as targets or (index, target) know of no samples. "
                f"Make them with Rows.packed, Rows.padded or Rows.from_mask."
            )
        if prompt_tokens is not None:
            raise LogitlessError(f'{NAME}: prompt_tokens go with reduce="prompt_mean" of an Objective.')
        device, num_rows, num_samples = rows.target.device, len(rows), len(rows.counts)
        chosen, rejected, owners = self._in_order(rows.counts)
        of_rows, of_batch = self._fields(fields, num_rows, num_samples, device)
        group = sequence_group(NAME, rows, group, needed=True)
        number = len(chosen) + (len(rejected) if self.kind == "kto" else 0)
        # A rank's loss is its part of a sum, and the context-parallel ranks of a sample all compute the same.
        count = check_denominator(NAME, number if denominator is None else denominator, device)
        scale = inverse(count) / (1 if group is None else group.size())
        if "ref_sample_logprob" in of_batch:
            owners["ref_sample_logprob"] = range(num_samples)
        for name, numbers in zip(PLACES, (chosen, rejected), strict=True):
            places = torch.tensor(numbers, dtype=torch.int64, device="cpu")
            of_batch[name] = places.to(device, non_blocking=True)
        none = stats is None
        return Inputs(
            **({"logprob": torch.zeros(num_rows, device=device), "entropy": None} if none else results_of(stats, self)),
            fields=of_rows,
            counted=rows.counted,
            weight=torch.where(rows.counted, scale, 0.0),
            sample=rows.sample,
            totals=rows.totals,
            counts=rows.counts,
            group=group,
            batch={**of_batch, "scale": scale},
            owners=owners,
        )

    def sample_sums(self, summed: bool) -> tuple[int, int]:
        """How many sums over samples forward and backward take.

        Args:
            summed: whether those of the reference were given, as ``ref_sample_logprob``.
        """
        differences = KINDS[self.kind].reference and not summed
        # The sums of the log-probs themselves are in the loss where no differences are, and in its SFT term.
        return 1 + differences, differences + (not differences or self.settings.sft_coef != 0)

    def evaluate(self, inputs: Inputs) -> tuple[Tensor, Metrics]:
        """Loss of these rows, a 0-dim sum, and their metrics, without graph. Nothing waits for the device."""
        return self.graded(inputs, measured=True)[2]()

    def graded(self, inputs: Inputs, measured: bool) -> tuple[Tensor, Tensor | None, Evaluate]:
        """As of :class:`Objective`: the loss, which has no weight of its own, and what makes loss and metrics."""
        x = inputs if inputs._clean else inputs.cleaned()
        loss, sums, scores, logprob = self._loss(x)

        def evaluate() -> tuple[Tensor, Metrics]:
            with torch.no_grad():
                return loss, self._metrics(x, {"loss": loss, **sums}, scores, logprob)

        return loss, None, evaluate

    def __call__(
        self,
        stats: TokenStats,
        rows: Rows,
        *,
        denominator: float | Tensor | None = None,
        group: Any = None,
        check_group: bool = False,
        **fields: Tensor | None,
    ) -> tuple[Tensor, Metrics]:
        """Loss of a micro-batch on this rank, a part of the batch's loss, and its metrics.

        Args:
            stats: results of ``logprobs`` for these rows.
            rows: the rows, of whole samples.
            denominator: pairs (kto: samples) of the whole batch; default: those of this micro-batch.
            group: context-parallel group; None if samples are not split.
            check_group: compare settings, samples and denominator over the group first. One more small collective.
            **fields: ``ref_logprob`` ``[R]`` or ``ref_sample_logprob`` ``[N]``, their sum over each sample, of the
                reference; ``reference_kl``, a 0-dim tensor, z of kto: the mean over the batch of the log-ratio of
                prompts with responses of others, 0 or more. Left out, z is 0.
        """

        def prepare() -> Inputs:
            check_stats(NAME, stats, len(check_rows(NAME, rows)))
            return self.inputs(stats, rows, fields, denominator=denominator, group=group)

        def facts(inputs: Inputs) -> dict[str, Any]:
            return self.facts_over_samples(inputs, denominator) | facts_of_results(inputs)

        check_flags(NAME, check_group=check_group)
        return self.evaluate(agree_if(check_group, group, NAME, prepare, facts))

    def facts_over_samples(self, inputs: Inputs, denominator: float | Tensor | None) -> dict[str, Any]:
        """What the ranks that share samples must agree on."""
        return {
            "the objective": self.described(),
            "the fields": ", ".join(sorted({*inputs.fields, *inputs.batch})),
            "the tokens of each sample that count": fingerprint(inputs.totals),
            "denominator": fingerprint(denominator),
            # As the caller named them: each rank orders the pairs by the samples that have rows there.
            "the pairs": self._samples(len(inputs.totals)),
            **{f"{n} of the batch": fingerprint(x) for n, x in sorted(inputs.batch.items()) if n not in PLACES},
        }

    def _loss(self, x: Inputs) -> tuple[Tensor, dict[str, Tensor], Scores, Tensor]:
        """Loss, its parts, the scores, and ``[N]`` log-probs of the samples."""
        wide = x.logprob.double()
        logprob = x.sums_here(wide)
        tokens = x.totals[x.first : x.first + len(logprob)].double().clamp_min(1)
        score = logprob
        if "ref_sample_logprob" in x.batch:
            score = logprob - x.batch["ref_sample_logprob"]
        elif KINDS[self.kind].reference:
            # Differences first: they are small, and their sum keeps digits that a difference of sums would lose.
            score = x.sums_here(wide - x.ref_logprob.double())
        score = score / tokens if self.settings.per_token else score
        chosen, rejected = (x.batch[name] - x.first for name in ("chosen", "rejected"))
        scores = Scores(score[chosen], score[rejected], (logprob / tokens)[chosen])
        parts = {"preference_loss": self._compared(scores, x)}
        if self.settings.sft_coef:
            parts["sft_loss"] = -self.settings.sft_coef * scores.of_chosen
        sums = {name: (x.batch["scale"] * part.sum()).to(x.logprob.dtype) for name, part in parts.items()}
        return torch.stack(list(sums.values())).sum(), sums, scores, logprob

    def _compared(self, scores: Scores, x: Inputs) -> Tensor:
        """Losses of the pairs, or of the samples."""
        loss = KINDS[self.kind].loss
        if loss is not None:
            return loss(scores, self.settings)
        z = x.batch.get("reference_kl", torch.zeros_like(x.batch["scale"]))
        return kto(scores.chosen, scores.rejected, z, self.settings)

    def _metrics(self, x: Inputs, sums: dict[str, Tensor], scores: Scores, logprob: Tensor) -> Metrics:
        means: dict[str, Tensor] = {}
        for name, score in (("chosen", scores.chosen), ("rejected", scores.rejected)):
            values = {f"reward_{name}": self.settings.beta * score, f"logprob_{name}": logprob[x.batch[name] - x.first]}
            means |= Metrics.of_rows(values, torch.ones_like(score, dtype=torch.bool)).means
        if self.kind != "kto":
            margin = self.settings.beta * (scores.chosen - scores.rejected)
            values = {"reward_margin": margin, "reward_accuracy": (margin > 0).double()}
            means |= Metrics.of_rows(values, torch.ones_like(margin, dtype=torch.bool)).means
        of_rows = {**x.statistics, **({} if x.entropy is None else {"entropy": x.entropy})}
        rows = Metrics.of_rows(of_rows, x.counted, sums=sums)
        return replace(rows, means={**means, **rows.means})

    def _in_order(self, counts: tuple[int, ...]) -> tuple[Sequence[int], Sequence[int], dict[str, Sequence[int]]]:
        """Numbers of the chosen and of the rejected samples in the order of the samples that they go with; and these,
        as ``owners`` of :class:`Inputs`.

        A pair goes with its first sample that has rows; a pair without rows with none.
        """
        chosen, rejected = self._samples(len(counts))
        if self.kind == "kto":
            chosen, rejected = sorted(chosen), sorted(rejected)
            return chosen, rejected, {"chosen": chosen, "rejected": rejected}
        pairs = zip(chosen, rejected, strict=True)
        owned = sorted((min((x for x in pair if counts[x]), default=len(counts)), *pair) for pair in pairs)
        owner, chosen, rejected = zip(*owned, strict=True) if owned else ((), (), ())
        return chosen, rejected, {"chosen": owner, "rejected": owner}

    def _samples(self, num_samples: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers of the chosen and of the rejected samples."""
        if self.chosen is None or self.rejected is None:
            if self.kind == "kto":
                raise LogitlessError(
                    f"{NAME}: kto must know which samples are desirable: pairs(desirable, undesirable) names them."
                )
            if num_samples % 2:
                raise LogitlessError(
                    f"{NAME}: samples are taken to lie side by side, chosen and rejected by turns, but there are "
                    f"{num_samples}. Name the pairs with pairs(chosen, rejected)."
                )
            return tuple(range(0, num_samples, 2)), tuple(range(1, num_samples, 2))
        last = max((*self.chosen, *self.rejected), default=-1)
        if last >= num_samples:
            raise LogitlessError(
                f"{NAME}: pairs name sample {last}, chosen or rejected, but there are {num_samples} samples, from 0 on."
            )
        return self.chosen, self.rejected

    def _fields(
        self, given: Mapping[str, Tensor | str | None], num_rows: int, num_samples: int, device: torch.device
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Fields per row, and those per sample or batch in float64."""
        found: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
        reference = KINDS[self.kind].reference
        known = ["ref_logprob", "ref_sample_logprob"] if reference else []
        if self.kind == "kto":
            known.append("reference_kl")
        for name in found:
            if name not in known:
                raise LogitlessError(
                    f"{NAME}: {self.kind!r} does not read the field {name}.{did_you_mean(name, known)}"
                )
        if reference and ("ref_logprob" in found) == ("ref_sample_logprob" in found):
            came = "both came" if "ref_logprob" in found else "neither was given"
            raise LogitlessError(
                f"{NAME}: {self.kind!r} needs log-probs of a reference, either ref_logprob, one per row, or "
                f"ref_sample_logprob, their sum over each sample, but {came}."
            )
        rows, batch = {}, {}
        for name, x in found.items():
            if name == "ref_logprob":
                rows[name] = check_field(name, x, num_rows, device, NAME)
                continue
            shape = (num_samples,) if name == "ref_sample_logprob" else ()
            if not isinstance(x, Tensor) or tuple(x.shape) != shape or x.requires_grad:
                came = type(x).__name__ if not isinstance(x, Tensor) else f"of shape {list(x.shape)}"
                grad = " and requires grad" if isinstance(x, Tensor) and x.requires_grad else ""
                raise LogitlessError(
                    f"{NAME}: {name} must be a tensor of shape {list(shape)} without gradient but is {came}{grad}."
                )
            batch[name] = x.to(device, torch.float64)
        return rows, batch

    def _check_pairs(self) -> None:
        for name in PLACES:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        if (self.chosen is None) != (self.rejected is None):
            raise LogitlessError(f"{NAME}: chosen and rejected go together, but only one of them came.")
        if self.chosen is None or self.rejected is None:
            return
        if self.kind == "kto":
            both = set(self.chosen) & set(self.rejected)
        elif len(self.chosen) == len(self.rejected):
            both = {a for a, b in zip(self.chosen, self.rejected, strict=True) if a == b}
        else:
            raise LogitlessError(
                f"{NAME}: chosen names {len(self.chosen)} samples but rejected names {len(self.rejected)}."
            )
        if both:
            raise LogitlessError(f"{NAME}: sample {min(both)} is both chosen and rejected.")


def _numbers(name: str, samples: Any) -> tuple[int, ...]:
    if isinstance(samples, Tensor):
        samples = dense(samples, f"{NAME}: {name}", "sample numbers, 0 or more,", numbers=True).tolist()
    numbers = tuple(samples) if isinstance(samples, Iterable) else samples
    if not isinstance(numbers, tuple) or not all(type(x) is int and x >= 0 for x in numbers):
        shown = list(numbers) if isinstance(numbers, tuple) else numbers
        raise LogitlessError(f"{NAME}: {name} must be sample numbers, 0 or more, but is {shown!r}.")
    return numbers
