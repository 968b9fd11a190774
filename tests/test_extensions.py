"""One of each kind of extension, added from outside the package: backend, objective, scheme, statistic.

A host from outside is in ``tests/adapters/test_outside_host.py``. CONTRIBUTING lists the files of each kind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from close import assert_close_to_truth
from torch import Tensor
from truth import plain, truth

import logitless as ll
from logitless.backends import OTHERS, tiled
from logitless.backends.contract import Problem
from logitless.call import Options, resolve_hidden
from logitless.from_hidden.plan import choose_plan
from logitless.from_hidden.projection import Projection
from logitless.from_hidden.statistics import row_statistics
from logitless.memory.ledger import NAMES
from logitless.results import target_column, whole_vocabulary
from logitless.rows.layouts import Scheme, ragged_arange
from logitless.softmax import FURTHER, Statistic, Sum, merge

T, V, D = 23, 101, 17


# A backend.


@pytest.fixture
def counting(monkeypatch) -> SimpleNamespace:
    """The tiled backend, which counts what is asked of it."""
    calls: dict[str, int] = {}

    def counted(name: str):
        def run(*args, **kwargs):
            calls[name] = calls.get(name, 0) + 1
            return getattr(tiled, name)(*args, **kwargs)

        return run

    names = ("statistics", "gradient", "gradient_over", "exponentials", "gradient_from", "rescale", "mix")
    backend = SimpleNamespace(calls=calls, **{name: counted(name) for name in names})
    monkeypatch.setitem(OTHERS, "counting", backend)
    return backend


def test_a_backend(counting):
    assert ll.choose_backend(torch.zeros(1, 1), "counting").name == "counting"
    logits, target = torch.randn(T, V, requires_grad=True), torch.randint(V, (T,))
    out = ll.logprobs(logits, target, entropy="grad", backend="counting")
    (out.logprob.sum() + out.entropy.sum()).backward()
    assert counting.calls == {"statistics": 1, "gradient": 1}
    right = truth(logits.detach().double(), torch.arange(T), target)
    assert_close_to_truth(out.logprob, right.logprob, plain(logits.detach(), torch.arange(T), target).logprob)
    hidden, weight = torch.randn(T, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    fields = {"old_logprob": "current", "advantage": torch.ones(T)}
    ll.linear_policy_loss(hidden, weight, target, ll.Objective(), backend="counting", **fields)[0].backward()
    assert counting.calls["gradient_over"] > 0
    with pytest.raises(ll.LogitlessError, match="'counting'"):
        ll.logprobs(logits, target, backend="none such")


# An objective.


def test_an_objective():
    """A function of ``[C]`` vectors, by which every path and ``estimate`` go at once."""

    def squared(inputs, power: float = 2.0):
        return -inputs.advantage * inputs.log_ratio.exp() ** power, {"how_far": inputs.log_ratio.abs()}

    objective = ll.Objective(policy=squared, policy_options={"power": 3.0})
    hidden, weight = torch.randn(T, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    target, fields = torch.randint(V, (T,)), {"old_logprob": "current", "advantage": torch.randn(T)}
    loss, metrics = ll.linear_policy_loss(hidden, weight, target, objective, **fields)
    assert float(loss.detach()) == pytest.approx(-float(fields["advantage"].mean()), rel=1e-5)
    assert "how_far" in metrics.means
    sizes = {"tokens": T, "vocab": V, "hidden": D, "dtype": "float32", "device": "cpu"}
    assert ll.estimate("linear_policy_loss", **sizes, objective=objective).plan.kind == "one pass"


# A context-parallel scheme.


@dataclass(frozen=True)
class Striped:
    """Rank r holds every ``size``-th token of each sample, from its r-th on."""

    rank: int
    size: int
    by_sample = True

    @property
    def multiple(self) -> int:
        return self.size

    def tokens(self, spans: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        sample, place = ragged_arange(spans // self.size)
        return sample, place * self.size + self.rank


@pytest.mark.parametrize("padded", [False, True])
def test_a_scheme(padded: bool):
    assert isinstance(Striped(0, 2), Scheme)
    lengths, responses = [7, 4, 10], [3, 2, 6]
    samples = [torch.randint(V, (n,)) for n in lengths]
    make = ll.Rows.padded if padded else ll.Rows.packed
    parts = [make(samples, responses, cp=Striped(rank, 3)) for rank in range(3)]
    scored = sorted(
        (int(s), int(p), int(t))
        for rows in parts
        for s, p, t in zip(rows.sample, rows.position, rows.target, strict=True)
    )
    wanted = [(s, p, int(samples[s][lengths[s] - r + p])) for s, r in enumerate(responses) for p in range(r)]
    assert scored == sorted(wanted)
    with pytest.raises(ll.LogitlessError, match="A scheme of your own needs rank, size, multiple, by_sample, tokens"):
        ll.Rows.packed(samples, responses, cp=SimpleNamespace(rank=0, size=2))


# A statistic.


@pytest.fixture
def squares(monkeypatch) -> str:
    """The sum of e^2: squared, its factor moves it with the reference."""
    monkeypatch.setitem(FURTHER, "squares", Sum(lambda e, d: e * e, lambda x, shift, factor, part: factor**2 * x))
    return "squares"


def collision(lines: Tensor) -> Tensor:
    """Sum of p^2 of each row."""
    row = Statistic.of(lines)
    return row.further[0] / row.s**2


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_a_statistic_of_logits(squares: str, backend: str):
    """In tiles of a few columns and merged over parts of any width, as over ranks."""
    logits = 5 * torch.randn(T, V)
    gain, column = torch.ones(T), torch.zeros(T, dtype=torch.int64)
    wanted = torch.softmax(logits.double(), -1).square().sum(-1)

    def part(first: int, stop: int) -> Tensor:
        some = logits[:, first:stop]
        problem = Problem(some, None, column, gain, 0.0, stop - first, True, 500, first, further=(squares,))
        return ll.backends.load(backend).statistics(problem)

    whole = part(0, V)
    torch.testing.assert_close(collision(whole).double(), wanted, rtol=1e-5, atol=0.0)
    merged = merge(torch.stack([part(0, 40), part(40, 41), part(41, V)]), (squares,))
    torch.testing.assert_close(collision(merged).double(), wanted, rtol=1e-5, atol=0.0)
    assert torch.equal(whole_vocabulary(whole, None, None, (squares,))[0], whole)


def test_a_statistic_from_hidden_states(squares: str):
    hidden, weight, target = torch.randn(T, D), torch.randn(V, D), torch.randint(V, (T,))
    call = replace(resolve_hidden(hidden, weight, target, Options(memory=4000)), further=(squares,))
    p = Projection.of(hidden, weight, None, target_column(target, call.start, call.columns), call)
    tiles = choose_plan(call, (False, False, False)).forward
    assert tiles.columns < V
    lines, _ = row_statistics(p, tiles)
    wanted = torch.softmax((hidden.double() @ weight.double().T), -1).square().sum(-1)
    torch.testing.assert_close(collision(lines).double(), wanted, rtol=1e-5, atol=0.0)


def test_kernels_say_what_they_do_not_know(squares: str):
    logits, column = torch.randn(2, 8), torch.zeros(2, dtype=torch.int64)
    problem = Problem(logits, None, column, torch.ones(2), 0.0, 8, True, 500, further=(squares,))
    with pytest.raises(ll.LogitlessError, match="know of no further sums such as 'squares'"):
        ll.backends.load("triton").statistics(problem)


# What the ledger calls the allocations of a function.


@pytest.mark.parametrize("key", [key for key in NAMES if key])
def test_names_of_the_ledger_name_something(key: str):
    module, _, function = key.partition(":")
    __import__(f"logitless.{module}")
    found = ll
    for name in [*module.split("."), *filter(None, function.split("."))]:
        found = getattr(found, name)
