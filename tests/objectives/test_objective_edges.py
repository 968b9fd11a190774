"""Objectives at the edges: nothing to count, infinities, chunks, the entropy gate, metrics, and what errors say."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from objective_truth import FIELDS, draw, stats_of
from shared.objective_edges import ALL, EVERYTHING
from shared.objective_terms import PARTS

from logitless import LogitlessError, Metrics, Objective, Rows, TokenStats
from logitless.objectives import CORRECTIONS as NAMED_CORRECTIONS
from logitless.objectives import POLICY_TERMS, RECIPES, Inputs, count_over, kl_penalty, prompt_tokens_over

INF, NAN = math.inf, math.nan


def given(x: dict, *names: str) -> dict:
    return {name: x[name] for name in names or PARTS}


def run(objective: Objective, rows: Rows, x: dict, **options):
    """Loss, gradient of the log-probs, metrics."""
    stats = stats_of(x)
    loss, metrics = objective(stats, rows, **given(x), **options)
    (gradient,) = torch.autograd.grad(loss, stats.logprob)
    return loss.detach(), gradient, metrics


# Nothing to count.


@pytest.mark.parametrize("objective", ALL)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [3, 2], [1]])
def test_nothing_to_count_is_a_loss_of_zero_with_a_graph(objective, lengths):
    batch = draw(lengths, masked=tuple(range(len(lengths))))
    rows = batch.rows()
    for reduce, more in (("token_mean", {}), ("sample_mean", {}), ("sample_sum", {"length": 5})):
        loss, gradient, metrics = run(
            replace(objective, reduce=reduce, **more), rows, batch.fields(rows, torch.float32)
        )
        assert loss == 0
        assert gradient.shape == (len(rows),)
        assert not gradient.any()
        assert math.isnan(metrics.compute()["advantage"])


@pytest.mark.parametrize("objective", ALL)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_a_row_that_is_not_counted_holds_reaches_nothing(objective, bad):
    batch = draw()
    rows = batch.rows()
    x = batch.fields(rows, torch.float32)
    wanted = run(objective, rows, x)
    assert 0 < int((~rows.counted).sum()) < len(rows)
    spoilt = {name: torch.where(rows.counted, value, bad) for name, value in x.items()}
    loss, gradient, metrics = run(objective, rows, spoilt)
    assert torch.equal(loss, wanted[0])
    assert torch.equal(gradient, wanted[1])
    assert metrics.compute() == wanted[2].compute()


def test_terms_see_zeros_at_rows_that_are_not_counted():
    """A term of the user's own may do what it likes with them."""
    batch = draw()
    rows = batch.rows()
    x = batch.fields(rows, torch.float32)
    spoilt = {name: torch.where(rows.counted, value, NAN) for name, value in x.items()}
    whose = torch.where(rows.counted, rows.sample + 1, 99)
    seen = []

    def policy(inputs: Inputs):
        seen.append(inputs)
        return inputs.logprob * inputs.advantage.sum()

    objective = Objective(policy=policy, needs=("whose",))
    loss, _ = objective(stats_of(spoilt), rows, **given(spoilt), whose=whose)
    assert loss.isfinite()
    (inputs,) = seen
    for values in (inputs.logprob, inputs.entropy, inputs.log_ratio, *inputs.fields.values()):
        assert not values[~rows.counted].any()
        assert values[rows.counted].all()
    assert inputs.whose.dtype == torch.int64


def test_ignored_targets_do_not_count():
    target = torch.tensor([1, -100, 2])
    rows = Rows.every(target)
    stats = TokenStats(torch.tensor([-1.0, NAN, -3.0], requires_grad=True), None, torch.zeros(3))
    loss, _ = Objective(policy="reinforce")(stats, rows, advantage=torch.ones(3))
    assert loss.item() == 2.0
    loss.backward()
    assert stats.logprob.grad.tolist() == [-0.5, 0.0, -0.5]


