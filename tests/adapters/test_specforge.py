"""SpecForge's compact teacher with and without ours, on its own code."""

from __future__ import annotations

import pytest
import torch
from close import assert_close_to_truth
from hosts import checkout, load

import logitless
from logitless import LogitlessError

pytestmark = pytest.mark.skipif(checkout("specforge") is None, reason="LOGITLESS_HOSTS names no checkout of SpecForge")
V, D = 211, 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_teacher_says_of_all_ids(dtype: torch.dtype):
    """Its probabilities, over all ids and over the draft's, its most likely ids, and the mask that follows."""
    (module,) = load("specforge")
    hidden, weight = torch.randn(2, 9, D).to(dtype), torch.randn(V, D).to(dtype)
    # Equal logits: the first id counts.
    weight[7] = weight[3]
    t2d, mask = torch.rand(V) < 0.4, (torch.rand(2, 9, 1) < 0.7).int()
    theirs = module.compute_target_from_hidden(hidden, weight, t2d, mask, chunk_size=50)
    rounded = (hidden @ weight.T).double()
    exact = rounded.softmax(-1)[..., t2d]
    logitless.install("specforge", audit=3)
    try:
        ours = module.compute_target_from_hidden(hidden, weight, t2d, mask, chunk_size=50)
        (status,) = logitless.status().hosts
        assert status.audit is not None
        assert status.audit.passed
        assert [entry.calls for entry in status.replaced] == [1]
        with pytest.raises(LogitlessError, match="chunk_size must be positive but is 0"):
            module.tiled_logsumexp_argmax(hidden, weight, chunk_size=0)
    finally:
        logitless.uninstall("specforge")
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]
    assert torch.equal(ours[0], theirs[0])
    assert_close_to_truth(ours[1], exact, theirs[1])
    assert torch.equal(ours[2], rounded.argmax(-1))
    assert torch.equal(ours[3], theirs[3])
