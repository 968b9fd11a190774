"""slime's functions with and without ours, on a double of slime or on slime itself, over Megatron's real groups.

    one process       shapes, dtypes, graphs, errors, the hook
    four ranks        tensor and context parallel, zigzag and all-gather, replay, whole losses

Which response tokens a rank holds is asked of slime: its ``get_values`` on outputs that hold their own position.
``LOGITLESS_HOSTS`` names checkouts of slime (see hosts.py); what a release lacks is then left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import load, takes
from ranks import close_ranks
from shared.megatron import megatron
from shared.megatron_groups import TIMEOUT
from shared.slime import (
    BATCHES,
    DOUBLE,
    Here,
    V,
    arguments,
    check_losses,
    check_scores,
    check_values,
    slime,
)
from torch import Tensor
from truth import float64_leaf, plain, truth

import logitless
from logitless import LogitlessError

if DOUBLE:
    sys.path.append(str(Path(__file__).parent / "doubles"))


pytestmark = [
    pytest.mark.skipif(
        not find_spec("megatron") or not find_spec("megatron.core"), reason="megatron-core is not installed"
    ),
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def fresh_workers() -> Iterator[None]:
    yield
    close_ranks()


@pytest.fixture
def alone():
    """One process that is a whole Megatron, and slime's modules in it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with megatron():
        yield slime()
    dist.destroy_process_group()


@pytest.mark.parametrize("chunk_size", [-1, 7])
@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_calculate(alone, masked, entropy_grad, chunk_size):
    if not takes(alone.calculate_log_probs_and_entropy, "with_entropy_grad") and (masked or not entropy_grad):
        pytest.skip("not in this release")
    logits, tokens = (torch.randn(41, V) * 3).requires_grad_(), torch.randint(V, (41,))
    mask = torch.rand(41, V) > 0.7 if masked else None
    upstream = torch.randn(2, 41)
    group = dist.group.WORLD

    def run() -> tuple[Tensor, Tensor, Tensor]:
        options = {"with_entropy": True, "chunk_size": chunk_size}
        options |= {"log_prob_keep_mask": mask} if masked else {}
        options |= {} if entropy_grad else {"with_entropy_grad": False}
        logprob, entropy = alone.calculate_log_probs_and_entropy(logits, tokens, group, **options)
        assert logprob.shape == (41, 1)
        assert entropy.shape == (41,)
        assert logprob.dtype == entropy.dtype == torch.float32
        assert logprob.requires_grad
        assert entropy.requires_grad == entropy_grad
        total = (logprob[:, 0] * upstream[0]).sum() + (entropy * upstream[1]).sum()
        return logprob[:, 0], entropy, torch.autograd.grad(total, logits)[0]

    leaf = float64_leaf(logits)
    kept = None if mask is None else [row.nonzero()[:, 0].tolist() for row in mask]
    exact = truth(leaf, range(41), tokens, kept=kept)
    entropy = exact.entropy if entropy_grad else exact.entropy.detach()
    ((exact.logprob * upstream[0]).sum() + (entropy * upstream[1]).sum()).backward()
    theirs = run()
    logitless.install("slime", audit=5)
    ours = run()
    for mine, right, other in zip(ours[:2], exact[:2], theirs[:2], strict=True):
        assert_close_to_truth(mine, right, other)
    assert_gradient_close_to_truth(ours[2], leaf.grad, theirs[2])
    report = logitless.status().hosts[0]
    assert report.replaced[0].calls == 1
    assert report.audit.passed
    assert report.audit.rows == (5 if masked else 10)


