"""One batch, cut in every way over micro-batches, data- and context-parallel ranks: same loss, gradients and metrics.

A way is (data-parallel ranks, context-parallel ranks, scheme, micro-batches). Samples are dealt to data-parallel ranks
and their micro-batches in turn; every rank sends back its losses and, per row, (sample, position, gradient). Losses are
parts of one sum, so adding them up must give the loss of the whole batch, told by the loops of objective_truth.py.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from objective_truth import PROMPT_OF, Batch, Formula, draw, stats_of, tell
from shared.objective_parallel import OBJECTIVES, SCHEMES
from shared.objective_terms import PARTS
from shared.shards import Collectives
from torch import Tensor

from logitless import Metrics, Objective, Zigzag
from logitless.objectives import (
    count_over,
    discounted_returns,
    gae,
    prompt_tokens_over,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    token_rewards,
    whiten,
)

REDUCTIONS = ["token_mean", "sample_mean", "sample_sum", "prompt_mean"]


class Way(NamedTuple):
    dp: int
    cp: int
    scheme: str | None
    micro: int


class Part(NamedTuple):
    """What a rank sends back of one objective."""

    loss: float
    gradients: list[tuple[int, int, float, float]]
    metrics: dict[str, float]


def groups_of(rank: int, way: Way) -> Any:
    """The context-parallel group of this rank; making groups is a collective of all ranks."""
    if way.cp == 1:
        return None
    made = [dist.new_group(list(range(d * way.cp, (d + 1) * way.cp))) for d in range(way.dp)]
    return made[rank // way.cp]


def plans_of(rank: int, way: Way, batch: Batch) -> list[tuple[list[int], Any]]:
    """Samples and rows of every micro-batch of this rank."""
    own = list(range(len(batch)))[rank // way.cp :: way.dp]
    cp = None if way.scheme is None else SCHEMES[way.scheme](rank % way.cp, way.cp)
    return [(samples, batch.pick(samples).rows(cp=cp)) for samples in (own[m :: way.micro] for m in range(way.micro))]


def evaluate(rank: int, world: int, way: Way, batch: Batch, cases: list[tuple[dict, str]]) -> list[Part]:
    cp_group = groups_of(rank, way)
    plans = plans_of(rank, way, batch)
    return [evaluate_one(batch, plans, cp_group, *case) for case in cases]


def evaluate_one(batch: Batch, plans, cp_group, options: dict, reduce: str) -> Part:
    everyone = dist.group.WORLD
    rows = [r for _, r in plans]
    objective = Objective(reduce=reduce, length=11 if reduce == "sample_sum" else None, **options)
    more: list[dict] = [{} for _ in plans]
    if reduce == "prompt_mean":
        prompts = [torch.tensor([PROMPT_OF[i] for i in samples], dtype=torch.int64) for samples, _ in plans]
        more = [{"prompt_tokens": x} for x in prompt_tokens_over(rows, prompts, 3, everyone)]
        denominator: Any = 3
    else:
        denominator = count_over(rows, reduce, everyone)
    total, gradients, metrics = 0.0, [], []
    for (samples, plan), extra in zip(plans, more, strict=True):
        x = batch.pick(samples).fields(plan, torch.float64)
        stats = stats_of(x)
        given = {name: x[name] for name in PARTS}
        loss, logged = objective(stats, plan, denominator=denominator, group=cp_group, **extra, **given)
        loss.backward()
        total += loss.item()
        d_entropy = torch.zeros(len(plan)) if stats.entropy.grad is None else stats.entropy.grad
        triples = zip(plan.sample, plan.position, stats.logprob.grad, d_entropy, strict=True)
        gradients += [(samples[s], int(t), float(g), float(h)) for s, t, g, h in triples]
        metrics.append(logged)
    return Part(total, gradients, Metrics.merge(metrics).reduce(everyone).compute())


WAYS = [
    Way(1, 1, None, 1),
    Way(1, 1, None, 4),
    Way(2, 1, None, 1),
    Way(2, 1, None, 4),
    Way(1, 2, "zigzag", 2),
    Way(1, 2, "contiguous", 1),
    Way(2, 2, "zigzag", 1),
    Way(2, 2, "contiguous", 3),
    Way(1, 4, "zigzag", 1),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_to_split_a_batch(ranks, way):
    torch.manual_seed(5)
    batch = draw(spread=0.3)
    cases = list(product(OBJECTIVES, REDUCTIONS))
    sent = ranks(evaluate, way.dp * way.cp, way, batch, [(OBJECTIVES[name][0], reduce) for name, reduce in cases])
    whole = one_process(batch, [(OBJECTIVES[name][0], reduce) for name, reduce in cases])
    starts = [sum(batch.lengths[:i]) for i in range(len(batch))]
    for number, (name, reduce) in enumerate(cases):
        truth = tell(batch, Formula(reduce=reduce, length=11, **OBJECTIVES[name][1]))
        parts = [rank[number] for rank in sent]
        assert sum(part.loss for part in parts) == pytest.approx(truth.loss.item(), abs=1e-12), (name, reduce)
        ours = torch.zeros(2, sum(batch.lengths), dtype=torch.float64)
        seen = torch.zeros(sum(batch.lengths))
        for sample, position, d_logprob, d_entropy in (g for part in parts for g in part.gradients):
            place = starts[sample] + position
            seen[place] += 1
            ours[0, place], ours[1, place] = d_logprob, d_entropy
        assert bool((seen == 1).all())
        torch.testing.assert_close(ours, torch.stack([truth.logprob, truth.entropy]), atol=1e-12, rtol=0)
        assert all(part.metrics == parts[0].metrics for part in parts)
        assert parts[0].metrics == pytest.approx(whole[number], abs=1e-12), (name, reduce)


def one_process(batch: Batch, cases: list[tuple[dict, str]]) -> list[dict[str, float]]:
    """Metrics of the whole batch in one call."""
    rows = batch.rows()
    x = batch.fields(rows, torch.float64)
    (tokens,) = prompt_tokens_over(rows, torch.tensor(PROMPT_OF), 3)
    out = []
    for options, reduce in cases:
        objective = Objective(reduce=reduce, length=11 if reduce == "sample_sum" else None, **options)
        more = {"prompt_tokens": tokens, "denominator": 3} if reduce == "prompt_mean" else {}
        out.append(objective(stats_of(x), rows, **more, **{name: x[name] for name in PARTS})[1].compute())
    return out


def test_a_rank_without_samples(ranks):
    """It makes the same calls as the others: counts, losses with a graph, metrics."""
    torch.manual_seed(6)
    batch = draw([5], masked=())
    sent = ranks(evaluate, 2, Way(2, 1, None, 1), batch, [(OBJECTIVES["ppo"][0], "sample_mean")])
    truth = tell(batch, Formula(reduce="sample_mean", **OBJECTIVES["ppo"][1]))
    assert sent[1][0].loss == 0
    assert sent[0][0].loss == pytest.approx(truth.loss.item(), abs=1e-12)
    assert sent[0][0].metrics == sent[1][0].metrics


def test_a_context_parallel_rank_without_rows(ranks):
    """A sample so short that one rank has none of its rows; its peers' means over samples still need it."""
    torch.manual_seed(7)
    batch = draw([1], masked=())
    cases = [(OBJECTIVES["gspo"][0], "token_mean"), (OBJECTIVES["opsm"][0], "token_mean")]
    sent = ranks(evaluate, 2, Way(1, 2, "zigzag", 1), batch, cases)
    assert sorted(len(rank[0].gradients) for rank in sent) == [0, 1]
    truth = tell(batch, Formula(**OBJECTIVES["gspo"][1]))
    assert sum(rank[0].loss for rank in sent) == pytest.approx(truth.loss.item(), abs=1e-12)


