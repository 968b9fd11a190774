"""``policy_loss`` of logits that exist: a tensor, one that may be overwritten, and a shard over real processes.

The loss and the gradient of the logits must be those of float64, of ``objective(logprobs(...))``, and, carried on to
hidden states and weight, those of ``policy_loss(Logits(hidden, weight), ...)``, which never has the logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from close import assert_close_to_truth, assert_gradient_close_to_truth
from objective_truth import Formula, tell
from shared.errors import raises
from shared.linear import BACKENDS, DTYPES, ragged
from shared.objective_terms import POLICIES, formula_of
from shared.policy_loss import KL, PPO, PPO_FORMULA, VOCAB, Problem, make
from torch import Tensor
from truth import plain, truth

import logitless as ll

pytestmark = pytest.mark.usefixtures("one_thread")

BOUNDS = [(0, 60), (60, VOCAB)]
UPSTREAM = 1.7

OBJECTIVES: dict[str, tuple[dict[str, Any], Formula]] = {
    "ppo": (PPO, PPO_FORMULA),
    "no entropy": ({"clip": (0.2, 0.28), **KL}, replace(PPO_FORMULA, entropy_coef=0.0)),
    "gspo": (POLICIES["gspo"][0], formula_of("gspo")),
}


class Given(NamedTuple):
    """Loss, the gradient of the logits, metrics as numbers and the rows' results."""

    loss: Tensor
    gradient: Tensor
    metrics: dict[str, float]
    stats: ll.TokenStats | None = None


def logits_of(problem: Problem, dtype: torch.dtype) -> Tensor:
    return problem.operands.logits().detach().to(dtype)


def given(problem: Problem, objective: ll.Objective, x: Tensor, overwrite: bool = False, **options: Any) -> Given:
    """In one call: of a tensor, or of one that may be overwritten."""
    rows, leaf = problem.batch.rows(), x.clone().requires_grad_()
    options = {"head": problem.head_of(rows), **problem.fields(rows), **options}
    logits = ll.Logits.given(leaf * 1.0, overwrite=True) if overwrite else leaf
    loss, metrics, stats = ll.policy_loss(logits, rows, objective, return_stats=True, **options)
    (gradient,) = torch.autograd.grad(UPSTREAM * loss, leaf)
    return Given(loss.detach(), gradient, metrics.compute(), stats)


def composed(problem: Problem, objective: ll.Objective, x: Tensor, **options: Any) -> Given:
    """In two calls."""
    rows, leaf = problem.batch.rows(), x.clone().requires_grad_()
    options = {"head": problem.head_of(rows), "stats": objective.stats, **options}
    stats = ll.logprobs(leaf, rows, entropy=objective.entropy, **options)
    loss, metrics = objective(stats, rows, **problem.fields(rows))
    (gradient,) = torch.autograd.grad(UPSTREAM * loss, leaf)
    return Given(loss.detach(), gradient, metrics.compute(), stats)


def told(problem: Problem, formula: Formula, x: Tensor, exact: bool) -> Given:
    """The truth, or plain torch's version of it."""
    leaf = (x.double() if exact else x.clone()).requires_grad_()
    scores = (truth if exact else plain)(leaf, problem.index, problem.target, **problem.head)
    names = ("logprob", "entropy")
    values = {name: list(getattr(scores, name).detach().split(problem.batch.lengths)) for name in names}
    batch = replace(problem.batch, values={**problem.batch.values, **values})
    answer = tell(batch, formula, torch.float64 if exact or x.dtype == torch.float64 else torch.float32)
    chain = [UPSTREAM * answer.logprob, UPSTREAM * answer.entropy]
    (gradient,) = torch.autograd.grad([scores.logprob, scores.entropy], leaf, chain)
    return Given(answer.loss, gradient, {})


def assert_right(problem: Problem, formula: Formula, x: Tensor, ours: Given) -> None:
    exact, usual = (told(problem, formula, x, exact) for exact in (True, False))
    assert_close_to_truth(ours.loss, exact.loss, usual.loss, "loss")
    assert ours.gradient.dtype == x.dtype
    assert_gradient_close_to_truth(ours.gradient, exact.gradient, usual.gradient)


