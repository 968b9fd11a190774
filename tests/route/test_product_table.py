"""Products by turns: how their parts are counted, and where products are made so."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import logitless as ll
from logitless import machine
from logitless.machine import CPU, H200, Machine, pieces
from logitless.product_table import ProductSizes, product_sizes
from logitless.tools import doctor, tune

GPU = torch.device("cuda", 0)

SIZES = ProductSizes(rows=128, columns=128, depth=64, tiles=3, turns=True)


@pytest.mark.parametrize(("columns", "parts"), [(1, 2), (128, 2), (768, 2), (769, 4), (1536, 4), (1537, 6)])
def test_parts_by_turns_come_in_pairs(columns: int, parts: int):
    """A unit of six tiles has a part of its even tiles and one of its odd ones, even where it has one tile alone."""
    assert SIZES.groups(columns) == parts
    assert SIZES._replace(turns=False).groups(columns) == -(-columns // 384)


@pytest.mark.parametrize("columns", [1, 300, 18992, 50257, 151936])
@pytest.mark.parametrize("width", [64, 1024, 8192])
def test_a_tile_of_either_group_fits(columns: int, width: int):
    """Places for five steps and for two tiles on their way to memory; 128 sums in each of 128 threads."""
    sizes = product_sizes(columns, width, turns=True)
    assert sizes.turns
    steps = sizes.stages * (sizes.rows + sizes.columns) * sizes.depth
    assert 2 * (steps + 2 * sizes.rows * sizes.columns) < 227 << 10
    assert sizes.rows * sizes.columns // (32 * sizes.warps) == 128
    # Blocks of 128 columns that add up in any order are another kind.
    assert not product_sizes(columns, width, canonical=True, turns=True).turns


def test_where_products_are_made_by_turns():
    assert H200.turns
    assert Machine.card("another Hopper", 114, 9).turns
    assert not Machine.card("a B200", 148, 10).turns
    assert not CPU.turns


@pytest.mark.parametrize(
    ("version", "made"), [("3.5.1", False), ("3.6.0", True), ("3.6.1+git", True), ("3.60.0", False), (None, False)]
)
def test_which_versions_of_triton_make_products_by_turns(version: str | None, made: bool, monkeypatch):
    """Those whose Gluon ran the kernels, on a card."""

    def of(name: str) -> str:
        if name == "triton" and version is not None:
            return version
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", of)
    card = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv(machine.TABLE, raising=False)
    assert machine._card.__wrapped__(0).turns is machine.by_turns(GPU) is made
    # AMD's cards of generation 9 are others.
    monkeypatch.setattr(torch.version, "hip", "7.0")
    other = machine._card.__wrapped__(0)
    assert (other.turns, other.epilogues, other.dz_programs) == (False, False, 0)
    assert not machine.by_turns(GPU)


def test_a_table_that_is_missing_stops_neither_tune_nor_doctor(monkeypatch, tmp_path):
    """``tune`` is what writes it, and ``doctor`` says what is wrong with it."""
    card = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(machine, "gluon_ran", lambda: True)
    monkeypatch.setattr(Machine, "of", staticmethod(lambda device: machine._card.__wrapped__(0)))
    monkeypatch.delenv(machine.TABLE, raising=False)
    assert doctor._products("triton", GPU) == ", fused products by turns"
    monkeypatch.setenv(machine.TABLE, str(tmp_path / "nothing.json"))
    assert machine.by_turns(GPU)
    assert tune.num_steps(GPU) == 9
    assert "LOGITLESS_MACHINE: " in doctor._products("triton", GPU)


@pytest.mark.parametrize("memory", ["8MiB", "64MiB", "1GiB"])
def test_parts_of_some_rows_exist_at_a_time(memory: str):
    """Of a frozen head, whose slabs have parts of their own: those of the last rows are gone before the next."""
    hidden, weight = (torch.empty(n, 1024, dtype=torch.bfloat16, device="meta") for n in (16384, 151936))
    target, found = torch.empty(16384, dtype=torch.int64, device="meta"), []
    for turns in (False, True):
        given = ll.Logits(hidden.requires_grad_(), weight)
        estimate = ll.estimate(ll.logprobs, given, target, memory=memory, device=replace(H200, turns=turns))
        assert estimate.plan is not None
        rows, columns = estimate.plan.forward[:2]
        slabs = pieces(151936, columns)
        parts = sum(product_sizes(n, 1024, turns=turns).groups(n) for n in (x.stop - x.start for x in slabs))
        # Whatever else is there is there either way, but for the last columns of a slab.
        found.append(estimate.forward_peak - 4 * 4 * rows * parts - 2 * rows * columns)
    assert found[0] == pytest.approx(found[1], rel=0.01)
