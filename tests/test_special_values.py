"""Infinities, NaN, ignored rows and impossible targets: each has one defined result, in its own row only."""

from __future__ import annotations

import math

import pytest
import torch

import logitless as ll

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
    for mine, clean in zip(out, alone, strict=True):
        assert torch.equal(mine[[0, 2]], clean)
    assert torch.equal(grad[[0, 2]], alone_grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_minus_100_is_ignored_whatever_the_row_holds(backend: str, device: torch.device):
    logits = torch.randn(4, 40, device=device)
    logits[1], logits[3] = math.nan, -INF
    target = torch.tensor([3, -100, 5, -100], device=device)
    out, grad = score(logits, target, backend, head=ll.Head(temperature=torch.tensor([1.0, 0.5, 2.0, 1.0])))
    for x in out:
        assert x[[1, 3]].tolist() == [0.0, 0.0]
        assert x[[0, 2]].isfinite().all()
    assert (grad[[1, 3]] == 0).all()
    assert grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_nobody_could_check_make_their_own_row_nan(backend: str, monkeypatch, device: torch.device):
    """On an accelerator targets and temperatures are not inspected. Skipping the host's checks shows what comes out."""
    monkeypatch.setattr("logitless.call.check_targets", lambda *_: None)
    monkeypatch.setattr("logitless.spec._check_temperature_tensor", lambda _: None)
    logits = torch.randn(6, 40, device=device)
    target = torch.tensor([3, 40, 5, -7, 2, 1], device=device)
    head = ll.Head(temperature=torch.tensor([1.0, 1.0, 0.0, 1.0, -2.0, 1.0], device=device))
    out, grad = score(logits, target, backend, head=head)
    for x in out:
        assert x.isnan().tolist() == [False, True, True, True, True, False]
    assert grad[[0, 5]].isfinite().all()
    assert grad[[1, 2, 3, 4]].isnan().any(-1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_hot_row(backend: str, device: torch.device):
    logits = torch.tensor([[0.0, 200.0, 0.0]], device=device)
    out, grad = score(logits, torch.tensor([1], device=device), backend)
    assert out.logprob.item() == 0.0
    assert out.entropy.item() == 0.0
    assert grad[0].tolist() == pytest.approx([0.0, 1.0, 0.0], abs=1e-6)
