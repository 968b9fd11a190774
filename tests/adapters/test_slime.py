"""slime's functions with and without ours, on a double of slime or on slime itself, over Megatron's real groups.

    one process       shapes, dtypes, graphs, errors, the hook
    four ranks        tensor and context parallel, zigzag and all-gather, replay, whole losses

Which response tokens a rank holds is asked of slime: its ``get_values`` on outputs that hold their own position.
``LOGITLESS_HOSTS`` names checkouts of slime (see hosts.py); what a release lacks is then left out.
"""

from __future__ import annotations

import inspect
import math
import sys
from argparse import Namespace
from collections.abc import Iterator
from datetime import timedelta
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import load, put_first, takes
from ranks import close_ranks
from shared.megatron import megatron
from shared.megatron_groups import TIMEOUT
from torch import Tensor
from truth import float64_leaf, plain, truth

import logitless
from benchmarks.bench.measure import peak_bytes
from logitless import LogitlessError

DOUBLE = not put_first("slime")
if DOUBLE:
    sys.path.append(str(Path(__file__).parent / "doubles"))

pytestmark = [
    pytest.mark.skipif(
        not find_spec("megatron") or not find_spec("megatron.core"), reason="megatron-core is not installed"
    ),
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning"),
]
on_the_double = pytest.mark.skipif(not DOUBLE, reason="a shortcut that only the double has")

V = 506


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


def slime() -> Any:
    """slime's ``loss``; of the double also the modules that hold its names by value."""
    if not DOUBLE:
        return load("slime")[0]
    import slime.backends.megatron_utils.actor
    import slime.backends.megatron_utils.server.logprob_utils  # noqa: F401
    from slime.backends.megatron_utils import loss

    return loss


