"""Shared by the tests of policy loss and those that build on them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from calls import from_hidden, loss_from_hidden
from close import assert_close_to_truth, assert_gradient_close_to_truth
from objective_truth import Batch, Formula, tell
from objective_truth import draw as draw_batch
from torch import Tensor
from truth import plain, truth

import logitless as ll
from shared.linear import GRADIENT_PROMISE, HALF, Operands, draw
from shared.objective_terms import PARTS

NAMES = ("hidden", "weight", "bias")


LENGTHS = [7, 0, 13, 1, 5, 3]


VOCAB, WIDTH = 101, 17


KL = {"kl": "k3", "kl_coef": 0.1}


PPO = {"clip": (0.2, 0.28), **KL, "entropy_coef": 0.05}


PPO_FORMULA = Formula(options={"low": 0.2, "high": 0.28}, **KL, entropy_coef=0.05)


@dataclass(frozen=True)
class Problem:
    """A head, a batch with its fields, and where each response token's row is among the tokens."""

    operands: Operands
    batch: Batch
    index: list[int]
    target: list[int]
    head: dict[str, Any] = field(default_factory=dict)
    rounding: Tensor | None = None

    def fields(self, rows: ll.Rows) -> dict[str, Tensor]:
        return self.batch.fields(rows, torch.float64, tuple(PARTS))

    def head_of(self, rows: ll.Rows) -> ll.Head:
        temperature = self.head.get("temperature", 1.0)
        return ll.Head(
            **self.head | {"temperature": temperature[rows.response]} if torch.is_tensor(temperature) else self.head
        )

    def scores(self, oracle, leaf: Operands) -> Any:
        logits = leaf.logits()
        logits = logits if self.rounding is None else logits + self.rounding.to(logits)
        return oracle(logits, self.index, self.target, **self.head)


def make(
    dtype=torch.float32, lengths=LENGTHS, vocab=VOCAB, width=WIDTH, head=None, spread=3.0, operands=None, match=None
) -> Problem:
    """Random operands and a batch whose old, reference and rollout log-probs are near those of the operands."""
    head = head or {}
    batch = draw_batch(lengths)
    tokens = [torch.randint(head.get("vocab_size", vocab), (len(ids),)).tolist() for ids in batch.tokens]
    operands = operands or draw(sum(map(len, tokens)), vocab, width, dtype, spread)
    index, target, start = [], [], 0
    for ids, n in zip(tokens, lengths, strict=True):
        index += range(start + len(ids) - n - 1, start + len(ids) - 1)
        target += ids[len(ids) - n :]
        start += len(ids)
    rounding = None
    if match is not None:
        exact = operands.logits()
        rounding = (exact.to(match).double() - exact.double()).detach()
    problem = Problem(operands, replace(batch, tokens=tokens), index, target, head, rounding)
    near = problem.scores(truth, operands.leaves((), torch.float64)).logprob
    # All numbers are float32 numbers, so that both dtypes start from the same ones.
    drawn = {n: (near + 0.3 * torch.randn(len(near))).float().double() for n in PARTS if n != "advantage"}
    values = {n: list(x.split(lengths)) for n, x in drawn.items()}
    return replace(problem, batch=replace(problem.batch, values={**problem.batch.values, **values}))


class Ran(NamedTuple):
    """Loss, its gradients by name, and metrics as numbers."""

    loss: Tensor
    gradients: dict[str, Tensor]
    metrics: dict[str, float]


def differentiated(loss: Tensor, leaf: Operands, upstream: float) -> dict[str, Tensor]:
    named = {name: x for name, x in leaf._asdict().items() if x is not None and x.requires_grad}
    gradients = torch.autograd.grad(loss, list(named.values()), torch.tensor(upstream, dtype=torch.float64).to(loss))
    return dict(zip(named, gradients, strict=True))


def ran(problem: Problem, objective: ll.Objective, rows=None, wanted=NAMES, upstream=1.7, given=None, **call) -> Ran:
    rows = problem.batch.rows() if rows is None else rows
    leaf = problem.operands.leaves(wanted)
    given = problem.fields(rows) | (given or {})
    call = {"bias": leaf.bias, "head": problem.head_of(rows), **call}
    loss, metrics = loss_from_hidden(leaf.hidden, leaf.weight, rows, objective, **given, **call)
    return Ran(loss.detach(), differentiated(loss, leaf, upstream), metrics.compute())


