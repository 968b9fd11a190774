"""``entropy=None | "value" | "grad"``: both sides of the gate, in values, graphs and saved tensors."""

from __future__ import annotations

import pytest
import torch
from close import assert_gradient_close_to_truth
from torch.autograd.graph import saved_tensors_hooks
from truth import float64_leaf, plain, truth

import logitless as ll

BACKENDS = ("reference", "tiled", "triton")


def make(device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(7, 507, device=device).requires_grad_(), torch.randint(507, (7,), device=device)


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probs_do_not_depend_on_the_gate(backend: str, device: torch.device):
    logits, target = make(device)
    results = {mode: ll.logprobs(logits, target, entropy=mode, backend=backend) for mode in (None, "value", "grad")}
    gradients = {mode: torch.autograd.grad(out.logprob.sum(), logits)[0] for mode, out in results.items()}
    assert results[None].entropy is None
    assert torch.equal(results["value"].entropy, results["grad"].entropy)
    for mode in ("value", "grad"):
        assert torch.equal(results[None].logprob, results[mode].logprob)
        assert torch.equal(results[None].log_z, results[mode].log_z)
        assert torch.equal(gradients[None], gradients[mode])


@pytest.mark.parametrize("backend", BACKENDS)
def test_value_has_no_graph_and_grad_has_one(backend: str, device: torch.device):
    logits, target = make(device)
    value = ll.logprobs(logits, target, entropy="value", backend=backend)
    assert value.entropy.grad_fn is None
    assert not value.entropy.requires_grad
    assert value.logprob.requires_grad
    grad = ll.logprobs(logits, target, entropy="grad", backend=backend)
    assert grad.entropy.grad_fn is not None
    (d_logits,) = torch.autograd.grad(grad.entropy.sum(), logits)
    assert (d_logits.abs().sum(-1) > 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_value_saves_nothing_that_none_does_not(backend: str, device: torch.device):
    logits, target = make(device)
    saved: dict[str | None, list[tuple[int, ...]]] = {}
    for mode in (None, "value", "grad"):
        saved[mode] = []

        def keep(x: torch.Tensor, into: list = saved[mode]) -> torch.Tensor:
            into.append(tuple(x.shape))
            return x

        with saved_tensors_hooks(keep, lambda x: x):
            ll.logprobs(logits, target, entropy=mode, backend=backend)
    assert saved["value"] == saved[None]
    assert sorted(saved["grad"]) == sorted([*saved[None], (7,)])
    assert saved[None].count((7, 507)) == 1


def test_no_graph_without_a_gradient_to_compute(device: torch.device):
    logits, target = make(device)
    with torch.no_grad():
        assert not ll.logprobs(logits, target, entropy="grad").logprob.requires_grad
    assert not ll.logprobs(logits.detach(), target, entropy="grad").entropy.requires_grad


@pytest.mark.parametrize("which", ["logprob", "entropy", "log_z"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_output_may_be_the_only_one_used(backend: str, which: str, device: torch.device):
    """The upstream gradients of the other two are None, not zeros."""
    logits, target = make(device)
    exact, usual = float64_leaf(logits).cpu(), logits.detach().cpu().requires_grad_()
    out = ll.logprobs(logits, target, entropy="grad", backend=backend)
    rows = torch.arange(7), target.cpu()
    calls = ((logits, out), (exact, truth(exact, *rows)), (usual, plain(usual, *rows)))
    mine, right, theirs = (torch.autograd.grad(getattr(result, which).sum(), leaf)[0] for leaf, result in calls)
    assert_gradient_close_to_truth(mine, right, theirs)
