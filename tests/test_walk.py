"""The walk of one batch: how often the file changes on its way through the package, and how much a verb asks for.

A call that crosses few files is read in one sitting, and costs the host little. The numbers are held here, because
numbers that nobody tests grow.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import logitless as ll

PACKAGE = str(Path(ll.__file__).parent)
ROWS = ll.Rows.packed([torch.arange(9), torch.arange(6)], [4, 3])
HIDDEN, WEIGHT = torch.zeros(15, 64, requires_grad=True), torch.zeros(1000, 64, requires_grad=True)
ADVANTAGE, OBJECTIVE = torch.tensor([1.0, -1.0])[ROWS.sample], ll.Objective.recipe("dapo", entropy_coef=0.001)

CALLS = {
    "logprobs from logits": (20, lambda: ll.logprobs(torch.zeros(15, 1000, requires_grad=True), ROWS, entropy="grad")),
    "logprobs from hidden states": (30, lambda: ll.logprobs(ll.Logits(HIDDEN, WEIGHT), ROWS, entropy="grad")),
    "policy loss": (
        60,
        lambda: ll.policy_loss(ll.Logits(HIDDEN, WEIGHT), ROWS, OBJECTIVE, old_logprob="current", advantage=ADVANTAGE),
    ),
}


def walk(call: Callable[[], object]) -> list[str]:
    """The file of every function of the package that a call enters, in order; twice run before, as in training."""
    seen: list[str] = []

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            seen.append(code.co_filename.removeprefix(PACKAGE))

    call()
    call()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("name", CALLS)
def test_few_files_are_crossed(name: str):
    most, call = CALLS[name]
    files = walk(call)
    changes = sum(a != b for a, b in pairwise(files))
    # At least as many as there are files, or nothing was seen.
    assert len(set(files)) - 1 <= changes <= most, "\n".join(files)


@pytest.mark.parametrize("verb", [ll.logprobs, ll.policy_loss], ids=lambda verb: verb.__name__)
def test_a_verb_asks_for_a_dozen_things(verb):
    """Besides what it hands to the objective."""
    of_objective = set(inspect.signature(ll.Objective.__call__).parameters)
    own = [name for name in inspect.signature(verb).parameters if name not in of_objective]
    assert len(own) <= 12, own


def test_verbs_take_their_arguments_in_one_order():
    """What both have comes in the same order, logits and rows first."""
    ours, theirs = (list(inspect.signature(verb).parameters) for verb in (ll.logprobs, ll.policy_loss))
    assert ours[:2] == theirs[:2] == ["logits", "rows"]
    shared = [name for name in ours if name in theirs]
    assert shared == [name for name in theirs if name in ours]
