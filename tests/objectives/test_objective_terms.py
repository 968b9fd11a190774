"""Every term of an objective against its paper's formula (objective_truth.py), values and gradients, and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from objective_truth import PROMPT_OF, Formula, draw, stats_of, tell
from shared.objective_terms import CORRECTIONS, PARTS, POLICIES, formula_of

from logitless import Objective, Rows, TokenStats
from logitless.objectives import KL_TERMS, Inputs, bounded_exp, count_over, kl_penalty, prompt_tokens_over

BOTH = [torch.float32, torch.float64]


def check(batch, objective: Objective, formula: Formula, dtype, *, on_policy=False, **options) -> None:
    """Loss and both gradients, of rows with their masks and of rows that were left out."""
    truth, plain = tell(batch, formula, on_policy=on_policy), tell(batch, formula, dtype, on_policy=on_policy)
    for mask_only in (False, True):
        rows = batch.rows(loss_mask_only=mask_only)
        x = batch.fields(rows, dtype)
        stats = stats_of(x)
        given = {name: x[name] for name in PARTS}
        if on_policy:
            given["old_logprob"] = "current"
        loss, _ = objective(stats, rows, **given, **options)
        assert_close_to_truth(loss, truth.loss, plain.loss, "loss")
        upstream = 1.7
        (upstream * loss).backward()
        for name in ("logprob", "entropy"):
            wanted, rough = (getattr(told, name)[rows.response] for told in (truth, plain))
            leaf = getattr(stats, name)
            ours = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            assert_gradient_close_to_truth(ours, upstream * wanted, upstream * rough, f"d_{name}")


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("reduce", ["token_mean", "sample_mean", "sample_sum", "prompt_mean"])
@pytest.mark.parametrize("name", POLICIES)
def test_policy_terms(name, reduce, dtype):
    batch = draw()
    options, length = {}, {"length": 11} if reduce == "sample_sum" else {}
    if reduce == "prompt_mean":
        (tokens,) = prompt_tokens_over(batch.rows(), torch.tensor(PROMPT_OF), 3)
        options = {"prompt_tokens": tokens, "denominator": 3}
    objective = Objective(reduce=reduce, **length, **POLICIES[name][0])
    check(batch, objective, formula_of(name, reduce=reduce, length=11), dtype, **options)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("policy", ["ppo_clip", "gspo"])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections(name, policy, dtype):
    batch = draw(spread=0.2)
    bounds = CORRECTIONS[name]
    given = bounds if len(bounds) == 2 else bounds[0]
    objective = Objective(correction=name, correction_bounds=given, **POLICIES[policy][0])
    check(batch, objective, formula_of(policy, correction=name, bounds=bounds), dtype)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("kl", KL_TERMS)
def test_kl_and_entropy_terms(kl, dtype):
    batch = draw()
    objective = Objective(clip=0.2, kl=kl, kl_coef=0.3, entropy_coef=0.1)
    formula = Formula(options=dict(low=0.2, high=0.2), kl=kl, kl_coef=0.3, entropy_coef=0.1)
    check(batch, objective, formula, dtype)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "sapo"])
def test_on_policy_first_step(name):
    """The ratio is 1 and its gradient is not; the old log-probs need no forward pass of their own."""
    check(draw(), Objective(**POLICIES[name][0]), formula_of(name), torch.float64, on_policy=True)
    check(draw(), Objective(**POLICIES[name][0]), formula_of(name), torch.float32, on_policy=True)


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3"])
def test_kl_as_a_penalty_is_the_same_number_without_a_graph(name):
    new, ref = torch.randn(2, 17, dtype=torch.float64)
    penalty = kl_penalty(new.requires_grad_(), ref, name)
    assert not penalty.requires_grad
    d = (new - ref).detach()
    expected = {"k1": d, "abs": d.abs(), "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[name]
    torch.testing.assert_close(penalty, expected, atol=1e-14, rtol=0)


def test_k3_keeps_its_digits_where_the_policies_agree():
    d = torch.tensor([1e-3, 3e-4, 1e-4])
    ours = kl_penalty(-1 + d, torch.full((3,), -1.0), "k3").double()
    exact = (-1 + d).double() + 1
    exact = torch.expm1(-exact) + exact
    naive = (torch.exp(-d) - 1 + d).double()
    assert (ours - exact).abs().max() < 1e-10 < (naive - exact).abs().max()


# By hand. One sample, old log-probs 0 by choice, so that the log-prob is the log-ratio.


def by_hand(objective: Objective, ratios, advantages, **fields):
    rows = Rows.packed([[0] * (len(ratios) + 1)], [len(ratios)])
    logprob = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    stats = TokenStats(logprob, None, torch.zeros_like(logprob))
    given = {name: torch.tensor(x, dtype=torch.float64) for name, x in fields.items()}
    loss, metrics = objective(
        stats, rows, old_logprob=torch.zeros_like(logprob).detach(), advantage=torch.tensor(advantages), **given
    )
    (gradient,) = torch.autograd.grad(loss, logprob)
    return loss.item() * len(ratios), (gradient * len(ratios)).tolist(), metrics.compute()


def test_ppo_clip_by_hand():
    objective = Objective(clip=(0.2, 0.3), dual_clip=3.0)
    # In order: inside; gain above the bound; loss above it; gain below; loss below; loss beyond the dual bound.
    ratios, advantages = [1.1, 2.0, 2.0, 0.5, 0.5, 4.0], [1.0, 1.0, -1.0, 1.0, -1.0, -1.0]
    loss, gradient, metrics = by_hand(objective, ratios, advantages)
    assert math.isclose(loss, -1.1 - 1.3 + 2.0 - 0.5 + 0.8 + 3.0)
    assert gradient == pytest.approx([-1.1, 0.0, 2.0, -0.5, 0.0, 0.0])
    # One by one, where errors of the two bounds cannot cancel.
    assert by_hand(objective, [2.0], [1.0])[0] == pytest.approx(-1.3)
    assert by_hand(objective, [0.5], [-1.0])[0] == pytest.approx(0.8)
    assert metrics["clip_fraction"] == pytest.approx(2 / 6)
    assert metrics["clip_fraction_high"] == metrics["clip_fraction_low"] == pytest.approx(1 / 6)
    assert metrics["dual_clip_fraction"] == pytest.approx(1 / 6)
    # A ratio a little above its bound is not below the other one.
    _, _, alone = by_hand(objective, [1.5], [1.0])
    assert (alone["clip_fraction_low"], alone["clip_fraction_high"]) == (0.0, 1.0)
    assert metrics["ratio_max"] == pytest.approx(4.0)
    assert metrics["ratio_min"] == pytest.approx(0.5)


def test_gspo_by_hand():
    """Ratios 2 and 0.5 make a sequence ratio of 1: neither token is clipped, and each gets half of each gradient."""
    loss, gradient, metrics = by_hand(Objective(policy="gspo", clip=0.1), [2.0, 0.5], [1.0, 3.0])
    assert math.isclose(loss, -4.0)
    assert gradient == pytest.approx([-2.0, -2.0])
    assert metrics["sequence_ratio"] == pytest.approx(1.0)


def test_cispo_by_hand():
    loss, gradient, _ = by_hand(Objective(policy="cispo", clip=(0.2, 0.3)), [2.0, 0.5], [1.0, -1.0])
    assert math.isclose(loss, -1.3 * math.log(2) + 0.8 * math.log(0.5))
    assert gradient == pytest.approx([-1.3, 0.8])
    # Whatever the sign of the advantage: the weight is clipped, and not the loss.
    ratios = [2.0, 1.4, 1.2, 0.9, 0.5, 1.0, 3.0, 1.0]
    _, _, metrics = by_hand(Objective(policy="cispo", clip=(0.2, 0.3)), ratios, [1.0, -1.0] * 4)
    assert metrics["clip_fraction_high"] == pytest.approx(3 / 8)
    assert metrics["clip_fraction_low"] == pytest.approx(1 / 8)
    assert metrics["clip_fraction"] == pytest.approx(4 / 8)
    # By default no lower bound, and an upper one of 5.
    _, gradient, metrics = by_hand(Objective(policy="cispo"), [0.01, 4.9, 6.0], [1.0] * 3)
    assert gradient == pytest.approx([-0.01, -4.9, -5.0])
    assert metrics["clip_fraction_low"] == 0
    assert metrics["clip_fraction_high"] == pytest.approx(1 / 3)
    # A ratio on both of its bounds is clipped by neither.
    assert by_hand(Objective(policy="cispo", clip=(0.0, 0.0)), [1.0], [1.0])[2]["clip_fraction"] == 0


def test_sapo_by_hand():
    """At ratio 1 the gate's value is 2 / tau and its slope 1, whatever the temperature."""
    objective = Objective(policy="sapo", policy_options={"positive": 1.0, "negative": 4.0})
    loss, gradient, metrics = by_hand(objective, [1.0, 1.0], [1.0, -1.0])
    assert math.isclose(loss, -2.0 + 0.5)
    assert gradient == pytest.approx([-1.0, 1.0])
    assert metrics["gate"] == pytest.approx(1.0)
    # Of tokens that are neither better nor worse, the temperature is that of the worse ones.
    gates = {a: by_hand(objective, [1.5], [a])[2]["gate"] for a in (1.0, 0.0, -1.0)}
    assert gates[0.0] == gates[-1.0] == pytest.approx(1 / math.cosh(1.0) ** 2)
    assert gates[1.0] == pytest.approx(1 / math.cosh(0.25) ** 2)


