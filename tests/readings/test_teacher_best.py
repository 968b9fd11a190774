"""The most likely id of a teacher with every kind of head, of several teachers, and over ranks, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared.divergence import BACKENDS
from torch import Tensor

import logitless as ll
from logitless import Head, Teacher

R, V, D = 11, 83, 6
TARGET = torch.arange(R) % 5

HEADS = {
    "plain": Head(),
    "softcap": Head(softcap=0.7),
    "padding": Head(vocab_size=V - 30),
    "softcap, padding": Head(softcap=0.7, vocab_size=V - 30),
    "negative, padding": Head(scale=-1.5, vocab_size=V - 30),
    "negative, softcap, padding": Head(scale=-1.5, softcap=0.7, vocab_size=V - 30),
}


def draw() -> tuple[Tensor, ...]:
    """Hidden states and head of a student, and of a teacher whose large logits a softcap rounds to the same number."""
    generator = torch.Generator().manual_seed(3)
    hidden, other, weight = (torch.randn(n, D, generator=generator) for n in (R, R, V))
    return hidden, weight, 4.0 * other, torch.randn(V, D, generator=generator)


def best(hidden: Tensor, weight: Tensor, head: Head) -> Tensor:
    """In float64. A softcap keeps the order."""
    return (head.scale * (hidden.double() @ weight.double().T))[:, : head.vocab_size].argmax(-1)


def found(logits: Any, teacher: Any, **options: Any) -> Tensor:
    out = ll.logprobs(logits, TARGET, teacher=teacher, divergence="tv", stats=("teacher_top1",), **options)
    assert out.teacher_top1_id is not None
    return out.teacher_top1_id


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head", HEADS.values(), ids=list(HEADS))
def test_of_one_teacher_and_of_several(head: Head, backend: str):
    """Rows of two teachers are read with the sign of their own head; with softcaps, both must have the same."""
    hidden, weight, other, theirs = draw()
    turned = Head(scale=-head.scale, vocab_size=head.vocab_size) if head.softcap is None else head
    which = torch.arange(R) % 2
    wanted = best(other, theirs, head)
    for student in (ll.Logits(hidden, weight), hidden @ weight.T):
        for logits in (ll.Logits(other, theirs), other @ theirs.T):
            one, two = Teacher(logits, head), Teacher(logits, turned)
            assert torch.equal(found(student, one, backend=backend, memory=20000), wanted)
            both = found(student, Teacher.by_row([one, two], which), backend=backend, memory=20000)
            assert torch.equal(both, torch.where(which == 0, wanted, best(other, theirs, turned)))


def test_of_no_rows():
    hidden, weight, other, theirs = draw()
    none = torch.arange(0)
    for student in (ll.Logits(hidden, weight), hidden @ weight.T):
        teacher = Teacher.by_row([ll.Logits(other, theirs), other @ theirs.T], none)
        out = ll.logprobs(student, (none, none), teacher=teacher, divergence="tv", stats=("teacher_top1",))
        assert out.teacher_top1_id is not None
        assert out.teacher_top1_id.tolist() == []


def over_ranks(rank: int, world: int, cuts: tuple[int, ...]) -> list[Tensor]:
    start, stop = cuts[rank], cuts[rank + 1]
    shard = ll.VocabShard(start, stop, dist.group.WORLD)
    hidden, weight, other, theirs = draw()
    answers = []
    for head in HEADS.values():
        own = weight[start:stop]
        for student in (ll.Logits(hidden, own, shard=shard), ll.Logits.given(hidden @ own.T, shard=shard)):
            for logits in (ll.Logits(other, theirs[start:stop]), other @ theirs[start:stop].T):
                answers.append(found(student, Teacher(logits, head)))
    return answers


@pytest.mark.parametrize("cuts", [(0, 40, V), (0, 60, V), (0, 0, V)])
def test_over_ranks(ranks, cuts: tuple[int, ...]):
    """Ranks whose columns are all the teacher's, and ranks with padding, compare the same keys."""
    _, _, other, theirs = draw()
    wanted = [best(other, theirs, head) for head in HEADS.values() for _ in range(4)]
    for answers in ranks(over_ranks, 2, cuts):
        for ours, right in zip(answers, wanted, strict=True):
            assert torch.equal(ours, right)
