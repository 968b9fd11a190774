"""torchtitan's log-probs with and without ours, on a double or on torchtitan itself (see hosts.py)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import load, put_first
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import logitless
from logitless import LogitlessError

DOUBLE = not put_first("torchtitan")
if DOUBLE:
    sys.path.append(str(Path(__file__).parent / "doubles"))

N, V = 23, 211


def titan() -> Any:
    if DOUBLE:
        return importlib.import_module("torchtitan.components.loss")
    return load("torchtitan")[0]


def lined(module: Any) -> bool:
    """Whether this torchtitan, as 0.3.0, takes ``[B, L, V]`` alone, and not ``[T, V]``."""
    if "lined" not in vars(module):
        try:
            module.compute_logprobs(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
            module.lined = False
        except ValueError:
            module.lined = True
    return module.lined


def score(module: Any, logits: Tensor, labels: Tensor, **more: Any) -> Any:
    """``compute_logprobs`` of rows, as one line where torchtitan wants lines."""
    if not lined(module):
        return module.compute_logprobs(logits, labels, **more)
    found = module.compute_logprobs(logits[None], labels[None], **more)
    return tuple(x[0] for x in found) if isinstance(found, tuple) else found[0]


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    labels = torch.randint(V, (N,))
    labels[4::7] = -100
    return (torch.randn(N, V) * 3).to(dtype), labels, torch.randn(N)


def plain(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    log_p = z.log_softmax(-1)
    scores = log_p.gather(-1, labels.clamp_min(0)[:, None])[:, 0]
    return torch.where(labels == -100, 0.0, scores), -(log_p.exp() * log_p).sum(-1)


def graded(function: Any, logits: Tensor, upstream: Tensor, both: bool = True) -> list[Tensor]:
    """Log-probs, the gradient of the logits and, with ``both``, entropies, which have no graph."""
    leaf = logits.detach().clone().requires_grad_()
    found = function(leaf)
    logprob, entropy = found if both else (found, None)
    (gradient,) = torch.autograd.grad(logprob, leaf, upstream.to(logprob.dtype))
    return [logprob.detach(), gradient, *([] if entropy is None else [entropy.detach()])]


def compare(ours: list[Tensor], theirs: list[Tensor], exact: list[Tensor]) -> None:
    assert_close_to_truth(ours[0], exact[0], theirs[0])
    assert_gradient_close_to_truth(ours[1], exact[1], theirs[1])
    for mine, right, other in zip(ours[2:], exact[2:], theirs[2:], strict=False):
        assert_close_to_truth(mine, right, other)


@pytest.mark.parametrize("both", [False, True], ids=["log-probs", "entropy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_whole_logits(dtype, both):
    module = titan()
    logits, labels, upstream = batch(dtype)
    run = lambda z: score(module, z, labels, return_entropy=both)  # noqa: E731
    theirs = graded(run, logits, upstream, both)
    logitless.install("torchtitan", audit=4)
    ours = graded(run, logits, upstream, both)
    (report,) = logitless.status().hosts
    assert (report.calls, report.passed_on) == (1, 0)
    assert report.audit.passed
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]
    assert ours[0][labels == -100].eq(0).all()
    compare(ours, theirs, graded(lambda z: plain(z, labels), logits.double(), upstream))
    if both:
        assert not run(logits.requires_grad_())[1].requires_grad


def test_lines():
    """``[B, L, V]``, as 0.3.0 has them; torchtitan's main, which has rows, is served lines as well."""
    module = titan()
    logits, labels, upstream = batch()
    lines = lambda x: x[:22].view(2, 11, *x.shape[1:])  # noqa: E731
    run = lambda z: module.compute_logprobs(lines(z), lines(labels), return_entropy=True)  # noqa: E731
    theirs = graded(run, logits, lines(upstream)) if lined(module) else None
    logitless.install("torchtitan")
    ours = graded(run, logits, lines(upstream))
    exact, float32 = (
        graded(lambda z: [lines(x) for x in plain(z, labels)], z, lines(upstream)) for z in (logits.double(), logits)
    )
    compare(ours, theirs or float32, exact)
    assert ours[0].shape == ours[2].shape == (2, 11)


