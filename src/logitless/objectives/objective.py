"""``Objective``: the terms of a policy loss and their coefficients. It lists its parts and adds them up, nothing else.

    loss = sum over rows of  weight * (correction * policy + kl_coef * KL - entropy_coef * entropy + z_coef * (log Z)^2
                                       + divergence_coef * divergence)

An objective knows what it needs (fields, entropy with or without a graph, whole samples), so that a missing field is an
error before anything is computed. :meth:`Objective.evaluate` works on all rows or on a chunk of them; chunks and
micro-batches add up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from logitless.backends.divergences import Divergence
from logitless.collectives import agree_if, fingerprint
from logitless.errors import LogitlessError, did_you_mean
from logitless.errors.arguments import check_flags, instance
from logitless.objectives.checks import (
    check_field,
    check_known_name,
    check_per_row,
    check_rows,
    check_stats,
    elsewhere,
    explained_arguments,
    sequence_group,
    unknown,
)
from logitless.objectives.corrections import CORRECTIONS, rollout_log_ratio
from logitless.objectives.inputs import KNOWN_FIELDS, Inputs, bounded_exp, facts_of_results, results_of
from logitless.objectives.kl import KL_TERMS, KLTerm, k3, k3_of, kl_rows
from logitless.objectives.metrics import Evaluate, Metrics, metrics_of
from logitless.objectives.mismatch import measures
from logitless.objectives.policy import POLICY_TERMS
from logitless.objectives.reduction import Reduction, row_weights
from logitless.objectives.settings import (
    RECIPES,
    RecipeName,
    bounds_of,
    check_settings,
    clip_of,
    policy_keywords,
    shown,
)
from logitless.objectives.stated import name_of, stated
from logitless.rows import Rows
from logitless.spec import TokenStats

CURRENT = "current"
"""``old_logprob="current"``: on the first step after a rollout the old log-probs are the ones being computed."""

OWN_METRICS = ("loss", "policy_loss", "kl_loss", "entropy_loss", "z_loss", "divergence_loss")
"""Sums that every objective reports, or may report."""


@explained_arguments
@dataclass(frozen=True, eq=False, kw_only=True)
class Objective:
    """The terms of a policy loss. Validated when made.

    Args:
        policy: a name in ``POLICY_TERMS``, or a function ``f(inputs, **options)`` that returns ``[C]`` losses, or those
            and a dictionary of ``[C]`` metric values.
        clip: bounds of the ratio, ``1 - low`` and ``1 + high``: one number for both, or ``(low, high)``. None leaves
            them to the term: 0.2 for ``ppo_clip``.
        dual_clip: largest loss over ``-A`` where A < 0, above 1; None for none.
        policy_options: further keyword arguments of the term.
        level: what a function of yours looks at besides a row: "sequence" for its sample, "batch" for all rows of the
            call; "token" or None for nothing. Named terms say so themselves.
        needs: fields that a function of yours reads.
        correction: a name in ``CORRECTIONS``, or a function ``f(inputs)`` that returns ``[C]`` weights.
        correction_bounds: ``(low, high)``, or the high bound alone; None leaves them to the correction.
        kl: a name in ``KL_TERMS``, or a function ``f(logprob, ref_logprob)`` that returns ``[C]``.
        kl_coef: coefficient of the KL against ``ref_logprob`` in the loss.
        entropy_coef: coefficient of the entropy, which is subtracted from the loss.
        divergence: from a teacher, by name or as a :class:`Divergence`; goes with ``teacher=`` of the loss.
        divergence_coef: its coefficient in the loss.
        z_coef: coefficient of the square of log Z, which keeps logits near where their softmax needs no shift (z-loss).
        reduce: how rows become one number, see :mod:`logitless.objectives.reduction`.
        length: the fixed length of ``reduce="sample_sum"``.

    >>> Objective(reduce="tokenmean")
    Traceback (most recent call last):
    logitless.errors.LogitlessError: Objective: reduce 'tokenmean' is not known. Did you mean 'token_mean'?
    Known: token_mean, sample_mean, sample_sum, prompt_mean.
    """

    policy: str | Callable[..., Any] = "ppo_clip"
    clip: float | tuple[float, float] | None = None
    dual_clip: float | None = None
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    level: Literal["token", "sequence", "batch"] | None = None
    needs: tuple[str, ...] = ()
    correction: str | Callable[[Inputs], Tensor] | None = None
    correction_bounds: float | tuple[float, float] | None = None
    kl: str | Callable[[Tensor, Tensor], Tensor] | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    divergence: str | Divergence | None = None
    divergence_coef: float = 0.0
    z_coef: float = 0.0
    reduce: Reduction = "token_mean"
    length: int | None = None

    def __post_init__(self) -> None:
        check_settings(self)
        # Found once: looking a signature up takes as long as the term itself does on a few hundred rows.
        object.__setattr__(self, "_keywords", policy_keywords(self))

    @staticmethod
    def recipe(name: RecipeName | str, **changes: Any) -> Objective:
        """An algorithm's objective by name, with changes. Its ``clip`` has the term's own bounds if no others.

        >>> Objective.recipe("dapo").clip, Objective.recipe("gspo").clip
        ((0.2, 0.28), (0.0003, 0.0004))
        """
        check_known_name(name, RECIPES, "Objective.recipe: name")
        known = [f.name for f in fields(Objective)]
        for change in changes:
            if change not in known:
                raise unknown("Objective.recipe: argument", change, known)
        if name == "dr_grpo" and changes.get("length") is None and "reduce" not in changes:
            raise LogitlessError(
                'Objective.recipe: "dr_grpo" divides by a fixed length, the most tokens a response may have. '
                "Pass length=."
            )
        made = Objective(**{**RECIPES[name], **changes})
        return replace(made, clip=clip_of(made))

    @functools.cached_property
    def entropy(self) -> Literal["value", "grad"]:
        """Which entropy to compute: with a graph if the loss has an entropy term, or a policy term of the caller's own,
        which may read it."""
        return "grad" if self.entropy_coef != 0 or callable(self.policy) else "value"

    @functools.cached_property
    def log_z(self) -> bool:
        """Whether a term is on log Z, with a graph."""
        return self.z_coef != 0 or bool(self.stats)

    @functools.cached_property
    def stats(self) -> tuple[str, ...]:
        """``stats=`` of the results that terms are on: with label smoothing, the mean logit."""
        smoothed = self.policy == "cross_entropy" and self.policy_options.get("label_smoothing", 0.0) != 0
        return ("mean_logit",) if smoothed else ()

    def kept_together(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Rows of the shortest runs of samples that depend on no sample outside."""
        return counts

    @functools.cached_property
    def modules(self) -> bool:
        """Whether a term is a module, with parameters of its own."""
        return any(isinstance(term, torch.nn.Module) for term in (self.policy, self.correction, self.kl))

    @functools.cached_property
    def own_terms(self) -> tuple[str, ...]:
        """``argument=name`` of each term that is a function of the caller's.

        >>> Objective(policy=lambda inputs: inputs.logprob, kl="k3").own_terms
        ('policy=<lambda>',)
        """
        terms = {name: getattr(self, name) for name in ("policy", "correction", "kl")}
        return tuple(f"{name}={name_of(x)}" for name, x in terms.items() if x is not None and not isinstance(x, str))

    @functools.cached_property
    def batch_level(self) -> bool:
        """Whether a term looks at all rows of a call."""
        return self.level == "batch"

    @functools.cached_property
    def by_sample(self) -> bool:
        """Whether rows must know their samples."""
        return self.sequence_level or self.reduce != "token_mean"

    def described(self) -> str:
        """The settings that differ from the defaults, the same on every rank: functions with what they were made with.

        >>> Objective.recipe("dapo").described()
        'Objective(clip=(0.2, 0.28))'
        """
        return f"Objective({', '.join(f'{name}={stated(x)}' for name, x in self._changed().items())})"

    def __repr__(self) -> str:
        """Policy, clip bounds in effect and reduction, and the other settings that differ from the defaults."""
        settings = {**self._changed(), "policy": self.policy, "clip": clip_of(self), "reduce": self.reduce}
        in_order = [f.name for f in fields(self) if settings.get(f.name) is not None]
        return f"Objective({', '.join(f'{name}={shown(settings[name])}' for name in in_order)})"

    def _changed(self) -> dict[str, Any]:
        """The settings that differ from the defaults."""
        return {f.name: x for f in fields(self) if (x := getattr(self, f.name)) != getattr(_PLAIN, f.name)}

    @functools.cached_property
    def sequence_level(self) -> bool:
        """Whether a term takes means over whole samples."""
        return self.level == "sequence" or any(self.sample_means)

    @functools.cached_property
    def sample_means(self) -> tuple[bool, bool]:
        """Whether a named policy, and a named correction, takes a mean over samples."""
        correction = isinstance(self.correction, str) and CORRECTIONS[self.correction].level == "sequence"
        return isinstance(self.policy, str) and POLICY_TERMS[self.policy].level == "sequence", correction

    @functools.cached_property
    def required(self) -> tuple[str, ...]:
        """Names of the fields that must be given."""
        return tuple(self._reasons)

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
        """The vectors of these rows that the terms see. All checks are made here.

        Args:
            stats: results of the rows; None if log-probs and entropy are put in later with ``dataclasses.replace``.
            rows, denominator, prompt_tokens, group: as for :meth:`__call__`.
            fields: ``[R]`` tensors by name; None is the same as absent.
        """
        self._check_samples(rows)
        given = {name: x for name, x in fields.items() if x is not None}
        on_policy = isinstance(given.get("old_logprob"), str)
        if on_policy and given["old_logprob"] != CURRENT:
            came = given["old_logprob"]
            raise LogitlessError(f'Objective: old_logprob must be a tensor or "current" but is {came!r}.')
        self._check_names(set(given))
        if on_policy:
            del given["old_logprob"]
        device, complete, num_rows = rows.target.device, rows.complete, len(rows)
        tensors = {name: check_field(name, x, num_rows, device) for name, x in given.items()}
        if stats is not None:
            self._check_stats(stats, num_rows)
        whole_samples = self.sequence_level or (self.batch_level and rows.response_lengths is not None)
        none = stats is None
        return Inputs(
            **({"logprob": torch.zeros(num_rows, device=device), "entropy": None} if none else results_of(stats, self)),
            fields=tensors,
            counted=rows.counted,
            weight=row_weights(
                rows,
                self.reduce,
                length=self.length,
                denominator=denominator,
                prompt_tokens=prompt_tokens,
                complete=complete,
            ),
            sample=rows.sample,
            totals=rows.totals,
            # The others get no counts: their chunks may cut through samples.
            counts=rows.counts if whole_samples else None,
            group=None
            if group is None and not whole_samples
            else sequence_group("Objective", rows, group, needed=whole_samples),
            on_policy=on_policy,
            complete=complete,
        )

    def evaluate(self, inputs: Inputs) -> tuple[Tensor, Metrics]:
        """Loss of these rows, a 0-dim sum, and their metrics, without graph. Nothing waits for the device."""
        return self.graded(inputs, measured=True)[2]()

    def graded(self, inputs: Inputs, measured: bool) -> tuple[Tensor, Tensor | None, Evaluate]:
        """``[C]`` losses and the weight of each; and, where they are ``measured``, what makes loss and metrics."""
        x = inputs if inputs._clean else inputs.cleaned()
        parts, values, correction = self._parts(x, measured)

        def evaluate() -> tuple[Tensor, Metrics]:
            sums = {name: _weighed_sum(x, part) for name, part in parts.items()}
            loss = functools.reduce(torch.add, sums.values())
            if x.logprob.requires_grad and not loss.requires_grad and torch.is_grad_enabled():
                loss = _connected(loss, x.logprob)
            with torch.no_grad():
                return loss, self._metrics(x, {"loss": loss, **sums}, values, correction)

        return functools.reduce(torch.add, parts.values()), x.weight, evaluate

    def _parts(self, x: Inputs, measured: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]:
        """Losses of the rows by term, the policy term's metric values if wanted, and the correction's weights."""
        policy, values = self._policy(x, measured)
        parts = {}
        correction = None
        if self.correction is not None:
            correction = self._correction(x)
            # Not a product alone: a row that is masked out may hold an infinite loss.
            policy = torch.where(correction != 0, correction * policy, 0.0)
        parts["policy_loss"] = policy
        if self.kl_coef != 0:
            kl = kl_rows(self._kl_term(), x)
            parts["kl_loss"] = self.kl_coef * (check_per_row("kl", x, kl) if callable(self.kl) else kl)
        if self.entropy_coef != 0:
            assert x.entropy is not None
            parts["entropy_loss"] = -self.entropy_coef * x.entropy
        if self.divergence_coef != 0:
            if x.divergence is None:
                raise LogitlessError(
                    "Objective: divergence_coef is set, but there is no divergence. Pass teacher= to "
                    "policy_loss, or to logprobs."
                )
            parts["divergence_loss"] = self.divergence_coef * x.divergence
        if self.z_coef != 0:
            assert x.log_z is not None
            parts["z_loss"] = self.z_coef * x.log_z.square()
        return parts, values, correction

    def __call__(
        self,
        stats: TokenStats,
        rows: Rows,
        *,
        denominator: float | Tensor | None = None,
        prompt_tokens: Tensor | None = None,
        group: Any = None,
        check_group: bool = False,
        **fields: Tensor | str | None,
    ) -> tuple[Tensor, Metrics]:
        """Loss of a micro-batch on this rank, a part of the batch's loss, and its metrics.

        Args:
            stats: results of ``logprobs`` for these rows, with ``entropy=objective.entropy``
                and, under label smoothing, ``stats=objective.stats``.
            rows: the rows.
            denominator: tokens, samples or prompts of the whole batch; default: counted over these samples alone.
            prompt_tokens: ``[N]``, for ``reduce="prompt_mean"``.
            group: context-parallel group, for objectives that take means over samples; None if not split.
            check_group: compare objective, fields, samples and denominator over the group first, so that what one rank
                refuses all refuse. One more small collective.
            **fields: ``[R]`` tensors: ``old_logprob`` (or ``"current"``), ``advantage``, ``ref_logprob``,
                ``rollout_logprob``, and those that a function of yours needs.
        """

        def prepare() -> Inputs:
            self._check_stats(stats, len(check_rows("Objective", rows)))
            return self.inputs(stats, rows, fields, denominator=denominator, prompt_tokens=prompt_tokens, group=group)

        def facts(inputs: Inputs) -> dict[str, Any]:
            return self.facts_over_samples(inputs, denominator) | facts_of_results(inputs)

        check_flags("Objective", check_group=check_group)
        return self.evaluate(agree_if(check_group, group, "Objective", prepare, facts))

    def facts_over_samples(self, inputs: Inputs, denominator: float | Tensor | None) -> dict[str, Any]:
        """What the ranks that share samples must agree on: each sends as many sums, and has a part of one loss."""
        return {
            "the objective": self.described(),
            "the fields": ", ".join(sorted(inputs.fields)),
            "the tokens of each sample that count": fingerprint(inputs.totals),
            "denominator": fingerprint(denominator),
        }

    def _policy(self, x: Inputs, measured: bool) -> tuple[Tensor, dict[str, Tensor]]:
        function = POLICY_TERMS[self.policy].function if isinstance(self.policy, str) else self.policy
        result = function(x, **self._keywords)  # pyright: ignore[reportAttributeAccessIssue]
        loss, made = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        with torch.no_grad():
            values: Any = made
            if callable(made):
                values = made() if measured else {}
        if callable(self.policy):
            check_per_row("policy", x, loss, "its loss is")
            for name, value in instance(values, Mapping, "Objective: the metrics that policy returns").items():
                check_per_row("policy", x, value, f"{name} is")
        return loss, values  # pyright: ignore[reportReturnType]

    def _correction(self, x: Inputs) -> Tensor:
        if isinstance(self.correction, str):
            return CORRECTIONS[self.correction].function(x, *bounds_of(self)).detach()
        assert self.correction is not None
        return check_per_row("correction", x, self.correction(x)).detach()

    def _kl_term(self) -> KLTerm:
        if isinstance(self.kl, str):
            return KL_TERMS[self.kl]
        return KLTerm(k3 if self.kl is None else self.kl)

    def _metrics(
        self, x: Inputs, sums: dict[str, Tensor], values: dict[str, Tensor], correction: Tensor | None
    ) -> Metrics:
        means, extremes, weights = {}, {}, {}
        old, reference, rollout = (x.has(f"{name}_logprob") for name in ("old", "ref", "rollout"))
        if x.has("advantage"):
            means["advantage"] = x.advantage
        for name in ("entropy", "divergence", "log_z"):
            if getattr(x, name) is not None:
                means[name] = getattr(x, name)
        if old:
            log_ratio = x.log_ratio
            difference = -log_ratio
            means["ratio"] = extremes["ratio"] = bounded_exp(log_ratio)
            means["approx_kl_k1"], means["approx_kl_k3"] = difference, k3_of(difference)
        if reference and not (self._kl_term().weighted and not old):
            means["ref_kl"] = kl_rows(self._kl_term(), x)
        if old and rollout:
            measured = measures(rollout_log_ratio(x))
            for into, found in zip((means, extremes, weights), measured, strict=True):
                into |= {f"rollout_{name}": value for name, value in found.items()}
        if correction is not None:
            means["correction"] = extremes["correction"] = weights["effective_sample_size"] = correction
            means["correction_masked"] = (correction == 0).to(correction.dtype)
        taken = {*x.statistics, *means, *weights, *OWN_METRICS, *(n + e for n in extremes for e in ("_max", "_min"))}
        for name in values:
            if name in taken:
                raise LogitlessError(
                    f"Objective: policy names a metric {name!r}, which the objective has itself. Give it another name."
                )
        means, counted = {**x.statistics, **values, **means}, None if x.complete else x.counted
        return metrics_of(means, counted, x.logprob.numel(), x.logprob.device, extremes, weights, sums)

    @functools.cached_property
    def _reasons(self) -> dict[str, str]:
        """Each field that must be given, and the term that needs it."""
        wanted = {}
        if isinstance(self.policy, str):
            wanted[f"policy={self.policy!r} needs"] = POLICY_TERMS[self.policy].needs
        if isinstance(self.correction, str):
            wanted[f"correction={self.correction!r} needs"] = CORRECTIONS[self.correction].needs
        if self.kl_coef != 0:
            names = ("ref_logprob", "old_logprob") if self._kl_term().weighted else ("ref_logprob",)
            wanted[f"kl={self.kl!r} needs"] = names
        wanted["needs= names"] = self.needs
        reasons: dict[str, str] = {}
        for reason, names in wanted.items():
            for name in names:
                reasons.setdefault(name, reason)
        return reasons

    def _check_names(self, given: set[str]) -> None:
        for name, reason in self._reasons.items():
            if name not in given:
                raise LogitlessError(
                    f"Objective: {reason} the field {name}, a tensor of one value per row, but it was not given "
                    f"(given: {', '.join(sorted(given)) or 'none'})."
                )
        own = callable(self.policy) or callable(self.correction)
        read = POLICY_TERMS[self.policy].reads if isinstance(self.policy, str) else ()
        known = (*KNOWN_FIELDS, *read, *self.needs)
        for name in given:
            if not own and name not in known:
                settings = [f.name for f in fields(Objective)]
                hint = (near := elsewhere(name, settings)) or did_you_mean(name, known)
                hint += " It is an argument of Objective(...), not of the call." if near or name in settings else ""
                raise LogitlessError(f"Objective: no part of it reads the field {name}.{hint}")

    def _check_samples(self, rows: Rows) -> None:
        if rows.response_lengths is None and self.by_sample:
            what = "its policy or correction" if self.sequence_level else f"reduce={self.reduce!r}"
            raise LogitlessError(
                f"Objective: {what} works on whole samples, but rows given as targets or (index, target) know of no "
                f"samples. Make them with Rows.packed or Rows.padded."
            )

    def _check_stats(self, stats: TokenStats, num_rows: int) -> None:
        check_stats("Objective", stats, num_rows)
        if self.log_z and stats.log_z is None:
            term = "it has label smoothing" if self.stats else f"z_coef is {self.z_coef}"
            raise LogitlessError(f"Objective: {term} but log Z was not computed. Results over a support have none.")
        if self.stats and getattr(stats, "mean_logit", None) is None:
            raise LogitlessError(
                "Objective: label_smoothing needs the mean logit, which was not computed. Compute the results with "
                "stats=objective.stats."
            )
        if self.z_coef != 0 and stats.logprob.requires_grad > getattr(stats.log_z, "requires_grad", False):
            raise LogitlessError(f"Objective: z_coef is {self.z_coef} but log_z has no graph. Do not detach it.")
        if self.entropy_coef == 0:
            return
        if stats.entropy is None or (stats.logprob.requires_grad and not stats.entropy.requires_grad):
            came = "was not computed" if stats.entropy is None else "has no graph"
            raise LogitlessError(
                f"Objective: entropy_coef is {self.entropy_coef} but the entropy {came}. "
                f"Compute the results with entropy=objective.entropy."
            )


def _connected(loss: Tensor, logprob: Tensor) -> Tensor:
    """A loss whose terms depend on no log-prob, with the graph of the log-probs: backward finds one, and zeros."""
    # By selection: 0 times a log-prob of -inf is not 0.
    return loss + torch.where(torch.zeros_like(logprob, dtype=torch.bool), logprob, 0.0).sum()


def _weighed_sum(x: Inputs, losses: Tensor) -> Tensor:
    """0-dim sum of the rows' losses, each times its weight."""
    weighed = x.weight * losses
    return (weighed if x.complete else torch.where(x.counted, weighed, 0.0)).sum()


_PLAIN = Objective()
