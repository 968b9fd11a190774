"""The one tolerance rule of the test suite.

    error of ours to float64  <=  2 x plain torch's own error in that dtype  +  one floor per dtype

Errors are the largest ``|x - truth| / max(1, |truth|)`` for values, and the relative Frobenius norm for gradients.
An infinity or NaN in the truth must be matched exactly. Nothing in the suite uses a looser rule.

Plain torch's error is a sample, so give it a dozen rows or more where logits are far from zero: with a single row it
can be lucky, and the floor is for rounding, not for luck.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

VALUE_FLOOR = {
    # Eight roundings of float32 (2^-24 each). Plain torch is now and then exact in every row of a small case, while
    # ours rounds in z, exp, the sum, the logarithm and the merge of parts.
    torch.float32: 5e-7,
    # Plain torch in float64 is the truth itself, so all of our error is in the floor. Logits near 300 round z by 6e-14.
    torch.float64: 1e-12,
}

GRADIENT_FLOOR = {
    # Eight roundings of float32 again: exp, expm1, the products with coefficients and gain.
    torch.float32: 5e-7,
    torch.float64: 1e-12,
    # The gradient is rounded once when it is stored, by at most half a unit in the last place, and plain torch's is
    # too; the floor is that one rounding, for cases so small that plain torch's happens to be exact.
    torch.bfloat16: 2**-9,
    torch.float16: 2**-11,
}


watchers: list[Callable[[str, float, float, str], None]] = []
"""Called with the name of the rule, our error, plain torch's and our dtype: the matrix of hosts keeps a record."""


def assert_close_to_truth(ours: Tensor, truth: Tensor, plain: Tensor, name: str = "value") -> None:
    """Per-row values: ``ours`` is float32 or float64, ``truth`` float64, ``plain`` from plain torch in our dtype."""
    _assert_within(_value_error, VALUE_FLOOR, ours, truth, plain, name)


def assert_gradient_close_to_truth(ours: Tensor | None, truth: Tensor, plain: Tensor, name: str = "gradient") -> None:
    """Gradients of the logits: ``ours`` and ``plain`` in the logits' dtype, ``truth`` in float64."""
    assert ours is not None, f"{name}: no gradient arrived"
    _assert_within(_gradient_error, GRADIENT_FLOOR, ours, truth, plain, name)


def _assert_within(error, floors: dict, ours: Tensor, truth: Tensor, plain: Tensor, name: str) -> None:
    assert truth.dtype == torch.float64, f"{name}: the truth is {truth.dtype}, not float64"
    assert ours.shape == truth.shape == plain.shape, f"{name}: {ours.shape}, {truth.shape}, {plain.shape}"
    ours_wide, truth, plain = ours.detach().double().cpu(), truth.detach().cpu(), plain.detach().double().cpu()
    finite = truth.isfinite()
    torch.testing.assert_close(ours_wide[~finite], truth[~finite], rtol=0, atol=0, equal_nan=True, msg=name)
    wrong = ~ours_wide[finite].isfinite()
    assert not wrong.any(), f"{name}: {int(wrong.sum())} entries are not finite where the truth is"
    mine, theirs = error(ours_wide, truth, finite), error(plain, truth, finite)
    theirs = theirs if theirs < float("inf") else 0.0
    allowed = 2 * theirs + floors[ours.dtype]
    for watch in watchers:
        watch("value" if floors is VALUE_FLOOR else "gradient", mine, theirs, str(ours.dtype).removeprefix("torch."))
    assert mine <= allowed, f"{name}: error {mine:.3g}, plain torch {theirs:.3g}, allowed {allowed:.3g} ({ours.dtype})"


def _value_error(x: Tensor, truth: Tensor, where: Tensor) -> float:
    x, truth = x[where], truth[where]
    return float(((x - truth).abs() / truth.abs().clamp_min(1.0)).max()) if len(x) else 0.0


def _gradient_error(x: Tensor, truth: Tensor, where: Tensor) -> float:
    x, truth = x[where], truth[where]
    norm = float(truth.norm())
    return float((x - truth).norm()) / (norm if norm > 0 else 1.0)
