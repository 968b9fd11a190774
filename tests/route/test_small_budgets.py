"""Small budgets over ranks whose shards differ: all ranks refuse one, or all work in it and are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from close import assert_close_to_truth, assert_gradient_close_to_truth
from torch import Tensor

import logitless as ll
from logitless.machine import CPU, Tiles
from logitless.route.tiles import Shape, backward_tiles, forward_tiles

R, V, D = 100, 300, 4
BUDGETS = (30, 120, 260, 400, 520, 640, 800, 1000, 1300, 1700, 2200, 3000, 4000)
CUTS = {
    "uneven": (0, 131, 219, V),
    "an empty shard": (0, 150, 150, V),
    "more rows than columns": (0, 40, 80, V),
}


class Answer(NamedTuple):
    """What a rank found, with the gradients of hidden states and of its rows of the weight; or why it did not."""

    logprob: Tensor | None = None
    hidden: Tensor | None = None
    weight: Tensor | None = None
    refused: str = ""


def operands() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(R, D, generator=generator), torch.randn(V, D, generator=generator)
    return hidden, weight, torch.randint(210, (R,), generator=generator)


def scored(logits: Any, hidden: Tensor, weight: Tensor, **options: Any) -> Answer:
    out = ll.logprobs(logits, operands()[2], **options)
    out.logprob.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return Answer(out.logprob.detach(), hidden.grad, weight.grad)


def right(size: int, dtype: torch.dtype) -> Answer:
    hidden, weight, target = operands()
    hidden, weight = (x.to(dtype).requires_grad_() for x in (hidden, weight))
    logprob = (hidden @ weight.T)[:, :size].log_softmax(-1).gather(1, target[:, None])[:, 0]
    logprob.sum().backward()
    return Answer(logprob.detach(), hidden.grad, weight.grad)


def over_ranks(rank: int, world: int, cuts: tuple[int, ...], size: int) -> list[Answer]:
    start, stop = cuts[rank], cuts[rank + 1]
    shard, found = ll.VocabShard(start, stop, dist.group.WORLD), []
    for memory in BUDGETS:
        hidden, weight, _ = operands()
        hidden, weight = hidden.requires_grad_(), weight[start:stop].clone().requires_grad_()
        logits = ll.Logits(hidden, weight, shard=shard)
        try:
            found.append(scored(logits, hidden, weight, memory=memory, head=ll.Head(vocab_size=size)))
        except ll.LogitlessError as error:
            found.append(Answer(refused=str(error)))
    return found


@pytest.mark.parametrize("size", [V, 210])
@pytest.mark.parametrize("name", CUTS)
def test_a_budget_is_refused_by_all_ranks_or_by_none(ranks, name: str, size: int):
    """Of 210 ids one shard has padding alone, or nearly so."""
    exact, plain = (right(size, dtype) for dtype in (torch.float64, torch.float32))
    by_budget = list(zip(*ranks(over_ranks, 3, CUTS[name], size, timeout=40), strict=True))
    for answers in by_budget:
        assert len({bool(answer.refused) for answer in answers}) == 1
        if answers[0].refused:
            assert all("bytes of working space do not hold one column" in answer.refused for answer in answers)
            continue
        for answer in answers:
            assert_close_to_truth(answer.logprob, exact.logprob, plain.logprob)
            assert_gradient_close_to_truth(answer.hidden, exact.hidden, plain.hidden)
        whole = torch.cat([answer.weight for answer in answers])
        assert_gradient_close_to_truth(whole, exact.weight, plain.weight)
    # The budgets are on both sides of what is refused.
    assert {bool(answers[0].refused) for answers in by_budget} == {True, False}


def beside_a_teacher(rank: int, world: int) -> list[tuple[bool, list[float]]]:
    """A draft whose teacher has all of its columns on one rank."""
    hidden, weight, target = operands()
    cuts, theirs = (0, 40, V), (0, 0, 350)
    own, other = (slice(x[rank], x[rank + 1]) for x in (cuts, theirs))
    shards = [ll.VocabShard(x.start, x.stop, dist.group.WORLD) for x in (own, other)]
    wide, ids = torch.randn(350, 3), torch.arange(350)
    ids[V:] = -1
    found = []
    for memory in BUDGETS:
        logits = ll.Logits(hidden, weight[own].clone().requires_grad_(), shard=shards[0])
        teacher = ll.Teacher(ll.Logits(hidden[:, :3], wide[other], shard=shards[1]), ids=ids[other])
        try:
            given = {"teacher": teacher, "divergence": "tv", "stats": ("teacher_log_z",), "memory": memory}
            out = ll.logprobs(logits, target, **given)
            found.append((False, out.teacher_log_z.tolist()))
        except ll.LogitlessError:
            found.append((True, []))
    wanted = (hidden[:, :3].double() @ wide.double().T).logsumexp(-1)
    for refused, log_z in found:
        if not refused:
            assert_close_to_truth(torch.tensor(log_z), wanted, (hidden[:, :3] @ wide.T).logsumexp(-1))
    return found


def without_gradients(rank: int, world: int, cuts: tuple[int, ...]) -> list[Answer]:
    hidden, weight, target = operands()
    start, stop = cuts[rank], cuts[rank + 1]
    logits, found = ll.Logits(hidden, weight[start:stop], shard=ll.VocabShard(start, stop, dist.group.WORLD)), []
    for memory in BUDGETS:
        try:
            found.append(Answer(ll.logprobs(logits, target, memory=memory).logprob))
        except ll.LogitlessError as error:
            found.append(Answer(refused=str(error)))
    return found


@pytest.mark.parametrize("name", CUTS)
def test_without_gradients(ranks, name: str):
    """Then a rank without columns takes what the others take."""
    exact, plain = (right(V, dtype) for dtype in (torch.float64, torch.float32))
    by_rank = ranks(without_gradients, 3, CUTS[name], timeout=40)
    refused = [[bool(answer.refused) for answer in answers] for answers in by_rank]
    assert refused[0] == refused[1] == refused[2] == sorted(refused[0], reverse=True)
    assert 0 < sum(refused[0]) < len(BUDGETS)
    for answer in (answer for answers in by_rank for answer in answers if not answer.refused):
        assert_close_to_truth(answer.logprob, exact.logprob, plain.logprob)


def test_beside_a_teacher_of_other_ids(ranks):
    first, second = ranks(beside_a_teacher, 2, timeout=40)
    assert first == second
    assert {refused for refused, _ in first} == {True, False}


@pytest.mark.parametrize("tiles", [forward_tiles, backward_tiles])
@pytest.mark.parametrize("memory", [4096, 8192, 12288, 65536])
def test_a_rank_without_columns_takes_what_one_column_does(tiles: Callable[[Shape, int], Tiles], memory: int):
    none, one = (tiles(Shape(5000, columns, 4, 4, CPU), memory) for columns in (0, 1))
    assert none == one
