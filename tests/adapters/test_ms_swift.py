"""ms-swift's Megatron log-probs with and without ours, on a double or on ms-swift itself (see hosts.py)."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import load, put_first
from torch import Tensor

import logitless
from logitless import LogitlessError

DOUBLE = not put_first("ms_swift")
if DOUBLE:
    sys.path.append(str(Path(__file__).parent / "doubles"))

pytestmark = pytest.mark.skipif(not DOUBLE and not find_spec("megatron"), reason="megatron-core is not installed")

B, S, V = 2, 17, 210
NAME = "compute_logps_and_entropy_from_logits"


def swift(group: Any = None) -> Any:
    """The module, with this group as Megatron's."""
    name = "swift.megatron.trainers.vocab_parallel_utils"
    module = importlib.import_module(name) if DOUBLE else load("ms_swift")[0]
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    module.mpu = SimpleNamespace(
        get_tensor_model_parallel_group=lambda: group,
        get_tensor_model_parallel_rank=lambda: rank,
        get_tensor_model_parallel_world_size=lambda: size,
    )
    if is_repaired(module):
        vars(sys.modules["megatron.core.tensor_parallel.cross_entropy"]).update(vars(module.mpu))
    return module


def is_repaired(module: Any) -> bool:
    """Whether this is 4.6 or newer, which takes its log-probs from Megatron's cross entropy."""
    return hasattr(module, "tensor_parallel")


@pytest.fixture
def alone():
    """Megatron's cross entropy reduces over its group, also if that is one rank's."""
    if DOUBLE:
        yield None
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    labels = torch.randint(V, (B, S))
    labels[:, 3::6] = -100
    return (torch.randn(B, S, V) * 3).to(dtype), labels, torch.randn(2, B, S)


def plain(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    log_p = z.log_softmax(-1)
    scores = log_p.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    return torch.where(labels == -100, 0.0, scores), -(log_p.exp() * log_p).sum(-1)


def graded(function: Any, logits: Tensor, upstream: Tensor, entropy_grad: bool = False) -> list[Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    logprob, entropy = function(leaf)
    results = [logprob, entropy] if entropy_grad else [logprob]
    (gradient,) = torch.autograd.grad(results, leaf, [g.to(x.dtype) for g, x in zip(upstream, results, strict=False)])
    return [gradient, logprob.detach(), *([] if entropy is None else [entropy.detach()])]


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_alone(alone, dtype, entropy_grad):
    module = swift(alone)
    logits, labels, upstream = batch(dtype)
    run = lambda z: getattr(module, NAME)(z, labels, True, 4)  # noqa: E731
    theirs = graded(run, logits, upstream, entropy_grad)
    logitless.install("ms_swift", audit=4, entropy_grad=entropy_grad)
    ours = graded(run, logits, upstream, entropy_grad)
    (report,) = logitless.status().hosts
    assert (report.calls, report.passed_on) == (1, 0)
    assert report.audit.passed
    assert [x.dtype for x in ours] == [x.dtype for x in theirs] == [dtype, torch.float32, dtype]
    exact = graded(lambda z: plain(z, labels), logits.double(), upstream, entropy_grad)
    assert_gradient_close_to_truth(ours[0], exact[0], theirs[0])
    assert_close_to_truth(ours[1], exact[1], theirs[1])
    # One rounding to the dtype of the logits is not an error of the value.
    assert_close_to_truth(ours[2].float(), exact[2].to(dtype).double(), theirs[2])
    if not entropy_grad:
        # ms-swift has a gradient of entropy: one that is lost is an error, not silence.
        with pytest.raises(LogitlessError, match=r'install\("ms_swift", entropy_grad=True\)'):
            sum(x.sum() for x in run(logits.requires_grad_())).backward()
    assert not run(logits.detach())[1].requires_grad
    assert getattr(module, NAME)(logits, labels)[1] is None


def run_sharded(rank: int, world: int) -> None:
    """Values as ms-swift's; the gradient is that of whole rows, which ms-swift's own is from 4.6 on."""
    module = swift(dist.group.WORLD)
    logits, labels, upstream = batch()
    here = lambda x: x.chunk(2, -1)[rank]  # noqa: E731
    run = lambda z: getattr(module, NAME)(z, labels, True)  # noqa: E731
    with torch.no_grad():
        theirs = run(here(logits).clone())
    logitless.install("ms_swift", audit=2)
    ours = graded(run, here(logits), upstream)
    report = logitless.status().hosts[0]
    assert report.audit.passed
    logitless.uninstall("ms_swift")
    exact, float32 = (graded(lambda z: plain(z, labels), x, upstream) for x in (logits.double(), logits))
    assert_gradient_close_to_truth(ours[0], here(exact[0]), here(float32[0]))
    for mine, right, other, own in zip(ours[1:], exact[1:], theirs, float32[1:], strict=True):
        assert_close_to_truth(mine, right, other)
        assert_close_to_truth(mine, right, own)
    if not DOUBLE:
        # What the adapter's page says of ms-swift's versions.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            its = graded(run, here(logits), upstream)[0]
        if is_repaired(module):
            assert_gradient_close_to_truth(its, here(exact[0]), here(float32[0]))
        else:
            assert float((its - here(exact[0])).norm() / here(exact[0]).norm()) > 0.1


def test_over_ranks(ranks):
    ranks(run_sharded, 2)


def test_errors_and_putting_back():
    module = swift()
    before = getattr(module, NAME)
    logits, labels, _ = batch()
    logitless.install("ms_swift")
    with pytest.raises(LogitlessError, match=rf"{NAME}: labels must be \[2, 17\] but is \[2, 16\]"):
        getattr(module, NAME)(logits, labels[:, 1:])
    logitless.uninstall("ms_swift")
    assert getattr(module, NAME) is before
