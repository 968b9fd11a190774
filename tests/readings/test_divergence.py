"""Divergences of a student and its teacher against float64, whatever the backend, the layout and the teacher."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from calls import from_hidden, logits_of, loss_from_hidden
from close import assert_close_to_truth, assert_gradient_close_to_truth
from shared.divergence import KINDS, textbook
from torch import Tensor

import logitless as ll
from logitless import Teacher
from logitless.backends.divergences import Divergence
from logitless.machine import CPU

# NumPy, which runs the kernels in Triton's interpreter, reports what a selection then leaves out.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")

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


def ours(batch: Batch, teacher: Any, kind: Any, beta: float = 0.5, alpha: float = 0.5, **options) -> Outcome:
    hidden, weight, bias = batch.leaves(batch.hidden.dtype)
    given: dict[str, Any] = {"teacher": teacher, "divergence": Divergence(kind, beta=beta, alpha=alpha), "bias": bias}
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


def check(batch: Batch, kind: str, options: dict, head=None, teacher_head=None, **numbers) -> None:
    """Values and gradients as close to float64 as plain torch's in the operands' dtype."""
    exact, plain = (
        right(batch, kind, dtype, head, teacher_head, **numbers) for dtype in (torch.float64, batch.hidden.dtype)
    )
    teacher = Teacher(ll.Logits(batch.teacher_hidden, batch.teacher_weight), head=teacher_head)
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
    teacher = Teacher(ll.Logits(batch.teacher_hidden, batch.teacher_weight))
    assert_right(ours(batch, teacher, kind, **KINDS[kind]), exact, exact)


# As a loss.


def loss_of(batch: Batch, teacher: Any, objective: ll.Objective, dtype: torch.dtype, **options) -> Outcome:
    hidden, weight, bias = batch.leaves(dtype)
    loss, metrics, stats = loss_from_hidden(
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
    what = Divergence(kind, **KINDS[kind])  # pyright: ignore[reportArgumentType]
    objective = ll.Objective(policy="reinforce", entropy_coef=0.1, divergence=what, divergence_coef=0.7)
    teacher = Teacher(ll.Logits(batch.teacher_hidden, batch.teacher_weight))
    options: dict[str, Any] = {"backend": backend, "memory": 6000}
    if route == "two passes":
        monkeypatch.setattr("logitless.route.loss._obstacle", lambda *_: "the test says so")
    plan = ll.explain(
        ll.policy_loss, ll.Logits(*batch[:2], bias=batch.bias), batch.target, objective, teacher=teacher, **options
    )
    hidden = batch.hidden.clone().requires_grad_()
    plan = ll.explain(
        ll.policy_loss, ll.Logits(hidden, batch.weight), batch.target, objective, teacher=teacher, **options
    )
    assert plan.kind == route
    assert ("4 matrix" in str(plan)) == (route == "one pass")
    found = loss_of(batch, teacher, objective, torch.float32, advantage=advantage, **options)
    exact, plain = (
        loss_truth(batch, kind, dtype, advantage, **KINDS[kind]) for dtype in (torch.float64, torch.float32)
    )
    assert_loss_right(found, exact, plain)


# Heads, vocabularies and teachers.


@pytest.mark.parametrize("backend", ["tiled", "triton"])
def test_heads_of_their_own(backend: str, device: torch.device):
    """Temperature by row, scale and softcap of either; the student's bias."""
    batch = Batch.draw(device)
    heat = torch.rand(11, 1, device=device) + 0.5
    head, other = ll.Head(scale=0.7, softcap=9.0), ll.Head(temperature=heat[:, 0], scale=1.3)
    truths = []
    for dtype in (torch.float64, torch.float32):
        cooled = batch._replace(teacher_hidden=batch.teacher_hidden.to(dtype) / heat.to(dtype))
        truths.append(right(cooled, "jsd", dtype, head, ll.Head(scale=1.3), **KINDS["jsd"]))
    teacher = Teacher(ll.Logits(batch.teacher_hidden, batch.teacher_weight), head=other)
    assert_right(ours(batch, teacher, "jsd", head=head, backend=backend, memory=6000, **KINDS["jsd"]), *truths)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reverse_kl"])
