"""Whose device a call is planned for: that of the tensors inside of our own nouns, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import logitless as ll
from benchmarks.bench.measure import peak_bytes
from logitless.machine import CPU, H200
from logitless.memory import sized
from logitless.memory.estimate import _real_device

T, V, D = 503, 1031, 66
PROMISE = 0.05

pytestmark = pytest.mark.usefixtures("one_thread")


def teachers() -> dict[str, Any]:
    """By the form, a teacher of T rows."""
    whole, ids = torch.zeros(T, V), torch.arange(8).repeat(T, 1)
    return {
        "none": None,
        "logits": ll.Teacher(whole),
        "its own head": ll.Teacher(ll.Logits(torch.zeros(T, D), torch.zeros(V, D))),
        "log-probs of K ids": ll.Teacher.from_top_k(torch.full((T, 8), -9.0), ids),
        "several": ll.Teacher.by_row([whole, torch.ones(T, V)], torch.arange(T) % 2),
    }


@pytest.mark.parametrize("teacher", teachers())
def test_given_logits_and_rows_are_of_their_own_device(teacher: str):
    """They were planned for an H200, which has kernels where a CPU has tiles: explain raised, estimate was low."""
    x = torch.zeros(T, V, requires_grad=True)
    rows, other = ll.Rows.every(torch.zeros(T, dtype=torch.int64)), teachers()[teacher]
    asked: dict[str, Any] = {"memory": "1MiB", "teacher": other}
    args = (ll.Logits.given(x), rows)
    told, found = ll.explain(ll.logprobs, *args, **asked), ll.estimate(ll.logprobs, *args, **asked)
    assert (found.backend, found.plan) == ("tiled", told)

    def forward() -> None:
        ll.logprobs(ll.Logits.given(x), rows, **asked)

    assert found.forward_peak == pytest.approx(peak_bytes(forward, "cpu"), rel=PROMISE)


@pytest.mark.parametrize("teacher", ["logits", "its own head", "log-probs of K ids"])
def test_a_teacher_alone_tells_the_device(teacher: str):
    """Logits of sizes alone beside a teacher that is there."""
    logits, target = sized(T, V, D, dtype="float32")
    asked: dict[str, Any] = {"memory": "1MiB", "teacher": teachers()[teacher]}
    found = ll.estimate(ll.logprobs, logits, target, **asked)
    assert found == ll.estimate(ll.logprobs, logits, target, **asked, device=CPU)
    assert found != ll.estimate(ll.logprobs, logits, target, **asked, device=H200)


def test_given_logits_alone_tell_the_device():
    given, target = ll.Logits.given(torch.zeros(T, V)), torch.empty(T, dtype=torch.int64, device="meta")
    assert ll.estimate(ll.logprobs, given, target).backend == "tiled"


def test_several_teachers_tell_the_device():
    several = ll.Teacher.by_row([torch.zeros(2, V, device="meta"), torch.zeros(2, V)], torch.tensor([0, 1]))
    assert _real_device(((), {"teacher": several})) == "cpu"


def test_rows_alone_tell_the_device():
    logits, _ = sized(T, V, D, dtype="float32")
    rows = ll.Rows.every(torch.zeros(T, dtype=torch.int64))
    assert ll.estimate(ll.logprobs, logits, rows).backend == "tiled"
    assert ll.estimate(ll.logprobs, logits, torch.empty(T, dtype=torch.int64, device="meta")).backend == "triton"


def test_a_machine_is_a_device_to_plan_for():
    """Until it was asked for, explain took any machine for a CPU."""
    args = (ll.Logits(torch.zeros(3000, 64), torch.zeros(20011, 64)), torch.zeros(3000, dtype=torch.int64))
    told = {name: str(ll.explain(ll.logprobs, *args, device=name)) for name in ("cpu", "cuda")}
    assert told["cpu"] != told["cuda"]
    assert str(ll.explain(ll.logprobs, *args, device=CPU)) == told["cpu"]
    assert str(ll.explain(ll.logprobs, *args, device=H200)) == told["cuda"]
