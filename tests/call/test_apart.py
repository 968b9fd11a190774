"""Whether hidden states can go into a product as they lie in memory, or are copied first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import logitless as ll
from logitless.call.resolve import _apart_here
from logitless.route import plan as plans

D = 8
BASE = torch.zeros(4000)
LAID: dict[str, tuple[torch.Tensor, bool]] = {
    "rows": (torch.zeros(6, D), True),
    "rows with gaps": (BASE.as_strided((6, D), (3 * D, 1)), True),
    "lines": (torch.zeros(2, 3, D), True),
    "lines with gaps between rows": (BASE.as_strided((2, 3, D), (6 * D, 2 * D, 1)), True),
    "lines with gaps between lines": (BASE.as_strided((2, 3, D), (5 * D, D, 1)), False),
    "one line, whose stride means nothing": (BASE.as_strided((1, 6, D), (99, D, 1)), True),
    "lines of one token": (BASE.as_strided((6, 1, D), (2 * D, 99, 1)), True),
    "pairs with gaps between them": (BASE.as_strided((3, 2, D), (5 * D, D, 1)), False),
    "lines next to each other": (torch.zeros(3, 2, D).transpose(0, 1), False),
}
"""Hidden states, and whether a product can walk over their rows by one stride."""


@pytest.mark.parametrize("name", LAID)
@pytest.mark.parametrize("more", [{}, {"index": torch.zeros(2)}, {"sequence_parallel": True}], ids=str)
def test_rows_of_one_stride_go_in_as_they_are(name: str, more: dict[str, Any]):
    hidden, flat = LAID[name]
    asked: list[tuple[tuple[int, ...], bool]] = []

    def takes(x: torch.Tensor, weight: torch.Tensor, copied: bool = False) -> str:
        asked.append((tuple(x.shape), copied))
        return "the answer"

    call = SimpleNamespace(
        linear=SimpleNamespace(sequence_parallel=more.get("sequence_parallel", False)),
        index=more.get("index"),
        width=D,
        parts=1,
        backend=SimpleNamespace(products=SimpleNamespace(takes=takes)),
    )
    operands = SimpleNamespace(hidden=hidden, weight=torch.zeros(5, D), bias=None)
    assert _apart_here(operands, call) == "the answer"  # pyright: ignore[reportArgumentType]
    walks = flat and not more
    assert asked == [((6, D) if walks else tuple(hidden.shape), not walks)]


@pytest.mark.parametrize("asked", [{"stats": ("top1",)}, {"top_k": 2}, {"entropy": "grad"}, {}], ids=str)
def test_a_teachers_ids_are_enough_where_nothing_else_is_asked(asked: dict[str, Any]):
    """Renormalised over the K ids that the teacher sent, dot products do; any other reading is of all columns."""
    hidden, weight = torch.randn(4, D, dtype=torch.float64), torch.randn(31, D, dtype=torch.float64)
    ids = torch.tensor([[0, 3], [5, 7], [30, 1], [2, 9]])
    teacher = ll.Teacher.from_top_k(torch.tensor([[-0.5, -1.5]]).double().expand(4, 2), ids, "renormalise")
    logits, target = ll.Logits(hidden, weight), ids[:, 0]
    plan = ll.explain(ll.logprobs, logits, target, teacher=teacher, divergence="forward_kl", **asked)
    assert (plan.reason == plans.LISTED) == (not {"stats", "top_k"} & set(asked))
    out = ll.logprobs(logits, target, teacher=teacher, divergence="forward_kl", **asked)
    z = hidden @ weight.T
    q = torch.tensor([-0.5, -1.5]).double().log_softmax(-1).expand(4, 2)
    log_p = z.gather(1, ids).log_softmax(1)
    torch.testing.assert_close(out.divergence, (q.exp() * (q - log_p)).sum(1), rtol=1e-9, atol=1e-12)
    if "stats" in asked:
        assert torch.equal(out.top1_id, z.argmax(1))
    if "top_k" in asked:
        assert torch.equal(out.top_k_ids, z.topk(2).indices)


def test_the_hint_about_a_layer_is_given_for_a_weight_alone():
    layer, hidden, weight = torch.nn.Linear(D, 5), torch.zeros(3, D), torch.zeros(5, D)
    target, hint = torch.zeros(3, dtype=torch.int64), "Pass the layer's weight and bias"
    with pytest.raises(ll.LogitlessError, match=hint):
        ll.logprobs(ll.Logits(hidden, layer), target)  # pyright: ignore[reportArgumentType]
    for wrong in ({"hidden": layer, "weight": weight}, {"hidden": hidden, "weight": object()}):
        with pytest.raises(ll.LogitlessError, match="must be") as caught:
            ll.logprobs(ll.Logits(**wrong), target)
        assert hint not in str(caught.value)