def arguments(**more: Any) -> Namespace:
    settings = {"rollout_temperature": 0.8, "log_probs_chunk_size": -1, "entropy_coef": 0.1, "allgather_cp": False}
    losses = {"loss_type": "policy_loss", "recompute_loss_function": False, "use_rollout_logprobs": False}
    clip = {"eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None, "rollout_top_p": 1.0}
    off = ("use_opsm", "use_tis", "use_kl_loss", "get_mismatch_metrics", "calculate_per_token_loss")
    plain = {name: False for name in off} | {"advantage_estimator": "grpo", "qkv_format": "thd"}
    paths = ("custom_pg_loss_reducer_function_path", "custom_tis_function_path")
    return Namespace(**(settings | losses | clip | plain | dict.fromkeys(paths) | more))


# One row per logit row.


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
    assert theirs[1, 0] == logits.log_softmax(-1)[1].max()
    logitless.install("slime")
    ours, _ = alone.calculate_log_probs_and_entropy(logits, tokens, dist.group.WORLD)
    assert ours[1, 0] == 0
    with pytest.raises(LogitlessError, match=f"outside the vocabulary of {V}"):
        alone.calculate_log_probs_and_entropy(logits, tokens + V, dist.group.WORLD)


# One tensor per sample, on every mesh.


class Batch(NamedTuple):
    lengths: list[int]
    responses: list[int]
    padding: int

    def tokens(self) -> list[Tensor]:
        return [(torch.arange(n) * 31 + 7 * i) % V for i, n in enumerate(self.lengths)]

    def places(self) -> list[slice]:
        """Rows of the whole stream that predict each response."""
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        return [slice(end - r - 1, end - 1) for end, r in zip(ends, self.responses, strict=True)]

    def recorded(self) -> tuple[list[list[int]], list[Tensor]]:
        """Ids that a sampler kept: as a list, with offsets as a tensor; some tokens without any."""
        ids, offsets = [], []
        for i, response in enumerate(self.responses):
            counts = [(3 * i + 5 * t) % 4 * 6 for t in range(response)]
            offsets.append(torch.tensor([0, *counts]).cumsum(0))
            ids.append([(17 * j + i) % V for j in range(sum(counts))])
        return ids, offsets


BATCHES = [Batch([9, 14, 6], [4, 13, 2], 5), Batch([9, 3], [1, 1], 0)]
"""Ragged; and so short that a rank holds no row."""

MESHES = [(2, 2, (False, True)), (2, 1, (False,)), (1, 2, (False, True))]
"""Tensor-parallel size, context-parallel size, all-gather splits."""


def local(stream: Tensor, batch: Batch, cp: int, rank: int, allgather: bool) -> Tensor:
    """The rows of a whole stream ``[sum of lengths, ...]`` that this rank's model would compute, zeros for padding."""

    def pad(x: Tensor, length: int) -> Tensor:
        return torch.cat([x, x.new_zeros(length - len(x), *x.shape[1:])])

    if allgather:
        return pad(stream, -(-len(stream) // cp) * cp + cp * batch.padding).chunk(cp)[rank]
    parts = []
    for sample in stream.split(batch.lengths):
        chunks = pad(sample, -(-len(sample) // (2 * cp)) * 2 * cp).chunk(2 * cp) if cp > 1 else [sample]
        parts += [chunks[rank], chunks[2 * cp - 1 - rank]] if cp > 1 else chunks
    return pad(torch.cat(parts), sum(map(len, parts)) + batch.padding)


class Here(NamedTuple):
    """What one rank has of a batch."""

    loss: Any
    args: Namespace
    batch: Batch
    inputs: dict[str, Any]
    cp: int
    cp_rank: int
    tp: int
    tp_rank: int

    def part(self, stream: Tensor, columns: bool = True) -> Tensor:
        rows = local(stream, self.batch, self.cp, self.cp_rank, self.args.allgather_cp)
        return rows.chunk(self.tp, dim=-1)[self.tp_rank] if columns else rows

    def held(self) -> list[Tensor]:
        """Places in its response of the tokens of each sample that belong to this rank."""
        position = torch.zeros(sum(self.batch.lengths))
        for place, response in zip(self.batch.places(), self.batch.responses, strict=True):
            position[place] = torch.arange(float(response))
        outputs = self.part(position, columns=False)[None, :, None]
        return [x.long() for x in self.loss.get_values(outputs, args=self.args, **self.inputs)[1]["values"]]


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


def check_scores(here: Here) -> None:
    """Values and gradients, with and without replay, entropy with and without gradient."""
    torch.manual_seed(5)
    stream = torch.randn(sum(here.batch.lengths), V) * 3
    upstream = [torch.randn(2, r) for r in here.batch.responses]
    held = here.held()
    ids, offsets = here.batch.recorded()
    # Releases without replay have a graph for every entropy, trained or not.
    recorded = takes(here.loss.get_log_probs_and_entropy, "top_p_token_ids")
    for replay in (False, True) if recorded else (False,):
        for coef in (0.0, 0.1) if recorded else (0.1,):
            here.args.entropy_coef = coef
            more = {"top_p_token_ids": ids, "top_p_token_offsets": offsets} if replay else {}

            def run(more: dict = more, coef: float = coef) -> tuple[Tensor, Tensor, Tensor]:
                logits = here.part(stream)[None].clone().requires_grad_()
                empty, results = here.loss.get_log_probs_and_entropy(
                    logits, args=here.args, **here.inputs, with_entropy=True, **more
                )
                assert empty.shape == (0,)
                assert [len(x) for x in results["log_probs"]] == [len(x) for x in results["entropy"]]
                assert [len(x) for x in results["log_probs"]] == [len(x) for x in held]
                assert all(x.requires_grad and x.dtype == torch.float32 for x in results["log_probs"])
                assert all(x.requires_grad == (coef != 0) for x in results["entropy"])
                g = torch.cat([x[:, at] for x, at in zip(upstream, held, strict=True)], 1)
                logprob, entropy = torch.cat(results["log_probs"]), torch.cat(results["entropy"])
                ((logprob * g[0]).sum() + (entropy * g[1]).sum()).backward()
                # On a rank without a row slime's results have no graph down to the logits.
                gradient = torch.zeros_like(logits) if logits.grad is None else logits.grad
                return logprob.detach(), entropy.detach(), gradient[0]

            leaf, exact, total = float64_leaf(stream), [], torch.zeros((), dtype=torch.float64)
            for i, place in enumerate(here.batch.places()):
                rows = leaf[place]
                split = [ids[i][a:b] for a, b in zip(offsets[i][:-1], offsets[i][1:], strict=True)] if replay else None
                target = here.inputs["unconcat_tokens"][i][-here.batch.responses[i] :]
                out = truth(rows, range(len(rows)), target, temperature=0.8, kept=split)
                total = total + (out.logprob * upstream[i][0]).sum()
                total = total + ((out.entropy * upstream[i][1]).sum() if coef else 0)
                exact.append(torch.stack([out.logprob, out.entropy])[:, held[i]].detach())
            total.backward()
            theirs = run()
            logitless.install("slime", audit=2)
            ours = run()
            report = logitless.status().hosts[0]
            assert (report.replaced[1].calls, report.replaced[1].passed_on) == (1, 0)
            assert report.audit.passed
            logitless.uninstall("slime")
            for mine, right, other in zip(ours[:2], torch.cat(exact, 1), theirs[:2], strict=True):
                assert_close_to_truth(mine, right, other)
            assert_gradient_close_to_truth(ours[2], here.part(leaf.grad), theirs[2])
            if coef:
                continue
            logitless.install("slime", response_only=False)
            for a, b in zip(run(), ours, strict=True):
                torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
            logitless.uninstall("slime")


def check_values(here: Here) -> None:
    torch.manual_seed(8)
    outputs, upstream = torch.randn(sum(here.batch.lengths), 1), torch.randn(100)

    def run() -> list[Tensor]:
        leaf = here.part(outputs, columns=False)[None].clone().requires_grad_()
        values = here.loss.get_values(leaf, args=here.args, **here.inputs)[1]["values"]
        joined = torch.cat(values)
        (joined * upstream[: len(joined)]).sum().backward()
        return [*values, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad]

    theirs = run()
    logitless.install("slime")
    ours = run()
    assert logitless.status().hosts[0].replaced[2].calls == 1
    logitless.uninstall("slime")
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


def marks(masks: list[Tensor]) -> dict[str, Any]:
    """Loss masks and their sums, under the names of several releases."""
    sums = [mask.sum().clamp(min=1) for mask in masks]
    return {"loss_masks": masks, "rollout_mask_sums": sums, "group_mask_sums": sums}


def check_losses(here: Here) -> None:
    """Whole losses: the same number and gradient, also when only rows that count are scored."""
    torch.manual_seed(6)
    stream = torch.randn(sum(here.batch.lengths), V) * 3
    held = here.held()
    masks = [(torch.arange(r) % 3 != 1).float() for r in here.batch.responses]
    for place, mask, tokens in zip(here.batch.places(), masks, here.inputs["unconcat_tokens"], strict=True):
        # What a tool wrote may be so unlikely that a ratio to nothing overflows; the mask drops it.
        rows = torch.arange(place.start, place.stop)[mask == 0]
        stream[rows, tokens[-len(mask) :][mask == 0]] = -900.0
    with torch.no_grad():
        _, before = here.loss.get_log_probs_and_entropy(here.part(stream)[None], args=here.args, **here.inputs)
    old = [x + torch.randn(len(x)) * 0.1 for x in before["log_probs"]]
    advantages = [torch.randn(r)[at] for r, at in zip(here.batch.responses, held, strict=True)]
    batch = here.inputs | marks(masks) | {"log_probs": old, "advantages": advantages}

    def run(**more: Any) -> tuple[float, Tensor]:
        logits = here.part(stream)[None].clone().requires_grad_()
        args = Namespace(**(vars(here.args) | more))
        loss, _, log = here.loss.loss_function(args, batch, 2, 3, logits)
        loss.backward()
        numbers = [torch.as_tensor(x).reshape(-1) for name, x in log.items() if name != "keys"]
        assert torch.cat(numbers).isfinite().all()
        return loss.item(), torch.zeros_like(logits) if logits.grad is None else logits.grad

    for more in ({"loss_type": "policy_loss"}, {"loss_type": "sft_loss"}, {"recompute_loss_function": True}):
        theirs = run(**more)
        logitless.install("slime", loss_mask_only=True, audit=2)
        ours = run(**more)
        report = logitless.status().hosts[0]
        assert sum(entry.calls for entry in report.replaced[3:]) >= 1
        logitless.uninstall("slime")
        assert math.isclose(ours[0], theirs[0], rel_tol=1e-5, abs_tol=1e-5), more
        # Releases without a mask score with Megatron's fused cross entropy, which rounds the gradient to bfloat16.
        exact = takes(here.loss.calculate_log_probs_and_entropy, "log_prob_keep_mask")
        near = {"atol": 1e-6, "rtol": 1e-4} if exact else {"atol": 2**-8 * float(theirs[1].abs().max()), "rtol": 2**-7}
        torch.testing.assert_close(ours[1], theirs[1], **near)


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


def test_the_parallel_state_is_the_one_slime_binds(alone, monkeypatch):
    batch = BATCHES[0]
    here = here_alone(alone)
    asked = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(parallel_state, name)

    from megatron.core import parallel_state

    monkeypatch.setattr(alone, "mpu", Watched())
    logitless.install("slime")
    try:
        logits = torch.randn(1, sum(batch.lengths), V)
        alone.get_log_probs_and_entropy(logits, args=here.args, **here.inputs)
    finally:
        logitless.uninstall("slime")
    assert {"get_context_parallel_rank", "get_tensor_model_parallel_group"} <= set(asked)


def here_alone(loss: Any, batch: Batch = BATCHES[0], **more: Any) -> Here:
    inputs = {"unconcat_tokens": batch.tokens(), "total_lengths": batch.lengths, "response_lengths": batch.responses}
    return Here(loss, arguments(**more), batch, inputs, 1, 0, 1, 0)


@pytest.mark.parametrize("allgather", [False, True])
def test_one_rank(alone, allgather):
    for check in (check_scores, check_values, check_losses):
        check(here_alone(alone, allgather_cp=allgather))


def test_only_rows_that_count_are_scored(alone):
    """A NaN in a row that the mask drops does not reach the loss."""
    here = here_alone(alone)
    masks = [torch.ones(r) for r in here.batch.responses]
    masks[1][4] = 0
    stream = torch.randn(sum(here.batch.lengths), V)
    stream[here.batch.places()[1]][4] = math.nan
    batch = here.inputs | marks(masks)
    logits = here.part(stream)[None].requires_grad_()
    args = arguments(loss_type="sft_loss")
    assert alone.loss_function(args, batch, 1, 1, logits)[0].isnan()
    logitless.install("slime", loss_mask_only=True)
    loss = alone.loss_function(args, batch, 1, 1, logits)[0]
    assert loss.isfinite()
    loss.backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("replay", [False, True])
def test_memory(alone, replay):
    """Training: one gradient beside the logits. Without gradients: the working memory alone."""
    _skip_without_replay(alone, replay)
    batch = Batch([100, 120], [70, 110], 0)
    here = here_alone(alone, batch, entropy_coef=0.0, log_probs_chunk_size=8)
    ids, offsets = batch.recorded()
    more = {"top_p_token_ids": ids, "top_p_token_offsets": offsets} if replay else {}
    size = 4 * 220 * 5000
    logits = torch.randn(1, 220, 5000, requires_grad=True)

    def train() -> None:
        results = alone.get_log_probs_and_entropy(logits, args=here.args, **here.inputs, with_entropy=True, **more)[1]
        torch.autograd.grad(torch.cat(results["log_probs"]).sum(), logits)

    def score() -> None:
        with torch.no_grad():
            alone.get_log_probs_and_entropy(logits, args=here.args, **here.inputs, with_entropy=True, **more)

    assert peak_bytes(train, logits.device) > 2 * size
    logitless.install("slime")
    slack = 2**20
    assert peak_bytes(train, logits.device) < size + slack
    assert peak_bytes(score, logits.device) < slack


@pytest.mark.parametrize("strided", [False, True])
def test_the_logits_are_overwritten_if_asked(alone, strided):
    """Megatron's output of a pack is a transposed view of the head's output; the gradient goes into that memory."""
    here = here_alone(alone)
    T = sum(here.batch.lengths)
    hidden, weight = torch.randn(T, 16, requires_grad=True), torch.randn(V, 16)
    seen = []

    def run() -> tuple[Tensor, int]:
        made = (hidden @ weight.T)[:, None] if strided else (hidden @ weight.T)[None]
        whole = made._base if made._base is not None else made
        logits = made.transpose(0, 1) if strided else made
        results = alone.get_log_probs_and_entropy(logits, args=here.args, **here.inputs, with_entropy=True)[1]
        whole.register_hook(lambda g: seen.append(g.data_ptr() == whole.data_ptr()))
        loss = torch.cat(results["log_probs"]).sum() + torch.cat(results["entropy"]).sum()
        return torch.autograd.grad(loss, hidden)[0], 0

    logitless.install("slime")
    plain, _ = run()
    logitless.uninstall("slime")
    logitless.install("slime", overwrite_logits=True, audit=3)
    over, _ = run()
    assert seen == [False, True]
    assert torch.equal(plain, over)
    assert logitless.status().hosts[0].audit.passed
    with pytest.raises(LogitlessError, match="entropy: overwrite_logits=True, but these logits are a leaf"):
        alone.get_log_probs_and_entropy(torch.randn(1, T, V, requires_grad=True), args=here.args, **here.inputs)
    with torch.no_grad():
        alone.get_log_probs_and_entropy(torch.randn(1, T, V), args=here.args, **here.inputs)


def _skip_without_replay(loss: Any, replay: bool = True) -> None:
    if replay and not takes(loss.get_log_probs_and_entropy, "top_p_token_ids"):
        pytest.skip("not in this release")


@on_the_double
def test_names_held_by_value(alone):
    from slime.backends.megatron_utils import actor
    from slime.backends.megatron_utils.server import logprob_utils

    here = here_alone(alone)
    logits = torch.randn(1, 34, V)
    before = actor.compute_log_prob(here.args, here.inputs, logits)
    logitless.install("slime")
    after = actor.compute_log_prob(here.args, here.inputs, logits)
    logprob_utils.teacher_log_probs(here.args, here.inputs, logits)
    actor.compute_values(here.args, here.inputs, logits[..., :1])
    assert [entry.calls for entry in logitless.status().hosts[0].replaced] == [0, 2, 1]
    assert not after[0].requires_grad
    for a, b in zip(after, before, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    logitless.uninstall("slime")
    assert actor.get_values is alone.get_values


def test_replay_without_a_record_is_left_to_slime(alone):
    _skip_without_replay(alone)
    here = here_alone(alone)
    ids, offsets = here.batch.recorded()
    more = {"top_p_token_ids": ids, "top_p_token_offsets": [offsets[0], offsets[1][:5], offsets[2]]}
    logits = torch.randn(1, 34, V)
    before = alone.get_log_probs_and_entropy(logits, args=here.args, **here.inputs, **more)[1]["log_probs"]
    logitless.install("slime")
    after = alone.get_log_probs_and_entropy(logits, args=here.args, **here.inputs, **more)[1]["log_probs"]
    report = logitless.status().hosts[0].replaced[1]
    assert (report.calls, report.passed_on) == (1, 1)
    assert report.why == {"replay without a record": 1}
    for a, b in zip(after, before, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@on_the_double
def test_the_init_hook(alone):
    from slime.backends.megatron_utils import initialize

    path = "logitless.adapters.slime.custom_megatron_init"
    initialize.init(arguments(custom_megatron_init_path=path))
    assert dict(logitless.status().hosts[0].options)["response_only"]
    assert not dict(logitless.status().hosts[0].options)["any_version"]
    logitless.uninstall("slime")
    asked = {"log_probs_loss_mask_only": True, "logitless_audit": 2, "logitless_any_version": True}
    initialize.init(arguments(custom_megatron_init_path=path, **asked))
    options = dict(logitless.status().hosts[0].options)
    assert options["loss_mask_only"]
    assert options["audit"] == 2
    assert options["any_version"]


def test_loss_mask_only_wants_response_only(alone):
    with pytest.raises(LogitlessError, match="loss_mask_only=True selects among response rows"):
        logitless.install("slime", loss_mask_only=True, response_only=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(1, 34, V).bfloat16()}, r"logits must be float32 \[1, T, V'\], one pack"),
        ({"logits": torch.zeros(2, 34, V)}, r"logits must be float32 \[1, T, V'\].* \[2, 34, 506\]"),
        ({"logits": torch.zeros(1, 20, V)}, "num_tokens is 20 but the samples need 29"),
        ({"total_lengths": [9, 14, 7]}, r"unconcat_tokens have lengths \[9, 14, 6\] but total_lengths is \[9, 14, 7\]"),
        ({"total_lengths": [9, 14]}, r"total_lengths is \[9, 14\]"),
        ({"response_lengths": [4, 13]}, "3 samples but 2 response_lengths"),
        ({"response_lengths": [9, 13, 2]}, "sample 0 has an empty prompt"),
        ({"args": arguments(rollout_temperature=0.0)}, "temperature must be a positive finite number"),
        (
            {"top_p_token_ids": [[1]], "top_p_token_offsets": [[0, 1]]},
            "top_p_token_ids has 1 samples and top_p_token_offsets 1, but there are 3 response_lengths",
        ),
    ],
)
def test_errors_name_the_host_function(alone, change, message):
    here = here_alone(alone)
    if not change.keys() <= inspect.signature(alone.get_log_probs_and_entropy).parameters.keys():
        pytest.skip("not in this release")
    logitless.install("slime")
    given = {"logits": torch.zeros(1, 34, V), "args": here.args} | here.inputs | change
    with pytest.raises(LogitlessError, match=rf"^slime\.[a-z_.]+\.get_log_probs_and_entropy: .*{message}"):
        alone.get_log_probs_and_entropy(given.pop("logits"), **given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, z, t: f(z[0], t, dist.group.WORLD), r"calculate_\w+: logits must be \[N, V'\] but is \[506\]"),
        (lambda f, z, t: f(z, t[:2], dist.group.WORLD), r"tokens must be \[3\] but is \[2\]"),
        (
            lambda f, z, t: f(z, t, dist.group.WORLD, log_prob_keep_mask=z),
            r"log_prob_keep_mask must be bool \[3, 506\] like logits but is torch.float32",
        ),
    ],
)
def test_errors_of_calculate(alone, call, message):
    if "keep_mask" in message and not takes(alone.calculate_log_probs_and_entropy, "log_prob_keep_mask"):
        pytest.skip("not in this release")
    logitless.install("slime")
    with pytest.raises(LogitlessError, match=message):
        call(alone.calculate_log_probs_and_entropy, torch.randn(3, V), torch.zeros(3, dtype=torch.int64))
