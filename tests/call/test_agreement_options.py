"""Ranks that differ in one argument, for every function and every argument of it: all raise the same error.

What ranks compare is made from the call, so an argument that is new is compared; that it is tried here, too, or said to
be a rank's own business, the signatures see to.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import OF_LOGITS, from_hidden, from_logits, loss_from_hidden

import logitless as ll
from logitless.backends.divergences import Divergence
from logitless.call import Asked
from logitless.operands import Linear, Teachers

V, D, R = 256, 4, 6
HERE = V // 2

Maker = Callable[[int], dict[str, Any]]


def kept(x: int = 0) -> ll.Kept:
    return ll.Kept(torch.tensor([1, 2 + x] * R), torch.full((R,), 2))


def teacher(width: int = D, bias: torch.Tensor | None = None, **given: Any) -> ll.Teacher:
    return ll.Teacher(ll.Logits(torch.zeros(R, width), torch.zeros(HERE, width), bias=bias), **given)


def teachers(x: int) -> Teachers:
    return ll.Teacher.by_row([teacher(), teacher()], torch.tensor([0, 1, 0, 1, 0, x]))


def sent(x: int, tail: Any = "bucket") -> ll.Teacher:
    return ll.Teacher.from_top_k(torch.full((R, 2), -2.0 - x), torch.tensor([[1, 2]] * R), tail)


def lora(scale: float = 1.0, rank: int = 2, trained: bool = True) -> ll.LoRA:
    return ll.LoRA(torch.zeros(HERE, D), torch.zeros(rank, D).requires_grad_(trained), torch.zeros(HERE, rank), scale)


OPTIONS: dict[str, tuple[str, Maker]] = {
    "bias": ("whether there is a bias", lambda x: {"bias": (None, torch.zeros(HERE))[x]}),
    "entropy": ("entropy", lambda x: {"entropy": ("value", "grad")[x]}),
    "head": ("temperature", lambda x: {"head": ll.Head(temperature=1.0 + x)}),
    "kept": ("the kept ids", lambda x: {"kept": kept(x)}),
    "stats": ("stats", lambda x: {"stats": ((), ("rank",))[x]}),
    "top_k": ("top_k", lambda x: {"top_k": 2 + x}),
    "ids": ("the ids", lambda x: {"ids": torch.full((R, 1), x)}),
    "hidden_grad": ("hidden_grad", lambda x: {"hidden_grad": ("reduced", "partial")[x]}),
    "sequence_parallel": ("sequence_parallel", lambda x: {"sequence_parallel": bool(x), "pair": True}),
    "weight_grad": ("whether there is a weight_grad", lambda x: {"weight_grad": (None, torch.zeros(HERE, D))[x]}),
    "sparse_weight_grad": (
        "sparse_weight_grad",
        lambda x: {"kept": kept().over("support"), "sparse_weight_grad": bool(x)},
    ),
    "match": ("match", lambda x: {"match": (None, "bfloat16")[x]}),
    "tf32": ("tf32", lambda x: {"tf32": bool(x)}),
    "precision": ("precision", lambda x: {"precision": ("float32", "bfloat16x3")[x]}),
    "bits": ("bits", lambda x: {"bits": ("canonical", "fast")[x]}),
    "backend": ("the backend", lambda x: {"backend": ("tiled", "reference")[x]}),
    "memory": ("how to go", lambda x: {"memory": ("1MiB", 300)[x]}),
    "grad_scale": ("grad_scale", lambda x: {"weight_grad": torch.zeros(HERE, D), "grad_scale": 1.0 + x}),
    "teacher": ("the teacher's head", lambda x: {"teacher": teacher(head=ll.Head(temperature=1.0 + x))}),
    "divergence": ("the divergence", lambda x: {"divergence": ("jsd", "tv")[x]}),
}
"""Options by name: what the ranks are told that they disagree about, and what either rank gives."""

FURTHER: dict[str, tuple[str, Maker]] = {
    "denominator": ("the weights of the rows", lambda x: {"denominator": 4.0 + x}),
    "prompt_tokens": (
        "the weights of the rows",
        lambda x: {
            "objective": ll.Objective(reduce="prompt_mean"),
            "prompt_tokens": torch.tensor([R + x]),
            "denominator": 1,
            "rows": ll.Rows.packed([list(range(R))], [R - 1]),
            "advantage": torch.ones(R - 1),
        },
    ),
}
"""Arguments of a loss, likewise."""

OWN = {
    "shard": "its bounds are compared when it is made",
    "strict": "it decides on no number",
    "overwrite": "backward from logits sends nothing",
    "drop_zeros": "rows are left out of products, which send nothing",
    "return_stats": "the same is computed",
    "group": "the ranks that share samples are another group, which check_group compares",
    "check_group": "it is about that group",
    "fields": "each is compared by its own name, see test_agreement",
}
"""Arguments that ranks need not share, and why."""

HARMLESS = {("logits", "memory"), ("hidden", "memory"), ("logits, teacher", "memory")}
"""Tiles are a rank's own business where no collective comes between them."""

