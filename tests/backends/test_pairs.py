"""Student and teacher multiplied by one kernel: divergences against float64, and the same as logits that exist."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from shared.divergence import KINDS, textbook
from shared.shards import Collectives, as_told
from torch import Tensor

import logitless as ll
from logitless.backends.divergences import Divergence

# NumPy, which runs the kernels in Triton's interpreter, reports what a selection then leaves out.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")

KEPT_IN_KERNELS = "Logits stay in the kernels that make them"


class Batch(NamedTuple):
    """Operands in 16 bits; one target is ignored."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    target: Tensor

    @staticmethod
    def draw(device, dtype=torch.bfloat16, rows=45, vocab=301, width=40, near: float | None = None) -> Batch:
        """``near``: a teacher of the student's own size, that far from it."""
        hidden, weight = torch.randn(rows, 40, device=device), torch.randn(vocab, 40, device=device) / 4
        other, other_weight = torch.randn(rows, width, device=device), torch.randn(vocab, width, device=device) / 4
        if near is not None:
            other, other_weight = hidden, weight * (1 + near * torch.randn(vocab, 40, device=device))
        target = torch.randint(vocab, (rows,), device=device)
        target[7] = -100
        return Batch(*(x.to(dtype) for x in (hidden, weight, other, other_weight)), target)


class Outcome(NamedTuple):
    values: dict[str, Tensor]
    gradients: tuple[Tensor, Tensor]


def upstream(rows: int, device) -> Tensor:
    return torch.linspace(-1.0, 2.0, rows, device=device)


