"""What a ``TokenStats`` shows of itself: every result that is there, by name, and none that is not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import logitless as ll
from logitless.readings.table import STATS, TEACHER_STATS

ASKED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "nothing": ({}, ()),
    "entropy": ({"entropy": "grad"}, ("entropy",)),
    **{
        name: ({"stats": (name,)}, ("top1_id", "top1_logprob", "top1_hit") if name == "top1" else (name,))
        for name in STATS
    },
    "all": ({"stats": tuple(STATS)}, tuple(sorted({*STATS, "top1_id", "top1_logprob", "top1_hit"} - {"top1"}))),
    "top_k": ({"top_k": 2}, ("top_k_ids", "top_k_logprobs")),
    "ids": ({"ids": torch.tensor([[1, 2], [3, -100]])}, ("ids_logprobs",)),
    "teacher": ({"teacher": torch.zeros(3, 7)}, ("divergence", "teacher_logprob", "teacher_entropy")),
    "of the teacher": (
        {"teacher": torch.zeros(3, 7), "stats": TEACHER_STATS},
        ("acceptance", "teacher_log_z", "teacher_shared", "teacher_top1_id"),
    ),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("source", ["logits", "hidden"])
def test_repr_names_the_results_that_are_there(source: str, asked: str):
    given, there = ASKED[asked]
    hidden, weight = torch.randn(3, 5, requires_grad=True), torch.randn(7, 5, requires_grad=True)
    logits = (hidden @ weight.T).detach().requires_grad_() if source == "logits" else ll.Logits(hidden, weight)
    out = ll.logprobs(logits, ll.Rows.packed([[1, 2, 3]], [2]), **given)
    text = repr(out)
    assert text == str(out)
    assert text.startswith("TokenStats(logprob=tensor([")
    shown = re.findall(r"[( ](\w+)=tensor\(", text)
    assert shown == [name for name, x in out._asdict().items() if x is not None]
    assert {"logprob", "log_z", *there} <= set(shown)
    assert "None" not in text
