"""Every public callable, each of its parameters, and values of the wrong kind: the answer is a ``LogitlessError`` that
names the parameter, or what the tables below say and why.

A new public name, or a new parameter, is found by inspection: without a row in ``shared.valid_calls`` it fails here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from inspect import Parameter
from typing import Any

import pytest
import torch
from shared.valid_calls import (
    CALLS,
    NOT_CALLED,
    OTHERS,
    OTHERS_NOT_CALLED,
    Good,
    deferred,
    fields,
    logits,
    others,
    parameters,
    public,
    rows,
)
from shared.wrong_values import ANYTHING, nearly

import logitless as ll

CALLABLES = {**dict(public()), **dict(others())}
TRIED = {**CALLS, **OTHERS}

EVERYWHERE = {
    "as float16": "a float of fewer bits is a float",
    "as int8": "an integer of fewer bits is an integer",
    "full of nan": "NaN makes its own row NaN",
    "huge ids": "ids are compared with the vocabulary by the verb, which knows it",
    "negative ids": "ids are compared with the vocabulary by the verb, which knows it",
    "its shape on meta": "tensors of sizes alone are for estimate",
}
"""Values that are right wherever their kind is, and why."""

VERBS = ("logprobs_from_logits", "logprobs_from_hidden", "policy_loss")

ALLOWED: dict[str, dict[str, set[str]]] = {
    "0 is a number, a share and a rank": {
        **{key: {"0"} for key in ("Contiguous.rank", "Zigzag.rank", "VocabShard.start", "VocabShard.stop")},
        **{key: {"0"} for key in (f"Objective.{name}_coef" for name in ("kl", "entropy", "divergence"))},
        **{key: {"0"} for key in ("Preference.label_smoothing", "estimate.dropped")},
        "Objective.clip": {"0", "list", "list of floats"},
        "Objective.recipe.clip": {"None", "0", "list", "list of floats"},
        "install.audit": {"0", "3", "2**70"},
    },
    "of a provider, as of the verbs": {
        **{f"provider.{name}.memory": {"None"} for name in VERBS},
        **{f"provider.{name}.scale": {"-1"} for name in VERBS},
        **{f"provider.{name}.temperature": {"0-dim"} for name in VERBS},
        **{f"provider.{name}.target": {"one dimension more"} for name in VERBS},
        **{f"provider.{name}.hidden": {"one dimension more"} for name in VERBS[1:]},
        **{f"provider.{name}.weight": {"one entry fewer"} for name in VERBS[1:]},
        "provider.logprobs_from_logits.logits": {"one dimension more"},
        "provider.Capabilities.why_not.function": {"text"},
        "provider.Capabilities.why_not.options": {
            *("list of texts", "empty list", "dict", "one fewer", "one more", "with a text", "as a set")
        },
        **{f"provider.policy_loss.{name}": {"one dimension more"} for name in ("old_logprob", "advantage")},
        "provider.policy_loss.denominator": {"0", "2**70", "0-dim"},
        "provider.rows.cp_rank": {"0", "-1"},
    },
    "an engine's temperature may be 0; names may be any": {
        "Sampling.temperature": {"0"},
        "Sampling.scale": {"-1"},
        "Sampling.altered": {"list of texts", "empty list"},
        "Sampling.of_sglang.params": {"dict"},
        "adapters.Host.name": {"text"},
        "adapters.Host.distribution": {"text"},
        "adapters.Host.versions": {"list of texts", "empty list", "one fewer", "one more", "with a text"},
        "adapters.Replacement.also_in": {"list of texts", "empty list"},
        "adapters.Option.help": {"text"},
    },
    "coefficients and factors may be negative": {
        **{key: {"0", "-1"} for key in ("Head.scale", "Objective.z_coef", "Preference.sft_coef")},
        **{key: {"0", "-1", "2**70", "0-dim"} for key in ("LoRA.scale", "Logits.grad_scale")},
    },
    "a count may be 0 where there are no rows, and come as a tensor": {
        key: {"0", "2**70", "0-dim"}
        for key in (
            *("Loss.denominator", "Objective.__call__.denominator", "Preference.__call__.denominator"),
            *("policy_loss.denominator", "objectives.row_weights.denominator"),
        )
    },
    "bytes, of any number; None is the default": {
        key: {"None", "3", "2**70"}
        for key in (
            "Loss.of.memory",
            "PolicyHead.memory",
            "PolicyHead.forward.memory",
            "estimate.memory",
            "explain.memory",
        )
    },
    "None is no group, and no gradient": {
        **{key: {"None"} for key in ("Metrics.reduce.group", "Rows.check_over.group", "VocabShard.even.group")},
        **{key: {"None"} for key in (f"Rows.{name}.group" for name in ("gather", "redistribute"))},
        **{key: {"None"} for key in (f"Rows.{name}.grad" for name in ("gather", "redistribute"))},
    },
    "any leading shape; as many entries as there are": {
        **{key: {"one dimension more"} for key in ("Logits.hidden", "Logits.given.logits", "Loss.of.logits")},
        **{key: {"one dimension more"} for key in ("PolicyHead.forward.hidden", "logprobs.logits")},
        "Rows.every.target": {"integers", "one dimension more", "one entry fewer", "flat and longer", "an entry of it"},
        "Rows.from_labels.labels": {"integers", "one entry fewer", "flat and longer", "an entry of it"},
        "Kept.from_bits.words": {"one entry fewer"},
        "Teacher.ids_from_d2t.d2t": {"one entry fewer"},
        "Kept.from_mask.mask": {"one entry fewer", "as bool"},
        "Kept.from_padded.ids": {"integers", "one entry fewer"},
        "Metrics.merge.several": {"one fewer", "one more"},
        "Teacher.by_row.members": {"one more"},
    },
    "how many rows there are is known where it is used": {
        "Head.temperature": {"0-dim", "empty", "on meta", "one dimension more", "one entry fewer", "flat and longer"}
        | {"an entry of it"},
        "Loss.temperature": {"0-dim"},
        "LoRA.a": {"matrix", "on meta"},
        "Preference.pairs.chosen": {"big ids"},
        "Preference.pairs.rejected": {"big ids", "as a list"},
    },
    "targets of every row, which these are": {
        key: {"integers"} for key in ("PolicyHead.forward.rows", "logprobs.rows")
    },
    "rates and bounds may be 0, and eps too; no token exceeds a bound that is infinite": {
        **{f"objectives.{name}.gamma": {"0"} for name in ("gae", "discounted_returns", "reinforce_pp_advantages")},
        **{key: {"0"} for key in ("objectives.gae.lam", "objectives.grpo_advantages.eps", "objectives.whiten.eps")},
        "objectives.mismatch.bound": {"0", "inf"},
        "objectives.mismatch.worst": {"0"},
    },
    "as many rewards, micro-batches and quantiles as there are": {
        "objectives.dr_grpo_advantages.rewards": {"empty", "flat and longer"},
        "objectives.rloo_advantages.rewards": {"empty", "flat and longer", "one entry fewer"},
        "objectives.count_over.rows": {"one fewer", "one more"},
        "objectives.mismatch.quantiles": {"empty list", "empty", "one fewer", "one more"},
    },
    "a function of any numbers": {
        "objectives.bounded_exp.log_ratio": {
            *("0-dim", "matrix", "integers", "empty", "on meta"),
            *("one dimension more", "one entry fewer", "flat and longer", "an entry of it"),
        },
    },
    "truth values are counted": {
        f"objectives.Inputs.{name}.x": {"as bool"} for name in ("mean_by_sample", "sum_by_sample", "sums", "sums_here")
    },
    "lists will do, also of none": {
        "Kept.from_lists.lists": {"nested list", "empty list", "integers", "empty", "one fewer", "one more"},
        "Objective.needs": {"empty list", "empty"},
        "Rows.at.index": {"list", "as a list"},
        "Rows.at.target": {"list", "as a list"},
        "Rows.packed.tokens": {"integers"},
        "Rows.padded.response_lengths": {"list"},
        "logprobs.stats": {"empty list"},
    },
    "values of any dtype are moved about": {
        key: {"as complex", "as bool"}
        for key in (f"Rows.{name}.x" for name in ("expand", "gather", "redistribute", "split", "take"))
    },
    "a mask": {
        **{key: {"as bool"} for key in ("Rows.from_mask.mask", "Rows.from_mask.attention_mask")},
        **{key: {"as bool"} for key in ("Metrics.of_rows.counted", "objectives.whiten.counted")},
        "defer.strict": {"True"},
    },
    "a type is a function of one argument": {
        key: {"type"} for key in ("LoRA.dropout", "Objective.kl", "adapters.Host.heads", "adapters.Option.check")
    },
}
"""By the reason, parameters and the values that are right there."""

FREE = {
    "provider.Capabilities.why_not.x": "any tensor is asked about; the answer is a reason",
    "objectives.Inputs.has.name": "any name is asked about",
    "adapters.Option.default": "a host's own",
    "adapters.Option.choices": "a host's own",
}
"""Parameters that take anything of their kind, and why."""

CALLED = {
    "Teacher.by_row.members": "teacher",
    "Sampling.of_sglang.params": "temperature",
    **{f"adapters.Replacement.{name}": "shared.valid_calls" for name in ("name", "signature_of", "of")},
}
"""What errors call a parameter by, where it is not its name: each member is a teacher, a function has a path."""

RAISED_BY_OTHERS = {
    "Logits.register_hook.hook": "a function of the caller's raises what it raises",
    "Objective.policy": "a function of the caller's raises what it raises",
    "Objective.correction": "a function of the caller's raises what it raises",
    "adapters.Host.replacements": "a function of the host's raises what it raises",
    "adapters.Replacement.make": "a function of the host's raises what it raises",
}
"""Parameters whose value is called, here as the type ``int``."""


def invoke(good: Good, given: dict[str, Any]) -> Any:
    """The call; ``args`` are positional, after the first."""
    given = dict(given)
    if "args" not in given:
        return good.function(**given)
    further = given.pop("args")
    first = given.pop(next(iter(given)))
    return good.function(first, *further, **given)


def tried(name: str) -> Iterator[tuple[str, Parameter, str, Any]]:
    """The parameters of a callable, and each value that is tried."""
    for parameter in parameters(CALLABLES[name]):
        if parameter.kind is Parameter.VAR_POSITIONAL:
            continue
        good = TRIED[name]()
        key = good.further[parameter.name] if parameter.kind is Parameter.VAR_KEYWORD else parameter.name
        for label, make in ANYTHING.items():
            yield key, parameter, label, make()
        for label, value in nearly(good.given.get(key)):
            yield key, parameter, label, value


def is_allowed(place: str, parameter: Parameter, label: str) -> bool:
    """Whether a value is right, by the parameter's default and annotation or by the tables."""
    if place in FREE:
        return True
    kind = str(parameter.annotation)
    if label == "None" and parameter.default is None:
        return True
    by_kind = {"True": "bool", "3": "int", "2**70": "int", "1.5": "float"}
    if by_kind.get(label) in re.findall(r"\w+", kind) or (label == "3" and "float" in kind):
        return True
    return label in EVERYWHERE or any(label in places.get(place, ()) for places in ALLOWED.values())


