"""Which way a call goes, what that costs in products (counted), and that the answer is the same either way."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
from calls import from_hidden, loss_from_hidden
from close import assert_close_to_truth
from torch.utils.flop_counter import FlopCounterMode
from truth import truth

import logitless as ll
from logitless.call import Asked
from logitless.machine import Tiles
from logitless.operands import Linear
from logitless.route import plan as plans

T, V, D = 96, 1000, 32


def make(dtype: torch.dtype, frozen: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, weight = torch.randn(T, D).to(dtype).requires_grad_(), (torch.randn(V, D) / 4).to(dtype)
    return hidden, weight.requires_grad_(not frozen), torch.randint(V, (T,))


def products(hidden, weight, target, entropy: str, **options) -> float:
    """Matrix products of forward + backward, in units of hidden @ weight.T."""
    with FlopCounterMode(display=False) as counter:
        out = from_hidden(hidden, weight, target, entropy=entropy, **options)
        loss = out.logprob.sum() + (out.entropy.sum() if entropy == "grad" else 0.0)
        if loss.requires_grad:
            loss.backward()
    return counter.get_total_flops() / (2 * T * V * D)


@pytest.fixture
def small_work(monkeypatch):
    """Budgets of test size: whatever exceeds 64 KiB may keep exponentials."""
    monkeypatch.setattr(plans, "WORK", 64 << 10)


def test_counted_products(small_work):
    exponentials = T * V * 2
    trained, frozen = make(torch.bfloat16), make(torch.bfloat16, frozen=True)
    with torch.no_grad():
        assert products(*trained, "value") == pytest.approx(1.0)
    assert products(*frozen, "value", memory=64 << 10) == pytest.approx(2.0)
    assert products(*frozen, "grad", memory=64 << 10) == pytest.approx(3.0)
    assert products(*trained, "value", memory=64 << 10) == pytest.approx(4.0)
    assert products(*trained, "grad", memory=2 * exponentials) == pytest.approx(3.0)
    some = products(*trained, "grad", memory=(64 << 10) + exponentials // 2)
    assert 3.0 < some < 4.0


@pytest.mark.parametrize(("callee", "options"), [(ll.logprobs, Asked), (ll.Logits.__new__, Linear)])
def test_options_are_declared_once(callee, options: type):
    """The keyword arguments and defaults of a call are the fields of the record that they go into."""
    parameters = inspect.signature(callee).parameters.values()
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert {f.name: f.default for f in dataclasses.fields(options)} == keywords


@pytest.mark.parametrize("frozen", [False, True])
def test_the_plan_can_be_asked_for(small_work, frozen: bool):
    hidden, weight, target = make(torch.bfloat16, frozen)
    plan = ll.explain(ll.logprobs, ll.Logits(hidden, weight), target, entropy="value", memory=64 << 10)
    assert plan.kind == ("frozen" if frozen else "recompute")
    assert ("2 matrix products" if frozen else "4 matrix products") in str(plan)
    kept = ll.explain(ll.logprobs, ll.Logits(hidden, weight), target, entropy="grad", memory="1MiB")
    assert kept.kind == ("keep")
    assert kept.kept_rows == T
    assert "all 96 rows" in str(kept)
    with torch.no_grad():
        assert ll.explain(ll.logprobs, ll.Logits(hidden, weight), target).kind == "forward"
    assert ll.explain(ll.logprobs, ll.Logits(hidden.detach(), weight.detach()), target).kind == "forward"


@pytest.mark.parametrize("backend", ["reference", "tiled", "triton"])
@pytest.mark.parametrize("budget", ["half", "all"])
def test_kept_exponentials_give_the_recomputed_gradient(monkeypatch, backend: str, budget: str, device: torch.device):
    """Within the rounding of 16-bit probabilities, target elements of confident rows included."""
    interpreted = backend == "triton" and device.type == "cpu"
    # The interpreter is slow, row by row.
    num, work = (T // 4, 16 << 10) if interpreted else (T, 64 << 10)
    monkeypatch.setattr(plans, "WORK", work)
    hidden, weight, target = (x.detach().to(device) for x in make(torch.bfloat16))
    hidden, weight, target = hidden[:num].clone().requires_grad_(), weight.requires_grad_(), target[:num]
    with torch.no_grad():
        # Every other target nearly certain: p = 0.99 and more.
        weight[target[::2]] += 1.5 * hidden[::2].sign()
    target[5] = -100
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    upstream = torch.randn(2, num)
    memory = {"half": work + num * V, "all": 16 * work}[budget]
    kept_rows = ll.explain(
        ll.logprobs, ll.Logits(hidden, weight), target, entropy="grad", memory=memory, backend=backend
    ).kept_rows
    assert 0 < kept_rows < num if budget == "half" else kept_rows == num
    out = ll.logprobs(ll.Logits(hidden, weight), target, entropy="grad", memory=memory, backend=backend)
    right = truth(exact[0] @ exact[1].T, torch.arange(num, device=device), target)
    for results in (out, right):
        torch.autograd.backward(results[:2], [g.to(r) for g, r in zip(upstream, results[:2], strict=True)])
    for mine, theirs in zip((hidden, weight), exact, strict=True):
        # Two roundings of 2^-9 each.
        assert (mine.grad.double() - theirs.grad).norm() <= 4e-3 * theirs.grad.norm()


def test_a_softcap_stores_no_exponentials(small_work):
    """Its slope cannot be told from them: the gradient would be that of a head without a cap."""
    hidden, weight, target = make(torch.bfloat16)
    options = {"head": ll.Head(softcap=3.0), "memory": "1MiB"}
    assert ll.explain(ll.logprobs, ll.Logits(hidden, weight), target, **options).kept_rows == 0
    from_hidden(hidden, weight, target, **options).logprob.sum().backward()
    exact = hidden.detach().double().requires_grad_()
    truth(exact @ weight.detach().double().T, torch.arange(T), target, softcap=3.0).logprob.sum().backward()
    assert (hidden.grad.double() - exact.grad).norm() <= 4e-3 * exact.grad.norm()


@pytest.mark.parametrize("softcap", [None, 8.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_frozen_head(backend: str, dtype: torch.dtype, softcap: float | None):
    """Row by row, so that a confident row (tiny gradient) is not hidden behind the others."""
    hidden, weight, target = make(dtype, frozen=True)
    weight[target[::2]] += 1.5 * hidden.detach()[::2].sign()
    target[5] = -100
    head = {"temperature": torch.linspace(0.6, 1.4, T), "softcap": softcap, "vocab_size": V - 1}
    target.clamp_(max=V - 2)
    exact = hidden.detach().double().requires_grad_()
    upstream = torch.randn(2, T, dtype=torch.float64)
    out = ll.logprobs(ll.Logits(hidden, weight), target, head=ll.Head(**head), memory=20_000, backend=backend)
    right = truth(exact @ weight.double().T, torch.arange(T), target, **head)
    torch.autograd.backward([out.logprob, out.log_z], [g.to(out.logprob) for g in upstream], retain_graph=True)
    first = hidden.grad.clone()
    torch.autograd.backward([out.logprob, out.log_z], [g.to(out.logprob) for g in upstream])
    torch.autograd.backward([right.logprob, right.log_z], list(upstream))
    assert torch.equal(hidden.grad, 2 * first)
    assert_close_to_truth(out.logprob, right.logprob, out.logprob.double() + 1e-5)
    error = (first.double() - exact.grad).norm(dim=1) / exact.grad.norm(dim=1).clamp_min(1e-6)
    assert error.max() <= {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 1.2e-2}[dtype]
    assert (first[5] == 0).all()


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("backend", ["reference", "tiled", "triton"])
def test_a_reference_that_must_move(backend: str, descending: bool, device: torch.device):
    """Columns in order of logit: every tile exceeds the one before, or falls below it, by up to 100."""
    hidden, target = torch.ones(3, 4, device=device, requires_grad=True), torch.tensor([0, 300, 599])
    weight = (torch.arange(600.0) / 4)[:, None].expand(600, 4)
    weight = weight.flip(0) if descending else weight.contiguous()
    out = ll.logprobs(ll.Logits(hidden, weight.to(device)), target.to(device), memory=2000, backend=backend)
    out.logprob.sum().backward()
    exact = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    right = truth(exact @ weight.double().T, torch.arange(3), target).logprob
    right.sum().backward()
    assert torch.allclose(out.logprob.double().cpu(), right, rtol=1e-6)
    assert torch.allclose(hidden.grad.double().cpu(), exact.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
def test_batch_invariant_bits(frozen: bool):
    """A token's results do not depend on how many or which others come with it."""
    hidden, weight, target = make(torch.float32, frozen)
    full = ll.logprobs(ll.Logits(hidden, weight, bits="canonical"), target, entropy="value")
    for index in (torch.tensor([7]), torch.arange(40, 77), torch.randperm(T)):
        some = ll.logprobs(ll.Logits(hidden, weight, bits="canonical"), (index, target[index]), entropy="value")
        for whole, part in zip(full[:3], some[:3], strict=True):
            assert torch.equal(whole[index], part)
    (grad,) = torch.autograd.grad(full.logprob.sum(), hidden)
    (plain,) = torch.autograd.grad(ll.logprobs(ll.Logits(hidden, weight), target).logprob.sum(), hidden)
    assert torch.allclose(grad, plain, rtol=1e-5, atol=1e-5)


