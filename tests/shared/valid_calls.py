"""A good call of everything public: its arguments, from which one at a time is made a wrong one.

Callables and their parameters are found by inspection. A new one without a row here fails the test.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import logitless as ll
from logitless import objectives, provider
from logitless.adapters import Host, Option, Replacement
from logitless.operands.sampling import Sampling

R, V, D = 4, 7, 3


class Good(NamedTuple):
    """A call that works.

    Attributes:
        function: what is called.
        given: arguments by name: those that every call needs, and others where they make for more wrong ones.
        further: parameters that take any keywords, and one such keyword that is tried.
    """

    function: Callable[..., Any]
    given: dict[str, Any]
    further: dict[str, Any] = {}


def rows() -> ll.Rows:
    return ll.Rows.packed([[1, 2, 3], [4, 5, 6]], [2, 2])


def vector() -> Tensor:
    return torch.full((R,), -1.5)


def logits() -> Tensor:
    return torch.zeros(6, V, requires_grad=True)


def deferred(**options: Any) -> ll.Logits:
    return ll.Logits(torch.ones(6, D, requires_grad=True), torch.ones(V, D, requires_grad=True), **options)


def kept() -> ll.Kept:
    return ll.Kept(torch.tensor([1, 2, 3, 4]), torch.ones(R, dtype=torch.int64))


def stats() -> ll.TokenStats:
    return ll.TokenStats(vector().requires_grad_(), vector(), vector())


def metrics() -> ll.Metrics:
    return ll.Metrics.of_rows({"a": vector()}, torch.ones(R, dtype=torch.bool))


def fields() -> dict[str, Any]:
    return {"old_logprob": vector(), "advantage": vector()}


def toy() -> Host:
    """A host with one function, which is replaced by itself."""
    score = Replacement(
        module="shared.valid_calls", name="toy_score", signature="(logits)", make=lambda original, options: original
    )
    return Host(name="toy", package="shared", versions=("0",), replacements=lambda options: [score])


def toy_score(logits: Any) -> Any:
    return logits


def installing(host: Any, **options: Any) -> None:
    """An installation that is undone."""
    ll.install(host, any_version=True, **options)
    ll.uninstall(host)


def deferring(model: Any, **options: Any) -> None:
    """A deferral that is undone."""
    ll.defer(model, **options).undo()


IDS, MASK = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 0]]), torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]])

CALLS: dict[str, Callable[[], Good]] = {
    "Contiguous": lambda: Good(ll.Contiguous, {"rank": 0, "size": 2}),
    "Zigzag": lambda: Good(ll.Zigzag, {"rank": 0, "size": 2}),
    "Head": lambda: Good(ll.Head, {"temperature": torch.ones(R)}),
    "Kept": lambda: Good(ll.Kept, {"ids": torch.tensor([1, 2]), "lengths": torch.tensor([1, 1])}),
    "Kept.from_bits": lambda: Good(ll.Kept.from_bits, {"words": torch.tensor([[5], [2]]), "vocab_size": 3}),
    "Kept.from_engine": lambda: Good(ll.Kept.from_engine, {"rows": rows(), "supports": [[[1], [2]], [[3], [4]]]}),
    "Kept.from_lists": lambda: Good(ll.Kept.from_lists, {"lists": [[1], [2, 3]]}),
    "Kept.from_mask": lambda: Good(ll.Kept.from_mask, {"mask": torch.ones(2, 3, dtype=torch.bool)}),
    "Kept.from_offsets": lambda: Good(
        ll.Kept.from_offsets, {"ids": torch.tensor([1, 2]), "offsets": torch.tensor([0, 1, 2])}
    ),
    "Kept.from_padded": lambda: Good(ll.Kept.from_padded, {"ids": torch.tensor([[1, 2], [3, -1]])}),
    "Kept.from_responses": lambda: Good(
        ll.Kept.from_responses,
        {"rows": rows(), "ids": [torch.tensor([1, 2])] * 2, "lengths": [torch.tensor([1, 1])] * 2},
    ),
    "Kept.over": lambda: Good(kept().over, {"scope": "support"}),
    "LoRA": lambda: Good(ll.LoRA, {"weight": torch.ones(V, D), "a": torch.ones(2, D), "b": torch.ones(V, 2)}),
    "Logits": lambda: Good(
        lambda *a, **k: ll.logprobs(ll.Logits(*a, **k), rows()),
        {"hidden": torch.ones(6, D), "weight": torch.ones(V, D), "bias": torch.ones(V)},
    ),
    "Logits.given": lambda: Good(
        lambda *a, **k: ll.logprobs(ll.Logits.given(*a, **k), rows()), {"logits": torch.zeros(6, V)}
    ),
    "Logits.register_hook": lambda: Good(
        lambda hook: (x := deferred(), x.register_hook(hook), ll.logprobs(x, rows()).logprob.sum().backward()),
        {"hook": lambda gradient: None},
    ),
    "Loss": lambda: Good(
        lambda *a, **k: ll.Loss(*a, **k).of(logits(), rows()),
        {"objective": ll.Objective(), **fields()},
        {"fields": "advantage"},
    ),
    "Loss.of": lambda: Good(
        ll.Loss(ll.Objective(), **fields()).of, {"logits": logits(), "rows": rows()}, {"options": "memory"}
    ),
    "Metrics.merge": lambda: Good(ll.Metrics.merge, {"several": [metrics(), metrics()]}),
    "Metrics.of_rows": lambda: Good(
        ll.Metrics.of_rows,
        {
            "means": {"a": vector()},
            "counted": torch.ones(R, dtype=torch.bool),
            "extremes": {"a": vector()},
            "weights": {"a": vector()},
            "sums": {"a": torch.tensor(1.0)},
        },
    ),
    "Metrics.reduce": lambda: Good(metrics().reduce, {"group": None}),
    "Objective": lambda: Good(lambda **k: ll.Objective(**k)(stats(), rows(), **fields()), {}),
    "Objective.__call__": lambda: Good(
        ll.Objective(), {"stats": stats(), "rows": rows(), **fields()}, {"fields": "advantage"}
    ),
    "Objective.recipe": lambda: Good(ll.Objective.recipe, {"name": "grpo"}, {"changes": "clip"}),
    "PolicyHead": lambda: Good(ll.PolicyHead, {"linear": nn.Linear(D, V)}, {"options": "memory"}),
    "PolicyHead.forward": lambda: Good(
        ll.PolicyHead(nn.Linear(D, V)).forward, {"hidden": torch.ones(6, D), "rows": rows()}, {"options": "memory"}
    ),
    "Preference": lambda: Good(
        lambda *a, **k: ll.Preference(*a, **k)(stats(), rows(), ref_logprob=vector()),
        {"kind": "dpo", "chosen": [0], "rejected": [1]},
    ),
    "Preference.__call__": lambda: Good(
        ll.Preference("dpo"), {"stats": stats(), "rows": rows(), "ref_logprob": vector()}, {"fields": "ref_logprob"}
    ),
    "Preference.pairs": lambda: Good(ll.Preference("dpo").pairs, {"chosen": [0], "rejected": torch.tensor([1])}),
    "Rows.at": lambda: Good(ll.Rows.at, {"index": torch.tensor([0, 2]), "target": torch.tensor([1, 2])}),
    "Rows.check_over": lambda: Good(rows().check_over, {"group": None}),
    "Rows.every": lambda: Good(ll.Rows.every, {"target": torch.tensor([0, 2])}),
    "Rows.expand": lambda: Good(rows().expand, {"x": vector()}),
    "Rows.from_labels": lambda: Good(ll.Rows.from_labels, {"labels": IDS}),
    "Rows.from_mask": lambda: Good(
        ll.Rows.from_mask, {"input_ids": IDS, "mask": MASK, "attention_mask": torch.ones_like(MASK)}
    ),
    "Rows.from_responses": lambda: Good(rows().from_responses, {"responses": [torch.ones(2), torch.ones(2)]}),
    "Rows.gather": lambda: Good(rows().gather, {"x": vector(), "group": None, "grad": None}),
    "Rows.join": lambda: Good(rows().join, {"parts": [torch.ones(2), torch.ones(2)]}),
    "Rows.packed": lambda: Good(
        ll.Rows.packed,
        {"tokens": [[1, 2, 3], [4, 5, 6]], "response_lengths": [2, 2], "loss_masks": [[1, 1], [0, 1]]},
    ),
    "Rows.padded": lambda: Good(
        ll.Rows.padded, {"tokens": IDS, "response_lengths": [1, 2], "loss_masks": [[1], [0, 1]], "lengths": [4, 3]}
    ),
    "Rows.redistribute": lambda: Good(rows().redistribute, {"x": vector(), "to": rows(), "group": None, "grad": None}),
    "Rows.split": lambda: Good(rows().split, {"x": vector()}),
    "Rows.sum_by_sample": lambda: Good(rows().sum_by_sample, {"x": vector()}),
    "Rows.take": lambda: Good(rows().take, {"x": torch.ones(6, 2)}),
    "Teacher": lambda: Good(
        lambda *a, **k: ll.logprobs(logits(), rows(), teacher=ll.Teacher(*a, **k)),
        {"logits": torch.zeros(6, V), "ids": torch.arange(V), "tail": "bucket"},
    ),
    "Teacher.by_row": lambda: Good(
        lambda **k: ll.logprobs(logits(), rows(), teacher=ll.Teacher.by_row(**k)),
        {"members": [torch.zeros(6, V)] * 2, "which": torch.tensor([0, 1, 0, 1])},
    ),
    "Teacher.ids_from_d2t": lambda: Good(ll.Teacher.ids_from_d2t, {"d2t": torch.tensor([0, 1, 1]), "width": 5}),
    "Teacher.from_top_k": lambda: Good(
        lambda *a, **k: ll.logprobs(logits(), rows(), teacher=ll.Teacher.from_top_k(*a, **k)),
        {"logprobs": torch.full((R, 1), -1.0), "ids": torch.ones(R, 1, dtype=torch.int64)},
    ),
    "VocabShard": lambda: Good(ll.VocabShard, {"start": 0, "stop": V}),
    "VocabShard.even": lambda: Good(ll.VocabShard.even, {"vocab_size": V, "group": None}),
    "VocabShard.of": lambda: Good(ll.VocabShard.of, {"weight": torch.ones(V, D)}),
    "estimate": lambda: Good(ll.estimate, {"verb": ll.logprobs, "args": (logits(), rows())}, {"options": "memory"}),
    "explain": lambda: Good(ll.explain, {"verb": ll.logprobs, "args": (deferred(), rows())}, {"options": "memory"}),
    "defer": lambda: Good(deferring, {"model": nn.Sequential(nn.Linear(D, V)), "head": "0"}, {"options": "strict"}),
    "install": lambda: Good(installing, {"host": toy()}, {"options": "audit"}),
    "logprobs": lambda: Good(ll.logprobs, {"logits": logits(), "rows": rows()}),
    "policy_loss": lambda: Good(
        ll.policy_loss,
        {"logits": deferred(), "rows": rows(), "objective": ll.Objective(), **fields()},
        {"fields": "advantage"},
    ),
    "status": lambda: Good(ll.status, {}),
    "uninstall": lambda: Good(ll.uninstall, {"host": "nothing"}),
}

HIDDEN, WEIGHT, TARGET = torch.ones(R, D), torch.ones(V, D), torch.tensor([1, 2, 3, -100])

OTHERS: dict[str, Callable[[], Good]] = {
    "provider.get": lambda: Good(provider.get, {"version": 1}),
    "provider.logprobs_from_logits": lambda: Good(
        provider.logprobs_from_logits, {"logits": torch.zeros(R, V), "target": TARGET.clone()}
    ),
    "provider.logprobs_from_hidden": lambda: Good(
        provider.logprobs_from_hidden, {"hidden": HIDDEN.clone(), "weight": WEIGHT.clone(), "target": TARGET.clone()}
    ),
    "provider.policy_loss": lambda: Good(
        provider.policy_loss,
        {"hidden": HIDDEN.clone(), "weight": WEIGHT.clone(), "target": TARGET.clone(), **fields()},
    ),
    "provider.rows": lambda: Good(
        provider.rows, {"tokens": [torch.tensor([1, 2, 3])], "response_lengths": [2], "loss_masks": [torch.ones(2)]}
    ),
    "provider.Capabilities.why_not": lambda: Good(
        provider.get().capabilities().why_not,
        {"function": "rows", "x": torch.zeros(2), "options": ["device"]},
    ),
    "Sampling": lambda: Good(Sampling, {}),
    "Sampling.differences": lambda: Good(Sampling().differences, {"head": ll.Head()}),
    "Sampling.check": lambda: Good(Sampling().check, {"head": ll.Head()}),
    "Sampling.of_vllm": lambda: Good(Sampling.of_vllm, {"params": vllm_params(), "config": vllm_config()}),
    "Sampling.of_sglang": lambda: Good(
        Sampling.of_sglang, {"params": {"temperature": 0.5}, "arguments": sglang_arguments(), "config": model_config()}
    ),
    "adapters.Host": lambda: Good(
        lambda **k: installing(Host(**{**vars(toy()), **k})),
        {"name": "toy", "package": "shared", "versions": ("0",), "replacements": toy().replacements},
    ),
    "adapters.Replacement": lambda: Good(
        lambda **k: installing(Host("toy", "shared", ("0",), lambda options: [Replacement(**k)])),
        {
            "module": "shared.valid_calls",
            "name": "toy_score",
            "signature": "(logits)",
            "make": lambda original, options: original,
        },
    ),
    "adapters.Option": lambda: Good(
        lambda **k: installing(Host("toy", "shared", ("0",), toy().replacements, {"strength": Option(**k)})),
        {"default": 1.0, "help": "how much"},
    ),
}
"""Beside ``logitless.__all__``: what frameworks and engines call."""


def vllm_params() -> SimpleNamespace:
    return SimpleNamespace(temperature=0.5, top_k=-1, top_p=1.0, min_p=0.0)


def model_config() -> SimpleNamespace:
    return SimpleNamespace(vocab_size=V, dtype="bfloat16")


def vllm_config() -> SimpleNamespace:
    named = {"logprobs_mode": "raw_logprobs", "head_dtype": torch.float32, "get_vocab_size": lambda: V}
    return SimpleNamespace(hf_text_config=model_config(), **named)


def sglang_arguments() -> SimpleNamespace:
    return SimpleNamespace(enable_fp32_lm_head=False, dtype="auto")


def inputs() -> objectives.Inputs:
    """What a term sees."""
    return ll.Objective(policy="gspo").inputs(stats(), rows(), fields(), denominator=None, group=None)


FEW = ll.Rows.packed([[1, 2, 3], [4, 5, 6]], [2, 2], [[1, 1], [0, 1]])
REWARDS = torch.tensor([0.5, -1.0])

OTHERS |= {
    f"objectives.{name}": make
    for name, make in {
        "Inputs.has": lambda: Good(inputs().has, {"name": "advantage"}),
        "Inputs.mean_by_sample": lambda: Good(inputs().mean_by_sample, {"x": vector()}),
        "Inputs.sum_by_sample": lambda: Good(inputs().sum_by_sample, {"x": vector()}),
        "Inputs.sums": lambda: Good(inputs().sums, {"x": vector()}),
        "Inputs.sums_here": lambda: Good(inputs().sums_here, {"x": vector()}),
        "bounded_exp": lambda: Good(objectives.bounded_exp, {"log_ratio": vector()}),
        "count_over": lambda: Good(objectives.count_over, {"rows": [rows(), rows()], "reduce": "token_mean"}),
        "discounted_returns": lambda: Good(objectives.discounted_returns, {"rewards": vector(), "rows": FEW}),
        "dr_grpo_advantages": lambda: Good(objectives.dr_grpo_advantages, {"rewards": REWARDS.clone(), "groups": 2}),
        "gae": lambda: Good(objectives.gae, {"rewards": vector(), "values": vector(), "rows": FEW}),
        "grpo_advantages": lambda: Good(
            objectives.grpo_advantages, {"rewards": REWARDS.clone(), "groups": torch.tensor([7, 7])}
        ),
        "kl_penalty": lambda: Good(objectives.kl_penalty, {"logprob": vector(), "ref_logprob": vector()}),
        "mismatch": lambda: Good(
            objectives.mismatch,
            {"logprob": vector(), "rollout_logprob": vector(), "rows": FEW, "quantiles": [0.5, 0.9]},
        ),
        "prompt_tokens_over": lambda: Good(
            objectives.prompt_tokens_over, {"rows": FEW, "prompts": torch.tensor([0, 1]), "num_prompts": 2}
        ),
        "reinforce_pp_advantages": lambda: Good(
            objectives.reinforce_pp_advantages, {"rewards": REWARDS.clone(), "rows": FEW, "penalty": vector()}
        ),
        "reinforce_pp_baseline_advantages": lambda: Good(
            objectives.reinforce_pp_baseline_advantages, {"rewards": REWARDS.clone(), "groups": 2, "rows": FEW}
        ),
        "rloo_advantages": lambda: Good(objectives.rloo_advantages, {"rewards": REWARDS.clone(), "groups": 1}),
        "row_weights": lambda: Good(
            objectives.row_weights,
            {"rows": FEW, "reduce": "prompt_mean", "prompt_tokens": torch.tensor([2.0, 1.0]), "denominator": 2},
        ),
        "token_rewards": lambda: Good(
            objectives.token_rewards, {"rewards": REWARDS.clone(), "rows": FEW, "penalty": vector()}
        ),
        "value_loss": lambda: Good(
            objectives.value_loss, {"values": vector(), "returns": vector(), "old_values": vector(), "clip": 0.2}
        ),
        "whiten": lambda: Good(objectives.whiten, {"x": vector(), "counted": FEW.counted.clone()}),
    }.items()
}

OTHERS_NOT_CALLED = {
    **dict.fromkeys(
        (f"objectives.{name}" for name in ("Inputs", "Mismatch", "Outlier", "Returns", "ValueLoss")),
        "made by the package, for terms and as results",
    ),
    **dict.fromkeys(
        (f"objectives.Inputs.{name}" for name in ("cut", "ordered", "readied")),
        "called by the package with what it has checked",
    ),
}
"""The same of :data:`NOT_CALLED`, beside ``logitless.__all__``."""

NOT_CALLED = {
    "Rows": "made by its constructors, whose names it says",
    "TokenStats": "results, by name; what is put in is looked at by whoever reads it",
    "Metrics": "results, by name",
    "LogitlessError": "an error",
    **dict.fromkeys(
        ("Contiguous.tokens", "Zigzag.tokens", "Head.gain", "Kept.cut", "LoRA.inner", "LoRA.detached"),
        "called by the package with what it has checked",
    ),
    **dict.fromkeys(
        (
            "Preference.sample_sums",
            "Teacher.facts",
            "Teacher.read_again",
            "TokenStats.each",
            "TokenStats.shaped",
            "VocabShard.imagined",
        ),
        "called by the package with what it has checked",
    ),
    **dict.fromkeys(
        (
            f"{noun}.{name}"
            for noun in ("Objective", "Preference")
            for name in ("evaluate", "graded", "inputs", "facts_over_samples", "kept_together")
        ),
        "called by the package with what it has checked",
    ),
}
"""Public names that users do not call, and why."""


def public() -> Iterator[tuple[str, Any]]:
    """Every public callable by name: functions, constructors, and the methods of public classes."""
    yield from _called({name: getattr(ll, name) for name in ll.__all__})


def others() -> Iterator[tuple[str, Any]]:
    """The same of what is public beside ``logitless.__all__``."""
    functions = {f"provider.{name}": getattr(provider, name) for name in ("get", *provider.FUNCTIONS)}
    nouns = {"provider.Capabilities.why_not": provider.Capabilities.why_not, "Sampling": Sampling}
    of_hosts = {f"adapters.{noun.__name__}": noun for noun in (Host, Option, Replacement)}
    further = [name for name in objectives.__all__ if name not in ll.__all__ and callable(getattr(objectives, name))]
    terms = {f"objectives.{name}": getattr(objectives, name) for name in further}
    for name, noun in _called({**functions, **nouns, **of_hosts, **terms}):
        if not name.startswith("adapters.") or name in of_hosts:
            yield name, noun


def _called(nouns: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, noun in nouns.items():
        yield name, noun
        if not inspect.isclass(noun):
            continue
        for method in vars(noun) | {"__call__": None} if "__call__" in vars(noun) else vars(noun):
            if callable(getattr(noun, method)) and (not method.startswith("_") or method == "__call__"):
                yield f"{name}.{method}", getattr(noun, method)


def parameters(function: Any) -> list[inspect.Parameter]:
    """Of a function; of a method without self."""
    return [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