def assert_same_bits(ours: Given, other: Given) -> None:
    assert torch.equal(ours.loss, other.loss)
    assert torch.equal(ours.gradient, other.gradient)
    assert ours.metrics == pytest.approx(other.metrics, rel=0, abs=0, nan_ok=True)


# A tensor, and one that may be overwritten.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_float64_and_two_calls(backend: str, name: str, dtype: torch.dtype):
    if backend == "triton" and (dtype == torch.float64 or name == "gspo"):
        pytest.skip("the kernels take no float64, and gspo is the same kernels")
    sizes = {"lengths": [5, 0, 2, 8, 1, 3], "vocab": 63} if backend == "triton" else {}
    temperature = torch.linspace(0.6, 1.7, 19 if sizes else 29)
    problem = make(**sizes, head={"temperature": temperature, "softcap": 20.0})
    (options, formula), x = OBJECTIVES[name], logits_of(problem, dtype)
    objective = ll.Objective(**options)
    ours = given(problem, objective, x, backend=backend)
    assert_right(problem, formula, x, ours)
    assert_same_bits(ours, composed(problem, objective, x, backend=backend))
    assert_same_bits(given(problem, objective, x, overwrite=True, backend=backend), ours)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradients_of_hidden_states_that_never_became_logits(name: str, overwrite: bool):
    problem, (options, _) = make(torch.float64), OBJECTIVES[name]
    rows, objective = problem.batch.rows(), ll.Objective(**options)
    runs = []
    for exist in (True, False):
        leaf = problem.operands.leaves()
        logits: Any = ll.Logits(leaf.hidden, leaf.weight, bias=leaf.bias)
        if exist:
            logits = ll.Logits.given(torch.nn.functional.linear(*leaf), overwrite=overwrite)
        loss, metrics, stats = ll.policy_loss(logits, rows, objective, return_stats=True, **problem.fields(rows))
        runs.append((loss.detach(), stats, metrics.compute(), torch.autograd.grad(UPSTREAM * loss, leaf)))
    (loss, stats, numbers, gradients), (other_loss, other_stats, other_numbers, other_gradients) = runs
    torch.testing.assert_close(loss, other_loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, other_gradients, rtol=1e-10, atol=1e-12)
    assert numbers == pytest.approx(other_numbers, rel=1e-10, abs=1e-10, nan_ok=True)
    for field in ("logprob", "entropy", "log_z"):
        mine, theirs = (getattr(x, field) for x in (stats, other_stats))
        assert not mine.requires_grad
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_overwriting_writes_the_gradient_over_the_logits():
    problem, objective = make(), ll.Objective(**PPO)
    rows, leaf = problem.batch.rows(), logits_of(problem, torch.float32).requires_grad_()
    logits, seen = leaf * 1.0, []
    logits.register_hook(seen.append)
    fields = problem.fields(rows)
    loss, _ = ll.policy_loss(ll.Logits.given(logits, overwrite=True), rows, objective, **fields)
    loss.backward(retain_graph=True)
    assert seen[0].data_ptr() == logits.data_ptr()
    assert torch.equal(leaf.grad, logits)
    with raises("policy_loss: second backward through ..."):
        loss.backward()
    with raises("policy_loss: overwrite=True, but the logits are a leaf, ..."):
        ll.policy_loss(ll.Logits.given(leaf, overwrite=True), rows, objective, **fields)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("memory", [2000, None])
