"""Gradients that are made with the log-probs: those of the loss that comes, whether it is the expected one or not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from logitless import Head, Logits, Objective, Rows
from logitless.adapters.expected import Expectations, Expected, score_expecting


def made(dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 7, dtype=dtype).requires_grad_(), torch.randn(31, 7, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(31, (9,)), torch.randn(9)


@pytest.mark.parametrize("factor", [1.0, -0.3, 0.0])
def test_a_multiple_of_what_was_expected(factor):
    hidden, weight, target, advantage = made()
    counts = Expectations()
    expected = Expected(Objective(), {"advantage": advantage, "old_logprob": "current"})
    asked = {"head": Head(temperature=0.7)}
    out = score_expecting(Logits(hidden, weight), Rows.every(target), expected, counts, **asked)
    assert out.entropy is not None
    (-factor * (advantage * out.logprob).sum()).backward()
    assert counts.lines() == ["losses in the pass of their log-probs: 1 of 1"]
    wide, head = (x.detach().double().requires_grad_() for x in (hidden, weight))
    log_p = (wide @ head.T / 0.7).log_softmax(-1)
    torch.testing.assert_close(out.entropy.double(), -(log_p.exp() * log_p).sum(-1).detach(), rtol=1e-5, atol=1e-5)
    (-factor * (advantage * log_p.gather(1, target[:, None])[:, 0]).sum()).backward()
    torch.testing.assert_close(hidden.grad.double(), wide.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), head.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("what", ["another loss", "one row", "entropy", "both", "NaN"])
def test_anything_else_is_made_again(what):
    hidden, weight, target, advantage = made()
    counts = Expectations()
    expected = Expected(Objective(), {"advantage": advantage, "old_logprob": "current"})
    out = score_expecting(Logits(hidden, weight), Rows.every(target), expected, counts, head=Head())
    off = advantage.clone()
    off[3] += {"one row": 1e-3, "NaN": math.nan}.get(what, 0.0)
    losses = {"another loss": lambda p, h: (p * p).sum(), "entropy": lambda p, h: h.sum()}
    losses |= {"both": lambda p, h: -(advantage * p).sum() - 0.1 * h.sum()}
    loss = losses.get(what, lambda p, h: -(off * p).sum())
    loss(out.logprob, out.entropy).backward()
    assert (counts.met, counts.missed) == (0, 1)
    wide, head = (x.detach().double().requires_grad_() for x in (hidden, weight))
    log_p = (wide @ head.T).log_softmax(-1)
    loss(log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)).backward()
    torch.testing.assert_close(hidden.grad.double(), wide.grad, rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(weight.grad.double(), head.grad, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_a_frozen_head_and_a_second_backward():
    hidden, weight, target, advantage = made()
    expected = Expected(Objective(), {"advantage": advantage, "old_logprob": "current"})
    counts = Expectations()
    out = score_expecting(Logits(hidden, weight.detach()), Rows.every(target), expected, counts, head=Head())
    loss = -(advantage * out.logprob).sum()
    (one,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (two,) = torch.autograd.grad(3 * loss, hidden)
    torch.testing.assert_close(two, 3 * one)
    assert counts.met == 2


@pytest.mark.parametrize("met", [True, False])
def test_a_buffer_gets_the_gradient_in_backward(met):
    """As Megatron's ``main_grad``: once, in float32, and times the factor that the loss turns out to have."""
    hidden, weight, target, advantage = made(torch.bfloat16)
    buffer = torch.full(weight.shape, 2.0)
    expected = Expected(Objective(), {"advantage": advantage, "old_logprob": "current"})
    counts, logits = Expectations(), Logits(hidden, weight, weight_grad=buffer) / 0.7
    out = score_expecting(logits, Rows.every(target), expected, counts, head=Head())
    assert bool((buffer == 2.0).all())
    off = advantage if met else advantage.abs()
    (-3 * (off * out.logprob).sum()).backward()
    assert (counts.met, counts.missed) == (met, not met)
    assert weight.grad is None or not weight.grad.any()
    wide, head = (x.detach().double().requires_grad_() for x in (hidden, weight))
    log_p = (wide @ head.T / 0.7).log_softmax(-1)
    (-3 * (off * log_p.gather(1, target[:, None])[:, 0]).sum()).backward()
    torch.testing.assert_close(buffer.double() - 2.0, head.grad, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(hidden.grad.double(), wide.grad, rtol=1e-2, atol=5e-2)
