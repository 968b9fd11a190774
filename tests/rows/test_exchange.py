"""Results between ranks of a sequence group, over real processes: values, gradients, and how often ranks talk.

A job is made here and run by every rank; what it must give is computed here too, in one process, on one vector that
holds every response token. Values are small integers in floats, so sums are exact and compared bit for bit.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from cuts import Batch
from schemes import Layout
from shared.exchange import BATCH, Collectives, sources
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from logitless import LogitlessError


@dataclass(frozen=True)
class Job:
    """One call of ``gather`` (``to`` is None) or ``redistribute``, and the loss each rank makes of the result.

    The loss of rank r is ``sum over fields with a graph of (weights[r, field] * result ** 2)``.
    """

    source: Layout
    grad: str | None
    to: Layout | None = None
    graphs: tuple[bool, ...] = (True,)
    batch: Batch = BATCH
    options: dict[str, Any] = field(default_factory=dict)
    to_options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    same_loss: bool = False

    @property
    def total(self) -> int:
        return sum(self.batch.responses)

    def values(self) -> Tensor:
        """``[fields, total]`` of every response token, sample after sample; none is 0."""
        draw = random.Random(1)
        table = [[draw.choice([-1, 1]) * draw.randint(1, 9) for _ in range(self.total)] for _ in self.graphs]
        return torch.tensor(table, dtype=self.dtype)

    def weights(self, rank: int) -> Tensor:
        """``[fields, total]`` of this rank's loss."""
        draw = random.Random(17 if self.same_loss else rank)
        return torch.tensor([[draw.randint(-5, 5) for _ in range(self.total)] for _ in self.graphs], dtype=self.dtype)


class Outcome(NamedTuple):
    """What a rank sends back; gradients are those of its own rows, one per field."""

    results: list[Tensor]
    has_graph: list[bool]
    gradients: list[Tensor | None]
    forward_calls: list[tuple[str, int]]
    backward_calls: list[tuple[str, int]]


def run_jobs(rank: int, world: int, jobs: list[Job]) -> list[Outcome]:
    return [run_job(job, rank, dist.group.WORLD) for job in jobs]


def run_job(job: Job, rank: int, group: Any) -> Outcome:
    rows = job.source.rows(job.batch, rank, **job.options)
    values = job.values()
    # A parameter per token, of which the rows take some: on a rank without rows the graph is still there.
    leaves = [rows.expand(values[f, rows.response]).requires_grad_(graph) for f, graph in enumerate(job.graphs)]
    fields = [rows.take(leaf) for leaf in leaves]
    fields = fields[0] if len(fields) == 1 else fields
    with Collectives() as forward:
        if job.to is None:
            out = rows.gather(fields, group, grad=job.grad)
            lists = [out] if len(job.graphs) == 1 else out
            assert all([len(x) for x in parts] == job.batch.responses for parts in lists)
            results, weights = [torch.cat(parts) for parts in lists], job.weights(rank)
        else:
            to = job.to.rows(job.batch, rank, **job.to_options)
            out = rows.redistribute(fields, to, group, grad=job.grad)
            results, weights = [out] if len(job.graphs) == 1 else list(out), job.weights(rank)[:, to.response]
    with Collectives() as backward:
        losses = [(w * x * x).sum() for w, x in zip(weights, results, strict=True) if x.requires_grad]
        if losses:
            sum(losses).backward()
    gradients = [None if leaf.grad is None else rows.take(leaf.grad) for leaf in leaves]
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert gradient is None or torch.equal(leaf.grad, rows.expand(gradient)), "a token without a row has a gradient"
    has_graph = [x.requires_grad for x in results]
    return Outcome([x.detach() for x in results], has_graph, gradients, forward.calls, backward.calls)


def places(batch: Batch, layout: Layout, rank: int, mask_only: bool) -> list[int]:
    """Where the rows of a rank are among all response tokens, by the oracle of layouts."""
    found = []
    for token in layout.held(batch)[rank]:
        position = batch.predicts(token)
        if position is not None and (not mask_only or batch.masks[token[0]][position]):
            found.append(sum(batch.responses[: token[0]]) + position)
    return found


