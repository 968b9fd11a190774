"""A rank that dies, is late or disagrees: its peers raise an error that names the collective, in bounded time.

Collectives that several paths begin with are cut short once here; ``make faults`` cuts every one of every path, with
every rank of two and of three, and its record is on the page docs/reliability.md.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failing import STEPS, Run
from faults import (
    DISAGREEMENTS,
    MARGIN,
    MOMENTS,
    PATHS,
    PRELUDE,
    TIMEOUT,
    Fault,
    Outcome,
    Team,
    abouts,
    disagree,
    is_named,
    is_right,
    numbers,
    rows_of,
    shard_of,
)

from logitless import LogitlessError, Logits, Metrics, Objective, policy_loss


@pytest.fixture(scope="module")
def team():
    team = Team()
    yield team
    team.close()


@pytest.mark.parametrize("path", PATHS)
def test_a_rank_that_is_killed(team, path: str):
    """Before, inside and after each collective: the other rank raises by name, or has all it needs and is right."""
    right = team.run(2, PATHS[path])
    count = right[0].value[1]
    for number in range(PRELUDE.get(path, 0), count):
        for moment in MOMENTS:
            survivor, victim = team.run(2, PATHS[path], fault=Fault(1, number, moment))
            assert victim.kind == "died", (number, moment, victim)
            # After the last collective there may be all it needs.
            done = moment == "after" and number == count - 1 and is_right(survivor, right[0])
            assert done or is_named(survivor), (number, moment, survivor)
            assert survivor.seconds < TIMEOUT + MARGIN


def test_a_rank_of_three_is_killed(team):
    """Nobody but the victim is connected to everybody's next collective."""
    outcomes = team.run(3, PATHS["logprobs of Logits"], fault=Fault(0, 4, "before"))
    assert [x.kind for x in outcomes] == ["died", "raised", "raised"]
    assert all(is_named(x) for x in outcomes[1:])


@pytest.mark.parametrize("path", PATHS)
def test_a_rank_that_is_a_little_late(team, path: str):
    right = team.run(2, PATHS[path])
    outcomes = team.run(2, PATHS[path], fault=Fault(1, right[0].value[1] - 1, "late", 0.2))
    assert all(is_right(ours, theirs) for ours, theirs in zip(outcomes, right, strict=True)), outcomes


@pytest.mark.parametrize(("path", "number"), [("logprobs of Logits", 2), ("logprobs of Logits", 5), ("count_over", 0)])
def test_a_rank_that_is_too_late(team, path: str, number: int):
    """In the agreement, and in backward: the one that waited raises at the timeout, and the late one when it comes."""
    survivor, late = team.run(2, PATHS[path], fault=Fault(1, number, "late", 1.2), timeout=0.6)
    assert is_named(survivor)
    assert "Timed out" in survivor.error
    assert 0.6 <= survivor.seconds < 0.6 + MARGIN
    assert late.kind == "raised"


# One rank raises, or does something else than the others.


def raise_on_one_rank(rank: int, world: int, group: Any, what: str) -> str:
    if what == "a term":

        def term(inputs):
            # In the first of two chunks, on one rank alone: the other waits in the second.
            if dist.get_rank(group) == 1 and float(inputs.advantage[0]) == 0.0:
                raise ArithmeticError("a term of mine")
            return -inputs.advantage * inputs.log_ratio.exp()

        given = {"old_logprob": "current", "advantage": torch.arange(6.0)}
        hidden, weight = numbers(6, 4).requires_grad_(), numbers(10, 4, seed=rank).requires_grad_()
        logits, objective = Logits(hidden, weight, shard=shard_of(rank, group)), Objective(policy=term)
        policy_loss(logits, torch.arange(6), objective, memory=240, **given)
    if what == "a gradient on one rank":
        rows = rows_of(rank, world)
        x = torch.arange(len(rows), dtype=torch.float32).requires_grad_(rank == 0)
        whole = torch.cat(rows.gather(x, group, grad="sum"))
        if rank == 0:
            whole.sum().backward()
    return "no error"


def test_one_rank_raises_in_the_middle(team):
    survivor, guilty = team.run(2, raise_on_one_rank, "a term", timeout=2.0)
    assert guilty.error == "ArithmeticError: a term of mine"
    assert is_named(survivor)
    assert survivor.seconds < 2.0 + MARGIN


def test_a_gradient_on_one_rank_only(team):
    """Backward of ``grad="sum"`` is a collective that the other rank has no reason to join."""
    waiting, other = team.run(2, raise_on_one_rank, "a gradient on one rank", timeout=2.0)
    assert is_named(waiting)
    assert other.kind == "returned"


def reduce_other_metrics(rank: int, world: int, group: Any) -> None:
    names = ("ratio", "kl") if rank == 1 else ("ratio",)
    one = Metrics.of_rows({name: torch.ones(2) for name in names}, torch.tensor([True, True]))
    one.reduce(group, check=True)


def test_metrics_of_other_names(team):
    """A gather of other sizes aborts the process over gloo, and hangs over NCCL."""
    for outcome in team.run(2, reduce_other_metrics):
        assert outcome.error.startswith(
            "LogitlessError: Metrics.reduce: rank 1 has other metrics than rank 0: they differ in ['kl']."
        )


# Disagreement. What is refused is refused by every rank.

HARMLESS = {
    ("logprobs", "memory"),
    ("logprobs", "gradient mode"),
    ("logprobs", "gradient of hidden"),
    ("logprobs of Logits", "memory"),
}
"""Tiles are a rank's own business, and backward from logits sends nothing."""


def disagreements() -> list[Any]:
    paths = ("logprobs", "logprobs of Logits", "policy_loss")
    return [(path, about) for path in paths for about in abouts(path)]


@pytest.fixture(scope="module")
def disagreed(team):
    """What the ranks said, by path; one job per path."""
    found: dict[str, list[Outcome]] = {}

    def of(path: str) -> list[dict[str, tuple[str, Any]]]:
        if path not in found:
            found[path] = team.run(2, disagree, path, TIMEOUT)
        return [outcome.value[0] for outcome in found[path]]

    return of


@pytest.mark.parametrize(("path", "about"), disagreements())
def test_ranks_that_disagree(disagreed, path: str, about: str):
    said = [rank[about] for rank in disagreed(path)]
    if (path, about) in HARMLESS:
        assert [kind for kind, _ in said] == ["returned"] * 2
        assert torch.equal(said[0][1][0], said[1][1][0])
    else:
        assert [kind for kind, _ in said] == [LogitlessError.__name__] * 2, said


def test_every_disagreement_is_about_something():
    assert {about for path in ("logprobs", "logprobs of Logits", "policy_loss") for about in abouts(path)} == set(
        DISAGREEMENTS
    )


# Threads.


@pytest.mark.parametrize("name", ["logprobs", "linear, buffer", "loss in one pass, chunks"])
def test_two_threads_give_the_bits_of_one(name: str):
    """Each with tensors of its own, at the same time; backward too."""
    alone = Run(STEPS[name], torch.float32)
    alone.go()
    runs = [[Run(STEPS[name], torch.float32) for _ in range(10)] for _ in range(2)]
    gate = threading.Barrier(2)

    def work(mine: list[Run]) -> None:
        gate.wait()
        for run in mine:
            run.go()

    threads = [threading.Thread(target=work, args=(mine,)) for mine in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for run in (run for mine in runs for run in mine):
        assert torch.equal(run.results[0], alone.results[0])
        assert all(torch.equal(x, alone.gradients()[n]) for n, x in run.gradients().items() if x is not None)
        assert run.buffer is None or torch.equal(run.buffer, alone.buffer)