SCOPE: tuple[str, Maker] = ("the kept ids", lambda x: {"kept": kept().over(("vocabulary", "support")[x])})
NUMBERS: dict[str, tuple[str, Maker]] = {
    "beta": ("the divergence", lambda x: {"divergence": Divergence("jsd", beta=0.5 + 0.1 * x)}),
    "alpha": ("the divergence", lambda x: {"divergence": Divergence("alpha", alpha=0.5 + 0.1 * x)}),
}

MORE: dict[str, dict[str, tuple[str, Maker]]] = {
    "logits": {"scope": SCOPE},
    "hidden": {
        "scope": SCOPE,
        "the rank of a LoRA": ("the rank of a LoRA", lambda x: {"weight": lora(rank=2 + x)}),
        "the scale of a LoRA": ("the scale of a LoRA", lambda x: {"weight": lora(1.0 + x)}),
        "the gradient of a": (
            "whether hidden or a of a LoRA needs a gradient",
            lambda x: {"hidden": torch.zeros(R, D), "weight": lora(trained=bool(x))},
        ),
        "tokens": ("the number of tokens", lambda x: {"pair": True, "hidden": torch.zeros(R + x, D)}),
        "hidden size": (
            "the hidden size",
            lambda x: {"hidden": torch.zeros(R, D + x), "weight": torch.zeros(HERE, D + x)},
        ),
        "a trained head": (
            "whether weight or bias needs a gradient",
            lambda x: {"weight": torch.zeros(HERE, D, requires_grad=bool(x))},
        ),
    },
    "loss": {
        "scope": SCOPE,
        "the scale of a LoRA": ("the scale of a LoRA", lambda x: {"weight": lora(1.0 + x)}),
        "a trained head": (
            "whether weight or bias needs a gradient",
            lambda x: {"weight": torch.zeros(HERE, D, requires_grad=bool(x))},
        ),
    },
    "loss, teacher": {
        "memory of two passes": (
            "how to go (memory=) of the first pass",
            lambda x: {"bits": "canonical", "memory": ("1MiB", 300)[x]},
        ),
        "memory without a gradient": (
            "how to go",
            lambda x: {"hidden": torch.zeros(R, D), "memory": ("1MiB", 300)[x]},
        ),
        "K log-probs": ("the teacher's top_k", lambda x: {"teacher": sent(x)}),
    },
    "logits, teacher": {
        **NUMBERS,
        "the teacher's temperature": (
            "the teacher's head",
            lambda x: {"teacher": ll.Teacher(torch.zeros(R, HERE), ll.Head(temperature=1.0 + x))},
        ),
        "K log-probs": ("the teacher's top_k", lambda x: {"teacher": sent(x)}),
        "the dtype": ("the dtype of the logits", lambda x: {"logits": torch.zeros(R, HERE, dtype=DTYPES[x])}),
    },
    "hidden, teacher": {
        **NUMBERS,
        "scope": SCOPE,
        "a trained head": (
            "whether weight or bias needs a gradient",
            lambda x: {"weight": torch.zeros(HERE, D, requires_grad=bool(x))},
        ),
        "the teacher's ids": ("the teacher's kept", lambda x: {"kept": kept(), "teacher": teacher(kept=kept(x))}),
        "the teacher's bias": (
            "the teacher's logits",
            lambda x: {"teacher": teacher(bias=(None, torch.zeros(HERE))[x])},
        ),
        "what the teacher is": (
            "the teacher's logits",
            lambda x: {"teacher": (teacher(), ll.Teacher(torch.zeros(R, HERE)))[x]},
        ),
        "the teacher's hidden size": (
            "the teacher's logits",
            lambda x: {"teacher": teacher(D + x)},
        ),
        "the teacher's rounding": (
            "the teacher's logits",
            lambda x: {"teacher": ll.Logits(torch.zeros(R, D), torch.zeros(HERE, D), match=(None, "bfloat16")[x])},
        ),
        "the teacher's factor": (
            "the teacher's head",
            lambda x: {"teacher": ll.Logits(torch.zeros(R, D), torch.zeros(HERE, D)) / (1.0 + x)},
        ),
        "K log-probs": ("the teacher's top_k", lambda x: {"teacher": sent(x, "renormalise")}),
        "which teacher": ("which row has which teacher", lambda x: {"teacher": teachers(x)}),
        "how many teachers": ("the number of teachers", lambda x: {"teacher": (teacher(), teachers(0))[x]}),
    },
}
"""What else ranks may differ in."""

