"""``Pending``: numbers of the rows of one part of the logits, which are read together with those of the other parts.

    torch.stack([torch.logsumexp(x, -1) for x in logits])            one reading of all rows
    torch.cat([entropy_of(x) for x in logits.split(128)])            one reading of all rows

Code that saves memory loops over rows or chunks of logits. From hidden states every part would be a pass over the whole
weight, and a gradient of its size. So a part's numbers wait until they are put together with those of its neighbours;
any other use reads the part alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from logitless.deferred.lazy import Waiting
from logitless.deferred.read import ask, checked_ids, result_dtype
from logitless.operands import Logits
from logitless.operands.applied import applied
from logitless.operands.logits import RULES, like
from logitless.operands.passed_on import same


@dataclass(frozen=True, eq=False)
class Question:
    """What is asked of a part: a name and ids, as :func:`ask` takes them, and what is done with the answer."""

    name: str
    ids: Tensor | None
    steps: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def of(self, x: Logits) -> Tensor:
        found = ask(x, self.name, self.ids)
        for name, args in self.steps:
            found = getattr(torch, name)(found, *args)
        return found


class Pending(Waiting):
    """The answer to a question about a part of the logits."""

    question: Question

    def answer(self, name: str, args: Any, kwargs: Any) -> Any:
        if name in ("stack", "cat", "concat", "concatenate"):
            return applied(partial(_together, name), args, kwargs)
        step = _step(name, args[1:], kwargs) if args and args[0] is self else None
        if step is None or self.value is not None:
            return NotImplemented
        name, more = step
        shape = torch.empty(self.shape, device="meta")
        shape = getattr(torch, name)(shape, *more).shape
        # A number has no dimension to squeeze; several of them, put together, would.
        steps = self.question.steps if name == "squeeze" and not self.dim() else (*self.question.steps, (name, more))
        question = Question(self.question.name, self.question.ids, steps)
        new = waiting(self.source, question, shape, self.dtype, lambda: getattr(torch, name)(self.computed(), *more))
        return self.waits_with(new)


def waiting(
    x: Logits, question: Question, shape: Any, dtype: torch.dtype, read: Callable[[], Tensor] | None = None
) -> Pending:
    """The answer to come.

    Args:
        read: gives it of an answer that it is made of; None to ask the logits.
    """
    source: Logits = same(x)

    def compute(logits: Tensor) -> Tensor:
        found = of_computed(logits, question.name, question.ids)
        for name, args in question.steps:
            found = getattr(torch, name)(found, *args)
        return found

    more = {"question": question, "read": read or (lambda: question.of(source)), "value": None, "steps": []}
    return Pending.made(source, compute, shape, dtype, **more)


def numbers(x: Logits, name: str, ids: Tensor | None = None) -> Tensor:
    """The answer to :func:`~logitless.deferred.read.ask`; one to come where the logits are a part of others."""
    if not x._stands.part:
        return ask(x, name, ids)
    if ids is None:
        return waiting(x, Question(name, None), x.shape[:-1], result_dtype(x))
    # A copy: code that loops over parts may write the next ids into the same memory.
    ids = checked_ids(ids, x.shape[-1]).clone()
    return waiting(x, Question(name, ids), (*x.shape[:-1], ids.shape[-1]), result_dtype(x))


def of_computed(x: Tensor, name: str, ids: Tensor | None) -> Tensor:
    """The same numbers, of logits that exist."""
    if name == "log_z":
        return x.logsumexp(-1)
    if name == "mean_logit":
        return x.mean(-1)
    logp = x.log_softmax(-1)
    if ids is None:
        return -(logp.exp() * logp).sum(-1)
    return {"logit": x, "logprob": logp, "probability": logp.exp()}[name].gather(-1, ids)


def _step(name: str, args: Any, kwargs: Any) -> tuple[str, tuple[Any, ...]] | None:
    """What may be done with all answers at once: nothing that counts dimensions from the front."""
    dim = (*args, *kwargs.values())
    if name in ("neg", "__neg__", "negative") and not dim:
        return "neg", ()
    if name in ("squeeze", "unsqueeze") and dim == (-1,):
        return name, (-1,)
    return None


def _together(name: str, parts: Any, dim: int = 0, **kwargs: Any) -> Any:
    """One reading for all parts, where they are parts of one head's logits and were asked the same."""
    first = parts[0]
    if dim != 0 or kwargs or not all(isinstance(x, Pending) and x.value is None for x in parts):
        return NotImplemented
    same = all(x.question.name == first.question.name and x.question.steps == first.question.steps for x in parts)
    if not same or (name != "stack" and not first.source.dim() > 1) or (name != "stack" and not first.dim()):
        return NotImplemented
    kind = "stack" if name == "stack" else "cat"
    logits = RULES[kind]([x.source for x in parts])
    if logits is NotImplemented:
        return NotImplemented
    ids = None if first.question.ids is None else getattr(torch, kind)([x.question.ids for x in parts])
    return Question(first.question.name, ids, first.question.steps).of(like(logits, part=False))
