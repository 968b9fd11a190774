"""NeMo-RL's functions with and without ours, on a double of NeMo-RL or on NeMo-RL itself.

    one process       shapes, dtypes, temperature, errors
    four ranks        tensor and context parallel, packed and not, filters, hidden states, torch's own order

The tolerance rule with the host as the yardstick: at most twice its error to float64. ``LOGITLESS_HOSTS`` names
checkouts of NeMo-RL (see hosts.py).
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import load, put_first, takes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import logitless
from benchmarks.bench.measure import peak_bytes
from logitless import LogitlessError

DOUBLE = not put_first("nemo_rl")
if DOUBLE:
    sys.path.append(str(Path(__file__).parent / "doubles"))

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")
on_the_double = pytest.mark.skipif(not DOUBLE, reason="needs modules of the host that do not import here")

V, B, S = 506, 3, 13
MESHES = [(2, 2), (2, 1), (1, 2)]
"""Tensor- and context-parallel sizes."""


def utils() -> Any:
    if not DOUBLE:
        return load("nemo_rl")[-1]
    for name in ("nemo_rl.algorithms.loss.utils", "nemo_rl.models.megatron.train"):
        importlib.import_module(name)
    return importlib.import_module("nemo_rl.distributed.model_utils")


def sampling(**more: Any) -> Any:
    return importlib.import_module("nemo_rl.algorithms.logits_sampling_utils").TrainingSamplingParams(**more)


FILTERS = [None, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 50, "top_p": 0.7}]


def true_scores(logits: Tensor, target: Tensor, filters: dict | None = None) -> Tensor:
    """Log-probs of ``[..., V]`` float64 logits, written out with a loop over rows; -inf for filtered targets."""
    flat, rows = logits.reshape(-1, logits.shape[-1]), []
    for row, t in zip(flat, target.reshape(-1).tolist(), strict=True):
        kept = row.argsort(descending=True)
        if filters:
            kept = kept[: filters.get("top_k", V)]
            p = row[kept].detach().softmax(0)
            before = p.cumsum(0) - p
            kept = kept[before < filters.get("top_p", 2.0)]
        at = (kept == t).nonzero()
        log_p = row[kept].log_softmax(0)
        if 0 <= t < len(row):
            rows.append(log_p[at[0, 0]] if len(at) else row.new_full((), -torch.inf))
        else:
            rows.append(log_p[0].detach() * 0 - (row.logsumexp(0) - row.logsumexp(0).detach()))
    return torch.stack(rows).view(target.shape)


def fused(hidden: Tensor, weight: Tensor, *more: Any, **options: Any) -> Tensor:
    """The fused head; the release of 0.6 takes the tied weight as well."""
    function = utils().from_parallel_hidden_states_to_logprobs
    tied = [None] if takes(function, "output_weight") else []
    return function(hidden, weight, *tied, False, *more, **options)


class Ran(NamedTuple):
    values: Tensor
    gradients: list[Tensor]


def run(function: Any, leaves: list[Tensor], upstream: Tensor | None) -> Ran:
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    values = function(*leaves)
    assert values.dtype in (torch.float32, torch.float64)
    if upstream is None:
        assert not values.requires_grad
        return Ran(values, [])
    # -inf has no gradient to speak of: the host masks it first.
    total = (values.masked_fill(values.isinf(), 0.0) * upstream).sum()
    return Ran(values.detach(), list(torch.autograd.grad(total, leaves)))


def compare(function: Any, exact: Any, leaves: list[Tensor], upstream: Tensor, total: Tensor, cut: Any, **options):
    """Theirs, ours and the truth: ``exact`` of whole float64 leaves, whose gradients ``cut`` brings to this rank."""
    theirs = run(function, [cut(x) for x in leaves], upstream)
    logitless.install("nemo_rl", audit=2, **options)
    try:
        ours = run(function, [cut(x) for x in leaves], upstream)
        report = logitless.status().hosts[0]
        assert sum(entry.calls for entry in report.replaced) == 1
        assert report.audit.passed, str(report)
    finally:
        logitless.uninstall("nemo_rl")
    truth = run(exact, [x.double() for x in leaves], total.double())
    assert ours.values.dtype == theirs.values.dtype
    assert_close_to_truth(ours.values, truth.values, theirs.values)
    for mine, right, other in zip(ours.gradients, truth.gradients, theirs.gradients, strict=True):
        assert mine.dtype == other.dtype
        assert_gradient_close_to_truth(mine, cut(right), other)


class Mesh(NamedTuple):
    tp: Any
    cp: Any
    whole: Any

    @property
    def columns(self) -> slice:
        width = V // self.tp.size()
        return slice(self.tp.rank() * width, (self.tp.rank() + 1) * width)

    @property
    def bounds(self) -> tuple[int, int]:
        return self.columns.start, self.columns.stop

    def upstream(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Of this context-parallel rank, and of all of them: every rank has a loss of its own, and they add up."""
        every = [torch.randn(shape, generator=torch.Generator().manual_seed(r)) for r in range(self.cp.size())]
        return every[self.cp.rank()], torch.stack(every).sum(0)

    def zigzag(self, x: Tensor, dim: int) -> Tensor:
        size, rank = self.cp.size(), self.cp.rank()
        chunks = x.chunk(2 * size, dim)
        return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim) if size > 1 else x