def test_a_zero_denominator_gives_zero():
    batch = draw([2], masked=())
    rows = batch.rows()
    for denominator in (0, torch.tensor(0.0)):
        loss, gradient, _ = run(Objective(), rows, batch.fields(rows, torch.float32), denominator=denominator)
        assert loss == 0
        assert not gradient.any()


# Infinities at rows that do count.


def ratios(objective: Objective, log_ratios: list[float], advantages: list[float]):
    rows = Rows.packed([[0] * (len(log_ratios) + 1)], [len(log_ratios)])
    logprob = torch.tensor(log_ratios, requires_grad=True)
    stats = TokenStats(logprob, None, torch.zeros(len(rows)))
    loss, metrics = objective(stats, rows, old_logprob=torch.zeros(len(rows)), advantage=torch.tensor(advantages))
    (gradient,) = torch.autograd.grad(loss, logprob)
    return loss.item() * len(rows), (gradient * len(rows)).tolist(), metrics.compute()


def test_an_overflowing_ratio_is_clipped_without_nan():
    """exp(200) is inf in float32, and the gradient of the branch not taken would be 0 * inf."""
    loss, gradient, metrics = ratios(Objective(clip=0.2), [200.0, 0.0], [1.0, 1.0])
    assert loss == pytest.approx(-1.2 - 1.0)
    assert gradient == pytest.approx([0.0, -1.0])
    assert metrics["ratio_max"] == pytest.approx(math.exp(20.0))


def test_an_overflowing_ratio_that_is_not_clipped_is_a_finite_constant():
    loss, gradient, _ = ratios(Objective(clip=0.2), [200.0], [-1.0])
    assert loss == pytest.approx(math.exp(20.0), rel=1e-6)
    assert gradient == [0.0]
    loss, gradient, _ = ratios(Objective(clip=0.2, dual_clip=3.0), [200.0], [-1.0])
    assert (loss, gradient) == (3.0, [0.0])


@pytest.mark.parametrize("policy", ["ppo_clip", "gspo", "sapo"])
def test_a_token_of_probability_zero_has_ratio_zero_and_no_gradient(policy):
    loss, gradient, _ = ratios(Objective(policy=policy), [-INF], [1.0])
    assert math.isfinite(loss)
    assert gradient == [0.0]


def test_zero_over_zero_is_nan_and_not_a_plausible_number():
    batch = draw([2], masked=())
    rows = batch.rows()
    x = batch.fields(rows, torch.float32)
    for name in ("logprob", "old_logprob"):
        x[name] = torch.where(rows.position == 0, -INF, x[name])
    assert run(Objective(), rows, x)[0].isnan()


def test_kl_is_finite_where_one_policy_gives_nothing():
    values = kl_penalty(torch.tensor([-INF, -1.0]), torch.tensor([-1.0, -INF]), "k3")
    assert values.isfinite().all()
    assert (values >= 0).all()


def test_a_masked_weight_hides_an_infinite_loss():
    rows = Rows.packed([[0, 0, 0]], [2])
    stats = TokenStats(torch.tensor([-INF, -1.0], requires_grad=True), None, torch.zeros(2))
    objective = Objective(policy="reinforce", correction=lambda inputs: (inputs.logprob > -9).float())
    loss, _ = objective(stats, rows, advantage=torch.ones(2))
    assert loss.item() == 0.5
    loss.backward()
    assert stats.logprob.grad.tolist() == [0.0, -0.5]


# Chunks.


