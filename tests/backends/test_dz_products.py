"""The two products that dZ ends in, against float64: of odd sizes, in parts, added up, and in a whole loss."""

from __future__ import annotations

import pytest
import torch
from close import assert_gradient_close_to_truth
from torch import Tensor

import logitless as ll
from logitless.backends.triton import dz_products, products
from logitless.backends.triton.dz_products import row_parts
from logitless.machine import row_stride
from logitless.route import loss

# NumPy, which runs the kernels in Triton's interpreter, reports the maximum of rows that are NaN and left out.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")

ROWS, VOCAB, WIDTH = 150, 301, 264
"""Two blocks of rows, three of columns, two of the width; the last of each goes over the edge."""


def tensors(device, dtype) -> tuple[Tensor, Tensor, Tensor]:
    """dZ whose rows begin at multiples of 16 bytes, with NaN between them, hidden states and a weight."""
    room = torch.full((ROWS, row_stride(VOCAB, 2)), torch.nan, device=device, dtype=dtype)
    d_z = room[:, :VOCAB]
    d_z.copy_(torch.randn(ROWS, VOCAB, device=device))
    hidden, weight = (torch.randn(n, WIDTH, device=device).to(dtype) for n in (ROWS, VOCAB))
    return d_z, hidden, weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cut", [(ROWS, 1), (128, 2), (0, 3), (0, 6)], ids=str)
def test_times_weight(device, dtype, cut, monkeypatch):
    d_z, _, weight = tensors(device, dtype)
    out = torch.full((ROWS, WIDTH), torch.nan, device=device, dtype=dtype)
    monkeypatch.setattr(dz_products, "row_parts", lambda *_: cut)
    products.times_weight(d_z, weight, out, 3)
    plain = (d_z.float() @ weight.float()).to(dtype)
    assert_gradient_close_to_truth(out, d_z.double() @ weight.double(), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("add", [False, True])
def test_add_outer(device, dtype, add):
    d_z, hidden, _ = tensors(device, dtype)
    before = torch.randn(VOCAB, WIDTH, device=device)
    out = before.clone() if add else torch.full_like(before, torch.nan)
    products.add_outer(d_z, hidden, out, add, 3)
    truth, plain = d_z.double().T @ hidden.double(), d_z.float().T @ hidden.float()
    if add:
        truth, plain = truth + before, plain + before
    assert_gradient_close_to_truth(out, truth, plain)


def test_a_loss_is_multiplied_by_them(device, monkeypatch):
    """In several chunks, with rows that are left out whose hidden states are no numbers."""
    count, vocab, width = 40, 301, 24
    hidden, weight = (torch.randn(n, width, device=device).bfloat16().requires_grad_() for n in (count, vocab))
    target = torch.randint(vocab, (count,), device=device)
    target[7] = -100
    hidden.data[7] = torch.nan
    fields = {"old_logprob": torch.full((count,), -5.0, device=device), "advantage": torch.randn(count, device=device)}
    made = []

    def gradients(large: int) -> tuple[Tensor, Tensor]:
        hidden.grad = weight.grad = None
        with monkeypatch.context() as patch:
            patch.setattr(dz_products, "LARGE", large)
            # One pass in several chunks, whatever that costs.
            patch.setattr(loss, "WORTHWHILE", 0.0)
            for name in ("times_weight", "add_outer"):
                own = getattr(products, name)
                patch.setattr(products, name, lambda *args, own=own, name=name: made.append(name) or own(*args))
            objective = ll.Objective(entropy_coef=0.01)
            given = {"memory": "20KiB", "backend": "triton", **fields}
            ll.policy_loss(ll.Logits(hidden, weight), target, objective, **given)[0].backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        return hidden.grad, weight.grad

    library = gradients(1 << 60)
    assert not made
    own = gradients(0)
    assert made.count("times_weight") == made.count("add_outer") > 1
    for name, ours, theirs in zip(("hidden", "weight"), own, library, strict=True):
        # Both are of the same dZ, summed in another order and rounded once.
        assert_gradient_close_to_truth(ours, theirs.double(), theirs, name)


def test_few_rows_fill_the_card_in_parts():
    """Where tiles leave most programs idle, the time of all parts is less; and sums of parts take bounded memory."""
    for rows, width in ((3328, 1024), (3328, 2048), (2432, 2880), (512, 4096), (3328, 8192), (100, 64)):
        whole, parts = row_parts(rows, width, 132)
        across, blocks = -(-width // 256), -(-rows // 128)
        rest = -(-(rows - whole) // 128) * across * parts
        waves = -(-whole // 128 * across // 132) + -(-rest // 132) / parts
        assert waves <= -(-blocks * across // 132)
        assert waves < 1.1 * max(blocks * across / 132, 1 / 6)
        assert rest <= 4 * 132


def test_the_library_multiplies_where_it_is_faster(device, monkeypatch):
    """Rows whose tiles fill the programs and an even vocabulary; and whatever is small."""
    monkeypatch.setattr(dz_products, "LARGE", 0)

    def pays(rows: int, vocab: int, width: int) -> tuple[bool, bool]:
        room = torch.zeros(rows, row_stride(vocab, 2), device=device, dtype=torch.bfloat16)[:, :vocab]
        hidden, weight = (torch.zeros(n, width, device=device, dtype=torch.bfloat16) for n in (rows, vocab))
        own = products.rows_pay(room, weight, hidden, 2), products.columns_pay(room, hidden, weight.float())
        with monkeypatch.context() as patch:
            patch.setattr(dz_products, "LARGE", 1 << 40)
            assert not products.rows_pay(room, weight, hidden, 2)
            assert not products.columns_pay(room, hidden, weight.float())
        return own

    assert pays(256, 64, 256) == (False, False)
    assert pays(384, 64, 256) == (True, False)
    assert pays(256, 65, 256) == (True, True)
