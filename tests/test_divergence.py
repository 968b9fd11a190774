"""Divergences of a student and its teacher against float64, whatever the backend, the layout and the teacher."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from torch import Tensor

import logitless as ll
from logitless import Teacher, linear_divergence

# NumPy, which runs the kernels in Triton's interpreter, reports what a selection then leaves out.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")

KINDS: dict[str, dict[str, Any]] = {
    "forward_kl": {},
    "reverse_kl": {},
    "jsd": {"beta": 0.3},
    "tv": {},
    "hellinger": {},
    "alpha": {"alpha": 0.7},
}
BACKENDS = ("reference", "tiled", "triton")


def textbook(z: Tensor, y: Tensor, kind: str, beta: float = 0.5, alpha: float = 0.5) -> Tensor:
    """Each divergence as papers define it, of ``[R, V]`` logits of student and teacher."""
    log_p, log_q = z.log_softmax(-1), y.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward_kl":
        terms = torch.where(q > 0, q * (log_q - log_p), 0.0)
    elif kind == "reverse_kl":
        terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
    elif kind == "jsd":
        m = (beta * q + (1 - beta) * p).clamp_min(1e-300).log()
        terms = beta * torch.where(q > 0, q * (log_q - m), 0.0) + (1 - beta) * p * (log_p - m)
    elif kind == "tv":
        terms = 0.5 * (p - q).abs()
    elif kind == "hellinger":
        return 1 - (p * q).sqrt().sum(-1)
    else:
        return (1 - (p**alpha * q ** (1 - alpha)).sum(-1)) / (alpha * (1 - alpha))
    return terms.sum(-1)


class Batch(NamedTuple):
    """Operands in the dtype of a test; hidden sizes of student and teacher differ."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    target: Tensor

    @staticmethod
    def draw(device, rows=11, vocab=83, dtype=torch.float32, near: float | None = None) -> Batch:
        """``near``: a teacher of the student's own size, that far from it."""
        hidden, weight, bias = torch.randn(rows, 16), torch.randn(vocab, 16), torch.randn(vocab)
        other, other_weight = torch.randn(rows, 24), torch.randn(vocab, 24)
        if near is not None:
            other, other_weight = hidden.clone(), weight + near * torch.randn(vocab, 16)
        target = torch.randint(vocab, (rows,))
        target[3] = -100
        floats = (x.to(device, dtype) for x in (hidden, weight, bias, other, other_weight))
        return Batch(*floats, target.to(device))

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        return [x.detach().to(dtype).requires_grad_() for x in (self.hidden, self.weight, self.bias)]


class Outcome(NamedTuple):
    values: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]


