"""What a teacher's own head does to its logits: rounding, and a softcap that its model has applied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from shared.divergence import textbook
from torch import Tensor

import logitless as ll
from logitless.operands import Teacher

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
