"""A host's function and ours on the same operands, judged by float64.

theirs = host function, before install  ]
ours   = host function, after install   ]  same shapes, values and gradients at most twice as far from the truth
truth  = plain torch in float64         ]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from torch import Tensor

import logitless

Call = Callable[..., Any]


def run(function: Call, operands: list[Tensor], upstream: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients of a function of leaves; one upstream gradient per result, None for one without a graph."""
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    results = function(*leaves)
    results = [results] if isinstance(results, Tensor) else list(results)
    pairs = [(x, g.to(x)) for x, g in zip(results, upstream, strict=True) if x.requires_grad]
    gradients = torch.autograd.grad([x for x, _ in pairs], leaves, [g for _, g in pairs])
    return [x.detach() for x in results], list(gradients)


def assert_parity(
    host: str,
    function: Call,
    truth: Call,
    operands: list[Tensor],
    *,
    dtypes: list[torch.dtype] | None = None,
    oracle: Call | None = None,
    **options: Any,
) -> None:
    """Install, and compare results and gradients of ``function`` with what it gave before.

    Args:
        function: calls the host's function by its name, so that it finds ours after install.
        truth: the same in plain torch; gets float64 operands.
        dtypes: of our results, where they are not the host's.
        oracle: stands for the host's function where that does not run here.
    """
    shapes = [x.shape for x in _listed(truth(*[x.double() for x in operands]))]
    upstream = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    theirs, their_gradients = run(oracle or function, operands, upstream)
    exact, exact_gradients = run(truth, [x.double() for x in operands], upstream)
    logitless.install(host, audit=7, **options)
    ours, our_gradients = run(function, operands, upstream)
    for i, (mine, other, wanted) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert mine.dtype == (dtypes[i] if dtypes else other.dtype)
        assert mine.shape == other.shape
        # One rounding to the host's dtype is not an error of the value.
        rounded = wanted.to(mine.dtype).double() if mine.dtype.itemsize < 4 else wanted
        assert_close_to_truth(mine.float() if mine.dtype.itemsize < 4 else mine, rounded, other, f"result {i}")
    for i, (mine, other, wanted) in enumerate(zip(our_gradients, their_gradients, exact_gradients, strict=True)):
        assert mine.dtype == other.dtype
        assert_gradient_close_to_truth(mine, wanted, other, f"gradient of operand {i}")
    (status,) = logitless.status().hosts
    assert sum(entry.calls for entry in status.replaced) == 1
    assert not any(entry.passed_on for entry in status.replaced)
    assert status.audit is not None
    assert status.audit.passed
    assert status.audit.rows > 0


def _listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)
