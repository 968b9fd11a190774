"""One batch through every scheme, every split of the ranks: the single process's answer, whatever the split.

Every world size runs all its cases in one job. See ``split_model.py`` for the model and what is compared.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuts import Batch
from hypothesis import Phase, example, given, settings
from schemes import Layout, batches
from shared.parallel import RAGGED, SHORT, SPLITS, setups
from split_model import LOSSES, Answer, Groups, Problem, Setup, assert_same, run_both, run_split
from torch.distributed.device_mesh import init_device_mesh

ONE = Batch([8], [1], [[1]])
"""A single response token, so that every rank but one has no rows."""


def made_with_new_group(rank: int, size: int, tp: int) -> Groups:
    """Tensor-parallel ranks are neighbours, as in Megatron. Every rank makes every group, in the same order."""
    tp_groups = [dist.new_group(list(range(c * tp, (c + 1) * tp))) for c in range(size)]
    cp_groups = [dist.new_group(list(range(t, size * tp, tp))) for t in range(tp)]
    cp_rank, tp_rank = divmod(rank, tp)
    return Groups(cp_groups[tp_rank] if size > 1 else None, tp_groups[cp_rank] if tp > 1 else None, cp_rank, tp_rank)


def made_with_device_mesh(rank: int, size: int, tp: int) -> Groups:
    mesh = init_device_mesh("cpu", (size, tp), mesh_dim_names=("cp", "tp"))
    cp_rank, tp_rank = mesh["cp"].get_local_rank(), mesh["tp"].get_local_rank()
    # Groups of one are groups too.
    return Groups(mesh["cp"], mesh["tp"].get_group(), cp_rank, tp_rank)


MAKERS = {"new_group": made_with_new_group, "device_mesh": made_with_device_mesh}


def run_cases(rank: int, world: int, maker: str, cases: list[tuple[Problem, list[Setup]]]) -> list[Answer]:
    torch.set_num_threads(1)
    groups = {(size, tp): MAKERS[maker](rank, size, tp) for size, tp in SPLITS[world]}
    return [run_split(p, setup, groups[setup.layout.size, setup.tp]) for p, setups in cases for setup in setups]


def assert_cases(ranks: Any, world: int, maker: str, cases: list[tuple[Problem, list[Setup]]]) -> None:
    results = iter(zip(*ranks(run_cases, world, maker, cases), strict=True))
    for problem, several in cases:
        references = {loss: run_both(problem, loss) for loss in LOSSES}
        for setup in several:
            try:
                assert_same(problem, setup, next(results), *references[setup.loss])
            except AssertionError as error:
                raise AssertionError(f"{setup} of {problem}: {error}") from error


@pytest.mark.parametrize("world", [1, 2, 4])
@settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
@example(batch=RAGGED)
@example(batch=SHORT)
@example(batch=ONE)
@given(batch=batches(min_samples=2, max_samples=4, max_length=13))
def test_every_scheme_gives_the_answer_of_one_process(ranks, world, batch):
    """Named batches in every way; a drawn one in a third of them, another third for another sum of lengths."""
    problem = Problem(batch, seed=sum(batch.lengths))
    several = setups(world, batch)
    if batch not in (RAGGED, SHORT, ONE):
        several = several[problem.seed % 3 :: 3]
    assert_cases(ranks, world, "new_group", [(problem, several)])


def test_four_by_two(ranks):
    """Eight ranks, more than the machine has cores, so one batch and the losses that no smaller split settles."""
    problem = Problem(RAGGED, seed=7)
    cases = [(problem, setups(8, RAGGED, ("tokens", "sum")))]
    assert_cases(ranks, 8, "new_group", cases)


@pytest.mark.parametrize("world", [2, 4])
def test_float32(ranks, world):
    problem = Problem(RAGGED, seed=5, dtype=torch.float32)
    assert_cases(ranks, world, "new_group", [(problem, setups(world, RAGGED, ("tokens", "slice")))])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_device_mesh(ranks, world):
    """Also with groups of a single rank, which a mesh has where a process group would be None."""
    problem = Problem(RAGGED, seed=3)
    some = [
        setup
        for setup in setups(world, RAGGED)
        if setup.layout.kind in ("zigzag", "contiguous", "zigzag lines") and setup.layout.extra == 0
    ]
    assert_cases(ranks, world, "device_mesh", [(problem, some)])


def test_the_comparison_can_fail():
    """One number wrong, in a value, a loss or a gradient, is seen."""
    problem, setup = Problem(RAGGED, seed=2), Setup(Layout("packed"))
    good, reference = run_split(problem, setup, Groups(None, None, 0, 0)), run_both(problem, "tokens")
    assert_same(problem, setup, [good], *reference)
    wrong = good.gathered[0][0] * (1 + 1e-10)
    for bad in (
        good._replace(loss=good.loss + 1e-8),
        good._replace(gathered=([wrong, *good.gathered[0][1:]], good.gathered[1]), logprob=[wrong, *good.logprob[1:]]),
        good._replace(gradients=good.gradients | {"head": good.gradients["head"] * (1 + 1e-10)}),
        good._replace(gradients=good.gradients | {"place": good.gradients["place"].flip(0)}),
    ):
        with pytest.raises(AssertionError):
            assert_same(problem, setup, [bad], *reference)
    with pytest.raises(AssertionError):
        assert_same(problem, setup, [good], *run_both(replace(problem, seed=1), "tokens"))