def assert_outcome(job: Job, world: int, outcomes: list[Outcome]) -> None:
    scored = [places(job.batch, job.source, rank, "loss_mask_only" in job.options) for rank in range(world)]
    wanted = [list(range(job.total)) for _ in range(world)]
    if job.to is not None:
        wanted = [places(job.batch, job.to, rank, "loss_mask_only" in job.to_options) for rank in range(world)]
    anywhere = torch.zeros(job.total, dtype=job.dtype)
    anywhere[[k for part in scored for k in part]] = 1
    for rank, outcome in enumerate(outcomes):
        gradients = single_process_gradients(job, rank, world, scored, wanted)
        for f, graph in enumerate(job.graphs):
            result = (job.values()[f] * anywhere)[wanted[rank]]
            assert torch.equal(outcome.results[f], result), f"values of field {f} on rank {rank}"
            differentiable = graph and job.grad is not None
            assert outcome.has_graph[f] == differentiable, f"graph of field {f} on rank {rank}"
            if differentiable:
                expected = gradients[f][scored[rank]]
                assert torch.equal(outcome.gradients[f], expected), f"gradient of field {f} on rank {rank}"
            else:
                assert outcome.gradients[f] is None
        num_graphs = sum(job.graphs)
        back = [("allreduce_", num_graphs * job.total)] if job.grad == "sum" and num_graphs else []
        assert outcome.forward_calls == [("allreduce_", len(job.graphs) * job.total)]
        assert outcome.backward_calls == back


def single_process_gradients(
    job: Job, rank: int, world: int, scored: list[list[int]], wanted: list[list[int]]
) -> Tensor:
    """``[fields, total]`` gradients by the meaning of each rule, with every response token in one vector.

    sum: of the losses of all ranks together. slice: of this rank's loss alone, in which the tokens of other ranks are
    constants; where all ranks compute the same loss, that is its gradient.
    """
    full = job.values().requires_grad_()
    mine = torch.zeros(job.total, dtype=torch.bool)
    mine[scored[rank]] = True
    if job.grad == "sum":
        parts = [(job.weights(r)[:, wanted[r]] * full[:, wanted[r]] ** 2).sum() for r in range(world)]
        torch.stack(parts).sum().backward()
    else:
        live = torch.where(mine, full, full.detach())
        (job.weights(rank)[:, wanted[rank]] * live[:, wanted[rank]] ** 2).sum().backward()
    return full.grad


def assert_jobs(ranks: Any, world: int, jobs: list[Job]) -> list[list[Outcome]]:
    by_rank = ranks(run_jobs, world, jobs)
    for job, *outcomes in zip(jobs, *by_rank, strict=True):
        assert_outcome(job, world, outcomes)
    return by_rank


GRADS = ["sum", "slice", None]


def test_the_counter_counts(ranks):
    assert ranks(count_known_collectives, 2) == [[("allreduce_", 5), ("allreduce_", 7)]] * 2


def count_known_collectives(rank: int, world: int) -> list[tuple[str, int]]:
    with Collectives() as seen:
        x = torch.zeros(5, requires_grad=True)
        dist.all_reduce(x.detach())
        AddOver.apply(torch.zeros(7, requires_grad=True)).sum().backward()
    return seen.calls