def right(batch: Batch, kind: str, dtype: torch.dtype, heads: tuple, rounded: bool = False, **numbers) -> Outcome:
    """In plain torch. ``rounded``: logits in the operands' dtype, as a head makes them."""
    hidden, weight = (x.detach().clone().requires_grad_() for x in batch[:2])

    def logits(x: Tensor, w: Tensor, head: ll.Head | None) -> Tensor:
        z = (x @ w.T).to(dtype) if rounded else x.to(dtype) @ w.to(dtype).T
        head = head or ll.Head()
        heat = head.temperature
        heat = heat.to(dtype)[:, None] if isinstance(heat, Tensor) else heat
        z = z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)
        return z * head.scale / heat

    if not rounded:
        hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
    z, y = logits(hidden, weight, heads[0]), logits(batch.teacher_hidden, batch.teacher_weight, heads[1])
    counted, at = batch.target != -100, batch.target.clamp_min(0)[:, None]
    log_p, log_q = z.log_softmax(-1), y.log_softmax(-1)
    values = {
        "divergence": textbook(z, y, kind, **numbers),
        "logprob": log_p.gather(1, at)[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "teacher_logprob": log_q.gather(1, at)[:, 0],
        "teacher_entropy": -(log_q.exp() * log_q).sum(-1),
        "log_z": z.logsumexp(-1),
    }
    values = {name: torch.where(counted, x, 0.0) for name, x in values.items()}
    up = upstream(len(at), at.device).to(dtype)
    loss = (up * values["divergence"] + 0.3 * values["logprob"] - 0.2 * up * values["entropy"]).sum()
    gradients = torch.autograd.grad(loss, (hidden, weight))
    return Outcome({name: x.detach() for name, x in values.items()}, gradients)


def teacher_of(batch: Batch, head: ll.Head | None = None) -> ll.Teacher:
    return ll.Teacher(ll.Logits(batch.teacher_hidden, batch.teacher_weight), head=head)


def ours(batch: Batch, kind: str, heads: tuple, numbers: dict, **options) -> Outcome:
    hidden, weight = (x.detach().clone().requires_grad_() for x in batch[:2])
    options = {"entropy": "grad", "divergence": Divergence(kind, **numbers), **options}  # pyright: ignore[reportArgumentType]
    options |= {"head": heads[0], "teacher": teacher_of(batch, heads[1]), "backend": "triton"}
    out = ll.logprobs(ll.Logits(hidden, weight), batch.target, **options)
    values = {name: getattr(out, name) for name in ("divergence", "logprob", "entropy", "log_z")}
    values |= {"teacher_logprob": out.teacher_logprob, "teacher_entropy": out.teacher_entropy}
    up = upstream(len(batch.target), batch.target.device)
    loss = (up * out.divergence + 0.3 * out.logprob - 0.2 * up * out.entropy).sum()
    gradients = torch.autograd.grad(loss, (hidden, weight))
    return Outcome({name: x.detach() for name, x in values.items()}, gradients)


def plan_of(batch: Batch, kind: str, **options) -> Any:
    logits = ll.Logits(batch.hidden.detach().clone().requires_grad_(), batch.weight.detach().clone().requires_grad_())
    given = {"teacher": teacher_of(batch), "divergence": kind, "backend": "triton", "entropy": "grad", **options}
    return ll.explain(ll.logprobs, logits, batch.target, **given)


def check(batch: Batch, kind: str, heads: tuple = (None, None), **options) -> None:
    numbers = KINDS[kind]
    found = ours(batch, kind, heads, numbers, **options)
    exact = right(batch, kind, torch.float64, heads, **numbers)
    wide = right(batch, kind, torch.float32, heads, **numbers)
    for name, x in found.values.items():
        assert_close_to_truth(x, exact.values[name], wide.values[name], name=name)
    plain = right(batch, kind, torch.float32, heads, rounded=True, **numbers)
    assert plain.gradients[0].dtype == batch.hidden.dtype
    for name, *x in zip(("hidden", "weight"), found.gradients, exact.gradients, plain.gradients, strict=True):
        assert_gradient_close_to_truth(*x, name=f"d_{name}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [40, 24])
def test_every_kind(kind: str, width: int, device: torch.device):
    """In several pieces of rows forward, several slabs of columns backward; a teacher as wide as the student or not."""
    batch = Batch.draw(device, width=width)
    plan = plan_of(batch, kind, memory=20000)
    assert plan.backward.fused
    assert (plan.forward is not None) == (kind in ("forward_kl", "reverse_kl"))
    assert (KEPT_IN_KERNELS in str(plan)) == (plan.forward is not None)
    assert "6 matrix products" in str(plan)
    check(batch, kind, memory=20000)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_float16(kind: str, device: torch.device):
    check(Batch.draw(device, torch.float16), kind)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_heads_of_their_own(kind: str, device: torch.device):
    """Temperature by row, scale and softcap of either."""
    heat = torch.linspace(0.5, 1.5, 45, device=device)
    batch = Batch.draw(device)
    check(batch, kind, (ll.Head(temperature=heat, scale=0.7), ll.Head(softcap=9.0)))
    check(batch, kind, (ll.Head(softcap=7.0), ll.Head(temperature=heat.flip(0), scale=1.3)))


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_a_small_kl_has_its_digits(kind: str, device: torch.device):
    """Relative to the KL itself, of 1e-6, as close as where logits are read twice."""
    batch = Batch.draw(device, torch.float16, near=1e-3)
    exact = right(batch, kind, torch.float64, (None, None)).values["divergence"]
    found = ours(batch, kind, (None, None), {}).values["divergence"]
    apart = ll.logprobs(
        ll.Logits(batch.hidden, batch.weight, bias=torch.zeros(301, device=device, dtype=torch.float16)),
        batch.target,
        teacher=teacher_of(batch),
        divergence=kind,
        backend="triton",
    ).divergence
    assert apart is not None
    counted = batch.target != -100
    assert 1e-8 < exact[counted].max() < 1e-5
    error, other = (((x - exact).abs() / exact)[counted].max() for x in (found, apart))
    assert error <= 2 * other + 1e-6


def loss_outcome(batch: Batch, kind: str, memory: int) -> tuple[Tensor, Outcome]:
    hidden, weight = (x.detach().clone().requires_grad_() for x in batch[:2])
    what = Divergence(kind, **KINDS[kind])  # pyright: ignore[reportArgumentType]
    objective = ll.Objective(policy="reinforce", entropy_coef=0.1, divergence=what, divergence_coef=0.7)
    given = {"teacher": teacher_of(batch), "backend": "triton", "memory": memory}
    given["advantage"] = upstream(len(batch.target), batch.target.device)
    logits = ll.Logits(hidden, weight)
    plan = ll.explain(ll.policy_loss, logits, batch.target, objective, **given)
    assert plan.kind == "one pass"
    assert len(plan.chunks) > 1
    assert "4 matrix products" in str(plan)
    assert ("16-bit exponentials of both models" in str(plan)) == (kind != "jsd")
    loss, _, stats = ll.policy_loss(logits, batch.target, objective, return_stats=True, **given)
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert stats.divergence is not None
    values = {"divergence": stats.divergence, "logprob": stats.logprob}
    return loss.detach(), Outcome(values, (hidden.grad, weight.grad))


def loss_truth(batch: Batch, kind: str, dtype: torch.dtype, rounded: bool = False) -> tuple[Tensor, Outcome]:
    hidden, weight = (x.detach().clone().requires_grad_() for x in batch[:2])
    if not rounded:
        hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
    z = (hidden @ weight.T).to(dtype)
    y = (
        (batch.teacher_hidden @ batch.teacher_weight.T).to(dtype)
        if rounded
        else (batch.teacher_hidden.to(dtype) @ batch.teacher_weight.to(dtype).T)
    )
    counted, at = batch.target != -100, batch.target.clamp_min(0)[:, None]
    log_p = z.log_softmax(-1)
    apart, logprob = textbook(z, y, kind, **KINDS[kind]), log_p.gather(1, at)[:, 0]
    advantage = upstream(len(at), at.device).to(dtype)
    rows = -advantage * logprob + 0.1 * (log_p.exp() * log_p).sum(-1) + 0.7 * apart
    loss = torch.where(counted, rows, 0.0).sum() / counted.sum()
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    values = {name: torch.where(counted, x, 0.0).detach() for name, x in (("divergence", apart), ("logprob", logprob))}
    return loss.detach(), Outcome(values, (hidden.grad, weight.grad))


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_as_a_loss(kind: str, dtype: torch.dtype, device: torch.device):
    """In chunks of 16-bit numbers of both models, the last shorter; of logits where the kind asks for them."""
    batch = Batch.draw(device, dtype)
    loss, found = loss_outcome(batch, kind, 40000 if kind != "jsd" else 80000)
    (exact_loss, exact), (wide_loss, wide) = (loss_truth(batch, kind, x) for x in (torch.float64, torch.float32))
    assert_close_to_truth(loss[None], exact_loss[None], wide_loss[None], name="loss")
    for name, x in found.values.items():
        assert_close_to_truth(x, exact.values[name], wide.values[name], name=name)
    _, plain = loss_truth(batch, kind, torch.float32, rounded=True)
    for name, *x in zip(("hidden", "weight"), found.gradients, exact.gradients, plain.gradients, strict=True):
        assert_gradient_close_to_truth(*x, name=f"d_{name}")


SHARDED = [
    (kind, columns, loss) for kind, columns in (("reverse_kl", 301), ("forward_kl", 290)) for loss in (False, True)
]
"""Where the teacher has fewer columns, the second rank has to make the same sums of logits."""


def sharded(rank: int, world: int, batch: Batch) -> list[Outcome]:
    """One rank's calls with its columns of both heads."""
    # As at the top of this file, in a process of its own.
    warnings.simplefilter("ignore", RuntimeWarning)
    start, stop = [(0, 130), (130, 301)][rank]
    shard, found = ll.VocabShard(start, stop, torch.distributed.group.WORLD), []
    for kind, columns, as_a_loss in SHARDED:
        hidden = batch.hidden.detach().clone().requires_grad_()
        weight = batch.weight[start:stop].detach().clone().requires_grad_()
        logits = ll.Logits(hidden, weight, shard=shard)
        teacher = ll.Logits(batch.teacher_hidden, batch.teacher_weight[start : min(stop, columns)])
        given: dict[str, Any] = {"teacher": teacher, "backend": "triton", "memory": 60000}
        with Collectives() as sent:
            if as_a_loss:
                objective = ll.Objective(policy="none", divergence=Divergence(kind), divergence_coef=44.0)  # pyright: ignore[reportArgumentType]
                plan = ll.explain(ll.policy_loss, logits, batch.target, objective, **given)
                total, _, out = ll.policy_loss(logits, batch.target, objective, return_stats=True, **given)
            else:
                plan = ll.explain(ll.logprobs, logits, batch.target, divergence=kind, **given)
                out = ll.logprobs(logits, batch.target, divergence=kind, **given)  # pyright: ignore[reportArgumentType]
                assert out.divergence is not None
                total = out.divergence.sum()
        assert sent.sent == as_told(plan, "forward")
        total.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        assert out.divergence is not None
        found.append(Outcome({"divergence": out.divergence.detach()}, (hidden.grad, weight.grad)))
    return found


def test_shards_give_the_unsharded_answer(ranks):
    batch = Batch.draw("cpu")
    for (kind, columns, _), first, second in zip(SHARDED, *ranks(sharded, 2, batch), strict=True):
        assert torch.equal(first.values["divergence"], second.values["divergence"])
        found = []
        for dtype, rounded in ((torch.float64, False), (torch.float32, False), (torch.float32, True)):
            hidden, weight = (x.detach() if rounded else x.detach().to(dtype) for x in batch[:2])
            hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            y = batch.teacher_hidden.to(dtype) @ batch.teacher_weight.to(dtype).T
            y = torch.where(torch.arange(301) < columns, y, -torch.inf)
            values = torch.where(batch.target != -100, textbook((hidden @ weight.T).to(dtype), y, kind), 0.0)
            found.append((values.detach(), torch.autograd.grad(values.sum(), (hidden, weight))))
        (exact, truth), (wide, _), (_, plain) = found
        assert_close_to_truth(first.values["divergence"], exact, wide, name="divergence")
        joined = (first.gradients[0], torch.cat([first.gradients[1], second.gradients[1]]))
        for name, *x in zip(("hidden", "weight"), joined, truth, plain, strict=True):
            assert_gradient_close_to_truth(*x, name=f"d_{name}")


REFUSED: dict[str, tuple[dict, str]] = {
    "bias": ({"bias": True}, "a bias is added to logits"),
    "match": ({"match": "bfloat16"}, "match= rounds logits"),
    "canonical": ({"bits": "canonical"}, 'bits="canonical" fixes the products'),
    "scale": ({"head": ll.Head(scale=-1.0)}, "a head turns the order of its logits around"),
    "stats": ({"stats": ("top1",)}, "stats=, top_k= and ids= are read off logits beside a teacher"),
    "best": ({"stats": ("teacher_top1",)}, "teacher_top1 is read off logits"),
    "several": ({"several": True}, "rows have several teachers"),
    "given": ({"given": True}, "the teacher's logits exist"),
    "tokens": ({"at": True}, "the teacher has other ids or tokens than the student"),
    "part": ({"part": True, "divergence": "forward_kl"}, "the student has ids that the teacher has not"),
    "float32": ({"wide": True}, "of the teacher's operands operands are bfloat16 or float16, and not torch.float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_taken_says_so(name: str, device: torch.device):
    batch, (given, reason) = Batch.draw(device), REFUSED[name]
    given = dict(given)
    weight, hidden = batch.weight.clone().requires_grad_(), batch.hidden.clone().requires_grad_()
    bias = torch.zeros(301, device=device, dtype=batch.weight.dtype) if given.pop("bias", False) else None
    own = {key: given.pop(key) for key in ("match", "bits") if key in given}
    teacher = teacher_of(batch)
    if given.pop("several", False):
        which = torch.arange(45, device=device) % 2
        teacher = ll.Teacher.by_row([teacher, teacher_of(batch)], which)
    elif given.pop("given", False):
        teacher = ll.Teacher(batch.teacher_hidden @ batch.teacher_weight.T)
    elif given.pop("at", False):
        teacher = ll.Teacher(teacher.logits, at=torch.arange(45, device=device))
    elif given.pop("part", False):
        teacher = ll.Teacher(ll.Logits(batch.teacher_hidden, batch.teacher_weight[:290]))
    elif given.pop("wide", False):
        teacher = ll.Teacher(ll.Logits(batch.teacher_hidden.float(), batch.teacher_weight.float()))
    logits = ll.Logits(hidden, weight, bias=bias, **own)
    plan = ll.explain(ll.logprobs, logits, batch.target, teacher=teacher, backend="triton", **given)
    assert plan.forward is None
    assert f"Logits go through memory, because {reason}." in str(plan)
