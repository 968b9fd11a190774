"""Inside torch.compile and activation checkpointing the numbers stay the same."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import logitless as ll


def loss_of(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, overwrite: bool = False) -> torch.Tensor:
    out = ll.logprobs(
        ll.Logits.given(hidden @ weight, overwrite=overwrite), target, entropy="grad", head=ll.Head(temperature=0.7)
    )
    return (2 * out.logprob + out.entropy).sum()


def gradients(function, *args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, weight = (x.detach().clone().requires_grad_() for x in args[:2])
    loss = function(hidden, weight, *args[2:])
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


@pytest.fixture
def inputs() -> tuple[torch.Tensor, ...]:
    return torch.randn(9, 5), torch.randn(5, 33), torch.randint(33, (9,))


# Importing the compiler in torch 2.13 warns about its own use of deprecated names.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_whole(inputs):
    """One graph, no break: the two operators are opaque to the compiler but known to it."""
    torch._dynamo.reset()
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    for mine, eager in zip(gradients(compiled, *inputs), gradients(loss_of, *inputs), strict=True):
        assert torch.allclose(mine, eager, rtol=1e-6, atol=1e-6)


ROWS = ll.Rows.packed([[1, 2, 3, 4], [1, 2, 3]], [2, 1])
TARGET, KEPT = torch.arange(7), ll.Kept(torch.arange(7), torch.ones(7, dtype=torch.int64))
WHOLE = {
    "no entropy": lambda x: ll.logprobs(2 * x, TARGET).logprob,
    "entropy as a value": lambda x: ll.logprobs(2 * x, TARGET, entropy="value").logprob,
    "a leaf": lambda x: ll.logprobs(x, TARGET).log_z,
    "rows": lambda x: ll.logprobs(2 * x, ROWS, entropy="grad").entropy,
    "gaps between rows": lambda x: ll.logprobs((2 * x)[:, :9], TARGET).logprob,
    "kept ids": lambda x: ll.logprobs(2 * x, TARGET, kept=KEPT).logprob,
    "a head made inside": lambda x: (
        ll.logprobs(2 * x, TARGET, head=ll.Head(temperature=torch.full((7,), 0.7), softcap=3.0)).logprob
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", WHOLE)
def test_compiled_whole_with_every_option(name: str):
    """Only logits of a product with entropy "grad" went without a break."""
    torch._dynamo.reset()
    found = []
    x = torch.randn(7, 10)
    for function in (torch.compile(WHOLE[name], fullgraph=True, backend="aot_eager"), WHOLE[name]):
        leaf = x.clone().requires_grad_()
        out = function(leaf)
        found.append((out.detach(), *torch.autograd.grad(out.sum(), leaf)))
    for mine, eager in zip(*found, strict=True):
        assert torch.allclose(mine, eager, rtol=1e-6, atol=1e-6)


# At a graph break the compiler itself looks at the .grad of the non-leaf logits.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute")
def test_overwriting_breaks_the_graph_but_not_the_caller(inputs):
    torch._dynamo.reset()
    compiled = torch.compile(lambda h, w, t: loss_of(h, w, t, overwrite=True), backend="aot_eager")
    for mine, eager in zip(gradients(compiled, *inputs), gradients(loss_of, *inputs), strict=True):
        assert torch.allclose(mine, eager, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("index", [torch.tensor([0, 2, 3]), None], ids=["some rows", "all rows"])
def test_operators_pass_torch_checks(index: torch.Tensor | None):
    """Schema, fake tensors and aliasing of the two registered operators."""
    gain, logits = torch.ones(3), torch.randn(3 if index is None else 5, 9)
    arguments = (logits, index, torch.tensor([1, 0, 8]), gain, 0.0, 9, 0, True, 1 << 20, "tiled", False)
    torch.library.opcheck(torch.ops.logitless.statistics.default, arguments)
    rows = [torch.randn(3) for _ in range(7)]
    torch.library.opcheck(
        torch.ops.logitless.gradient.default,
        (*arguments[:7], 1 << 20, "tiled", *rows, torch.empty_like(logits), index),
    )


@pytest.mark.parametrize("overwrite", [False, True])
def test_checkpointed(inputs, overwrite: bool):
    def wrapped(*args: torch.Tensor) -> torch.Tensor:
        return checkpoint(loss_of, *args, overwrite, use_reentrant=False)

    for mine, eager in zip(gradients(wrapped, *inputs), gradients(loss_of, *inputs), strict=True):
        assert torch.equal(mine, eager)