def test_calculate_without_rows_or_entropy(alone):
    logits, tokens = torch.randn(0, V, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    before = alone.calculate_log_probs_and_entropy(logits, tokens, dist.group.WORLD, with_entropy=True)
    logitless.install("slime")
    after = alone.calculate_log_probs_and_entropy(logits, tokens, dist.group.WORLD, with_entropy=True)
    assert [x.shape for x in after] == [x.shape for x in before] == [(0,), (0,)]
    assert after[0].requires_grad
    if takes(alone.calculate_log_probs_and_entropy, "with_entropy_grad"):
        metric = alone.calculate_log_probs_and_entropy(
            logits, tokens, dist.group.WORLD, with_entropy=True, with_entropy_grad=False
        )
        assert not metric[1].requires_grad
    assert alone.calculate_log_probs_and_entropy(logits, tokens, dist.group.WORLD)[1] is None
    some = alone.calculate_log_probs_and_entropy(torch.randn(3, V), tokens.new_zeros(3), dist.group.WORLD)
    assert some[1] is None
    assert not some[0].requires_grad


def test_ids_outside_the_vocabulary(alone):
    """slime scores them as the likeliest token. Ours are 0 for -100 and an error for the rest."""
    logits, tokens = torch.randn(3, V), torch.tensor([1, -100, 2])
    theirs, _ = alone.calculate_log_probs_and_entropy(logits, tokens, dist.group.WORLD)
    torch.testing.assert_close(theirs[1, 0], logits.log_softmax(-1)[1].max())
    logitless.install("slime")
    ours, _ = alone.calculate_log_probs_and_entropy(logits, tokens, dist.group.WORLD)
    assert ours[1, 0] == 0
    with pytest.raises(LogitlessError, match=f"outside the vocabulary of {V}"):
        alone.calculate_log_probs_and_entropy(logits, tokens + V, dist.group.WORLD)


MESHES = [(2, 2, (False, True)), (2, 1, (False,)), (1, 2, (False, True))]
"""Tensor-parallel size, context-parallel size, all-gather splits."""


def run_everything(rank: int, world: int) -> None:
    """Every check on every mesh and batch, nothing installed. Setting Megatron up makes fifty groups: once per mesh."""
    for tp, cp, splits in MESHES:
        with megatron(tp, cp) as state:
            for allgather, batch, check in product(splits, BATCHES, CHECKS):
                inputs = {
                    "unconcat_tokens": batch.tokens(),
                    "total_lengths": batch.lengths,
                    "response_lengths": batch.responses,
                }
                cp_rank, tp_rank = state.get_context_parallel_rank(), state.get_tensor_model_parallel_rank()
                check(Here(slime(), arguments(allgather_cp=allgather), batch, inputs, cp, cp_rank, tp, tp_rank))


def check_calculate(here: Here) -> None:
    """Columns over the tensor-parallel ranks, and a mask that leaves some ranks none of a row."""
    from megatron.core import mpu

    torch.manual_seed(7)
    logits, tokens, mask = torch.randn(17, V) * 3, torch.randint(V, (17,)), torch.rand(17, V) < 0.004
    upstream = torch.randn(2, 17)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        leaf, keep = (x.chunk(here.tp, -1)[here.tp_rank].clone() for x in (logits, mask))
        group = mpu.get_tensor_model_parallel_group()
        leaf.requires_grad_()
        masked = [keep] if kept is not None else []
        logprob, entropy = here.loss.calculate_log_probs_and_entropy(leaf, tokens, group, True, 5, *masked)
        ((logprob[:, 0] * upstream[0]).sum() + (entropy * upstream[1]).sum()).backward()
        return logprob.detach()[:, 0], entropy.detach(), leaf.grad

    leaf = float64_leaf(logits)
    kept = [row.nonzero()[:, 0].tolist() for row in mask]
    kept = kept if takes(here.loss.calculate_log_probs_and_entropy, "log_prob_keep_mask") else None
    exact = truth(leaf, range(17), tokens, kept=kept)
    ((exact.logprob * upstream[0]).sum() + (exact.entropy * upstream[1]).sum()).backward()
    theirs = run()
    logitless.install("slime")
    ours = run()
    logitless.uninstall("slime")
    for mine, right, other in zip(ours[:2], exact[:2], theirs[:2], strict=True):
        assert_close_to_truth(mine, right, other)
    assert_gradient_close_to_truth(ours[2], leaf.grad.chunk(here.tp, -1)[here.tp_rank], theirs[2])


CHECKS = (check_scores, check_values, check_losses, check_calculate)


def test_every_mesh(ranks):
    """Over gloo, on four ranks; every rank checks its own part."""
    ranks(run_everything, 4, timeout=TIMEOUT)


def by_the_page(framework: str) -> Any:
    """The function of a framework after the diff that docs/maintainers.md has for it."""
    page = Path(__file__).parents[2].joinpath("docs", "maintainers.md").read_text(encoding="utf-8")
    diff = page.split(f"\n{framework}, `", 1)[1].split("```diff\n", 1)[1].split("\n```", 1)[0]
    namespace = {"provider": logitless.provider.get(version=1), "torch": torch}
    exec("\n".join(line[1:] for line in diff.splitlines()), namespace)
    return namespace["calculate_log_probs_and_entropy"]


def score_without_a_group(rank: int, world: int) -> list[Tensor]:
    """To slime, as to torch, no group is the default group; and its parallel state is what its module binds."""
    with megatron(2):
        loss = slime()
        logits = torch.arange(24.0).reshape(2, 12).sin() * 3
        logitless.install("slime")
        functions = [loss.calculate_log_probs_and_entropy, by_the_page("slime"), by_the_page("miles")]
        try:
            return [f(logits.chunk(2, -1)[rank], torch.tensor([1, 8]), None)[0] for f in functions]
        finally:
            logitless.uninstall("slime")


def test_no_group_is_the_world(ranks):
    """It was taken for unsharded: each rank normalised over its own half."""
    logits = torch.arange(24.0).reshape(2, 12).sin() * 3
    right = torch.log_softmax(logits, -1)[torch.arange(2), torch.tensor([1, 8])][:, None]
    for logprobs in ranks(score_without_a_group, 2, timeout=TIMEOUT):
        for logprob in logprobs:
            torch.testing.assert_close(logprob, right)


def score_over_groups_made_anew(rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """Log-probs and gradients over slime's own groups, and again after it took them down and made them anew."""
    (groups,) = load("slime", "slime.utils.reloadable_process_group")
    groups.available_memory = lambda: {"free_GB": 99}  # of a GPU
    groups.register_default_process_group(timedelta(seconds=TIMEOUT))
    groups.monkey_patch_torch_dist()
    with megatron(2) as state:
        loss, group = slime(), state.get_tensor_model_parallel_group()
        assert isinstance(group, groups.ReloadableProcessGroup)
        logits = torch.arange(24.0).reshape(2, 12).sin() * 3
        logitless.install("slime", audit=2)
        found = []
        for _ in range(2):
            part = logits.chunk(2, -1)[rank].clone().requires_grad_()
            logprob, entropy = loss.calculate_log_probs_and_entropy(part, torch.tensor([1, 8]), group, True)
            (logprob.sum() + entropy.sum()).backward()
            found.append((logprob.detach(), part.grad))
            groups.destroy_process_groups()
            groups.reload_process_groups()
        assert logitless.status().hosts[0].audit.passed
    return found


@pytest.mark.skipif(DOUBLE, reason="groups that only slime itself has")
def test_groups_that_slime_takes_down_and_makes_anew(ranks):
    if not hasattr(load("slime", "slime.utils.reloadable_process_group")[0], "register_default_process_group"):
        pytest.skip("groups of gloo are not wrapped in this release")
    logits = torch.arange(24.0).reshape(2, 12).sin() * 3
    wanted, theirs = [], []
    for found, score, leaf in ((wanted, truth, float64_leaf(logits)), (theirs, plain, logits.requires_grad_())):
        out = score(leaf, range(2), [1, 8])
        (out.logprob.sum() + out.entropy.sum()).backward()
        found += [out.logprob.detach(), leaf.grad]
    try:
        results = ranks(score_over_groups_made_anew, 2, timeout=TIMEOUT)
    finally:
        # torch.distributed is slime's in these workers.
        close_ranks()
    for rank, times in enumerate(results):
        for logprob, gradient in times:
            assert_close_to_truth(logprob[:, 0], wanted[0], theirs[0])
            assert_gradient_close_to_truth(gradient, *(x.chunk(2, -1)[rank] for x in (wanted[1], theirs[1])))
