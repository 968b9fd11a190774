"""Divergences of a student and its teacher against float64, whatever the backend, the layout and the teacher."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import loss_from_hidden
from close import assert_close_to_truth, assert_gradient_close_to_truth
from shared.divergence import BACKENDS, KINDS, NAMES, Batch, Outcome, assert_right, ours, right, textbook
from torch import Tensor

import logitless as ll
from logitless import Teacher
from logitless.backends.divergences import Divergence
from logitless.machine import CPU

# NumPy, which runs the kernels in Triton's interpreter, reports what a selection then leaves out.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")


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


def test_another_vocabulary_with_a_padded_head(device: torch.device):
    """The ids of columns beyond the true vocabulary say nothing, even where they name ids of the student's."""
    batch = Batch.draw(device)
    # The first id of the student's is among them.
    ids = torch.cat([torch.tensor([0]), torch.randperm(82)[:59] + 1]).to(device)
    head = ll.Head(vocab_size=53)
    teachers = (
        Teacher(ll.Logits(batch.teacher_hidden, batch.teacher_weight[:60]), head=head, ids=ids),
        Teacher(batch.teacher_hidden @ batch.teacher_weight[:60].T, head=head, ids=ids),
    )
    # As a teacher of the student's own ids, whose weight has rows that no logit reaches.
    truths = []
    for dtype in (torch.float64, torch.float32):
        hidden, weight, bias = batch.leaves(dtype)
        sparse = torch.full((11, 83), -torch.inf, dtype=dtype, device=device)
        sparse[:, ids[:53]] = batch.teacher_hidden.to(dtype) @ batch.teacher_weight[:53].to(dtype).T
        apart = textbook(hidden @ weight.T + bias, sparse, "forward_kl").masked_fill(batch.target == -100, 0.0)
        apart.sum().backward()
        truths.append(Outcome((apart.detach(),), (hidden.grad, weight.grad, bias.grad)))  # pyright: ignore[reportArgumentType]
    for teacher in teachers:
        hidden, weight, bias = batch.leaves(torch.float32)
        asked: dict[str, Any] = {"divergence": "forward_kl", "memory": 6000}
        out = ll.logprobs(ll.Logits(hidden, weight, bias=bias), batch.target, teacher=teacher, **asked)
        out.divergence.sum().backward()
        assert_close_to_truth(out.divergence.detach(), *(x.values[0] for x in truths))
        for i, x in enumerate((hidden, weight, bias)):
            assert_gradient_close_to_truth(x.grad, *(y.gradients[i] for y in truths))


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