def meshes() -> list[Mesh]:
    made = []
    for tp, cp in MESHES:
        mesh = init_device_mesh("cpu", (4 // (tp * cp), cp, tp), mesh_dim_names=("dp", "cp", "tp"))
        made.append(Mesh(mesh.get_group("tp"), mesh.get_group("cp"), mesh))
    return made


def check_lines(mesh: Mesh, filters: dict | None, dtype: torch.dtype, through: str) -> None:
    """Sequences of 13 tokens, padded to 16 so that they divide."""
    torch.manual_seed(1)
    logits, target = (torch.randn(B, 16, V) * 3).to(dtype), torch.randint(V, (B, S))
    if filters is None:
        target[1, 4], target[2, 7] = V + 3, -100
    else:
        # Half of the targets likely enough to stay.
        target[:, 1::2] = logits.argmax(-1)[:, : S - 1 : 2][:, : target[:, 1::2].shape[1]]
    upstream, total = mesh.upstream(B, S - 1)
    params = None if filters is None else sampling(**filters)

    def function(x: Tensor) -> Tensor:
        if through == "direct":
            return utils().from_parallel_logits_to_logprobs(
                x, target, *mesh.bounds, mesh.tp, cp_group=mesh.cp, chunk_size=4, sampling_params=params
            )
        return utils().get_next_token_logprobs_from_logits(
            target,
            x,
            vocab_parallel_rank=mesh.tp.rank(),
            vocab_parallel_group=mesh.tp,
            context_parallel_group=mesh.cp,
            sampling_params=params,
        )

    compare(
        function,
        lambda x: true_scores(x[:, : S - 1], target[:, 1:], filters),
        [logits],
        upstream,
        total,
        lambda x: mesh.zigzag(x, 1)[..., mesh.columns].contiguous(),
    )


def check_packs(mesh: Mesh, filters: dict | None, shifted: bool) -> None:
    """Sequences of 8, 0, 12 and 4 places, results in lines of 10."""
    torch.manual_seed(2)
    lengths, width = [8, 0, 12, 4], 10
    logits, target = torch.randn(1, 24, V) * 3, torch.randint(V, (1, 24))
    if filters:
        # Half of the targets likely enough to stay.
        target[:, 1::2] = logits.argmax(-1)[:, ::2]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    upstream, total = mesh.upstream(4, width - 1)
    params = None if filters is None else sampling(**filters)

    def zigzag(x: Tensor) -> Tensor:
        return torch.cat([mesh.zigzag(part, 1) for part in x.split(lengths, 1)], 1)

    rolled = torch.cat([part.roll(-1, dims=1) for part in target.split(lengths, 1)], 1)

    def function(x: Tensor) -> Tensor:
        return utils().from_parallel_logits_to_logprobs_packed_sequences(
            x,
            zigzag(rolled) if shifted else target,
            cu,
            width,
            *mesh.bounds,
            mesh.tp,
            cp_group=mesh.cp,
            sampling_params=params,
            target_is_pre_rolled=shifted,
        )

    def exact(x: Tensor) -> Tensor:
        scores = true_scores(x, rolled, filters)[0]
        lines = [part[:-1][: width - 1] for part in scores.split(lengths)]
        return torch.stack([torch.nn.functional.pad(x, (0, width - 1 - len(x))) for x in lines])

    compare(function, exact, [logits], upstream, total, lambda x: zigzag(x)[..., mesh.columns].contiguous())


def check_hidden(mesh: Mesh, dtype: torch.dtype, temperature: float) -> None:
    torch.manual_seed(3)
    hidden, weight = torch.randn(12, B, 9).to(dtype), torch.randn(V, 9).to(dtype)
    target = torch.randint(V, (B, 12))
    target[1, 5] = V + 1
    upstream, _ = mesh.upstream(B, 11)

    def function(h: Tensor, w: Tensor, cp_group: Any = None) -> Tensor:
        return fused(h, w, target, *mesh.bounds, mesh.tp, cp_group=cp_group, chunk_size=4)

    def exact(h: Tensor, w: Tensor) -> Tensor:
        logits = (h @ w.T).transpose(0, 1) / temperature
        return true_scores(logits[:, :-1], target[:, 1:])

    def cut(x: Tensor) -> Tensor:
        return x.chunk(mesh.tp.size())[mesh.tp.rank()].contiguous()

    if temperature == 1.0:
        compare(function, exact, [hidden, weight], upstream, upstream, cut)
        return
    logitless.install("nemo_rl", fused_temperature=temperature, accurate=True)
    ours = run(function, [cut(hidden), cut(weight)], upstream)
    if mesh.cp.size() > 1:
        with pytest.raises(LogitlessError, match="knows no context parallelism"):
            function(cut(hidden), cut(weight), mesh.cp)
    logitless.uninstall("nemo_rl")
    truth = run(exact, [hidden.double(), weight.double()], upstream.double())
    assert (ours.values - truth.values).abs().max() < 1e-5


def check_entropy(mesh: Mesh, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    logits, upstream = (torch.randn(B, S, V) * 3).to(dtype), torch.randn(B, S)
    function = utils().ChunkedDistributedEntropy

    def exact(x: Tensor) -> Tensor:
        log_p = x.log_softmax(-1)
        return (log_p.exp() * log_p).sum(-1)

    def cut(x: Tensor) -> Tensor:
        return x[..., mesh.columns].contiguous()

    compare(lambda x: function.apply(x, 4, mesh.tp), exact, [logits], upstream, upstream, cut)
    logitless.install("nemo_rl")
    run(lambda x: function.apply(x, 4, mesh.tp, True), [cut(logits)], None)
    logitless.uninstall("nemo_rl")


def check_torch_order(mesh: Mesh) -> None:
    """Tokens as torch's context parallelism balances them, ids as a DTensor over that dimension of the mesh."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    torch.manual_seed(5)
    logits, ids = torch.randn(B, 16, V) * 3, torch.randint(V, (B, 16))
    size = mesh.cp.size()
    chunks = torch.arange(16).chunk(2 * size)
    order = torch.cat([torch.cat([chunks[r], chunks[2 * size - 1 - r]]) for r in range(size)])
    target = distribute_tensor(ids[:, order], mesh.whole["cp"], [Shard(1)])
    upstream = torch.randn(B, 15)

    def function(x: Tensor) -> Tensor:
        return utils().dtensor_from_parallel_logits_to_logprobs(x, target, *mesh.bounds, mesh.tp, seq_index=order)

    def cut(x: Tensor) -> Tensor:
        return x[:, order].chunk(size, 1)[mesh.cp.rank()][..., mesh.columns].contiguous()

    compare(function, lambda x: true_scores(x[:, :-1], ids[:, 1:]), [logits], upstream, upstream, cut)
    # The entry point hands DTensor logits on to the function above.
    whole = DTensor.from_local(cut(logits), mesh.whole["cp", "tp"], [Shard(1), Shard(2)])
    logitless.install("nemo_rl")
    values = utils().get_next_token_logprobs_from_logits(target, whole, seq_index=order)
    counts = {entry.name.split(".")[-1]: entry for entry in logitless.status().hosts[0].replaced}
    logitless.uninstall("nemo_rl")
    assert counts["get_next_token_logprobs_from_logits"].passed_on == 1
    assert counts["dtensor_from_parallel_logits_to_logprobs"].calls == 1
    torch.testing.assert_close(values, run(function, [cut(logits)], upstream).values, atol=1e-5, rtol=0)


def check_distillation(mesh: Mesh, zero: bool, dtype: torch.dtype, cp: bool) -> None:
    """K logits of a teacher: the student's log-probs of its ids and, with the tail, the negative entropy besides."""
    torch.manual_seed(6)
    logits, ids = (torch.randn(B, 16, V) * 3).to(dtype), torch.randn(B, S if cp else 16, V).topk(5).indices
    teacher, size = torch.randn(*ids.shape), ids.shape[1]
    upstream, total = mesh.upstream(B, size - 1, 6)
    upstream = upstream if cp else total

    def joined(own: Tensor, other: Tensor, entropy: Tensor | None) -> Tensor:
        assert torch.equal(other, teacher.log_softmax(-1)[:, :-1])
        return torch.cat([own, own[..., :1] * 0 if entropy is None else entropy[..., None]], -1)

    def function(x: Tensor) -> Tensor:
        where = (mesh.tp.rank(), mesh.tp, mesh.cp if cp else None)
        return joined(*utils().get_distillation_topk_logprobs_from_logits(x, teacher, ids, zero, zero, *where))

    def exact(x: Tensor) -> Tensor:
        x, at = x[:, : size - 1], ids[:, :-1]
        log_p = x.log_softmax(-1)
        own = log_p.gather(-1, at) if zero else x.gather(-1, at).log_softmax(-1)
        last = (log_p.exp() * log_p).sum(-1, keepdim=True) if zero else own[..., :1] * 0
        return torch.cat([own, last], -1)

    def cut(x: Tensor) -> Tensor:
        return (mesh.zigzag(x, 1) if cp else x)[..., mesh.columns].contiguous()

    if not cp:
        with warnings.catch_warnings():
            # NeMo-RL sums logits over ranks in a way that autograd warns of.
            warnings.filterwarnings("ignore", "c10d::allreduce_", UserWarning)
            compare(function, exact, [logits], upstream, total, cut)
        return
    # NeMo-RL cuts the sequence itself, and calls the classes.
    theirs = run(function, [cut(logits)], upstream)
    logitless.install("nemo_rl")
    try:
        ours = run(function, [cut(logits)], upstream)
        counts = {entry.name.split(".", 3)[-1]: entry for entry in logitless.status().hosts[0].replaced}
    finally:
        logitless.uninstall("nemo_rl")
    truth = run(exact, [logits.double()], total.double())
    assert_close_to_truth(ours.values, truth.values, theirs.values)
    assert_gradient_close_to_truth(ours.gradients[0], cut(truth.gradients[0]), theirs.gradients[0])
    assert counts["get_distillation_topk_logprobs_from_logits"].why == {"context parallelism": 1}
    assert counts["ChunkedDistributedGatherLogprob.apply"].calls == 1


def run_lines(rank: int, world: int) -> None:
    for mesh in meshes():
        for filters in FILTERS:
            check_lines(mesh, filters, torch.float32, "direct")
        check_lines(mesh, None, torch.bfloat16, "direct")
        check_lines(mesh, FILTERS[3], torch.float32, "entry point")


def run_packs(rank: int, world: int) -> None:
    for mesh in meshes():
        for filters in (None, FILTERS[3]):
            for shifted in (False, True):
                check_packs(mesh, filters, shifted)


def run_rest(rank: int, world: int) -> None:
    for mesh in meshes():
        for dtype in (torch.float32, torch.bfloat16):
            check_entropy(mesh, dtype)
            check_hidden(mesh, dtype, 1.0)
        check_hidden(mesh, torch.bfloat16, 0.7)
        for zero in (False, True):
            check_distillation(mesh, zero, torch.bfloat16 if zero else torch.float32, cp=False)
        if mesh.cp.size() > 1:
            check_distillation(mesh, True, torch.float32, cp=True)
            check_torch_order(mesh)


@pytest.mark.parametrize("job", [run_lines, run_packs, run_rest])
def test_every_mesh(ranks, job):
    ranks(job, 4, timeout=180)


# One process.


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield utils()
    dist.destroy_process_group()


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_any_group(filters, dtype):
    # NeMo-RL itself filters one sequence at a time, or none.
    b = B if DOUBLE or filters is None else 1
    logits, ids = (torch.randn(b, S, V) * 3).to(dtype), torch.randint(V, (b, S))
    if filters is not None and dtype == torch.bfloat16:
        # Equal logits at the edge of a filter may go either way: these are neighbours in bfloat16, all different.
        bits = torch.stack([torch.randperm(V) for _ in range(b * S)]).view(b, S, V) + 0x3F00
        logits = bits.to(torch.int16).view(dtype)
    ids[:, 1::2] = logits.argmax(-1)[:, : S - 1 : 2]
    params = None if filters is None else sampling(**filters)
    upstream = torch.randn(b, S - 1)
    compare(
        lambda x: utils().get_next_token_logprobs_from_logits(ids, x, sampling_params=params),
        lambda x: true_scores(x[:, :-1], ids[:, 1:], filters),
        [logits],
        upstream,
        upstream,
        lambda x: x,
    )


@on_the_double
def test_filtered_targets_are_found_by_the_host(alone):
    losses = importlib.import_module("nemo_rl.algorithms.loss.utils")
    logits, ids = torch.randn(B, S, V, requires_grad=True), torch.randint(V, (B, S))
    before = losses.next_token_logprobs({"input_ids": ids}, logits, sampling(top_k=200))
    logitless.install("nemo_rl")
    after = losses.next_token_logprobs({"input_ids": ids}, logits, sampling(top_k=200))
    assert (after == 0).any()
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)
    after.sum().backward()
    assert logits.grad.isfinite().all()


def test_inference_only(alone):
    logits, ids = torch.randn(B, S, V, requires_grad=True), torch.randint(V, (B, S))
    logitless.install("nemo_rl")
    group = dist.group.WORLD
    run(lambda x: alone.from_parallel_logits_to_logprobs(x, ids, 0, V, group, inference_only=True), [logits], None)
    cu = torch.tensor([0, S])
    packed = alone.from_parallel_logits_to_logprobs_packed_sequences
    run(lambda x: packed(x[:1], ids[:1], cu, S, 0, V, group, inference_only=True), [logits], None)
    hidden, weight = torch.randn(S, B, 9), torch.randn(V, 9)
    run(lambda h: fused(h, weight, ids, 0, V, group, inference_only=True), [hidden], None)


def test_classes_that_are_called_directly(alone):
    """Targets are shifted by the caller."""
    logits, ids, upstream = torch.randn(B, S, V) * 3, torch.randint(V, (B, S)), torch.randn(B, S)
    ids[1, 4] = V + 3
    group = dist.group.WORLD
    calls = {
        "DistributedLogprob": lambda x: alone.DistributedLogprob.apply(x, ids, 0, V, group, False),
        "ChunkedDistributedLogprob": lambda x: alone.ChunkedDistributedLogprob.apply(x, ids, 0, V, 5, group, False),
    }
    for function in calls.values():
        compare(function, lambda x: true_scores(x, ids), [logits], upstream, upstream, lambda x: x)


def test_sequences_of_one_token(alone):
    logitless.install("nemo_rl")
    logits = torch.randn(B, 1, V, requires_grad=True)
    values = alone.from_parallel_logits_to_logprobs(logits, torch.zeros(B, 1).long(), 0, V, dist.group.WORLD)
    assert values.shape == (B, 0)
    assert values.requires_grad
    values.sum().backward()


def test_the_rounding_of_half_precision_is_kept_unless_accurate(alone):
    hidden, weight, ids = torch.randn(S, B, 64).bfloat16(), torch.randn(V, 64).bfloat16(), torch.randint(V, (B, S))
    exact = true_scores((hidden.double() @ weight.double().T).transpose(0, 1)[:, :-1], ids[:, 1:])
    arguments = (hidden, weight, ids, 0, V, dist.group.WORLD)
    score = functools.partial(fused, *arguments, chunk_size=5)
    theirs = score()
    logitless.install("nemo_rl")
    ours = score()
    logitless.uninstall("nemo_rl")
    logitless.install("nemo_rl", accurate=True)
    accurate = score()
    assert (ours - theirs).abs().max() < 1e-5
    assert (theirs - exact).abs().max() > 1e-2
    assert (accurate - exact).abs().max() < 1e-5


@on_the_double
def test_temperature_divides_logits_and_not_log_probs(alone):
    train = importlib.import_module("nemo_rl.models.megatron.train")
    hidden, weight, ids = torch.randn(S, B, 9), torch.randn(V, 9), torch.randint(V, (B, S))
    arguments = (hidden, weight, False, ids, 0, V, dist.group.WORLD)
    exact = true_scores((hidden.double() @ weight.double().T).transpose(0, 1)[:, :-1] / 0.5, ids[:, 1:])
    params = sampling(temperature=0.5)
    theirs = train.post_process(alone.from_parallel_hidden_states_to_logprobs(*arguments), params)
    assert (theirs - exact).abs().max() > 0.1, "the defect that is documented is gone"
    logitless.install("nemo_rl", fused_temperature=0.5)
    ours = train.post_process(alone.from_parallel_hidden_states_to_logprobs(*arguments), params)
    assert (ours - exact).abs().max() < 1e-5
    logits = torch.ones(B, S, V)
    assert torch.equal(train.post_process(logits, params), torch.full((B, S, V), 2.0))
    assert logitless.status().hosts[0].replaced[-1].passed_on == 1
    logitless.uninstall("nemo_rl")
    logitless.install("nemo_rl")
    with pytest.raises(LogitlessError, match=r"scored at temperature 1.0 but this run samples at 0.5"):
        train.post_process(alone.from_parallel_hidden_states_to_logprobs(*arguments), params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory(alone, dtype):
    """Training: one gradient beside the logits, in their dtype. Without gradients: the working memory alone."""
    logits = torch.randn(2, 110, 5000).to(dtype).requires_grad_()
    ids = torch.randint(5000, (2, 110))
    arguments = (ids, 0, 5000, dist.group.WORLD)

    def train() -> None:
        values = alone.from_parallel_logits_to_logprobs(logits, *arguments, chunk_size=8)
        torch.autograd.grad(values.sum(), logits)

    def score() -> None:
        alone.from_parallel_logits_to_logprobs(logits, *arguments, inference_only=True, chunk_size=8)

    size = logits.numel() * logits.element_size()
    assert peak_bytes(train, logits.device) > 1.3 * size
    logitless.install("nemo_rl")
    assert peak_bytes(train, logits.device) < size + 2**20
    assert peak_bytes(score, logits.device) < 2**20


@on_the_double
def test_names_held_by_value(alone):
    losses = importlib.import_module("nemo_rl.algorithms.loss.utils")
    train = importlib.import_module("nemo_rl.models.megatron.train")
    name = "from_parallel_logits_to_logprobs_packed_sequences"
    before = getattr(alone, name)
    logitless.install("nemo_rl")
    assert getattr(losses, name) is getattr(train, name) is getattr(alone, name) is not before
    assert losses.get_next_token_logprobs_from_logits is alone.get_next_token_logprobs_from_logits
    assert train.from_parallel_logits_to_logprobs is alone.from_parallel_logits_to_logprobs
    logitless.uninstall("nemo_rl")
    assert getattr(losses, name) is getattr(train, name) is getattr(alone, name) is before
    assert "apply" not in vars(alone.ChunkedDistributedEntropy)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda u, z, i: u.from_parallel_logits_to_logprobs(z[0], i, 0, V, None),
            r"from_parallel_logits_to_logprobs: logits must be \[B, S / CP, V'\] and ids \[B, S\]",
        ),
        (
            lambda u, z, i: u.from_parallel_logits_to_logprobs(z[:, :5], i, 0, V, None),
            "target has 13 tokens per sequence but 1 ranks of 5 hold 5",
        ),
        (lambda u, z, i: u.from_parallel_logits_to_logprobs(z, i.float(), 0, V, None), "ids must be integers"),
        (
            lambda u, z, i: u.from_parallel_logits_to_logprobs_packed_sequences(z, i, i[0], S, 0, V, None),
            r"vocab_parallel_logits must be \[1, T / CP, V'\] but is \[3, 13, 506\]",
        ),
        (
            lambda u, z, i: u.from_parallel_logits_to_logprobs_packed_sequences(
                z[:1], i[:1, :7], torch.tensor([0, S]), S, 0, V, None
            ),
            r"target must be \[1, 13\] but is \[1, 7\]",
        ),
        (
            lambda u, z, i: u.get_next_token_logprobs_from_logits(i, z, vocab_parallel_group=dist.group.WORLD),
            "vocab_parallel_rank must be given with vocab_parallel_group but is None",
        ),
        (lambda u, z, i: u.ChunkedDistributedEntropy.apply(z[0], 2, None), r"must be \[B, S, V'\] but is \[13, 506\]"),
        (
            lambda u, z, i: fused(z, z[0], i, 0, S, None),
            r"target must be \[13, 3\] but is \[3, 13\]",
        ),
    ],
)
def test_errors_name_the_host_function(alone, call, message):
    logitless.install("nemo_rl")
    logits, ids = torch.randn(B, S, V), torch.randint(V, (B, S))
    with pytest.raises(LogitlessError, match=rf"^nemo_rl\.distributed\.model_utils\..*{message}"):
        call(alone, logits, ids)