def test_a_smaller_vocabulary(kind: str, backend: str, device: torch.device):
    """The teacher lacks the last ids, one of which is a target."""
    batch = Batch.draw(device)
    batch.target[4] = 82
    batch = batch._replace(teacher_weight=batch.teacher_weight[:71])
    check(batch, kind, {"backend": backend, "memory": 6000}, **KINDS[kind])


def test_another_vocabulary(device: torch.device):
    """Columns of the teacher in another order, some of which the student does not have, nor the teacher some of its."""
    batch = Batch.draw(device)
    ids = torch.randperm(83, device=device)[:60]
    ids[7] = ids[31] = -1
    sparse = torch.full((11, 83), -torch.inf, dtype=torch.float64, device=device)
    logits = batch.teacher_hidden.double() @ batch.teacher_weight[:60].double().T
    sparse[:, ids[ids >= 0]] = logits[:, ids >= 0]
    for teacher in (
        Teacher(ll.Logits(batch.teacher_hidden, batch.teacher_weight[:60]), ids=ids),
        Teacher(logits.float(), ids=ids),
    ):
        out = ll.logprobs(
            ll.Logits(*batch[:2], bias=batch.bias),
            batch.target,
            teacher=teacher,
            divergence="forward_kl",
            entropy="grad",
            memory=6000,
        )
        z = batch.hidden.double() @ batch.weight.double().T + batch.bias.double()
        truth = textbook(z, sparse, "forward_kl").masked_fill(batch.target == -100, 0.0)
        torch.testing.assert_close(out.divergence.double(), truth, rtol=1e-5, atol=1e-6)