def names(error: Exception, name: str, key: str) -> bool:
    """Whether an error names the parameter, or another of the callable that it does not go with."""
    text, others = str(error).lower(), (parameter.name for parameter in parameters(CALLABLES[name]))
    return any(
        re.search(rf"\b{re.escape(one.lower())}", text) for one in (key, CALLED.get(f"{name}.{key}", key), *others)
    )


@pytest.mark.parametrize("name", TRIED)
def test_wrong_values_are_refused_by_name(name: str):
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for key, parameter, label, value in tried(name):
            good, place = TRIED[name](), f"{name}.{key}"
            try:
                invoke(good, {**good.given, key: value})
            except ll.LogitlessError as error:
                if not names(error, name, key):
                    wrong.append(f"{place} = {label}: no parameter is named in: {error}")
            except Exception as error:
                if not (place in RAISED_BY_OTHERS and label == "type"):
                    wrong.append(f"{place} = {label}: {type(error).__name__}: {error}")
            else:
                if not is_allowed(place, parameter, label):
                    wrong.append(f"{place} = {label}: accepted")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [name for name in TRIED if name not in ("VocabShard.of", "uninstall")])
def test_the_good_call_is_good(name: str):
    """Else every wrong value would be refused for another reason."""
    good = TRIED[name]()
    invoke(good, good.given)