def run_sharded(rank: int, world: int) -> None:
    """DTensors: columns over two ranks, evenly and not, and whole."""
    module = titan()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    logits, labels, upstream = batch()
    for width in (210, V):
        labels, cut = labels.clamp_max(width - 1), logits[:, :width]
        exact = graded(lambda z, labels=labels: plain(z, labels), cut.double(), upstream)
        float32 = graded(lambda z, labels=labels: plain(z, labels), cut, upstream)
        for placements in ([Shard(1)], [Shard(-1)], [Replicate()]):
            whole = distribute_tensor(cut, mesh, placements)
            run = lambda z, labels=labels: score(module, z, labels, return_entropy=True)  # noqa: E731
            theirs = graded(run, whole, upstream)
            logitless.install("torchtitan", audit=2)
            ours = graded(run, whole, upstream)
            (report,) = logitless.status().hosts
            assert (report.calls, report.passed_on) == (1, 0)
            assert report.audit.passed
            logitless.uninstall("torchtitan")
            ours[1], theirs[1] = ours[1].full_tensor(), theirs[1].full_tensor()
            compare(ours, theirs, exact)
            compare(ours, float32, exact)


def run_two_vocabularies(rank: int, world: int) -> None:
    """Rank 0 has the same columns of both; rank 1 has not."""
    module = titan()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    logits, labels, _ = batch()
    logitless.install("torchtitan")
    for width in (49, 50, 49):
        ids, cut = labels.clamp_max(width - 1), logits[:, :width]
        found = score(module, distribute_tensor(cut, mesh, [Shard(1)]), ids)
        assert_close_to_truth(found, plain(cut.double(), ids)[0], plain(cut, ids)[0])
    logitless.uninstall("torchtitan")


def run_plain_shards(rank: int, world: int) -> None:
    """As the spmd_types backend has them: plain tensors, and a mesh that torchtitan's module knows."""
    module = titan()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    logits, labels, upstream = batch()
    even, labels = logits[:, :210], labels.clamp_max(209)
    exact, float32 = (graded(lambda z: plain(z, labels), x, upstream) for x in (even.double(), even))
    state = {"current_spmd_mesh": lambda: mesh, "spmd_mesh_size": lambda axis: {"tp": 2}[axis]}
    state["get_spmd_backend"] = lambda: "spmd_types"
    before = {name: getattr(module, name) for name in state}
    vars(module).update(state)
    logitless.install("torchtitan", audit=2)
    try:
        run = lambda z: score(module, z, labels, return_entropy=True)  # noqa: E731
        ours = graded(run, even.chunk(2, -1)[rank], upstream)
        (report,) = logitless.status().hosts
        assert report.passed_on == 0
        assert report.audit.passed
    finally:
        logitless.uninstall("torchtitan")
        vars(module).update(before)
    for of in (exact, float32):
        of[1] = of[1].chunk(2, -1)[rank]
    compare(ours, float32, exact)


@pytest.mark.parametrize("run", [run_sharded, run_two_vocabularies, run_plain_shards])
def test_over_ranks(ranks, run):
    ranks(run, 2)


def run_passed_on(rank: int, world: int) -> None:
    module = titan()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "ep"))
    logits, labels, _ = batch()
    logitless.install("torchtitan")
    both = distribute_tensor(logits[:, :210], mesh, [Shard(1), Shard(1)])
    rows = distribute_tensor(logits[:22], mesh, [Shard(0), Replicate()])
    local = score(module, rows, labels[:22].chunk(2)[rank])
    assert torch.allclose(local, plain(logits[:22], labels[:22])[0].chunk(2)[rank], atol=1e-5)
    assert logitless.status().hosts[0].passed_on == 0
    score(module, both, labels.clamp_max(209))
    assert logitless.status().hosts[0].replaced[0].why == {"placements": 1}
    if DOUBLE:
        part = DTensor.from_local(logits / 2, mesh, [Partial(), Replicate()])
        score(module, part, labels)
        assert logitless.status().hosts[0].replaced[0].why == {"placements": 2}
    logitless.uninstall("torchtitan")


def test_other_placements_are_left_to_torchtitan(ranks):
    ranks(run_passed_on, 2)


def test_checked_types_are_left_to_torchtitan(monkeypatch):
    module = titan()
    logits, labels, _ = batch()
    logitless.install("torchtitan")
    monkeypatch.setattr(module.spmd, "is_type_checking", lambda: True)
    monkeypatch.setattr(module, "get_spmd_backend", lambda: "spmd_types")
    score(module, logits, labels)
    assert logitless.status().hosts[0].replaced[0].why == {"spmd types are checked": 1}
    monkeypatch.setattr(module, "get_spmd_backend", lambda: "partial_dtensor")
    score(module, logits, labels)
    assert logitless.status().hosts[0].passed_on == 1
    with pytest.raises(LogitlessError, match=r"compute_logprobs: labels must be \[(1, )?23\] but is \[(1, )?22\]"):
        score(module, logits, labels[1:])