@pytest.mark.parametrize("objective", ALL)
@pytest.mark.parametrize("cuts", [(1, 2, 3), (5, 20), (29,)])
def test_chunks_add_up(objective, cuts):
    """At any rows for terms on tokens, between samples for the others; gradients go to the same leaf."""
    batch = draw()
    rows = batch.rows()
    x = batch.fields(rows, torch.float64)
    stats = stats_of(x)
    whole_loss, whole_metrics = objective(stats, rows, **given(x))
    (whole,) = torch.autograd.grad(whole_loss, stats.logprob, retain_graph=True)
    inputs = objective.inputs(None, rows, given(x), denominator=count_over(rows, objective.reduce))
    if objective.sequence_level:
        cuts = (7, 20, 21)
    bounds = [0, *(min(c, len(rows)) for c in cuts), len(rows)]
    losses, metrics = [], []
    for start, stop in pairwise(bounds):
        chunk = inputs.cut(start, stop, objective.sequence_level)
        chunk = replace(chunk, logprob=stats.logprob[start:stop], entropy=stats.entropy[start:stop])
        loss, part = objective.evaluate(chunk)
        rows_alone, weight, _ = objective.graded(chunk, measured=False)
        alone = (rows_alone * weight).sum()
        torch.testing.assert_close(alone, loss, atol=1e-15, rtol=1e-14)
        by_either = (torch.autograd.grad(x, stats.logprob, retain_graph=True)[0] for x in (alone, loss))
        torch.testing.assert_close(*by_either, atol=1e-16, rtol=1e-14)
        losses.append(loss)
        metrics.append(part)
    (gradient,) = torch.autograd.grad(sum(losses), stats.logprob)
    torch.testing.assert_close(sum(losses), whole_loss, atol=1e-14, rtol=1e-14)
    torch.testing.assert_close(gradient, whole, atol=1e-15, rtol=1e-13)
    assert Metrics.merge(metrics).compute() == pytest.approx(whole_metrics.compute(), nan_ok=True)


def test_cut_checks_whole_samples():
    batch = draw()
    rows = batch.rows()
    inputs = Objective(policy="gspo").inputs(None, rows, given(batch.fields(rows, torch.float64)))
    with pytest.raises(LogitlessError, match=re.escape("rows 0 .. 8 hold 1 of the 13 rows of sample 2")):
        inputs.cut(0, 8, True)
    part = inputs.cut(7, 21, True)
    assert (part.first, part.counts) == (1, (0, 13, 1))
    assert (part.cut(13, 14, True).first, part.cut(13, 14, True).counts) == (3, (1,))
    with pytest.raises(LogitlessError, match="may already cut through a sample"):
        inputs.cut(0, 8, False).cut(0, 3, True)
    with pytest.raises(LogitlessError, match=re.escape('Declare Objective(level="sequence")')):
        Objective(policy="gspo").evaluate(inputs.cut(0, 8, False))


def test_on_policy_chunk_by_chunk():
    batch = draw()
    rows = batch.rows()
    x = batch.fields(rows, torch.float64)
    inputs = Objective().inputs(None, rows, {"old_logprob": "current", "advantage": x["advantage"]})
    logprob = x["logprob"].requires_grad_()
    parts = [replace(inputs.cut(a, b, False), logprob=logprob[a:b]) for a, b in ((0, 10), (10, len(rows)))]
    loss = sum(Objective().evaluate(part)[0] for part in parts)
    assert loss.item() == pytest.approx(-(inputs.weight * x["advantage"]).sum().item())
    loss.backward()
    torch.testing.assert_close(logprob.grad, -inputs.weight * x["advantage"])


@pytest.mark.parametrize("objective", ALL)
def test_the_same_bits_on_every_run(objective):
    batch = draw([63, 507, 1, 100])
    rows = batch.rows()
    x = batch.fields(rows, torch.float32)
    first, second = run(objective, rows, x), run(objective, rows, x)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_second_derivatives_are_refused():
    batch = draw()
    rows = batch.rows()
    x = batch.fields(rows, torch.float64)
    stats = stats_of(x)
    loss, _ = Objective(policy="gspo")(stats, rows, **given(x))
    with pytest.raises(LogitlessError, match="create_graph=True asks for a second derivative"):
        torch.autograd.grad(loss, stats.logprob, create_graph=True)


# Entropy.


def test_entropy_is_asked_for_with_a_graph_only_if_its_coefficient_is_not_zero():
    assert Objective().entropy == "value"
    assert Objective(entropy_coef=0.0).entropy == "value"
    assert Objective(entropy_coef=-0.1).entropy == "grad"