class AddOver(torch.autograd.Function):
    """Talks in backward only."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("grad", GRADS)
def test_gather(ranks, world, grad):
    jobs = [Job(layout, grad, same_loss=grad == "slice") for layout in sources(world)]
    jobs.append(replace(jobs[0], dtype=torch.float32))
    assert_jobs(ranks, world, jobs)


def test_slice_of_the_same_loss_is_its_gradient(ranks):
    """The rule said once more without the oracle: d (sum of w x^2) / dx = 2 w x, not twice or four times that."""
    job = Job(Layout("zigzag", 4), "slice", same_loss=True)
    [values], [weights] = job.values(), job.weights(0)
    for rank, [outcome] in enumerate(ranks(run_jobs, 4, [job])):
        mine = places(BATCH, job.source, rank, False)
        assert outcome.gradients[0].tolist() == [float(2 * weights[k] * values[k]) for k in mine]


def test_sum_of_the_same_loss_is_its_gradient_times_the_ranks(ranks):
    """Losses add up under "sum", so four copies of one loss count four times."""
    job = Job(Layout("zigzag", 4), "sum", same_loss=True)
    [values], [weights] = job.values(), job.weights(0)
    for rank, [outcome] in enumerate(ranks(run_jobs, 4, [job])):
        mine = places(BATCH, job.source, rank, False)
        assert outcome.gradients[0].tolist() == [float(4 * 2 * weights[k] * values[k]) for k in mine]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("grad", GRADS)
def test_redistribute(ranks, world, grad):
    zigzag, contiguous = Layout("zigzag", world), Layout("contiguous", world)
    pairs = [
        (contiguous, zigzag),
        (zigzag, contiguous),
        (zigzag, zigzag),
        (Layout("contiguous", world, extra=30), zigzag),
        (zigzag, Layout("contiguous", world, extra=30)),
        (Layout("contiguous", world, align=3, extra=2), Layout("zigzag lines", world)),
    ]
    assert_jobs(ranks, world, [Job(source, grad, to=to) for source, to in pairs])


@pytest.mark.parametrize("world", [2, 4])
def test_there_and_back(ranks, world):
    assert ranks(round_trip, world) == [True] * world


def round_trip(rank: int, world: int) -> bool:
    here, there = Layout("contiguous", world).rows(BATCH, rank), Layout("zigzag", world).rows(BATCH, rank)
    x = here.response.double() * 3 + 1
    moved = here.redistribute(x, there, dist.group.WORLD, grad=None)
    assert torch.equal(moved, there.response.double() * 3 + 1)
    return torch.equal(there.redistribute(moved, here, dist.group.WORLD, grad=None), x)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("grad", GRADS)
def test_fields_keep_their_own_graph(ranks, world, grad):
    """In one call, a metric without a graph comes back without one, next to fields that have one."""
    jobs = []
    for graphs in [(True, False), (False, True, True), (False, False), (True, True, True)]:
        jobs.append(Job(Layout("zigzag", world), grad, graphs=graphs, same_loss=grad == "slice"))
        jobs.append(Job(Layout("contiguous", world), grad, to=Layout("zigzag", world), graphs=graphs))
        jobs.append(Job(Layout("contiguous", world, extra=30), grad, graphs=graphs, same_loss=grad == "slice"))
    assert_jobs(ranks, world, jobs)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("grad", ["sum", "slice"])
def test_masked_rows_come_back_as_zero(ranks, world, grad):
    """Rows left out by loss_mask_only are zero in the whole and in any other order, and have no gradient."""
    only = {"loss_mask_only": True}
    zigzag, contiguous = Layout("zigzag", world), Layout("contiguous", world)
    jobs = [
        Job(zigzag, grad, options=only, same_loss=grad == "slice"),
        Job(contiguous, grad, options=only, graphs=(True, False), same_loss=grad == "slice"),
        Job(contiguous, grad, to=zigzag, options=only),
        Job(contiguous, grad, to=zigzag, options=only, to_options=only),
        Job(zigzag, grad, to=contiguous, to_options=only),
    ]
    assert_jobs(ranks, world, jobs)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_without_rows(ranks, world):
    """Also when no rank has any: the calls are the same, so nobody waits for a peer that does not come."""
    nobody = Batch([3, 1, 4], [0, 0, 0], [[], [], []])
    masked = Batch([5, 4], [3, 2], [[0, 0, 0], [0, 0]])
    one = Batch([8], [1], [[1]])
    jobs = []
    for grad in ("sum", "slice"):
        for batch in (nobody, one):
            same = grad == "slice"
            jobs.append(Job(Layout("zigzag", world), grad, batch=batch, same_loss=same))
            jobs.append(Job(Layout("contiguous", world), grad, to=Layout("zigzag", world), batch=batch))
        jobs.append(Job(Layout("zigzag", world), grad, batch=masked, options={"loss_mask_only": True}, same_loss=same))
    assert_jobs(ranks, world, jobs)


def test_integers_and_special_values(ranks):
    """Counts travel as integers; an infinity or NaN stays in its own place."""
    for whole, special in ranks(exchange_special_values, 2):
        assert whole.dtype == torch.int64
        assert whole.tolist() == list(range(16))
        assert special[3] == -torch.inf
        assert special[5].isnan()
        others = [k for k in range(16) if k not in (3, 5)]
        assert special[others].tolist() == [float(k) for k in others]


def exchange_special_values(rank: int, world: int) -> tuple[Tensor, Tensor]:
    rows = Layout("zigzag", 2).rows(BATCH, rank)
    special = rows.response.double()
    special[rows.response == 3] = -torch.inf
    special[rows.response == 5] = torch.nan
    whole = rows.gather(rows.response, dist.group.WORLD, grad="sum")
    return torch.cat(whole), torch.cat(rows.gather(special, dist.group.WORLD, grad=None))


def test_without_grad_mode_there_is_no_graph(ranks):
    assert ranks(gather_without_grad_mode, 2) == [False, False]


def gather_without_grad_mode(rank: int, world: int) -> bool:
    rows = Layout("zigzag", 2).rows(BATCH, rank)
    x = rows.response.double().requires_grad_()
    with torch.no_grad():
        return torch.cat(rows.gather(x, dist.group.WORLD, grad="sum")).requires_grad


def test_an_unsplit_sequence_needs_no_group(ranks):
    for calls, outcome in ranks(exchange_alone, 2):
        assert calls == []
        whole, gradient, moved = outcome
        assert whole == [[0.0, 1.0], [2.0, 3.0, 4.0]]
        assert gradient == [0.0, 2.0, 4.0, 6.0, 8.0]
        assert moved == [0.0, 1.0, 2.0, 3.0, 4.0]


def exchange_alone(rank: int, world: int) -> tuple[list[tuple[str, int]], Any]:
    if rank == 1:
        # A collective over the default group would make rank 0 wait.
        time.sleep(0.3)
    batch = Batch([4, 5], [2, 3])
    rows, lines = Layout("packed").rows(batch, 0), Layout("lines").rows(batch, 0)
    x = torch.arange(5.0, dtype=torch.float64).requires_grad_()
    with Collectives() as seen:
        whole = rows.gather(x, None, grad="sum")
        moved = rows.redistribute(x, lines, None, grad="slice")
        (torch.cat(whole) ** 2).sum().backward()
    return seen.calls, ([w.tolist() for w in whole], x.grad.tolist(), moved.tolist())


def test_no_second_derivative_rather_than_a_wrong_one(ranks):
    """A collective in backward is not differentiable, so asking for its graph must not give this rank's part of it."""
    for text in ranks(differentiate_twice, 2):
        assert "second derivative" in text


