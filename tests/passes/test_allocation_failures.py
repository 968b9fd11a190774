"""Out of memory at an allocation, or an error in a term: a clean error, nothing half done, and the next step exact.

Here every line of the library that allocates fails in one step of its path, at its first allocation in float32 and at
its last in bfloat16; ``make faults`` lets every allocation of every step fail, and its record is on the page
docs/reliability.md.
"""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from failing import (
    STEPS,
    TOKENS,
    Allocations,
    Run,
    Step,
    begin_again,
    check_failure,
    failing_points,
    reference_of,
    same,
)

import logitless as ll
from logitless.notes import WRITTEN, is_out_of_memory

PATHS = ("logprobs", "linear", "loss")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_every_line_that_allocates_may_fail(path: str, dtype: torch.dtype):
    covered: set = set()
    count = 0
    for step in STEPS.values():
        if step.path == path and step.half <= (dtype == torch.bfloat16):
            right, places = reference_of(step, dtype)
            for k in failing_points(places, covered, last=dtype == torch.bfloat16):
                check_failure(step, dtype, right, k)
                count += 1
    assert count >= 25


def test_one_chunk_leaves_the_buffer_alone():
    """Everything that can fail in forward comes before the one addition."""
    step = STEPS["loss in one pass, one chunk"]
    _, places = reference_of(step, torch.float32)
    finished = []
    for k in range(1, len(places) + 1, 2):
        run, fresh = Run(step, torch.float32), Run(step, torch.float32)
        with Allocations(k), contextlib.suppress(torch.OutOfMemoryError):
            run.forward()
        finished.append(run.loss is not None)
        assert finished[-1] == (not torch.equal(run.buffer, fresh.buffer))
    assert finished.count(False) > 50
    assert finished[-1]


# Retrying.


@pytest.mark.parametrize("name", ["linear, tiles", "loss in one pass, chunks", "logprobs"])
def test_backward_may_come_again(name: str):
    """A backward that ran out of memory left the graph as it was; also where the buffer was added to in forward."""
    step = STEPS[name]
    right, _ = reference_of(step, torch.float32)
    counted, run = Run(step, torch.float32), Run(step, torch.float32)
    counted.forward()
    with Allocations() as seen:
        counted.loss.backward()
    ours = [k for k, place in enumerate(seen.places, 1) if place]
    run.forward()
    for k in {ours[0], ours[len(ours) // 2], ours[-1]}:
        with Allocations(k), pytest.raises(torch.OutOfMemoryError):
            run.loss.backward(retain_graph=True)
    run.loss.backward()
    same(run, right)


def test_overwritten_logits_are_not_used_again():
    """The second backward would have read gradients for logits."""
    run = Run(STEPS["logprobs over the logits"], torch.float32)
    run.forward()
    # The first to fail after something was written: allocations before are of vectors.
    for k in range(1, 100):
        with Allocations(k), pytest.raises(torch.OutOfMemoryError) as raised:
            run.loss.backward(retain_graph=True)
        if any(WRITTEN["logits"] in note for note in getattr(raised.value, "__notes__", ())):
            break
        run = Run(run.step, torch.float32)
        run.forward()
    with pytest.raises(ll.LogitlessError, match="replaced the logits by their gradient, or begun to"):
        run.loss.backward()


# Terms of the caller's.


class Broken(Exception):
    """What a term of the caller's raises."""


def breaking(number: int):
    """A policy term that raises the so-manieth time it is called."""
    calls = iter(range(1, 100))

    def term(inputs):
        if next(calls) == number:
            raise Broken
        return -inputs.advantage * inputs.log_ratio.exp()

    return term


@pytest.mark.parametrize("name", ["loss in one pass, chunks", "loss in one pass, one chunk", "loss in two passes"])
def test_a_term_that_raises(name: str):
    step = STEPS[name]
    right = Run(step, torch.float32, breaking(0))
    right.go()
    marks = []
    for number in range(1, 10):
        run, fresh = (Run(step, torch.float32, breaking(number)) for _ in range(2))
        try:
            run.go()
            break
        except Broken as error:
            marks.append(WRITTEN["weight_grad"] in " ".join(getattr(error, "__notes__", [])))
            assert marks[-1] == (not torch.equal(run.buffer, fresh.buffer))
        for (what, now), then in zip(run.state().items(), fresh.state().values(), strict=True):
            assert torch.equal(now, then), what
        assert all(x is None for x in run.gradients().values())
        begin_again(run, fresh)
        run.go()
        same(run, right)
    # Each chunk, then all rows twice, for gradients that chunks must not change and for the value. In the second chunk
    # the first has been added.
    assert marks == {"loss in one pass, chunks": [False, True, True, True]}.get(name, [False] * len(marks))
    assert marks


# What is left behind.


@pytest.mark.parametrize("name", ["linear, stored exponentials", "loss in one pass, chunks"])
def test_memory_is_free_again_when_the_error_is_gone(name: str):
    """Not when the garbage collector comes: a trainer that catches the error needs the room at once."""
    step = STEPS[name]
    dtype = torch.bfloat16 if step.half else torch.float32
    _, places = reference_of(step, dtype)
    run = Run(step, dtype)
    gc.collect()
    gc.disable()
    try:
        for k in range(1, len(places), 29):
            with Allocations(k) as seen:
                assert fails(run)
            left = [(place, alive()) for place, alive in zip(seen.places, seen.alive, strict=True)]
            # Autograd's queue keeps the vectors of a graph in which it failed until its next run.
            large = [place for place, storage in left if storage is not None and storage.nbytes() > 8 * TOKENS]
            assert not large, large
    finally:
        gc.enable()


def fails(run: Run) -> bool:
    try:
        run.forward()
        loss, run.loss = run.loss, None
        loss.backward()
    except torch.OutOfMemoryError:
        return True
    else:
        return False
    finally:
        run.results = []
        for x in run.leaves.values():
            x.grad = None


def test_a_full_cpu_is_known():
    """Torch has no class for it."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60)
    assert is_out_of_memory(raised.value)
    assert not is_out_of_memory(RuntimeError("something else"))
    with pytest.raises(RuntimeError) as raised:
        ll.logprobs(ll.Logits(torch.zeros(2, 3), torch.zeros(4, 3)), torch.tensor([0, 1]), head=Huge())
    assert raised.value.__notes__ == [
        "logprobs: no room for working memory. Pass a smaller memory= (it was '256MiB'), or ask "
        "logitless.estimate what fits."
    ]


class Huge(ll.Head):
    def gain(self, *_, **__):
        return torch.empty(1 << 60)


def test_the_counter_sees_what_the_library_allocates():
    """Among them those inside the two registered operators, and those of backward."""
    _, places = reference_of(Step("logprobs"), torch.float32)
    files = {place[0].rsplit("logitless/", 1)[1] for place in places if place}
    assert {"backends/tiled.py", "readings/found.py", "sources/given.py", "softmax.py"} <= files