def test_entropy_is_logged_alike_with_and_without_a_graph():
    batch = draw()
    rows = batch.rows()
    x = batch.fields(rows, torch.float32)
    stats = stats_of(x)
    fields = given(x, "old_logprob", "advantage")
    plain, without = Objective()(stats._replace(entropy=stats.entropy.detach()), rows, **fields)
    bonus, with_graph = Objective(entropy_coef=0.1)(stats, rows, **fields)
    assert without.compute()["entropy"] == with_graph.compute()["entropy"]
    counted = rows.counted
    assert with_graph.compute()["entropy_loss"] == pytest.approx(-0.1 * x["entropy"][counted].mean().item())
    assert (bonus - plain).item() == pytest.approx(-0.1 * x["entropy"][counted].mean().item(), abs=1e-6)
    assert torch.autograd.grad(plain, stats.entropy, allow_unused=True) == (None,)


# Metrics.


def test_metrics_by_loop():
    batch = draw()
    rows = batch.rows()
    x = batch.fields(rows, torch.float64)
    loss, _, metrics = run(EVERYTHING, rows, x)
    numbers = metrics.compute()
    here = [i for i in range(len(rows)) if rows.counted[i]]

    def mean(f):
        return sum(f(*(x[name][i].item() for name in FIELDS)) for i in here) / len(here)

    expected = {
        "ratio": mean(lambda lp, old, *_: math.exp(lp - old)),
        "approx_kl_k1": mean(lambda lp, old, *_: old - lp),
        "approx_kl_k3": mean(lambda lp, old, *_: math.exp(lp - old) - 1 - (lp - old)),
        "ref_kl": mean(lambda lp, old, ref, *_: math.exp(ref - lp) - 1 - (ref - lp)),
        "rollout_kl_k1": mean(lambda lp, old, ref, rollout, *_: rollout - old),
        "rollout_kl_k3": mean(lambda lp, old, ref, roll, *_: math.exp(old - roll) - 1 - (old - roll)),
        "advantage": mean(lambda lp, old, ref, roll, a, h: a),
        "entropy": mean(lambda lp, old, ref, roll, a, h: h),
        "ratio_max": max(math.exp(x["logprob"][i] - x["old_logprob"][i]) for i in here),
        "ratio_min": min(math.exp(x["logprob"][i] - x["old_logprob"][i]) for i in here),
        "loss": loss.item(),
    }
    assert {name: numbers[name] for name in expected} == pytest.approx(expected)
    parts = numbers["policy_loss"] + numbers["kl_loss"] + numbers["entropy_loss"]
    assert parts == pytest.approx(numbers["loss"])


def test_metrics_of_nothing_do_not_spoil_a_merge():
    one = Metrics.of_rows({"a": torch.tensor([2.0])}, torch.tensor([True]), extremes={"a": torch.tensor([2.0])})
    none = Metrics.of_rows({"a": torch.zeros(0)}, torch.zeros(0, dtype=torch.bool), extremes={"a": torch.zeros(0)})
    assert Metrics.merge([none, one, none]).compute() == {"a": 2.0, "a_max": 2.0, "a_min": 2.0}
    assert all(math.isnan(x) for x in none.compute().values())


def test_extremes_of_several():
    parts = ([1.0, 5.0], [3.0, -2.0], [0.0, 4.0])
    both = torch.tensor([True, True])
    several = [Metrics.of_rows({}, both, extremes={"a": torch.tensor(part)}) for part in parts]
    assert Metrics.merge(several).compute() == {"a_max": 5.0, "a_min": -2.0}


def test_weights_that_are_all_zero_have_no_effective_sample():
    weights = {"w": torch.zeros(3)}
    assert Metrics.of_rows({}, torch.ones(3, dtype=torch.bool), weights=weights).compute() == {"w": 0.0}
    assert math.isnan(Metrics.of_rows({}, torch.zeros(3, dtype=torch.bool), weights=weights).compute()["w"])


def test_metrics_carry_no_graph():
    batch = draw()
    rows = batch.rows()
    logged = run(EVERYTHING, rows, batch.fields(rows, torch.float32))[2]
    leaf = torch.ones(2, requires_grad=True)
    named = {"x": leaf}
    direct = Metrics.of_rows(named, leaf > 0, extremes=named, weights=named, sums={"s": leaf.sum()})
    for metrics, kind in product((logged, direct), ("sums", "means", "maxima", "minima", "weights")):
        assert getattr(metrics, kind)
        assert not any(x.requires_grad for x in getattr(metrics, kind).values())


