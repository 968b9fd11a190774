"""Shared by the tests of linear parallel and those that build on them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from calls import logits_of
from close import assert_close_to_truth, assert_gradient_close_to_truth
from torch import Tensor
from truth import Scores, plain, truth

from logitless import Head, Rows, VocabShard, explain, logprobs
from shared.linear import GRADIENT_PROMISE, HALF, Operands, draw, draw_rows, ragged
from shared.shards import Collectives, as_told, bits

WORLDS = {
    2: [(0, 50), (50, 127)],
    3: [(0, 29), (29, 29), (29, 127)],
    4: [(100, 127), (1, 33), (0, 1), (33, 100)],
}
"""Bounds by rank of 127 columns: an uneven cut, an empty shard, and shards out of order."""


NAMES = ("hidden", "weight", "bias")


@dataclass(frozen=True)
class Case:
    """One call of ``logprobs``, and the upstream gradients of its three results."""

    operands: Operands
    index: Tensor
    target: Tensor
    upstream: Tensor
    bounds: list[tuple[int, int]]
    head: dict[str, Any] = field(default_factory=dict)
    kept: list[list[int]] | None = None
    wanted: tuple[str, ...] = NAMES
    options: dict[str, Any] = field(default_factory=lambda: {"entropy": "grad"})

    @property
    def entropy(self) -> str | None:
        return self.options.get("entropy")

    @property
    def scope(self) -> str:
        return self.options.get("scope", "vocabulary")

    @property
    def sequence_parallel(self) -> bool:
        return self.options.get("sequence_parallel", False)


class Scored(NamedTuple):
    """What a rank sends back.

    Attributes:
        told, sent: the collectives of forward and of backward as ``explain`` has them, and as they ran.
    """

    logprob: Tensor
    entropy: Tensor | None
    log_z: Tensor
    gradients: dict[str, Tensor]
    forward_calls: list[tuple[str, int]]
    backward_calls: list[tuple[str, int]]
    told: tuple[list[tuple[str, int]], list[tuple[str, int]]]
    sent: tuple[list[tuple[str, int]], list[tuple[str, int]]]


def make_case(bounds, *, tokens=24, rows=17, width=17, dtype=torch.float32, **changes) -> Case:
    vocab = max(stop for _, stop in bounds)
    index, target = draw_rows(tokens, rows, changes.get("head", {}).get("vocab_size", vocab))
    upstream = torch.randn(3, rows, dtype=torch.float64)
    changes["options"] = {"entropy": "grad", **changes.get("options", {})}
    return replace(Case(draw(tokens, vocab, width, dtype), index, target, upstream, bounds), **changes)


def score(rank: int, world: int, cases: list[Case]) -> list[Scored]:
    return [score_one(case, rank, VocabShard(*case.bounds[rank], dist.group.WORLD)) for case in cases]


def score_one(case: Case, rank: int, shard: VocabShard) -> Scored:
    hidden, weight, bias = case.operands
    if case.sequence_parallel:
        hidden = hidden.chunk(shard.group.size())[rank]
    part = slice(shard.start, shard.stop)
    leaf = Operands(hidden, weight[part], bias[part]).leaves(case.wanted)
    kept = None if case.kept is None else ragged(case.kept).over(case.scope)
    rows = Rows.at(case.index, case.target)
    given = {name: x for name, x in case.options.items() if name != "scope"}
    options = {"bias": leaf.bias, "head": Head(**case.head), "shard": shard, "kept": kept, **given}
    logits, options = logits_of(leaf.hidden, leaf.weight, options)
    plan = explain(logprobs, logits, rows, **options)
    with Collectives() as forward:
        out = logprobs(logits, rows, **options)
    with Collectives() as backward:
        backward_of(out, case.upstream)
    gradients = {name: x.grad for name, x in leaf._asdict().items() if x.grad is not None}
    values = (None if x is None else x.detach() for x in out[:3])
    both = (as_told(plan, "forward"), as_told(plan, "backward")), (forward.sent, backward.sent)
    return Scored(*values, gradients, forward.calls, backward.calls, *both)


def backward_of(out: Any, upstream: Tensor) -> None:
    pairs = [(x, g.to(x)) for x, g in zip(out[:3], upstream, strict=True) if x is not None and x.requires_grad]
    torch.autograd.backward(*zip(*pairs, strict=True))


def with_gradients(oracle, leaf: Operands, case: Case) -> tuple[Scores, dict[str, Tensor]]:
    out = oracle(leaf.logits(), case.index, case.target, **case.head, kept=case.kept, scope=case.scope)
    counted = case.upstream if case.entropy == "grad" else case.upstream * torch.tensor([[1.0], [0], [1]])
    backward_of(out, counted)
    return out, {name: x.grad for name, x in leaf._asdict().items() if x.grad is not None}


def whole_gradients(case: Case, results: list[Scored]) -> dict[str, Tensor]:
    """Of the whole head in column order, and of all tokens."""
    by_start = sorted(zip(case.bounds, results, strict=True), key=lambda item: item[0])
    gradients = {
        name: torch.cat([scored.gradients[name] for _, scored in by_start])
        for name in ("weight", "bias")
        if name in case.wanted
    }
    if "hidden" in case.wanted:
        parts = [scored.gradients["hidden"] for scored in results]
        if case.sequence_parallel:
            gradients["hidden"] = torch.cat(parts)
        elif case.options.get("hidden_grad") == "partial":
            gradients["hidden"] = torch.stack(parts).sum(0)
        else:
            assert all(torch.equal(part, parts[0]) for part in parts), "ranks disagree about the gradient of hidden"
            gradients["hidden"] = parts[0]
    return gradients


def assert_same_bits(results: list[Scored]) -> None:
    for rank, other in enumerate(results):
        for name in ("logprob", "entropy", "log_z"):
            mine, theirs = getattr(results[0], name), getattr(other, name)
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(bits(mine), bits(theirs)), f"{name} of rank {rank} differs from rank 0"


def assert_truth(case: Case, results: list[Scored]) -> None:
    assert_same_bits(results)
    right, right_gradients = with_gradients(truth, case.operands.leaves(case.wanted, torch.float64), case)
    usual, usual_gradients = with_gradients(plain, case.operands.leaves(case.wanted), case)
    for name in ("logprob", "entropy", "log_z"):
        mine = getattr(results[0], name)
        if mine is not None:
            assert_close_to_truth(mine, getattr(right, name), getattr(usual, name), name)
    ours = whole_gradients(case, results)
    assert set(ours) == set(case.wanted)
    for name, mine in ours.items():
        assert mine.dtype == case.operands.hidden.dtype
        if name == "hidden" and mine.dtype in HALF:
            # The parts of the ranks are rounded, and rounded again as they are added.
            off = (mine.double() - right_gradients[name]).norm() / right_gradients[name].norm()
            assert off <= 2 * GRADIENT_PROMISE, f"gradient of hidden: {off:.3g}"
            continue
        assert_gradient_close_to_truth(mine, right_gradients[name], usual_gradients[name], f"gradient of {name}")


def run(ranks, world: int, cases: list[Case]) -> list[list[Scored]]:
    """Results of each case by rank, all of them right, with the collectives that ``explain`` names."""
    by_case = [list(by_rank) for by_rank in zip(*ranks(score, world, cases), strict=True)]
    for case, by_rank in zip(cases, by_case, strict=True):
        assert_truth(case, by_rank)
        assert all(scored.sent == scored.told for scored in by_rank), case
    return by_case