def test_kept_ids_smoothing_and_a_teacher(memory: int | None, overwrite: bool):
    """What a loss reads besides the softmax."""
    problem = make(torch.float64)
    x, teacher = logits_of(problem, torch.float64), torch.randn(47, VOCAB, dtype=torch.float64)
    kept = ragged([torch.randint(VOCAB, (i % 5,)).tolist() for i in range(29)])
    smoothed = ll.Objective(policy="cross_entropy", policy_options={"label_smoothing": 0.2}, z_coef=0.05)
    distilled = ll.Objective(**PPO, divergence="forward_kl", divergence_coef=0.7)
    for objective, options in (
        (ll.Objective(**PPO), {"kept": kept}),
        (ll.Objective(**PPO), {"kept": kept.over("support")}),
        (smoothed, {}),
        (distilled, {"teacher": teacher}),
        (distilled, {"teacher": teacher, "kept": kept}),
    ):
        ours = given(problem, objective, x, overwrite, memory=memory, **options)
        more = {"divergence": "forward_kl"} if "teacher" in options else {}
        other = composed(problem, objective, x, **options, **more)
        torch.testing.assert_close(ours[:2], other[:2], rtol=1e-10, atol=1e-12)
        assert ours.metrics == pytest.approx(other.metrics, rel=1e-10, abs=1e-10, nan_ok=True)


def test_kept_ids_against_float64():
    kept = [torch.randint(VOCAB, (i % 5,)).tolist() for i in range(29)]
    told_of = make(head={"kept": kept})
    problem, x = replace(told_of, head={}), logits_of(told_of, torch.float32)
    for name in ("ppo", "gspo"):
        options, formula = OBJECTIVES[name]
        assert_right(told_of, formula, x, given(problem, ll.Objective(**options), x, kept=ragged(kept)))


def test_a_preference():
    problem, preference = make(torch.float64, [3, 5, 2, 4]), ll.Preference("dpo", beta=0.3)
    rows = problem.batch.rows()
    reference, runs = problem.fields(rows)["ref_logprob"], []
    for exist in (True, False):
        leaf = problem.operands.leaves()
        logits = torch.nn.functional.linear(*leaf) if exist else ll.Logits(leaf.hidden, leaf.weight, bias=leaf.bias)
        loss, _ = ll.policy_loss(logits, rows, preference, ref_logprob=reference)
        runs.append((loss.detach(), torch.autograd.grad(loss, leaf)))
    torch.testing.assert_close(*runs, rtol=1e-10, atol=1e-12)


def test_padded_logits_and_no_gradient():
    """``[N, S, V]`` logits; the loss alone where nothing is recorded."""
    problem, objective = make(), ll.Objective(**PPO)
    batch, width = problem.batch, max(map(len, problem.batch.tokens)) + 2
    rows = ll.Rows.padded(batch.tokens, batch.lengths, batch.masks, max_length=width)
    x = torch.randn(len(batch), width, VOCAB)
    x.view(-1, VOCAB)[rows.index] = logits_of(problem, torch.float32)[problem.index]
    leaf = x.clone().requires_grad_()
    loss, _ = ll.policy_loss(leaf, rows, objective, **problem.fields(rows))
    (gradient,) = torch.autograd.grad(UPSTREAM * loss, leaf)
    picked = torch.zeros(47, VOCAB)
    picked[problem.index] = gradient.view(-1, VOCAB)[rows.index]
    assert_right(problem, PPO_FORMULA, logits_of(problem, torch.float32), Given(loss.detach(), picked, {}))
    others = torch.ones(len(batch) * width, dtype=torch.bool).index_fill(0, rows.index, False)
    assert not gradient.view(-1, VOCAB)[others].any()
    with torch.no_grad():
        alone, _ = ll.policy_loss(leaf, rows, objective, **problem.fields(rows))
    assert torch.equal(alone, loss)
    assert not alone.requires_grad


# A shard of the vocabulary.