def test_metrics_that_differ_are_not_merged():
    counted = torch.tensor([True])
    a, b = (Metrics.of_rows({name: torch.ones(1)}, counted) for name in "ab")
    with pytest.raises(
        LogitlessError, match=re.escape("entry 1 has other metrics than entry 0: they differ in ['a', 'b']")
    ):
        Metrics.merge([a, b])
    with pytest.raises(LogitlessError, match="several has no metrics"):
        Metrics.merge([])


# What it needs, and what errors say.


def test_what_is_required():
    assert Objective().required == ("old_logprob", "advantage")
    assert Objective(policy="reinforce").required == ("advantage",)
    assert Objective(correction="tis").required == ("old_logprob", "advantage", "rollout_logprob")
    assert Objective(kl="k3").required == ("old_logprob", "advantage")
    assert Objective(policy="reinforce", kl="k3_weighted", kl_coef=1).required == (
        "advantage",
        "ref_logprob",
        "old_logprob",
    )


def test_what_takes_means_over_samples():
    names = [name for name in POLICY_TERMS if Objective(policy=name).sequence_level]
    assert names == ["gspo"]
    names = [name for name in NAMED_CORRECTIONS if Objective(correction=name).sequence_level]
    assert names == ["sequence_tis", "sequence_icepop", "geometric_tis", "geometric_mask", "opsm"]
    assert Objective(level="sequence").sequence_level


# What needs a teacher is in test_divergence.py.
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "distill"])
def test_recipes(name):
    length = {"length": 9} if name == "dr_grpo" else {}
    objective = Objective.recipe(name, entropy_coef=0.5, **length)
    assert objective.entropy_coef == 0.5
    batch = draw()
    rows = batch.rows()
    assert run(objective, rows, batch.fields(rows, torch.float32))[0].isfinite()


WRONG = {
    "policy 'gsp' is not known. Did you mean 'gspo'? Known: ppo_clip, gspo, cispo, sapo, reinforce, none": {
        "policy": "gsp"
    },
    "policy must be a name or a function but is 3.": {"policy": 3},
    "policy must be a name or a function but is None.": {"policy": None},
    "correction 'icepap' is not known. Did you mean 'icepop'?": {"correction": "icepap"},
    "kl 'k3+' is not known. Did you mean 'k3'?": {"kl": "k3+"},
    "reduce 'token-mean' is not known. Did you mean 'token_mean'?": {"reduce": "token-mean"},
    "low must be in 0 .. 1 and high 0 or more, but they are 1.2 and 0.2.": {"clip": (1.2, 0.2)},
    "clip must be a finite number but is nan.": {"clip": NAN},
    "clip must be a number or (low, high) but is (1, 2, 3).": {"clip": (1, 2, 3)},
    "dual_clip must be above 1 but is 1.0.": {"dual_clip": 1.0},
    "policy 'reinforce' does not take clip. It takes: no options.": {"policy": "reinforce", "clip": 0.2},
    "clip is 0.2, and in policy_options 0.3. Give it once, as clip=.": {"clip": 0.2, "policy_options": {"clip": 0.3}},
    "policy 'gspo' does not take dual_clip. It takes: clip.": {"policy": "gspo", "dual_clip": 2.0},
    "policy 'sapo' does not take tau. It takes: positive, negative.": {"policy": "sapo", "policy_options": {"tau": 1}},
    "positive must be above 0 but is 0.": {"policy": "sapo", "policy_options": {"positive": 0}},
    "kl_coef is 0.1 but kl is None. Name an estimator": {"kl_coef": 0.1},
    "kl_coef must be a finite number but is inf.": {"kl": "k1", "kl_coef": INF},
    "entropy_coef must be a finite number but is True.": {"entropy_coef": True},
    "length goes with reduce=\"sample_sum\" and with no other, but reduce is 'token_mean' and length is 5.": {
        "length": 5
    },
    "but reduce is 'sample_sum' and length is None.": {"reduce": "sample_sum"},
    "length must be a positive integer but is 0.": {"reduce": "sample_sum", "length": 0},
    'level must be "token", "sequence", "batch" or None but is \'row\'.': {"level": "row"},
    "level is \"token\" but policy='gspo'": {"level": "token", "policy": "gspo"},
    "needs must be a tuple of field names but is 'bonus'.": {"needs": "bonus"},
    "correction_bounds go with a correction by name.": {"correction_bounds": 2.0},
    "correction_bounds of 'opsm' must be one number but is (0.0, 1.0).": {
        "correction": "opsm",
        "correction_bounds": (0.0, 1.0),
    },
    "correction_bounds must be (low, high) with low <= high but are (2.0, 1.0).": {
        "correction": "tis",
        "correction_bounds": (2.0, 1.0),
    },
    "correction_bounds must be numbers of 0 or more but are -1.0.": {"correction": "tis", "correction_bounds": -1.0},
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_arguments(text):
    with pytest.raises(LogitlessError, match=re.escape(text)):
        Objective(**WRONG[text])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("name 'grp' is not known. Did you mean 'grpo'?", ("grp", {})),
        ("argument 'clips' is not known. Did you mean 'clip'?", ("grpo", {"clips": 1})),
        ('"dr_grpo" divides by a fixed length', ("dr_grpo", {})),
    ],
)
def test_wrong_recipes(text, arguments):
    with pytest.raises(LogitlessError, match=re.escape(text)):
        Objective.recipe(arguments[0], **arguments[1])


