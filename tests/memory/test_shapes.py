"""Shapes and dtypes of dry runs are torch's own: every formula against the same operator on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from logitless.memory.shapes import SHAPES, result_of

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


ON_META: dict[str, Any] = {"device": "meta"}
LONG, BOOL, HALF = torch.int64, torch.bool, torch.bfloat16
CALLS: list[tuple[Any, tuple, dict[str, Any]]] = [
    *((op, (meta(3, 5, dtype=HALF),), {}) for op in (aten.empty_like.default, aten.zeros_like.default)),
    (aten.ones_like.default, (meta(3, 5),), {"dtype": LONG}),
    (aten.full_like.default, (meta(3, 5), 7), {}),
    *((op, (meta(3, dtype=HALF), [2, 4]), {}) for op in (aten.new_empty.default, aten.new_zeros.default)),
    (aten.new_ones.default, (meta(3), [2, 4]), {"dtype": BOOL}),
    *((op, ([2, 4],), ON_META) for op in (aten.zeros.default, aten.ones.default)),
    (aten.zeros.default, ([],), {"dtype": LONG, **ON_META}),
    (aten.arange.default, (7,), ON_META),
    (aten.arange.start, (2, 7), ON_META),
    (aten.arange.start, (2, 2), ON_META),
    (aten.arange.start_step, (1, 8, 3), {"dtype": torch.int32, **ON_META}),
    *((aten.stack.default, ([meta(3, 5), meta(3, 5)], dim), {}) for dim in (0, 1, 2, -1, -2)),
    *((aten.cat.default, ([meta(3, 5), meta(3, 5), meta(3, 5)], dim), {}) for dim in (0, 1, -1)),
    (aten.index.Tensor, (meta(3, 5, 7), [meta(4, dtype=LONG)]), {}),
    (aten.index.Tensor, (meta(3, 5, 7), [None, meta(4, 2, dtype=LONG)]), {}),
    (aten.index.Tensor, (meta(3, 5, 7), [meta(4, 1, dtype=LONG), meta(2, dtype=LONG)]), {}),
    (aten.all.dim, (meta(3, 5, dtype=BOOL), 1, True), {}),
    (aten.all.dim, (meta(3, 5, dtype=BOOL), -2), {}),
    *((op, (meta(3, 5, 7), [0, -1]), {}) for op in (aten.amax.default, aten.amin.default)),
    (aten.amax.default, (meta(3, 5, 7), [], True), {}),
    (aten.amax.default, (meta(3, 5, 7), [1], True), {}),
    (aten.sum.default, (meta(3, 5, dtype=BOOL),), {}),
    (aten.sum.default, (meta(3, 5, dtype=HALF),), {"dtype": torch.float32}),
    (aten.sum.dim_IntList, (meta(3, 5, dtype=LONG), [1]), {}),
    (aten.sum.dim_IntList, (meta(3, 5), None, True), {}),
    (aten.sum.dim_IntList, (meta(3, 5, 7), [0, 2]), {}),
    (aten.mm.default, (meta(3, 5, dtype=HALF), meta(5, 7, dtype=HALF)), {}),
    (aten._log_softmax.default, (meta(3, 5), 1, False), {}),
    (aten._log_softmax_backward_data.default, (meta(3, 5), meta(3, 5), 1, torch.float32), {}),
    # Pointwise: broadcast, promoted, and a tensor without dimensions beside others.
    (aten.add.Tensor, (meta(3, 1, 7), meta(5, 1)), {}),
    (aten.mul.Tensor, (meta(3, 5, dtype=HALF), meta(dtype=torch.float32)), {}),
    (aten.mul.Tensor, (meta(3, 5, dtype=HALF), meta(1, dtype=torch.float32)), {}),
    (aten.lt.Tensor, (meta(3, 5), meta(5)), {}),
    (aten.div.Tensor, (meta(3, dtype=LONG), meta(3, dtype=LONG)), {}),
    (aten.exp.default, (meta(3, 5, dtype=LONG),), {}),
]


@pytest.mark.parametrize(("func", "args", "kwargs"), CALLS, ids=[str(call[0]) for call in CALLS])
def test_as_torch(func: Any, args: tuple, kwargs: dict[str, Any]):
    ours, theirs = result_of(func, args, kwargs), func(*args, **kwargs)
    assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)


def test_every_formula_is_tried():
    assert {call[0] for call in CALLS} >= set(SHAPES)


def test_nothing_is_made_in_place():
    x, out = meta(3, 5), meta(3, 5)
    assert result_of(aten.add_.Tensor, (x, meta(5)), {}) is x
    assert result_of(aten.add.out, (x, meta(5)), {"out": out}) is out
