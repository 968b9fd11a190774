"""Rows more than 2^31 elements apart, in every kernel: offsets of 32 bits would wrap and read or write elsewhere.

The memory is reserved and not taken: of some 17 GB of addresses only the pages of the few rows are ever touched. There
is as much room before the rows as after them, so that a wrapped offset lands there, among zeros, and not outside.
"""

from __future__ import annotations

import mmap
import sys

import pytest
import torch
from torch import Tensor

import logitless as ll
from logitless.backends import load
from logitless.backends.contract import Problem, Running, over
from logitless.backends.triton import products
from logitless.product_table import ProductSizes
from logitless.softmax import Coefficients, Normaliser

ROWS, COLUMNS = 3, 40
STRIDE = 2**30 + 64
"""Elements between rows: the third is past 2^31."""
NO_RESERVE = 0x4000

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not sys.platform.startswith("linux"), reason="address space of a CPU under Linux"
)


def far(values: Tensor, down: bool = False) -> Tensor:
    """The values with ``STRIDE`` elements between their rows, or between their columns if ``down``."""
    size = (2**31 + 3 * STRIDE) * values.element_size()
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    strides = (1, STRIDE) if down else (STRIDE, 1)
    return torch.frombuffer(memory, dtype=values.dtype).as_strided(values.shape, strides, 2**31).copy_(values)


def problem_of(logits: Tensor, index: Tensor | None = None) -> Problem:
    column = torch.tensor([3, 39, 17])
    return Problem(logits, index, column, torch.full((ROWS,), 1.25), 0.0, COLUMNS, True, 1 << 14)


def coefficients() -> tuple[Normaliser, Coefficients]:
    numbers = torch.randn(5, ROWS).unbind()
    return Normaliser(*numbers[:2]), Coefficients(*numbers[2:])


def assert_same(run, *given: Tensor, rtol: float = 1e-5) -> None:
    """``run(backend, *given)`` of the kernels on far rows is what plain torch says on near ones."""
    ours = run(load("triton"), *(far(x) for x in given))
    right = run(load("reference"), *(x.clone() for x in given))
    for mine, theirs in zip(ours, right, strict=True):
        torch.testing.assert_close(mine.contiguous(), theirs, rtol=rtol, atol=1e-5)


INDEXED = pytest.mark.parametrize("index", [None, torch.tensor([2, 0, 1])], ids=["in order", "indexed"])


@INDEXED
def test_statistics(index: Tensor | None):
    assert_same(lambda backend, x: [backend.statistics(problem_of(x, index))], torch.randn(ROWS, COLUMNS))


@INDEXED
def test_gradient(index: Tensor | None):
    norm, coef = coefficients()

    def run(backend, x, out):
        backend.gradient(problem_of(x, index), norm, coef, out, index)
        return [out]

    assert_same(run, torch.randn(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS))


@pytest.mark.parametrize("more", [(), ("square", "constant")], ids=["softmax", "with other readings"])
def test_gradient_over_the_logits(more: tuple[str, ...]):
    norm, coef = coefficients()
    coef, logits = coef._replace(**{name: torch.randn(ROWS) for name in more}), torch.randn(ROWS, COLUMNS)
    out = load("triton").gradient_over(problem_of(far(logits)), norm, coef, torch.float16)
    right = load("reference").gradient_over(problem_of(logits.clone()), norm, coef, torch.float16)
    assert out.stride() == over(far(logits), torch.float16).stride() == (2 * STRIDE, 1)
    torch.testing.assert_close(out.contiguous(), right.contiguous(), rtol=2e-3, atol=1e-5)


def test_exponentials():
    def run(backend, x, out, sums):
        # Every row exceeds its guess, so that the sums move with it.
        stats, before, reference = torch.zeros(4, ROWS), torch.full((ROWS,), -30.0), torch.zeros(ROWS)
        backend.exponentials(problem_of(x), stats, Running(before, reference, sums=sums), out, False)
        return stats, reference, out, sums

    assert_same(run, torch.randn(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS), 1e12 * torch.randn(ROWS, COLUMNS))


def test_gradient_from_exponentials():
    norm, coef = coefficients()

    def run(backend, e, out):
        backend.gradient_from(problem_of(e), torch.zeros(2, ROWS), 24, norm, coef, out)
        return [out]

    assert_same(run, torch.rand(ROWS, COLUMNS) + 0.1, torch.zeros(ROWS, COLUMNS))


def test_gradient_of_a_product():
    """By pointers, which is what rows get that do not begin at multiples of 16 bytes."""
    norm, coef = coefficients()
    hidden, weight = torch.randn(ROWS, 16).bfloat16(), torch.randn(COLUMNS, 16).bfloat16()
    problem = problem_of(hidden.float() @ weight.float().T)
    out, right = far(torch.zeros(ROWS, COLUMNS + 1).bfloat16())[:, 1:], torch.zeros(ROWS, COLUMNS)
    product = products.Product(hidden, weight, None, problem.column, problem.gain)
    products.gradient(product, norm, coef, out, ProductSizes(16, 64, 16, 1))
    load("reference").gradient(problem, norm, coef, right, None)
    torch.testing.assert_close(out.float(), right, rtol=2**-8, atol=1e-5)


def test_rescale():
    factor = torch.randn(ROWS)

    def run(backend, x, out):
        backend.rescale(x, factor, out)
        return [out]

    assert_same(run, torch.randn(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS))


@pytest.mark.parametrize("down", [False, True], ids=["by rows", "by columns"])
def test_mix(down: bool):
    """A weight that is stored the other way round has its columns far apart, and not its rows."""
    x, y, (by, times) = torch.randn(ROWS, 3), torch.randn(ROWS, 3), torch.randn(2, ROWS)
    index, out, right = torch.tensor([2, 0, 1]), far(torch.zeros(ROWS, 3)), torch.zeros(ROWS, 3)
    load("triton").mix(far(x), by, far(y, down), index, times, out)
    load("reference").mix(x, by, y, index, times, right)
    torch.testing.assert_close(out.contiguous(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strides", [(10, 1, 1), (0, 1, 1), (1, 0, 1), (14, 2, 1)], ids=str)
def test_rows_that_overlap(strides: tuple[int, int, int]):
    """A window that slides over numbers by one, or by two: rows are read where they lie."""
    logits = torch.randn(60).as_strided((2, 5, 7), strides)
    target = torch.randint(7, (2, 5))
    out, right = ll.logprobs(logits, target, entropy="value"), ll.logprobs(logits.contiguous(), target, entropy="value")
    assert torch.equal(out.logprob, right.logprob)
    assert torch.equal(out.entropy, right.entropy)