def on_a_rank(rank: int, world: int, problem: Problem, name: str, overwrite: bool, kept: Any) -> list[Any]:
    """Loss and gradients of this rank's columns: in one call, in two, and from its rows of the weight."""
    start, stop = BOUNDS[rank]
    shard = ll.VocabShard(start, stop, dist.group.WORLD, check_calls=True)
    objective, rows = ll.Objective(**OBJECTIVES[name][0]), problem.batch.rows()
    fields, more = problem.fields(rows), {} if kept is None else {"kept": kept}
    x = logits_of(problem, torch.float64)[:, start:stop]
    found = []
    for calls in (1, 2):
        leaf = x.clone().requires_grad_()
        logits = ll.Logits.given(leaf * 1.0, shard=shard, overwrite=overwrite)
        if calls == 1:
            loss, metrics = ll.policy_loss(logits, rows, objective, **more, **fields)
        else:
            stats = ll.logprobs(logits, rows, entropy=objective.entropy, **more)
            loss, metrics = objective(stats, rows, **fields)
        found.append((loss.detach(), torch.autograd.grad(UPSTREAM * loss, leaf)[0], metrics.compute()))
    _, weight, bias = problem.operands
    leaf = problem.operands._replace(weight=weight[start:stop], bias=bias[start:stop]).leaves()
    linear = ll.Logits(leaf.hidden, leaf.weight, bias=leaf.bias, shard=shard)
    loss, metrics = ll.policy_loss(linear, rows, objective, **more, **fields)
    found.append((loss.detach(), torch.autograd.grad(UPSTREAM * loss, leaf.weight)[0], metrics.compute()))
    return found


@pytest.mark.parametrize("with_kept", [False, True], ids=["", "kept"])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_shard_over_two_ranks(ranks, name: str, overwrite: bool, with_kept: bool):
    kept = [torch.randint(VOCAB, (i % 5,)).tolist() for i in range(29)] if with_kept else None
    told_of = make(torch.float64, head={"kept": kept} if with_kept else {})
    problem, x = replace(told_of, head={}), logits_of(told_of, torch.float64)
    exact = told(told_of, OBJECTIVES[name][1], x, exact=True)
    found = ranks(on_a_rank, 2, problem, name, overwrite, None if kept is None else ragged(kept))
    for one, two, linear in found:
        assert torch.equal(one[0], two[0])
        assert torch.equal(one[1], two[1])
        assert one[2] == pytest.approx(two[2], rel=0, abs=0, nan_ok=True)
        torch.testing.assert_close(one[0], exact.loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(linear[0], exact.loss, rtol=1e-12, atol=1e-12)
    gradient = torch.cat([one[1] for one, _, _ in found], -1)
    torch.testing.assert_close(gradient, exact.gradient, rtol=1e-10, atol=1e-12)
    # What hidden states make of it: the weight's gradient is that of the logits times them.
    of_weight = torch.cat([linear[1] for _, _, linear in found])
    torch.testing.assert_close(gradient.T @ problem.operands.hidden, of_weight, rtol=1e-10, atol=1e-12)


# What it says.


def test_the_route_and_errors():
    x, given = torch.randn(5, 7, requires_grad=True), {"old_logprob": "current", "advantage": torch.ones(5)}
    plan = ll.explain(ll.policy_loss, x, torch.arange(5), ll.Objective(), **given)
    assert (plan.kind, plan.products) == ("two passes", 0)
    assert str(plan) == "two passes: no matrix product, because logits exist, and nothing is multiplied again."
    with raises("policy_loss: rows were made for 4 tokens ([4]) but logits has 5 rows ([5])."):
        ll.policy_loss(x, torch.arange(4), ll.Objective(), **given)
    with raises("policy_loss: target 7 of row 0 (sample 0, position 0) is outside the ..."):
        ll.policy_loss(x, torch.full((5,), 7), ll.Objective(), **given)
    with raises("policy_loss: the objective has divergence='reverse_kl' and the call no teacher. They go together."):
        ll.policy_loss(x, torch.arange(5), ll.Objective(divergence="reverse_kl"), **given)
    shard = ll.VocabShard(0, 6)
    with raises("policy_loss: shard holds columns 0 to 6 (6 of them) but logits has 7 columns."):
        ll.policy_loss(ll.Logits.given(x, shard=shard), torch.arange(5), ll.Objective(), **given)
    loss, _ = ll.policy_loss(x, torch.arange(5), ll.Objective(), **given)
    with raises("policy_loss: backward with create_graph=True asks for a second derivative, which is not ..."):
        torch.autograd.grad(loss, x, create_graph=True)
