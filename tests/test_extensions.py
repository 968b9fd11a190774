"""One of each kind of extension, added from outside the package: backend, objective, scheme, reading.

A host from outside is in ``tests/adapters/test_outside_host.py``. CONTRIBUTING lists the files of each kind.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from calls import loss_from_hidden
from close import assert_close_to_truth, assert_gradient_close_to_truth
from torch import Tensor
from truth import plain, truth

import logitless as ll
from logitless.backends import OTHERS, choose_backend, tiled
from logitless.backends.contract import Backend, Problem
from logitless.memory.ledger import NAMES
from logitless.readings.reading import Plain, Row, Upstream
from logitless.readings.table import Table
from logitless.rows.layouts import Scheme, ragged_arange
from logitless.softmax import Coefficients, transform

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
    assert choose_backend(torch.zeros(1, 1), "counting").name == "counting"
    logits, target = torch.randn(T, V, requires_grad=True), torch.randint(V, (T,))
    out = ll.logprobs(logits, target, entropy="grad", backend="counting")
    (out.logprob.sum() + out.entropy.sum()).backward()
    assert counting.calls == {"statistics": 1, "gradient": 1}
    right = truth(logits.detach().double(), torch.arange(T), target)
    assert_close_to_truth(out.logprob, right.logprob, plain(logits.detach(), torch.arange(T), target).logprob)
    hidden, weight = torch.randn(T, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    fields = {"old_logprob": "current", "advantage": torch.ones(T)}
    loss_from_hidden(hidden, weight, target, ll.Objective(), backend="counting", **fields)[0].backward()
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
    loss, metrics = loss_from_hidden(hidden, weight, target, objective, **fields)
    assert float(loss.detach()) == pytest.approx(-float(fields["advantage"].mean()), rel=1e-5)
    assert "how_far" in metrics.means
    logits = ll.Logits(hidden, weight)
    assert ll.estimate(ll.policy_loss, logits, target, objective, **fields).plan.kind == "one pass"


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
        plan = ll.explain(ll.policy_loss, ll.Logits(hidden, weight), rows, objective, memory=memory)
        assert len(plan.chunks) == chunks or objective.level == "batch"
        loss, _ = loss_from_hidden(hidden, weight, rows, objective, memory=memory, **fields, **options)
    else:
        loss, _ = objective(ll.logprobs(ll.Logits(hidden, weight), rows, entropy=objective.entropy), rows, **fields)
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


def test_a_term_that_looks_at_other_rows_beside_one_that_does_not():
    """The bonus on the entropy has the same gradient however rows are cut, and does not speak for the policy."""
    with pytest.raises(ll.LogitlessError, match="policy=by_whitening"):
        own_term_step(ll.Objective(policy=by_whitening, entropy_coef=0.1), 2)


def test_a_term_for_all_rows_goes_in_two_passes():
    objective = ll.Objective(policy=by_quantile, level="batch")
    hidden, target = torch.zeros(16, D, requires_grad=True), torch.zeros(16, dtype=torch.int64)
    shown = str(ll.explain(ll.policy_loss, ll.Logits(hidden, torch.zeros(V, D)), target, objective))
    assert 'two passes: 4 matrix products, because level="batch" asks for all rows at once.' in shown
    # Means over samples are there where the rows know their samples.
    own_term_step(ll.Objective(policy=by_mean_of_all, level="batch"), 2)


def test_a_term_that_draws_numbers_is_refused_in_chunks():
    with pytest.raises(ll.LogitlessError, match="policy=at_random"):
        own_term_step(ll.Objective(policy=at_random), 2)


def test_in_a_graph_that_can_fetch_nothing_the_loss_is_nan(monkeypatch):
    """As while a CUDA graph is captured."""
    monkeypatch.setattr("logitless.passes.one_pass._capturing", lambda x: True)
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
    seen, own = [], ll.Objective.graded

    def graded(self, x, measured):
        # Loss and metrics of all rows are measured, once more.
        if not measured:
            seen.append(len(x))
        return own(self, x, measured)

    monkeypatch.setattr(ll.Objective, "graded", graded)
    own_term_step(ll.Objective(), 2)
    assert max(seen) < 16


@pytest.mark.parametrize("name", ["weight", "complete", "log_ratio", "cut"])
def test_a_field_that_inputs_would_hide_is_refused(name):
    """A term would read what Inputs has by that name, and not the field."""
    rows = ll.Rows.packed([torch.arange(5)], [4])
    objective = ll.Objective(policy=lambda inputs: inputs.logprob, needs=(name,))
    with pytest.raises(ll.LogitlessError, match=f"terms read {name} of Inputs itself"):
        objective(ll.logprobs(torch.zeros(5, V), rows), rows, **{name: torch.ones(4)})


@pytest.mark.parametrize("name", ["clean", "ready"])
def test_a_field_of_any_other_name_is_read(name):
    rows = ll.Rows.packed([torch.arange(5)], [4])
    objective = ll.Objective(policy=lambda inputs: getattr(inputs, name), needs=(name,))
    loss, _ = ll.policy_loss(torch.zeros(5, V, requires_grad=True), rows, objective, **{name: torch.full((4,), 2.0)})
    assert loss.item() == 2.0


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


# A reading.


@dataclass(frozen=True)
class Renyi(Plain):
    """The Renyi entropy of order 2, -log of the sum of p^2: the maximum and the sum of squared exponentials.

    Attributes:
        name: the result that it takes the place of; the package has none of its own for it.
        trained: whether it has a gradient.
    """

    name: str
    trained: bool = True

    width = 2

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def differentiable(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (self.name,) if self.trained else ()

    def lines(self, backend: Backend, tile: Problem, rows: slice) -> Tensor:
        x = tile.logits if tile.index is None else tile.logits[tile.index]
        z, _ = transform(x[:, : tile.columns].to(tile.gain.dtype), tile.gain[:, None], tile.squash)
        m = z.amax(1)
        return torch.stack([m, (2 * (z - m[:, None])).exp().sum(1)])

    def merge(self, parts: Tensor) -> Tensor:
        m, squares = parts.unbind(1)
        return torch.stack([m.amax(0), (squares * (2 * (m - m.amax(0))).exp()).sum(0)])

    def results(self, lines: Tensor, row: Row) -> dict[str, Tensor]:
        m, squares = lines
        return {self.name: -(squares.log() + 2 * ((m - row.norm.reference) - row.norm.log_sum))}

    def saved(self, lines: Tensor, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"renyi": results[self.name]}

    def extend(self, coef: Coefficients, saved: Mapping[str, Tensor], row: Row, up: Upstream) -> Coefficients:
        """``-2 g p (p / c - 1)``, where c is the sum of p^2."""
        if self.name not in up.by:
            return coef
        g, p = up.by[self.name], up.logprob.exp()
        square = -2 * g * saved["renyi"].exp()
        at_target = coef.at_target + p * (square * p + 2 * g)
        return coef._replace(plain=coef.plain + 2 * g, at_target=at_target, square=square)


@pytest.fixture
def renyi(monkeypatch):
    """Puts the reading into the table of every call that asks for the result whose place it takes."""

    def install(reading: Renyi) -> None:
        monkeypatch.setattr(Table, "of", staticmethod(lambda stats, *_, **__: Table((reading,)) if stats else None))

    return install


def with_renyi(x: Tensor, target: Tensor, y: Tensor | None) -> tuple[Tensor, ...]:
    """Log-prob, Renyi entropy and KL to a teacher, 0 at rows that are left out, from whole rows of logits."""
    log_p = x.log_softmax(-1)
    own = log_p.gather(1, target.clamp_min(0)[:, None])[:, 0]
    found = (own, -(2 * log_p).exp().sum(-1).log())
    if y is not None:
        found = (*found, (y.softmax(-1) * (y.log_softmax(-1) - log_p)).sum(-1))
    return tuple(torch.where(target == -100, 0.0, z) for z in found)


PASSES = {
    "given": ("given", {}),
    "given, beside a teacher": ("given", {"memory": 3000}),
    "forward": ("forward", {"memory": 6000}),
    "frozen": ("frozen", {"memory": 6000}),
    "recompute": ("recompute", {"memory": 6000}),
    "canonical": ("recompute", {"memory": 200_000}),
    "keep": ("keep", {"memory": "1MiB"}),
    "pair": ("pair", {"memory": 20_000}),
}
"""A route, and the options that lead to it."""


@pytest.mark.parametrize("backend", ["reference", "tiled", "triton"])
@pytest.mark.parametrize("way", PASSES)
def test_a_reading(way: str, backend: str, renyi, monkeypatch):
    """Values and gradients against float64 in every pass over rows, whether they exist or are multiplied."""
    route, options = PASSES[way]
    monkeypatch.setattr("logitless.route.plan.WORK", 1 << 14)
    renyi(Renyi("collision", trained=way not in ("forward", "frozen")))
    dtype = torch.bfloat16 if way == "keep" else torch.float32
    hidden, weight = ((torch.randn(n, D) / 2).to(dtype) for n in (T, V))
    operands = [hidden @ weight.T] if route == "given" else [hidden, weight]
    target, other = torch.randint(V, (T,)), (torch.randn(T, 5), torch.randn(V, 5))
    target[3] = -100
    needs = {"forward": (), "frozen": (0,)}.get(way, (0, 1))
    asked = {"stats": ("collision",), "backend": backend, **options}
    taught = way == "pair" or "teacher" in way
    if taught:
        asked |= {"teacher": ll.Logits(*other), "divergence": "forward_kl"}
    leaves = [x.detach().requires_grad_(i in needs) for i, x in enumerate(operands)]
    bits = "canonical" if way == "canonical" else "fast"
    logits = leaves[0] if route == "given" else ll.Logits(*leaves, bits=bits)
    plan = ll.explain(ll.logprobs, logits, target, **asked)
    assert plan.kind == route
    assert len(plan.chunks) > 1 if taught else route == "given" or plan.forward.columns < V or bits == "canonical"
    out = ll.logprobs(logits, target, **asked)
    ours = [out.logprob, out.collision, *([out.divergence] if taught else [])]
    assert out.collision.requires_grad == (way not in ("forward", "frozen"))
    found = {}
    for wide in (torch.float64, torch.float32):
        copies = [x.detach().to(wide).requires_grad_(x.requires_grad) for x in leaves]
        x, y = copies[0] if route == "given" else copies[0] @ copies[1].T, None
        y = other[0].to(wide) @ other[1].to(wide).T if taught else None
        found[wide] = copies, with_renyi(x, target, y)
    for mine, *both in zip(ours, *(results for _, results in found.values()), strict=True):
        assert_close_to_truth(mine.detach(), *(x.detach() for x in both))
    if not needs:
        return
    steps = torch.linspace(-1, 2, T)
    gradients = []
    for copies, results in ((leaves, ours), *found.values()):
        graded = [x for x in results if x.requires_grad][: 1 if way == "frozen" else None]
        trained = [x for x in copies if x.requires_grad]
        gradients.append(torch.autograd.grad(graded, trained, [steps.to(x) for x in graded]))
    for mine, right, theirs in zip(*gradients, strict=True):
        if way == "keep":
            # Three roundings to 16 bits on the way: the exponentials, dZ and the gradient.
            assert float((mine.double() - right).norm() / right.norm()) < 3 * 2**-9
        else:
            assert_gradient_close_to_truth(mine, right, theirs)


@pytest.mark.parametrize("source", ["one pass", "two passes", "logits"])
def test_a_reading_in_a_loss(source: str, renyi):
    """In the place of the mean logit, which label smoothing has a term on."""
    renyi(Renyi("mean_logit"))
    objective = ll.Objective.recipe("sft", policy_options={"label_smoothing": 0.1})
    hidden, weight, target = torch.randn(T, D), torch.randn(V, D), torch.randint(V, (T,))
    target[3] = -100
    found = []
    for dtype in (torch.float32, torch.float64, torch.float32):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        if found:
            x = leaves[0] @ leaves[1].T
            own, entropy = with_renyi(x, target, None)
            log_z = torch.where(target == -100, 0.0, x.logsumexp(-1))
            loss = -(0.9 * own + 0.1 * (entropy - log_z)).sum() / (T - 1)
        else:
            logits = ll.Logits(*leaves, bits="canonical" if source == "two passes" else "fast")
            logits = leaves[0] @ leaves[1].T if source == "logits" else logits
            if source != "logits":
                plan = ll.explain(ll.policy_loss, logits, target, objective, memory=3000)
                assert plan.kind == source
                assert source == "two passes" or len(plan.chunks) > 1
            # The tiles of batch invariance are of one size, which a small budget does not hold.
            memory = "1MiB" if source == "two passes" else 3000
            loss, _ = ll.policy_loss(logits, target, objective, memory=memory)
        found.append((loss.detach()[None], *torch.autograd.grad(loss, leaves)))
    assert_close_to_truth(*(x[0] for x in found))
    for each in zip(*(x[1:] for x in found), strict=True):
        assert_gradient_close_to_truth(*each)


def read_shard(rank: int, world: int, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    start, stop = ((0, 40), (40, V))[rank]
    own = Table.of
    Table.of = staticmethod(lambda stats, *_, **__: Table((Renyi("collision"),)) if stats else None)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight[start:stop])]
    logits = ll.Logits(*leaves, shard=ll.VocabShard(start, stop, torch.distributed.group.WORLD))
    out = ll.logprobs(logits, target, stats=("collision",), memory=6000)
    Table.of = staticmethod(own)
    return out.collision.detach(), *torch.autograd.grad(out.collision.sum(), leaves)


def test_a_reading_over_shards(ranks):
    hidden, weight, target = torch.randn(T, D) / 2, torch.randn(V, D) / 2, torch.randint(V, (T,))
    here, there = ranks(read_shard, 2, hidden, weight, target)
    right = []
    for dtype in (torch.float64, torch.float32):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        entropy = with_renyi(leaves[0] @ leaves[1].T, target, None)[1]
        right.append((entropy.detach(), *torch.autograd.grad(entropy.sum(), leaves)))
    assert torch.equal(here[0], there[0])
    assert_close_to_truth(here[0], right[0][0], right[1][0])
    assert_gradient_close_to_truth(here[1], right[0][1], right[1][1])
    assert_gradient_close_to_truth(torch.cat([here[2], there[2]]), right[0][2], right[1][2])


# What the ledger calls the allocations of a function.


@pytest.mark.parametrize("key", [key for key in NAMES if key])
def test_names_of_the_ledger_name_something(key: str):
    module, _, function = key.partition(":")
    __import__(f"logitless.{module}")
    found = ll
    for name in [*module.split("."), *filter(None, function.split("."))]:
        found = getattr(found, name)


def test_a_partial_is_described_by_what_it_calls():
    """Ranks compare the text: an address would differ between processes."""

    def term(inputs, strength, *, bound):
        return -strength * inputs.logprob.clamp(min=bound)

    weights = torch.arange(3.0)
    made = ll.Objective(policy=functools.partial(term, 2.0, bound=weights))
    text = made.described()
    assert "0x" not in text
    assert "0x" not in repr(made)
    assert text != ll.Objective(policy=functools.partial(term, 3.0, bound=weights)).described()
    assert text != ll.Objective(policy=functools.partial(term, 2.0, bound=weights + 1)).described()
    assert text == ll.Objective(policy=functools.partial(term, 2.0, bound=weights.clone())).described()
