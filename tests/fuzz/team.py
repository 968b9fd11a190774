"""Cases over real gloo groups: a team of processes that stays alive, each with its part of the vocabulary or sequence.

Every rank draws the same case, computes the whole truth, and judges its own part of the results; what ranks share
(partial gradients, parts of a loss) is summed in float64 first. A rank that hangs or dies ends the job: its seeds are
then run one by one, to find the one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fuzz import ours
from fuzz.build import HEAD_LEAVES, Inputs, build
from fuzz.cases import LOGITS, LOSSES, draw
from fuzz.judge import Verdict, judged, refusal
from fuzz.oracle import Answer, truth
from fuzz.record import Tally
from logitless import LogitlessError

TIMEOUT = 60.0
ALONE = 20.0


def judge_over_ranks(seeds: range, ranks: int, triton_share: float = 0.0) -> Tally:
    """So many seeds over a team of ranks."""
    from ranks import RankFailed, run_ranks

    tally = Tally()
    try:
        found = run_ranks(judge_on_rank, ranks, seeds, triton_share, timeout=TIMEOUT)
    except RankFailed as error:
        if len(seeds) == 1:
            tally.add(draw(seeds[0], triton_share, ranks), Verdict("wrong", torch.inf, str(error)))
            return tally
        for seed in seeds:
            tally.merge(_alone(seed, ranks, triton_share))
        return tally
    for seed, *verdicts in zip(seeds, *found, strict=True):
        tally.add(draw(seed, triton_share, ranks), _worst(verdicts))
    return tally


def _alone(seed: int, ranks: int, triton_share: float) -> Tally:
    from ranks import RankFailed, run_ranks

    case, tally = draw(seed, triton_share, ranks), Tally()
    try:
        (*verdicts,) = run_ranks(judge_on_rank, ranks, range(seed, seed + 1), triton_share, timeout=ALONE)
        tally.add(case, _worst([v for (v,) in verdicts]))
    except RankFailed as error:
        tally.add(case, Verdict("wrong", torch.inf, str(error)))
    return tally


def _worst(verdicts: list[Verdict]) -> Verdict:
    return max(verdicts, key=lambda v: (v.kind == "wrong", v.ratio))


def judge_on_rank(rank: int, world: int, seeds: range, triton_share: float) -> list[Verdict]:
    """The work of one rank."""
    return [_verdict(build(draw(seed, triton_share, world)), rank) for seed in seeds]


def _verdict(inputs: Inputs, rank: int) -> Verdict:
    case, right = inputs.case, truth(inputs)
    if case.path in LOSSES and right.margin <= 1e-6 + 16 * right.blur:
        return Verdict("at a bound")
    mine, found = None, None
    try:
        mine = ours.answer(inputs, right.fields, rank=rank)
    except LogitlessError as error:
        found = refusal(case, error)
    except Exception as error:
        found = Verdict("wrong", torch.inf, f"{type(error).__name__}: {error}")
    table: list[Any] = [None] * case.ranks
    dist.all_gather_object(table, None if found is None else found.kind)
    if len(set(table)) > 1:
        return Verdict("wrong", torch.inf, f"rank by rank it is {table}; here {'' if found is None else found.reason}")
    if mine is None:
        assert found is not None
        return found

    def own(whole: Answer) -> Answer:
        return _own(inputs, whole, rank)

    return judged(inputs, _summed(inputs, mine), own(right), own)


def _summed(inputs: Inputs, mine: Answer) -> Answer:
    """What the ranks have parts of, added up."""
    case = inputs.case
    values, gradients = dict(mine.values), dict(mine.gradients)
    if case.parallel == "sequence":
        values["loss"] = _sum(values["loss"])
        # A rank without rows has made no gradient, but takes part in the sum.
        for name in HEAD_LEAVES:
            if name in inputs.leaves and inputs.wanted(name):
                part = gradients.get(name)
                gradients[name] = _sum(torch.zeros_like(inputs.leaves[name]) if part is None else part)
    elif case.path != LOGITS and case.hidden_grad == "partial" and "x0" in gradients:
        gradients["x0"] = _sum(gradients["x0"])
    return Answer(values, gradients, {}, {})


def _sum(x: Tensor) -> Tensor:
    total = x.detach().double()
    dist.all_reduce(total)
    return total


def _own(inputs: Inputs, right: Answer, rank: int) -> Answer:
    """Of the truth, what this rank has."""
    case = inputs.case

    def own(found: dict[str, Tensor]) -> dict[str, Tensor]:
        if case.parallel == "sequence":
            return {n: x for n, x in found.items() if not n.startswith("x") or n == f"x{rank}"}
        return {n: ours.cut(x, n, inputs, rank) for n, x in found.items()}

    def rows(found: dict[str, Tensor]) -> dict[str, Tensor]:
        if case.parallel != "sequence":
            return found
        return {n: x if n == "loss" else x[inputs.parts[rank].rows] for n, x in found.items()}

    values, units = rows(right.values), rows(right.value_units)
    return Answer(values, own(right.gradients), units, own(right.gradient_units), right.fields)
