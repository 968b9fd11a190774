"""Rows of SkyRL's and NeMo-RL's batches, against loops over sequences and offsets.

Ranks are played one after the other: their rows together predict every token once, and each result has its place.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from logitless.adapters.packs import Batch, packed_batch, padded_batch

CPU = torch.device("cpu")


def row_of(offset: int, start: int, span: int, rank: int, size: int) -> int | None:
    """Local row of a token of a sequence whose places ``start .. start + span`` are cut zigzag; None if not here."""
    if size == 1:
        return start + offset
    chunk, within = divmod(offset, span // (2 * size))
    if chunk not in (rank, 2 * size - 1 - rank):
        return None
    return start // size + (0 if chunk == rank else span // (2 * size)) + within


def check(batch: Batch, ids: Tensor, spans: list[int], places: list[list[tuple[int, int]]], rank: int, size: int):
    """``places[i][o]``: line and column of the result of token o of sequence i."""
    found, start = [], 0
    for span, sequence in zip(spans, places, strict=True):
        for offset, (line, column) in enumerate(sequence):
            row = row_of(offset, start, span, rank, size)
            if row is not None:
                found.append((row, int(ids[start + offset + 1]), line * batch.shape[1] + column))
        start += span
    rows = batch.rows
    ours = torch.stack([rows.index, rows.target, batch.place[rows.response]], dim=1)
    assert sorted(map(tuple, ours.tolist())) == sorted(found)


@pytest.fixture
def ranks(monkeypatch):
    """Groups are pairs (rank, size) here."""
    monkeypatch.setattr(dist, "get_rank", lambda group: group[0])
    monkeypatch.setattr(dist, "get_world_size", lambda group: group[1])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["padded", "bare", "mask", "sub"])
def test_rows_and_places(ranks, kind, size):
    for seed in range(20):
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        width, multiple = draw.randint(2, 11), 1 if size == 1 else 2 * size
        mask, sub = torch.rand(3, width, generator=generator) < draw.choice([0.0, 0.5, 1.0]), None
        lengths = mask.sum(1).tolist() if kind == "mask" else [draw.randint(0, 13) for _ in range(3)]
        lengths = [width] * 3 if kind == "padded" else lengths
        spans = [(-(-n // multiple) + draw.randint(0, 1)) * multiple for n in lengths]
        if kind == "sub":
            sub = [lengths[:2], [], lengths[2:]]
            first = [(0, 0), (0, spans[0]), (2, 0)]
            places = [[(a, b + o) for o in range(n - 1)] for (a, b), n in zip(first, lengths, strict=True)]
        elif kind == "mask":
            columns = [line.nonzero().flatten().tolist()[:-1] for line in mask]
            places = [[(i, c) for c in line] for i, line in enumerate(columns)]
        else:
            spans = [max(spans)] * 3 if kind == "padded" else spans
            # Padding counts as tokens where nothing says which are.
            places = [[(i, o) for o in range(span - 1)] for i, span in enumerate(spans)]
        places = [[(a, b) for a, b in sequence if b < width - 1] for sequence in places]
        ids = torch.randint(-100, 99, (sum(spans),), generator=generator)
        for rank in range(size):
            group = None if size == 1 else (rank, size)
            if kind == "padded":
                batch = padded_batch(ids.view(3, -1)[:, :width], spans[0] // size, group, CPU)
            else:
                bounds = torch.tensor([0, *spans]).cumsum(0)
                local = len(ids) // size
                batch = packed_batch(ids, bounds, local, width, group, CPU, mask if kind == "mask" else None, sub)
            check(batch, ids, spans, places, rank, size)


def test_results_and_weights_find_their_way():
    """Two sequences of one line; the second runs out of the output."""
    weights = torch.tensor([[0.0, 2.0, 0.0, 0.5, 0.0]])
    batch = packed_batch(None, torch.tensor([0, 3, 8]), 8, 6, None, CPU, None, [[3, 5]], lambda shape: weights)
    assert batch.rows.index.tolist() == [1, 3]
    assert batch.weights.tolist() == [2.0, 0.5]
    values = torch.tensor([7.0, 8.0], requires_grad=True)
    out = batch.spread(values, grad="sum")
    assert out.tolist() == [[0, 7, 0, 8, 0]]
    (out * torch.arange(5)).sum().backward()
    assert values.grad.tolist() == [1, 3]


def test_a_batch_without_sequences_keeps_the_graph():
    batch = padded_batch(torch.zeros(0, 4, dtype=torch.int64), 4, None, CPU)
    out = batch.spread(torch.zeros(0, requires_grad=True), grad="sum")
    assert (tuple(out.shape), out.requires_grad) == ((0, 3), True)
