"""Misuse of exchanges, ranks that planned different things, and peers that are gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuts import Batch
from schemes import Layout
from shared.exchange import BATCH, Collectives, sources
from torch.distributed.device_mesh import init_device_mesh

from logitless import Contiguous, LogitlessError, Rows, Zigzag

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
    assert own.startswith("Rows.gather: x: wanted fields of shape [")
    assert other == f"Rows.gather: rank 1 of this rank's sequence group stopped with: {own}"


def test_checked_fields_that_agree(ranks):
    assert ranks(exchange_checked, 2, {}, True, timeout=20) == ["2", "2"]


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