def composed(
    problem: Problem, objective: ll.Objective, rows=None, wanted=NAMES, upstream=1.7, given=None, **call
) -> Ran:
    """The same in two calls of the library."""
    rows = problem.batch.rows() if rows is None else rows
    leaf = problem.operands.leaves(wanted)
    of_objective = {k: call.pop(k) for k in ("denominator", "prompt_tokens", "group") if k in call}
    call = {"bias": leaf.bias, "head": problem.head_of(rows), "entropy": objective.entropy, **call}
    stats = from_hidden(leaf.hidden, leaf.weight, rows, **call)
    loss, metrics = objective(stats, rows, **problem.fields(rows) | (given or {}), **of_objective)
    return Ran(loss.detach(), differentiated(loss, leaf, upstream), metrics.compute())


def told(problem: Problem, formula: Formula, wanted=NAMES, upstream=1.7, on_policy=False, exact=True) -> Ran:
    """The truth, or plain torch's version of it."""
    dtype = torch.float64 if exact or problem.operands.hidden.dtype == torch.float64 else torch.float32
    leaf = problem.operands.leaves(wanted, torch.float64 if exact else None)
    scores = problem.scores(truth if exact else plain, leaf)
    values = {
        name: list(getattr(scores, name).detach().split(problem.batch.lengths)) for name in ("logprob", "entropy")
    }
    batch = replace(problem.batch, values={**problem.batch.values, **values})
    answer = tell(batch, formula, dtype, on_policy=on_policy)
    named = {name: x for name, x in leaf._asdict().items() if x is not None and x.requires_grad}
    chain = [upstream * answer.logprob, upstream * answer.entropy]
    gradients = torch.autograd.grad([scores.logprob, scores.entropy], list(named.values()), chain)
    return Ran(answer.loss, dict(zip(named, gradients, strict=True)), {})


def assert_right(problem: Problem, ours: Ran, formula: Formula, **options) -> None:
    exact, usual = told(problem, formula, **options), told(problem, formula, exact=False, **options)
    assert_close_to_truth(ours.loss, exact.loss, usual.loss, "loss")
    assert ours.gradients.keys() == exact.gradients.keys()
    for name, mine in ours.gradients.items():
        assert mine.dtype == getattr(problem.operands, name).dtype
        right, theirs = exact.gradients[name], usual.gradients[name]
        off = (mine.double() - right).norm() / right.norm().clamp_min(1e-30)
        assert_gradient_close_to_truth(mine, right, theirs, f"gradient of {name}")
        # In the bias' gradient the rows' 16-bit terms are added up, and may cancel.
        assert name == "bias" or mine.dtype not in HALF or off <= GRADIENT_PROMISE, f"gradient of {name}: {off:.3g}"


def check(problem: Problem, options: dict, formula: Formula, wanted=NAMES, on_policy=False, **call) -> Ran:
    """One call by the tolerance rule, and against the two calls that it stands for."""
    objective = ll.Objective(**options)
    given = {"old_logprob": "current"} if on_policy else {}
    upstream = float(torch.randn(())) or 1.0
    ours = ran(problem, objective, wanted=wanted, upstream=upstream, given=given, **call)
    assert_right(problem, ours, formula, wanted=wanted, upstream=upstream, on_policy=on_policy)
    # Metrics do not depend on the tiles that they come from, and two calls in the tiles of one have many more.
    for name in ("drop_zeros", "memory", "backend"):
        call.pop(name, None)
    assert_metrics(ours, composed(problem, objective, wanted=wanted, upstream=upstream, given=given, **call))
    return ours


def assert_metrics(ours: Ran, other: Ran, off: float = 1e-5) -> None:
    assert list(ours.metrics) == list(other.metrics)
    assert ours.metrics == pytest.approx(other.metrics, rel=off, abs=off, nan_ok=True)


def assert_same(ours: Ran, other: Ran, off: float = 1e-6) -> None:
    torch.testing.assert_close(ours.loss, other.loss, rtol=off, atol=off)
    assert ours.gradients.keys() == other.gradients.keys()
    for name, mine in ours.gradients.items():
        right = other.gradients[name].double()
        assert (mine.double() - right).norm() <= off * right.norm(), name
    assert_metrics(ours, other, 10 * off)


def room(num_rows: int, vocab: int = VOCAB, itemsize: int = 4) -> int:
    """A budget for chunks of so many rows on a CPU, where the other half is for elementwise work."""
    return 2 * num_rows * vocab * itemsize
