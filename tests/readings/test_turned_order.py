"""Readings of the order of a row where the head turns it around: a scale below 0, of ``Head`` or of deferred logits."""

from __future__ import annotations

import pytest
import torch

import logitless as ll

R, V, D, K = 9, 83, 5, 4


@pytest.mark.parametrize("memory", [None, 2000])
@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("source", ["logits", "hidden", "negated"])
def test_ranks_and_bests_below_a_negative_scale(source: str, backend: str, memory: int | None):
    """Integers, so that ties are exact: of equal logits the smaller id comes first."""
    hidden, weight = torch.randint(-2, 3, (R, D)).float(), torch.randint(-2, 3, (V, D)).float()
    target, factor = torch.randint(V, (R,)), -0.5
    z = factor * (hidden @ weight.T)
    logits = {"logits": hidden @ weight.T, "hidden": ll.Logits(hidden, weight), "negated": ll.Logits(hidden, weight)}
    given, head = logits[source], ll.Head(scale=factor)
    if source == "negated":
        given, head = given * factor, None
    asked = {"stats": ("top1", "rank", "max_logit"), "top_k": K, "head": head, "backend": backend, "memory": memory}
    out = ll.logprobs(given, target, **asked)
    order = z.sort(dim=1, descending=True, stable=True)
    assert torch.equal(out.rank, (order.indices == target[:, None]).nonzero()[:, 1])
    assert torch.equal(out.top1_id, order.indices[:, 0])
    assert torch.equal(out.top_k_ids, order.indices[:, :K])
    assert torch.equal(out.max_logit, order.values[:, 0])
    assert torch.equal(out.top1_hit, order.indices[:, 0] == target)
    torch.testing.assert_close(out.top_k_logprobs, z.log_softmax(1).gather(1, order.indices[:, :K]))
