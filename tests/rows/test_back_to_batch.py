"""Results back in the shape of a batch, in one call: at the rows that predict, or at the tokens themselves."""

from __future__ import annotations

import pytest
import torch

import logitless as ll

IDS = torch.tensor([[0, 0, 5, 6, 7, 8, 9], [0, 3, 4, 9, 1, 0, 0], [2, 3, 4, 5, 6, 7, 8]])
MASK = torch.tensor([[0, 0, 0, 0, 1, 0, 1], [0, 0, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1]])


def test_log_probs_stand_where_the_mask_has_their_tokens():
    """Against float64: of every token that is scored, its log-prob given the tokens before it, at its own place."""
    torch.manual_seed(0)
    logits = torch.randn(3, 7, 11, dtype=torch.float64, requires_grad=True)
    rows = ll.Rows.from_mask(IDS, MASK)
    out = ll.logprobs(logits, rows)
    back = rows.expand(out.logprob, at="tokens")
    wanted = torch.zeros(3, 7, dtype=torch.float64)
    wanted[:, 1:] = torch.log_softmax(logits.detach(), -1)[:, :-1].gather(2, IDS[:, 1:, None]).squeeze(2)
    wanted = wanted * MASK
    torch.testing.assert_close(back.double(), wanted, atol=1e-6, rtol=0)
    assert torch.equal(back[:, 1:], rows.expand(out.logprob)[:, :-1])
    # The gradient arrives as it would through the gather.
    weight = torch.randn(3, 7)
    (back * weight).sum().backward()
    plain = logits.detach().clone().requires_grad_()
    logp = torch.log_softmax(plain, -1)[:, :-1].gather(2, IDS[:, 1:, None]).squeeze(2)
    (logp * (weight * MASK)[:, 1:]).sum().backward()
    torch.testing.assert_close(logits.grad, plain.grad, atol=1e-6, rtol=0)


def test_a_pack_and_a_tail_of_dimensions():
    rows = ll.Rows.packed([[7, 8, 9], [4, 5, 6, 7]], [1, 2])
    x = torch.arange(1.0, 7.0).reshape(3, 2)
    assert rows.expand(x, at="tokens")[:, 0].tolist() == [0, 0, 1, 0, 0, 3, 5]


@pytest.mark.parametrize(
    ("rows", "at"),
    [
        (ll.Rows.packed([[7, 8, 9, 1]], [2], cp=ll.Zigzag(0, 2)), "tokens"),
        (ll.Rows.at([0, 1], [2, 3], num_tokens=4), "tokens"),
        (ll.Rows.every(torch.tensor([1, 2])), "tokens"),
        (ll.Rows.every(torch.tensor([1, 2])), "labels"),
    ],
)
def test_rows_without_a_next_token_refuse(rows: ll.Rows, at: str):
    with pytest.raises(ll.LogitlessError, match=f'at must be "rows", or "tokens" where .* It is {at!r}'):
        rows.expand(torch.zeros(len(rows)), at=at)
