"""Chunks of whole samples: what a chunk holds grows with its own samples, and not with all of the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import logitless as ll

COUNTS = [3, 0, 2, 0, 0, 4, 1, 0, 5, 2, 0, 0]
MEMORY = 16 * 11 * 8
PAIRS = {
    "side by side": None,
    "one of a pair has no rows": ([2, 7, 8, 5], [0, 6, 11, 3]),
    "neither of a pair has rows": ([3, 0, 6, 9], [4, 1, 5, 10]),
    "out of order": ([8, 5, 2], [9, 6, 0]),
}


def draw() -> tuple[ll.Rows, torch.Tensor, torch.Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(7)
    rows = ll.Rows.packed([[1] * (n + 1) for n in COUNTS], COUNTS)
    hidden, weight = (torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (rows.num_tokens, 11))
    return rows, hidden.requires_grad_(), weight.requires_grad_(), generator


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("kind", ["dpo", "ipo", "kto"])
def test_samples_without_rows_at_the_borders_of_chunks(kind: str, pairs: str, per_sample: bool):
    rows, hidden, weight, generator = draw()
    preference = ll.Preference(kind, beta=0.5)
    if PAIRS[pairs] is not None or kind == "kto":
        preference = preference.pairs(*(PAIRS[pairs] or ([0, 8, 3], [2, 6, 11])))
    shape, name = (len(COUNTS), "ref_sample_logprob") if per_sample else (len(rows), "ref_logprob")
    fields = {name: torch.randn(shape, generator=generator, dtype=torch.float64) - 3}
    logits = ll.Logits(hidden, weight)
    plan = ll.explain(ll.policy_loss, logits, rows, preference, memory=MEMORY, **fields)
    assert plan.kind == "one pass"
    assert len(plan.chunks) > 1
    loss, _ = ll.policy_loss(logits, rows, preference, memory=MEMORY, **fields)
    found = torch.autograd.grad(loss, [hidden, weight])
    truth, _ = preference(ll.logprobs(torch.nn.functional.linear(hidden, weight), rows), rows, **fields)
    torch.testing.assert_close(loss, truth, atol=1e-14, rtol=1e-13)
    for ours, theirs in zip(found, torch.autograd.grad(truth, [hidden, weight]), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("objective", [ll.Objective.recipe("gspo"), ll.Preference("dpo"), ll.Preference("ipo")])
def test_a_chunk_holds_its_own_samples(objective):
    """Of 500 samples in chunks of two, all chunks together hold a little more than 500, and not 250 times 500."""
    rows = ll.Rows.packed([[1, 2, 3]] * 500, [2] * 500)
    values = torch.zeros(len(rows))
    fields = {"ref_logprob": values} if isinstance(objective, ll.Preference) else {}
    fields = fields or {"advantage": values, "old_logprob": values}
    whole = objective.inputs(None, rows, fields)
    parts = [whole.cut(start, start + 4, True) for start in range(0, len(rows), 4)]
    for number, part in enumerate(parts):
        assert (part.first, part.counts) == (2 * number, (2, 2))
        for name in part.owners:
            assert len(part.batch[name]) == 1


def test_sums_of_a_chunk_have_the_places_of_the_batch():
    """A term of the caller's own may compare them with values that it has of all samples."""
    rows, *_ = draw()
    values = torch.arange(1.0, len(rows) + 1)
    objective = ll.Objective(policy=lambda x: x.sums(x.logprob)[x.sample] * x.advantage, level="sequence")
    whole = objective.inputs(None, rows, {"advantage": values})
    part = replace(whole.cut(5, 10, True), logprob=torch.ones(5))
    assert part.sums(part.logprob).tolist() == [0, 0, 0, 0, 0, 4, 1, 0, 0, 0, 0, 0]
    assert part.mean_by_sample(part.advantage).tolist() == [7.5, 7.5, 7.5, 7.5, 10.0]
    assert part.sample.tolist() == [5, 5, 5, 5, 6]