def test_batch_invariant_bits_with_memory_to_spare(small_work):
    """Stored exponentials would cut forward's columns as backward's are, whose number depends on the batch."""
    hidden, weight, target = make(torch.bfloat16)
    options = {"entropy": "value", "bits": "canonical", "memory": (64 << 10) + 4 * T * V}
    assert ll.explain(from_hidden, hidden, weight, target, **options).kept_rows == 0
    full = from_hidden(hidden, weight, target, **options)
    for index in (torch.tensor([7]), torch.arange(40, 77)):
        some = from_hidden(hidden, weight, (index, target[index]), **options)
        assert all(torch.equal(whole[index], part) for whole, part in zip(full[:3], some[:3], strict=True))


# Accumulators.


def off_by(route: str, slabs: int, monkeypatch) -> float:
    """Relative error of d_hidden to float64 where the columns are cut into so many slabs."""
    rows, vocab, width = 48, 2048, 16
    torch.manual_seed(1)
    hidden, weight = torch.randn(rows, width).bfloat16(), (torch.randn(vocab, width) / 4).bfloat16()
    target, advantage = torch.randint(vocab, (rows,)), torch.ones(rows)
    exact, leaf = hidden.double().requires_grad_(), hidden.clone().requires_grad_()
    trained = weight.clone().requires_grad_(route != "frozen")
    columns = vocab // slabs
    tiles = Tiles(rows, columns, rows, 1 << 20, slabs=route != "blocks")
    for name in ("forward_tiles", "backward_tiles"):
        monkeypatch.setattr(plans, name, lambda *_: tiles)
    monkeypatch.setattr("logitless.route.loss.SLAB", columns)
    if route == "one pass":
        fields = {"old_logprob": "current", "advantage": advantage}
        (rows * loss_from_hidden(leaf, trained, target, ll.Objective(), **fields)[0]).backward()
        leaf.grad.neg_()
    else:
        ll.logprobs(ll.Logits(leaf, trained), target).logprob.sum().backward()
    truth(exact @ weight.double().T, torch.arange(rows), target).logprob.sum().backward()
    return float((leaf.grad.double() - exact.grad).norm() / exact.grad.norm())


@pytest.mark.parametrize("route", ["slabs", "blocks", "frozen", "one pass"])
def test_errors_do_not_grow_with_the_number_of_slabs(route: str, monkeypatch):
    """d_hidden adds up in float32, rounded to 16 bits once, whether there is one slab or a hundred."""
    once, often = off_by(route, 1, monkeypatch), off_by(route, 128, monkeypatch)
    assert 1e-4 < once < 4e-3
    assert often <= 1.1 * once
