"""What a teacher's own head does to its logits: rounding, and a softcap that its model has applied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from shared.divergence import textbook
from torch import Tensor

import logitless as ll
from logitless.operands import Teacher, TopK

R, V, D, W = 7, 41, 5, 6
KINDS = ("forward_kl", "reverse_kl", "jsd", "tv")
ROUNDINGS = [(None, "bfloat16"), ("bfloat16", None), ("float16", "bfloat16"), (None, "float16")]


def operands() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    sizes = ((R, D), (V, D), (V,), (R, W), (V, W), (V,))
    return tuple(torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)


def rounded(x: Tensor, dtype: str | None) -> Tensor:
    """With the gradient of what was not rounded."""
    return x if dtype is None else x + (x.detach().to(getattr(torch, dtype)).to(x) - x.detach())


@pytest.mark.parametrize("memory", ["2KiB", "1MiB"])
@pytest.mark.parametrize("verb", ["logprobs", "policy_loss"])
@pytest.mark.parametrize("roundings", ROUNDINGS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_each_model_is_rounded_as_its_own_head_rounds(kind: Any, roundings: Any, verb: str, memory: str):
    """The teacher was not rounded at all: log-probs of a bfloat16 head are off by 1e-2."""
    hidden, weight, bias, other, head, shift = operands()
    hidden.requires_grad_()
    weight.requires_grad_()
    z = rounded(hidden @ weight.T + bias, roundings[0])
    wanted = textbook(z, rounded(other @ head.T + shift, roundings[1]), kind)
    gradients = torch.autograd.grad(wanted.mean(), (hidden, weight))

    student = ll.Logits(hidden, weight, bias=bias, match=roundings[0])
    teacher = ll.Logits(other, head, bias=shift, match=roundings[1])
    target = torch.arange(R)
    if verb == "logprobs":
        found = ll.logprobs(student, target, teacher=teacher, divergence=kind, memory=memory).divergence
    else:
        objective = ll.Objective.recipe("distill", divergence=kind)
        found = ll.policy_loss(student, target, objective, teacher=teacher, memory=memory)[0] * torch.ones(1)
        wanted = wanted.mean()[None]
    assert found is not None
    assert_close_to_truth(found, wanted, wanted)
    for mine, right in zip(torch.autograd.grad(found.mean(), (hidden, weight)), gradients, strict=True):
        assert_gradient_close_to_truth(mine, right, right)


def test_float64_operands_are_not_cut_to_float32():
    """Their logits may be rounded to 16 bits; the products are not."""
    hidden = torch.tensor([[2.0**24 + 1, 2.0**24]], dtype=torch.float64)
    weight = torch.tensor([[1.0, -1.0], [0.0, 0.0]], dtype=torch.float64)
    found = ll.logprobs(ll.Logits(hidden, weight, match="bfloat16"), torch.tensor([0])).logprob
    wanted = torch.tensor([1.0, 0.0], dtype=torch.float64).log_softmax(0)[:1]
    assert_close_to_truth(found, wanted, wanted)


@pytest.mark.parametrize("head", [None, ll.Head(temperature=0.7), ll.Head(scale=2.0)], ids=str)
def test_a_softcap_that_the_model_has_applied(head: ll.Head | None):
    """Of a deferred Gemma, whose own code takes the tanh."""
    hidden, weight, _, other, rows, shift = operands()
    y = 3 * torch.tanh((other @ rows.T + shift) / 3)
    capped = 3 * torch.tanh(ll.Logits(other, rows, bias=shift, strict=True) / 3)
    assert isinstance(capped, ll.Logits)
    shaped = y * (1.0 if head is None else head.scale / float(head.temperature))
    wanted = textbook(hidden @ weight.T, shaped, "reverse_kl")
    found = ll.logprobs(
        ll.Logits(hidden, weight), torch.arange(R), teacher=Teacher(capped, head=head), divergence="reverse_kl"
    )
    assert found.divergence is not None
    assert_close_to_truth(found.divergence, wanted, wanted)
    own = shaped.log_softmax(-1).gather(1, torch.arange(R)[:, None])[:, 0]
    assert found.teacher_logprob is not None
    assert_close_to_truth(found.teacher_logprob, own, own)


@pytest.mark.parametrize(
    ("change", "head"),
    [
        (lambda x: x, ll.Head(softcap=5.0)),
        (lambda x: x / torch.full((R, 1), 2.0), None),
        (lambda x: x * -2.0, None),
        (lambda x: x, ll.Head(scale=-1.0)),
    ],
    ids=["another softcap", "one factor per row", "negative", "a negative scale"],
)
def test_what_one_softcap_does_not_say_is_refused(change: Any, head: ll.Head | None):
    _, _, _, other, rows, _ = operands()
    capped = change(torch.tanh(ll.Logits(other, rows)))
    with pytest.raises(ll.LogitlessError, match=r"Teacher: its Logits went through tanh.*another softcap"):
        Teacher(capped, head=head)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"match": "bfloat12"}, "match must be None"),
        ({"precision": "half"}, "precision must be"),
        ({"tf32": True, "precision": "bfloat16x3"}, "tf32=True asks for"),
        ({"tf32": 1}, "tf32 must be True or False"),
        ({"bits": "exact"}, "bits must be one of fast, canonical"),
        ({"bits": "canonical"}, "have bits='canonical' and the student bits='fast'"),
        ({"sequence_parallel": True}, "have sequence_parallel=True and the student has not"),
        ({"shard": ll.VocabShard(0, 5)}, "have a shard of 5 columns but a weight of 41"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kept", [False, True])
def test_options_of_a_teachers_head_that_nobody_would_follow(options: dict[str, Any], text: str, kept: bool):
    """They were left out of the call, but for a wrong rounding, whose error named no argument."""
    hidden, weight, _, other, head, _ = operands()
    teacher, support = ll.Logits(other, head, **options), ll.Kept(torch.arange(R), torch.ones(R, dtype=torch.int64))
    with pytest.raises(ll.LogitlessError, match=rf"logprobs: the teacher's Logits:? {text}"):
        ll.logprobs(
            ll.Logits(hidden, weight), torch.arange(R), teacher=Teacher(teacher), kept=support if kept else None
        )


def test_a_tail_beside_kept_ids():
    """It was left out: over kept ids there is no outcome for others."""
    hidden, weight, _, other, head, _ = operands()
    ids = torch.arange(V) - 2
    support = ll.Kept(torch.arange(R), torch.ones(R, dtype=torch.int64))
    teacher = Teacher(ll.Logits(other, head), ids=ids, tail="bucket")
    with pytest.raises(ll.LogitlessError, match=r'logprobs: kept= does not work with tail="bucket"'):
        ll.logprobs(ll.Logits(hidden, weight), torch.arange(R), teacher=teacher, kept=support, divergence="jsd")


@pytest.mark.parametrize(
    "options",
    [
        {"logits": torch.zeros(R, V)},
        {"head": ll.Head(temperature=0.7)},
        {"ids": torch.arange(V)},
        {"at": torch.arange(R)},
        {"tail": "bucket"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_does_not_go_with_log_probs_that_were_sent(options: dict[str, Any]):
    """It was left out."""
    sent = TopK(torch.zeros(R, 1), torch.arange(R)[:, None])
    with pytest.raises(ll.LogitlessError, match=rf"Teacher: {next(iter(options))}( does not go with|.*is that of)"):
        Teacher(**{"logits": None, **options}, top_k=sent)


def summed_or_refused(student: Any, **asked: Any) -> str | float:
    """The sum of the divergences, or the error."""
    try:
        out = ll.logprobs(student, torch.arange(R), **asked).divergence
    except ll.LogitlessError as error:
        return str(error)
    assert out is not None
    return float(out.sum())


def cut_elsewhere(rank: int, world: int) -> list[str | float]:
    """Errors, or results, of teachers with as many columns as the shard of another vocabulary has, or all of them."""
    hidden, weight, _, other, head, _ = operands()
    even = ll.VocabShard.even(40, torch.distributed.group.WORLD)
    small = ll.VocabShard.even(20, torch.distributed.group.WORLD)
    shorter = ll.VocabShard(20 * rank, 20 + 10 * rank, torch.distributed.group.WORLD)
    own, whole = ll.Logits(hidden, weight[even.start : even.stop], shard=even), ll.Logits(hidden, weight[:40])
    calls = [
        (own, ll.Logits(other, head[small.start : small.stop], shard=small)),
        (whole, ll.Logits(other, head[even.start : even.stop], shard=even)),
        (own, ll.Logits(other, head[:40])),
        (own, ll.Logits(other, head[shorter.start : shorter.stop], shard=shorter)),
    ]
    return [summed_or_refused(student, teacher=Teacher(teacher), divergence="forward_kl") for student, teacher in calls]


def test_a_teacher_that_is_cut_at_other_ids_than_its_student(ranks):
    """Its columns were taken for those of the student's shard, so that rank 1 compared ids that are not the same."""
    hidden, weight, _, other, head, _ = operands()
    wanted = ll.logprobs(hidden @ weight[:40].T, torch.arange(R), teacher=other @ head[:30].T, divergence="forward_kl")
    assert wanted.divergence is not None
    for elsewhere, without, whole, shorter in ranks(cut_elsewhere, 2):
        assert "the teacher's Logits have columns 10 to 20 where the student has 20 to 40" in elsewhere
        assert "the teacher's Logits have a shard and the student has none" in without
        assert "the teacher has 40 columns here and the student 20" in whole
        assert shorter == pytest.approx(float(wanted.divergence.sum()), rel=1e-12)


