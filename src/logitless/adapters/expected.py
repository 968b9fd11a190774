"""Gradients that are made with the log-probs, for a loss that the host computes afterwards.

    forward     the loss that is expected, in one pass: log-probs, and gradients of hidden states and head
    the host    its own loss and metrics, on the log-probs
    backward    the gradient that arrives is a multiple of the expected one: the gradients times that factor
                it is another: the logits once more, as without an expectation

Three matrix products where log-probs that come first take four, and none for rows whose gradient is zero. Whatever the
host's loss is, its gradients are right: an expectation that fails costs time, and ``status`` counts it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from logitless.loss import policy_loss
from logitless.objectives import Objective
from logitless.operands import Logits
from logitless.rows import Rows
from logitless.score import logprobs
from logitless.spec import Head, TokenStats

TOLERANCE = 1e-5
"""By how much the arriving gradient may differ from a multiple of the expected one, of its norm: the roundings of two
ways to add up the same loss in float32."""


@dataclass(frozen=True, eq=False)
class Expected:
    """A loss, up to a factor.

    Attributes:
        objective: of rows one by one.
        fields: ``[R]`` what it reads.
    """

    objective: Objective
    fields: Mapping[str, Tensor | str]


@dataclass(eq=False)
class Expectations:
    """How often the loss was the expected one."""

    met: int = 0
    missed: int = 0
    _lock: Any = field(default_factory=threading.Lock)

    def count(self, met: bool) -> None:
        with self._lock:
            self.met, self.missed = self.met + met, self.missed + (not met)

    def lines(self) -> list[str]:
        """What ``status`` prints; nothing where nothing was expected."""
        number = self.met + self.missed
        return [f"losses in the pass of their log-probs: {self.met} of {number}"] if number else []


def score_expecting(
    logits: Logits, target: Tensor, expected: Expected, counts: Expectations, *, head: Head, memory: int | str
) -> TokenStats:
    """Log-probs and entropies of every row, whose backward expects that loss. The entropy's gradient is not expected.

    Args:
        logits: of a plain weight.
        counts: where it is counted whether the expectation was met.
    """
    run = _Run(logits, Rows.every(target), target, expected, counts, head, memory)
    stands = logits.stands()
    assert isinstance(stands.weight, Tensor)
    logprob, entropy = _Expecting.apply(stands.hidden, stands.weight, stands.linear.bias, run)  # pyright: ignore[reportGeneralTypeIssues]
    return TokenStats(logprob=logprob, entropy=entropy)


@dataclass(frozen=True, eq=False)
class _Run:
    logits: Logits
    rows: Rows
    target: Tensor
    expected: Expected
    counts: Expectations
    head: Head
    memory: int | str

    def of(self, leaves: tuple[Tensor, Tensor, Tensor | None]) -> Logits:
        """The logits of leaves of their own."""
        hidden, weight, bias = leaves
        linear = {name: getattr(self.logits.linear, name) for name in ("match", "tf32", "precision")}
        return Logits(hidden, weight, bias=bias, **linear)


class _Expecting(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, run: _Run
    ) -> tuple[Tensor, Tensor | None]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        leaves, needed = _leaves((hidden, weight, bias), ctx.needs_input_grad)
        objective, fields = run.expected.objective, cast("dict[str, Any]", dict(run.expected.fields))
        with torch.enable_grad():
            loss, _, found = policy_loss(
                run.of(leaves),
                run.rows,
                objective,
                head=run.head,
                memory=run.memory,
                denominator=1.0,
                return_stats=True,
                **fields,
            )
            gradients = torch.autograd.grad(loss, needed)
            logprob = found.logprob.detach().requires_grad_()
            loss, _ = objective(found._replace(logprob=logprob), run.rows, denominator=1.0, **fields)
            (upstream,) = torch.autograd.grad(loss, logprob)
        # The target too: what changes in place before backward is then an error.
        ctx.save_for_backward(hidden, weight, bias, run.target, upstream, *gradients)
        return found.logprob.detach(), None if found.entropy is None else found.entropy.detach()

    @staticmethod
    def backward(ctx: Any, g_logprob: Tensor | None, g_entropy: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, _, upstream, *gradients = ctx.saved_tensors
        run: _Run = ctx.run
        if g_logprob is None and g_entropy is None:
            return None, None, None, None
        factor = None if g_entropy is not None or g_logprob is None else _factor(g_logprob, upstream)
        run.counts.count(factor is not None)
        if factor is None:
            gradients = _again(ctx, (hidden, weight, bias), g_logprob, g_entropy)
        else:
            gradients = [x * factor.to(x.dtype) for x in gradients]
        found = iter(gradients)
        return *(next(found) if need else None for need in ctx.needs_input_grad[:3]), None


def _leaves(
    tensors: tuple[Tensor, Tensor, Tensor | None], needs: Any
) -> tuple[tuple[Tensor, Tensor, Tensor | None], list[Tensor]]:
    """Tensors with a graph of their own, and those of them that need a gradient."""
    made = [None if x is None else x.detach().requires_grad_(need) for x, need in zip(tensors, needs[:3], strict=True)]
    hidden, weight, bias = made
    assert hidden is not None
    assert weight is not None
    return (hidden, weight, bias), [x for x in made if x is not None and x.requires_grad]


def _factor(arrived: Tensor, expected: Tensor) -> Tensor | None:
    """The number that the arriving gradient is the expected one times; None where there is none. Asks the device."""
    wide, other = arrived.double(), expected.double()
    square = (other * other).sum()
    factor = torch.where(square > 0, (wide * other).sum() / square, 0.0)
    off = (wide - factor * other).norm()
    # A NaN is no multiple of anything.
    return factor if bool(off <= TOLERANCE * wide.norm()) else None


def _again(ctx: Any, tensors: Any, g_logprob: Tensor | None, g_entropy: Tensor | None) -> list[Tensor]:
    run: _Run = ctx.run
    leaves, needed = _leaves(tensors, ctx.needs_input_grad)
    with torch.enable_grad():
        out = logprobs(
            run.of(leaves), run.target, entropy=None if g_entropy is None else "grad", head=run.head, memory=run.memory
        )
        pairs = [(x, g) for x, g in ((out.logprob, g_logprob), (out.entropy, g_entropy)) if g is not None]
        outputs, upstream = zip(*pairs, strict=True)
        return list(torch.autograd.grad(outputs, needed, upstream))
