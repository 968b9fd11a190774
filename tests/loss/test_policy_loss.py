"""``policy_loss`` from hidden states against float64: loss and gradients, whatever objective, head, rows and chunks.

The truth shares nothing with the library: logits in float64, ``log_softmax`` (truth.py), then the papers' formulas
token by token (objective_truth.py), and autograd through all of it. The yardstick is the same in float32. What
``objective(logprobs(...))`` gives must agree too, metrics included.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from calls import logits_of
from shared.linear import BACKENDS, DTYPES, GRADIENT_PROMISE, Operands, whole_operands
from shared.objective_terms import CORRECTIONS, POLICIES, formula_of
from shared.policy_loss import (
    KL,
    NAMES,
    PPO,
    PPO_FORMULA,
    VOCAB,
    assert_right,
    assert_same,
    check,
    composed,
    make,
    ran,
    room,
    told,
)
from truth import truth

import logitless as ll
from logitless.objectives import KL_TERMS, RECIPES, count_over

pytestmark = pytest.mark.usefixtures("one_thread")


# Dtypes, backends and sizes.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes_and_backends(backend: str, dtype: torch.dtype):
    sizes = {"lengths": [5, 0, 2, 8, 1, 3], "vocab": 63} if backend == "triton" else {}
    problem = make(dtype, **sizes, head={"temperature": torch.linspace(0.6, 1.7, 19 if sizes else 29)})
    if backend == "triton" and dtype == torch.float64:
        with pytest.raises(ll.LogitlessError, match=r"its kernels take .* not torch.float64"):
            ran(problem, ll.Objective(**PPO), backend=backend)
        return
    check(problem, PPO, PPO_FORMULA, backend=backend)
    if backend != "triton":
        memory = room(4, itemsize=max(4, dtype.itemsize))
        check(problem, PPO, PPO_FORMULA, backend=backend, memory=memory, drop_zeros=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("lengths", "vocab", "width"), [([11] * 12, 7, 33), ([40, 25], 5003, 5), ([23], 507, 63)])
def test_odd_sizes(lengths, vocab: int, width: int, dtype: torch.dtype):
    """More rows than columns and fewer, and more columns than a widened product takes at a time."""
    problem = make(dtype, lengths, vocab, width)
    for num_rows in (10, sum(lengths)):
        check(problem, PPO, PPO_FORMULA, memory=room(num_rows, vocab))


# Objectives.


@pytest.mark.parametrize("entropy_coef", [0.0, 0.05])
@pytest.mark.parametrize("reduce", ["token_mean", "sample_mean", "sample_sum"])
@pytest.mark.parametrize("name", POLICIES)
def test_policy_terms(name: str, reduce: str, entropy_coef: float):
    problem = make()
    more = {"reduce": reduce, "entropy_coef": entropy_coef}
    length = {"length": 11} if reduce == "sample_sum" else {}
    check(problem, POLICIES[name][0] | more | length, formula_of(name, **more, **length), memory=room(13))


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections(name: str):
    bounds = CORRECTIONS[name]
    more = {"correction": name, "correction_bounds": bounds if len(bounds) == 2 else bounds[0]}
    formula = replace(PPO_FORMULA, correction=name, bounds=bounds)
    check(make(), PPO | more, formula, memory=room(13))


@pytest.mark.parametrize("kind", KL_TERMS)
def test_kl_terms(kind: str):
    formula = replace(PPO_FORMULA, kl=kind, kl_coef=0.3, entropy_coef=0.0)
    check(make(), PPO | {"kl": kind, "kl_coef": 0.3, "entropy_coef": 0.0}, formula, memory=room(5))


@pytest.mark.parametrize("entropy_coef", [0.0, -0.02])
# What needs a teacher is in test_divergence.py.
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "distill"])
def test_recipes(name: str, entropy_coef: float):
    """Each as the composed objective has it, with a KL term and without."""
    problem = make(torch.float64)
    for kl in ({}, {"kl": "k2", "kl_coef": 0.2}):
        length = {"length": 9} if name == "dr_grpo" else {}
        objective = ll.Objective.recipe(name, entropy_coef=entropy_coef, **kl, **length)
        assert_same(ran(problem, objective, memory=room(13, itemsize=8)), composed(problem, objective), 1e-12)


def test_prompt_mean_and_denominators():
    from logitless.objectives import prompt_tokens_over

    problem = make(torch.float64)
    rows = problem.batch.rows()
    (tokens,) = prompt_tokens_over(rows, torch.tensor([0, 0, 1, 1, 2, 2]), 3)
    objective = ll.Objective(**PPO, reduce="prompt_mean")
    ours = ran(problem, objective, rows, denominator=3, prompt_tokens=tokens, memory=room(4))
    assert_right(problem, ours, replace(PPO_FORMULA, reduce="prompt_mean"))
    whole = ran(problem, ll.Objective(**PPO))
    count = count_over(rows, "token_mean")
    for denominator in (4 * count, 4.0 * float(count)):
        quarter = ran(problem, ll.Objective(**PPO), denominator=denominator)
        assert_same(
            quarter._replace(loss=4 * quarter.loss, metrics=whole.metrics),
            whole._replace(gradients={name: g / 4 for name, g in whole.gradients.items()}),
            1e-12,
        )


def test_a_function_of_the_users():
    def squares(inputs):
        return inputs.bonus * inputs.logprob.square(), {"bonus": inputs.bonus}

    problem = make(torch.float64)
    objective = ll.Objective(policy=squares, needs=("bonus",))
    given = {"bonus": torch.randn(29)}
    ours = ran(problem, objective, given=given, memory=room(3, itemsize=8))
    assert_same(ours, composed(problem, objective, given=given), 1e-12)
    assert "bonus" in ours.metrics


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "reinforce"])
def test_old_log_probs_of_the_pass_itself(name: str):
    """Ratio 1 with its gradient, as with detached log-probs passed in."""
    problem, options = make(torch.float64), POLICIES[name][0] | KL
    ours = check(problem, options, replace(formula_of(name), **KL), on_policy=True, memory=room(13, itemsize=8))
    near = problem.scores(truth, problem.operands.leaves((), torch.float64)).logprob
    passed = ran(problem, ll.Objective(**options), given={"old_logprob": near})
    assert ran(problem, ll.Objective(**options), given={"old_logprob": "current"}).loss == pytest.approx(passed.loss)
    assert name == "reinforce" or ours.metrics["ratio_max"] == ours.metrics["ratio_min"] == 1.0


# The head.


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize(
    "head",
    [
        {"temperature": 0.7},
        {"temperature": torch.linspace(0.5, 2, 29)},
        {"softcap": 5.0, "scale": 1.3},
        {"vocab_size": 90, "softcap": 4.0, "temperature": torch.linspace(0.5, 2, 29)},
    ],
    ids=lambda head: "-".join(head),
)
def test_heads(head: dict, backend: str):
    problem = make(head=head)
    for dtype in (torch.float32, torch.bfloat16):
        case = replace(problem, operands=Operands(*(x.to(dtype) for x in problem.operands)))
        for memory in ("1GiB", room(3)):
            check(case, PPO, PPO_FORMULA, backend=backend, memory=memory)


def test_a_padded_vocabulary_is_never_read():
    problem = make(head={"vocab_size": 90})
    right = ran(problem, ll.Objective(**PPO), memory=room(5))
    for x in problem.operands[1:]:
        x[90:] = torch.nan
    ours = ran(problem, ll.Objective(**PPO), memory=room(5))
    assert_same(ours, right, 0.0)
    assert not ours.gradients["weight"][90:].any()
    assert not ours.gradients["bias"][90:].any()


def test_softcap_in_the_interpreter():
    head = {"vocab_size": 60, "softcap": 5.0, "temperature": torch.linspace(0.5, 2, 9)}
    for dtype in (torch.float32, torch.bfloat16):
        check(make(dtype, [4, 3, 2], 63, head=head), PPO, PPO_FORMULA, backend="triton", memory=room(5, 63))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_bias(dtype: torch.dtype):
    problem = make(dtype)
    problem = replace(problem, operands=problem.operands._replace(bias=None))
    check(problem, PPO, PPO_FORMULA, wanted=NAMES[:2], memory=room(6))


def test_a_float32_bias_beside_bfloat16_operands():
    problem = make(torch.bfloat16)
    problem = replace(problem, operands=problem.operands._replace(bias=torch.randn(VOCAB)))
    ours = ran(problem, ll.Objective(**PPO), memory=room(6))
    right = told(problem, PPO_FORMULA)
    assert ours.gradients["bias"].dtype == torch.float32
    for name, g in right.gradients.items():
        assert (ours.gradients[name] - g).norm() <= GRADIENT_PROMISE * g.norm()


@pytest.mark.parametrize("with_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("match", [torch.bfloat16, torch.float16], ids=str)
def test_match_rounds_the_logits_once(match: torch.dtype, dtype: torch.dtype, with_bias: bool):
    """Float32 gradients do not fit over half-precision logits: two passes, and the same numbers."""
    operands = whole_operands(47, VOCAB, dtype, with_bias)
    problem = make(dtype, operands=operands, match=match)
    wanted = NAMES if with_bias else NAMES[:2]
    options = {"match": str(match).split(".")[1], "memory": room(7)}
    logits, verb = logits_of(operands.hidden, operands.weight, options)
    rows = problem.batch.rows()
    kind = ll.explain(ll.policy_loss, logits, rows, ll.Objective(**PPO), **verb, **problem.fields(rows)).kind
    assert kind == ("two passes" if dtype == torch.float32 else "one pass")
    check(problem, PPO, PPO_FORMULA, wanted=wanted, **options)