def padding_on_one_rank(rank: int, world: int) -> list[str | float]:
    """The student's vocabulary ends within the last rank's columns, and its teacher's later, or earlier, or with it."""
    hidden, weight, _, other, head, _ = operands()
    shard = ll.VocabShard.even(40, torch.distributed.group.WORLD)
    shorter = ll.VocabShard(20 * rank, 20 + 10 * rank, torch.distributed.group.WORLD)
    student = ll.Logits(hidden, weight[shard.start : shard.stop], shard=shard)
    teachers = [
        Teacher(ll.Logits(other, head[shard.start : shard.stop], shard=shard)),
        Teacher(other @ head[shard.start : shard.stop].T),
        Teacher(ll.Logits(other, head[shard.start : shard.stop], shard=shard), head=ll.Head(vocab_size=38)),
        Teacher(ll.Logits(other, head[shorter.start : shorter.stop], shard=shorter)),
    ]
    asked = {"divergence": "jsd", "head": ll.Head(vocab_size=38)}
    return [summed_or_refused(student, teacher=teacher, **asked) for teacher in teachers]


def test_a_teacher_with_more_ids_on_one_rank_is_refused_on_all(ranks):
    """The other ranks went on, and waited for it."""
    hidden, weight, _, other, head, _ = operands()
    student = (hidden @ weight.T)[:, :38]
    for found in ranks(padding_on_one_rank, 2):
        for text in found[:2]:
            assert "the teacher has 40 ids and the student 38. If the rest is padding, give the teacher" in str(text)
        for value, columns in zip(found[2:], (38, 30), strict=True):
            beyond = torch.full((R, 38 - columns), -torch.inf, dtype=torch.float64)
            teacher = torch.cat([(other @ head.T)[:, :columns], beyond], 1)
            mixed = ((student.softmax(-1) + teacher.softmax(-1)) / 2).log()
            both = [p.softmax(-1) * (p.log_softmax(-1).clamp_min(-1e9) - mixed) for p in (student, teacher)]
            assert abs(value - float(sum(x.sum() for x in both)) / 2) < 1e-9
