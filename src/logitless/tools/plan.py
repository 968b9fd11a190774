"""``logitless plan``: the memory that the loss step of a model will need, in every way to write it.

A loss step starts where the model ends, with hidden states ``[T, D]`` and the head's weight ``[V, D]``, and ends with
their gradients. Ways that build logits have three parts: the head, the call on its logits, the head's backward.

    peak of a step = most bytes alive at once beyond hidden states, weight and what the model itself holds

``estimate`` gives the bytes of a call. This file adds the logits around it, and the step of frameworks that
upcast logits.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from logitless.errors import LogitlessError
from logitless.from_hidden.plan import LinearPlan
from logitless.memory import Estimate, Item, estimate
from logitless.objectives import Objective
from logitless.spec import EntropyMode, format_bytes, parse_memory
from logitless.tools.presets import ModelShape

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
BUDGETS = ("256MiB", "512MiB", *(f"{1 << n}GiB" for n in range(8)))
"""Values of ``memory=`` that are tried, smallest first."""
UNIT = 256
"""Tokens that the largest micro-batch is counted in."""


@dataclass(frozen=True)
class LossStep:
    """A micro-batch on one of the ranks that share it.

    Args:
        model: shape of the head.
        tokens: size of the micro-batch, all context-parallel ranks together.
        response_fraction: part of the tokens that is response; the rest is prompt and tool output.
        tp, cp: tensor-parallel (vocabulary) and context-parallel (sequence) ranks.
        dtype: of hidden states and weight.
        entropy: as ``linear_logprobs`` takes it.
        frozen_head: whether the head's weight needs no gradient.
        memory: working memory of ``linear_logprobs`` and ``linear_policy_loss``.
        kept_ids: ids that the sampler kept of each response token, on average; None where it kept all.
        device: ``"cuda"``, or ``"cpu"``.
    """

    model: ModelShape
    tokens: int
    response_fraction: float = 1.0
    tp: int = 1
    cp: int = 1
    dtype: str = "bfloat16"
    entropy: EntropyMode = "value"
    frozen_head: bool = False
    memory: int | str = "256MiB"
    kept_ids: float | None = None
    device: Literal["cuda", "cpu"] = "cuda"

    def __post_init__(self) -> None:
        for name in ("tokens", "tp", "cp"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise LogitlessError(f"plan: {name} must be an integer of at least 1 but is {value!r}.")
        if not 0 < self.response_fraction <= 1:
            raise LogitlessError(
                f"plan: response_fraction must be above 0 and at most 1 but is {self.response_fraction!r}."
            )
        if self.kept_ids is not None and not self.kept_ids >= 0:
            raise LogitlessError(f"plan: kept_ids must be 0 or more on average but is {self.kept_ids!r}.")
        if self.dtype not in BYTES:
            raise LogitlessError(f"plan: dtype must be one of {list(BYTES)} but is {self.dtype!r}.")

    @property
    def local_tokens(self) -> int:
        return -(-self.tokens // self.cp)

    @property
    def rows(self) -> int:
        return max(1, round(self.local_tokens * self.response_fraction))

    @property
    def columns(self) -> int:
        return -(-self.model.vocab // self.tp)

    @property
    def needs_grad(self) -> tuple[str, ...]:
        return ("hidden",) if self.frozen_head else ("hidden", "weight")

    def predict(self, path: Any, **more: Any) -> Estimate:
        """``estimate`` of a call in this step."""
        # Triton runs on the card that the step is meant for, whether or not it runs here.
        backend = "triton" if self.device == "cuda" else "tiled"
        chosen = {"rows": self.rows, "tensor_parallel": self.tp, "vocab": self.model.vocab, "backend": backend, **more}
        softcap = self.model.softcap is not None
        shared = {"dtype": self.dtype, "device": self.device, "entropy": self.entropy, "softcap": softcap}
        return estimate(path, tokens=self.local_tokens, **{**shared, **chosen})

    def item(self, name: str, rows: int, columns: int, width: int | None = None, output: bool = False) -> Item:
        """A matrix with its shape in its name."""
        size = rows * columns * (BYTES[self.dtype] if width is None else width)
        return Item(f"{name} [{rows}, {columns}]", size, "backward" if output else "kept", output)

    def gradients(self) -> tuple[Item, ...]:
        """The gradients that the step makes: d_hidden, and d_weight unless the head is frozen."""
        d_hidden = self.item("d_hidden", self.local_tokens, self.model.hidden, output=True)
        d_weight = self.item("d_weight", self.columns, self.model.hidden, output=True)
        return (d_hidden,) if self.frozen_head else (d_hidden, d_weight)


@dataclass(frozen=True)
class Way:
    """One way to write the step."""

    name: str
    ours: bool
    predict: Callable[[LossStep], Estimate]


@dataclass(frozen=True)
class Forecast:
    """The memory that a way needs for a step, and whether a card has it.

    Attributes:
        most_tokens: largest micro-batch that fits the card, in multiples of 256 tokens; None without a card.
    """

    way: Way
    estimate: Estimate
    fits: bool | None
    most_tokens: int | None


@dataclass(frozen=True)
class ModelPlan:
    """The answer: every way, and the call to write.

    Attributes:
        free: bytes that the card has for the step; None without a card.
        memory: the ``memory=`` to use.
        call: estimate of the recommended call.
        snippet: the recommended call as code.
    """

    step: LossStep
    free: int | None
    forecasts: tuple[Forecast, ...]
    memory: int | str
    call: Estimate
    snippet: str

    @property
    def fits(self) -> bool:
        return self.free is None or self.call.peak <= self.free


def plan_model(step: LossStep, free: int | None = None) -> ModelPlan:
    """Forecasts of all ways, and the recommended call.

    >>> step = LossStep(ModelShape("tiny", hidden=64, vocab=1000), tokens=4096, response_fraction=0.5)
    >>> [forecast.way.name for forecast in plan_model(step).forecasts][:2]
    ['plain torch', 'slime-style']
    """
    ways = WAYS if step.kept_ids is None else (*WAYS, OVER_SUPPORT)
    forecasts = tuple(_forecast(way, step, free) for way in ways)
    asked = next(forecast.estimate for forecast in forecasts if forecast.way.predict is _from_hidden)
    memory, call = (step.memory, asked) if free is None else _recommend(step, free, asked)
    return ModelPlan(step, free, forecasts, memory, call, snippet(step, memory))


def _forecast(way: Way, step: LossStep, free: int | None) -> Forecast:
    predicted = way.predict(step)
    if free is None:
        return Forecast(way, predicted, None, None)
    # The head's gradient is as large for one token as for a million.
    fixed = [item for item in _fullest(predicted.forward, predicted.backward) if item.name.startswith("d_weight")]
    # Whatever the way, the gradient of all hidden states must fit.
    limit = free * step.cp // (UNIT * step.model.hidden * BYTES[step.dtype]) + 1

    def peak(units: int) -> int:
        return way.predict(replace(step, tokens=units * UNIT)).peak

    most = largest_fitting(peak, free, limit, (step.tokens / UNIT, predicted.peak), _bytes(fixed))
    return Forecast(way, predicted, predicted.peak <= free, most * UNIT)


def largest_fitting(peak: Callable[[int], int], free: int, limit: int, known: tuple[float, int], fixed: int = 0) -> int:
    """The largest n with ``peak(n) <= free``, by few calls of a ``peak`` that is costly and close to a straight line.

    Each probe is where the line through the last two points reaches ``free``. The answer n fits and n + 1 does not: a
    bent line costs probes, not exactness. ``peak`` should not fall. Where it does (one more chunk makes all chunks
    smaller), several n are of that kind, and the answer is one of them.

    Args:
        limit: an n that does not fit.
        known: an n, whole or not, and its peak.
        fixed: a guess of the peak at n = 0, for the first line.
    """
    low, high = (int(known[0]), limit) if known[1] <= free else (0, min(limit, math.ceil(known[0])))
    before, last = (0.0, fixed), known
    for turn in itertools.count():
        if high - low <= 1:
            break
        middle = (low + high) // 2
        rise = (last[1] - before[1]) / (last[0] - before[0])
        crossing = last[0] + (free - last[1]) / rise if rise > 0 else middle
        # On a staircase, lines can creep: after five probes, every other probe halves the interval.
        guess = middle if turn > 4 and turn % 2 else crossing
        probe = min(max(int(guess), low + 1), high - 1)
        before, last = last, (probe, peak(probe))
        low, high = (probe, high) if last[1] <= free else (low, probe)
    return low


# The ways.


def _plain_torch(step: LossStep) -> Estimate:
    """Logits of all tokens, their float32 log_softmax, and entropy from it."""
    return step.predict(
        "torch", rows=None, vocab=step.columns, tensor_parallel=1, hidden=step.model.hidden, needs_grad=step.needs_grad
    )


def _slime(step: LossStep) -> Estimate:
    """Logits of all tokens, upcast and held; one float32 softmax that becomes the gradient.

    Beyond the float32 logits that is one tensor of their size, or two where entropy is differentiated. slime's fused
    function was measured on an H200: 9.3 and 18.6 GiB beyond logits of 9.27 GiB.
    """
    shape = (step.local_tokens, step.columns)
    held = step.item("logits in float32", *shape, width=4)
    narrow = () if BYTES[step.dtype] == 4 else (step.item(f"logits in {step.dtype}", *shape),)
    softmax = step.item("softmax, then its gradient", *shape, width=4)
    more = (step.item("entropy's gradient", *shape, width=4),) if step.entropy == "grad" else ()
    d_narrow = (step.item(f"d_logits in {step.dtype}", *shape),) if narrow else ()
    d_logits = d_narrow or (softmax,)
    forward = _fullest((held, *narrow), (held, softmax))
    backward = _fullest((held, softmax, *more), (held, softmax, *d_narrow), (held, *d_logits, *step.gradients()))
    return Estimate(path="torch", backend=None, plan=None, forward=forward, backward=backward)


def _from_logits(step: LossStep, overwrite: bool) -> Estimate:
    """The head's logits of all tokens, ``logprobs`` on the response rows, then the head's backward."""
    call = step.predict("logprobs", overwrite_logits=overwrite)
    logits = step.item("logits", step.local_tokens, step.columns)
    given = tuple(item for item in call.backward if item.output)
    backward = _fullest((logits, *call.backward), (logits, *given, *step.gradients()))
    return replace(call, forward=(logits, *call.forward), backward=backward)


def _from_hidden(step: LossStep) -> Estimate:
    return step.predict("linear_logprobs", hidden=step.model.hidden, memory=step.memory, needs_grad=step.needs_grad)


def _policy_loss(step: LossStep) -> Estimate:
    """A token-level objective, evaluated chunk by chunk; every row has a gradient."""
    objective = Objective(entropy_coef=1.0 if step.entropy == "grad" else 0.0)
    sizes = {"hidden": step.model.hidden, "memory": step.memory, "needs_grad": step.needs_grad}
    return step.predict("linear_policy_loss", **sizes, entropy=None, objective=objective)


def _over_support(step: LossStep) -> Estimate:
    """Log-probs over the ids that the sampler kept, and nothing else."""
    ids = round((step.kept_ids or 0) * step.rows)
    sizes = {"hidden": step.model.hidden, "memory": step.memory, "needs_grad": step.needs_grad}
    return step.predict("linear_logprobs", **sizes, kept_ids=ids, scope="support")


def _fullest(*moments: tuple[Item, ...]) -> tuple[Item, ...]:
    return max(moments, key=_bytes)


def _bytes(items: Iterable[Item]) -> int:
    return sum(item.bytes for item in items)


WAYS = (
    Way("plain torch", False, _plain_torch),
    Way("slime-style", False, _slime),
    Way("logprobs", True, lambda step: _from_logits(step, False)),
    Way("logprobs, overwrite_logits", True, lambda step: _from_logits(step, True)),
    Way("linear_logprobs", True, _from_hidden),
    Way("linear_policy_loss", True, _policy_loss),
)

OVER_SUPPORT = Way('linear_logprobs, scope="support"', True, _over_support)
"""Where the sampler kept some ids of each token."""


# The recommendation.


def _recommend(step: LossStep, free: int, asked: Estimate) -> tuple[int | str, Estimate]:
    """The fewest matrix products that fit the card, and the smallest memory that gives them.

    More memory never means more products or a lower peak. So halving finds the smallest memory for a number of
    products, and if that call does not fit, no call with as many products does.
    """

    @cache
    def call(memory: int | str) -> Estimate:
        return asked if memory == step.memory else _from_hidden(replace(step, memory=memory))

    def cost(memory: int | str) -> tuple[bool, int, int]:
        return call(memory).peak > free, _products(call(memory)), call(memory).peak

    best, budgets = step.memory, sorted({*BUDGETS, step.memory}, key=parse_memory)
    while budgets:
        fewest = _products(call(budgets[-1]))
        most = budgets.index(step.memory) if _products(asked) == fewest and step.memory in budgets else len(budgets) - 1
        first = bisect_left(budgets, True, hi=most, key=lambda memory: _products(call(memory)) == fewest)
        if call(budgets[first]).peak <= free:
            best = min(best, budgets[first], key=cost)
            break
        budgets = budgets[:first]
    return best, call(best)


def _products(call: Estimate) -> int:
    assert isinstance(call.plan, LinearPlan)
    return call.plan.products


def snippet(step: LossStep, memory: int | str) -> str:
    """The call, as a function of the tensors and groups that a training loop has."""
    groups = [name for name, size in (("tp_group", step.tp), ("cp_group", step.cp)) if size > 1]
    split = ["cp=ll.Zigzag(cp_group.rank(), cp_group.size())"] if step.cp > 1 else []
    options = [f'entropy="{step.entropy}"'] if step.entropy else []
    chosen = {"softcap": (step.model.softcap, None), "scale": (step.model.scale, 1.0)}
    head = [f"{name}={value!r}" for name, (value, default) in chosen.items() if value != default]
    options += [f"head=ll.Head({', '.join(head)})"] if head else []
    options += ["shard=shard"] if step.tp > 1 else []
    options += [f"memory={memory!r}".replace("'", '"')]
    lines = [
        "import logitless as ll\n\n",
        f"def score({', '.join(['hidden', 'weight', 'tokens', 'response_lengths', *groups])}):",
        *_call("rows", "Rows.packed", ["tokens", "response_lengths", *split, "device=hidden.device"]),
        *(["    shard = ll.VocabShard.even(weight.shape[0] * tp_group.size(), tp_group)"] if step.tp > 1 else []),
        *_call("out", "linear_logprobs", ["hidden", "weight", "rows", *options]),
        "    return rows.split(out.logprob)" + (", rows.split(out.entropy)" if step.entropy else ""),
    ]
    return "\n".join(lines) + "\n"


def _call(name: str, function: str, arguments: list[str]) -> list[str]:
    return [f"    {name} = ll.{function}(", *(f"        {argument}," for argument in arguments), "    )"]


# What is shown.


def headline(step: LossStep) -> str:
    model = step.model
    facts = [f"hidden {model.hidden}", f"vocabulary {model.vocab}", "tied head" if model.tied else "untied head"]
    facts += [f"softcap {model.softcap:g}"] if model.softcap else []
    facts += [f"logit scale {model.scale:g}"] if model.scale != 1 else []
    response = f"{step.rows} of {step.local_tokens} tokens are response"
    entropy = {"value": "entropy", "grad": "entropy with its gradient"}.get(str(step.entropy), "no entropy")
    frozen = ", frozen head" if step.frozen_head else ""
    return (
        f"{model.name}: {', '.join(facts)}\n"
        f"each rank of TP {step.tp}, CP {step.cp}: {response}, {step.columns} columns\n"
        f"{step.dtype}, log-prob and {entropy}, forward and backward{frozen}"
    )


def summary_rows(plan: ModelPlan) -> list[tuple[str, str, str, str, str]]:
    """For each way: name, peak, share of plain torch's peak, whether it fits, most tokens."""
    plain = plan.forecasts[0].estimate.peak
    lines = []
    for forecast in plan.forecasts:
        peak = forecast.estimate.peak
        share = "" if forecast is plan.forecasts[0] else f"{peak / plain:.1%}"
        fits = {None: "", True: "yes", False: "no"}[forecast.fits]
        most = "" if forecast.most_tokens is None else str(forecast.most_tokens)
        lines.append((forecast.way.name, format_bytes(peak), share, fits, most))
    return lines


def as_json(plan: ModelPlan) -> dict[str, Any]:
    """The whole plan, as JSON values."""

    def items(call: Estimate) -> dict[str, Any]:
        sides = {"forward": call.forward, "backward": call.backward}
        listed = {side: [{"name": x.name, "bytes": x.bytes} for x in chosen] for side, chosen in sides.items()}
        return {"peak": call.peak, "forward_peak": call.forward_peak, "backward_peak": call.backward_peak, **listed}

    step, model = plan.step, plan.step.model
    sizes = ("tokens", "response_fraction", "tp", "cp", "dtype", "entropy", "frozen_head", "rows", "columns")
    return {
        "model": {name: getattr(model, name) for name in ("name", "hidden", "vocab", "softcap", "scale", "tied")},
        "step": {name: getattr(step, name) for name in sizes} | {"local_tokens": step.local_tokens},
        "free": plan.free,
        "ways": [
            {"name": f.way.name, "fits": f.fits, "most_tokens": f.most_tokens, **items(f.estimate)}
            for f in plan.forecasts
        ],
        "call": {"memory": plan.memory, "plan": str(plan.call.plan), "fits": plan.fits, **items(plan.call)},
        "snippet": plan.snippet,
    }
