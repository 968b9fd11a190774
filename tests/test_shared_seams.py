"""What the adapters of several hosts share, without any host."""

from __future__ import annotations

import torch

from logitless import logprobs
from logitless.seams import without_outside


def test_an_id_outside_the_vocabulary_has_log_prob_zero_and_the_gradient_of_minus_log_z():
    """As for hosts that sum the target's logit over shards, none of which has the id."""
    logits, target = torch.randn(3, 7, dtype=torch.float64, requires_grad=True), torch.tensor([2, -1, 7])
    out = without_outside(target, 7, lambda ids: logprobs(logits, ids))
    out.sum().backward()
    p = torch.softmax(logits.detach(), 1)
    assert out.tolist() == [p[0, 2].log().item(), 0.0, 0.0]
    wanted = -p
    wanted[0, 2] += 1
    torch.testing.assert_close(logits.grad, wanted)
