"""Rows that are all known to count: fewer operations, the same loss, gradients and metrics."""

from __future__ import annotations

import pytest
import torch

import logitless as ll

LENGTHS, RESPONSES = (9, 6, 12), (4, 3, 7)


def rows_of(masked: bool, device: torch.device | str = "cpu") -> ll.Rows:
    """Three samples; a mask of ones counts as many rows, but nobody knows before it is read."""
    tokens = [torch.arange(n) % 5 for n in LENGTHS]
    masks = [torch.ones(n) for n in RESPONSES] if masked else None
    return ll.Rows.packed(tokens, RESPONSES, masks, device=device)


@pytest.mark.parametrize("denominator", [None, 5, 0, torch.tensor(5.0)], ids=repr)
@pytest.mark.parametrize("reduce", ["token_mean", "sample_mean", "sample_sum"])
def test_a_mask_of_ones_changes_nothing(reduce: str, denominator):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(sum(LENGTHS), 8, generator=generator)
    advantage, old = (torch.randn(sum(RESPONSES), generator=generator) for _ in range(2))
    objective = ll.Objective(reduce=reduce, length=11 if reduce == "sample_sum" else None, entropy_coef=0.1)
    found = []
    for masked in (False, True):
        rows, x = rows_of(masked), logits.clone().requires_grad_()
        assert rows.complete != masked
        given = {"old_logprob": old, "advantage": advantage, "denominator": denominator}
        loss, metrics = ll.policy_loss(x, rows, objective, **given)
        loss.backward()
        found.append((loss, x.grad, metrics.compute()))
    (loss, gradient, metrics), (wanted, wanted_gradient, wanted_metrics) = found
    assert (loss != 0) == (denominator != 0)
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-6, atol=1e-9)
    assert list(metrics) == list(wanted_metrics)
    assert metrics == pytest.approx(wanted_metrics, rel=1e-6, nan_ok=True)


def test_a_split_sample_is_not_complete():
    """A rank's rows are not all of a sample's, whose tokens are counted over all ranks."""
    tokens = [torch.arange(16) % 5]
    halves = [ll.Rows.packed(tokens, [12], cp=ll.Zigzag(rank, 2)) for rank in range(2)]
    assert not any(rows.complete for rows in halves)
    assert ll.Rows.packed(tokens, [12], cp=ll.Zigzag(0, 1)).complete


def test_targets_that_change_are_looked_at(device):
    """A target that is written to after the rows were made: nothing is known of it any more."""
    rows = rows_of(False, device)
    logits = torch.randn(sum(LENGTHS), 8, device=device)
    assert rows.complete
    before = ll.logprobs(logits, rows, entropy="value")
    rows.target[1] = -100
    assert not rows.complete
    after = ll.logprobs(logits, rows, entropy="value")
    wanted = before.logprob.clone()
    wanted[1] = 0.0
    assert torch.equal(after.logprob, wanted)
    assert after.entropy[1] == 0.0


def test_targets_of_a_captured_graph(device):
    """A replay may have other targets in the same memory, -100 among them."""
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    rows, logits = rows_of(False, device), torch.randn(sum(LENGTHS), 8, device=device)
    ll.logprobs(logits, rows)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = ll.logprobs(logits, rows).logprob
    rows.target[1] = -100
    graph.replay()
    assert out[1] == 0.0
    assert bool((out[2:] != 0).all())
