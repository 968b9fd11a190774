"""What an objective is made of, before any tensor: recipes by name, and the settings that terms take."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from logitless.backends.divergences import Divergence
from logitless.collectives import fingerprint
from logitless.errors import LogitlessError, closest
from logitless.errors.arguments import described, instance, sequence
from logitless.objectives.checks import check_known_name, finite, resolve_bounds, resolve_clip, unknown
from logitless.objectives.corrections import CORRECTIONS
from logitless.objectives.kl import KL_TERMS
from logitless.objectives.policy import POLICY_TERMS, PolicyTerm
from logitless.objectives.reduction import REDUCTIONS
from logitless.objectives.stated import name_of

RecipeName = Literal[
    "ppo", "grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo", "reinforce", "reinforce++", "reinforce++_baseline",
    "distill", "sft", "dft",
]  # fmt: skip
"""Names of :data:`RECIPES`, for editors and type checkers."""

RECIPES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "grpo": {"reduce": "sample_mean", "kl": "k3"},
    "dapo": {"clip": (0.2, 0.28)},
    "dr_grpo": {"reduce": "sample_sum"},
    "gspo": {"policy": "gspo", "reduce": "sample_mean"},
    "cispo": {"policy": "cispo"},
    "sapo": {"policy": "sapo", "reduce": "sample_mean"},
    "reinforce": {"policy": "reinforce"},
    "reinforce++": {},
    "reinforce++_baseline": {"kl": "k2"},
    "distill": {"policy": "none", "divergence": "reverse_kl", "divergence_coef": 1.0},
    "sft": {"policy": "cross_entropy"},
    "dft": {"policy": "dft"},
}
"""How each recipe differs from the defaults. Advantages are the caller's; coefficients of KL and entropy stay 0."""


LEVELS = ("token", "sequence", "batch")


def check_settings(objective: Any) -> None:
    """Raise for a setting of an :class:`Objective` that cannot be honoured."""
    for name, table in (("policy", POLICY_TERMS), ("correction", CORRECTIONS), ("kl", KL_TERMS)):
        value = getattr(objective, name)
        if isinstance(value, str) and value not in table:
            near = closest(value, [*table, *RECIPES]) if name == "policy" else None
            if near in RECIPES and near not in table:
                raise LogitlessError(
                    f"Objective: policy {value!r} is not a term but the name of a recipe, or close to one. Take "
                    f"Objective.recipe({near!r}). Terms: {', '.join(table)}."
                )
            raise unknown(f"Objective: {name}", value, table)
        if not (isinstance(value, str) or callable(value) or (value is None and name != "policy")):
            raise LogitlessError(f"Objective: {name} must be a name or a function but is {value!r}.")
    finite("kl_coef", objective.kl_coef)
    finite("entropy_coef", objective.entropy_coef)
    if finite("divergence_coef", objective.divergence_coef) != 0 and objective.divergence is None:
        raise LogitlessError(
            f"Objective: divergence_coef is {objective.divergence_coef} but divergence is None. Name one, as "
            f'divergence="reverse_kl".'
        )
    if objective.divergence is not None:
        Divergence.of(objective.divergence)
    finite("z_coef", objective.z_coef)
    if objective.kl_coef != 0 and objective.kl is None:
        raise LogitlessError(
            f'Objective: kl_coef is {objective.kl_coef} but kl is None. Name an estimator, as kl="k3".'
        )
    wanted = "a tuple of field names"
    if not all(isinstance(name, str) for name in sequence(objective.needs, "Objective: needs", wanted)):
        raise LogitlessError(f"Objective: needs must be {wanted} but is {objective.needs!r}.")
    instance(objective.policy_options, Mapping, "Objective: policy_options")
    _check_reduction(objective)
    _check_level(objective)
    policy_keywords(objective)
    bounds_of(objective)


def _check_reduction(objective: Any) -> None:
    check_known_name(objective.reduce, REDUCTIONS, "Objective: reduce")
    if (objective.reduce == "sample_sum") != (objective.length is not None):
        raise LogitlessError(
            f'Objective: length goes with reduce="sample_sum" and with no other, but reduce is {objective.reduce!r} '
            f"and length is {objective.length!r}."
        )
    if objective.length is not None and (type(objective.length) is not int or objective.length < 1):
        raise LogitlessError(f"Objective: length must be a positive integer but is {objective.length!r}.")