def test_every_public_callable_has_a_row():
    calls = {name for name, x in public() if "." not in name or parameters(x)}
    assert not calls - {*CALLS, *NOT_CALLED}, "give them rows in shared/valid_calls.py"
    assert not {*CALLS, *NOT_CALLED} - {name for name, _ in public()}, "rows without a public name"
    assert {*OTHERS, *OTHERS_NOT_CALLED} == {name for name, x in others() if parameters(x)}


def test_the_tables_name_what_is_there():
    there = {f"{name}.{key}" for name in TRIED for key, *_ in tried(name)}
    named = {place for places in ALLOWED.values() for place in places} | {*RAISED_BY_OTHERS, *FREE, *CALLED}
    assert not named - there


# Transforms of torch.func, which no autograd Function of ours has rules for.

TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("verb", ["logprobs", "policy_loss"])
@pytest.mark.parametrize("source", ["logits", "hidden"])
def test_transforms_of_torch_func_are_refused(source: str, verb: str, transform: str):
    def call(x: torch.Tensor) -> Any:
        given = x if source == "logits" else ll.Logits(x, torch.ones(7, 3))
        if verb == "logprobs":
            return ll.logprobs(given, rows()).logprob.sum()
        return ll.policy_loss(given, rows(), ll.Objective(), **fields())[0]

    x = (logits() if source == "logits" else deferred().hidden).detach()
    with pytest.raises(ll.LogitlessError, match=r"torch\.func"):
        TRANSFORMS[transform](call, x)