DTYPES = (torch.float32, torch.float64)

LOGITS = {*inspect.signature(ll.Logits.__new__).parameters} - {"cls", "hidden", "weight"}
GIVEN = {*inspect.signature(ll.Logits.given).parameters} - {"logits"}
VERBS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[str, ...]]] = {
    "logits": (ll.logprobs, from_logits, ("logits", "rows")),
    "hidden": (ll.logprobs, from_hidden, ("hidden", "weight", "rows")),
    "loss": (ll.policy_loss, loss_from_hidden, ("hidden", "weight", "rows", "objective")),
    "loss, teacher": (ll.policy_loss, loss_from_hidden, ("hidden", "weight", "rows", "objective")),
    "logits, teacher": (ll.logprobs, from_logits, ("logits", "rows")),
    "hidden, teacher": (ll.logprobs, from_hidden, ("hidden", "weight", "rows")),
}
"""Verbs of logits of either kind, how they are called, and what that takes by place."""

UNTAUGHT = {"loss": {"teacher"}, "loss, teacher": {"prompt_tokens"}}
"""Arguments that do not go with a call: a teacher goes with a divergence, and one here has no other terms."""


def arguments(verb: str) -> set[str]:
    """What a call takes by name: the verb's arguments and those of its logits."""
    own = {*inspect.signature(VERBS[verb][0]).parameters} - {"logits", "rows", "objective"}
    return own | (GIVEN if "logits" in VERBS[verb][2] else LOGITS)


def differences(verb: str) -> dict[str, tuple[str, Maker]]:
    """What the ranks of a call may differ in."""
    known = OPTIONS | FURTHER
    taken = [x for x in known if x in arguments(verb) - UNTAUGHT.get(verb, set())]
    return {name: known[name] for name in taken} | MORE.get(verb, {})


