"""Every two options together: each does what it says, and neither is forgotten beside the other.

    a call with both  ==  the oracle with both      values and gradients, from plain torch in float64
    a call with both  !=  the oracle with one       what cannot be seen is not tested: UNSEEN says why

An option that is new has to be listed in ``OPTIONS``, or in ``ELSEWHERE`` with a reason. One option of a noun was once
left out by one path (a teacher's ``match``), and no test of either one alone could see it.
"""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

import pytest
import torch
from shared.two_options import IDS, INDEX, TARGET, T, drawn, library, oracle
from torch import Tensor

import logitless as ll
from logitless.call import Asked
from logitless.operands import Given, Linear, LoRA, Teachers, TopK

OPTIONS = {
    # Of the student's logits, its head, and the call.
    **dict.fromkeys("cast factor row_factor model_cap row_temperature rows ignored".split(), ""),
    **{name: f"Linear.{name}" for name in ("bias", "match", "weight_grad", "grad_scale")},
    **{"sparse": "Linear.sparse_weight_grad", "lora": "LoRA.weight LoRA.a LoRA.b LoRA.scale"},
    **{"given": "Given.logits", "overwrite": "Given.overwrite", "temperature": "Head.temperature Asked.head"},
    **{name: f"Head.{name}" for name in ("scale", "softcap", "vocab_size")},
    **{"kept": "Kept.ids Kept.lengths Asked.kept", "support": "Kept.scope"},
    **{name: f"Asked.{name}" for name in ("entropy", "stats", "top_k", "ids")},
    # Of the teacher, its logits and its head.
    **dict.fromkeys("t_bias t_match t_cast t_factor t_row_factor t_model_cap t_row_temperature".split(), ""),
    **dict.fromkeys("t_scale t_softcap t_vocab_size t_given".split(), ""),
    **{"teacher": "Teacher.logits Asked.teacher Asked.divergence", "t_temperature": "Teacher.head"},
    **{"t_ids": "Teacher.ids", "t_bucket": "Teacher.tail", "t_at": "Teacher.at", "t_kept": "Teacher.kept"},
    **{"t_several": "Teachers.members Teachers.which", "t_sent": "Teacher.top_k TopK.logprobs TopK.ids"},
    **{"t_sent_alone": "TopK.tail"},
}
"""The options that are paired, and the fields that each is about."""

RANKS = "does nothing on one rank: tests of ranks"
ELSEWHERE = {
    **{"Linear.shard": RANKS, "Linear.sequence_parallel": RANKS, "Linear.hidden_grad": RANKS, "Given.shard": RANKS},
    **{"Linear.tf32": "does nothing on a CPU", "Linear.precision": "does nothing on a CPU"},
    **{"Linear.bits": "changes rounding alone: test_canonical", "Given.bits": "as Linear.bits"},
    **{"Linear.strict": "decides on no number", "LoRA.dropout": "is random: test_lora"},
    **{"Asked.memory": "both ways in every pair", "Asked.backend": "as Asked.memory"},
}

NEEDS = {"grad_scale": {"weight_grad"}, "sparse": {"support"}, "overwrite": {"given"}, "t_bucket": {"t_ids"}}
APART = [{"temperature", "row_temperature"}, {"t_temperature", "t_row_temperature"}, {"kept", "support"}]
ONE_WAY = {"weight_grad", "grad_scale", "sparse", "given", "overwrite", "t_given", "teacher"}
"""Options that change where numbers come from or go to, and no number that is compared."""

UNSEEN = [
    ({"vocab_size"}, {"support", "sparse", "t_sent_alone"}, "ids that were kept or sent are below it"),
    (
        {"t_vocab_size"},
        {"vocab_size", "kept", "support", "sparse", "t_kept", "t_ids"},
        "the same",
    ),
    ({"cast", "match"}, {"cast", "match"}, "they round to one dtype"),
    ({"t_cast", "t_match"}, {"t_cast", "t_match"}, "they round to one dtype"),
    ({"support"}, {"sparse"}, "one needs the other"),
    ({"kept"}, {"t_kept"}, "one needs the other"),
    ({"t_ids"}, {"t_bucket"}, "one needs the other"),
]


