"""Rows are built on the CPU, whatever torch's default device is: every call gives the same under another default.

The default is ``meta`` here, where there are no numbers: whatever was made there by mistake cannot be read.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import logitless as ll
from logitless.entropy_sample import sampled_entropy
from logitless.objectives import mismatch

CPU = torch.device("cpu")
TOKENS = [[7, 8, 9], [4, 5, 6, 7]]
IDS = torch.tensor([[0, 7, 8, 9, 0], [4, 5, 6, 7, 0]])
REAL = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 0]])
MASK = torch.tensor([[0, 0, 0, 1, 0], [0, 0, 1, 1, 0]])
LABELS = IDS.masked_fill(MASK == 0, -100)
PACK = torch.tensor([7, 8, 9, 4, 5, 6, 7])
PACK_MASK = torch.tensor([0, 0, 1, 0, 1, 0, 1])
PACK_PLACES = torch.tensor([0, 1, 2, 0, 1, 2, 3])
MASKS = [[1], torch.tensor([1, 0])]


@pytest.fixture
def elsewhere():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def layouts() -> dict[str, ll.Rows]:
    tensors = [torch.tensor(x, device="cpu") for x in TOKENS]
    return {
        "packed": ll.Rows.packed(tensors, [1, 2]),
        "lists": ll.Rows.packed(TOKENS, [1, 2], device="cpu"),
        "mixed": ll.Rows.packed([TOKENS[0], tensors[1]], [1, 2]),
        "masks": ll.Rows.packed(tensors, [1, 2], MASKS),
        "mask only": ll.Rows.packed(tensors, [1, 2], MASKS, loss_mask_only=True),
        "lists of masks": ll.Rows.packed(tensors, [1, 2], [[0], [1, 0]], loss_mask_only=True),
        "starts": ll.Rows.packed(tensors, [1, 2], cu_seqlens=[0, 4, 8, 10]),
        "zigzag": ll.Rows.packed(tensors, [1, 2], cp=ll.Zigzag(1, 2)),
        "contiguous": ll.Rows.packed(tensors, [1, 2], cp=ll.Contiguous(0, 2)),
        "padded": ll.Rows.padded(tensors, [1, 2], max_length=6),
        "lines": ll.Rows.padded(IDS.roll(-1, 1)[:1], [2], lengths=[3]),
        "attended": ll.Rows.padded(IDS, [1, 2], attention_mask=REAL),
        "at": ll.Rows.at(torch.tensor([3, 1], device="cpu"), [4, 5]),
        "every": ll.Rows.every(PACK),
        "mask": ll.Rows.from_mask(IDS, MASK, REAL),
        "pack": ll.Rows.from_mask(PACK, PACK_MASK, cu_seqlens=[0, 3, 7]),
        "places": ll.Rows.from_mask(PACK, PACK_MASK, position_ids=PACK_PLACES),
        "labels": ll.Rows.from_labels(LABELS),
        "labels of a pack": ll.Rows.from_labels(PACK, cu_seqlens=[0, 3, 7]),
        "nothing": ll.Rows.packed([], [], device="cpu"),
    }


EXPECTED = layouts()
FIELDS = ("index", "target", "sample", "position", "totals", "slot", "mask", "response")


@pytest.mark.parametrize("name", EXPECTED)
def test_rows_are_where_their_tokens_are(elsewhere, name):
    rows, plain = layouts()[name], EXPECTED[name]
    for field in FIELDS:
        x, y = getattr(rows, field), getattr(plain, field)
        assert (x is None) == (y is None), field
        assert x is None or (x.device == CPU and torch.equal(x, y)), field
    assert (rows.held, rows.counts, rows.token_shape) == (plain.held, plain.counts, plain.token_shape)
    if rows.slot is None and len(rows) and rows.response is not None:
        values = torch.ones(len(rows), device="cpu")
        assert rows.sum_by_sample(values).tolist() == [float(n) for n in rows.counts]


def test_lists_are_where_torch_puts_lists(elsewhere):
    assert ll.Rows.packed(TOKENS, [1, 2]).index.is_meta
    assert ll.Rows.padded(TOKENS, [1, 2]).index.is_meta
    assert ll.Rows.at([0], [1]).target.is_meta
    assert ll.Kept.from_lists([[1], [2]]).ids.is_meta


def test_kept_ids_are_where_the_rows_are(elsewhere):
    rows = ll.Rows.packed([torch.tensor([1, 2, 3], device="cpu")], [2])
    flat, lengths = torch.tensor([5, 6, 7], device="cpu"), torch.tensor([2, 1], device="cpu")
    for support in ([[5, 6], [7]], SimpleNamespace(token_ids=[5, 6, 7], offsets=[0, 2, 3])):
        kept = ll.Kept.from_engine(rows, [support])
        assert (kept.ids.tolist(), kept.lengths.tolist()) == ([5, 6, 7], [2, 1])
    assert ll.Kept.from_responses(rows, [flat], [lengths]).ids.tolist() == [5, 6, 7]
    empty = ll.Kept.from_responses(ll.Rows.packed([], [], device="cpu"), [], [])
    assert (empty.ids.device, empty.lengths.device) == (CPU, CPU)


def operands() -> tuple[Tensor, Tensor, ll.Rows]:
    made = torch.Generator("cpu").manual_seed(0)
    hidden = torch.randn(7, 8, generator=made, device="cpu").requires_grad_()
    weight = torch.randn(11, 8, generator=made, device="cpu").requires_grad_()
    return hidden, weight, ll.Rows.packed([torch.tensor(x, device="cpu") for x in TOKENS], [1, 2])


def logits_call() -> Tensor:
    hidden, weight, rows = operands()
    out = ll.logprobs(hidden @ weight.T, rows, entropy="grad", stats=("top1", "rank"), top_k=2)
    (out.logprob.sum() + out.entropy.sum()).backward()
    return torch.cat([out.logprob, hidden.grad.flatten(), out.top_k_ids.flatten()])


def hidden_call() -> Tensor:
    hidden, weight, rows = operands()
    out = ll.logprobs(ll.Logits(hidden, weight), rows, entropy="grad", stats=("collision",))
    (out.logprob.sum() + out.entropy.sum()).backward()
    return torch.cat([out.logprob, hidden.grad.flatten(), weight.grad.flatten()])


def kept_call() -> Tensor:
    hidden, weight, rows = operands()
    kept = ll.Kept.from_engine(rows, [[[1, 2]], [[3], [4, 5]]])
    ll.logprobs(ll.Logits(hidden, weight), rows, kept=kept.over("support")).logprob.sum().backward()
    return torch.cat([hidden.grad.flatten(), weight.grad.flatten()])


def loss_call() -> Tensor:
    hidden, weight, rows = operands()
    fields = {"advantage": torch.tensor([1.0, -1.0, 0.5], device="cpu"), "old_logprob": "current"}
    loss, *_ = ll.policy_loss(ll.Logits(hidden, weight), rows, ll.Objective(), **fields)
    loss.backward()
    return torch.cat([loss.detach()[None], hidden.grad.flatten(), weight.grad.flatten()])


def divergence_call() -> Tensor:
    hidden, weight, rows = operands()
    teacher = ll.Logits(hidden.detach() * 0.5, weight.detach())
    out = ll.logprobs(ll.Logits(hidden, weight), rows, teacher=teacher)
    out.divergence.sum().backward()
    return torch.cat([out.divergence, hidden.grad.flatten(), weight.grad.flatten()])


def mismatch_call() -> Tensor:
    _, _, rows = operands()
    x = torch.tensor([-1.0, -2.0, -3.0], device="cpu")
    report = mismatch(x, x * 1.1, rows)
    return torch.tensor([float(len(str(report)))], device="cpu")


def sampled_call() -> Tensor:
    hidden, weight, rows = operands()
    return torch.stack(list(sampled_entropy(ll.Logits(hidden.detach(), weight.detach()), rows, sample=2)[:2]))


CALLS = {
    call.__name__: call
    for call in (logits_call, hidden_call, kept_call, loss_call, divergence_call, mismatch_call, sampled_call)
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_give_the_same(name):
    plain = CALLS[name]()
    torch.set_default_device("meta")
    try:
        found = CALLS[name]()
    finally:
        torch.set_default_device(None)
    assert found.device == CPU
    assert torch.equal(found, plain)
