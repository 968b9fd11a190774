"""Infinities, NaN, ignored rows and impossible targets: each has one defined result, in its own row only."""

from __future__ import annotations

import math

import pytest
import torch
from calls import from_hidden
from truth import truth

import logitless as ll
from logitless.backends import load
from logitless.backends.contract import Problem
from logitless.softmax import SKIP, Coefficients, Normaliser, merge

BACKENDS = ("reference", "tiled", "triton")
INF = math.inf


def score(logits, target, backend, **options):
    leaf = logits.clone().requires_grad_()
    out = ll.logprobs(leaf, target, entropy="grad", backend=backend, **options)
    (out.logprob.sum() + out.entropy.sum() + out.log_z.sum()).backward()
    return out, leaf.grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_minus_infinity_is_probability_zero(backend: str, device: torch.device):
    logits = torch.tensor([[0.0, -INF, 1.0, -INF, 2.0]], device=device)
    out, grad = score(logits, torch.tensor([2], device=device), backend)
    p = torch.softmax(torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64), 0)
    assert out.logprob.item() == pytest.approx(p[1].log().item(), abs=1e-6)
    assert out.entropy.item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-6)
    assert grad[0, [1, 3]].tolist() == [0.0, 0.0]
    assert grad.isfinite().all()


@pytest.mark.parametrize("vocab", [5, 20000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_blocks_of_minus_infinity(backend: str, vocab: int, device: torch.device):
    """More -inf than one block or tile holds, before the first finite logit."""
    logits = torch.full((2, vocab), -INF, device=device)
    logits[0, -1], logits[1, -2:] = 3.0, torch.tensor([-50.0, -50.0], device=device)
    out, grad = score(logits, torch.full((2,), vocab - 1, device=device), backend, memory=4096)
    assert out.logprob.tolist() == pytest.approx([0.0, -math.log(2)], abs=1e-6)
    assert out.entropy.tolist() == pytest.approx([0.0, math.log(2)], abs=1e-6)
    assert out.log_z.tolist() == pytest.approx([3.0, -50 + math.log(2)], abs=1e-5)
    assert grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_target_at_minus_infinity(backend: str, device: torch.device):
    """Probability zero: log-prob -inf, as log_softmax says, and that row's gradient as log_softmax's."""
    logits = torch.tensor([[0.0, -INF, 1.0]], device=device).requires_grad_()
    out = ll.logprobs(logits, torch.tensor([1], device=device), backend=backend)
    out.logprob.sum().backward()
    assert out.logprob.item() == -INF
    p = torch.softmax(torch.tensor([0.0, 1.0]), 0)
    assert logits.grad[0].tolist() == pytest.approx([-p[0].item(), 1.0, -p[1].item()], abs=1e-6)


# NumPy, which runs the kernels in Triton's interpreter, reports the inf - inf that makes these rows NaN.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", ["all -inf", "nan", "+inf"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_distribution_are_nan_and_alone(backend: str, bad: str, device: torch.device):
    logits = torch.randn(3, 40, device=device)
    logits[1] = {"all -inf": -INF, "nan": 0.0, "+inf": 0.0}[bad]
    if bad != "all -inf":
        logits[1, 17] = math.nan if bad == "nan" else INF
    target = torch.tensor([3, 4, 5], device=device)
    out, grad = score(logits, target, backend)
    alone, alone_grad = score(logits[[0, 2]], target[[0, 2]], backend)
    assert out.logprob[1].isnan()
    assert out.entropy[1].isnan()
    for mine, clean in zip(out[:3], alone[:3], strict=True):
        assert torch.equal(mine[[0, 2]], clean)
    assert torch.equal(grad[[0, 2]], alone_grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_minus_100_is_ignored_whatever_the_row_holds(backend: str, device: torch.device):
    logits = torch.randn(4, 40, device=device)
    logits[1], logits[3] = math.nan, -INF
    target = torch.tensor([3, -100, 5, -100], device=device)
    out, grad = score(logits, target, backend, head=ll.Head(temperature=torch.tensor([1.0, 0.5, 2.0, 1.0])))
    for x in out[:3]:
        assert x[[1, 3]].tolist() == [0.0, 0.0]
        assert x[[0, 2]].isfinite().all()
    assert (grad[[1, 3]] == 0).all()
    assert grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_nobody_could_check_make_their_own_row_nan(backend: str, monkeypatch, device: torch.device):
    """On an accelerator targets and temperatures are not inspected. Skipping the host's checks shows what comes out."""
    monkeypatch.setattr("logitless.call.checks.check_targets", lambda *_: False)
    monkeypatch.setattr("logitless.spec._check_temperature_tensor", lambda _: None)
    logits = torch.randn(6, 40, device=device)
    target = torch.tensor([3, 40, 5, -7, 2, 1], device=device)
    head = ll.Head(temperature=torch.tensor([1.0, 1.0, 0.0, 1.0, -2.0, 1.0], device=device))
    out, grad = score(logits, target, backend, head=head)
    for x in out[:3]:
        assert x.isnan().tolist() == [False, True, True, True, True, False]
    assert grad[[0, 5]].isfinite().all()
    assert grad[[1, 2, 3, 4]].isnan().any(-1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_skipped_rows_are_zeroed_where_the_gradient_goes_over_the_logits(backend: str, device: torch.device):
    """Products read all rows of a chunk: what a skipped one held must not be left there."""
    logits = torch.randn(4, 300, device=device)
    logits[1], logits[3] = math.nan, INF
    column = torch.tensor([3, SKIP, 299, SKIP], device=device)
    ones = torch.ones(4, device=device)
    problem = Problem(logits, None, column, ones, 0.0, 300, True, 1 << 14)
    coef = Coefficients(ones, ones, ones)
    out = load(backend).gradient_over(problem, Normaliser(ones, ones), coef, torch.bfloat16)
    assert (out[[1, 3]] == 0).all()
    assert out[[0, 2]].isfinite().all()
    assert (out[[0, 2]] != 0).any(1).all()


# The interpreter's own arithmetic warns of lanes past the last column, whose exponential is not used.
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab", [5, 5000])
def test_nothing_but_minus_infinity_before_logits_near_minus_300(backend: str, vocab: int, device: torch.device):
    """Whatever stands in for the maximum of nothing must not outrank what comes: e^-300 is 0 in float32."""
    logits = torch.full((3, vocab), -INF, device=device)
    logits[:, -2:] = torch.tensor([[-300.0, -301.0], [-88.0, -90.0], [-1000.0, -1000.0]], device=device)
    target = torch.full((3,), vocab - 1, device=device)
    out, grad = score(logits, target, backend, memory=64)
    exact = logits.double().cpu()[:, -2:]
    assert out.logprob.tolist() == pytest.approx(torch.log_softmax(exact, 1)[:, 1].tolist(), abs=1e-6)
    assert out.log_z.tolist() == pytest.approx(torch.logsumexp(exact, 1).tolist(), rel=1e-6)
    assert grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("route", ["frozen", "recompute", "keep"])
def test_tiles_of_nothing_but_minus_infinity_before_logits_near_minus_300(backend, route, monkeypatch, device):
    """The same from hidden states, where a masking bias fills the first tiles, and a reference runs through them."""
    monkeypatch.setattr("logitless.route.plan.WORK", 4000)
    hidden, weight = torch.randn(3, 4).bfloat16(), torch.randn(600, 4).bfloat16()
    bias = torch.full((600,), -300.0)
    bias[:500] = -INF
    leaf = hidden.to(device, copy=True).requires_grad_()
    trained = weight.to(device, copy=True).requires_grad_(route != "frozen")
    target, options = torch.tensor([500, 550, 599]), {"memory": "1MiB" if route == "keep" else 4000, "backend": backend}
    plan = ll.explain(ll.logprobs, ll.Logits(leaf, trained, bias=bias.to(device)), target.to(device), **options)
    assert plan.kind == route
    assert plan.forward.columns <= 500
    out = from_hidden(leaf, trained, target.to(device), bias=bias.to(device), **options)
    out.logprob.sum().backward()
    exact = hidden.double().requires_grad_()
    right = truth(exact @ weight.double().T + bias.double(), torch.arange(3), target)
    right.logprob.sum().backward()
    assert out.logprob.tolist() == pytest.approx(right.logprob.tolist(), abs=1e-4)
    # Two roundings to bfloat16, of 2^-9 each.
    assert (leaf.grad.double().cpu() - exact.grad).norm() <= 4e-3 * exact.grad.norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_hot_row(backend: str, device: torch.device):
    logits = torch.tensor([[0.0, 200.0, 0.0]], device=device)
    out, grad = score(logits, torch.tensor([1], device=device), backend)
    assert out.logprob.item() == 0.0
    assert out.entropy.item() == 0.0
    assert grad[0].tolist() == pytest.approx([0.0, 1.0, 0.0], abs=1e-6)


def test_parts_of_nothing_but_minus_infinity_have_no_say_however_often_they_are_merged():
    """Tiles of a shard without a finite logit, and then another shard's logits near -300."""
    nothing = torch.tensor([-INF, 0.0, 0.0, math.nan])[:, None]
    far = torch.tensor([-300.0, 1.5, -0.5, -300.0])[:, None]
    shard = merge(torch.stack([nothing, nothing]))
    assert torch.equal(merge(torch.stack([shard, far])), far)


@pytest.mark.parametrize("source", ["logits", "hidden"])
def test_a_temperature_of_no_dimensions_is_one_number(source: str, device: torch.device):
    torch.manual_seed(4)
    hidden, weight = torch.randn(7, 5, device=device), torch.randn(63, 5, device=device)
    target = torch.randint(63, (7,), device=device)
    found = []
    for temperature in (0.7, torch.tensor(0.7, device=device)):
        leaf = (hidden if source == "hidden" else hidden @ weight.T).clone().requires_grad_()
        logits = ll.Logits(leaf, weight) if source == "hidden" else leaf
        teacher = ll.Teacher(hidden @ weight.T + 1, head=ll.Head(temperature=temperature))
        head = ll.Head(temperature=temperature)
        out = ll.logprobs(logits, target, head=head, entropy="grad", teacher=teacher, divergence="reverse_kl")
        (out.logprob + out.entropy + out.divergence).sum().backward()
        found.append((out.logprob, out.entropy, out.divergence, leaf.grad))
    for number, tensor in zip(*found, strict=True):
        torch.testing.assert_close(tensor, number, rtol=1e-6, atol=1e-6)
