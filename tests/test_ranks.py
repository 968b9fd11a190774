"""The rank runner itself: it must report failures, and it must not hang."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailed, run_ranks
from torch.distributed.device_mesh import init_device_mesh


def _sum_of_ranks(rank, world, factor):
    x = torch.tensor([float(rank + 1)])
    dist.all_reduce(x)
    return rank, world, dist.get_world_size(), factor * float(x)


def _mesh_sums(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    sums = []
    for axis in ("cp", "tp"):
        x = torch.tensor([10.0**rank])
        dist.all_reduce(x, group=mesh[axis].get_group())
        sums.append(float(x))
    return sums


def _one_rank_raises(rank, world):
    if rank == 1:
        raise ValueError("the cause")
    dist.barrier()


def _one_rank_sleeps(rank, world):
    if rank == 1:
        time.sleep(30)


def _one_rank_dies(rank, world):
    if rank == 1:
        os._exit(7)
    dist.barrier()


def _unpicklable(rank, world):
    return lambda: None


@pytest.mark.parametrize("world", [4, 1, 2, 3])
def test_each_job_gets_a_group_of_its_own_ranks(ranks, world):
    expected = 3.0 * sum(range(1, world + 1))
    assert ranks(_sum_of_ranks, world, 3.0) == [(rank, world, world, expected) for rank in range(world)]


def test_jobs_may_make_meshes_more_than_once(ranks):
    expected = [[101.0, 11.0], [1010.0, 11.0], [101.0, 1100.0], [1010.0, 1100.0]]
    assert ranks(_mesh_sums, 4) == expected
    assert ranks(_mesh_sums, 4) == expected


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (_one_rank_raises, r"rank 1 of 2 failed:\n(.|\n)*_one_rank_raises(.|\n)*ValueError: the cause"),
        (_one_rank_dies, r"rank 1 of 2 died with exit code 7"),
        (_unpicklable, r"rank [01] of 2 failed:\n(.|\n)*pickle"),
    ],
)
def test_a_failing_rank_is_named_and_the_next_job_runs(ranks, function, text):
    with pytest.raises(RankFailed, match=text):
        ranks(function, 2)
    assert len(ranks(_sum_of_ranks, 2, 1.0)) == 2


def test_a_late_rank_is_ended():
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 of 2 died|ranks \[1\] of 2 did not finish"):
        run_ranks(_one_rank_sleeps, 2, timeout=2.0)
    assert time.monotonic() - began < 15
