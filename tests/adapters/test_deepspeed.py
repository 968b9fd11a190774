"""DeepSpeed's vocabulary-parallel cross entropy with and without ours, on its own code."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import checkout, load
from parity import assert_parity
from ranks import close_ranks
from torch import Tensor

import logitless
from benchmarks.bench.measure import peak_bytes
from logitless import LogitlessError
from logitless.adapters import deepspeed

pytestmark = pytest.mark.skipif(checkout("deepspeed") is None, reason="LOGITLESS_HOSTS names no checkout of DeepSpeed")
B, S, V = 2, 7, 107
CUTS = [0, 30, 31, V]
"""Where three ranks cut the vocabulary: parts of 30, 1 and 76 ids."""


@pytest.fixture(scope="module", autouse=True)
def fresh_workers() -> Iterator[None]:
    """DeepSpeed leaves global state behind, so the workers that have imported it are not reused."""
    yield
    close_ranks()


def function(*args: Any, **more: Any) -> Tensor:
    return sys.modules[deepspeed.MODULE].vocab_parallel_cross_entropy(*args, **more)


def batch(dtype: torch.dtype = torch.float32, ignored: int = -100) -> tuple[Tensor, Tensor]:
    target = torch.randint(V, (B, S))
    target[:, 1::4] = ignored
    return (3 * torch.randn(B, S, V)).to(dtype), target


def plain(z: Tensor, target: Tensor, ignored: int = -100, reduction: str = "none") -> Tensor:
    counts = target != ignored
    rows = -z.log_softmax(-1).gather(-1, target.where(counts, 0)[..., None])[..., 0] * counts
    return {"none": rows, "sum": rows.sum(), "mean": rows.sum() / counts.sum()}[reduction]


@pytest.mark.parametrize("ignored", [-100, 5], ids=["", "another id is ignored"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_rank(dtype: torch.dtype, reduction: str, ignored: int):
    load("deepspeed")
    logits, target = batch(dtype, ignored)
    given = {"ignore_index": ignored, "reduction": reduction}
    assert_parity(
        "deepspeed",
        lambda z: function(z, target, **given),
        lambda z: plain(z, target, ignored, reduction),
        [logits],
    )


def test_what_is_refused():
    load("deepspeed")
    logits, target = batch()
    logitless.install("deepspeed")
    with pytest.raises(ValueError, match="Unsupported reduction"):
        function(logits, target, reduction="median")
    with pytest.raises(ValueError, match="must have matching non-vocabulary dimensions"):
        function(logits, target[:1])
    with pytest.raises(ValueError, match="must be provided together"):
        function(logits, target, vocab_start_index=0)
    with pytest.raises(ValueError, match="gather_sequence_loss is only supported"):
        function(logits, target, gather_sequence_loss=True)
    (status,) = logitless.status().hosts
    assert (status.calls, status.passed_on) == (4, 4)
    # A host's ValueError, in our words; and -100 is no id where another one is ignored.
    for wrong, more in (((V,), {}), ((-1,), {}), ((-100,), {"ignore_index": 5})):
        with pytest.raises(LogitlessError):
            function(logits, target.masked_fill(target == target[0, 0], *wrong), **more)


def test_the_device_is_asked_nothing():
    """Tensors without values: DeepSpeed wants to know whether a target is outside the vocabulary."""
    load("deepspeed")
    logits, target = (x.to("meta") for x in batch())
    logits.requires_grad_()
    told = {"vocab_start_index": 0, "vocab_end_index": V, "global_vocab_size": V}
    with pytest.raises(RuntimeError, match="meta tensors"):
        function(logits, target, **told)
    logitless.install("deepspeed")
    function(logits, target, **told).backward()
    assert logits.grad is not None


def test_no_exponentials_are_held():
    load("deepspeed")
    logits, target = torch.randn(1, 512, 9000).bfloat16().requires_grad_(), torch.randint(9000, (1, 512))

    def step() -> Tensor:
        return torch.autograd.grad(function(logits, target), logits)[0]

    before = peak_bytes(step, logits.device) / logits.numel()
    logitless.install("deepspeed")
    after = peak_bytes(step, logits.device) / logits.numel()
    assert before > 8
    assert after < 3


# Over ranks.


def start() -> Any:
    (module,) = load("deepspeed")
    # DeepSpeed's own communicator, over the group that is there, without the operation in shared memory that it builds.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    module.dist.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    return module


def twice(run: Any) -> Any:
    """Before and after install, with the calls after it."""
    theirs = run()
    logitless.install("deepspeed", audit=3)
    try:
        ours = run()
        (status,) = logitless.status().hosts
        assert status.audit is not None
        assert status.audit.passed
        assert status.passed_on == 0
        return theirs, ours, status.calls
    finally:
        logitless.uninstall("deepspeed")


def uneven(rank: int, world: int, logits: Tensor, labels: Tensor) -> Any:
    """The loss that DeepSpeed gives a model whose head is cut, twice: a mean, and a sum over a given number."""
    module, own = start(), slice(CUTS[rank], CUTS[rank + 1])

    def run() -> list[Tensor]:
        loss = module.VocabParallelCausalLMLoss(dist.group.WORLD, None, own.start, own.stop)
        found = []
        for more in ({}, {"num_items_in_batch": 5}):
            leaf = logits[..., own].clone().requires_grad_()
            value = loss(leaf, labels, vocab_size=V, **more)
            found += [value.detach()[None], *torch.autograd.grad(value, leaf)]
        return found

    return twice(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shards_of_any_sizes(ranks, dtype: torch.dtype):
    logits, labels = batch(dtype)
    exact = logits.double().requires_grad_()
    rows = plain(exact[:, :-1], labels[:, 1:])
    values = [rows.sum() / (labels[:, 1:] != -100).sum(), rows.sum() / 5]
    gradients = [torch.autograd.grad(value, exact, retain_graph=True)[0] for value in values]
    for rank, (theirs, ours, calls) in enumerate(ranks(uneven, 3, logits, labels, timeout=180)):
        own = slice(CUTS[rank], CUTS[rank + 1])
        assert calls == 2
        assert [x.dtype for x in ours] == [x.dtype for x in theirs]
        for i, (value, gradient) in enumerate(zip(values, gradients, strict=True)):
            assert_close_to_truth(ours[2 * i], value.detach()[None], theirs[2 * i])
            assert_gradient_close_to_truth(ours[2 * i + 1], gradient[..., own], theirs[2 * i + 1])


def over_sequences(rank: int, world: int, logits: Tensor, target: Tensor) -> Any:
    """Two ranks share the vocabulary, in parts that DeepSpeed works out, and two the tokens."""
    module = start()
    pairs = [[dist.new_group([0, 1]), dist.new_group([2, 3])], [dist.new_group([0, 2]), dist.new_group([1, 3])]]
    columns, sequence = pairs[0][rank // 2], pairs[1][rank % 2]
    half, part = V // 2, S // 2
    own = logits[..., rank % 2 * half : (rank % 2 + 1) * half].transpose(0, 1)
    own, ids = (x[rank // 2 * part : (rank // 2 + 1) * part] for x in (own, target.T % (2 * half)))
    ids = ids.where(target.T[rank // 2 * part : (rank // 2 + 1) * part] >= 0, -100)
    groups = {"tp_group": columns, "sp_group": sequence}

    def run() -> list[Tensor]:
        found = []
        for name in ("sum", "mean", "rows", "parts"):
            leaf = own.clone().requires_grad_()
            if name == "parts":
                value = module.vocab_sequence_parallel_cross_entropy(leaf, ids, sequence, columns)
            elif name == "rows":
                value = module.vocab_parallel_cross_entropy(
                    leaf, ids, **groups, reduction="none", gather_sequence_loss=True
                )
            else:
                value = module.vocab_parallel_cross_entropy(leaf, ids, **groups, reduction=name, backend="liger")
            found += [value.detach(), *torch.autograd.grad(value.sum(), leaf)]
        return found

    return twice(run)


def test_over_sequences_and_shards(ranks):
    """Whatever DeepSpeed adds up over its sequence groups, and how gradients come back from there, stays."""
    logits, target = batch()
    for theirs, ours, calls in ranks(over_sequences, 4, logits, target, timeout=180):
        assert calls == 4
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
