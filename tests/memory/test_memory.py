"""Peak bytes, counted by the allocator's own events, for every promise about memory.

A case of 64 rows by 8,192 columns: one float32 copy of the logits is 2 MiB, a vector per row 256 bytes. So a single
stray ``[T, V]`` buffer, in any dtype of 8 bits or more, is far above the slack.
"""

from __future__ import annotations

import pytest
import torch

import logitless as ll
from benchmarks.bench.measure import peak_bytes

T, V = 64, 8192
VECTORS = 64 * 8 * T
"""Room for [T]-sized vectors: 64 of them in int64."""
TILE = 1 << 18
"""The memory budget handed to the tiled backend."""
NUM_ROWS = {"tiled": T, "triton": 8}
"""Every row is slow in the interpreter; a byte for each column of eight rows is still twice the room for vectors."""


def logits_of(dtype: torch.dtype, num_rows: int = T) -> torch.Tensor:
    return (torch.randn(num_rows, V) * 3).to(dtype)


def backward_peak(leaf: torch.Tensor, rows, overwrite: bool = False, **options) -> int:
    """Peak of forward + backward beyond the logits, which are a non-leaf that nobody else reads."""
    logits = _Handed.apply(leaf)
    upstream = [torch.randn(len(rows)) for _ in range(2)]

    def step() -> None:
        out = ll.logprobs(ll.Logits.given(logits, overwrite=overwrite), rows, **options)
        outputs = [out.logprob] if options.get("entropy") != "grad" else [out.logprob, out.entropy]
        torch.autograd.grad(outputs, logits, upstream[: len(outputs)])

    return peak_bytes(step, "cpu")


class _Handed(torch.autograd.Function):
    """Hands a buffer on as a non-leaf without copying it."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, g):
        return g


@pytest.mark.parametrize("entropy", [None, "value", "grad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["tiled", "triton"])
def test_forward_needs_one_tile(backend: str, dtype: torch.dtype, entropy: str | None):
    logits, target = logits_of(dtype, NUM_ROWS[backend]), torch.randint(V, (NUM_ROWS[backend],))
    options = {"entropy": entropy, "backend": backend, "memory": TILE, "head": ll.Head(temperature=0.7)}
    peak = peak_bytes(lambda: ll.logprobs(logits, target, **options), "cpu")
    assert peak <= (TILE if backend == "tiled" else 0) + VECTORS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_softcap_has_a_third_buffer_within_the_tile(dtype: torch.dtype):
    leaf, target = logits_of(dtype).requires_grad_(), torch.randint(V, (T,))
    options = {"entropy": "grad", "backend": "tiled", "memory": TILE, "head": ll.Head(softcap=20.0)}
    with torch.no_grad():
        assert peak_bytes(lambda: ll.logprobs(leaf, target, **options), "cpu") <= TILE + VECTORS
    assert backward_peak(leaf, target, True, **options) <= TILE + VECTORS


@pytest.mark.parametrize("entropy", ["value", "grad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("backend", ["tiled", "triton"])
def test_training_needs_one_gradient_buffer_or_none(backend: str, overwrite: bool, dtype: torch.dtype, entropy: str):
    leaf, target = logits_of(dtype, NUM_ROWS[backend]).requires_grad_(), torch.randint(V, (NUM_ROWS[backend],))
    peak = backward_peak(leaf, target, overwrite, entropy=entropy, backend=backend, memory=TILE)
    gradient = 0 if overwrite else leaf.nbytes
    assert peak <= gradient + (TILE if backend == "tiled" else 0) + VECTORS
    assert peak >= gradient


def test_training_peak_falls_with_the_budget():
    """In the code this replaces, chunking raised the peak of a training step."""
    leaf = logits_of(torch.float32).requires_grad_()
    target = torch.randint(V, (T,))
    peaks = [backward_peak(leaf, target, True, entropy="grad", memory=m) for m in ("64MiB", "1MiB", "256KiB", "64KiB")]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > 3.9 * peaks[2]
    assert peaks[-1] <= (64 << 10) + VECTORS


def test_a_budget_is_not_filled_where_the_problem_is_small():
    """A step of plain torch holds three tensors of the size of the logits here; ours the gradient and a quarter."""
    leaf = torch.randn(1024, 2000, requires_grad=True)
    peak = backward_peak(leaf, torch.randint(2000, (1024,)), False, entropy="value", backend="tiled", memory="16MiB")
    assert peak <= 1.25 * leaf.nbytes + 16 * 8 * len(leaf)


def test_rows_in_order_have_the_gradient_of_rows_by_number():
    """They are written as slices; an ignored row among them is zero all the same."""
    leaf, target = torch.randn(300, 1003, requires_grad=True), torch.randint(1003, (300,))
    target[7] = -100
    order = torch.randperm(300)
    whole = ll.logprobs(leaf, target, backend="tiled")
    mixed = ll.logprobs(leaf, ll.Rows.at(order, target[order], num_tokens=300), backend="tiled")
    weights = torch.randn(300)
    (ours,), (others,) = (
        torch.autograd.grad(x.logprob, leaf, w) for x, w in ((whole, weights), (mixed, weights[order]))
    )
    assert torch.equal(ours, others)
    assert not ours[7].any()


@pytest.mark.parametrize("backend", ["tiled", "triton"])
def test_selecting_rows_copies_none(backend: str):
    """Half of the rows: no gathered copy of them, forward or backward."""
    num = NUM_ROWS[backend]
    leaf = logits_of(torch.float32, num).requires_grad_()
    rows = ll.Rows.at(torch.arange(0, num, 2), torch.randint(V, (num // 2,)), num_tokens=num)
    peak = backward_peak(leaf, rows, True, entropy="grad", backend=backend, memory=TILE)
    assert peak <= (TILE if backend == "tiled" else 0) + VECTORS


@pytest.mark.parametrize("overwrite", [False, True])
def test_kept_ids_cost_their_own_size(overwrite: bool):
    leaf = logits_of(torch.float32).requires_grad_()
    kept = ll.Kept(torch.randint(V, (20 * T,)), torch.full((T,), 20))
    peak = backward_peak(leaf, torch.randint(V, (T,)), overwrite, entropy="grad", kept=kept, memory=TILE)
    gradient = 0 if overwrite else leaf.nbytes
    # 21 entries per row; two dozen vectors of them in int64 and float32.
    assert peak <= gradient + TILE + VECTORS + 24 * 8 * 21 * T


def test_slicing_off_the_last_position_copies_nothing():
    base = torch.randn(4, T // 4 + 1, V)
    target = torch.randint(V, (4, T // 4))
    peak = peak_bytes(lambda: ll.logprobs(base[:, :-1], target, entropy="value", memory=TILE), "cpu")
    assert peak <= TILE + VECTORS


def test_the_counter_sees_a_stray_copy():
    """The measurement itself: plain torch on the same step needs several copies, and they are counted."""
    leaf = logits_of(torch.float32).requires_grad_()

    def plain() -> None:
        log_p = torch.log_softmax(leaf, -1)
        torch.autograd.grad(log_p[:, 0].sum() - (log_p.exp() * log_p).sum(), leaf)

    assert peak_bytes(plain, "cpu") >= 3 * leaf.nbytes
