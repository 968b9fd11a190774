"""Factors per row under sequence parallelism: a rank's Logits carry those of its own tokens, and all are scored."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from close import assert_close_to_truth, assert_gradient_close_to_truth
from shared.divergence import textbook
from torch import Tensor

import logitless as ll

R, V, D = 12, 31, 5
CUT = 19


class Operands(NamedTuple):
    hidden: Tensor
    weight: Tensor
    other: Tensor
    theirs: Tensor
    factor: Tensor
    target: Tensor


def draw() -> Operands:
    generator = torch.Generator().manual_seed(2)
    floats = [torch.randn(n, D, generator=generator) for n in (R, V, R, V)]
    return Operands(*floats, torch.rand(R, generator=generator) + 0.5, torch.arange(R) % V)


class Here(NamedTuple):
    """What a rank has: its tokens, and its columns."""

    mine: slice
    columns: slice
    shard: ll.VocabShard

    @staticmethod
    def of(rank: int, check: bool = False) -> Here:
        columns = slice(0, CUT) if rank == 0 else slice(CUT, V)
        shard = ll.VocabShard(columns.start, columns.stop, dist.group.WORLD, check_calls=check)
        return Here(slice(R // 2 * rank, R // 2 * (rank + 1)), columns, shard)

    def logits(self, hidden: Tensor, weight: Tensor) -> ll.Logits:
        own = weight[self.columns].clone().requires_grad_()
        return ll.Logits(hidden[self.mine].clone().requires_grad_(), own, shard=self.shard, sequence_parallel=True)


def said(verb: Any, *args: Any, **options: Any) -> str:
    try:
        verb(*args, **options)
    except ll.LogitlessError as error:
        return str(error)
    return "nothing"


def refused(rank: int, world: int, check: bool) -> list[str]:
    """Of a student and of a teacher, of a call and of a loss; where ranks compare calls, also of one rank alone."""
    x, here = draw(), Here.of(rank, check)
    student, teacher = here.logits(x.hidden, x.weight), ll.Logits(x.other[here.mine], x.theirs[here.columns])
    factor = x.factor[here.mine, None]
    kept = ll.Kept(x.target, torch.ones(R, dtype=torch.int64)).over("support")
    objective = ll.Objective.recipe("distill", divergence="tv")
    texts = [
        said(ll.logprobs, student * factor, x.target),
        said(ll.logprobs, student * factor, x.target, kept=kept),
        said(ll.logprobs, student, x.target, teacher=teacher / factor),
        said(ll.logprobs, student, x.target, teacher=teacher / factor, kept=kept),
        said(ll.policy_loss, student * factor, x.target, objective, teacher=teacher),
        said(ll.policy_loss, student, x.target, objective, teacher=teacher / factor),
    ]
    if check:
        texts.append(said(ll.logprobs, student * factor if rank else student, x.target))
        texts.append(said(ll.logprobs, student, x.target, teacher=teacher * factor if rank else teacher))
    return texts


def test_a_factor_for_each_row_is_refused_on_all_ranks(ranks):
    for check in (False, True):
        for texts in ranks(refused, 2, check, timeout=20):
            for text in texts:
                assert "Logits carry one factor for each of this rank's rows, and with sequence_parallel=True" in text
                assert "Head(temperature=...)" in text


class Found(NamedTuple):
    logprob: Tensor
    divergence: Tensor
    hidden: Tensor
    weight: Tensor


def instead(rank: int, world: int) -> Found:
    """As the error says: a temperature for every scored row."""
    x, here = draw(), Here.of(rank)
    student, teacher = here.logits(x.hidden, x.weight), ll.Logits(x.other[here.mine], x.theirs[here.columns])
    head = ll.Head(temperature=1 / x.factor)
    out = ll.logprobs(student, x.target, head=head, teacher=ll.Teacher(teacher, head), divergence="tv")
    (out.logprob + out.divergence).sum().backward()
    return Found(out.logprob.detach(), out.divergence.detach(), student.hidden.grad, student.weight.grad)


def right(dtype: torch.dtype) -> Found:
    x = draw()
    hidden, weight = (y.to(dtype).requires_grad_() for y in (x.hidden, x.weight))
    factor = x.factor.to(dtype)[:, None]
    z, y = hidden @ weight.T * factor, x.other.to(dtype) @ x.theirs.to(dtype).T * factor
    logprob = z.log_softmax(-1).gather(1, x.target[:, None])[:, 0]
    divergence = textbook(z, y, "tv")
    (logprob + divergence).sum().backward()
    return Found(logprob.detach(), divergence.detach(), hidden.grad, weight.grad)


def test_a_temperature_for_each_row_does_the_same(ranks):
    found, exact, plain = ranks(instead, 2), right(torch.float64), right(torch.float32)
    for answer in found:
        assert_close_to_truth(answer.logprob, exact.logprob, plain.logprob)
        assert_close_to_truth(answer.divergence, exact.divergence, plain.divergence)
    for name in ("hidden", "weight"):
        whole = torch.cat([getattr(answer, name) for answer in found])
        assert_gradient_close_to_truth(whole, getattr(exact, name), getattr(plain, name))
