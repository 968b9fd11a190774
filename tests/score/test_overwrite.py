"""``Logits.given(x, overwrite=True)``: the same gradient, in the logits' own memory, and no surprise for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import logitless as ll

BACKENDS = ("reference", "tiled", "triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_same_bits_in_the_same_memory(backend: str, dtype: torch.dtype, device: torch.device):
    hidden = torch.randn(3, 4, 8, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(101, 8, device=device, dtype=dtype)
    index, target = torch.tensor([1, 7, 4, 11], device=device), torch.tensor([3, 0, -100, 99], device=device)
    seen = []
    for overwrite in (False, True):
        logits = hidden @ weight.T
        logits.register_hook(lambda g: seen.append(g))
        out = ll.logprobs(
            ll.Logits.given(logits, overwrite=overwrite),
            (index, target),
            entropy="grad",
            head=ll.Head(temperature=0.7, vocab_size=100),
            backend=backend,
        )
        (out.logprob.sum() + 0.1 * out.entropy.sum()).backward()
    fresh, over = seen
    assert torch.equal(fresh, over)
    assert over.data_ptr() == logits.data_ptr()
    assert torch.equal(logits, over)


def test_refused_where_someone_else_may_read():
    leaf = torch.randn(4, 9, requires_grad=True)
    target = torch.tensor([0, 1, 2, 3])
    with pytest.raises(ll.LogitlessError, match="are a leaf"):
        ll.logprobs(ll.Logits.given(leaf, overwrite=True), target)
    base = leaf * 1.0
    for view in (base.view(2, 2, 9)[0], base[:], base.reshape(4, 9)[:, :]):
        with pytest.raises(ll.LogitlessError, match="are a view"):
            ll.logprobs(ll.Logits.given(view, overwrite=True), target[: view.shape[0]])
    with torch.no_grad():
        assert ll.logprobs(ll.Logits.given(leaf, overwrite=True), target).logprob.shape == (4,)


def test_second_backward_is_a_clear_error():
    logits = torch.randn(4, 9, requires_grad=True) * 1.0
    loss = ll.logprobs(ll.Logits.given(logits, overwrite=True), torch.tensor([0, 1, 2, 3])).logprob.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ll.LogitlessError, match="second backward"):
        loss.backward()


def test_second_backward_works_when_not_overwriting():
    logits = torch.randn(4, 9, requires_grad=True)
    loss = ll.logprobs(logits, torch.tensor([0, 1, 2, 3])).logprob.sum()
    loss.backward(retain_graph=True)
    once = logits.grad.clone()
    loss.backward()
    assert torch.equal(logits.grad, 2 * once)


def test_an_operation_that_saved_the_logits_notices():
    """exp saves its output, which backward then replaces: autograd's version counter must catch it."""
    leaf = torch.randn(4, 9, requires_grad=True)
    loss = ll.logprobs(ll.Logits.given(leaf.exp(), overwrite=True), torch.tensor([0, 1, 2, 3])).logprob.sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_two_calls_on_the_same_logits_cannot_both_overwrite():
    logits = torch.randn(4, 9, requires_grad=True) * 1.0
    target = torch.tensor([0, 1, 2, 3])
    first, second = (ll.logprobs(ll.Logits.given(logits, overwrite=True), target).logprob.sum() for _ in range(2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (first + second).backward()


def test_the_version_counter_moves_with_the_data():
    logits = torch.randn(4, 9, requires_grad=True) * 1.0
    before = logits._version
    ll.logprobs(ll.Logits.given(logits, overwrite=True), torch.tensor([0, 1, 2, 3])).logprob.sum().backward()
    assert logits._version > before


def test_a_second_consumer_adds_to_the_gradient():
    """Autograd must not add the other consumer's gradient into the logits' memory behind our back."""
    leaf = torch.randn(4, 9, requires_grad=True)
    target = torch.tensor([0, 1, 2, 3])
    grads = []
    for overwrite in (False, True):
        logits = leaf * 2.0
        loss = ll.logprobs(ll.Logits.given(logits, overwrite=overwrite), target).logprob.sum() + 0.5 * logits.sum()
        grads.append(torch.autograd.grad(loss, leaf)[0])
    assert torch.equal(*grads)


def test_double_backward_is_an_error():
    logits = torch.randn(4, 9, requires_grad=True)
    loss = ll.logprobs(logits, torch.tensor([0, 1, 2, 3])).logprob.sum()
    with pytest.raises(ll.LogitlessError, match="second derivative"):
        torch.autograd.grad(loss, logits, create_graph=True)


@pytest.mark.parametrize("flag", ["no", 1, 0, None], ids=repr)
def test_the_flag_is_true_or_false(flag: Any):
    """Of logits that may be written over: "no" would be taken for yes."""
    logits = torch.randn(3, 7, requires_grad=True) * 1.0
    with pytest.raises(ll.LogitlessError, match="overwrite must be True or False but is"):
        ll.logprobs(ll.Logits.given(logits, overwrite=flag), torch.zeros(3, dtype=torch.int64))