def test_a_temperature_that_is_none():
    with pytest.raises(LogitlessError, match="temperature must be a positive finite number but is 0"):
        logitless.install("nemo_rl", fused_temperature=0.0)


@pytest.mark.parametrize("zero", [False, True])
def test_distillation_of_one_process(zero: bool):
    """Half-precision logits of one process; the last token is not scored."""
    logits, ids = (torch.randn(B, S, V) * 3).bfloat16(), torch.randn(B, S, V).topk(7).indices
    teacher = torch.randn(B, S, 7)

    def function(x: Tensor) -> Tensor:
        own, other, entropy = utils().get_distillation_topk_logprobs_from_logits(x, teacher, ids, zero, zero)
        assert torch.equal(other, teacher.log_softmax(-1)[:, :-1])
        return own if entropy is None else torch.cat([own, entropy[..., None]], -1)

    def exact(x: Tensor) -> Tensor:
        log_p, at = x[:, :-1].log_softmax(-1), ids[:, :-1]
        own = log_p.gather(-1, at)
        return torch.cat([own, (log_p.exp() * log_p).sum(-1, keepdim=True)], -1) if zero else own.log_softmax(-1)

    upstream = torch.randn(B, S - 1, 8 if zero else 7)
    compare(function, exact, [logits], upstream, upstream, lambda x: x)
