"""The call to write: the fewest matrix products that fit the card, and the memory that gives them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache

from logitless.call import MEMORY
from logitless.memory import Estimate
from logitless.tools.plan.ways import FROM_HIDDEN, OVER_SUPPORT, POLICY_LOSS, WAYS, Forecast, LossStep, Way, forecast

BUDGETS = (MEMORY["hidden"], "512MiB", *(f"{1 << n}GiB" for n in range(8)))
"""Values of ``memory=`` that are tried, smallest first, which is the default of ``logprobs``."""

LESS = ("512MiB", "256MiB", "128MiB", "64MiB")
"""Values for ``policy_loss`` where its default does not fit."""


@dataclass(frozen=True)
class Choice:
    """A call to write: which, its ``memory=``, its estimate, and its matrix products, forward and backward together."""

    way: Way
    memory: int | str
    call: Estimate
    products: int

    def cost(self, free: int | None) -> tuple[bool, int, int]:
        """Sort key: calls that fit come first, by products and then by peak; calls that do not fit follow, by peak."""
        over = free is not None and self.call.peak > free
        return over, self.call.peak if over else self.products, self.call.peak


@dataclass(frozen=True)
class ModelPlan:
    """The answer: every way, and the call to write.

    Attributes:
        free: bytes that the card has for the step; None without a card.
        best: the recommended call.
        own_loss: the call for a loss that is no ``Objective``, from log-probs.
        most_tokens: largest micro-batch of the recommended call that fits the card; None without a card.
        snippet: the recommended call as code.
    """

    step: LossStep
    free: int | None
    forecasts: tuple[Forecast, ...]
    best: Choice
    own_loss: Choice
    most_tokens: int | None
    snippet: str

    @property
    def call(self) -> Estimate:
        return self.best.call

    @property
    def fits(self) -> bool:
        return self.free is None or self.call.peak <= self.free


def plan_model(step: LossStep, free: int | None = None) -> ModelPlan:
    """Forecasts of all ways, and the recommended call.

    >>> from logitless.tools.presets import ModelShape
    >>> step = LossStep(ModelShape("some", hidden=4096, vocab=128000), tokens=8192, response_fraction=0.5)
    >>> plan = plan_model(step)
    >>> plan.best.way.name, plan.best.products
    ('policy_loss of Logits', 3)
    """
    ways = WAYS if step.kept_ids is None else (*WAYS, OVER_SUPPORT)
    forecasts = {way.name: forecast(way, step, free) for way in ways}
    if step.kept_ids is not None:
        asked = step.memory or MEMORY["hidden"]
        best = own = _choice(OVER_SUPPORT, step, asked, forecasts[OVER_SUPPORT.name].estimate)
    else:
        loss = _for_objective(step, free, forecasts[POLICY_LOSS.name].estimate)
        own = _for_own_loss(step, free, forecasts[FROM_HIDDEN.name].estimate)
        best = min(loss, own, key=lambda choice: choice.cost(free))
    known = forecasts[best.way.name]
    if best.call is not known.estimate:
        known = forecast(best.way, replace(step, memory=best.memory), free)
    code = snippet(step, best.way.name, best.memory)
    return ModelPlan(step, free, tuple(forecasts.values()), best, own, known.most_tokens, code)


def _choice(way: Way, step: LossStep, memory: int | str, call: Estimate | None = None) -> Choice:
    call = call or way.predict(replace(step, memory=memory))
    plan = call.plan
    assert plan is not None
    products = plan.products if plan.first is None else plan.first.products
    return Choice(way, memory, call, 3 - step.frozen_head if plan.kind == "one pass" else products)


def _for_objective(step: LossStep, free: int | None, asked: Estimate) -> Choice:
    """``policy_loss`` with its default memory, less where that does not fit, more where one pass needs it."""
    usual = _choice(POLICY_LOSS, step, step.memory or MEMORY["chunk"], asked)
    if step.memory is not None or free is None:
        return usual
    if usual.call.peak > free:
        smaller = usual
        for memory in LESS:
            smaller = _choice(POLICY_LOSS, step, memory)
            if smaller.call.peak <= free:
                break
        return smaller
    if _is_one_pass(usual):
        return usual
    for memory in BUDGETS[BUDGETS.index(MEMORY["chunk"]) + 1 :]:
        larger = _choice(POLICY_LOSS, step, memory)
        if larger.call.peak > free or _is_one_pass(larger):
            return min(usual, larger, key=lambda choice: choice.cost(free))
    return usual


def _is_one_pass(choice: Choice) -> bool:
    return choice.call.plan is not None and choice.call.plan.kind == "one pass"


def _for_own_loss(step: LossStep, free: int | None, asked: Estimate) -> Choice:
    """``logprobs`` of ``Logits`` with the fewest matrix products that fit the card, and the smallest memory that
    gives them.

    More memory never means more products or a lower peak. So halving finds the smallest memory for a number of
    products, and if that call does not fit, no call with as many products does.
    """
    usual = _choice(FROM_HIDDEN, step, step.memory or MEMORY["hidden"], asked)
    if step.memory is not None or free is None:
        return usual

    @cache
    def choice(memory: str) -> Choice:
        return usual if memory == usual.memory else _choice(FROM_HIDDEN, step, memory)

    budgets = BUDGETS
    while budgets:
        fewest = choice(budgets[-1]).products
        # Where the smallest memory gives as few products, no other is tried.
        most = 0 if usual.products == fewest else len(budgets) - 1
        first = bisect_left(budgets, True, hi=most, key=lambda memory: choice(memory).products == fewest)
        if choice(budgets[first]).call.peak <= free:
            return min(usual, choice(budgets[first]), key=lambda found: found.cost(free))
        budgets = budgets[:first]
    return usual


# The call as code: a function of the tensors and groups that a training loop has.

SHARD = [
    "def make_shard(weight, tp_group):  # once per run, for every call",
    "    return ll.VocabShard.even(weight.shape[0] * tp_group.size(), tp_group)\n\n",
]


def snippet(step: LossStep, call: str, memory: int | str) -> str:
    """The code of a call by the name of its way: ``policy_loss``, or ``logprobs`` with a scope or not."""
    groups = [name for name, size in (("shard", step.tp), ("cp_group", step.cp)) if size > 1]
    split = ["cp=ll.Zigzag(cp_group.rank(), cp_group.size())"] if step.cp > 1 else []
    chosen = {"softcap": (step.model.softcap, None), "scale": (step.model.scale, 1.0)}
    head = [f"{name}={value!r}" for name, (value, default) in chosen.items() if value != default]
    options = [f"head=ll.Head({', '.join(head)})"] if head else []
    options += [f"memory={memory!r}".replace("'", '"')]
    linear = ["hidden", "weight", *(["shard=shard"] if step.tp > 1 else [])]
    rows = _call("rows", "Rows.packed", ["tokens", "response_lengths", *split, "device=hidden.device"])
    logits = f"    logits = ll.Logits({', '.join(linear)})"
    if call.startswith("policy_loss"):
        name, given, body = _with_objective(step, options)
    else:
        name, given, body = _without(step, options, support="support" in call)
    takes = ["hidden", "weight", "tokens", "response_lengths", *given, *groups]
    once = SHARD if step.tp > 1 else []
    written = [f"def {name}(", *(f"    {x}," for x in takes), "):", *rows, logits, *body]
    return "\n".join(["import logitless as ll\n\n", *once, *written]) + "\n"


def _with_objective(step: LossStep, options: list[str]) -> tuple[str, list[str], list[str]]:
    """Name, more arguments and body of the function that returns a loss."""
    terms = "entropy_coef=0.001" if step.entropy == "grad" else ""
    fields = ["old_logprob=rows.from_responses(old_logprobs)", "advantage=advantages[rows.sample]"]
    group = ["group=cp_group"] if step.cp > 1 else []
    call = ["logits", "rows", "objective", *fields, "denominator=denominator", *group, *options]
    return (
        "policy_loss",
        ["old_logprobs", "advantages", "denominator"],
        [
            f"    objective = ll.Objective({terms})  # or ll.Objective.recipe(...)",
            "    # denominator: objectives.count_over(all_rows, objective.reduce, group)",
            *_call("loss, metrics", "policy_loss", call),
            "    return loss, metrics",
        ],
    )


def _without(step: LossStep, options: list[str], support: bool) -> tuple[str, list[str], list[str]]:
    """Name, more arguments and body of the function that returns log-probs, and entropy if asked for."""
    entropy = [f'entropy="{step.entropy}"'] if step.entropy else []
    kept = ['kept=kept.over("support")'] if support else []
    call = ["logits", "rows", *kept, *entropy, *options]
    results = "    return rows.split(out.logprob)" + (", rows.split(out.entropy)" if step.entropy else "")
    return "score", ["kept"] if support else [], [*_call("out", "logprobs", call), results]


def _call(name: str, function: str, arguments: list[str]) -> list[str]:
    return [f"    {name} = ll.{function}(", *(f"        {argument}," for argument in arguments), "    )"]