def with_needs(on: set[str]) -> frozenset[str]:
    """The options, and what they need to be there."""
    on = on.union(*(NEEDS.get(x, set()) for x in on))
    on |= {"kept"} if "t_kept" in on and "support" not in on else set()
    on |= {"teacher"} if any(x.startswith("t_") for x in on) else set()
    own = "teacher" in on and not on & {"t_sent", "t_sent_alone"}
    return frozenset(on | {"t_vocab_size"} if own and "vocab_size" in on else on)


def go_together(on: frozenset[str]) -> bool:
    student = {"bias", "match", "cast", "factor", "row_factor", "model_cap", "lora", "weight_grad", "sparse"}
    sent = on & {"t_sent", "t_sent_alone"}
    alone = len(sent) < 2 and not (sent and any(x.startswith("t_") for x in on - sent))
    return alone and not any(x <= on for x in APART) and not ("given" in on and on & student)


GRADED = {"logprob", "entropy", "log_z", "collision", "mean_logit", "divergence", "ids_logprobs"}
WEIGHT = {name: drawn(T, 3) for name in sorted(GRADED)}
OLD, REF, ADVANTAGE = TARGET * -0.2 - 1, TARGET * -0.1 - 2, drawn(T)


def names(on: frozenset[str]) -> set[str]:
    """The results that are asked for."""
    asked = {"entropy": {"entropy"}, "ids": {"ids_logprobs"}, "top_k": {"top_k_logprobs"}}
    asked |= {"stats": {"collision", "mean_logit", "max_logit"}, "teacher": {"divergence", "teacher_entropy"}}
    return {"logprob"}.union({"log_z"} - ({"log_z"} if "support" in on else set()), *(asked.get(x, set()) for x in on))


def total(found: dict[str, Tensor]) -> Tensor:
    """A sum of all results that have a gradient; some log-probs over sent ids are infinite."""
    weights = {k: WEIGHT[k][: len(x), : x[0].numel()].view_as(x) for k, x in found.items() if k in GRADED}
    return torch.stack([(found[k] * w)[found[k].isfinite()].sum() for k, w in weights.items()]).sum()


def loss_of(on: frozenset[str]) -> tuple[ll.Objective, dict[str, Any]]:
    rows = INDEX if "rows" in on else torch.arange(T)
    terms: dict[str, Any] = {"kl": "k3", "kl_coef": 0.4, "entropy_coef": 0.3 * ("entropy" in on)}
    terms |= {"z_coef": 0.0 if "support" in on else 0.05}
    terms |= {"divergence": "jsd", "divergence_coef": 0.7} if "teacher" in on else {}
    return ll.Objective(**terms), {"old_logprob": OLD[rows], "advantage": ADVANTAGE[rows], "ref_logprob": REF[rows]}


def arriving(on: frozenset[str]) -> float:
    """The gradient that arrives at a loss, which one that adds to a buffer has to know before."""
    return 2.5 if "grad_scale" in on or "weight_grad" not in on else 1.0


def wanted(on: frozenset[str], loss: bool) -> dict[str, Tensor]:
    found, leaves = oracle(on, loss)
    if loss:
        objective, inputs = loss_of(on)
        stats = ll.TokenStats(**{k: x for k, x in found.items() if k in ll.TokenStats._fields})
        target = library(on)[1]
        rows = target if isinstance(target, ll.Rows) else ll.Rows.every(target)
        value = objective(stats, rows, **inputs)[0]
        found, scalar = {"loss": value}, value * arriving(on)
    else:
        found = {name: found[name] for name in names(on)}
        scalar = total(found)
    return gradients(scalar, found, leaves)


