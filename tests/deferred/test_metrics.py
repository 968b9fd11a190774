"""The largest, the smallest, the mean and the norm of each row of logits, from one walk over them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from close import assert_close_to_truth
from torch import Tensor, nn

import logitless as ll
from logitless.operands.logits import LogitsMade
from logitless.operands.stands import Stands

ROWS, WIDTH, COLUMNS = (3, 21), 16, 253


def operands(dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, COLUMNS).to(torch.bfloat16).to(dtype)
    return head, torch.randn(*ROWS, WIDTH).bfloat16().to(dtype).requires_grad_()


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product that is made."""
    rows: list[int] = []
    plain = Stands.computed

    def counted(self: Stands) -> Tensor:
        rows.append(self.hidden.shape[:-1].numel())
        return plain(self)

    monkeypatch.setattr(Stands, "computed", counted)
    return rows


def logged(x: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """As AReaL's Megatron engine logs them, and what else torch may be asked."""
    return [
        x.detach().min(-1).values.to(dtype),
        x.detach().max(-1).values.to(dtype),
        x.detach().mean(-1, dtype=dtype),
        torch.linalg.vector_norm(x.detach(), dim=-1, dtype=dtype),
        x.detach().amin(-1, keepdim=True).to(dtype),
        x.detach().amax(-1).to(dtype),
        x.detach().max().to(dtype),
    ]


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "a factor": lambda x: x / 0.5,
    "rows": lambda x: x[:, 1:],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changed", CHANGES)
def test_metrics_of_a_step_come_from_one_walk(changed: str, dtype: torch.dtype, multiplied: list[int]) -> None:
    head, hidden = operands(dtype)
    change = CHANGES[changed]
    plain = change(head(hidden))
    # A head in 16 bits rounds its logits.
    exact = plain.double() if dtype == torch.bfloat16 else change(deepcopy(head).double()(hidden.double()))
    with ll.defer(head, head=head, memory=10 * dtype.itemsize * COLUMNS):
        logits = change(head(hidden))
        found = logged(logits)
    assert sum(multiplied) == logits.shape[:-1].numel()
    assert max(multiplied) == 10
    for ours, torchs, truth in zip(found, logged(plain), logged(exact, torch.float64), strict=True):
        assert type(ours) is Tensor
        assert not ours.requires_grad
        assert_close_to_truth(ours, truth, torchs)
    for name in ("min", "max"):
        assert torch.equal(getattr(logits.detach(), name)(-1).indices, getattr(exact, name)(-1).indices)


def test_a_factor_makes_other_metrics() -> None:
    head, hidden = operands()
    with ll.defer(head, head=head):
        logits = head(hidden)
        before = logits.detach()
        least = before.min(-1).values
        logits /= 0.5
        torch.testing.assert_close(logits.detach().min(-1).values, 2 * least)
        # It shares the memory of the logits in torch, and would have the factor, too.
        with pytest.raises(ll.LogitlessError, match="share memory with logits that were changed in place"):
            before.min(-1)


def test_the_largest_alone_takes_no_walk(multiplied: list[int]) -> None:
    head, hidden = operands()
    with ll.defer(head, head=head):
        head(hidden).detach().max(-1)
    assert not multiplied


def test_metrics_with_a_graph_keep_it() -> None:
    head, hidden = operands()
    with ll.defer(head, head=head):
        logits = head(hidden)
        logits.detach().min(-1)
        assert logits.min(-1).values.requires_grad
        assert logits.max(-1).values.requires_grad
        assert logits.mean(-1).requires_grad


def test_metrics_in_another_dtype_are_summed_in_it() -> None:
    head, hidden = operands()
    truth = head(hidden).double()
    with ll.defer(head, head=head):
        logits: Any = head(hidden).detach()
        assert logits.mean(-1, dtype=torch.float64).dtype == torch.float64
        norm = torch.linalg.vector_norm(logits, dim=-1, dtype=torch.float64)
        torch.testing.assert_close(norm, truth.norm(dim=-1), rtol=1e-6, atol=0)
        torch.testing.assert_close(
            torch.linalg.vector_norm(logits, 1, -1).double(), truth.norm(1, -1), rtol=1e-6, atol=0
        )


def test_the_norm_by_its_other_names() -> None:
    """As AReaL 2.0 has it, and torch's own function."""
    head, hidden = operands()
    truth = head(hidden).double()
    with ll.defer(head, head=head):
        logits: Any = head(hidden).detach()
        torch.testing.assert_close(logits.float().norm(dim=-1).double(), truth.norm(dim=-1), rtol=1e-6, atol=0)
        found = torch.norm(logits, dim=-1, keepdim=True)
        torch.testing.assert_close(found.double(), truth.norm(dim=-1, keepdim=True), rtol=1e-6, atol=0)
        torch.testing.assert_close(logits.norm(1, -1).double(), truth.norm(1, -1), rtol=1e-6, atol=0)
        with pytest.warns(LogitsMade, match="norm reads them"):
            torch.testing.assert_close(logits.norm().double(), truth.norm(), rtol=1e-6, atol=0)


def test_metrics_after_a_change_of_the_weight_are_refused() -> None:
    head, hidden = operands()
    with ll.defer(head, head=head):
        logits = head(hidden).detach()
        logits.min(-1)
        with torch.no_grad():
            head.weight.add_(1)
        with pytest.raises(ll.LogitlessError, match="weight was changed in place"):
            logits.max(-1)


def test_no_rows() -> None:
    head, hidden = operands()
    with ll.defer(head, head=head):
        logits = head(hidden[:, :0]).detach()
        assert logits.min(-1).values.shape == (3, 0)
        assert logits.mean(-1).shape == (3, 0)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["min", "max"])
def test_the_smallest_and_the_largest_are_equal_to_themselves(name: str) -> None:
    torch.manual_seed(0)
    logits: Any = ll.Logits(torch.randn(200, 96), torch.randn(300, 96))
    logits.min(-1)
    assert (logits == getattr(logits, name)(-1, keepdim=True).values).any(-1).all()
    assert (logits == getattr(logits, f"a{name}")(-1, keepdim=True)).any(-1).all()
