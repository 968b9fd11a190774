"""``logprobs`` against float64: values and gradients, every backend, dtype and option, odd sizes, random upstream."""

from __future__ import annotations

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from shared.logprobs import BACKENDS, check, draw_rows, make_logits
from torch import Tensor
from truth import float64_leaf, plain, truth

import logitless as ll

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 63, 507, 1000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_sizes(backend: str, vocab: int, dtype: torch.dtype, device: torch.device):
    if backend == "triton" and dtype == torch.float64:
        logits, target = torch.zeros(1, vocab, dtype=dtype, device=device), torch.zeros(1, dtype=int, device=device)
        with pytest.raises(ll.LogitlessError, match=r"its kernels take .* not torch.float64"):
            ll.logprobs(logits, target, backend=backend)
        return
    check(make_logits(11, vocab, dtype), *draw_rows(11, 7, vocab), backend=backend, device=device)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_real_vocabulary(backend: str, dtype: torch.dtype, device: torch.device):
    check(make_logits(5, 32001, dtype, "zipf"), *draw_rows(5, 4, 32001), backend=backend, device=device)


@pytest.mark.parametrize("kind", ["offset", "peaked", "zipf"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_hard_logits(backend: str, kind: str, device: torch.device):
    check(make_logits(24, 507, torch.float32, kind), *draw_rows(24, 19, 507), backend=backend, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_target_element_of_confident_rows(backend: str, dtype: torch.dtype, device: torch.device):
    """1 - p(target) at p = 1 - 1e-6 is formed before rounding: relative error of that one element, not of the norm."""
    logits = make_logits(8, 507, torch.float64, "peaked").to(dtype)
    index, target = torch.arange(8), torch.zeros(8, dtype=torch.int64)
    leaf, usual, exact = (
        logits.to(device).clone().requires_grad_(),
        logits.clone().requires_grad_(),
        float64_leaf(logits),
    )
    ll.logprobs(leaf, (index.to(device), target.to(device)), backend=backend).logprob.sum().backward()
    plain(usual, index, target).logprob.sum().backward()
    truth(exact, index, target).logprob.sum().backward()
    mine, theirs, right = (x.grad[:, 0].double().cpu() for x in (leaf, usual, exact))
    if dtype == torch.bfloat16:
        # Half a unit in the last place.
        assert ((mine - right).abs() <= 2.0**-8 * right + 2.4e-7).all()
    else:
        # 1 - p is a difference of numbers near 1, so float32 gives it no better than a few roundings of 1.
        assert ((mine - right).abs() <= 2 * (theirs - right).abs().max() + 2.4e-7).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_each_row_where_terms_differ_in_size(backend: str, device: torch.device):
    """Unlikely targets, a small gradient of the log-prob and a large one of the entropy: row by row, not by norm."""
    logits = make_logits(16, 5000, torch.float32) * 0.5
    index, target = torch.arange(16), logits.argmin(-1)
    g_logprob, g_entropy = torch.randn(16, dtype=torch.float64) * 0.02, torch.randn(16, dtype=torch.float64)
    leaf, usual = logits.to(device).clone().requires_grad_(), logits.to(device).clone().requires_grad_()
    exact = float64_leaf(logits)
    ours = ll.logprobs(leaf, (index.to(device), target.to(device)), entropy="grad", backend=backend)
    for results in (ours, plain(usual, index, target), truth(exact, index, target)):
        torch.autograd.backward(results[:2], [g.to(results[0]) for g in (g_logprob, g_entropy)])
    norms = exact.grad.norm(dim=1)
    mine, theirs = (((x.grad.double().cpu() - exact.grad).norm(dim=1) / norms).max() for x in (leaf, usual))
    assert mine <= 2 * theirs + 5e-7


@pytest.mark.parametrize(
    "head",
    [
        {"temperature": 0.7},
        {"temperature": torch.tensor([0.3, 1.0, 2.5, 0.7, 1.3, 0.9, 40.0]).repeat(3)},
        {"scale": 0.0625},
        {"scale": -1.5, "temperature": 0.8},
        {"softcap": 3.0},
        {"softcap": 30.0, "scale": 2.0, "temperature": 0.6},
        {"vocab_size": 501},
        {"vocab_size": 1},
        {"vocab_size": 300, "softcap": 5.0, "temperature": torch.linspace(0.5, 2, 21), "scale": 0.5},
    ],
    ids=lambda head: "-".join(head),
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_head(backend: str, head: dict, device: torch.device):
    logits = make_logits(25, 507, torch.float32)
    index, target = draw_rows(25, 21, head.get("vocab_size", 507))
    check(logits, index, target, backend=backend, device=device, **head)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_columns_are_never_read(backend: str, device: torch.device):
    logits = make_logits(4, 507, torch.float32).to(device)
    logits[:, 500:] = torch.nan
    logits.requires_grad_()
    out = ll.logprobs(
        logits, torch.tensor([0, 3, 499, 77], device=device), head=ll.Head(vocab_size=500), backend=backend
    )
    out.logprob.sum().backward()
    assert out.logprob.isfinite().all()
    assert (logits.grad[:, 500:] == 0).all()
    assert logits.grad[:, :500].isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_gradcheck_in_float64(backend: str):
    target = torch.tensor([3, -100, 0, 6])
    head = ll.Head(temperature=torch.tensor([0.7, 1.0, 2.0, 1.1], dtype=torch.float64), softcap=4.0, vocab_size=7)
    kept = ll.Kept(torch.tensor([1, 2, 3, 0, 5, 5]), torch.tensor([3, 0, 2, 1]))

    def outputs(x: Tensor, with_kept: bool) -> tuple[Tensor, ...]:
        chosen = kept if with_kept else None
        return ll.logprobs(x, target, entropy="grad", head=head, kept=chosen, backend=backend, memory=100)[:3]

    x = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: outputs(x, False), (x,))
    assert torch.autograd.gradcheck(lambda x: outputs(x, True), (x,))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend: str, device: torch.device):
    logits = torch.randn(5, 33, device=device, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    out = ll.logprobs(logits, (empty, empty), entropy="grad", backend=backend)
    assert [tuple(x.shape) for x in out[:3]] == [(0,)] * 3
    (out.logprob.sum() + out.entropy.sum()).backward()
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_the_gradient_that_were_not_selected_are_zero(backend: str, device: torch.device):
    logits = torch.randn(6, 33, device=device, requires_grad=True)
    ll.logprobs(logits, (torch.tensor([4, 1], device=device), torch.tensor([2, 3], device=device)), backend=backend)[
        0
    ].sum().backward()
    assert (logits.grad[[0, 2, 3, 5]] == 0).all()
    assert (logits.grad[[1, 4]].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_whole_tensor_with_leading_dimensions(backend: str, device: torch.device):
    """``[B, S, V]`` logits cut by ``[:, :-1]``: no copy, results and gradient in the caller's shapes."""
    base = torch.randn(3, 6, 101, device=device, requires_grad=True)
    target = torch.randint(101, (3, 5), device=device)
    target[1, 2] = -100
    out = ll.logprobs(base[:, :-1], target, entropy="grad", backend=backend)
    assert out.logprob.shape == out.entropy.shape == (3, 5)
    upstream = torch.randn(3, 5, device=device)
    torch.autograd.backward([out.logprob, out.entropy], [upstream, upstream])
    flat, usual = base.detach()[:, :-1].reshape(-1, 101), base.detach()[:, :-1].reshape(-1, 101).requires_grad_()
    exact_leaf = float64_leaf(flat)
    index = torch.arange(15)
    exact, theirs = truth(exact_leaf, index, target.flatten()), plain(usual, index, target.flatten())
    for results in (exact, theirs):
        torch.autograd.backward(results[:2], [upstream.flatten().to(results[0])] * 2)
    assert_close_to_truth(out.logprob.flatten(), exact.logprob, theirs.logprob)
    assert_gradient_close_to_truth(base.grad[:, :-1].reshape(-1, 101), exact_leaf.grad, usual.grad)
    assert (base.grad[:, -1] == 0).all()


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x[:, :-1],
        lambda x: x[1:, ::2],
        lambda x: x.transpose(0, 1),
        lambda x: x[:, 2:5, 7:90],
        lambda x: x[0],
        lambda x: x[:1].expand(3, 6, 101),
        lambda x: x[2, 3],
        # A dimension of one, whose stride is no whole step of a row and is never taken.
        lambda x: x[0, :, 7:90].unsqueeze(1),
        lambda x: x[:, :1, 7:90].transpose(0, 1),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_logits_are_read_in_place(backend: str, cut, device: torch.device):
    view = cut(torch.randn(3, 6, 101, device=device))
    target = torch.randint(view.shape[-1], view.shape[:-1], device=device)
    mine = ll.logprobs(view, target, entropy="value", backend=backend)
    same = ll.logprobs(view.contiguous(), target, entropy="value", backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(mine[:3], same[:3], strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_rows_behind_a_dimension_of_one(backend: str, device: torch.device):
    base = torch.randn(6, 101, device=device, requires_grad=True)
    target, upstream = torch.randint(83, (6, 1), device=device), torch.randn(6, 1, device=device)
    out = ll.logprobs(base[:, 7:90].unsqueeze(1), target, entropy="grad", backend=backend)
    torch.autograd.backward([out.logprob, out.entropy], [upstream, upstream])
    cut = base.detach()[:, 7:90]
    exact_leaf, usual = float64_leaf(cut), cut.clone().requires_grad_()
    exact, theirs = (f(x, torch.arange(6), target[:, 0]) for f, x in ((truth, exact_leaf), (plain, usual)))
    for results in (exact, theirs):
        torch.autograd.backward(results[:2], [upstream[:, 0].to(results[0])] * 2)
    assert_close_to_truth(out.logprob[:, 0], exact.logprob, theirs.logprob)
    assert_gradient_close_to_truth(base.grad[:, 7:90], exact_leaf.grad, usual.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_in_float32_for_a_leaf_that_asks_for_it(backend: str, dtype: torch.dtype, device: torch.device):
    if not hasattr(torch.Tensor, "grad_dtype"):
        return
    logits = make_logits(5, 507, dtype).to(device).requires_grad_()
    logits.grad_dtype = torch.float32
    index, target = torch.arange(5), torch.randint(507, (5,))
    ll.logprobs(logits, (index.to(device), target.to(device)), backend=backend).logprob.sum().backward()
    exact, usual = float64_leaf(logits), logits.detach().float().requires_grad_()
    truth(exact, index, target).logprob.sum().backward()
    plain(usual, index, target).logprob.sum().backward()
    assert logits.grad.dtype == torch.float32
    assert_gradient_close_to_truth(logits.grad, exact.grad, usual.grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_bits_on_every_run(backend: str, device: torch.device):
    logits = make_logits(9, 1000, torch.float32, "zipf").to(device).requires_grad_()
    target = torch.randint(1000, (9,), device=device)
    runs = []
    for _ in range(3):
        out = ll.logprobs(logits, target, entropy="grad", backend=backend)
        (grad,) = torch.autograd.grad(out.logprob.sum() + out.entropy.sum(), logits)
        runs.append((*out[:3], grad))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_expanded_upstream_gradient(device: torch.device):
    """``sum().backward()`` hands down a gradient of stride 0."""
    logits = torch.randn(4, 33, device=device, requires_grad=True)
    out = ll.logprobs(logits, torch.tensor([1, 2, 3, 4], device=device), backend="triton")
    out.logprob.sum().backward()
    assert torch.allclose(logits.grad.sum(-1), torch.zeros(4, device=device), atol=1e-6)


def test_autocast_changes_nothing(device: torch.device):
    logits, target = torch.randn(4, 33, device=device), torch.tensor([1, 2, 3, 4], device=device)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        inside = ll.logprobs(logits, target, entropy="value")
    outside = ll.logprobs(logits, target, entropy="value")
    assert all(torch.equal(a, b) for a, b in zip(inside[:3], outside[:3], strict=True))
