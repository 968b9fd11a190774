"""A loss step by its sizes, the ways to write it, the bytes of each way, and its largest micro-batch.

``estimate`` gives the bytes of a call. This file adds the logits around it, and the step of frameworks that upcast
logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.errors.arguments import LARGEST
from logitless.loss import policy_loss
from logitless.machine import Machine
from logitless.memory import Estimate, Item, estimate, sized
from logitless.objectives import Objective
from logitless.operands import Kept
from logitless.score import logprobs
from logitless.spec import EntropyMode, Head
from logitless.tools.presets import ModelShape

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

ELEMENTS = LARGEST // 8
"""Elements of a tensor whose bytes can be counted in 64 bits, eight for each."""

MOST_TOKENS = 1 << 28
"""Tokens of a rank. A dry call goes through all of its chunks, and on the meta device some of torch's functions make a
tensor of tokens x tokens."""


@dataclass(frozen=True)
class LossStep:
    """A micro-batch on one of the ranks that share it.

    Args:
        model: shape of the head.
        tokens: size of the micro-batch, all context-parallel ranks together.
        response_fraction: part of the tokens that is response; the rest is prompt and tool output.
        tp, cp: tensor-parallel (vocabulary) and context-parallel (sequence) ranks.
        dtype: of hidden states and weight.
        entropy: as ``logprobs`` takes it.
        frozen_head: whether the head's weight needs no gradient.
        memory: working memory of ``logprobs`` and ``policy_loss`` from hidden states; None for the default of each.
        kept_ids: ids that the sampler kept of each response token, on average; None where it kept all.
        device: ``"cuda"`` for the GPU at hand, or an H200 where there is none; ``"cpu"``; or another machine.
    """

    model: ModelShape
    tokens: int
    response_fraction: float = 1.0
    tp: int = 1
    cp: int = 1
    dtype: str = "bfloat16"
    entropy: EntropyMode = "value"
    frozen_head: bool = False
    memory: int | str | None = None
    kept_ids: float | None = None
    device: Literal["cuda", "cpu"] | Machine = "cuda"

    def __post_init__(self) -> None:
        for name, value in {"tokens": self.tokens, "tp": self.tp, "cp": self.cp}.items():
            if type(value) is not int or value < 1:
                raise LogitlessError(f"plan: {name} must be an integer of at least 1 but is {value!r}.")
        sizes = f"vocabulary of {self.model.vocab} and a hidden size of {self.model.hidden}"
        if self.model.hidden * self.model.vocab > ELEMENTS:
            raise LogitlessError(f"plan: a {sizes} have more elements than 64 bits can count. Is it another config?")
        for name, most in {"tp": self.model.vocab, "cp": ELEMENTS, "tokens": self.largest}.items():
            if getattr(self, name) > most:
                raise LogitlessError(
                    f"plan: {name} must be at most {most} with a {sizes} but is {getattr(self, name)}."
                )
        if not 0 < self.response_fraction <= 1:
            raise LogitlessError(
                f"plan: response_fraction must be above 0 and at most 1 but is {self.response_fraction!r}."
            )
        if self.kept_ids is not None and not self.kept_ids >= 0:
            raise LogitlessError(f"plan: kept_ids must be 0 or more on average but is {self.kept_ids!r}.")
        if self.kept_ids is not None and self.kept_ids > self.model.vocab:
            raise LogitlessError(
                f"plan: kept_ids must be at most the vocabulary of {self.model.vocab} but is {self.kept_ids!r}. It is "
                f"the average of one response token, not the sum of all."
            )
        if self.entropy not in (None, "value", "grad"):
            raise LogitlessError(f'plan: entropy must be None, "value" or "grad" but is {self.entropy!r}.')
        if self.dtype not in BYTES:
            raise LogitlessError(f"plan: dtype must be one of {list(BYTES)} but is {self.dtype!r}.")

    @property
    def largest(self) -> int:
        """Most tokens of a micro-batch that can be planned: its tensors have sizes, its chunks are soon counted."""
        return min(MOST_TOKENS, ELEMENTS // max(self.model.vocab, self.model.hidden)) * self.cp

    @property
    def local_tokens(self) -> int:
        return -(-self.tokens // self.cp)

    @property
    def rows(self) -> int:
        return max(1, round(self.local_tokens * self.response_fraction))

    @property
    def columns(self) -> int:
        return -(-self.model.vocab // self.tp)

    def predict(
        self, verb: Callable[..., Any], *more: Any, hidden: bool, linear: Any = None, **options: Any
    ) -> Estimate:
        """``estimate`` of a verb in this step, from hidden states or from logits that exist.

        ``more`` are positional arguments after the rows, ``linear`` options of the logits.
        """
        logits, rows = sized(
            self.local_tokens,
            self.model.vocab,
            self.model.hidden if hidden else None,
            rows=self.rows,
            dtype=self.dtype,
            needs_grad=("logits", "hidden", *(() if self.frozen_head else ("weight",))),
            tensor_parallel=self.tp,
            **(linear or {}),
        )
        # Triton runs on the card that the step is meant for, whether or not it runs here.
        backend = "tiled" if self.device == "cpu" else "triton"
        head = Head(softcap=self.model.softcap) if self.model.softcap is not None else None
        return estimate(verb, logits, rows, *more, head=head, backend=backend, device=self.device, **options)

    def item(self, name: str, rows: int, columns: int, width: int | None = None, output: bool = False) -> Item:
        """A matrix with its shape in its name."""
        size = rows * columns * (BYTES[self.dtype] if width is None else width)
        return Item(f"{name} [{rows}, {columns}]", size, "backward" if output else "kept", output)

    def gradients(self) -> tuple[Item, ...]:
        """The gradients that the step makes: d_hidden, and d_weight unless the head is frozen."""
        d_hidden = self.item("d_hidden", self.local_tokens, self.model.hidden, output=True)
        d_weight = self.item("d_weight", self.columns, self.model.hidden, output=True)
        return (d_hidden,) if self.frozen_head else (d_hidden, d_weight)


GRAIN = 256
"""The largest micro-batch is a multiple of this number of tokens."""


@dataclass(frozen=True)
class Way:
    """One way to write the step; ``ours`` says whether it calls this library."""

    name: str
    ours: bool
    predict: Callable[[LossStep], Estimate]


@dataclass(frozen=True)
class Forecast:
    """The memory that a way needs for a step, whether a card has it, and the largest micro-batch that fits the card.

    Without a card, ``fits`` and ``most_tokens`` (a multiple of 256) are None.
    """

    way: Way
    estimate: Estimate
    fits: bool | None
    most_tokens: int | None


def forecast(way: Way, step: LossStep, free: int | None) -> Forecast:
    """The memory of a step in one way and, with the free bytes of a card, its largest micro-batch."""
    predicted = way.predict(step)
    if free is None:
        return Forecast(way, predicted, None, None)
    # The head's gradient is as large for one token as for a million.
    fixed = [item for item in _fullest(predicted.forward, predicted.backward) if item.name.startswith("d_weight")]
    # The gradient of all hidden states must fit in any way.
    limit = min(free * step.cp // (step.model.hidden * BYTES[step.dtype]), step.largest) // GRAIN + 1

    def peak(count: int) -> int:
        return way.predict(replace(step, tokens=count * GRAIN)).peak

    most = largest_fitting(peak, free, limit, (step.tokens / GRAIN, predicted.peak), _bytes(fixed))
    return Forecast(way, predicted, predicted.peak <= free, most * GRAIN)


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
    before, last, turn = (0.0, fixed), known, 0
    while high - low > 1:
        middle = (low + high) // 2
        rise = (last[1] - before[1]) / (last[0] - before[0])
        crossing = last[0] + (free - last[1]) / rise if rise > 0 else middle
        # On a staircase, lines can creep: after five probes, every other probe halves the interval.
        guess = middle if turn > 4 and turn % 2 else crossing
        probe = min(max(int(guess), low + 1), high - 1)
        before, last = last, (probe, peak(probe))
        low, high = (probe, high) if last[1] <= free else (low, probe)
        turn += 1
    return low


def plain(logits: Tensor, index: Tensor | None, target: Tensor, entropy: EntropyMode) -> tuple[Tensor, Tensor | None]:
    """Log-prob and entropy as frameworks write them: one float32 log_softmax, gathered and summed."""
    scored = logits if index is None else logits[index]
    logp = torch.log_softmax(scored.float(), dim=-1)
    logprob = logp.gather(1, target[:, None]).squeeze(1)
    if entropy is None:
        return logprob, None
    if entropy == "value":
        logp = logp.detach()
    return logprob, -(logp.exp() * logp).sum(-1)


def plain_linear(
    hidden: Tensor, weight: Tensor, index: Tensor | None, target: Tensor, entropy: EntropyMode
) -> tuple[Tensor, Tensor | None]:
    """The head as models write it, on the scored rows, and then :func:`plain`."""
    return plain((hidden if index is None else hidden[index]) @ weight.T, None, target, entropy)


def _plain_torch(step: LossStep) -> Estimate:
    """Logits of all tokens, their float32 log_softmax, and entropy from it."""
    dtype, size = getattr(torch, step.dtype), step.model.hidden
    hidden = torch.empty(step.local_tokens, size, dtype=dtype, device="meta", requires_grad=True)
    weight = torch.empty(step.columns, size, dtype=dtype, device="meta", requires_grad=not step.frozen_head)
    target = torch.empty(step.local_tokens, dtype=torch.int64, device="meta")
    return estimate(plain_linear, hidden, weight, None, target, step.entropy, device=step.device)


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
    return Estimate(call="slime", backend=None, plan=None, forward=forward, backward=backward)


def _from_logits(step: LossStep, overwrite: bool) -> Estimate:
    """The head's logits of all tokens, ``logprobs`` on the response rows, then the head's backward."""
    call = step.predict(logprobs, hidden=False, entropy=step.entropy, linear={"overwrite": overwrite})
    logits = step.item("logits", step.local_tokens, step.columns)
    given = tuple(item for item in call.backward if item.output)
    backward = _fullest((logits, *call.backward), (logits, *given, *step.gradients()))
    return replace(call, forward=(logits, *call.forward), backward=backward)


def _of_loss(step: LossStep) -> Estimate:
    """A token-level objective, evaluated chunk by chunk; every row has a gradient."""
    objective = Objective(entropy_coef=1.0 if step.entropy == "grad" else 0.0)
    fields = {"old_logprob": "current", "advantage": torch.empty(step.rows, device="meta")}
    return step.predict(policy_loss, objective, hidden=True, memory=step.memory, **fields)


def _over_support(step: LossStep) -> Estimate:
    """Log-probs over the ids that the sampler kept, and nothing else."""
    ids = torch.empty(round((step.kept_ids or 0) * step.rows), dtype=torch.int64, device="meta")
    kept = Kept(ids, torch.empty(step.rows, dtype=torch.int64, device="meta"), scope="support")
    return step.predict(logprobs, hidden=True, entropy=step.entropy, memory=step.memory, kept=kept)


def _fullest(*moments: tuple[Item, ...]) -> tuple[Item, ...]:
    return max(moments, key=_bytes)


def _bytes(items: Iterable[Item]) -> int:
    return sum(item.bytes for item in items)


FROM_HIDDEN = Way(
    "logprobs of Logits", True, lambda x: x.predict(logprobs, hidden=True, entropy=x.entropy, memory=x.memory)
)
POLICY_LOSS = Way("policy_loss of Logits", True, _of_loss)
WAYS = (
    Way("plain torch", False, _plain_torch),
    Way("slime-style", False, _slime),
    Way("logprobs", True, lambda step: _from_logits(step, False)),
    Way("logprobs, overwrite", True, lambda step: _from_logits(step, True)),
    FROM_HIDDEN,
    POLICY_LOSS,
)

OVER_SUPPORT = Way('logprobs of Logits, scope="support"', True, _over_support)
"""The way of steps with ``kept_ids``: the sampler kept some ids of each token."""
