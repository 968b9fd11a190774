"""One of each kind of extension, added from outside the package: backend, objective, scheme, statistic.

A host from outside is in ``tests/adapters/test_outside_host.py``. CONTRIBUTING lists the files of each kind.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from close import assert_close_to_truth
from logitless.from_hidden.plan import choose_plan
from logitless.from_hidden.projection import Projection
from logitless.from_hidden.statistics import row_statistics
from logitless.results import target_column, whole_vocabulary
from torch import Tensor
from truth import plain, truth

import logitless as ll
from logitless.backends import OTHERS, tiled
from logitless.backends.contract import Problem
from logitless.call import Options, resolve_hidden
from logitless.memory.ledger import NAMES
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


def by_quantile(inputs):
    """The rows of high entropy alone."""
    return -inputs.advantage * inputs.log_ratio.exp() * (inputs.entropy >= inputs.entropy.quantile(0.8))


def by_whitening(inputs):
    """Sums to 0 over any rows: on-policy, the loss does not tell what the advantages were whitened over."""
    advantage = (inputs.advantage - inputs.advantage.mean()) / (inputs.advantage.std(correction=0) + 1e-3)
    return -advantage * inputs.log_ratio.exp()


def by_mean_of_all(inputs):
    """A mean over each sample, against one over all of them."""
    return inputs.mean_by_sample(inputs.logprob) * inputs.logprob.mean()


def weights_by_all(inputs):
    return inputs.log_ratio.detach().exp() / inputs.advantage.abs().max()


def kl_by_all(logprob, ref_logprob):
    return (logprob - ref_logprob) / (1 + ref_logprob.abs().max())


def at_random(inputs):
    return inputs.logprob * torch.rand_like(inputs.logprob)


OTHER_ROWS = {
    "policy=by_quantile": {"policy": by_quantile},
    "policy=by_whitening": {"policy": by_whitening, "level": "token"},
    "policy=by_mean_of_all": {"policy": by_mean_of_all, "level": "sequence"},
    "correction=weights_by_all": {"correction": weights_by_all},
    "kl=kl_by_all": {"kl": kl_by_all, "kl_coef": 0.1},
    "policy=functools.partial(by_quantile)": {"policy": functools.partial(by_quantile)},
}


def own_term_step(objective, chunks: int, dtype=torch.float64, **options):
    """Loss and gradients of 16 rows in so many chunks, one or two; with 0, by way of log-probs."""
    torch.manual_seed(3)
    rows = ll.Rows.packed([torch.randint(V, (9,)) for _ in range(2)], [8, 8])
    hidden, weight = (torch.randn(n, D, dtype=dtype).mul(0.5).requires_grad_() for n in (18, V))
    vectors = {name: torch.randn(16, dtype=dtype) for name in ("advantage", "ref_logprob", "rollout_logprob")}
    fields = {"old_logprob": "current", **vectors}
    if chunks:
        memory = max(4, dtype.itemsize) << 11 if chunks > 1 else 1 << 20
        plan = ll.explain(hidden, weight, rows, objective=objective, memory=memory)
        assert len(plan.chunks) == chunks or objective.level == "batch"
        loss, _ = ll.linear_policy_loss(hidden, weight, rows, objective, memory=memory, **fields, **options)
    else:
        loss, _ = objective(ll.linear_logprobs(hidden, weight, rows, entropy=objective.entropy), rows, **fields)
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("name", OTHER_ROWS)
def test_a_term_that_looks_at_other_rows(name: str):
    """In one chunk it is right. In several it would get another gradient in each, so it is refused by name."""
    objective = ll.Objective(**OTHER_ROWS[name])
    wanted = own_term_step(objective, 0)
    torch.testing.assert_close(own_term_step(objective, 1), wanted, rtol=1e-10, atol=1e-12)
    with pytest.raises(ll.LogitlessError, match=re.escape(name)) as refused:
        own_term_step(objective, 2)
    assert 'level="batch"' in str(refused.value)
    whole = replace(objective, level="batch")
    torch.testing.assert_close(own_term_step(whole, 2), wanted, rtol=1e-10, atol=1e-12)


def test_a_term_for_all_rows_goes_in_two_passes():
    objective = ll.Objective(policy=by_quantile, level="batch")
    hidden, target = torch.zeros(16, D, requires_grad=True), torch.zeros(16, dtype=torch.int64)
    shown = str(ll.explain(hidden, torch.zeros(V, D), target, objective=objective))
    assert 'two passes: 4 matrix products, because level="batch" asks for all rows at once.' in shown
    # Means over samples are there where the rows know their samples.
    own_term_step(ll.Objective(policy=by_mean_of_all, level="batch"), 2)


def test_a_term_that_draws_numbers_is_refused_in_chunks():
    with pytest.raises(ll.LogitlessError, match="policy=at_random"):
        own_term_step(ll.Objective(policy=at_random), 2)


def test_in_a_graph_that_can_fetch_nothing_the_loss_is_nan(monkeypatch):
    """As while a CUDA graph is captured."""
    monkeypatch.setattr("logitless.policy_loss.one_pass._capturing", lambda x: True)
    assert own_term_step(ll.Objective(policy=by_whitening), 2)[0].isnan()
    assert own_term_step(ll.Objective(policy=steep), 2)[0].isfinite()


def test_the_refusal_says_what_was_written():
    buffer = torch.zeros(V, D)
    with pytest.raises(ll.LogitlessError, match="policy=by_whitening") as refused:
        own_term_step(ll.Objective(policy=by_whitening), 2, dtype=torch.float32, weight_grad=buffer)
    assert "weight_grad holds a part" in refused.value.__notes__[0]


def steep(inputs):
    """Each row by itself, with large summands that all but cancel."""
    x = 1e4 * inputs.log_ratio
    return (x + 1).exp() - (x + 1).exp() * (1 - 1e-5 * inputs.advantage)


def per_sample(inputs):
    mean = inputs.mean_by_sample(inputs.logprob)
    deviation = inputs.mean_by_sample((inputs.logprob - mean).square()).sqrt()
    return (inputs.logprob - mean) / deviation * inputs.advantage


def undefined(inputs):
    """NaN and inf at rows of their own."""
    return inputs.logprob * (inputs.advantage / inputs.advantage.clamp_min(0)).log()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "settings",
    [{"policy": steep}, {"policy": per_sample, "level": "sequence"}, {"policy": undefined}],
    ids=["steep", "per_sample", "undefined"],
)
def test_rounding_is_not_taken_for_other_rows(settings, dtype: torch.dtype):
    objective = ll.Objective(**settings, kl="k3", kl_coef=0.1, entropy_coef=0.01)
    own_term_step(objective, 2, dtype=dtype)


def test_terms_by_name_are_not_evaluated_again(monkeypatch):
    seen, own = [], ll.Objective.loss
    monkeypatch.setattr(ll.Objective, "loss", lambda self, x: seen.append(len(x)) or own(self, x))
    own_term_step(ll.Objective(), 2)
    assert max(seen) < 16


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
