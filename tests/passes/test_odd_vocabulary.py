"""Vocabularies whose rows do not begin at multiples of 16 bytes: padded working memory, and products in two parts."""

from __future__ import annotations

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth

import logitless as ll
from logitless.machine import PIECE, row_stride
from logitless.sources import gemm
from logitless.sources.linear import rows_in


@pytest.mark.parametrize("columns", [1, 7, 8, 9, 50257])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_rows_begin_at_multiples_of_a_piece(columns: int, dtype: torch.dtype):
    width = row_stride(columns, dtype.itemsize)
    assert columns <= width < columns + PIECE
    assert width * dtype.itemsize % PIECE == 0
    rows = rows_in(torch.arange(3 * width, dtype=dtype), 3, columns)
    assert rows.shape == (3, columns)
    assert rows.stride() == (width, 1)
    assert rows[2].data_ptr() % PIECE == 0


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "depth", "columns"), [(6, 13, 24), (6, 16, 21), (5, 9, 11), (4, 3, 5), (3, 8, 1)])
def test_products_in_two_parts(rows: int, depth: int, columns: int, out_dtype: torch.dtype, add: bool, monkeypatch):
    """Every part is multiplied once, and no part has an extent beyond whole pieces unless it is shorter than one."""
    generator, seen = torch.Generator().manual_seed(0), []

    def wide(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        seen.append((a.shape[1], b.shape[1]))
        product = a.float() @ b.float()
        out.add_(product) if add else out.copy_(product)

    monkeypatch.setattr(gemm, "_multiply_wide", wide)
    a, b = (torch.randn(shape, generator=generator).bfloat16() for shape in ((rows, depth), (depth, columns)))
    before = torch.randn(rows, columns, generator=generator).to(out_dtype)
    out = before.clone()
    gemm.multiply(a, b, out, wide=True, add=add)
    truth = a.double() @ b.double() + (before.double() if add else 0.0)
    torch.testing.assert_close(out.double(), truth, rtol=2**-8 if out_dtype == torch.bfloat16 else 1e-6, atol=1e-5)
    assert all(extent % 8 == 0 or extent < 8 for shape in seen for extent in shape)


@pytest.mark.parametrize("backend", ["tiled", "triton"])
@pytest.mark.parametrize("memory", ["16KiB", "64KiB", None])
@pytest.mark.parametrize("vocab", [317, 331])
def test_losses_over_an_odd_vocabulary(vocab: int, memory: str | None, backend: str, device):
    """In chunks of logits or exponentials, each row of which has room for more columns than it has."""
    generator = torch.Generator().manual_seed(vocab)
    hidden = torch.randn(70, 24, generator=generator).bfloat16().to(device)
    weight = (torch.randn(vocab, 24, generator=generator) / 3).bfloat16().to(device)
    target = torch.randint(vocab, (70,), generator=generator).to(device)
    advantage = torch.randn(70, generator=generator).to(device)
    objective = ll.Objective(policy="reinforce", entropy_coef=0.1)

    def gradients(x: torch.Tensor, w: torch.Tensor, logits, **how) -> list[torch.Tensor]:
        loss, _ = ll.policy_loss(logits, target, objective, advantage=advantage.to(x.dtype), **how)
        return [loss.detach(), *torch.autograd.grad(loss, (x, w))]

    x, w = (y.double().requires_grad_() for y in (hidden, weight))
    truth = gradients(x, w, x @ w.T, backend="reference")
    x, w = (y.clone().requires_grad_() for y in (hidden, weight))
    plain = gradients(x, w, x @ w.T)
    x, w = (y.clone().requires_grad_() for y in (hidden, weight))
    found = gradients(x, w, ll.Logits(x, w), memory=memory, backend=backend)
    assert_close_to_truth(found[0], truth[0], plain[0])
    for ours, wanted, other in zip(found[1:], truth[1:], plain[1:], strict=True):
        assert_gradient_close_to_truth(ours, wanted, other)
