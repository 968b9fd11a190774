"""The same tokens through different tiles, row selections and layouts: the same numbers."""

from __future__ import annotations

import pytest
import torch
from shared.logprobs import BACKENDS, make_logits

import logitless as ll


def run(logits: torch.Tensor, rows, **options) -> tuple[torch.Tensor, ...]:
    leaf = logits.clone().requires_grad_()
    out = ll.logprobs(leaf, rows, entropy="grad", head=ll.Head(temperature=0.8), **options)
    upstream = torch.linspace(-1, 1, out.logprob.numel(), device=logits.device).view_as(out.logprob)
    torch.autograd.backward([out.logprob, out.entropy], [upstream, 0.3 * upstream])
    return (*out[:3], leaf.grad)


def same(a: torch.Tensor, b: torch.Tensor, backend: str, device: torch.device) -> bool:
    """Same bits, except that torch's own CUDA reductions add in an order that depends on the number of rows."""
    if backend == "triton" or device.type == "cpu":
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("memory", [1, 8, 507 * 8, 3 * 507 * 8 + 5, 100_000, "1GiB"])
def test_tile_size(memory: int | str):
    """From one element at a time to everything at once. Whole rows give the same bits, cut rows the same number."""
    logits, target = make_logits(7, 507, torch.float32), torch.randint(507, (7,))
    whole = run(logits, target, backend="tiled", memory="1GiB")
    tiled = run(logits, target, backend="tiled", memory=memory)
    whole_rows = memory == "1GiB" or memory >= 507 * 8
    for a, b in zip(whole, tiled, strict=True):
        assert torch.equal(a, b) if whole_rows else torch.allclose(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("vocab", [128, 200, 256, 300])
def test_canonical_bits_in_pieces_of_a_block(vocab: int):
    """One, two or three pieces, put together, are the bits of all columns at once."""
    logits, target = make_logits(5, vocab, torch.float32), torch.randint(vocab, (5,))
    given = ll.Logits.given(logits, bits="canonical")
    asked = {"entropy": "value", "backend": "tiled"}
    whole, pieces = (ll.logprobs(given, target, memory=memory, **asked) for memory in ("1GiB", 1))
    for a, b in zip(whole[:3], pieces[:3], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_selected_rows_have_the_bits_of_the_full_path(backend: str, device: torch.device):
    logits = make_logits(13, 507, torch.float32).to(device)
    target = torch.randint(507, (13,), device=device)
    index = torch.tensor([12, 0, 7, 3], device=device)
    full = run(logits, target, backend=backend)
    some = ll.logprobs(logits, (index, target[index]), entropy="value", head=ll.Head(temperature=0.8), backend=backend)
    for a, b in zip(full[:3], some[:3], strict=True):
        assert same(a[index], b, backend, device)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ignoring_rows_equals_selecting_the_others(backend: str, device: torch.device):
    logits = make_logits(13, 507, torch.float32).to(device)
    target = torch.randint(507, (13,), device=device)
    mask = torch.arange(13, device=device) % 3 == 1
    index = mask.nonzero().squeeze(1)
    upstream = torch.randn(13, device=device)
    grads = []
    for rows, g in ((target.masked_fill(~mask, -100), upstream), ((index, target[index]), upstream[index])):
        leaf = logits.clone().requires_grad_()
        out = ll.logprobs(leaf, rows, backend=backend)
        out.logprob.backward(g)
        grads.append(leaf.grad)
    assert same(*grads, backend, device)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_and_padded_agree(backend: str, padding: str, device: torch.device):
    """One batch laid out twice: same values per sample, same gradient per token, zeros on padding."""
    lengths, responses, width = [5, 9, 2, 6], [3, 8, 0, 1], 11
    tokens = [torch.randint(101, (n,)).tolist() for n in lengths]
    packed = [make_logits(n, 101, torch.float32).to(device) for n in lengths]
    pack_rows = ll.Rows.packed(tokens, responses, device=device)
    pad_rows = ll.Rows.padded(tokens, responses, max_length=width, padding=padding, device=device)
    pads = [(0, 0, width - n, 0) if padding == "left" else (0, 0, 0, width - n) for n in lengths]
    padded = torch.stack(
        [torch.nn.functional.pad(x, pad, value=float("nan")) for x, pad in zip(packed, pads, strict=True)]
    )
    *a, grad_a = run(torch.cat(packed), pack_rows, backend=backend)
    *b, grad_b = run(padded, pad_rows, backend=backend)
    for x, y in zip(a, b, strict=True):
        assert same(x, y, backend, device)
        assert [len(part) for part in pack_rows.split(x)] == responses
    lines = [g[width - n :] if padding == "left" else g[:n] for g, n in zip(grad_b, lengths, strict=True)]
    assert same(grad_a, torch.cat(lines), backend, device)
    assert grad_b.count_nonzero() == grad_a.count_nonzero()
