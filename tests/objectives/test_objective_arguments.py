"""Arguments of the functions beside an objective: what was made something else of, or ended in torch's error.

Every parameter is tried with every wrong kind in ``tests/call/test_arguments.py``; here are values of the right kind.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import logitless as ll
from logitless import objectives as of

ROWS = ll.Rows.packed([[1, 2, 3, 4, 5], [6, 7, 8, 9, 9, 9]], [3, 4])
R = len(ROWS)
LINE = torch.linspace(-2.0, 1.0, R)
HEAD = torch.linspace(0.0, 1.0, ROWS.num_tokens)[:, None]
"""Of a value head: a column."""
REWARDS = torch.tensor([1.0, 2.0])
GROUPS: Any = [{"groups": 2}, {"groups": torch.tensor([0, 0])}]


def column(x: torch.Tensor) -> torch.Tensor:
    return x[:, None]


COLUMNS: dict[str, Callable[[], Any]] = {
    "value_loss: values": lambda: of.value_loss(ROWS.take(HEAD), LINE),
    "value_loss: returns": lambda: of.value_loss(LINE, column(LINE)),
    "value_loss: old_values": lambda: of.value_loss(LINE, LINE, old_values=column(LINE), clip=0.2),
    "gae: rewards": lambda: of.gae(column(LINE), LINE, ROWS),
    "gae: values": lambda: of.gae(LINE, ROWS.take(HEAD), ROWS),
    "discounted_returns: rewards": lambda: of.discounted_returns(column(LINE), ROWS),
    "token_rewards: rewards": lambda: of.token_rewards(column(REWARDS), ROWS),
    "token_rewards: penalty": lambda: of.token_rewards(REWARDS, ROWS, penalty=column(LINE)),
    "kl_penalty: ref_logprob": lambda: of.kl_penalty(LINE, column(LINE)),
}
"""A column where a vector is wanted."""


@pytest.mark.parametrize("argument", COLUMNS)
def test_a_column_beside_a_vector(argument: str):
    """Losses of a value head's [R, 1] beside returns [R] were [R, R]."""
    with pytest.raises(ll.LogitlessError, match=f"^{argument} must be .* but is a tensor") as caught:
        COLUMNS[argument]()
    assert str(caught.value).endswith(f" Pass {argument.split()[-1]}.squeeze(-1).")


def test_a_column_that_was_squeezed():
    values = ROWS.take(HEAD).squeeze(-1).requires_grad_()
    loss, clipped = of.value_loss(values, LINE, old_values=LINE, clip=0.2)
    assert loss.shape == clipped.shape == (R,)


