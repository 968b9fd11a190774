"""What the simulation of groups of warps notices."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
import warp_groups
from warp_groups import Barrier, Groups, Shared

tl = pytest.importorskip("triton.language")


def groups(seed: int = 0) -> Groups:
    return Groups(random.Random(seed))


def test_one_group_runs_at_a_time_and_in_another_order_with_another_seed():
    orders = set()
    for seed in range(8):
        here, order, inside = groups(seed), [], threading.Lock()

        def work(name: str, here: Groups = here, order: list = order, inside: threading.Lock = inside) -> None:
            for _ in range(3):
                assert inside.acquire(blocking=False)
                order.append(name)
                inside.release()
                here.pause()

        here.run([(work, ("a",)), (work, ("b",))])
        assert sorted(order) == ["a"] * 3 + ["b"] * 3
        orders.add("".join(order))
    assert len(orders) > 3


def test_groups_that_wait_for_each_other_are_an_error():
    here = groups()
    with pytest.raises(AssertionError, match=r"Groups \[0, 1\] wait for each other"):
        here.run([(here.pause, (lambda: False,)), (here.pause, (lambda: False,))])


def test_an_error_of_one_group_ends_all():
    here = groups()

    def fail() -> None:
        raise ValueError("of this group")

    with pytest.raises(ValueError, match="of this group"):
        here.run([(fail, ()), (here.pause, (lambda: False,))])


def test_a_barrier_tells_two_rounds_apart_and_no_more():
    barrier = Barrier(2)
    for expected in (0, 1, 0):
        assert barrier.round == expected
        barrier.arrive(expected=16)
        barrier.arrive()
        assert barrier.round == expected
        barrier.add(-16)
    with pytest.raises(AssertionError, match="More have arrived"):
        barrier.arrive(3)


def test_a_product_reads_what_lies_there_when_it_is_waited_for():
    words = warp_groups._hopper(groups())
    a, b = Shared(tl.bfloat16, [2, 16]), Shared(tl.bfloat16, [16, 2])
    sums = warp_groups.Sums(np.zeros((2, 2), np.float32), None)
    sums.under_way += [(a, b)]
    assert words.warpgroup_mma_wait(1, [sums]) is sums
    one = torch.ones((), dtype=torch.bfloat16).view(torch.int16).item()
    a.data[:] = b.data[:] = one
    sums.wait(0)
    assert (sums.data == 16).all()
    sums.under_way += [(Shared(tl.bfloat16, [2, 16]), b)]
    sums.wait(0)
    assert np.isnan(sums.data).all(), "memory that nobody wrote"
