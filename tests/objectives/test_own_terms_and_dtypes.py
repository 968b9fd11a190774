"""Terms of the caller's own, and fields and results of every dtype, against plain torch in float64."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from close import assert_close_to_truth
from torch import Tensor

import logitless as ll
from logitless.call.dry import under_way
from logitless.memory import sized, sized_rows
from logitless.objectives import Metrics, discounted_returns, gae, row_weights, whiten

T, D, V = 9, 8, 50
TARGET = torch.arange(T) * 5
REINFORCE = ll.Objective(policy="reinforce")


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(n, D, dtype=dtype, requires_grad=True) for n in (T, V))


def entropy_bonus(inputs):
    return -inputs.advantage * inputs.logprob - 0.5 * inputs.entropy


# What terms of one's own read and return.


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("memory", "level"), [(None, None), ("2KiB", None), (None, "batch")])
@pytest.mark.parametrize("form", ["hidden", "given"])
def test_an_entropy_that_an_own_term_reads_has_a_gradient(form, memory, level, frozen):
    hidden, weight = operands()
    weight.requires_grad_(not frozen)
    advantage = torch.randn(T, dtype=torch.float64)
    log_p = (hidden @ weight.T).log_softmax(-1)
    truth = (-advantage * log_p[range(T), TARGET] + 0.5 * (log_p.exp() * log_p).sum(-1)).mean()
    leaves = [hidden] if frozen else [hidden, weight]
    right = torch.autograd.grad(truth, leaves)
    logits = ll.Logits(hidden, weight) if form == "hidden" else hidden @ weight.T
    objective = ll.Objective(policy=entropy_bonus, level=level)
    loss, _ = ll.policy_loss(logits, TARGET, objective, advantage=advantage, memory=memory)
    for ours, wanted in zip(torch.autograd.grad(loss, leaves), right, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)


WRONG = {
    "kl must return one value per row, [9], but it returned [].": {"kl": lambda a, b: (a - b).sum(), "kl_coef": 1.0},
    "kl must return one value per row, [9], but it returned [9, 1].": {"kl": lambda a, b: a[:, None], "kl_coef": 1.0},
    "kl must return one value per row, [9], but it returned float.": {"kl": lambda a, b: 0.5, "kl_coef": 1.0},
    "correction must return one value per row, [9], but it returned float.": {"correction": lambda x: 1.0},
    "policy must return one value per row, [9], but its loss is tuple.": {"policy": lambda x: (x.logprob, {}, 1)},
    "the metrics that policy returns must be a Mapping but is None": {"policy": lambda x: (x.logprob, None)},
    "policy must return one value per row, [9], but mine is float.": {"policy": lambda x: (x.logprob, {"mine": 2.0})},
}


@pytest.mark.parametrize("text", WRONG)
def test_what_own_terms_return_is_checked(text):
    hidden, weight = operands(torch.float32)
    fields = {"advantage": torch.ones(T), "ref_logprob": torch.zeros(T), "old_logprob": "current"}
    with pytest.raises(ll.LogitlessError, match=re.escape(text)):
        ll.policy_loss(ll.Logits(hidden, weight), TARGET, ll.Objective(**WRONG[text]), **fields)


@pytest.mark.parametrize("name", ["ratio", "advantage", "entropy", "approx_kl_k3", "ratio_max", "loss", "rank"])
def test_a_metric_of_the_objectives_own_name_is_refused(name):
    stats = ll.TokenStats(torch.zeros(T), torch.ones(T), None)._replace(rank=torch.zeros(T))
    objective = ll.Objective(policy=lambda x: (-x.logprob, {name: x.logprob}))
    with pytest.raises(ll.LogitlessError, match=f"policy names a metric '{name}', which the objective has itself"):
        objective(stats, ll.Rows.every(TARGET), old_logprob="current", advantage=torch.ones(T))


def test_a_loss_that_depends_on_no_log_prob_has_a_gradient_of_zero():
    hidden, weight = operands(torch.float32)
    annealed = ll.Objective(policy="none", kl="k2", kl_coef=0.0)
    for logits in (hidden @ weight.T, ll.Logits(hidden, weight)):
        loss, _ = ll.policy_loss(logits, TARGET, annealed, ref_logprob=torch.zeros(T))
        assert not any(x.any() for x in torch.autograd.grad(loss, [hidden, weight]))
    infinite = torch.full((T,), -torch.inf, requires_grad=True)
    loss, _ = annealed(ll.TokenStats(infinite, None, None), ll.Rows.every(TARGET), ref_logprob=torch.zeros(T))
    (gradient,) = torch.autograd.grad(loss, infinite)
    assert loss == 0
    assert not gradient.any()


# Dtypes.


@pytest.mark.parametrize("policy", ["reinforce", "ppo_clip", "cispo", "sapo"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.uint16, torch.int64])
def test_integer_advantages(policy, dtype):
    """A negated uint8 wraps around, and -128 has no negative in int8."""
    hidden, weight = operands(torch.float32)
    whole = torch.tensor([1, 0, 3, 100, 0, 1, 2, 0, 1]) * (-1 if dtype == torch.int8 else 1)
    whole[3] = -128 if dtype == torch.int8 else 100
    losses = []
    for advantage in (whole.to(dtype), whole.float()):
        fields = {"advantage": advantage} if policy == "reinforce" else {"advantage": advantage, "old_logprob": OLD}
        losses.append(ll.policy_loss(ll.Logits(hidden, weight), TARGET, ll.Objective(policy=policy), **fields)[0])
    assert torch.equal(*losses)


OLD = -torch.linspace(1, 3, T)


def test_an_integer_field_of_an_own_term_stays_one():
    seen = []
    objective = ll.Objective(policy=lambda x: (seen.append(x.kind.dtype), -x.logprob)[1], needs=("kind",))
    ll.policy_loss(ll.Logits(*operands(torch.float32)), TARGET, objective, kind=torch.arange(T))
    assert set(seen) == {torch.int64}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_probs_of_other_code_in_16_bits_are_worked_on_in_float32(dtype):
    rows = ll.Rows.packed([[1, 2, 3, 4], [1, 2, 3]], [3, 2])
    own = torch.full((5,), -4.0, dtype=dtype, requires_grad=True)
    old, advantage = torch.full((5,), -4.01), torch.linspace(0.5, 1.5, 5)
    loss, _ = ll.Objective()(ll.TokenStats(own, None, None), rows, old_logprob=old, advantage=advantage)
    plain = -(advantage * (own.float() - old).exp()).mean()
    assert_close_to_truth(loss, -(advantage.double() * (own.double() - old.double()).exp()).mean(), plain)
    small, _ = REINFORCE(ll.TokenStats(own, None, None), rows, advantage=advantage, denominator=2e8)
    torch.testing.assert_close(small.item(), 4 * 5 / 2e8)
    assert torch.autograd.grad(loss, own)[0].dtype == dtype
    pair = ll.Preference("dpo")(ll.TokenStats(own, None, None), rows, ref_logprob=old)[0]
    torch.testing.assert_close(pair.item(), float(-torch.nn.functional.logsigmoid(torch.tensor(0.1 * 0.01))))


def test_log_probs_that_are_integers_are_refused():
    rows = ll.Rows.packed([[1, 2, 3]], [2])
    stats = ll.TokenStats(torch.tensor([-4, -3]), None, None)
    for objective in (REINFORCE, ll.Preference("simpo")):
        with pytest.raises(ll.LogitlessError, match="logprob must be a tensor of floating-point numbers"):
            objective(stats, rows, advantage=torch.ones(2))


@pytest.mark.parametrize("name", ["log_z", "divergence", "mean_logit", "rank"])
def test_results_of_other_rows_are_refused_by_name(name):
    stats = ll.TokenStats(torch.zeros(2), None, None)._replace(**{name: torch.zeros(3)})
    with pytest.raises(ll.LogitlessError, match=rf"{name} has shape \[3\] but there are 2 rows"):
        REINFORCE(stats, ll.Rows.packed([[1, 2, 3]], [2]), advantage=torch.ones(2))


def test_integers_along_time():
    rows = ll.Rows.packed([[1, 2, 3, 4]], [3])
    rewards = torch.tensor([0, 0, 1])
    assert torch.equal(
        discounted_returns(rewards, rows, gamma=0.9), discounted_returns(rewards.float(), rows, gamma=0.9)
    )
    for x, y in zip(gae(rewards, 0 * rewards, rows), gae(rewards.float(), 0.0 * rewards, rows), strict=True):
        assert torch.equal(x, y)
    everywhere = torch.ones(3, dtype=torch.bool)
    assert torch.equal(whiten(torch.tensor([1, 2, 6]), everywhere), whiten(torch.tensor([1.0, 2, 6]), everywhere))


@pytest.mark.parametrize("values", [torch.tensor([300.0, 300]).half(), torch.tensor([1e20, 1e20])])
def test_squares_of_weights_are_past_no_range(values):
    counted = torch.ones(2, dtype=torch.bool)
    metrics = Metrics.of_rows({"n": torch.tensor([70000, 70002])}, counted, weights={"w": values})
    assert metrics.compute() == {"n": 70001.0, "w": 1.0}
    mixed = Metrics.of_rows({"n": torch.tensor([70000, 70002]), "x": torch.ones(2).half()}, counted)
    assert mixed.compute() == {"n": 70001.0, "x": 1.0}


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [0.37, 65536.0])
def test_a_grad_scale_is_not_rounded_to_torchs_default_dtype(default, scale):
    hidden, weight = operands(torch.float32)
    wanted, found = torch.zeros(V, D), torch.zeros(V, D)
    for buffer in (wanted, found):
        if buffer is found:
            torch.set_default_dtype(default)
        try:
            logits = ll.Logits(hidden, weight, weight_grad=buffer, grad_scale=scale)
            loss, _ = ll.policy_loss(logits, TARGET, REINFORCE, advantage=torch.ones(T, dtype=torch.float32))
            (loss * scale).backward()
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(found, wanted)
    assert found.isfinite().all()


def test_a_field_that_was_made_in_inference_mode():
    rows = ll.Rows.packed([[1, 2, 3, 4], [1, 2, 3]], [3, 2])
    assert rows.complete
    hidden, weight = torch.randn(rows.num_tokens, D, requires_grad=True), torch.randn(V, D)
    with torch.inference_mode():
        field = torch.rand(5)
    ordinary = field.clone()
    own = ll.Objective(policy=lambda x: -(x.advantage * x.log_ratio.exp()))
    for objective, name in ((ll.Objective.recipe("sft"), "token_weight"), (own, "advantage")):
        more = {} if name == "token_weight" else {"old_logprob": OLD[:5]}
        found = []
        for x in (field, ordinary):
            for logits in (ll.Logits(hidden, weight), hidden @ weight.T):
                loss, _ = ll.policy_loss(logits, rows, objective, **{name: x}, **more)
                found.append(torch.autograd.grad(loss, hidden)[0])
        assert torch.equal(found[0], found[2])
        assert torch.equal(found[1], found[3])


# Arguments.


def test_arguments_that_are_wrong():
    rows, advantage = ll.Rows.packed([[1, 2, 3]], [2]), torch.ones(2)
    stats = ll.TokenStats(torch.zeros(2), None, None)

    def refused(text, call):
        with pytest.raises(ll.LogitlessError, match=re.escape(text)):
            call()

    by_prompt = ll.Objective(policy="reinforce", reduce="prompt_mean")
    refused("prompt_tokens", lambda: by_prompt(stats, rows, advantage=advantage, denominator=1, prompt_tokens=[7]))
    refused("denominator", lambda: REINFORCE(stats, rows, advantage=advantage, denominator=torch.tensor(1 + 2j)))
    refused("dual_clip must be above 1", lambda: ll.Objective(policy_options={"dual_clip": 0.5}))
    refused("clip bounds the ratio", lambda: ll.Objective(policy_options={"clip": 2.0}))
    refused("row_weights: reduce", lambda: row_weights(rows, "tokenmean"))
    refused("row_weights: length", lambda: row_weights(rows, "sample_sum"))
    detached = ll.TokenStats(torch.zeros(2, requires_grad=True), None, torch.zeros(2))
    z_loss = ll.Objective(policy="reinforce", z_coef=0.1)
    refused("log_z has no graph", lambda: z_loss(detached, rows, advantage=advantage))


def test_clip_among_the_options_is_one_number_or_two():
    by_option, by_name = ll.Objective(policy_options={"clip": 0.1}), ll.Objective(clip=0.1)
    fields = {"advantage": torch.ones(T), "old_logprob": OLD}
    logits = ll.Logits(*operands(torch.float32))
    assert torch.equal(*(ll.policy_loss(logits, TARGET, x, **fields)[0] for x in (by_option, by_name)))


class Gate:
    """An object whose repr is its address."""

    def __call__(self, x: Tensor) -> Tensor:
        return x


def test_settings_are_described_without_addresses():
    def describe() -> str:
        options = {"f": Gate(), "g": [Gate().__call__, object()], "h": {"x": lambda x: x}}
        return ll.Objective(policy=lambda inputs, **_: inputs.logprob, policy_options=options).described()

    assert describe() == describe()
    assert "0x" not in describe()


# A loss as an argument of a head.


def test_a_preference_goes_where_an_objective_goes():
    linear, rows = torch.nn.Linear(D, V, bias=False), ll.Rows.packed([[1, 2, 3], [1, 4]], [2, 1])
    hidden, reference = torch.randn(rows.num_tokens, D), torch.zeros(3)
    preference = ll.Preference("dpo")
    ours = ll.PolicyHead(linear)(hidden, rows, loss=ll.Loss(preference, ref_logprob=reference))
    logits = ll.Logits(hidden, linear.weight)
    assert torch.equal(ours.loss, ll.policy_loss(logits, rows, preference, ref_logprob=reference)[0])


def test_options_of_a_head_go_to_the_verb_that_has_them():
    linear, hidden = torch.nn.Linear(D, V, bias=False), torch.randn(T, D)
    head = ll.PolicyHead(linear, stats=("top1",), top_k=3, entropy="value", drop_zeros=False, denominator=3)
    assert head(hidden, TARGET).top_k_ids.shape == (T, 3)
    ours = head(hidden, TARGET, loss=ll.Loss(REINFORCE, advantage=torch.ones(T), denominator=3)).loss
    plain = ll.policy_loss(ll.Logits(hidden, linear.weight), TARGET, REINFORCE, advantage=torch.ones(T), denominator=3)
    assert torch.equal(ours, plain[0])
    for name in ("logits", "rows", "objective", "fields"):
        with pytest.raises(ll.LogitlessError, match="PolicyHead: the name of an option"):
            ll.PolicyHead(linear, **{name: None})


# Threads.


def test_a_dry_call_of_one_thread_is_none_of_another():
    """A real call is made while another thread estimates: it takes neither the other's machine nor its end."""
    hidden, weight = operands(torch.float32)
    machines, inside, done = [], threading.Event(), threading.Event()

    class Waits:
        """A policy term that holds the dry call up."""

        def __call__(self, inputs):
            inside.set()
            assert done.wait(60)
            return inputs.logprob

    class Sees:
        """A policy term that a real call comes by."""

        def __call__(self, inputs):
            machines.append(under_way())
            return inputs.logprob

    def dry() -> None:
        big, _ = sized(64, 1000, 64)
        machines.append(ll.estimate(ll.policy_loss, big, sized_rows(64), ll.Objective(policy=Waits())).backend)

    thread = threading.Thread(target=dry)
    thread.start()
    try:
        assert inside.wait(60)
        logits = ll.Logits(hidden, weight)
        _, _, stats = ll.policy_loss(logits, TARGET, ll.Objective(policy=Sees()), return_stats=True)
        assert ll.explain(ll.logprobs, hidden @ weight.T, TARGET) is not None
    finally:
        done.set()
        thread.join()
    assert stats.logprob.isfinite().all()
    assert set(machines) == {None, "triton"}
