"""What a term is given: zeros at rows that do not count, whatever stands there."""

from __future__ import annotations

import torch

from logitless.objectives.inputs import Inputs

VECTORS = ("logprob", "entropy", "divergence", "log_z", "mean_logit")


def test_rows_that_do_not_count_are_zero():
    """By selection: a NaN there reaches neither value nor gradient."""
    counted = torch.tensor([True, False, True, False])
    values = torch.tensor([-1.0, torch.nan, -2.0, torch.inf])
    leaves = {name: values.clone().requires_grad_() for name in VECTORS}
    fields = {"advantage": values.double(), "bin": torch.tensor([5, 6, 7, 8])}
    empty = torch.zeros(0, dtype=torch.int64)
    made = Inputs(
        **leaves, fields=fields, counted=counted, weight=counted.double(), sample=empty, totals=empty, counts=None
    )
    clean = made.cleaned()
    wanted = torch.tensor([-1.0, 0.0, -2.0, 0.0])
    for name in VECTORS:
        x = getattr(clean, name)
        assert torch.equal(x, wanted)
        x.sum().backward()
        assert torch.equal(leaves[name].grad, counted.float())
    assert torch.equal(clean.fields["advantage"], wanted)
    assert clean.fields["bin"].tolist() == [5, 0, 7, 0]
    assert clean.weight.dtype == torch.float32