# Along time, and statistics over ranks.


class Along(NamedTuple):
    results: list[tuple[int, int, list[float]]]
    collectives: dict[str, list[tuple[str, int]]]


def along_time(rank: int, world: int, way: Way, batch: Batch, rewards: Tensor) -> Along:
    cp_group = groups_of(rank, way)
    ((samples, rows),) = plans_of(rank, way, batch)
    own, everyone = batch.pick(samples), dist.group.WORLD
    x = own.fields(rows, torch.float64)
    calls: dict[str, Collectives] = {name: Collectives() for name in ("token_rewards", "gae", "whiten", "metrics")}
    with calls["token_rewards"]:
        per_token = token_rewards(rewards[samples], rows, penalty=x["entropy"], group=cp_group)
    with calls["gae"]:
        advantage, returns = gae(per_token, x["ref_logprob"], rows, gamma=0.9, lam=0.8, group=cp_group)
    with calls["whiten"]:
        white = whiten(advantage, rows.counted, group=everyone)
    with calls["metrics"]:
        Metrics.of_rows({"a": white, "b": white}, rows.counted, extremes={"a": white}).reduce(everyone)
    columns = [
        per_token,
        advantage,
        returns,
        white,
        discounted_returns(per_token, rows, gamma=0.7, group=cp_group),
        reinforce_pp_advantages(rewards[samples], rows, penalty=x["entropy"], cp_group=cp_group, group=everyone),
        reinforce_pp_baseline_advantages(rewards[samples], torch.tensor(samples) // 4, rows, group=everyone),
    ]
    table = torch.stack(columns, 1).tolist()
    places = zip(rows.sample.tolist(), rows.position.tolist(), table, strict=True)
    return Along([(samples[s], t, line) for s, t, line in places], {name: c.calls for name, c in calls.items()})


@pytest.mark.parametrize("way", [Way(1, 2, "zigzag", 1), Way(2, 2, "contiguous", 1), Way(2, 1, None, 1)], ids=str)
def test_time_and_statistics_over_ranks(ranks, way):
    torch.manual_seed(8)
    batch = draw([7, 2, 13, 1, 5, 3, 9, 4], masked=(5,))
    rewards = torch.randn(len(batch), dtype=torch.float64)
    (alone,) = ranks(along_time, 1, Way(1, 1, None, 1), batch, rewards)
    sent = ranks(along_time, way.dp * way.cp, way, batch, rewards)
    expected = {(s, t): line for s, t, line in alone.results}
    # The groups of the baseline are cut by data parallelism here; what is compared is the rest.
    columns = slice(0, 7 if way.dp == 1 else 6)
    ours = {(s, t): line for rank in sent for s, t, line in rank.results}
    assert sum(len(rank.results) for rank in sent) == len(expected) == len(ours)
    for place, line in expected.items():
        assert ours[place][columns] == pytest.approx(line[columns], abs=1e-12), place
    for rank in sent:
        assert len(rank.collectives["gae"]) == len(rank.collectives["token_rewards"]) == (way.cp > 1)
        assert rank.collectives["whiten"] == [("all_gather", 3)]
        assert rank.collectives["metrics"] == [("all_gather", 6)]


def wrong_groups(rank: int, world: int) -> list[str]:
    from logitless import LogitlessError, Rows

    rows, whole = Rows.packed([[0] * 9], [8], cp=Zigzag(0, 3)), Rows.packed([[0, 0]], [1])
    fields = {"old_logprob": torch.zeros(1), "advantage": torch.zeros(1)}
    texts = []
    for call in (
        lambda: count_over(rows, "token_mean", dist.group.WORLD),
        lambda: token_rewards(torch.zeros(1), rows, group=dist.group.WORLD),
        lambda: gae(torch.zeros(len(rows)), torch.zeros(len(rows)), rows, group=dist.group.WORLD),
        lambda: Objective().inputs(None, whole, fields, group=dist.group.WORLD),
    ):
        try:
            call()
        except LogitlessError as error:
            texts.append(str(error))
    return texts


def test_groups_that_do_not_fit(ranks):
    for counted, rewarded, estimated, lost in ranks(wrong_groups, 2):
        assert counted.startswith(
            "count_over: group has 2 ranks but these rows are split over 3 context-parallel ranks."
        )
        assert rewarded == "token_rewards: these rows are split over 3 ranks but group has 2."
        assert lost.startswith("Objective: these rows are split over 1 context-parallel ranks but group has 2.")
        assert estimated == "Rows.gather: these rows are split over 3 ranks but group has 2."