CALLS = {
    "policy='ppo_clip' needs the field advantage, a tensor of one value per row, but it was not given "
    "(given: old_logprob).": (Objective(), {"advantage": None}),
    "correction='tis' needs the field rollout_logprob": (Objective(correction="tis"), {}),
    "kl='k2' needs the field ref_logprob": (Objective(kl="k2", kl_coef=1.0), {}),
    "needs= names the field bonus, a tensor of one value per row, but it was not given": (
        Objective(needs=("bonus",)),
        {},
    ),
    "no part of it reads the field rollout_logprobs. Did you mean 'rollout_logprob'?": (
        Objective(),
        {"rollout_logprobs": torch.zeros(2)},
    ),
    "advantage has shape [1] but there are 2 rows. Give one value per row": (
        Objective(),
        {"advantage": torch.zeros(1)},
    ),
    "advantage must be a tensor of shape [2] but is list.": (Objective(), {"advantage": [1, 2]}),
    "advantage is on meta but the rows are on cpu.": (Objective(), {"advantage": torch.zeros(2, device="meta")}),
    "old_logprob requires grad, but no gradient flows to it. Pass old_logprob.detach().": (
        Objective(),
        {"old_logprob": torch.zeros(2, requires_grad=True)},
    ),
    "old_logprob must be a tensor or \"current\" but is 'now'.": (Objective(), {"old_logprob": "now"}),
    "denominator must be a count of 0 or more, a number or a 0-dim tensor, but is -1.": (
        Objective(),
        {"denominator": -1},
    ),
    "denominator must be a number or a 0-dim tensor without gradient but has shape [1].": (
        Objective(),
        {"denominator": torch.ones(1)},
    ),
    'prompt_tokens go with reduce="prompt_mean", and none came.': (Objective(reduce="prompt_mean"), {"denominator": 1}),
    "and they came with reduce='token_mean'.": (Objective(), {"prompt_tokens": torch.ones(1)}),
    'reduce="prompt_mean" needs denominator=': (Objective(reduce="prompt_mean"), {"prompt_tokens": torch.ones(1)}),
    "prompt_tokens must be a tensor of numbers, one per sample, [1], but is a tensor [2] torch.float32.": (
        Objective(reduce="prompt_mean"),
        {"prompt_tokens": torch.ones(2), "denominator": 1},
    ),
    "entropy_coef is 0.1 but the entropy has no graph.": (Objective(entropy_coef=0.1), {}),
    "group: wanted a torch.distributed process group": (Objective(), {"group": 3}),
    "a term reads the field 'bonus', which was not given (fields here: old_logprob, advantage).": (
        Objective(policy=lambda inputs: inputs.bonus),
        {},
    ),
    'takes a mean over samples, but may be given rows that cut through them. Declare Objective(level="sequence")': (
        Objective(policy=lambda inputs: inputs.mean_by_sample(inputs.logprob)),
        {},
    ),
    "policy must return one value per row, [2], but its loss is [].": (
        Objective(policy=lambda inputs: inputs.logprob.sum()),
        {},
    ),
    "correction must return one value per row, [2], but it returned [].": (
        Objective(correction=lambda inputs: inputs.logprob.sum()),
        {},
    ),
}