def gradients(
    scalar: Tensor, found: dict[str, Tensor], leaves: dict[str, Tensor], sparse: bool = False
) -> dict[str, Tensor]:
    """Results, and the gradient of each leaf by its name; that of the weight where it has to arrive."""
    leaves = {name: x for name, x in leaves.items() if x.requires_grad}
    given = torch.autograd.grad(scalar, list(leaves.values()), allow_unused=True)
    grads = {name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(leaves.items(), given, strict=True)}
    assert grads["w"].is_sparse == sparse
    grads["w"] = grads["w"].to_dense() if sparse else grads["w"]
    return {name: x.detach() for name, x in found.items()} | {f"gradient of {k}": g for k, g in grads.items()}


def ours(on: frozenset[str], loss: bool, memory: str | None, backend: str) -> dict[str, Tensor]:
    logits, rows, options, leaves = library(on)
    options |= {"memory": memory, "backend": backend}
    if loss:
        objective, inputs = loss_of(on)
        value = ll.policy_loss(logits, rows, objective, **options, **inputs)[0]
        made = gradients(value * arriving(on), {"loss": value}, leaves, "sparse" in on)
    else:
        options |= {"entropy": "grad" if "entropy" in on else None, "top_k": 4 if "top_k" in on else None}
        options |= {"ids": IDS[INDEX] if "rows" in on else IDS} if "ids" in on else {}
        options |= {"stats": ("collision", "mean_logit", "max_logit")} if "stats" in on else {}
        out = ll.logprobs(logits, rows, divergence="jsd", **options)._asdict()
        found = {name: out[name] for name in names(on)}
        made = gradients(total(found), found, leaves, "sparse" in on)
    if "weight_grad" in on:
        assert not made["gradient of w"].any()
        made["gradient of w"] = leaves["buffer"].double()
    return made


def differences(mine: dict[str, Tensor], right: dict[str, Tensor], on: frozenset[str]) -> list[str]:
    """The names of what is not the same, or there once."""
    # The buffer is float32.
    loose = {"gradient of w": 1e-5} if "weight_grad" in on else {}
    there = {name for name in mine.keys() & right.keys() if mine[name].shape == right[name].shape}
    off = {name: loose.get(name, 1e-9) for name in there}
    wrong = [k for k, e in off.items() if not torch.allclose(mine[k], right[k], rtol=e, atol=e, equal_nan=True)]
    return sorted({*wrong, *(mine.keys() | right.keys()) - there})


def is_seen(x: str, on: frozenset[str]) -> bool:
    hidden = any(x in some and (on - {x}) & others for some, others, _ in UNSEEN)
    return x not in ONE_WAY and not hidden


@pytest.mark.parametrize("loss", [False, True], ids=["logprobs", "policy_loss"])
@pytest.mark.filterwarnings("ignore::logitless.operands.logits.LogitsMade")
def test_each_of_two_options_does_what_it_says(loss: bool):
    tried, refused = 0, 0
    of_logprobs = {"stats", "top_k", "ids"}
    pairs = {with_needs(set(pair)): pair for pair in itertools.combinations(OPTIONS, 2)}
    for number, (on, pair) in enumerate(pairs.items()):
        if not go_together(on) or (loss and on & of_logprobs):
            continue
        memory, backend = [(None, "auto"), ("1KiB", "tiled"), ("1KiB", "reference")][number % 3]
        try:
            mine = ours(on, loss, memory, backend)
        except ll.LogitlessError:
            refused += 1
            continue
        tried += 1
        assert not differences(mine, wanted(on, loss), on), f"{pair}, memory={memory}, backend={backend}"
        for x in pair:
            less = with_needs(set(pair) - {x})
            if is_seen(x, on) and less != on:
                assert differences(mine, wanted(less, loss), on), f"of {pair}, {x} does nothing that this test sees"
    assert tried > 500, f"{tried} pairs were compared and {refused} refused"
    assert refused < 40, f"{tried} pairs were compared and {refused} refused"


def test_every_option_is_listed():
    """A new one is paired with all others here, or it is said why not."""
    kinds = (Linear, Given, LoRA, ll.Head, ll.Kept, ll.Teacher, Teachers, TopK, Asked)
    there = {f"{kind.__name__}.{field.name}" for kind in kinds for field in fields(kind)}
    listed = " ".join(OPTIONS.values()).split()
    assert sorted([*listed, *ELSEWHERE]) == sorted(there)