def test_several_teachers(device: torch.device):
    """Rows keep their order, and each its own teacher, in one pass and in two."""
    batch, other = Batch.draw(device), Batch.draw(device)
    which = torch.tensor([0, 1, 2, 1, 0, 0, 2, 1, 0, 2, 2], device=device)
    logits = torch.randn(11, 83, device=device)
    members = [
        Teacher(ll.Logits(batch.teacher_hidden, batch.teacher_weight)),
        Teacher(ll.Logits(other.hidden, other.weight), head=ll.Head(temperature=2.0)),
        Teacher(logits),
    ]
    teachers = Teacher.by_row(members, which)
    objective = ll.Objective.recipe("distill", divergence="forward_kl")
    each = [
        ll.logprobs(
            ll.Logits(*batch[:2], bias=batch.bias),
            batch.target,
            teacher=teacher,
            divergence="forward_kl",
            entropy="grad",
        )
        for teacher in members
    ]
    wanted = torch.stack([x.divergence for x in each]).gather(0, which[None])[0]
    assert wanted.std() > 0.1
    hidden, weight, bias = batch.leaves(torch.float32)
    out = ll.logprobs(
        ll.Logits(hidden, weight, bias=bias),
        batch.target,
        teacher=teachers,
        divergence="forward_kl",
        entropy="grad",
        memory=6000,
    )
    torch.testing.assert_close(out.divergence, wanted, rtol=1e-5, atol=1e-6)
    loss = out.divergence.sum() / 10
    apart = torch.autograd.grad(loss, (hidden, weight, bias))
    for memory in (6000, "1MiB"):
        once, _, stats = ll.policy_loss(
            ll.Logits(hidden, weight, bias=bias),
            batch.target,
            objective,
            teacher=teachers,
            memory=memory,
            return_stats=True,
        )
        torch.testing.assert_close(once, loss)
        torch.testing.assert_close(stats.divergence, wanted, rtol=1e-5, atol=1e-6)
        for a, b in zip(torch.autograd.grad(once, (hidden, weight, bias)), apart, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_from_logits(backend: str, overwrite: bool, device: torch.device):
    """Some rows of strided logits, bfloat16 beside float32, and a teacher with fewer columns."""
    whole = torch.randn(3, 8, 57, device=device).bfloat16()
    teacher = torch.randn(3, 7, 41, device=device)
    index = torch.tensor([20, 0, 3, 11, 7], device=device)
    target = torch.tensor([1, 40, -100, 56, 9], device=device)
    grads = []
    for dtype in (torch.float64, torch.bfloat16):
        leaf = whole.clone().to(dtype).requires_grad_()
        z = leaf[:, :7].reshape(21, 57).float() if dtype == torch.bfloat16 else leaf[:, :7].reshape(21, 57)
        y = torch.nn.functional.pad(teacher.reshape(21, 41).to(z.dtype), (0, 16), value=-torch.inf)
        rows = textbook(z[index], y[index], "jsd", beta=0.3)[target != -100]
        rows.sum().backward()
        grads.append((rows.detach(), leaf.grad))
    leaf = whole.clone().requires_grad_()
    view = leaf * 1.0 if overwrite else leaf
    given = view if overwrite else view[:, :7]
    where = index + index // 7 if overwrite else index
    wide = torch.nn.functional.pad(teacher, (0, 0, 0, 1)) if overwrite else teacher
    options: dict[str, Any] = {"backend": backend, "memory": 3000}
    what, given = Divergence("jsd", beta=0.3), ll.Logits.given(given, overwrite=overwrite)
    out = ll.logprobs(given, (where, target), teacher=wide, divergence=what, **options)
    out.divergence.sum().backward()
    (exact, right_grad), (plain, plain_grad) = grads
    assert_close_to_truth(out.divergence.detach()[target != -100], exact, plain)
    assert leaf.grad is not None
    assert right_grad is not None
    assert plain_grad is not None
    assert_gradient_close_to_truth(leaf.grad, right_grad, plain_grad)
    assert out.teacher_logprob[3] == -torch.inf


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_target_that_a_teacher_of_fewer_columns_lacks(backend: str, device: torch.device):
    """Every target is one of the student's columns, which says nothing of the teacher's."""
    z, y = torch.randn(3, 9, device=device), torch.randn(3, 4, device=device)
    target = torch.tensor([8, 2, 4], device=device)
    out = ll.logprobs(z, target, teacher=y, divergence="forward_kl", backend=backend)
    wanted = y.double().log_softmax(-1)[1, 2]
    assert out.teacher_logprob.isneginf().tolist() == [True, False, True]
    torch.testing.assert_close(out.teacher_logprob[1].double(), wanted, rtol=1e-6, atol=1e-6)
    whole = torch.nn.functional.pad(y.double(), (0, 5), value=-torch.inf)
    truth = textbook(z.double(), whole, "forward_kl")
    torch.testing.assert_close(out.divergence.double(), truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sort", ["head", "fewer", "ids", "several"])
def test_a_teacher_whose_logits_are_made_beside_those_of_the_student(
    sort: str, backend: str, overwrite: bool, device: torch.device
):
    """Some rows of logits that exist, in chunks of a few: all results, and no gradient of the other rows."""
    logits, (hidden, second) = torch.randn(17, 41, device=device), torch.randn(2, 17, 6, device=device)
    weight, bias = torch.randn(2, 41, 6, device=device), torch.randn(41, device=device)
    index = torch.tensor([16, 0, 3, 11, 7, 8, 9, 2, 5], device=device)
    target = torch.tensor([1, 40, -100, 26, 9, 3, 0, 12, 40], device=device)
    which, ids = torch.arange(9, device=device) % 2, torch.randperm(41, device=device)[:30]
    own = ll.Logits(hidden, weight[0], bias=bias)
    given: Any = {
        "head": own,
        "fewer": Teacher(ll.Logits(hidden, weight[0, :33], bias=bias[:33]), head=ll.Head(softcap=4.0)),
        "ids": Teacher(ll.Logits(hidden, weight[0, :30], bias=bias[:30]), ids=ids),
        "several": Teacher.by_row([own, ll.Logits(second, weight[1])], which),
    }[sort]

    def whole(dtype: torch.dtype) -> Outcome:
        leaf = logits.to(dtype).requires_grad_()
        z, none = leaf[index], torch.full((9, 41), -torch.inf, dtype=dtype, device=device)
        y = hidden.to(dtype)[index] @ weight[0].to(dtype).T + bias.to(dtype)
        other = second.to(dtype)[index] @ weight[1].to(dtype).T
        y = {
            "head": y,
            "fewer": none.index_copy(1, torch.arange(33, device=device), 4 * torch.tanh(y[:, :33] / 4)),
            "ids": none.index_copy(1, ids, y[:, :30]),
            "several": torch.where((which == 0)[:, None], y, other),
        }[sort]
        counted, at = target != -100, target.clamp_min(0)[:, None]
        log_p, log_q = z.log_softmax(-1), y.log_softmax(-1)
        entropies = [-torch.where(x.exp() > 0, x.exp() * x.clamp_min(-1e4), 0.0).sum(-1) for x in (log_p, log_q)]
        values = [textbook(z, y, "jsd", beta=0.3), log_p.gather(1, at)[:, 0], entropies[0]]
        values = [torch.where(counted, x, 0.0) for x in (*values, log_q.gather(1, at)[:, 0], entropies[1])]
        (values[0].sum() + 0.3 * values[1].sum() - 0.2 * values[2].sum()).backward()
        assert leaf.grad is not None
        return Outcome(tuple(x.detach() for x in values), (leaf.grad,))

    leaf = logits.clone().requires_grad_()
    student = ll.Logits.given(leaf * 1.0 if overwrite else leaf, overwrite=overwrite)
    asked: dict[str, Any] = {"divergence": Divergence("jsd", beta=0.3), "backend": backend, "memory": 1500}
    out = ll.logprobs(student, (index, target), teacher=given, entropy="grad", **asked)
    (out.divergence.sum() + 0.3 * out.logprob.sum() - 0.2 * out.entropy.sum()).backward()
    exact, plain = whole(torch.float64), whole(torch.float32)
    for name, *others in zip(NAMES, exact.values, plain.values, strict=True):
        assert_close_to_truth(getattr(out, name).detach(), *others, name=name)
    assert leaf.grad is not None
    assert_gradient_close_to_truth(leaf.grad, exact.gradients[0], plain.gradients[0])


def test_several_teachers_with_a_temperature_for_every_row(device: torch.device):
    """Temperatures are in the order of the caller's rows, which work on several teachers does not keep."""
    batch, other = Batch.draw(device), Batch.draw(device)
    which, heat = torch.arange(11, device=device) % 2, torch.linspace(0.5, 2, 11, device=device)
    members = [
        Teacher(ll.Logits(x.hidden, x.weight), head=ll.Head(temperature=t))
        for x, t in ((other, heat), (batch, heat.flip(0)))
    ]
    asked: dict[str, Any] = {"divergence": "forward_kl", "memory": 6000}
    each = [ll.logprobs(ll.Logits(*batch[:2]), batch.target, teacher=x, **asked).divergence for x in members]
    out = ll.logprobs(ll.Logits(*batch[:2]), batch.target, teacher=Teacher.by_row(members, which), **asked)
    torch.testing.assert_close(out.divergence, torch.where(which == 0, *each), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("verb", ["logprobs", "policy_loss"])
def test_a_budget_holds_both_models(verb: str):
    """Rows of a chunk of float32 logits, and as many of the teacher's."""
    student, other = (ll.Logits(torch.randn(900, 8, requires_grad=True), torch.randn(256, 8)) for _ in range(2))
    target, memory = torch.zeros(900, dtype=torch.int64), 1 << 20
    if verb == "logprobs":
        plan = ll.explain(ll.logprobs, student, target, teacher=other, memory=memory)
    else:
        objective = ll.Objective(divergence="reverse_kl")
        plan = ll.explain(ll.policy_loss, student, target, objective, teacher=other, memory=memory)
    assert len(plan.chunks) > 1
    # Plain torch works on copies, which have a share of their own.
    assert plan.rows * 256 * 8 <= memory * (1 - CPU.elementwise)


def test_close_distributions_keep_their_digits(device: torch.device):
    """Of float32 logits that differ by 1e-4, a KL of 1e-8 to three digits; the textbook's form has none there."""
    z = torch.randn(16, 4000, device=device) * 3
    y = z + 1.4e-4 * torch.randn(16, 4000, device=device)
    target = torch.zeros(16, dtype=torch.int64, device=device)
    log_p, log_q = z.double().log_softmax(-1), y.double().log_softmax(-1)
    d, p, q = log_q - log_p, log_p.exp(), log_q.exp()
    truth = {
        "forward_kl": (q * d - (q - p)).sum(-1),
        "reverse_kl": (-p * d - (p - q)).sum(-1),
        "hellinger": (0.5 * p * torch.expm1(d / 2).square()).sum(-1),
        "tv": 0.5 * (p - q).abs().sum(-1),
    }
    assert 3e-9 < float(truth["forward_kl"].mean()) < 3e-8
    for kind, exact in truth.items():
        found = ll.logprobs(z, target, teacher=y, divergence=kind).divergence.double()  # pyright: ignore[reportArgumentType]
        # A variation is of first order in d, and feels the rounding of log Z itself; the others are of second order.
        assert ((found - exact).abs() <= (5e-3 if kind == "tv" else 1e-3) * exact).all(), kind
        assert (found >= 0).all()
    mixed = ll.logprobs(z, target, teacher=y, divergence="jsd").divergence.double()
    # A quarter of the other's quarter, to first order.
    torch.testing.assert_close(mixed, truth["forward_kl"] / 4, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_slope_of_a_variation(backend: str, device: torch.device):
    """None where two models agree but for rounding, whose sign may be another in backward; a half beyond."""
    z, apart = torch.zeros(2, 2, device=device, requires_grad=True), torch.tensor([1e-6, 1e-3], device=device)
    y = torch.stack([apart, torch.zeros_like(apart)], 1)
    target = torch.zeros(2, dtype=torch.int64, device=device)
    out = ll.logprobs(z, target, teacher=y, divergence="tv", backend=backend).divergence
    out.sum().backward()
    torch.testing.assert_close(out.detach(), apart / 4, rtol=2e-3, atol=0.0)
    assert z.grad is not None
    torch.testing.assert_close(z.grad, torch.tensor([[0.0, 0.0], [-0.25, 0.25]], device=device))


@pytest.mark.parametrize("backend", BACKENDS)
def test_special_values(backend: str, device: torch.device):
    """Excluded tokens, infinite divergences, and NaN that stays in its row."""
    inf = torch.inf
    z = torch.tensor([[0.0, 0.0, -inf], [0.0, 1.0, -inf], [0.0, 0.0, 0.0], [torch.nan, 0.0, 0.0]], device=device)
    y = torch.tensor([[0.0, 0.0, -inf], [0.0, 1.0, 2.0], [0.0, 0.0, -inf], [0.0, 0.0, 0.0]], device=device)
    target, log = torch.zeros(4, dtype=torch.int64, device=device), torch.log
    forward, reverse, jsd, tv = (
        ll.logprobs(z, target, teacher=y, divergence=kind, backend=backend).divergence  # pyright: ignore[reportArgumentType]
        for kind in ("forward_kl", "reverse_kl", "jsd", "tv")
    )
    for x in (forward, reverse, jsd, tv):
        assert x[0] == 0
        assert x[3].isnan()
    assert forward[1] == inf
    assert reverse[2] == inf
    torch.testing.assert_close(forward[2], log(torch.tensor(1.5, device=device)))
    assert 0 < jsd[1] < 0.7
    assert 0 < tv[2] < 1
    # The gradient of an infinite forward KL is finite, as its formula is.
    leaf = z[:3].clone().requires_grad_()
    ll.logprobs(
        leaf, target[:3], teacher=y[:3], divergence="forward_kl", entropy="grad", backend=backend
    ).divergence.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_second_derivatives_of_float64_are_refused_and_first_ones_checked(device: torch.device):
    hidden = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, device=device, requires_grad=True)
    teacher = Teacher(ll.Logits(torch.randn(3, 5, device=device).double(), torch.randn(7, 5, device=device).double()))
    target = torch.tensor([1, 0, 6], device=device)
    for kind, numbers in KINDS.items():
        if kind == "tv":
            continue

        def score(h: Tensor, w: Tensor, kind: Any = kind, numbers: Any = numbers) -> Tensor:
            out = ll.logprobs(ll.Logits(h, w), target, teacher=teacher, divergence=Divergence(kind, **numbers))
            assert out.divergence is not None
            return out.divergence

        assert torch.autograd.gradcheck(score, (hidden, weight))
    total = ll.logprobs(ll.Logits(hidden, weight), target, teacher=teacher).divergence.sum()
    with pytest.raises(ll.LogitlessError, match="create_graph=True"):
        torch.autograd.grad(total, hidden, create_graph=True)


def test_frozen_head_and_buffers(device: torch.device):
    """Only hidden needs a gradient; then the weight's goes to a buffer, on top of what is there."""
    batch = Batch.draw(device, dtype=torch.bfloat16)
    teacher = Teacher(ll.Logits(batch.teacher_hidden, batch.teacher_weight))
    hidden, weight, bias = batch.leaves(torch.bfloat16)
    ll.logprobs(
        ll.Logits(hidden, weight, bias=bias), batch.target, teacher=teacher, entropy="grad"
    ).divergence.sum().backward()
    again, frozen = batch.hidden.detach().requires_grad_(), weight.detach()
    ll.logprobs(
        ll.Logits(again, frozen, bias=bias.detach()), batch.target, teacher=teacher, entropy="grad"
    ).divergence.sum().backward()
    assert torch.equal(hidden.grad, again.grad)
    buffer = torch.ones(83, 16, device=device)
    other = weight.detach().clone().requires_grad_()
    ll.logprobs(
        ll.Logits(again, other, bias=bias.detach(), weight_grad=buffer), batch.target, teacher=teacher, entropy="grad"
    ).divergence.sum().backward()
    assert other.grad is None
    torch.testing.assert_close((buffer - 1).bfloat16(), weight.grad, rtol=2e-2, atol=1e-2)


# Ranks.


def sharded(rank: int, world: int, batch: Batch, teacher_columns: int, sequence_parallel: bool) -> Outcome:
    """One rank's call, with its columns of both heads and, under sequence parallelism, its tokens."""
    start, stop = [(0, 30), (30, 83)][rank]
    shard = ll.VocabShard(start, stop, torch.distributed.group.WORLD)
    size = len(batch.hidden) // world
    tokens = slice(rank * size, (rank + 1) * size) if sequence_parallel else slice(None)
    part = batch._replace(hidden=batch.hidden[tokens], weight=batch.weight[start:stop], bias=batch.bias[start:stop])
    teacher = Teacher(ll.Logits(batch.teacher_hidden[tokens], batch.teacher_weight[start : min(stop, teacher_columns)]))
    options = {"shard": shard, "memory": 4000, "sequence_parallel": sequence_parallel}
    return ours(part, teacher, "jsd", **KINDS["jsd"], **options)


@pytest.mark.parametrize(("columns", "sequence_parallel"), [(83, False), (71, True)])
def test_shards_give_the_unsharded_answer(ranks, columns: int, sequence_parallel: bool):
    batch = Batch.draw("cpu", rows=12)
    whole = batch._replace(teacher_weight=batch.teacher_weight[:columns])
    exact, plain = (right(whole, "jsd", dtype, **KINDS["jsd"]) for dtype in (torch.float64, torch.float32))
    first, second = ranks(sharded, 2, batch, columns, sequence_parallel)
    assert all(torch.equal(a, b) for a, b in zip(first.values, second.values, strict=True))
    hidden = torch.cat([first.gradients[0], second.gradients[0]]) if sequence_parallel else first.gradients[0]
    joined = (hidden, *(torch.cat(x) for x in zip(first.gradients[1:], second.gradients[1:], strict=True)))
    assert_right(Outcome(first.values, joined), exact, plain)


# What is refused.


def test_what_does_not_go_together_is_refused(device: torch.device):
    batch = Batch.draw(device)
    teacher = Teacher(ll.Logits(batch.teacher_hidden, batch.teacher_weight))
    logits, target = ll.Logits(*batch[:2]), batch.target
    wrong: dict[str, Any] = {
        "kind 'kl' is not known": lambda: ll.logprobs(logits, target, teacher=teacher, divergence="kl"),  # pyright: ignore[reportArgumentType]
        "beta is the teacher's share of the mixture, between 0 and 1, but is 1.0": lambda: Divergence("jsd", beta=1.0),
        "teacher must be logits, Logits, a Teacher or Teacher.by_row but is list": lambda: ll.logprobs(
            logits, target, teacher=[teacher]
        ),  # pyright: ignore[reportArgumentType]
        "They must be of the same tokens": lambda: ll.logprobs(
            ll.Logits(*batch[:2]),
            batch.target,
            teacher=Teacher(ll.Logits(batch.teacher_hidden[:5], batch.teacher_weight)),
            entropy="grad",
        ),
        "KL(student || teacher) is infinite": lambda: ll.logprobs(
            ll.Logits(*batch[:2]),
            batch.target,
            teacher=Teacher(ll.Logits(batch.teacher_hidden, batch.teacher_weight[:80])),
            entropy="grad",
        ),
        "the teacher has 83 columns here and the student 60": lambda: ll.logprobs(
            ll.Logits(batch.hidden, batch.weight[:60]), batch.target.clamp_max(59), teacher=teacher, entropy="grad"
        ),
        "divergence='reverse_kl' and the call no teacher": lambda: ll.policy_loss(
            ll.Logits(*batch[:2]), batch.target, ll.Objective.recipe("distill")
        ),
        "divergence=None and the call a teacher": lambda: ll.policy_loss(
            ll.Logits(*batch[:2]), batch.target, ll.Objective(policy="none"), teacher=teacher
        ),
        "divergence_coef is 0.5 but divergence is None": lambda: ll.Objective(divergence_coef=0.5),
        "which runs from 0 to 3, but there are 1 members": lambda: Teacher.by_row([teacher], torch.tensor([0, 3])),
        "ids name one of the student's ids twice": lambda: Teacher(
            ll.Logits(batch.teacher_hidden, batch.teacher_weight), ids=torch.zeros(83, dtype=torch.int64)
        ),
    }
    for text, act in wrong.items():
        with pytest.raises(ll.LogitlessError) as caught:
            act()
        assert text in str(caught.value)


def test_no_rows(device: torch.device):
    batch = Batch.draw(device)
    hidden = batch.hidden.detach().requires_grad_()
    teacher = Teacher(ll.Logits(batch.teacher_hidden, batch.teacher_weight))
    none = (torch.zeros(0, dtype=torch.int64, device=device),) * 2
    out = ll.logprobs(ll.Logits(hidden, batch.weight), none, teacher=teacher, entropy="grad")
    out.divergence.sum().backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()
    logits = torch.randn(11, 83, device=device, requires_grad=True)
    ll.logprobs(logits, none, teacher=teacher).divergence.sum().backward()
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize("teacher", ["head", "top k", None])
def test_no_rows_in_a_loss(teacher: str | None, device: torch.device):
    """Whatever its terms are on: a loss of 0, and gradients of 0."""
    batch = Batch.draw(device)
    hidden, weight = batch.hidden.detach().requires_grad_(), batch.weight.detach().requires_grad_()
    none = (torch.zeros(0, dtype=torch.int64, device=device),) * 2
    sent = Teacher.from_top_k(torch.zeros(0, 2, device=device), torch.zeros(0, 2, dtype=torch.int64, device=device))
    smooth = ll.Objective.recipe("sft", policy_options={"label_smoothing": 0.1})
    objective = smooth if teacher is None else ll.Objective.recipe("distill")
    given = {"head": ll.Logits(*batch[3:5]), "top k": sent}.get(str(teacher))
    loss, _, stats = ll.policy_loss(ll.Logits(hidden, weight), none, objective, teacher=given, return_stats=True)
    assert float(loss.detach()) == 0
    assert teacher is None or stats.divergence.shape == (0,)
    loss.backward()
    for x in (hidden, weight):
        assert x.grad is not None
        assert not x.grad.any()


@pytest.mark.parametrize("sort", ["head", "logits", "bucket", "renormalise", "kept"])
def test_batch_invariant_bits(sort: str):
    """A token's results do not depend on how many or which others come with it, nor on where it stands."""
    rows = 61
    hidden, weight = torch.randn(rows, 48), torch.randn(301, 48)
    other, other_weight = torch.randn(rows, 40), torch.randn(301, 40)
    target, (best, ids) = torch.randint(301, (rows,)), torch.randn(rows, 301).log_softmax(-1).topk(5)

    def score(index: Tensor) -> Any:
        teachers = {
            "logits": lambda: Teacher(other @ other_weight.T),
            "bucket": lambda: Teacher.from_top_k(best[index], ids[index]),
            "renormalise": lambda: Teacher.from_top_k(best[index], ids[index], "renormalise"),
        }
        teacher = teachers.get(sort, lambda: Teacher(ll.Logits(other, other_weight)))()
        options: dict[str, Any] = {"batch_invariant": True, "memory": 40_000}
        if sort == "kept":
            options["kept"] = ll.Kept(ids[index].flatten(), torch.full_like(index, 5), "support")
        return from_hidden(
            hidden, weight, (index, target[index]), teacher=teacher, divergence="jsd", entropy="grad", **options
        )

    full = score(torch.arange(rows))
    # What is fixed is the order of sums, and not the result.
    loose = ll.logprobs(
        ll.Logits(hidden, weight),
        target,
        teacher=Teacher(ll.Logits(other, other_weight)),
        divergence="jsd",
        entropy="grad",
    )
    if sort in ("head", "logits"):
        torch.testing.assert_close(full.divergence, loose.divergence)
    for index in (torch.tensor([7]), torch.arange(40, 57), torch.randperm(rows)):
        for name, whole, part in zip(full._fields, full, score(index), strict=True):
            if whole is None:
                continue
            assert torch.equal(whole[index].nan_to_num(7.0), part.nan_to_num(7.0)), name


def test_batch_invariance_as_a_loss_and_with_several_teachers():
    batch = Batch.draw("cpu")
    teacher, objective = Teacher(ll.Logits(*batch[3:5])), ll.Objective.recipe("distill", divergence="forward_kl")
    hidden = batch.hidden.clone().requires_grad_()
    given: dict[str, Any] = {"teacher": teacher, "batch_invariant": True, "memory": 6000}
    logits, options = logits_of(hidden, batch.weight, given)
    plan = ll.explain(ll.policy_loss, logits, batch.target, objective, **options)
    assert str(plan).startswith("two passes: 6 matrix products, because batch_invariant=True fixes the tiles")
    loss, _, stats = loss_from_hidden(hidden, batch.weight, batch.target, objective, return_stats=True, **given)
    each = ll.logprobs(
        ll.Logits(hidden, batch.weight, batch_invariant=True),
        batch.target,
        teacher=teacher,
        divergence="forward_kl",
        entropy="grad",
        memory=6000,
    )
    assert torch.equal(stats.divergence, each.divergence)
    (found,) = torch.autograd.grad(loss, hidden)
    (wanted,) = torch.autograd.grad(each.divergence.sum() / 10, hidden)
    torch.testing.assert_close(found, wanted)
    several = Teacher.by_row([teacher], torch.zeros(11, dtype=torch.int64))
    with pytest.raises(ll.LogitlessError, match="batch_invariant=True goes with one Teacher"):
        ll.logprobs(ll.Logits(*batch[:2], batch_invariant=True), batch.target, teacher=several, entropy="grad")


@pytest.mark.parametrize("seed", range(60))
def test_pairs_of_features(seed: int):
    """Drawn at random: kind, dtype, sizes, budget, heads of both, a smaller vocabulary, distances and offsets."""
    r, kinds = random.Random(seed), list(KINDS)
    torch.manual_seed(seed)
    kind, dtype = r.choice(kinds), r.choice((torch.float32, torch.float64))
    rows, vocab = r.choice((4, 5, 9, 17)), r.choice((2, 3, 17, 64, 101))
    batch = Batch.draw("cpu", rows, vocab, dtype, near=r.choice((None, None, 1e-2)))
    if r.random() < 0.3 and kind != "reverse_kl" and vocab > 2:
        batch = batch._replace(teacher_weight=batch.teacher_weight[: r.randint(2, vocab)])
    if r.random() < 0.3:
        batch = batch._replace(bias=batch.bias + r.choice((-300.0, 300.0)))
    if r.random() < 0.3:
        batch = batch._replace(hidden=batch.hidden * 8)
    heads = [None, ll.Head(temperature=0.6, scale=-1.5), ll.Head(softcap=7.0), ll.Head(scale=0.3)]
    head, other = r.choice(heads), r.choice(heads)
    memory = r.choice((2000, 9000, "1MiB"))
    options = {"head": head, "backend": r.choice(("reference", "tiled")), "memory": memory, **KINDS[kind]}
    exact, plain = (right(batch, kind, d, head, other, **KINDS[kind]) for d in (torch.float64, dtype))
    found = ours(batch, Teacher(ll.Logits(batch.teacher_hidden, batch.teacher_weight), head=other), kind, **options)
    # Logits are rounded at their own size, before anything is computed of them.
    logits = shaped(batch.hidden @ batch.weight.T + batch.bias, head)
    unit = 4 * torch.finfo(dtype).eps * max(1.0, float(logits.abs().max()))
    for mine, truth, theirs in zip(
        [*found.values, *found.gradients],
        [*exact.values, *exact.gradients],
        [*plain.values, *plain.gradients],
        strict=True,
    ):
        finite = truth.isfinite()
        assert torch.equal(mine[~finite].double(), truth[~finite])
        size = truth[finite].abs().max().clamp_min(1.0) if finite.any() else 1.0
        error, usual = (
            float((x.double() - truth)[finite].abs().max() / size) if finite.any() else 0.0 for x in (mine, theirs)
        )
        # Plain torch has NaN where float32 does not hold a probability.
        assert error <= 8 * (usual if usual == usual else 0.0) + unit