@pytest.mark.parametrize("text", CALLS)
def test_wrong_calls(text):
    objective, changes = CALLS[text]
    rows = Rows.packed([[1, 2, 3]], [2])
    stats = TokenStats(torch.zeros(2, requires_grad=True), torch.zeros(2), torch.zeros(2))
    arguments = {"old_logprob": torch.zeros(2), "advantage": torch.zeros(2), **changes}
    with pytest.raises(LogitlessError, match=re.escape(text)):
        objective(stats, rows, **arguments)


def test_wrong_results():
    rows = Rows.packed([[1, 2, 3]], [2])
    fields = {"old_logprob": torch.zeros(2), "advantage": torch.zeros(2)}
    short = TokenStats(torch.zeros(3), None, torch.zeros(3))
    with pytest.raises(LogitlessError, match=re.escape("logprob has shape [3] but there are 2 rows.")):
        Objective()(short, rows, **fields)
    without = TokenStats(torch.zeros(2), None, torch.zeros(2))
    with pytest.raises(LogitlessError, match="the entropy was not computed"):
        Objective(entropy_coef=0.1)(without, rows, **fields)


def test_wrong_counts():
    rows = Rows.packed([[1, 2, 3]], [2])
    with pytest.raises(LogitlessError, match="rows is an empty list"):
        count_over([], "token_mean")
    with pytest.raises(LogitlessError, match="the tokens of each prompt come from prompt_tokens_over"):
        count_over(rows, "prompt_mean")
    with pytest.raises(LogitlessError, match="prompt_mean but is 'mean'"):
        count_over(rows, "mean")
    with pytest.raises(LogitlessError, match=re.escape("must be in 0 .. 1 but reach 2 .. 2.")):
        prompt_tokens_over(rows, torch.tensor([2]), 2)
    with pytest.raises(LogitlessError, match=re.escape("must be integers of shape [1], one per sample, but are [2]")):
        prompt_tokens_over(rows, torch.tensor([0, 0]), 2)
    with pytest.raises(LogitlessError, match="got 1 rows but 2 tensors of prompts"):
        prompt_tokens_over(rows, [torch.tensor([0])] * 2, 2)
    with pytest.raises(LogitlessError, match="The straight-through and weighted forms differ in their gradient"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k1_weighted")


def test_a_split_sample_needs_its_group():
    from logitless import Zigzag

    rows = Rows.packed([[1, 2, 3, 4, 5]], [3], cp=Zigzag(0, 2))
    fields = {"old_logprob": torch.zeros(len(rows)), "advantage": torch.zeros(len(rows))}
    Objective().inputs(None, rows, fields)
    with pytest.raises(LogitlessError, match="split over 2 context-parallel ranks but group has 1"):
        Objective(policy="gspo").inputs(None, rows, fields)


def test_inputs_can_be_copied():
    """The fallback for missing fields leaves Python's own protocols alone."""
    import copy

    inputs = Objective().inputs(
        None, Rows.packed([[1, 2]], [1]), {"old_logprob": torch.zeros(1), "advantage": torch.ones(1)}
    )
    assert isinstance(copy.copy(inputs), Inputs)
    assert inputs.advantage.tolist() == [1.0]