def test_corrections_by_hand():
    rollout = [math.log(0.25), math.log(0.5), math.log(1.25)]  # weights 4, 2, 0.8
    fields = {"rollout_logprob": rollout}
    tis = Objective(policy="reinforce", correction="tis", correction_bounds=3.0)
    _, gradient, metrics = by_hand(tis, [1.0] * 3, [1.0] * 3, **fields)
    assert gradient == pytest.approx([-3.0, -2.0, -0.8])
    assert metrics["correction"] == pytest.approx(5.8 / 3)
    assert metrics["correction_max"] == pytest.approx(3.0)
    assert metrics["correction_min"] == pytest.approx(0.8)
    assert metrics["effective_sample_size"] == pytest.approx(5.8**2 / (9 + 4 + 0.64) / 3)
    icepop = Objective(policy="reinforce", correction="icepop", correction_bounds=(0.9, 3.0))
    _, gradient, metrics = by_hand(icepop, [1.0] * 3, [1.0] * 3, **fields)
    assert gradient == pytest.approx([0.0, -2.0, 0.0])
    assert metrics["correction_masked"] == pytest.approx(2 / 3)
    # The bounds themselves are inside; by default they are 0.5 and 5.
    exact = {"rollout_logprob": [-math.log(w) for w in (0.4, 0.5, 2.0, 5.0, 6.0)]}
    _, gradient, metrics = by_hand(Objective(policy="reinforce", correction="icepop"), [1.0] * 5, [1.0] * 5, **exact)
    assert gradient == pytest.approx([0.0, -0.5, -2.0, -5.0, 0.0])
    assert metrics["correction_masked"] == pytest.approx(2 / 5)
    sequence = Objective(policy="reinforce", correction="sequence_tis", correction_bounds=10.0)
    _, gradient, _ = by_hand(sequence, [1.0] * 3, [1.0] * 3, **fields)
    assert gradient == pytest.approx([-6.4] * 3)