def differentiate_twice(rank: int, world: int) -> str:
    rows = Layout("zigzag", 2).rows(BATCH, rank)
    x = rows.response.double().requires_grad_()
    loss = (torch.cat(rows.gather(x, dist.group.WORLD, grad="sum")) ** 3).sum()
    try:
        torch.autograd.grad(loss, x, create_graph=True)
    except LogitlessError as error:
        return str(error)
    return "no error"


def test_device_mesh(ranks):
    """Two sequence groups side by side, each with a batch of its own; ranks of a group are not neighbours."""
    jobs = [
        Job(Layout("zigzag", 2), "sum", graphs=(True, False)),
        Job(Layout("contiguous", 2), "sum", to=Layout("zigzag", 2), batch=Batch([9, 4], [5, 2], [[1] * 5, [1] * 2])),
    ]
    results = ranks(run_on_a_mesh, 4, jobs)
    for pair, job in enumerate(jobs):
        for which in (0, 1):
            assert_outcome(job, 2, [results[pair][which], results[pair + 2][which]])
    for *_, text in results:
        assert "2 dimensions" in text


def run_on_a_mesh(rank: int, world: int, jobs: list[Job]) -> tuple[Outcome, Outcome, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    job, place = jobs[mesh["tp"].get_local_rank()], mesh["cp"].get_local_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    outcomes = [run_job(job, place, group) for group in (mesh["cp"], groups[rank % 2])]
    rows = job.source.rows(job.batch, place)
    try:
        rows.gather(torch.zeros(len(rows)), mesh, grad=None)
        text = ""
    except LogitlessError as error:
        text = str(error)
    return *outcomes, text
