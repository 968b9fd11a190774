"""``policy_loss`` of ``Logits`` over real processes: one batch, cut over data, context and tensor parallel ranks.

Samples are dealt to data-parallel ranks and their micro-batches, tokens to context-parallel ranks (by the lists of
cuts.py), columns to tensor-parallel ranks. Losses are parts of one sum and gradients add up, so every way must give the
loss and gradients of the whole batch, told in float64 by the oracle of test_policy_loss.py.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain
from typing import Any, NamedTuple

import cuts
import pytest
import torch
import torch.distributed as dist
from calls import logits_of
from objective_truth import Batch
from shared.linear import GRADIENT_PROMISE, HALF, Operands, draw
from shared.objective_parallel import OBJECTIVES, SCHEMES
from shared.policy_loss import Problem, Ran, assert_right, make, room, told
from shared.shards import Collectives, as_told
from torch import Tensor

from logitless import (
    Contiguous,
    Kept,
    LogitlessError,
    Logits,
    Metrics,
    Objective,
    Rows,
    VocabShard,
    explain,
    logprobs,
    policy_loss,
)
from logitless.call import Asked, resolve
from logitless.machine import WORK
from logitless.objectives import count_over
from logitless.route import score_plan
from logitless.sources.linear import Projection

COLUMNS = {
    1: [(0, 127)],
    2: [(0, 50), (50, 127)],
    4: [(100, 127), (1, 33), (0, 1), (33, 100)],
}
"""Bounds of 127 columns by tensor-parallel rank, uneven and out of order."""

HALVES = [(0, 127), (127, 127)]
"""A rank that holds nothing."""


@dataclass(frozen=True)
class Way:
    """Over how many ranks a batch is cut, in each of three directions, and in how many micro-batches it comes."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    scheme: str | None = None
    micro: int = 1
    bounds: list[tuple[int, int]] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.dp * self.cp * self.tp

    def columns(self, tp: int) -> tuple[int, int]:
        return (self.bounds or COLUMNS[self.tp])[tp]

    def __str__(self) -> str:
        options = "-".join(self.options)
        return f"dp{self.dp}-cp{self.cp}{self.scheme or ''}-tp{self.tp}-micro{self.micro}-{options}"


class Part(NamedTuple):
    """What a rank sends back: its part of the loss, its gradients (hidden of the whole pack), and its collectives."""

    loss: Tensor
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    metrics: dict[str, float]
    collectives: list[tuple[str, int]]
    told: list[tuple[str, int]]


# What runs in the ranks.


def groups_of(rank: int, way: Way) -> tuple[Any, Any, Any]:
    """Context-parallel, tensor-parallel, and data- and context-parallel together. Making them is a collective."""
    ranks = torch.arange(way.world).view(way.dp, way.cp, way.tp)
    lines = (ranks.transpose(1, 2).reshape(-1, way.cp), ranks.reshape(-1, way.tp), ranks.reshape(-1, way.tp).T)
    mine = []
    for each in lines:
        made = [(line, dist.new_group(line)) for line in each.tolist()]
        mine.append(next(group for line, group in made if rank in line))
    return tuple(mine)


