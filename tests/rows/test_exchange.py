"""Results between ranks of a sequence group, over real processes: values, gradients, and how often ranks talk.

A job is made here and run by every rank; what it must give is computed here too, in one process, on one vector that
holds every response token. Values are small integers in floats, so sums are exact and compared bit for bit.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from cuts import Batch
from schemes import Layout
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from logitless import Contiguous, LogitlessError, Rows, Zigzag

BATCH = Batch([11, 3, 5, 8, 2], [6, 2, 1, 7, 0], [[1, 0, 0, 1, 1, 1], [0, 1], [1], [0, 0, 1, 1, 0, 1, 1], []])
"""Sixteen response tokens of five samples, the last without a response."""


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


class Collectives(TorchDispatchMode):
    """Records the collectives that really run, whoever asks for them: (operator, elements)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            sent = args[0] if isinstance(args[0], Tensor) else args[0][0]
            self.calls.append((func._opname, sent.numel()))
        return func(*args, **(kwargs or {}))


# What runs in the ranks.


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


# What one process computes.


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


def sources(world: int) -> list[Layout]:
    return [
        Layout("zigzag", world),
        Layout("zigzag", world, align=4 * world, absorb=1, extra=3),
        Layout("contiguous", world),
        # So much padding that rank 0 holds every token, and the others none.
        Layout("contiguous", world, extra=30),
        Layout("zigzag lines", world, extra=2),
        Layout("zigzag lines", world, padding="left"),
    ]


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


# Values and gradients.


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


# Groups.


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


# Misuse.