WRONG: dict[str, tuple[str, list[Callable[[], Any]]]] = {
    "a column first": ("kl_penalty: ref_logprob must be", [lambda: of.kl_penalty(column(LINE), LINE)]),
    "other lengths": ("kl_penalty: ref_logprob must be", [lambda: of.kl_penalty(LINE, LINE[:-1])]),
    "integers would wrap around": (
        "kl_penalty: logprob must be a tensor of floating-point numbers",
        [lambda: of.kl_penalty(torch.ones(2, dtype=torch.uint8), torch.ones(2, dtype=torch.uint8))],
    ),
    "one return": ("value_loss: returns must be", [lambda: of.value_loss(LINE, LINE[:1])]),
    "one old value": (
        "value_loss: old_values must be",
        [lambda: of.value_loss(LINE, LINE, old_values=LINE[:1], clip=0.2)],
    ),
    "no clip": (
        "value_loss: clip must be a positive number or None but is",
        [
            lambda x=x: of.value_loss(LINE, LINE, old_values=LINE, clip=x)
            for x in (math.nan, math.inf, 0, -1, "x", True)
        ],
    ),
    "one penalty": ("token_rewards: penalty must be", [lambda: of.token_rewards(REWARDS, ROWS, penalty=LINE[:1])]),
    "a penalty that is a number": (
        "token_rewards: penalty must be",
        [lambda: of.token_rewards(REWARDS, ROWS, penalty=0.1)],  # pyright: ignore[reportArgumentType]
    ),
    "eps": (
        "grpo_advantages: eps must be",
        [
            lambda x=x, y=y: of.grpo_advantages(REWARDS, **y, eps=x)
            for x in (-1, math.nan, math.inf, "x")
            for y in GROUPS
        ],
    ),
    "eps of whiten": (
        "whiten: eps must be",
        [lambda x=x: of.whiten(LINE, ROWS.counted, eps=x) for x in (-1e-9, math.nan, math.inf)],
    ),
    "length": (
        "row_weights: length must be the fixed length of sample_sum, a positive integer, but is",
        [
            lambda x=x, y=y: of.row_weights(ROWS, y, length=x)
            for x in (-1, 0, math.nan, 1.5)
            for y in ("sample_sum", "token_mean")
        ],
    ),
    "num_prompts": (
        "prompt_tokens_over: num_prompts must be",
        [lambda x=x: of.prompt_tokens_over(ROWS, torch.tensor([0, 1]), x) for x in (2.5, "x", None, 2**70, -1, True)],
    ),
    "micro-batches": ("count_over: rows must be", [lambda x=x: of.count_over(x, "token_mean") for x in ([3], 3, "x")]),
    "no rows": ("mismatch: rows must be a Rows", [lambda: of.mismatch(LINE, LINE, None)]),  # pyright: ignore[reportArgumentType]
    "a list": ("gae: rewards must be", [lambda x=x: of.gae(x, LINE, ROWS) for x in (None, LINE.tolist(), "x")]),
    "a text": ("bounded_exp: log_ratio must be", [lambda: of.bounded_exp("x")]),  # pyright: ignore[reportArgumentType]
}
"""By the kind of mistake, how the error begins and calls that make it."""


@pytest.mark.parametrize("kind", WRONG)
def test_what_was_made_something_else_of(kind: str):
    text, calls = WRONG[kind]
    for call in calls:
        with pytest.raises(ll.LogitlessError, match=f"^{re.escape(text)}"):
            call()


def test_a_list_says_what_to_pass():
    with pytest.raises(ll.LogitlessError, match=re.escape("Pass torch.tensor(rewards).")):
        of.token_rewards([1.0, 2.0], ROWS)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["logprob", "rollout_logprob"])
def test_another_device(name: str):
    given = {"logprob": LINE, "rollout_logprob": LINE} | {name: LINE.to("meta")}
    with pytest.raises(ll.LogitlessError, match=f"mismatch: {name} is on meta"):
        of.mismatch(**given, rows=ROWS)
    with pytest.raises(ll.LogitlessError, match="gae: values is on meta but the others are on cpu"):
        of.gae(LINE, LINE.to("meta"), ROWS)


def test_rewards_without_numbers():
    """Ids are sorted, which takes their numbers; a size of groups takes none."""
    dry = REWARDS.to("meta")
    assert of.grpo_advantages(dry, 2).shape == (2,)
    with pytest.raises(ll.LogitlessError, match=r"advantages: rewards must be .* on meta"):
        of.grpo_advantages(dry, torch.tensor([0, 0]))


def test_truth_values_are_counted():
    """Their sum over a sample was their mean."""
    stats = ll.TokenStats(LINE, None, None)
    given = {"old_logprob": LINE, "advantage": LINE}
    inputs = ll.Objective(policy="gspo").inputs(stats, ROWS, given, denominator=None, group=None)
    above = LINE > -1.0
    wanted = torch.tensor([float(part.sum()) for part in above.split([3, 4])])
    torch.testing.assert_close(inputs.sum_by_sample(above), wanted[ROWS.sample])
    torch.testing.assert_close(inputs.sum_by_sample(above.to(torch.int8)), wanted[ROWS.sample])
