"""Shared by the tests of divergence and those that build on them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from calls import from_hidden
from close import assert_close_to_truth, assert_gradient_close_to_truth
from torch import Tensor

from logitless.backends.divergences import Divergence

KINDS: dict[str, dict[str, Any]] = {
    "forward_kl": {},
    "reverse_kl": {},
    "jsd": {"beta": 0.3},
    "tv": {},
    "hellinger": {},
    "alpha": {"alpha": 0.7},
    "acceptance": {},
    "log_acceptance": {},
    "lk_hybrid": {"eta": 2.0},
}


def textbook(
    z: Tensor, y: Tensor, kind: str, beta: float = 0.5, alpha: float = 0.5, eta: float = 3.0, full: Tensor | None = None
) -> Tensor:
    """Each divergence as papers define it, of ``[R, V]`` logits of student and teacher.

    ``full``: ``[R]`` log Z of a teacher that has more ids than these, for what is accepted.
    """
    log_p, log_q = z.log_softmax(-1), y.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    accepted = torch.minimum(p, q if full is None else (y - full[:, None]).exp()).sum(-1)
    if kind == "acceptance":
        return accepted
    if kind == "log_acceptance":
        return -accepted.log()
    if kind == "lk_hybrid":
        share = torch.exp(-eta * accepted.detach())
        return share * textbook(z, y, "forward_kl") + (1 - share) * (1 - accepted)
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
        return 1 - torch.where(q > 0, ((log_p + log_q.clamp_min(-1e4)) / 2).exp(), 0.0).sum(-1)
    else:
        return (1 - (p**alpha * q ** (1 - alpha)).sum(-1)) / (alpha * (1 - alpha))
    return terms.sum(-1)


BACKENDS = ("reference", "tiled", "triton")


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


def ours(
    batch: Batch, teacher: Any, kind: Any, beta: float = 0.5, alpha: float = 0.5, eta: float = 3.0, **options
) -> Outcome:
    hidden, weight, bias = batch.leaves(batch.hidden.dtype)
    what = Divergence(kind, beta=beta, alpha=alpha, eta=eta)
    given: dict[str, Any] = {"teacher": teacher, "divergence": what, "bias": bias}
    out = from_hidden(hidden, weight, batch.target, entropy="grad", **given, **options)
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