def test_reductions_by_hand():
    """Two samples of 1 and 3 tokens, loss 1 at each."""
    rows = Rows.packed([[0] * 2, [0] * 4, [0] * 2], [1, 3, 0])
    logprob = torch.full((4,), -1.0, dtype=torch.float64)
    stats = TokenStats(logprob, None, logprob)

    def loss(**options):
        objective = Objective(policy="reinforce", **{k: v for k, v in options.items() if k in ("reduce", "length")})
        rest = {k: v for k, v in options.items() if k not in ("reduce", "length")}
        return objective(stats, rows, advantage=torch.ones(4), **rest)[0].item()

    assert loss(reduce="token_mean") == pytest.approx(1.0)
    assert loss(reduce="token_mean", denominator=8) == pytest.approx(0.5)
    # The third sample has no tokens, but it is a sample.
    assert loss(reduce="sample_mean") == pytest.approx(2 / 3)
    assert loss(reduce="sample_mean", denominator=torch.tensor(8)) == pytest.approx(0.25)
    assert loss(reduce="sample_sum", length=10) == pytest.approx(4 / 30)
    tokens = torch.tensor([4.0, 4.0, 1.0])
    assert loss(reduce="prompt_mean", prompt_tokens=tokens, denominator=2) == pytest.approx(0.5)
    assert count_over([rows, rows], "sample_sum").item() == 6


