"""What is done to logits that are not computed before they are read is what is done to those that are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from torch import Tensor

import logitless as ll

B, S, D, V = 3, 6, 5, 19
HEAT = torch.linspace(0.5, 2.0, B * S, dtype=torch.float64).view(B, S, 1)
MASK = torch.arange(B * S).view(B, S) % 3 != 1
RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[:, 1:-1],
    "masked rows": lambda x: x[MASK],
    "a row of each sample": lambda x: x[torch.arange(B), torch.tensor([1, 0, -1]), :],
    "masked rows, columns": lambda x: x[MASK, 2:7],
    "without dimensions of one": lambda x: x[:1].unsqueeze(1).squeeze(),
    "without two dimensions of one": lambda x: x[:1, None].squeeze((0, 1)),
    "a type": lambda x: x.type(torch.float64),
    "where it is already": lambda x: x.cpu().to("cpu"),
    "columns": lambda x: x[..., : V - 4],
    "later columns": lambda x: x[..., 3:],
    "division": lambda x: x / 0.7,
    "multiplication": lambda x: 1.3 * x,
    "in place": lambda x: x.div_(0.7),
    "softcap": lambda x: 3 * torch.tanh(x / 3),
    "dimensions of one row": lambda x: x.view(1, B * S, 1, V),
    "a factor per row": lambda x: x / HEAT,
    "a factor per row, rows": lambda x: (x / HEAT)[:, 2:],
    "a factor per row, masked": lambda x: (x / HEAT)[MASK],
    "a factor per row, split": lambda x: (x * HEAT).split(2, 1)[1],
    "a factor per row, turned": lambda x: (x / HEAT).transpose(0, 1),
    "a factor per row, flat": lambda x: (x / HEAT).flatten(0, 1),
    "a tensor of one number": lambda x: x / torch.tensor(0.7, dtype=torch.float64),
    "a factor per sample": lambda x: x / HEAT[:, :1],
    "a factor per place": lambda x: x * HEAT[1],
    "a factor for all": lambda x: x * HEAT[0, 0],
    "end to end": lambda x: torch.cat([x[:1] / 2, x[1:]]),
    "end to end, a factor per row": lambda x: torch.cat([(x / HEAT)[1:], x[:1]]),
}


def leaves() -> list[Tensor]:
    drawn = torch.Generator().manual_seed(2)
    sizes = ((B, S, D), (V, D), (V,))
    return [torch.randn(n, generator=drawn, dtype=torch.float64).requires_grad_() for n in sizes]


def deferred(hidden: Tensor, weight: Tensor, bias: Tensor) -> ll.Logits:
    """``strict``: whatever would compute them raises."""
    return ll.Logits(hidden, weight, bias=bias, strict=True)


def computed(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return hidden @ weight.T + bias


def check(ours: Tensor, mine: list[Tensor], truth: Tensor, theirs: list[Tensor]) -> None:
    """Values and gradients of the operands."""
    assert_close_to_truth(ours, truth, truth)
    steps = torch.linspace(-1, 2, truth.numel(), dtype=torch.float64).view(truth.shape)
    found = torch.autograd.grad(ours, mine, steps, allow_unused=True)
    for x, right in zip(found, torch.autograd.grad(truth, theirs, steps), strict=True):
        assert_gradient_close_to_truth(x, right, right)


@pytest.mark.parametrize("name", RULES)
def test_rules(name: str):
    mine, theirs = leaves(), leaves()
    logits, whole = RULES[name](deferred(*mine)), RULES[name](computed(*theirs))
    assert isinstance(logits, ll.Logits)
    assert logits.shape == whole.shape
    target = torch.arange(whole[..., 0].numel()).view(whole.shape[:-1]) * 7 % whole.shape[-1]
    truth = whole.log_softmax(-1).gather(-1, target[..., None])[..., 0]
    check(ll.logprobs(logits, target).logprob, mine, truth, theirs)


def test_chosen_rows_have_their_own_factor():
    mine, theirs, index = leaves(), leaves(), torch.tensor([16, 0, 3, 11, 7])
    target = torch.tensor([1, 18, 4, 0, 9])
    flat = (computed(*theirs) / HEAT).flatten(0, 1)
    truth = flat[index].log_softmax(-1).gather(-1, target[:, None])[:, 0]
    check(ll.logprobs(deferred(*mine) / HEAT, (index, target)).logprob, mine, truth, theirs)


def test_a_head_of_the_call_comes_after_the_factor():
    mine, theirs, target = leaves(), leaves(), torch.arange(B * S).view(B, S) % V
    whole = 2 * torch.tanh(computed(*theirs) / 0.8 / 2) / 1.5
    truth = whole.log_softmax(-1).gather(-1, target[..., None])[..., 0]
    head = ll.Head(softcap=2.0, temperature=1.5)
    check(ll.logprobs(deferred(*mine) / 0.8, target, head=head).logprob, mine, truth, theirs)


def test_a_teacher_keeps_its_factor():
    (hidden, weight, _), index, target = leaves(), torch.tensor([16, 0, 3, 11]), torch.tensor([1, 18, 4, 0])
    mine, theirs = leaves(), leaves()
    other = ((hidden.flip(0) @ weight.T).detach() / HEAT).log_softmax(-1)
    truth = (other.exp() * (other - computed(*theirs).log_softmax(-1))).sum(-1).flatten()[index]
    teacher = ll.Logits(hidden.flip(0).detach(), weight.detach()) / HEAT
    out = ll.logprobs(deferred(*mine), (index, target), teacher=teacher, divergence="forward_kl")
    assert out.divergence is not None
    check(out.divergence, mine, truth, theirs)


@pytest.mark.parametrize("factor", [1.0, HEAT], ids=["plain", "a factor per row"])
def test_the_sum_of_all(factor: Any):
    mine, theirs = leaves(), leaves()
    check((deferred(*mine) * factor).sum(), mine, (computed(*theirs) * factor).sum(), theirs)


def test_detached_logits_have_no_graph():
    logits = deferred(*leaves()).detach()
    assert not logits.requires_grad
    assert not ll.logprobs(logits, torch.zeros(B, S, dtype=torch.int64)).logprob.requires_grad


@pytest.mark.parametrize("place", range(3), ids=["hidden", "weight", "bias"])
def test_operands_that_change_before_they_are_read(place: int):
    operands = [x.detach() for x in leaves()]
    logits = deferred(*operands)
    operands[place].add_(1)
    with pytest.raises(ll.LogitlessError, match="was changed in place after the logits were made"):
        ll.logprobs(logits, torch.zeros(B, S, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(), (1,), (S, 1), (1, 1, 1), (B, 1, 1), (1, S, 1), (B, S, 1)], ids=str)
@pytest.mark.parametrize("way", ["x / f", "x * f", "f * x"])
def test_factors_of_rows_compute_nothing(way: str, shape: tuple[int, ...]):
    """Every shape that torch spreads over the rows: the logits stay what they stand for."""
    factor = torch.linspace(0.5, 2.0, max(1, math.prod(shape)), dtype=torch.float64).view(shape)
    operation = {"x / f": lambda x: x / factor, "x * f": lambda x: x * factor, "f * x": lambda x: factor * x}[way]
    mine = operation(deferred(*leaves()))
    assert isinstance(mine, ll.Logits)
    torch.testing.assert_close(mine.logsumexp(-1), operation(computed(*leaves())).logsumexp(-1), rtol=1e-9, atol=1e-9)


def test_columns_of_an_adapters_logits():
    hidden, weight, _ = leaves()
    a, b = (torch.randn(*n, dtype=torch.float64).requires_grad_() for n in ((2, D), (V, 2)))
    given = [hidden, weight, a, b]
    logits = ll.Logits(hidden, ll.LoRA(weight, a, b, scale=0.7), strict=True)
    mine, right = (x[:, 1:, 2 : V - 3].logsumexp(-1) for x in (logits, hidden @ (weight + 0.7 * b @ a).T))
    torch.testing.assert_close(mine, right)
    pair = (torch.autograd.grad(x.square().sum(), given) for x in (mine, right))
    for gradient, wanted in zip(*pair, strict=True):
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize(
    "copied",
    [
        lambda x: x.to(x.dtype, False, True),
        lambda x: x.to(x.device, x.dtype, False, True),
        lambda x: x.to(x, False, True),
        lambda x: x.to(x.dtype, True, copy=True),
    ],
)
def test_a_copy_that_is_asked_for_by_its_place_is_changed_alone(copied: Callable[[Any], Any]):
    logits = ll.Logits(torch.randn(3, 4), torch.randn(7, 4))
    before = logits.computed()
    copy = copied(logits)
    copy /= 2
    torch.testing.assert_close(logits.computed(), before)
    torch.testing.assert_close(copy.computed(), before / 2)