def call(verb: str, shard: ll.VocabShard, asked: dict[str, Any]) -> None:
    """One call with all that it takes, and backward."""
    _, function, places = VERBS[verb]
    index = torch.arange(R)
    given: dict[str, Any] = {
        "hidden": torch.zeros(R, D),
        "weight": torch.zeros(HERE, D),
        "logits": torch.zeros(R, HERE),
    }
    given |= {"rows": (index, index) if asked.pop("pair", False) else index, "shard": shard}
    if verb.startswith("loss"):
        given |= {"objective": ll.Objective(), "old_logprob": "current", "advantage": torch.ones(R)}
    if verb == "loss, teacher":
        given = {k: x for k, x in given.items() if k not in ("old_logprob", "advantage")}
        given |= {"objective": ll.Objective.recipe("distill"), "teacher": teacher()}
    elif verb.endswith("teacher"):
        given |= {"teacher": torch.zeros(R, HERE) if "logits" in places else teacher()}
    graph = "hidden" not in asked
    given |= asked
    for name in ("hidden", "logits"):
        if graph:
            given[name].requires_grad_()
    by_place = [given[name] for name in places]
    left_out = (*places, "hidden", "weight", "logits")
    out = function(*by_place, **{name: x for name, x in given.items() if name not in left_out})
    if out[0].requires_grad:
        out[0].sum().backward()


def differ(rank: int, world: int, verb: str) -> dict[str, str]:
    shard = ll.VocabShard(rank * HERE, (rank + 1) * HERE, dist.group.WORLD, check_calls=True)
    found = {}
    for name, (_, maker) in differences(verb).items():
        try:
            call(verb, shard, maker(rank))
            found[name] = "no error"
        except ll.LogitlessError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_ranks_that_differ_in_one_argument(ranks, verb: str):
    """memory= and bits= of a divergence, and of a loss with a teacher in two passes, were not compared:
    the ranks made other collectives, which abort over gloo and hang over NCCL. A LoRA's scale was not, either."""
    ours, theirs = ranks(differ, 2, verb, timeout=60)
    function = VERBS[verb][0].__name__
    for name, (about, _) in differences(verb).items():
        if (verb, name) in HARMLESS:
            assert (ours[name], theirs[name]) == ("no error",) * 2
            continue
        assert ours[name] == theirs[name], name
        assert f"{function}: ranks of one vocabulary group disagree about {about}" in ours[name], (name, ours[name])


def test_every_argument_is_tried_or_is_a_rank_s_own():
    for verb in VERBS:
        assert arguments(verb) <= {*OPTIONS, *FURTHER, *OWN}, verb
    assert {x.name for options in (Asked, Linear) for x in fields(options)} - OWN.keys() == set(OPTIONS)
    assert LOGITS == set(OF_LOGITS)


def alike(rank: int, world: int, verb: str) -> list[str]:
    shard = ll.VocabShard(rank * HERE, (rank + 1) * HERE, dist.group.WORLD, check_calls=True)
    found = []
    for name, (_, maker) in differences(verb).items():
        for x in (0, 1):
            try:
                call(verb, shard, maker(x))
            except ll.LogitlessError as error:
                found.append(f"{name} {x}: {error}")
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_ranks_that_do_not_differ(ranks, verb: str):
    """Each of these calls is one that both ranks may make."""
    assert ranks(alike, 2, verb, timeout=60) == [[], []]


def other_factors(rank: int, world: int) -> str:
    shard = ll.VocabShard(rank * HERE, (rank + 1) * HERE, dist.group.WORLD, check_calls=True)
    try:
        ll.logprobs(ll.Logits(torch.zeros(R, D), torch.zeros(HERE, D), shard=shard) / (1.0 + rank), torch.arange(R))
    except ll.LogitlessError as error:
        return str(error)
    return "no error"


def test_logits_with_other_factors(ranks):
    """Logits that are not computed carry what a model or a trainer divided them by."""
    for text in ranks(other_factors, 2, timeout=30):
        assert "logprobs: ranks of one vocabulary group disagree about the factor of the logits" in text


def other_functions(rank: int, world: int) -> str:
    shard = ll.VocabShard(rank * HERE, (rank + 1) * HERE, dist.group.WORLD, check_calls=True)
    try:
        call(("logits", "loss")[rank], shard, {})
    except ll.LogitlessError as error:
        return str(error)
    return "no error"


def test_ranks_that_call_other_functions(ranks):
    """A name that only one of the ranks had was a KeyError."""
    for text in ranks(other_functions, 2, timeout=30):
        assert "disagree about the function: rank by rank it is ['logprobs', 'policy_loss']" in text
