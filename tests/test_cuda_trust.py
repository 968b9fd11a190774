"""What only a GPU can show about time: the same bits a hundred times, next to other streams and threads, after a wait.

Skipped where there is no CUDA device. ``benchmarks/sanitize.py --tests report.xml`` puts a run on record.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor

import logitless as ll

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TOKENS, VOCAB, WIDTH = 507, 20011, 128
RUNS = 100
SLEEP = 50_000_000
"""Cycles for which a stream does nothing: some 30 ms, longer than any call here."""


class Batch:
    """Inputs of all three calls, made from a seed."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> None:
        made = torch.Generator(device).manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=made, device=device)

        self.hidden, self.weight = draw(TOKENS, WIDTH).to(dtype), (0.1 * draw(VOCAB, WIDTH)).to(dtype)
        self.logits = draw(TOKENS, VOCAB).to(dtype)
        self.rows = ll.Rows.packed([list(range(TOKENS))], [TOKENS - 20], device=device)
        # Rows without a gradient are dropped, and their number is fetched on the way.
        self.advantage = draw(len(self.rows)).clamp_min(0.0)
        self.upstream = draw(2, len(self.rows))

    def tensors(self) -> list[Tensor]:
        return [self.hidden, self.weight, self.logits, self.advantage, self.upstream]


def gradients_of(outputs: list[Tensor], upstream: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(outputs, leaves, upstream)
    return [*(x.detach() for x in outputs), *found]


def logprobs(x: Batch) -> list[Tensor]:
    logits = x.logits.detach().requires_grad_()
    out = ll.logprobs(logits, x.rows, entropy="grad")
    return gradients_of([out.logprob, out.entropy], list(x.upstream), [logits])


def from_hidden(x: Batch) -> list[Tensor]:
    hidden, weight = x.hidden.detach().requires_grad_(), x.weight.detach().requires_grad_()
    out = ll.logprobs(ll.Logits(hidden, weight), x.rows, entropy="grad", memory="8MiB")
    return gradients_of([out.logprob, out.entropy], list(x.upstream), [hidden, weight])


def policy_loss(x: Batch) -> list[Tensor]:
    hidden, weight = x.hidden.detach().requires_grad_(), x.weight.detach().requires_grad_()
    given = {"old_logprob": "current", "advantage": x.advantage}
    # Several chunks of rows.
    loss, _ = ll.policy_loss(ll.Logits(hidden, weight), x.rows, ll.Objective(), memory="16MiB", **given)
    return gradients_of([loss], [torch.ones_like(loss)], [hidden, weight])


CALLS: dict[str, Callable[[Batch], list[Tensor]]] = {
    "logprobs": logprobs,
    "hidden": from_hidden,
    "loss": policy_loss,
}


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_hundred_runs_have_the_same_bits(name: str, dtype: torch.dtype):
    batch = Batch(0, dtype)
    first = CALLS[name](batch)
    assert any(bool(x.count_nonzero()) for x in first[1:])
    for run in range(1, RUNS):
        assert same(CALLS[name](batch), first), f"run {run} differs"


@pytest.mark.parametrize("swapped", [False, True], ids=["one first", "other first"])
@pytest.mark.parametrize("names", [("logprobs", "loss"), ("hidden", "hidden")], ids=str)
def test_two_streams_at_once(names: tuple[str, str], swapped: bool):
    """Neither uses memory of the other: each has the bits of a run by itself."""
    batches = Batch(1), Batch(2)
    alone = [CALLS[name](batch) for name, batch in zip(names, batches, strict=True)]
    streams = [torch.cuda.Stream() for _ in names]
    torch.cuda.synchronize()
    together: dict[int, list[list[Tensor]]] = {0: [], 1: []}
    for _ in range(10):
        for i in (1, 0) if swapped else (0, 1):
            with torch.cuda.stream(streams[i]):
                together[i].append(CALLS[names[i]](batches[i]))
    torch.cuda.synchronize()
    for i in (0, 1):
        assert all(same(found, alone[i]) for found in together[i])


def test_four_threads_each_with_its_stream():
    """Threads share the interpreter, the allocator and autograd's device thread, and no result."""
    names = [*CALLS, "loss"]
    batches = [Batch(seed) for seed in range(3, 7)]
    alone = [CALLS[name](batch) for name, batch in zip(names, batches, strict=True)]
    torch.cuda.synchronize()
    start = Barrier(len(names), timeout=60)

    def work(i: int) -> bool:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            start.wait()
            found = [CALLS[names[i]](batches[i]) for _ in range(10)]
        stream.synchronize()
        return all(same(x, alone[i]) for x in found)

    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(work, range(len(names)))) == [True] * len(names)


@pytest.mark.parametrize("name", CALLS)
def test_a_stream_that_waits_for_its_inputs(name: str):
    """All work goes to the current stream: on any other it would read NaN, which is there until late.

    Inputs come from one stream, the call waits for them on a second, and the default stream waits for its results.
    """
    right = Batch(7)
    alone = CALLS[name](right)
    late = Batch(8)
    for x in late.tensors():
        x.fill_(torch.nan)
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(producer):
        torch.cuda._sleep(SLEEP)
        for x, y in zip(late.tensors(), right.tensors(), strict=True):
            x.copy_(y)
        ready = producer.record_event()
    with torch.cuda.stream(consumer):
        consumer.wait_event(ready)
        found = CALLS[name](late)
        done = consumer.record_event()
    torch.cuda.current_stream().wait_event(done)
    copies = [x.clone() for x in found]
    assert same(copies, alone)
