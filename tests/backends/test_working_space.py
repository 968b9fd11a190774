"""Working space of plain torch: pieces that fit a budget, products in every pair of dtypes, and what a ledger adds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from logitless.backends.tiled import BLOCK, PAIR_TILE, _entry_pieces, _pair_tile
from logitless.memory.estimate import _real_device
from logitless.memory.ledger import Ledger
from logitless.sources.gemm import NOTHING, _float32_products, multiply

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("columns", [1, 100, 5003, 151936])
@pytest.mark.parametrize("rows", [1, 40, 3000])
@pytest.mark.parametrize("memory", [1, 1000, 1 << 16, 1 << 20, 1 << 30])
def test_a_pair_of_tiles_fits_its_budget(memory: int, rows: int, columns: int):
    """Two dozen temporaries of float32, or a single logit; and all that there is room for."""
    student = SimpleNamespace(memory=memory, gain=torch.ones(1), columns=columns, num_rows=rows)
    height, width = _pair_tile(SimpleNamespace(student=student))  # pyright: ignore[reportArgumentType]
    elements = max(1, min(PAIR_TILE, memory // 96))
    assert height * width <= elements
    assert (height, width) == (rows, columns) or 2 * height * width > elements or width == columns


@pytest.mark.parametrize("memory", [1, 5000, 1 << 20, 1 << 40])
def test_pieces_of_entries_fit_their_budget(memory: int):
    x, entries = torch.zeros(7, 33), torch.zeros(1000)
    pieces = _entry_pieces(x, entries, memory)
    assert pieces[0].start == 0
    assert pieces[-1].stop == 1000
    each, longest = 33 * (2 * 4 + 3 * 4), max(p.stop - p.start for p in pieces)
    assert longest == min(1000, BLOCK, max(1, memory // each))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    ("a", "out"), [(HALF, HALF), (HALF, SINGLE), (SINGLE, HALF), (SINGLE, SINGLE), (DOUBLE, SINGLE)]
)
def test_products_are_rounded_once(a: torch.dtype, out: torch.dtype, add: bool):
    x, y, start = torch.randn(9, 40).to(a), torch.randn(40, 11).to(a), torch.randn(9, 11).to(out)
    mine = start.clone()
    multiply(x, y, mine, wide=False, add=add)
    right = x.double() @ y.double() + (start.double() if add else 0.0)
    unit = torch.finfo(out).eps
    assert ((mine.double() - right).abs() <= unit * right.abs() + 40 * torch.finfo(SINGLE).eps).all()


def test_precision_is_switched_for_float32_on_a_card_alone():
    for kind, dtype, switched in (("cuda", SINGLE, True), ("cuda", HALF, False), ("cpu", SINGLE, False)):
        found = _float32_products(SimpleNamespace(device=torch.device(kind), dtype=dtype), True)  # pyright: ignore[reportArgumentType]
        assert (found is not NOTHING) == switched


@pytest.mark.parametrize(("on_gpu", "dtype", "scratch"), [(True, SINGLE, 24), (True, torch.int64, 24)])
@pytest.mark.parametrize("number", [1000, 3000])
def test_what_a_sort_takes_besides(on_gpu: bool, dtype: torch.dtype, scratch: int, number: int):
    assert _sorted(on_gpu, dtype, number) == number * (dtype.itemsize + 8 + scratch)


@pytest.mark.parametrize(("dtype", "scratch"), [(SINGLE, 0), (torch.int64, 8)])
def test_what_a_sort_takes_besides_on_a_cpu(dtype: torch.dtype, scratch: int):
    """Floats are sorted in place."""
    assert _sorted(False, dtype, 1000) == 1000 * (dtype.itemsize + 8 + scratch)


def _sorted(on_gpu: bool, dtype: torch.dtype, number: int) -> int:
    """Bytes of a sort's results and of its scratch, on the meta device."""
    x = torch.empty(number, dtype=dtype, device="meta")
    with Ledger(on_gpu) as ledger:
        kept = torch.sort(x, stable=True)
    assert len(kept) == 2
    return ledger._fullest["forward"][0]


def test_the_device_behind_a_call_is_found_in_any_container():
    here, nowhere = torch.zeros(2), torch.zeros(2, device="meta")
    for arguments in ([nowhere, here], {"a": nowhere, "b": [here]}, ((nowhere,), {"advantage": here})):
        assert _real_device(arguments) == "cpu"
    assert _real_device(((nowhere,), {"a": nowhere, "b": 3})) is None