def held_tokens(way: Way, batch: Batch, cp: int) -> list[cuts.Token]:
    """Tokens of a micro-batch on a context-parallel rank, padded so that tensor-parallel ranks can share them out."""
    lengths = [len(ids) for ids in batch.tokens]
    spans = [cuts.round_up(n, 2 * way.cp if way.scheme == "zigzag" else 1) for n in lengths]
    local, lines = cuts.round_up(-(-sum(spans) // way.cp), way.tp), cuts.padded(lengths, spans)
    if way.scheme is None:
        return cuts.whole(lines, local)[0]
    return (cuts.zigzag if way.scheme == "zigzag" else cuts.contiguous)(lines, way.cp, local)[cp]


def run_micro_batch(
    way: Way, problem: Problem, samples: list[int], head: Operands, place: tuple[int, int], call
) -> Any:
    """Loss of a micro-batch, its gradients added to the head's; and the gradient of hidden in the whole pack."""
    (c, t), batch = place, problem.batch.pick(samples)
    starts = [sum(len(ids) for ids in problem.batch.tokens[:i]) for i in range(len(problem.batch))]
    tokens = held_tokens(way, batch, c)
    cp = None if way.scheme is None else SCHEMES[way.scheme](c, way.cp)
    rows = batch.rows(cp=cp, num_tokens=len(tokens))
    where = torch.tensor([-1 if x is None else starts[samples[x[0]]] + x[1] for x in tokens], dtype=torch.int64)
    # Padding holds NaN: nothing may read it.
    hidden = torch.where((where >= 0)[:, None], problem.operands.hidden[where], torch.nan).to(head.weight.dtype)
    if way.options.get("sequence_parallel"):
        hidden, where = hidden.chunk(way.tp)[t], where.chunk(way.tp)[t]
    hidden = hidden.detach().requires_grad_()
    fields = batch.fields(rows, torch.float64, ("old_logprob", "ref_logprob", "rollout_logprob", "advantage"))
    logits, options = logits_of(hidden, head.weight, {"bias": head.bias, **fields, **call, **way.options})
    plan = explain(policy_loss, logits, rows, **options)
    loss, metrics = policy_loss(logits, rows, **options)
    (1.7 * loss).backward()
    whole = torch.zeros(problem.operands.hidden.shape, dtype=hidden.dtype)
    whole[where[where >= 0]] = hidden.grad[where >= 0]
    assert not hidden.grad[where < 0].any()
    return loss.detach(), whole, metrics, [*as_told(plan, "forward"), *as_told(plan, "backward")]


def run(rank: int, world: int, way: Way, problem: Problem, objectives: list[dict]) -> list[Part]:
    cp_group, tp_group, batch_group = groups_of(rank, way)
    d, c, t = rank // (way.cp * way.tp), rank // way.tp % way.cp, rank % way.tp
    start, stop = way.columns(t)
    shard = None if way.tp == 1 else VocabShard(start, stop, tp_group)
    own = list(range(len(problem.batch)))[d :: way.dp]
    deals = [own[m :: way.micro] for m in range(way.micro)]
    cp = None if way.scheme is None else SCHEMES[way.scheme](c, way.cp)
    plans = [problem.batch.pick(samples).rows(cp=cp) for samples in deals]
    parts = []
    for options in objectives:
        objective = Objective(**options)
        head = Operands(problem.operands.hidden, *(x[start:stop] for x in problem.operands[1:])).leaves()
        call = {
            "objective": objective,
            "shard": shard,
            "group": cp_group if way.cp > 1 else None,
            "denominator": count_over(plans, objective.reduce, batch_group),
        }
        with Collectives() as counted:
            made = [run_micro_batch(way, problem, samples, head, (c, t), call) for samples in deals]
        losses, hidden, metrics, named = zip(*made, strict=True)
        sums = sum(losses), sum(hidden)
        numbers = Metrics.merge(metrics).reduce(batch_group).compute()
        parts.append(Part(*sums, head.weight.grad, head.bias.grad, numbers, counted.sent, [*chain(*named)]))  # type: ignore
    return parts


# What every test asks of the results.


def together(way: Way, parts: list[Part]) -> Ran:
    """Loss and gradients of the whole batch, from the parts of all ranks."""
    table = [parts[i : i + way.tp] for i in range(0, way.world, way.tp)]
    for line in table:
        assert all(torch.equal(part.loss, line[0].loss) for part in line), "copies of a loss differ"
        assert all(part.collectives == line[0].collectives for part in line), "ranks called other collectives"
        assert all(part.collectives == part.told for part in line), "other collectives than explain names"
    if way.options.get("sequence_parallel") or way.options.get("hidden_grad") == "partial":
        hidden = sum(part.hidden for part in parts)
    else:
        assert all(torch.equal(part.hidden, line[0].hidden) for line in table for part in line)
        hidden = sum(line[0].hidden for line in table)
    order = sorted(range(way.tp), key=way.columns)
    gradients = {
        "hidden": hidden,
        "weight": torch.cat([sum(line[t].weight for line in table) for t in order]),
        "bias": torch.cat([sum(line[t].bias for line in table) for t in order]),
    }
    assert all(part.metrics == parts[0].metrics for part in parts)
    return Ran(sum(line[0].loss for line in table), gradients, parts[0].metrics)  # type: ignore


def check(ranks, way: Way, problem: Problem, names: list[str], reduce: str = "token_mean") -> list[list[Part]]:
    cases = [OBJECTIVES[name] for name in names]
    sent = ranks(run, way.world, way, problem, [options | {"reduce": reduce} for options, _ in cases])
    by_case = [list(parts) for parts in zip(*sent, strict=True)]
    for (_, formula), parts in zip(cases, by_case, strict=True):
        ours = together(way, parts)
        formula_of_case = replace_reduce(formula, reduce)
        if problem.operands.hidden.dtype in HALF:
            # Ranks round their parts, which are rounded again as they are added.
            exact = told(problem, formula_of_case)
            for name, g in exact.gradients.items():
                assert (ours.gradients[name].double() - g).norm() <= 2 * GRADIENT_PROMISE * g.norm(), name
            continue
        assert_right(problem, ours, formula_of_case)
    return by_case


def replace_reduce(formula: dict, reduce: str) -> Any:
    from objective_truth import Formula

    return Formula(reduce=reduce, **formula)


def problem_of(dtype=torch.float64, lengths=(7, 0, 13, 1, 5, 3)) -> Problem:
    tokens = sum(n + 3 for n in lengths)
    return make(dtype, list(lengths), 127, operands=draw(tokens, 127, 17, dtype))


# Tensor parallelism.


@pytest.mark.parametrize(
    "way",
    [
        Way(),
        Way(tp=2),
        Way(tp=2, options={"hidden_grad": "partial"}),
        Way(tp=2, options={"sequence_parallel": True}),
        Way(tp=2, bounds=HALVES),
        Way(tp=4, options={"memory": room(6, 32, 8)}),
        Way(tp=4, options={"sequence_parallel": True, "memory": room(14, 32, 8)}),
    ],
    ids=str,
)
def test_tensor_parallel(ranks, way):
    """Token-level in chunks of rows, sequence-level in whole samples or two passes; dW and dX of the whole head."""
    check(ranks, way, problem_of(), ["ppo", "gspo", "sequence_tis"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tensor_parallel_dtypes(ranks, dtype):
    for way in (Way(tp=2, options={"memory": room(9, 64)}), Way(tp=2, options={"sequence_parallel": True})):
        check(ranks, way, problem_of(dtype), ["ppo"])


def test_padding_of_the_vocabulary_over_ranks(ranks):
    """One shard is nothing but padding, whatever it holds."""
    problem = make(torch.float64, head={"vocab_size": 90}, operands=draw(47, 127, 17, torch.float64))
    dirty = Operands(*(x.clone() for x in problem.operands))
    for x in dirty[1:]:
        x[90:] = torch.nan
    way = Way(tp=2, bounds=[(0, 95), (95, 127)], options={"head": problem.head_of(problem.batch.rows())})
    sent = ranks(run, 2, way, replace(problem, operands=dirty), [OBJECTIVES["ppo"][0]])
    ours = together(way, [part for [part] in sent])
    assert not ours.gradients["weight"][90:].any()
    assert_right(problem, ours, replace_reduce(OBJECTIVES["ppo"][1], "token_mean"))


@pytest.mark.parametrize("memory", [room(29, 64, 8), room(4, 64, 8)])
def test_collectives_of_a_vocabulary_group(ranks, memory):
    """One gather of [4, C] per chunk in forward, one sum in backward; the same where a rank has no columns."""
    problem = problem_of()
    for options, sums in (({}, 1), ({"hidden_grad": "partial"}, 0)):
        way = Way(tp=2, bounds=HALVES, options=options | {"memory": memory})
        for [part] in ranks(run, 2, way, problem, [OBJECTIVES["ppo"][0]]):
            gathers = [size for kind, size in part.told if kind == "all_gather"]
            assert sum(gathers) == 4 * 29 * 8
            assert len(gathers) == (1 if memory == room(29, 64, 8) else 8)
            assert [kind for kind, _ in part.told if kind != "all_gather"] == ["all_reduce"] * sums
            assert part.collectives == part.told


def add_to_a_buffer(rank: int, world: int, problem: Problem) -> tuple[Tensor, Any]:
    start, stop = COLUMNS[2][rank]
    shard = VocabShard(start, stop, dist.group.WORLD)
    head = Operands(problem.operands.hidden, *(x[start:stop] for x in problem.operands[1:])).leaves()
    rows, buffer = problem.batch.rows(), torch.ones(stop - start, 17)
    logits = Logits(head.hidden, head.weight, bias=head.bias, shard=shard, weight_grad=buffer, grad_scale=1.7)
    objective = Objective(**OBJECTIVES["ppo"][0])
    loss, _ = policy_loss(logits, rows, objective, memory=room(5, 64), **problem.fields(rows))
    (1.7 * loss).backward()
    return buffer - 1, head.weight.grad


def test_weight_gradient_of_a_shard_into_a_buffer(ranks):
    problem = problem_of(torch.float32)
    exact = told(problem, replace_reduce(OBJECTIVES["ppo"][1], "token_mean")).gradients["weight"]
    for (added, own), (start, stop) in zip(ranks(add_to_a_buffer, 2, problem), COLUMNS[2], strict=True):
        assert own is None
        torch.testing.assert_close(added.double(), exact[start:stop], rtol=1e-4, atol=1e-6)


# Context parallelism, data parallelism and micro-batches.


@pytest.mark.parametrize("reduce", ["token_mean", "sample_mean"])
@pytest.mark.parametrize(
    "way",
    [
        Way(cp=2, scheme="zigzag", options={"memory": room(3, 127, 8)}),
        Way(cp=2, scheme="contiguous"),
        Way(cp=2, tp=2, scheme="zigzag"),
        Way(cp=2, tp=2, scheme="contiguous", options={"sequence_parallel": True}),
        Way(micro=4),
        Way(dp=2, micro=3),
        Way(dp=2, cp=2, scheme="zigzag", micro=2),
    ],
    ids=str,
)
def test_every_way_to_split_a_batch(ranks, way, reduce):
    """Denominators are those of the whole batch; a sample without a response and a wholly masked one are among them."""
    by_case = check(ranks, way, problem_of(), ["ppo", "gspo", "opsm"], reduce)
    if way.tp == 1:
        # Means over samples that are split over ranks go in two passes; a token-level loss sends nothing.
        assert not any(part.collectives for part in by_case[0])
        calls = [[name for name, _ in part.collectives] for part in by_case[1]]
        assert all(names == calls[0] for names in calls)
        assert bool(calls[0]) == (way.cp > 1)


@pytest.mark.parametrize("scheme", ["zigzag", "contiguous"])
def test_ranks_without_rows(ranks, scheme):
    """One short sample: a context-parallel rank has none of its rows, a data-parallel one has no sample at all."""
    check(ranks, Way(cp=2, scheme=scheme), problem_of(lengths=(1,)), ["ppo", "gspo", "opsm"])
    check(ranks, Way(dp=2, tp=2), problem_of(lengths=(4,)), ["ppo", "gspo"])


def test_more_micro_batches_than_samples(ranks):
    check(ranks, Way(dp=2, micro=4), problem_of(), ["ppo", "gspo"], "sample_mean")


# Disagreement between ranks, and running out of memory.


def disagree(rank: int, world: int, about: str) -> str:
    shard = VocabShard(rank * 10, (rank + 1) * 10, dist.group.WORLD, check_calls=True)
    odd = rank == 1
    num_rows = 4 if odd and about == "rows" else 5
    width = 9 if odd and about == "weight" else 10
    hidden, weight = torch.zeros(5, 4, requires_grad=True), torch.zeros(width, 4)
    given: dict[str, Any] = {"old_logprob": "current", "advantage": torch.ones(num_rows)}
    if odd and about == "field":
        del given["advantage"]
    if odd and about == "graph":
        hidden = hidden.detach()
    memory = 2 * 4 * 10 if odd and about == "memory" else "1MiB"
    if about == "first pass":
        # Tiles with kept ids have all rows, and rank 1 has no room for such a tile in the first of two passes.
        given["kept"], memory = (
            Kept(torch.zeros(5, dtype=torch.int64), torch.ones(5, dtype=torch.int64)),
            1 if odd else "1MiB",
        )
    policy: dict[str, Any] = {"policy": "gspo"} if odd and about == "objective" else {}
    policy |= {"level": "batch"} if about == "first pass" else {}
    rows = (torch.arange(num_rows), torch.arange(num_rows))
    try:
        objective = Objective(**policy, entropy_coef=0.1 if odd and about == "entropy" else 0.0)
        loss, _ = policy_loss(Logits(hidden, weight, shard=shard), rows, objective, memory=memory, **given)
        return f"{float(loss.detach()):.4f}"
    except LogitlessError as error:
        return str(error)


@pytest.mark.parametrize(
    ("about", "text"),
    [
        ("rows", "the number of rows: rank by rank it is [5, 4]."),
        ("entropy", "entropy: rank by rank it is ['value', 'grad']."),
        ("graph", "whether hidden needs a gradient: rank by rank it is [True, False]."),
        (
            "memory",
            "how to go (memory=, objective): rank by rank it is ['one pass in 1 chunks of at most 5 rows', 'one",
        ),
    ],
)
def test_checked_calls_turn_disagreement_into_an_error(ranks, about, text):
    for came in ranks(disagree, 2, about, timeout=20):
        assert came.startswith(f"policy_loss: ranks of one vocabulary group disagree about {text}")


@pytest.mark.parametrize(
    ("about", "local"),
    [
        ("weight", "policy_loss: shard holds columns 10 to 20 (10 of them) but weight has 9 rows."),
        ("field", "Objective: policy='ppo_clip' needs the field advantage, a tensor of one value per row, but it was "),
        ("first pass", "memory: 1 bytes of working space do not hold one column of 5 rows, which takes 20. Give more."),
    ],
)
def test_checked_calls_stop_together_when_one_rank_cannot_start(ranks, about, local):
    other, own = ranks(disagree, 2, about, timeout=20)
    assert own.startswith(local)
    assert other == f"policy_loss: rank 1 of this rank's vocabulary group stopped with: {own}"


def test_checked_calls_that_agree(ranks):
    assert ranks(disagree, 2, "nothing", timeout=20) == ["-1.0000"] * 2


def store_what_fits(rank: int, world: int) -> tuple[str, str]:
    """Columns of two sizes under a budget that holds the exponentials of all rows on rank 0 alone."""
    start, stop = [(0, 10), (10, 1000)][rank]
    shard = VocabShard(start, stop, dist.group.WORLD, check_calls=True)
    hidden, weight = (torch.zeros(n, 4, dtype=torch.bfloat16, requires_grad=True) for n in (5, stop - start))
    logits, target, memory = Logits(hidden, weight, shard=shard), torch.arange(5), WORK + 2000
    call, _ = resolve("logprobs", logits, target, Asked(memory=memory))
    value = logprobs(logits, target, memory=memory).logprob.mean()
    value.backward()
    return score_plan(call).kind, f"{float(value.detach()):.4f}"


def test_checked_calls_may_store_other_exponentials(ranks):
    """How many rows a rank stores is its own business: it sends nothing more or less for it."""
    value = f"{-math.log(1000.0):.4f}"
    assert ranks(store_what_fits, 2, timeout=20) == [("keep", value), ("recompute", value)]


def run_out_of_memory(rank: int, world: int) -> tuple[str, int]:
    """Nobody goes on with other chunks than its peers have."""
    made, calls = Projection.empty, []

    def refuse(p, shape, dtype):
        calls.append(shape)
        raise torch.OutOfMemoryError("none left")

    shard = VocabShard(rank * 10, (rank + 1) * 10, dist.group.WORLD)
    hidden, target = torch.zeros(600, 4, requires_grad=True), torch.zeros(600, dtype=torch.int64)
    Projection.empty = refuse  # type: ignore
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            given = {"old_logprob": "current", "advantage": torch.ones(600)}
            policy_loss(Logits(hidden, torch.zeros(10, 4), shard=shard), target, Objective(), **given)
        return "no error", len(calls)
    except torch.OutOfMemoryError as error:
        return str(error), len(calls)
    finally:
        Projection.empty = made


def test_out_of_memory_under_a_vocabulary_group(ranks):
    assert ranks(run_out_of_memory, 2, timeout=20) == [("none left", 1)] * 2


# Samples that are split over context-parallel ranks.


def refuse_on_one(rank: int, world: int, about: str, calls: str, check_group: bool, seconds: float) -> tuple[str, str]:
    """What a rank of a context-parallel group returns or raises where rank 0 differs, and the notes of its error."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    odd = rank == 0
    rows = Rows.packed([list(range(8))], [5], cp=Contiguous(rank, world), num_tokens=4)
    hidden, weight = torch.zeros(4, 4, requires_grad=True), torch.zeros(20, 4)
    given: dict[str, Any] = {"old_logprob": "current", "advantage": torch.ones(len(rows) - (odd and about == "field"))}
    given["denominator"] = 6.0 if odd and about == "denominator" else 5.0
    memory = 1 if odd and about == "memory" else "1MiB"
    objective = Objective(policy="gspo", clip=0.1 if odd and about == "objective" else 0.2)
    given |= {"group": group, "check_group": check_group}
    try:
        with torch.set_grad_enabled(not (odd and about == "graph")):
            if calls == "one":
                loss, _ = policy_loss(Logits(hidden, weight), rows, objective, memory=memory, **given)
            else:
                loss, _ = objective(logprobs(Logits(hidden, weight), rows, entropy="value"), rows, **given)
        loss.backward()
        return f"{float(loss.detach()):.4f}", ""
    except Exception as error:
        return str(error), "".join(getattr(error, "__notes__", ()))


@pytest.mark.parametrize("calls", ["one", "two"])
@pytest.mark.parametrize(
    ("about", "text"),
    [
        ("denominator", "denominator: rank by rank it is [6.0, 5.0]."),
        ("objective", """the objective: rank by rank it is ["Objective(policy='gspo', clip=0.1)", "Objective("""),
        ("graph", "whether a gradient is recorded: rank by rank it is [False, True]."),
    ],
)
def test_split_samples_turn_disagreement_into_an_error(ranks, about, text, calls):
    name = {"one": "policy_loss", "two": "Objective"}[calls]
    for came, _ in ranks(refuse_on_one, 2, about, calls, True, 20.0, timeout=20):
        assert came.startswith(f"{name}: ranks of one sequence group disagree about {text}"), came


@pytest.mark.parametrize(
    ("about", "calls", "local"),
    [
        ("memory", "one", "memory: 1 bytes of working space do not hold one column of 2 rows"),
        ("field", "one", "Objective: advantage"),
        ("field", "two", "Objective: advantage"),
    ],
)
def test_ranks_with_split_samples_stop_together(ranks, about, calls, local):
    (own, _), (other, _) = ranks(refuse_on_one, 2, about, calls, True, 20.0, timeout=20)
    assert own.startswith(local)
    name = {"one": "policy_loss", "two": "Objective"}[calls]
    assert other == f"{name}: rank 0 of this rank's sequence group stopped with: {own}"


def test_unchecked_ranks_with_split_samples_wait_for_the_timeout_and_say_for_what(ranks):
    (own, _), (other, notes) = ranks(refuse_on_one, 2, "memory", "one", False, 0.5, timeout=20)
    assert own.startswith("memory: 1 bytes")
    assert "500ms" in other
    assert notes.startswith("logitless: all_reduce of [1] torch.float32 over 2 ranks stopped here.")
    assert "check_group=True" in notes


@pytest.mark.parametrize("calls", ["one", "two"])
def test_split_samples_that_agree(ranks, calls):
    parts = [float(loss) for loss, _ in ranks(refuse_on_one, 2, "nothing", calls, True, 20.0, timeout=20)]
    assert sum(parts) == pytest.approx(-1.0)
