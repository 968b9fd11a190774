"""Shared by the tests of layouts."""

from __future__ import annotations

from cuts import Batch

from logitless import Rows


def assert_table(rows: Rows, index, target, sample, position, held) -> None:
    assert rows.index.tolist() == index
    assert rows.target.tolist() == target
    assert rows.sample.tolist() == sample
    assert rows.position.tolist() == position
    assert rows.held == rows.counts == tuple(held)


SLIME_2 = Batch([11, 3, 5], [6, 2, 1])