# A term of one's own.


def test_a_function_of_the_users_own():
    def vespo_like(inputs: Inputs, *, power: float):
        ratio = bounded_exp(inputs.mean_by_sample(inputs.log_ratio)).detach()
        return -inputs.advantage * inputs.bonus * ratio**power * inputs.logprob, {"sharpened": ratio**power}

    def half(inputs: Inputs):
        return torch.full_like(inputs.logprob, 0.5)

    def tripled(logprob, ref_logprob):
        return 3 * (logprob - ref_logprob)

    objective = Objective(
        policy=vespo_like,
        policy_options={"power": 2.0},
        level="sequence",
        needs=("old_logprob", "advantage", "bonus"),
        correction=half,
        kl=tripled,
        kl_coef=0.5,
    )
    assert objective.sequence_level
    assert objective.required == ("ref_logprob", "old_logprob", "advantage", "bonus")
    batch = draw()
    rows = batch.rows()
    x = batch.fields(rows, torch.float64)
    stats, bonus = stats_of(x), torch.rand(len(rows), dtype=torch.float64)
    given = {name: x[name] for name in ("old_logprob", "advantage", "ref_logprob")}
    loss, metrics = objective(stats, rows, bonus=bonus, **given)
    (gradient,) = torch.autograd.grad(loss, stats.logprob)
    expected = torch.zeros_like(gradient)
    counts = rows.counted
    for sample in range(len(batch)):
        own = counts & (rows.sample == sample)
        ratio = ((x["logprob"] - x["old_logprob"])[own].sum() / max(1, int(own.sum()))).exp()
        expected[own] = (-0.5 * x["advantage"] * bonus * ratio**2 + 1.5)[own] / counts.sum()
    torch.testing.assert_close(gradient, expected, atol=1e-14, rtol=0)
    assert {"sharpened", "correction", "ref_kl"} <= metrics.compute().keys()


def own(inputs, clip=0.5):
    return -inputs.advantage * inputs.logprob


@pytest.mark.parametrize(
    ("objective", "text"),
    [
        (Objective(), "policy='ppo_clip', clip=(0.2, 0.2), reduce='token_mean'"),
        (Objective(clip=0.1), "policy='ppo_clip', clip=(0.1, 0.1), reduce='token_mean'"),
        (
            Objective.recipe("dapo", entropy_coef=0.01),
            "policy='ppo_clip', clip=(0.2, 0.28), entropy_coef=0.01, reduce='token_mean'",
        ),
        (Objective.recipe("gspo"), "policy='gspo', clip=(0.0003, 0.0004), reduce='sample_mean'"),
        (Objective(policy="reinforce"), "policy='reinforce', reduce='token_mean'"),
        (
            Objective(policy=own, kl="k3", kl_coef=0.1),
            "policy=own, clip=0.5, kl='k3', kl_coef=0.1, reduce='token_mean'",
        ),
        (
            Objective(policy="sapo", policy_options={"positive": 0.5}),
            "policy='sapo', policy_options={'positive': 0.5}, reduce='token_mean'",
        ),
        (
            Objective(policy=own, policy_options={"clip": {"low": 0.1, "by": own}}),
            "policy=own, clip={'low': 0.1, 'by': own}, policy_options={'clip': {'low': 0.1, 'by': own}}, "
            "reduce='token_mean'",
        ),
    ],
)
def test_repr_has_the_clip_in_effect(objective, text):
    assert repr(objective) == f"Objective({text})"


@pytest.mark.parametrize(
    ("recipe", "clip"),
    [("gspo", (0.0003, 0.0004)), ("dapo", (0.2, 0.28)), ("grpo", (0.2, 0.2)), ("cispo", (1.0, 4.0)), ("sapo", None)],
)
def test_a_recipe_reads_back_its_clip(recipe, clip):
    """And a loss with the clip that was read is the recipe's."""
    assert Objective.recipe(recipe).clip == clip
    assert clip is None or Objective.recipe(recipe, clip=0.125).clip == (0.125, 0.125)
    assert repr(Objective.recipe(recipe, clip=clip)) == repr(Objective.recipe(recipe))