def right(batch: Batch, kind: str, dtype: torch.dtype, head=None, teacher_head=None, **numbers) -> Outcome:
    """Plain torch in ``dtype``: divergence, log-prob, entropy, teacher's log-prob and entropy, and gradients."""
    hidden, weight, bias = batch.leaves(dtype)
    z = shaped(hidden @ weight.T + bias, head)
    y = shaped(batch.teacher_hidden.to(dtype) @ batch.teacher_weight.to(dtype).T, teacher_head)
    y = torch.nn.functional.pad(y, (0, z.shape[1] - y.shape[1]), value=-torch.inf)
    counted, at = batch.target != -100, batch.target.clamp_min(0)[:, None]
    log_p, log_q = z.log_softmax(-1), y.log_softmax(-1)
    q_log_q = torch.where(log_q > -torch.inf, log_q.exp() * log_q, 0.0)
    values = [
        textbook(z, y, kind, **numbers),
        log_p.gather(1, at)[:, 0],
        -(log_p.exp() * log_p).sum(-1),
        log_q.gather(1, at)[:, 0],
        -q_log_q.sum(-1),
    ]
    values = [torch.where(counted, x, 0.0) for x in values]
    (values[0].sum() + 0.3 * values[1].sum() - 0.2 * values[2].sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    return Outcome(tuple(x.detach() for x in values), (hidden.grad, weight.grad, bias.grad))


def shaped(x: Tensor, head: Any) -> Tensor:
    if head is None:
        return x
    x = x * head.scale
    if head.softcap is not None:
        x = head.softcap * torch.tanh(x / head.softcap)
    return x / head.temperature


def ours(batch: Batch, teacher: Any, kind: str, **options) -> Outcome:
    hidden, weight, bias = batch.leaves(batch.hidden.dtype)
    out = linear_divergence(hidden, weight, teacher, batch.target, kind=kind, bias=bias, **options)
    (out.divergence.sum() + 0.3 * out.logprob.sum() - 0.2 * out.entropy.sum()).backward()
    values = (out.divergence, out.logprob, out.entropy, out.teacher_logprob, out.teacher_entropy)
    assert hidden.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    return Outcome(tuple(x.detach() for x in values), (hidden.grad, weight.grad, bias.grad))


NAMES = ("divergence", "logprob", "entropy", "teacher_logprob", "teacher_entropy")


def assert_right(found: Outcome, exact: Outcome, plain: Outcome) -> None:
    for name, *x in zip(NAMES, found.values, exact.values, plain.values, strict=True):
        assert_close_to_truth(*x, name=name)
    for name, *x in zip(("hidden", "weight", "bias"), found.gradients, exact.gradients, plain.gradients, strict=True):
        assert_gradient_close_to_truth(*x, name=f"d_{name}")


def check(batch: Batch, kind: str, options: dict, head=None, teacher_head=None, **numbers) -> None:
    """Values and gradients as close to float64 as plain torch's in the operands' dtype."""
    exact, plain = (
        right(batch, kind, dtype, head, teacher_head, **numbers) for dtype in (torch.float64, batch.hidden.dtype)
    )
    teacher = Teacher(batch.teacher_hidden, batch.teacher_weight, head=teacher_head)
    assert_right(ours(batch, teacher, kind, head=head, **numbers, **options), exact, plain)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, backend: str, device: torch.device):
    """In several chunks, whose last is shorter, and several tiles of backward."""
    check(Batch.draw(device), kind, {"backend": backend, "memory": 6000}, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_float64(kind: str, device: torch.device):
    batch = Batch.draw(device, rows=5, vocab=13, dtype=torch.float64)
    exact = right(batch, kind, torch.float64, **KINDS[kind])
    teacher = Teacher(batch.teacher_hidden, batch.teacher_weight)
    assert_right(ours(batch, teacher, kind, **KINDS[kind]), exact, exact)


# As a loss.


def loss_of(batch: Batch, teacher: Any, objective: ll.Objective, dtype: torch.dtype, **options) -> Outcome:
    hidden, weight, bias = batch.leaves(dtype)
    loss, metrics, stats = ll.linear_policy_loss(
        hidden, weight, batch.target, objective, bias=bias, teacher=teacher, return_stats=True, **options
    )
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    assert "divergence_loss" in metrics.compute()
    values = (loss.detach(), stats.divergence, stats.logprob, stats.teacher_entropy)
    return Outcome(values, (hidden.grad, weight.grad, bias.grad))


def loss_truth(batch: Batch, kind: str, dtype: torch.dtype, advantage: Tensor, **numbers) -> Outcome:
    """REINFORCE with an entropy bonus and a divergence, in plain torch."""
    hidden, weight, bias = batch.leaves(dtype)
    z = hidden @ weight.T + bias
    y = batch.teacher_hidden.to(dtype) @ batch.teacher_weight.to(dtype).T
    counted, at = batch.target != -100, batch.target.clamp_min(0)[:, None]
    log_p, log_q = z.log_softmax(-1), y.log_softmax(-1)
    apart, logprob = textbook(z, y, kind, **numbers), log_p.gather(1, at)[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    rows = -advantage.to(dtype) * logprob - 0.1 * entropy + 0.7 * apart
    loss = torch.where(counted, rows, 0.0).sum() / counted.sum()
    loss.backward()
    values = [torch.where(counted, x, 0.0).detach() for x in (apart, logprob, -(log_q.exp() * log_q).sum(-1))]
    assert hidden.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    return Outcome((loss.detach(), *values), (hidden.grad, weight.grad, bias.grad))


def assert_loss_right(found: Outcome, exact: Outcome, plain: Outcome) -> None:
    for i, x in enumerate(zip(found.values, exact.values, plain.values, strict=True)):
        assert_close_to_truth(*(torch.atleast_1d(y) for y in x), name=f"value {i}")
    for name, *x in zip(("hidden", "weight", "bias"), found.gradients, exact.gradients, plain.gradients, strict=True):
        assert_gradient_close_to_truth(*x, name=f"d_{name}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
@pytest.mark.parametrize("route", ["one pass", "two passes"])
def test_as_a_term_of_an_objective(route: str, kind: str, backend: str, device: torch.device, monkeypatch):
    batch, advantage = Batch.draw(device), torch.randn(11, device=device)
    advantage[5] = 0.0
    what = ll.Divergence(kind, **KINDS[kind])  # pyright: ignore[reportArgumentType]
    objective = ll.Objective(policy="reinforce", entropy_coef=0.1, divergence=what, divergence_coef=0.7)
    teacher = Teacher(batch.teacher_hidden, batch.teacher_weight)
    options: dict[str, Any] = {"backend": backend, "memory": 6000}
    if route == "two passes":
        monkeypatch.setattr("logitless.policy_loss.plan._obstacle", lambda *_: "the test says so")
    plan = ll.explain(*batch[:2], batch.target, objective=objective, teacher=teacher, bias=batch.bias, **options)
    hidden = batch.hidden.clone().requires_grad_()
    plan = ll.explain(hidden, batch.weight, batch.target, objective=objective, teacher=teacher, **options)
    assert plan.kind == route
    assert ("4 matrix" in str(plan)) == (route == "one pass")
    found = loss_of(batch, teacher, objective, torch.float32, advantage=advantage, **options)
    exact, plain = (
        loss_truth(batch, kind, dtype, advantage, **KINDS[kind]) for dtype in (torch.float64, torch.float32)
    )
    assert_loss_right(found, exact, plain)
