"""Terms of the caller's own that differ between ranks in a number they were made with: all raise the same error."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import loss_from_hidden
from torch import nn

import logitless as ll
from logitless.objectives.stated import ROOM, stated

V, D, R = 20, 4, 6


class Term:
    """A term as an object, which has a rank of its own besides."""

    __slots__ = ("__dict__", "slot")

    def __init__(self, scale: Any, rank: int = 0, slot: float = 1.0) -> None:
        self.config = SimpleNamespace(scale=scale, local_rank=rank)
        self.rank, self.slot = rank, slot

    def __call__(self, inputs: Any) -> torch.Tensor:
        return self.weighed(inputs)

    def weighed(self, inputs: Any) -> torch.Tensor:
        return -self._scale * self.slot * inputs.advantage * inputs.logprob

    @property
    def _scale(self) -> Any:
        return self.config.scale

    @classmethod
    def of_class(cls, inputs: Any, scale: float = 1.0) -> torch.Tensor:
        return -scale * inputs.advantage * inputs.logprob


class Named(Term):
    """A term that looks its number up by its name, in a method that it adds to."""

    def weighed(self, inputs: Any) -> torch.Tensor:
        return getattr(self, "more") * super().weighed(inputs)  # noqa: B009


class Layer(nn.Module):
    """A term as a module, with a weight, a buffer and a module inside."""

    def __init__(self, weight: float = 1.0, buffer: float = 1.0, inner: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight), requires_grad=False)
        self.register_buffer("factor", torch.tensor(buffer))
        self.inner = nn.Sequential(nn.Linear(1, 1, bias=False))
        nn.init.constant_(self.inner[0].weight, inner).requires_grad_(False)

    def forward(self, inputs: Any) -> torch.Tensor:
        scale = self.inner((self.weight * self.factor)[None])[0]
        return -scale * inputs.advantage * inputs.logprob


def closure(scale: Any) -> Callable[..., torch.Tensor]:
    def term(inputs: Any) -> torch.Tensor:
        return -scale * inputs.advantage * inputs.logprob

    return term


def around(inner: Any) -> Callable[..., torch.Tensor]:
    @functools.wraps(inner)
    def term(inputs: Any) -> torch.Tensor:
        return inner(inputs)

    return term


def default(scale: Any) -> Callable[..., torch.Tensor]:
    def term(inputs: Any, a: float = scale) -> torch.Tensor:
        return -a * inputs.advantage * inputs.logprob

    return term


def keyword_default(scale: Any) -> Callable[..., torch.Tensor]:
    def term(inputs: Any, *, a: float = scale) -> torch.Tensor:
        return -a * inputs.advantage * inputs.logprob

    return term


def own_attribute(scale: Any) -> Callable[..., torch.Tensor]:
    def term(inputs: Any) -> torch.Tensor:
        return -term.scale * inputs.advantage * inputs.logprob

    term.scale = scale
    return term


def named(more: float) -> Term:
    made = Named(1.0)
    made.more = more
    return made


MAKERS: dict[str, Callable[[float], Any]] = {
    "an object": Term,
    "a slot of an object": lambda x: Term(1.0, slot=x),
    "an attribute by its name": named,
    "a tensor of an object": lambda x: Term(torch.full((R,), x)),
    "a bound method": lambda x: Term(x).weighed,
    "a bound method that calls another": lambda x: Term(x).__call__,
    "a closure": closure,
    "a closure over a tensor": lambda x: closure(torch.full((R,), x)),
    "a closure over an object": lambda x: around(Term(x)),
    "a default": default,
    "a default by keyword": keyword_default,
    "an attribute of a function": own_attribute,
    "a partial": lambda x: functools.partial(Term.of_class, scale=x),
    "a partial of a closure": lambda x: functools.partial(closure(x)),
    "lambdas": lambda x: (lambda i: -1 * i.logprob * i.advantage, lambda i: -2 * i.logprob * i.advantage)[int(x) - 1],
    "a parameter": Layer,
    "a buffer": lambda x: Layer(buffer=x),
    "a module inside": lambda x: Layer(inner=x),
}
"""Terms with a number in them, by where it is."""


def losses(rank: int, world: int, same: bool) -> dict[str, str]:
    shard = ll.VocabShard(rank * 10, (rank + 1) * 10, dist.group.WORLD, check_calls=True)
    found = {}
    for name, make in MAKERS.items():
        hidden, weight = torch.zeros(R, D, requires_grad=True), torch.zeros(V // 2, D)
        objective = ll.Objective(policy=make(1.0 if same else 1.0 + rank), needs=("advantage",))
        try:
            loss_from_hidden(hidden, weight, torch.arange(R), objective, shard=shard, advantage=torch.ones(R))
            found[name] = "no error"
        except ll.LogitlessError as error:
            found[name] = str(error)
    return found


def test_terms_that_differ_in_a_number(ranks):
    """Each rank computed a loss of its own: 0.73 and 1.46, with no error."""
    ours, theirs = ranks(losses, 2, False, timeout=60)
    assert ours == theirs
    for name, text in ours.items():
        assert "policy_loss: ranks of one vocabulary group disagree about the objective" in text, (name, text)
        assert "0x" not in text


def test_terms_that_do_not_differ(ranks):
    """Each process makes its own, at addresses of its own."""
    for found in ranks(losses, 2, True, timeout=60):
        assert set(found.values()) == {"no error"}, found


def over_samples(rank: int, world: int) -> list[str]:
    rows = ll.Rows.packed([[1, 2, 3, 4, 5, 6, 7, 8]], [4], cp=ll.Zigzag(rank, world))
    stats = ll.TokenStats(torch.zeros(len(rows), requires_grad=True), None, None)
    found = []
    for scale in (1.0, 1.0 + rank):
        objective = ll.Objective(policy=Term(scale, rank), needs=("advantage",), correction=None)
        try:
            given = {"advantage": torch.ones(len(rows)), "group": dist.group.WORLD, "check_group": True}
            objective(stats, rows, **given)
            found.append("no error")
        except ll.LogitlessError as error:
            found.append(str(error))
    return found


def test_terms_of_ranks_that_share_samples(ranks):
    """The rank that an object has besides, which its term does not read, is its own business."""
    ours, theirs = ranks(over_samples, 2, timeout=60)
    assert ours == theirs
    assert ours[0] == "no error"
    assert "Objective: ranks of one sequence group disagree about the objective" in ours[1]
    assert "scale=1.0" in ours[1]
    assert "scale=2.0" in ours[1]


# What is said, in this process.


@pytest.mark.parametrize("name", MAKERS)
def test_numbers_are_stated(name: str):
    one, again, other = (stated(MAKERS[name](x)) for x in (1.0, 1.0, 2.0))
    assert one == again != other
    assert "0x" not in one


def test_what_is_stated():
    assert stated(Term(1.5, rank=3)) == "Term(config=SimpleNamespace(scale=1.5), slot=1.0)"
    method = stated(Term(1.5, rank=3).weighed)
    assert re.fullmatch(r"Term.weighed#[0-9a-f]{8}\(config=SimpleNamespace\(scale=1.5\), slot=1.0\)", method)
    assert stated({"b": {"y", "x"}, "a": (1, None)}) == "{'a': (1, None), 'b': {'x', 'y'}}"
    assert stated(torch.device("cuda:1")) == stated(torch.device("cuda:0")) == "cuda"
    assert stated(torch.zeros(2, device="meta")) == "a tensor [2] torch.float32 on meta"
    assert stated(torch.ones(2, dtype=torch.complex128)) != stated(torch.zeros(2, dtype=torch.complex128))
    assert stated(torch.compile(closure(1.0))) == stated(closure(1.0))
    assert stated(torch.exp) == "_VariableFunctionsClass.exp"
    assert stated(torch.ops.aten.exp) == "<OpOverloadPacket(op='aten.exp')>"
    assert stated(torch.tensor(2.0).mul) != stated(torch.tensor(3.0).mul)
    assert stated(Term.of_class) != stated(Named.of_class)
    assert stated(object()) == "object"


def test_what_goes_round_in_circles_or_on_and_on_ends():
    around: list[Any] = [1]
    around.append(around)
    assert stated(around) == "(1, list)"
    deep: Any = 1.0
    for _ in range(50):
        deep = [deep]
    assert stated(deep) == "(((((((list)))))))"
    many, other = list(range(9999)), [*range(9998), 0]
    assert stated(many) != stated(other)
    assert len(stated(many)) < ROOM


def test_a_variable_without_a_value_yet():
    def term(inputs: Any) -> Any:
        return later * inputs

    assert "later=None" in stated(term)
    later = 2.0
    assert "later=2.0" in stated(term)
