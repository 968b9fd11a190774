"""Rules of the one pass that no result shows: which chunks stand for all in a dry run, and when rows are asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import logitless as ll
from logitless.machine import H200, WAIT
from logitless.memory import sized, sized_rows
from logitless.passes.one_pass import OnePass

V, D = 2003, 66
LINE = V * 4
"""Bytes of a row of logits."""

CHUNKS: dict[str, tuple[tuple[int, ...], int, list[tuple[int, int]]]] = {
    "the largest in the middle": (
        (20, 5, 40, 1, 30, 15, 30, 2, 39, 8),
        80,
        [(25, 65), (143, 182), (182, 190)],
    ),
    "the largest first": ((40, 30, 2, 36, 38, 4), 80, [(0, 40), (108, 146), (146, 150)]),
    "four": ((9, 9, 9, 9), 20, [(0, 9), (9, 18), (27, 36)]),
    "three, all in their order": ((9, 12, 10), 30, [(0, 9), (9, 21), (21, 31)]),
}
"""Rows of samples, rows of logits that the budget holds twice, and the chunks that are worked off."""


@pytest.mark.parametrize("name", CHUNKS)
def test_the_largest_chunks_and_the_last_stand_for_all(name: str, monkeypatch):
    counts, lines, wanted = CHUNKS[name]
    seen, real = [], OnePass._work_off

    def work_off(self: OnePass, chunk: Any, start: int, stop: int, **given: Any) -> Any:
        seen.append((start, stop))
        return real(self, chunk, start, stop, **given)

    monkeypatch.setattr(OnePass, "_work_off", work_off)
    logits, _ = sized(sum(counts), V, D, dtype="float32")
    fields = {"old_logprob": "current", "advantage": torch.empty(sum(counts), device="meta")}
    call = (ll.policy_loss, logits, sized_rows(sum(counts), counts=counts), ll.Objective(policy="gspo"))
    plan = ll.estimate(*call, memory=lines * LINE, device="cpu", **fields).plan
    assert plan is not None
    assert plan.kind == "one pass"
    assert seen == wanted
    sizes = sorted((stop - start for start, stop in plan.chunks[:-1]), reverse=True)
    assert sorted((stop - start for start, stop in seen[:-1]), reverse=True) == sizes[:2]
    assert seen[-1] == plan.chunks[-1]


@pytest.mark.parametrize(
    ("zeros", "asked"),
    [((), [True, True, False]), ((0,), [True] * 3), ((2,), [True, True, False]), ((1, 2), [True] * 3)],
)
def test_the_last_chunk_is_asked_where_one_before_it_had_rows_to_leave_out(
    zeros: tuple[int, ...], asked: list[bool], monkeypatch
):
    """Nothing more is launched while its answer travels."""
    found, real = [], OnePass._work_off

    def work_off(self: OnePass, *given: Any, ask: bool, **more: Any) -> Any:
        found.append(ask)
        return real(self, *given, ask=ask, **more)

    monkeypatch.setattr(OnePass, "_work_off", work_off)
    advantage = torch.ones(3, 10)
    advantage[list(zeros)] = 0.0
    fields = {"old_logprob": "current", "advantage": advantage.flatten(), "memory": 10 * 200 * 4 * 2}
    call = (ll.Logits(torch.randn(30, 8), torch.randn(200, 8, requires_grad=True)), torch.arange(30), ll.Objective())
    assert [stop - start for start, stop in ll.explain(ll.policy_loss, *call, **fields).chunks] == [10, 10, 10]
    ll.policy_loss(*call, **fields)
    assert found == asked


def asks(num_rows: int, columns: int, width: int, machine: Any) -> bool:
    call = SimpleNamespace(machine=machine, columns=columns)
    one_pass = SimpleNamespace(p=SimpleNamespace(call=call, hidden=torch.empty(1, width, device="meta")))
    return OnePass._saves(one_pass, num_rows)  # pyright: ignore[reportArgumentType]


def test_rows_of_the_only_chunk_are_asked_for_where_that_saves_time():
    """Two products of two operations for each row, column and hidden state, against the time that asking takes."""
    assert H200.costs is not None
    columns, width = 1000, 100
    enough = WAIT * H200.costs.flops / (2 * 2 * columns * width)
    assert not asks(int(enough), columns, width, H200)
    assert asks(int(enough) + 1, columns, width, H200)
    exact = SimpleNamespace(costs=SimpleNamespace(flops=4 * 7 * columns * width / WAIT))
    assert not asks(7, columns, width, exact)
    assert asks(8, columns, width, exact)


def test_a_machine_without_costs_asks():
    """A CPU waits for nothing."""
    assert asks(1, 1, 1, SimpleNamespace(costs=None))