def _check_level(objective: Any) -> None:
    if objective.level is not None and not (isinstance(objective.level, str) and objective.level in LEVELS):
        raise LogitlessError(
            f'Objective: level must be "token", "sequence", "batch" or None but is {described(objective.level)}.'
        )
    if objective.level == "token" and objective.sequence_level:
        raise LogitlessError(
            f'Objective: level is "token" but policy={objective.policy!r} with correction={objective.correction!r} '
            f"takes means over samples. Leave level out."
        )


def policy_term(objective: Any) -> PolicyTerm:
    """The policy term; a function of the caller's is one that asks for nothing by itself."""
    policy = objective.policy
    return POLICY_TERMS[policy] if isinstance(policy, str) else PolicyTerm(policy, needs=())


def policy_keywords(objective: Any) -> dict[str, Any]:
    """Keyword arguments of the policy term; raises for one that it does not take."""
    named, term = isinstance(objective.policy, str), policy_term(objective)
    keywords = dict(objective.policy_options)
    for name in ("clip", "dual_clip"):
        if getattr(objective, name) is not None:
            if keywords.get(name) is not None:
                raise LogitlessError(
                    f"Objective: {name} is {getattr(objective, name)!r}, and in policy_options {keywords[name]!r}. "
                    f"Give it once, as {name}=."
                )
            keywords[name] = getattr(objective, name)
    # A function of the caller's may mean something else by these in its own options.
    if keywords.get("clip") is not None and (named or objective.clip is not None):
        keywords["clip"] = resolve_clip(keywords["clip"])
    if keywords.get("dual_clip") is not None and (named or objective.dual_clip is not None):
        if finite("dual_clip", keywords["dual_clip"]) <= 1:
            raise LogitlessError(f"Objective: dual_clip must be above 1 but is {keywords['dual_clip']!r}.")
    for name, why in term.refused.items():
        if keywords.get(name):
            raise LogitlessError(f"Objective: policy {objective.policy!r} takes no {name}: {why}.")
    smoothing = keywords.get("label_smoothing", 0.0)
    if objective.policy == "cross_entropy" and not 0 <= finite("label_smoothing", smoothing) < 1:
        raise LogitlessError(f"Objective: label_smoothing must be in 0 .. 1 but is {smoothing!r}.")
    for name in term.numbers:
        if name in keywords and finite(name, keywords[name]) <= 0:
            raise LogitlessError(f"Objective: {name} must be above 0 but is {keywords[name]!r}.")
    parameters = _parameters(term.function)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return keywords
    taken = [name for name, p in list(parameters.items())[1:] if p.kind is not p.VAR_POSITIONAL]
    for name in keywords:
        if name not in taken:
            policy = objective.policy
            came = repr(policy) if named else getattr(policy, "__name__", repr(policy))
            raise LogitlessError(
                f"Objective: policy {came} does not take {name}. It takes: {', '.join(taken) or 'no options'}."
            )
    return keywords


def _parameters(term: Any) -> Mapping[str, inspect.Parameter]:
    """Of a function; some that are written in C do not tell, and are taken to take anything."""
    try:
        return inspect.signature(term).parameters
    except (ValueError, TypeError):
        return inspect.signature(lambda *_, **__: None).parameters


def clip_of(objective: Any) -> Any:
    """``(low, high)`` that the policy term clips with, its own where none was given; None where it has none."""
    own = _parameters(policy_term(objective).function).get("clip")
    return policy_keywords(objective).get("clip", None if own is None or own.default is own.empty else own.default)


def bounds_of(objective: Any) -> tuple[float, ...]:
    if not isinstance(objective.correction, str):
        if objective.correction_bounds is not None:
            raise LogitlessError("Objective: correction_bounds go with a correction by name.")
        return ()
    return resolve_bounds(objective.correction, objective.correction_bounds, CORRECTIONS[objective.correction].bounds)


def shown(x: Any) -> str:
    """A setting for a reader: functions and other objects by name, and not by their address."""
    if isinstance(x, functools.partial):
        given = [*map(shown, x.args), *(f"{name}={shown(value)}" for name, value in x.keywords.items())]
        return f"functools.partial({', '.join([shown(x.func), *given])})"
    if isinstance(x, Tensor):
        return f"tensor({fingerprint(x)})"
    if isinstance(x, Mapping):
        return f"{{{', '.join(f'{name!r}: {shown(value)}' for name, value in x.items())}}}"
    if isinstance(x, list | tuple):
        return f"({', '.join(map(shown, x))})"
    # The repr of most objects is their address.
    return name_of(x) if callable(x) or type(x).__repr__ is object.__repr__ else repr(x)
