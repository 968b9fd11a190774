"""AReaL's functions with and without ours, on checkouts of AReaL (see hosts.py), alone and over real ranks."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import checkout, load, takes
from parity import run
from torch import Tensor

import logitless
from logitless import LogitlessError

pytestmark = pytest.mark.skipif(checkout("areal") is None, reason="LOGITLESS_HOSTS names no checkout of AReaL")

MODULE = "areal.utils.functional.vocab_parallel"
V, N = 506, 41


def areal() -> Any:
    load("areal", MODULE)
    return sys.modules[MODULE]


def truth(z: Tensor, labels: Tensor, temperature: float) -> list[Tensor]:
    log_p = (z / temperature).log_softmax(-1)
    return [log_p.gather(-1, labels[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)]


def check(module: Any, dtype: torch.dtype, temperature: float, group: Any, both: bool) -> None:
    torch.manual_seed(3)
    whole, labels = (torch.randn(N, V) * 3).to(dtype), torch.randint(V, (N,))
    upstream = [torch.randn(N) for _ in range(2 if both else 1)]
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    cut = lambda x: x.chunk(size, -1)[rank].contiguous()  # noqa: E731
    name = "gather_logprobs_entropy" if both else "gather_logprobs"
    function = lambda z: getattr(module, name)(z, labels, temperature, group, 16)  # noqa: E731
    theirs, their_gradients = run(function, [cut(whole)], upstream)
    logitless.install("areal", audit=4)
    ours, our_gradients = run(function, [cut(whole)], upstream)
    report = logitless.status().hosts[0]
    logitless.uninstall("areal")
    assert (report.calls, report.passed_on) == (1, 0)
    assert report.audit.passed
    wide = [x.double() for x in upstream]
    exact, gradients = run(lambda z: truth(z, labels, temperature)[: len(upstream)], [whole.double()], wide)
    for mine, right, other in zip(ours, exact, theirs, strict=True):
        assert mine.dtype == other.dtype == torch.float32
        assert_close_to_truth(mine, right, other)
    assert our_gradients[0].dtype == dtype
    assert_gradient_close_to_truth(our_gradients[0], cut(gradients[0]), their_gradients[0])


@pytest.mark.parametrize("both", [False, True], ids=["log-probs", "entropy"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_alone(dtype, temperature, both):
    check(areal(), dtype, temperature, None, both)


def run_ranks(rank: int, world: int) -> None:
    for both in (False, True):
        check(areal(), torch.float32, 0.7, dist.group.WORLD, both)


def test_over_ranks(ranks):
    ranks(run_ranks, 2, timeout=120)


def test_a_temperature_in_a_tensor():
    """As AReaL, whose division takes one, also for a whole batch."""
    module = areal()
    logits, labels = torch.randn(5, V), torch.randint(V, (5,))
    logitless.install("areal", audit=2)
    wanted = module.gather_logprobs_entropy(logits, labels, 0.5)
    found = module.gather_logprobs_entropy(logits, labels, torch.tensor(0.5))
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert torch.equal(module.gather_logprobs(logits, labels, torch.tensor(0.5)), wanted[0])
    assert logitless.status().hosts[0].audit.passed


def test_logits_whose_memory_is_reused():
    """``enable_chunked_logits`` of AReaL's main: on a GPU its own function writes over float32 logits, too."""
    module = areal()
    if not takes(module.gather_logprobs_entropy, "reuse_logits"):
        pytest.skip("this AReaL has no reuse_logits")
    torch.manual_seed(5)
    leaf, labels, upstream = torch.randn(N, V, requires_grad=True), torch.randint(V, (1, N)), torch.randn(1, N)
    logitless.install("areal", audit=4)
    # Megatron's pack is a view of its rows.
    made = leaf * 1.0
    logprob, entropy = module.gather_logprobs_entropy(made[None], labels, 0.7, None, 16, reuse_logits=True)
    assert (logprob.shape, entropy.shape, entropy.requires_grad) == ((1, N), (1, N), False)
    logprob.backward(upstream)
    report = logitless.status().hosts[0]
    assert (report.passed_on, report.audit.passed) == (0, True)
    assert torch.equal(made.detach(), leaf.grad)
    wide = [upstream[0].double()]
    exact, (gradient,) = run(lambda z: truth(z, labels[0], 0.7)[0], [leaf.detach().double()], wide)
    plain, (other,) = run(lambda z: truth(z, labels[0], 0.7)[0], [leaf.detach()], [upstream[0]])
    assert_close_to_truth(logprob.detach()[0], exact[0], plain[0])
    assert_gradient_close_to_truth(leaf.grad, gradient, other)
    # A leaf's memory is its owner's.
    before = leaf.detach().clone()
    _, entropy = module.gather_logprobs_entropy(leaf, labels[0], reuse_logits=True)
    assert entropy.requires_grad
    entropy.sum().backward()
    assert torch.equal(leaf.detach(), before)


def test_names_held_by_value_and_errors():
    module = areal()
    package = sys.modules["areal.utils.functional"]
    # As its __init__ does, for the engines.
    before = package.gather_logprobs = module.gather_logprobs
    logitless.install("areal", entropy_grad=False)
    assert package.gather_logprobs is module.gather_logprobs is not before
    logits = torch.randn(5, V, requires_grad=True)
    assert not module.gather_logprobs_entropy(logits, torch.zeros(5, dtype=torch.int64))[1].requires_grad
    with pytest.raises(LogitlessError, match=r"gather_logprobs: labels must be \[5\] but is \[4\]"):
        module.gather_logprobs(logits, torch.zeros(4, dtype=torch.int64))
    logitless.uninstall("areal")
    assert package.gather_logprobs is module.gather_logprobs is before
