"""Rows without a gradient are left out of backward from hidden states: the same gradients, in fewer products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from close import assert_gradient_close_to_truth
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import logitless as ll
from logitless.passes import scoring

V, D = 331, 24
R = 1003
"""More than the columns: backward goes by blocks of 24 rows. With 257 it goes by slabs, in tiles of 64."""


def operands(dtype: torch.dtype, rows: int = R) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(rows, D, generator=draw), torch.randn(V, D, generator=draw)
    return hidden.to(dtype), weight.to(dtype), torch.randint(V, (rows,), generator=draw)


def masked(first: int, last: int, rows: int = R) -> Tensor:
    return ((torch.arange(rows) >= first) & (torch.arange(rows) < last)).double()


def backward(dtype: torch.dtype, mask: Tensor, entropy: bool = False, **more: Any) -> tuple[list[Tensor], int]:
    """Gradients of hidden states, weight and bias, and the operations of their products."""
    hidden, weight, target = operands(dtype, len(mask))
    leaves = [x.requires_grad_() for x in (hidden, weight, torch.linspace(-1, 1, V).to(dtype))]
    logits = ll.Logits(*leaves[:2], bias=leaves[2], **more)
    out = ll.logprobs(logits, target, entropy="grad" if entropy else None, memory="96KiB")
    loss = (out.logprob * mask.to(dtype)).sum()
    if entropy:
        loss = loss - 0.1 * (out.entropy * mask.to(dtype)).sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return [x.grad for x in leaves], counter.get_total_flops()


def plain(dtype: torch.dtype, mask: Tensor, entropy: bool) -> list[Tensor]:
    hidden, weight, target = (x.to(dtype) if x.is_floating_point() else x for x in operands(dtype))
    leaves = [x.requires_grad_() for x in (hidden, weight, torch.linspace(-1, 1, V).to(dtype))]
    log_p = torch.log_softmax(leaves[0] @ leaves[1].T + leaves[2], -1)
    loss = (log_p.gather(1, target[:, None])[:, 0] * mask.to(dtype)).sum()
    if entropy:
        loss = loss + 0.1 * ((log_p.exp() * log_p).sum(1) * mask.to(dtype)).sum()
    loss.backward()
    return [x.grad for x in leaves]


@pytest.mark.parametrize("entropy", [False, True], ids=["log-probs", "entropy"])
@pytest.mark.parametrize("bounds", [(100, 700), (0, 130), (800, R), (3, 4), (0, 0)], ids=str)
def test_gradients_and_products(bounds, entropy):
    mask = masked(*bounds)
    found, operations = backward(torch.float32, mask, entropy)
    exact, float32 = plain(torch.float64, mask, entropy), plain(torch.float32, mask, entropy)
    for name, mine, right, other in zip(("hidden", "weight", "bias"), found, exact, float32, strict=True):
        assert_gradient_close_to_truth(mine, right, other, name)
    assert not found[0][mask == 0].any()
    whole = 3 * 2 * R * V * D
    assert operations == pytest.approx(whole * (bounds[1] - bounds[0]) / R, abs=whole * 0.05)


@pytest.mark.parametrize("rows", [R, 257])
def test_nothing_else_changes(monkeypatch, rows):
    """To the bit on a CPU, where whole tiles are left out."""
    mask = masked(140, 180, rows)
    found, fewer = backward(torch.float32, mask)
    monkeypatch.setattr(scoring, "staying_rows", lambda *_: None)
    others, all_of_them = backward(torch.float32, mask)
    assert fewer < 0.7 * all_of_them
    assert torch.equal(found[0], others[0])
    for mine, other in zip(found[1:], others[1:], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_a_row_stays_for_any_gradient():
    hidden, weight, target = operands(torch.float64)
    out = ll.logprobs(ll.Logits(hidden.requires_grad_(), weight), target, entropy="grad", memory="96KiB")
    (out.logprob[:100].sum() + out.entropy[500:600].sum()).backward()
    some = hidden.grad.ne(0).any(1)
    assert some[:100].all()
    assert some[500:600].all()
    assert not some[100:500].any()


def test_a_gradient_that_is_not_a_number_stays():
    mask = masked(100, 200)
    mask[7] = float("nan")
    found, _ = backward(torch.float32, mask)
    assert found[0][7].isnan().all()
    assert not found[0][8].any() or found[0][8].isfinite().all()


def test_into_a_buffer_of_the_callers():
    mask, buffer = masked(0, 0), torch.ones(V, D)
    found, operations = backward(torch.float32, mask, weight_grad=buffer)
    assert found[1] is None or not found[1].any()
    assert buffer.eq(1).all()
    assert operations == 0


@pytest.mark.parametrize("entropy", [False, True], ids=["log-probs", "entropy"])
def test_a_bias_over_many_blocks_is_as_exact_as_torchs(entropy):
    """Sums of 42 blocks, one added to the other in float32, are three times as far off."""
    mask = masked(0, R)
    (*_, found), _ = backward(torch.float32, mask, entropy)
    exact, other = plain(torch.float64, mask, entropy)[2], plain(torch.float32, mask, entropy)[2]
    assert (found - exact).norm() <= 1.5 * (other - exact).norm()
