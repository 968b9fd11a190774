"""Shared by the tests of logprobs and those that build on them."""

from __future__ import annotations

import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from torch import Tensor
from truth import float64_leaf, plain, truth

import logitless as ll

BACKENDS = ("reference", "tiled", "triton")


def make_logits(num_tokens: int, vocab: int, dtype: torch.dtype, kind: str = "gaussian") -> Tensor:
    """Logits of the kinds that break kernels: noise, a large common offset, confident rows, Zipf-like tails."""
    x = torch.randn(num_tokens, vocab, dtype=torch.float64) * 3
    if kind == "offset":
        x = x + 2.0 ** torch.arange(num_tokens).remainder(12)[:, None]
    if kind == "peaked":
        confidence = torch.tensor([0.9, 0.99, 0.999, 1 - 1e-6], dtype=torch.float64)
        x = x * 0.1
        rest = torch.logsumexp(x[:, 1:], -1)
        x[:, 0] = rest + torch.logit(confidence[torch.arange(num_tokens) % 4])
    if kind == "zipf":
        x = x - 1.5 * torch.log(torch.arange(1, vocab + 1))
    return x.to(dtype)


def check(
    logits: Tensor, index: Tensor, target: Tensor, kept=None, device="cpu", scope="vocabulary", **options
) -> ll.TokenStats:
    """Values and gradients of one call, with random upstream gradients for every output, by the tolerance rule."""
    head = {k: options.pop(k) for k in ("temperature", "scale", "softcap", "vocab_size") if k in options}
    leaf = logits.to(device).clone().requires_grad_()
    ours_kept = None if kept is None else ll.Kept(*(x.to(device) for x in ragged(kept)), scope=scope)
    rows = ll.Rows.at(index.to(device), target.to(device), num_tokens=len(logits))
    ours = ll.logprobs(leaf, rows, entropy="grad", head=ll.Head(**head), kept=ours_kept, **options)
    # The yardstick is torch's own error on the same device.
    exact_leaf, plain_leaf = float64_leaf(logits), logits.to(device).clone().requires_grad_()
    over = {"kept": kept, "scope": scope, **head}
    exact = truth(exact_leaf, index, target, **over)
    usual = plain(plain_leaf, index, target, **over)
    upstream = [torch.randn(len(index), dtype=torch.float64) for _ in range(3)]
    for results in (ours, exact, usual):
        pairs = [(r, g.to(r)) for g, r in zip(upstream, results[:3], strict=True) if r is not None]
        torch.autograd.backward(*zip(*pairs, strict=True))
    for name, mine, right, theirs in zip(exact._fields, ours[:3], exact, usual, strict=True):
        assert (mine is None) == (right is None), name
        if mine is not None:
            assert_close_to_truth(mine, right, theirs, name)
    assert_gradient_close_to_truth(leaf.grad, exact_leaf.grad, plain_leaf.grad)
    return ours


def ragged(kept: list[list[int]]) -> tuple[Tensor, Tensor]:
    flat = [i for ids in kept for i in ids]
    return torch.tensor(flat, dtype=torch.int64), torch.tensor([len(ids) for ids in kept], dtype=torch.int64)


def draw_rows(num_tokens: int, num_rows: int, vocab: int) -> tuple[Tensor, Tensor]:
    return torch.randperm(num_tokens)[:num_rows], torch.randint(vocab, (num_rows,))
