"""Products by turns, whose groups of warps are threads where there is no GPU: in whatever order they run."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import warp_groups
from torch import Tensor

from logitless.backends.contract import Product
from logitless.backends.triton import products
from logitless.product_table import ProductSizes
from logitless.softmax import SKIP, Coefficients, Normaliser

pytestmark = pytest.mark.usefixtures("interpreted")

ROWS, COLUMNS = 150, 328
ONCE = ProductSizes(rows=64, columns=32, depth=16, tiles=4, band=2)
TURNS = ONCE._replace(tiles=2, warps=4, stages=4, turns=True)
"""Eleven column tiles in units of four, four and three, times three blocks of rows: three units for each of three
programs, which begin with either group."""


class Made(NamedTuple):
    lines: Tensor
    values: Tensor
    references: Tensor
    again: Tensor
    d_z: Tensor


def operands(width: int, dtype: torch.dtype) -> Product:
    hidden, weight = torch.randn(ROWS, width).to(dtype), (torch.randn(COLUMNS, width) / 3).to(dtype)
    column = torch.arange(ROWS) * 7 % COLUMNS
    column[[4, 90]] = SKIP
    return Product(hidden, weight, None, column, torch.linspace(0.5, 1.5, ROWS))


def make(p: Product, sizes: ProductSizes) -> Made:
    """Each end of a product once."""
    numbers = torch.randn(3, ROWS, generator=torch.Generator().manual_seed(1))
    logits = (p.hidden.float() @ p.weight.float().T) * p.gain[:, None]
    values, d_z = (torch.full((ROWS, COLUMNS), torch.nan).to(p.hidden.dtype) for _ in range(2))
    references = torch.full((-(-COLUMNS // sizes.columns), ROWS), torch.nan)
    lines = products.statistics(p, sizes=sizes)
    again = products.exponentials(p, values, references, sizes=sizes)
    norm = Normaliser(logits.amax(1), torch.logsumexp(logits, 1) - logits.amax(1))
    products.gradient(p, norm, Coefficients(*numbers), d_z, sizes)
    return Made(lines, values, references, again, d_z)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [16, 56, 144], ids="{} numbers".format)
def test_every_order_gives_the_bits_of_products_at_once(width: int, dtype: torch.dtype, monkeypatch):
    """One step of a product, as many as the ring has places, and more than twice as many."""
    p = operands(width, dtype)
    plain, first = make(p, ONCE), None
    for seed in range(6):
        warp_groups.simulate(monkeypatch, seed)
        made = make(p, TURNS)
        first = first or made
        for name, ours, before in zip(Made._fields, made, first, strict=True):
            assert torch.equal(ours, before), (name, seed)
    assert first is not None
    assert torch.equal(first.d_z, plain.d_z)
    assert torch.equal(first.references, plain.references)
    # In the interpreter one of the two rounds a multiply-add twice.
    torch.testing.assert_close(first.values, plain.values, rtol=torch.finfo(dtype).eps, atol=2.0**-24)
    # Parts of every second tile add up in another order.
    assert torch.equal(first.lines, first.again)
    assert torch.equal(first.lines[[0, 3]], plain.lines[[0, 3]])
    torch.testing.assert_close(first.lines[1:3], plain.lines[1:3], rtol=1e-6, atol=1e-6)


def test_parts_of_a_row_are_the_same_in_every_batch(monkeypatch):
    """Whichever group begins a unit."""
    p = operands(56, torch.bfloat16)
    warp_groups.simulate(monkeypatch)
    parts = products.statistic_parts(p, TURNS)
    for rows in (slice(0, 64), slice(64, 128), slice(128, ROWS)):
        alone = replace(p, hidden=p.hidden[rows], column=p.column[rows], gain=p.gain[rows])
        torch.testing.assert_close(
            products.statistic_parts(alone, TURNS), parts[..., rows], rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("moved", [False, True])
def test_a_launch_that_is_called_off(moved: bool, monkeypatch):
    """Exponentials are made again where a reference has moved, which the device decides."""
    p = operands(56, torch.bfloat16)
    warp_groups.simulate(monkeypatch)
    parts, values = p.gain.new_full((TURNS.groups(COLUMNS), 4, ROWS), 7.0), torch.full((ROWS, COLUMNS), 7.0).bfloat16()
    flag = torch.tensor(int(moved), dtype=torch.int32)
    products._launch_statistics(p, TURNS, parts, values, torch.zeros(ROWS), 60.0, flag)
    assert bool((parts != 7.0).any()) == bool((values != 7.0).any()) == moved