MISUSES = {
    "rule": (lambda r, x, g: r.gather(x, g, grad="mean"), ["sum", "slice", "'mean'"]),
    "too long": (lambda r, x, g: r.gather(torch.zeros(len(r) + 1), g, grad=None), ["Rows.gather", "shape"]),
    "two dimensions": (lambda r, x, g: r.gather(x[:, None], g, grad=None), ["Rows.gather", "shape", ", 1]"]),
    "dtypes": (lambda r, x, g: r.gather([x, x.double()], g, grad=None), ["one dtype", "float32", "float64"]),
    "no fields": (lambda r, x, g: r.gather([], g, grad=None), ["Rows.gather"]),
    "no group": (lambda r, x, g: r.gather(x, None, grad=None), ["over 2 ranks", "group has 1"]),
    "no such group": (lambda r, x, g: r.gather(x, "world", grad=None), ["process group", "str"]),
    "unsplit rows": (
        lambda r, x, g: Rows.packed([[1, 2]], [1]).gather(torch.zeros(1), g, grad=None),
        ["over 1 ranks", "group has 2"],
    ),
    "rows without samples": (
        lambda r, x, g: Rows.at([0], [1]).gather(torch.zeros(1), g, grad=None),
        ["Rows.gather", "Rows.at", "no samples"],
    ),
    "to other samples": (
        lambda r, x, g: r.redistribute(x, Rows.packed([[1, 2, 3]], [2], cp=Zigzag(0, 2)), g, grad=None),
        ["responses of [2]", "[6, 2, 1, 7, 0]"],
    ),
    "to no samples": (lambda r, x, g: r.redistribute(x, Rows.at([0], [5]), g, grad=None), ["Rows.redistribute"]),
    "to a split over other ranks": (
        lambda r, x, g: r.redistribute(x, Layout("zigzag", 3).rows(BATCH, 0), g, grad=None),
        ["Rows.redistribute", "3 ranks", "2"],
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_named_before_anything_is_sent(ranks, name):
    _, parts = MISUSES[name]
    for text, calls in ranks(misuse, 2, name):
        assert calls == []
        assert [part for part in parts if part not in text] == [], text


def misuse(rank: int, world: int, name: str) -> tuple[str, list[tuple[str, int]]]:
    rows = Layout("zigzag", 2).rows(BATCH, rank)
    call, _ = MISUSES[name]
    with Collectives() as seen:
        try:
            call(rows, torch.zeros(len(rows)), dist.group.WORLD)
            text = ""
        except LogitlessError as error:
            text = str(error)
    return text, seen.calls


# Ranks that planned different things.

LENGTHS, RESPONSES = [11, 3, 5], [6, 2, 1]


def plan(cp: Any, lengths: list[int] = LENGTHS, responses: list[int] = RESPONSES, **options: Any) -> Rows:
    return Rows.packed(Batch(lengths, responses).tokens, responses, cp=cp, **options)


DISAGREEMENTS = {
    "scheme": (lambda rank: plan([Zigzag, Contiguous][rank](rank, 2)), 2, ["scheme", "Zigzag", "Contiguous"]),
    "size": (lambda rank: plan(Zigzag(rank, 2 + rank)), 2, ["scheme", "2", "3"]),
    "one unsplit": (lambda rank: plan(Zigzag(0, 2) if rank == 0 else None), 2, ["scheme", "Zigzag", "None"]),
    "all unsplit": (lambda rank: plan(None), 2, ["0 .. 1", "[0, 0]"]),
    "samples": (
        lambda rank: plan(Zigzag(rank, 2), LENGTHS[: 3 - rank], RESPONSES[: 3 - rank]),
        2,
        ["number of samples", "[3, 2]"],
    ),
    "same rank twice": (lambda rank: plan(Zigzag(0, 2)), 2, ["0 .. 1", "[0, 0]"]),
    "ranks in another order": (
        lambda rank: plan(Contiguous((rank + 1) % 4, 4)),
        4,
        ["0 .. 3", "[1, 2, 3, 0]"],
    ),
    "padded length": (
        lambda rank: plan(Zigzag(rank, 2), align=[4, 8][rank]),
        2,
        ["padded length of sample 0", "[12, 16]"],
    ),
    "length": (
        lambda rank: plan(Contiguous(rank, 2), [11, 3 + rank, 5], num_tokens=20),
        2,
        ["padded length of sample 1", "[3, 4]"],
    ),
    "response length": (
        lambda rank: plan(Zigzag(rank, 2), responses=[6, 2 - rank, 1]),
        2,
        ["response length of sample 1", "[2, 1]"],
    ),
    # Rows 4..9, 11..12 and 17 of windows [0, 10) and [12, 24): row 11 is nowhere.
    "window": (
        lambda rank: plan(Contiguous(rank, 2), num_tokens=[10, 12][rank]),
        2,
        ["num_tokens"],
    ),
    # Rows 0..11 of windows [0, 5), [7, 14) and [10, 15): 5 and 6 are nowhere, 10 and 11 are twice, twelve in all.
    "windows that only add up": (
        lambda rank: plan(Contiguous(rank, 3), [13], [12], num_tokens=[5, 7, 5][rank]),
        3,
        ["num_tokens", "[5, 7, 5]"],
    ),
    # Row 6 is in chunk 6 of 8, with rank 1 of 4: both ranks are there, and so is the one response token.
    "a group of another size": (
        lambda rank: plan(Zigzag(rank, 4), [8], [1]),
        2,
        ["4", "2"],
    ),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_disagreement_raises_the_same_text_on_every_rank(ranks, name):
    _, world, parts = DISAGREEMENTS[name]
    texts = ranks(check_plans, world, name)
    assert len(set(texts)) == 1, texts
    assert texts[0].startswith("Rows.check_over"), texts[0]
    assert [part for part in parts if part not in texts[0]] == [], texts[0]


def check_plans(rank: int, world: int, name: str) -> str:
    make, _, _ = DISAGREEMENTS[name]
    try:
        make(rank).check_over(dist.group.WORLD)
    except LogitlessError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("world", [1, 2, 4])
def test_agreement_raises_nothing(ranks, world):
    assert ranks(check_good_plans, world) == [None] * world


def check_good_plans(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    for layout in sources(world):
        for options in ({}, {"loss_mask_only": True}):
            layout.rows(BATCH, rank, **options).check_over(dist.group.WORLD)
            layout.rows(BATCH, rank, **options).check_over(mesh["cp"])
    Layout("packed").rows(BATCH, 0).check_over(None)


# Fields that differ between ranks.

FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "number": ({"count": 3}, "the number of fields: rank by rank it is [2, 3]."),
    "dtype": ({"dtype": torch.float64}, "their dtype: rank by rank it is ['torch.float32', 'torch.float64']."),
    "grad": ({"grad": None}, "grad: rank by rank it is ['sum', None]."),
    "graph": ({"graph": False}, "which fields have a graph: rank by rank it is [(True, True), (False, False)]."),
    "lengths": ({"responses": [6, 1, 1]}, "the response lengths: rank by rank it is [(6, 2, 1), (6, 1, 1)]."),
}
"""What rank 1 does differently, and what every rank says."""


def exchange_checked(rank: int, world: int, odd: dict[str, Any], to: bool) -> str:
    mine = {"count": 2, "dtype": torch.float32, "grad": "sum", "graph": True, "responses": None, "short": 0}
    mine |= odd if rank == 1 else {}
    rows = plan(Contiguous(rank, world), responses=mine["responses"] or [6, 2, 1])
    shape, dtype = len(rows) - mine["short"], mine["dtype"]
    fields = [torch.ones(shape, dtype=dtype, requires_grad=mine["graph"]) for _ in range(mine["count"])]
    options = {"grad": mine["grad"], "check": True}
    try:
        group = dist.group.WORLD
        out = rows.redistribute(fields, rows, group, **options) if to else rows.gather(fields, group, **options)
        return str(len(out))
    except LogitlessError as error:
        return str(error)


@pytest.mark.parametrize("to", [False, True], ids=["gather", "redistribute"])
@pytest.mark.parametrize("name", FIELDS)
def test_checked_fields_that_differ_are_an_error_on_every_rank(ranks, name, to):
    odd, text = FIELDS[name]
    caller = "redistribute" if to else "gather"
    for came in ranks(exchange_checked, 2, odd, to, timeout=20):
        assert came == (
            f"Rows.{caller}: ranks of one sequence group disagree about {text} Every rank of the group must make the "
            f"same call, with its own part of the rows."
        )


def test_checked_fields_that_one_rank_refuses_all_refuse(ranks):
    other, own = ranks(exchange_checked, 2, {"short": 1}, False, timeout=20)
    assert own.startswith("Rows.gather: wanted fields of shape [")
    assert other == f"Rows.gather: rank 1 of this rank's sequence group stopped with: {own}"


def test_checked_fields_that_agree(ranks):
    assert ranks(exchange_checked, 2, {}, True, timeout=20) == ["2", "2"]


# Peers that are gone.

TIMEOUT = 2.0
"""Of the process group, in seconds: what bounds the wait for a peer that is alive and silent."""


@pytest.mark.parametrize(
    ("fate", "when"),
    [
        ("killed", "before gather"),
        ("killed", "before backward"),
        ("killed", "before redistribute"),
        ("stopped", "before gather"),
        ("stopped", "before backward"),
    ],
)
def test_a_lost_peer_makes_the_others_raise(tmp_path, fate, when):
    """Processes of their own, because the shared ones must live on."""
    context = multiprocessing.get_context("forkserver")
    pipes, processes = [], []
    for rank in range(3):
        ours, theirs = context.Pipe()
        arguments = (rank, str(tmp_path / "store"), fate, when, theirs)
        processes.append(context.Process(target=lose_a_peer, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        assert all(pipes[rank].poll(60) and pipes[rank].recv() == "ready" for rank in (0, 1))
        pipes[2].send("go")
        for rank in (0, 1):
            assert pipes[rank].poll(60), f"rank {rank} hangs"
            raised, seconds = pipes[rank].recv()
            assert raised, f"rank {rank} went on without its peer"
            assert seconds < TIMEOUT + 5, f"rank {rank} raised {raised} after {seconds:.1f} s"
        if fate == "killed":
            processes[2].join(10)
            assert processes[2].exitcode == -signal.SIGKILL
    finally:
        for process in processes:
            process.kill()
            process.join()


def lose_a_peer(rank: int, store: str, fate: str, when: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    # A short wait from here on; the processes may start at very different times.
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    rows, other = Layout("zigzag", 3).rows(BATCH, rank), Layout("contiguous", 3).rows(BATCH, rank)
    x = torch.ones(len(rows), requires_grad=True)
    dist.barrier()
    loss = torch.cat(rows.gather(x, group, grad="sum")).sum()
    if rank == 2:
        # Not before the others have all they were sent.
        pipe.recv()
        os.kill(os.getpid(), signal.SIGKILL if fate == "killed" else signal.SIGSTOP)
    pipe.send("ready")
    start, raised = time.monotonic(), ""
    try:
        if when == "before gather":
            rows.gather(x, group, grad="sum")
        elif when == "before backward":
            loss.backward()
        else:
            rows.redistribute(x, other, group, grad="slice")
    except RuntimeError as error:
        raised = type(error).__name__
    pipe.send((raised, time.monotonic() - start))
