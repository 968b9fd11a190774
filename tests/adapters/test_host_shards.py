"""Shards of two vocabularies in one process: where they are cached, all ranks of a group hit or all miss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from logitless import Logits, logprobs
from logitless.adapters.shards import cut_shard, even_shard, known_shard, packed_shard, shard_between
from logitless.seams import placed
from logitless.spec import VocabShard

SIZES = (49, 50, 49, 51, 52, 50, 51)
"""Rank 0 of two has 25 columns of 49 and of 50, and 26 of 51 and of 52: it has met its bounds, rank 1 has not."""


def cut(size: int, rank: int, world: int) -> tuple[int, int]:
    part = -(-size // world)
    return min(rank * part, size), min((rank + 1) * part, size)


def make(kind: str, group: Any, size: int, rank: int, world: int) -> VocabShard | None:
    start, stop = cut(size, rank, world)
    match kind:
        case "even":
            return even_shard(group, stop - start)
        case "even, by the host's rank":
            return even_shard(group, stop - start, rank)
        case "cut":
            return cut_shard(group, size)
        case "bounds":
            return shard_between(group, start, stop)
        case _:
            return packed_shard(group, stop - start)


def run_sizes(rank: int, world: int, kind: str) -> None:
    made: dict[int, VocabShard] = {}
    for size in [size for size in SIZES if not kind.startswith("even") or size % world == 0]:
        shard = make(kind, dist.group.WORLD, size, rank, world)
        assert shard is not None
        assert (shard.start, shard.stop, shard.vocab_size) == (*cut(size, rank, world), size)
        assert made.setdefault(size, shard) is shard
        dist.barrier()


@pytest.mark.parametrize("kind", ["even", "even, by the host's rank", "cut", "bounds", "widths"])
def test_two_vocabularies(ranks, kind):
    ranks(run_sizes, 2, kind)


def run_mixed(rank: int, world: int) -> None:
    """Each kind after the others, of vocabularies that share bounds on some ranks."""
    for kind in ("even", "cut", "bounds", "widths"):
        for size in (51, 50, 49):
            if kind != "even" or size % world == 0:
                shard = make(kind, dist.group.WORLD, size, rank, world)
                assert shard is not None
                assert (shard.start, shard.stop, shard.vocab_size) == (*cut(size, rank, world), size)
                dist.barrier()


def test_shards_of_several_kinds(ranks):
    ranks(run_mixed, 3)


def run_alone(rank: int, world: int) -> None:
    for kind in ("even", "cut", "bounds", "widths"):
        assert make(kind, dist.group.WORLD, 49, 0, 1) is None


def test_a_group_of_one_rank_has_no_shard(ranks):
    ranks(run_alone, 1)


def run_known(rank: int, world: int) -> None:
    hidden, weight, target = torch.randn(4, 3), torch.randn(9, 3), torch.tensor([0, 8, 4, 5])
    dist.broadcast(hidden, 0)
    dist.broadcast(weight, 0)
    start, stop = cut(9, rank, world)
    own = weight[start:stop].clone().requires_grad_()
    logits = placed(Logits(hidden, own), known_shard(dist.group.WORLD, start, stop, 9))
    found = logprobs(logits, target).logprob
    found.sum().backward()
    whole = weight.requires_grad_()
    wanted = (hidden @ whole.T).log_softmax(-1).gather(1, target[:, None]).squeeze(1)
    (gradient,) = torch.autograd.grad(wanted.sum(), whole)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(own.grad, gradient[start:stop])


def test_logits_that_are_not_computed_with_bounds_that_the_host_has_compared(ranks):
    """Of the other ranks' bounds nothing is known here, and none are asked for."""
    ranks(run_known, 2)
