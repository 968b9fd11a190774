"""``policy_loss`` of ``Logits`` inside the machinery of autograd, at its edges, and its errors by their text.

Gradients are made in forward, so whatever happens between forward and backward is where they could be lost, doubled or
scaled wrongly: other upstream gradients, second backwards, checkpoints, a buffer that is added to in forward.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from calls import loss_from_hidden
from close import assert_gradient_close_to_truth
from objective_truth import Formula
from shared.errors import raises
from shared.linear import GRADIENT_PROMISE, Operands, ragged, refusing
from shared.objective_terms import POLICIES
from shared.policy_loss import (
    NAMES,
    PPO,
    PPO_FORMULA,
    VOCAB,
    WIDTH,
    Problem,
    Ran,
    assert_right,
    assert_same,
    composed,
    make,
    ran,
    room,
    told,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from truth import truth

import logitless as ll

pytestmark = pytest.mark.usefixtures("one_thread")

NAN, INF = float("nan"), float("inf")


def call(problem: Problem, leaf: Operands, objective=None, **options) -> Tensor:
    """The loss of a problem."""
    rows = options.pop("rows", None)
    rows = problem.batch.rows() if rows is None else rows
    options = {"memory": room(6), "bias": leaf.bias, **problem.fields(rows), **options}
    loss, _ = loss_from_hidden(leaf.hidden, leaf.weight, rows, objective or ll.Objective(**PPO), **options)
    return loss


def gradients(leaf: Operands) -> dict[str, Tensor]:
    return {name: x.grad for name, x in leaf._asdict().items() if x is not None and x.grad is not None}


# The gradient that arrives at the loss.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("upstream", [1.0, -0.37, 1 / 3, 3000.0, 0.0])
def test_any_upstream_gradient(upstream: float, dtype: torch.dtype):
    problem = make(dtype)
    ours = ran(problem, ll.Objective(**PPO), upstream=upstream, memory=room(6))
    assert_right(problem, ours, PPO_FORMULA, upstream=float(torch.tensor(upstream)))
    assert upstream != 0 or not any(g.any() for g in ours.gradients.values())


def test_a_loss_scale_past_the_range_of_float16():
    """The factor itself must not be rounded to the dtype of the gradients."""
    problem = make(torch.float16, spread=0.3)
    upstream = 2.0**17
    leaf = problem.operands.leaves(("hidden",))
    (call(problem, leaf, ll.Objective(), denominator=2.0**12) * upstream).backward()
    exact = told(problem, Formula(options={"low": 0.2, "high": 0.2}), wanted=("hidden",), upstream=1.0)
    counted = int(problem.batch.rows().counted.sum())
    right = exact.gradients["hidden"] * counted * upstream / 2**12
    assert (leaf.hidden.grad.double() - right).norm() <= GRADIENT_PROMISE * right.norm()


def test_float16_gradients_of_a_large_batch():
    """A token of a million has a gradient of 1e-6 p, below float16's range until the loss scale arrives."""
    hidden, weight = torch.randn(40, 16).half(), (torch.randn(300, 16) / 4).half()
    target, advantage = torch.randint(300, (40,)), torch.randn(40)
    scale, tokens = 2.0**17, 1e6
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    fields = {"old_logprob": "current", "advantage": advantage, "denominator": tokens}
    loss, _ = ll.policy_loss(ll.Logits(*leaves), target, ll.Objective(), **fields)
    (loss * scale).backward()
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    right = truth(exact[0] @ exact[1].T, torch.arange(40), target).logprob
    (-(advantage * (right - right.detach()).exp()).sum() * scale / tokens).backward()
    for mine, theirs in zip(leaves, exact, strict=True):
        assert (mine.grad.double() - theirs.grad).norm() <= GRADIENT_PROMISE * theirs.grad.norm()


def test_a_loss_used_twice():
    leaf = (problem := make(torch.float64)).operands.leaves()
    loss = call(problem, leaf)
    (2.5 * loss + loss.exp()).backward()
    upstream = float(2.5 + loss.detach().exp())
    ours = Ran(loss.detach(), gradients(leaf), {})
    assert_right(problem, ours, PPO_FORMULA, upstream=upstream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_second_backward_is_right_again(dtype: torch.dtype):
    """Nothing that was saved is written to; another upstream gradient in between changes nothing."""
    leaf = (problem := make(dtype)).operands.leaves()
    loss = call(problem, leaf)
    runs = [torch.autograd.grad(loss, leaf, torch.tensor(g).to(loss), retain_graph=True) for g in (1.7, -0.4, 1.7)]
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[2], strict=True))
    for g, run in zip((1.7, -0.4), runs, strict=False):
        ours = Ran(loss.detach(), dict(zip(NAMES, run, strict=True)), {})
        assert_right(problem, ours, PPO_FORMULA, upstream=float(torch.tensor(g)))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("policy", ["ppo_clip", "gspo"])
def test_second_derivative(policy: str):
    leaf = (problem := make()).operands.leaves()
    loss = call(problem, leaf, ll.Objective(**POLICIES[policy][0]), memory=room(13))
    with raises("policy_loss: backward with create_graph=True asks for a second derivative, which is not ..."):
        torch.autograd.grad(loss, leaf.hidden, create_graph=True)


# Without gradients, and with some of them.


@pytest.mark.parametrize("policy", ["ppo_clip", "gspo"])
def test_only_the_loss_where_nothing_is_recorded(policy: str):
    problem, objective = make(), ll.Objective(**POLICIES[policy][0])
    right = ran(problem, objective)
    buffer = torch.ones(VOCAB, WIDTH)
    frozen, trained = problem.operands.leaves(()), problem.operands.leaves()
    losses = [call(problem, frozen, objective, weight_grad=buffer)]
    with torch.no_grad():
        losses.append(call(problem, trained, objective, weight_grad=buffer))
    with torch.inference_mode():
        losses.append(call(problem, trained, objective, weight_grad=buffer))
    for loss in losses:
        assert not loss.requires_grad
        torch.testing.assert_close(loss, right.loss, rtol=1e-6, atol=1e-6)
    assert (buffer == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "wanted", [("hidden",), ("weight",), ("bias",), ("hidden", "weight"), ("weight", "bias")], ids="-".join
)
def test_freezing_some_leaves_the_others_unchanged(wanted, dtype: torch.dtype):
    problem, objective = make(dtype), ll.Objective(**PPO)
    whole, some = (ran(problem, objective, wanted=names, memory=room(6)) for names in (NAMES, wanted))
    assert set(some.gradients) == set(wanted)
    assert all(torch.equal(whole.gradients[name], g) for name, g in some.gradients.items())


# A buffer for the weight's gradient, added to in forward.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "scale", [1.0, 0.125, -3.0, torch.tensor(0.3), torch.tensor(7.0, dtype=torch.float64)], ids=str
)
def test_weight_gradient_into_a_buffer(scale, dtype: torch.dtype):
    """Added to what is there, once and before backward; hidden and bias get theirs in backward."""
    problem = make(dtype)
    exact = told(problem, PPO_FORMULA, upstream=float(scale))
    for memory in ("1GiB", room(6)):
        leaf, before = problem.operands.leaves(), torch.randn(VOCAB, WIDTH)
        buffer = before.clone()
        loss = call(problem, leaf, weight_grad=buffer, grad_scale=scale, memory=memory)
        added = (buffer - before).double()
        assert (added - exact.gradients["weight"]).norm() <= GRADIENT_PROMISE * exact.gradients["weight"].norm()
        (loss * scale).backward()
        assert torch.equal((buffer - before).double(), added)
        assert leaf.weight.grad is None
        usual = told(problem, PPO_FORMULA, upstream=float(scale), exact=False)
        for name in ("hidden", "bias"):
            mine = getattr(leaf, name).grad
            assert_gradient_close_to_truth(mine, exact.gradients[name], usual.gradients[name], name)


def test_micro_batches_add_up_in_one_buffer():
    """Forward of all, then backward of all, as a pipeline does."""
    problems = [make(lengths=[5, 9]), make(lengths=[1, 0, 8])]
    weight, buffer = problems[0].operands.weight, torch.zeros(VOCAB, WIDTH)
    problems = [replace(p, operands=p.operands._replace(weight=weight, bias=None)) for p in problems]
    shared, usual = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    hidden = [p.operands.hidden.clone().requires_grad_() for p in problems]
    scaled = {"weight_grad": buffer, "grad_scale": 0.5}
    losses = [call(p, Operands(h, shared, None), **scaled) for p, h in zip(problems, hidden, strict=True)]
    (0.5 * (losses[0] + losses[1])).backward()
    for p, h in zip(problems, hidden, strict=True):
        (0.5 * call(p, Operands(h, usual, None))).backward()
    assert shared.grad is None
    torch.testing.assert_close(buffer, usual.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("arrives", "said"), [(2.0, 1.0), (1.0, 2.0), (0.0, 1.0), (NAN, 1.0), (1.0, 1.001)])
def test_another_gradient_than_was_announced(arrives: float, said: float):
    leaf, buffer = (problem := make()).operands.leaves(), torch.zeros(VOCAB, WIDTH)
    loss = call(problem, leaf, weight_grad=buffer, grad_scale=said)
    with raises(
        f"policy_loss: the gradient {arrives} arrived at the loss, but weight_grad was added to with grad_scale "
        f"{said:.3}...Pass Logits(grad_scale=) the factor that the loss is multiplied by before backward."
    ):
        (loss * arrives).backward()
    assert leaf.hidden.grad is None


def test_a_factor_that_was_rounded_on_its_way_is_the_same():
    leaf, buffer = (problem := make()).operands.leaves(), torch.zeros(VOCAB, WIDTH)
    loss = call(problem, leaf, weight_grad=buffer, grad_scale=1 / 7)
    (loss * 3 / 21).backward()
    assert leaf.hidden.grad is not None


def test_a_second_backward_with_a_buffer():
    leaf, buffer = (problem := make()).operands.leaves(), torch.zeros(VOCAB, WIDTH)
    loss = call(problem, leaf, weight_grad=buffer)
    loss.backward(retain_graph=True)
    once, hidden = buffer.clone(), leaf.hidden.grad.clone()
    with raises("policy_loss: second backward through a call with weight_grad=, whose buffer was added ..."):
        loss.backward()
    assert torch.equal(buffer, once)
    assert torch.equal(leaf.hidden.grad, hidden)


def test_a_frozen_weight_leaves_its_buffer_alone():
    """There is nothing to add, so nothing binds backward to the factor announced, or to happen once."""
    problem, buffer = make(torch.float64), torch.ones(VOCAB, WIDTH)
    leaf = problem.operands.leaves(("hidden", "bias"))
    loss = call(problem, leaf, weight_grad=buffer, grad_scale=2.0)
    (loss * 1.7).backward(retain_graph=True)
    assert (buffer == 1).all()
    ours = Ran(loss.detach(), gradients(leaf), {})
    assert_right(problem, ours, PPO_FORMULA, wanted=("hidden", "bias"), upstream=1.7)
    loss.backward()


def test_a_buffer_in_two_passes_is_added_to_in_backward():
    problem, buffer = make(), torch.zeros(VOCAB, WIDTH)
    objective = ll.Objective(**POLICIES["gspo"][0])
    leaf, usual = problem.operands.leaves(), problem.operands.leaves()
    loss = call(problem, leaf, objective, weight_grad=buffer, memory=room(12))
    assert not buffer.any()
    (1.7 * loss).backward()
    (1.7 * call(problem, usual, objective, memory=room(13))).backward()
    assert leaf.weight.grad is None
    torch.testing.assert_close(buffer, usual.weight.grad, rtol=1e-5, atol=1e-6)


# Other machinery of torch.


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(reentrant: bool):
    problem, objective = make(), ll.Objective(**PPO)
    right, leaf = ran(problem, objective, memory=room(6)), problem.operands.leaves()
    loss = checkpoint(lambda *x: call(problem, Operands(*x), objective), *leaf, use_reentrant=reentrant)
    (1.7 * loss).backward()
    assert_same(Ran(loss.detach(), gradients(leaf), right.metrics), right, 1e-6)


def test_checkpointed_with_a_buffer():
    """Forward runs twice. Reentrant, the first time nothing is recorded; otherwise it is refused, never doubled."""
    problem, objective = make(), ll.Objective(**PPO)
    right, buffer = ran(problem, objective, memory=room(6), upstream=1.0), torch.zeros(VOCAB, WIDTH)
    for reentrant in (True, False):
        leaf = problem.operands.leaves()
        loss = checkpoint(
            lambda *x: call(problem, Operands(*x), objective, weight_grad=buffer), *leaf, use_reentrant=reentrant
        )
        if not reentrant:
            with raises("policy_loss: forward ran again in backward, as torch.utils.checkpoint with ..."):
                loss.backward()
            assert leaf.hidden.grad is None
            continue
        loss.backward()
        assert leaf.weight.grad is None
        torch.testing.assert_close(buffer, right.gradients["weight"], rtol=1e-5, atol=1e-6)


def test_saved_tensors_may_be_packed_elsewhere():
    """What a hook hands back is another tensor with the same contents, and no second forward."""
    problem, buffer = make(), torch.zeros(VOCAB, WIDTH)
    leaf, right = problem.operands.leaves(), ran(problem, ll.Objective(**PPO), memory=room(6), upstream=1.0)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        loss = call(problem, leaf, weight_grad=buffer)
    loss.backward()
    torch.testing.assert_close(buffer, right.gradients["weight"], rtol=1e-5, atol=1e-6)
    assert torch.equal(leaf.hidden.grad, right.gradients["hidden"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute")
def test_compiled_around():
    torch._dynamo.reset()
    problem, objective = make(), ll.Objective(**PPO)
    rows = problem.batch.rows()
    fields = problem.fields(rows)

    def loss_of(hidden, weight, bias):
        logits = ll.Logits(hidden.tanh(), weight, bias=bias)
        loss, metrics = ll.policy_loss(logits, rows, objective, memory=room(13), **fields)
        return 1.7 * loss, metrics.means["ratio"]

    runs = []
    for function in (loss_of, torch.compile(loss_of, backend="aot_eager")):
        leaf = problem.operands.leaves()
        loss, ratio = function(*leaf)
        runs.append((loss.detach(), ratio, *torch.autograd.grad(loss, leaf)))
    for mine, eager in zip(*runs, strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-6, atol=1e-6)


# Few rows, no rows, and rows that hold nothing to rely on.


@pytest.mark.parametrize("policy", ["ppo_clip", "gspo"])
@pytest.mark.parametrize("lengths", [[], [0, 0], [0, 1, 0], [1]])
def test_hardly_any_rows(lengths, policy: str):
    hidden, weight = torch.randn(3 * max(1, len(lengths)) + 1, 5).requires_grad_(), torch.randn(7, 5).requires_grad_()
    rows = ll.Rows.packed([[1, 2, 3, 4][: 3 + n] for n in lengths], lengths, num_tokens=len(hidden))
    buffer, bias = torch.ones(7, 5), torch.randn(7, requires_grad=True)
    given = {"advantage": torch.ones(len(rows)), "old_logprob": torch.zeros(len(rows))}
    objective = ll.Objective(**POLICIES[policy][0] | {"entropy_coef": 0.1})
    logits = ll.Logits(hidden, weight, bias=bias)
    loss, metrics, stats = ll.policy_loss(logits, rows, objective, return_stats=True, **given)
    loss.backward()
    assert [x.shape for x in (stats.logprob, stats.entropy, stats.log_z)] == [(len(rows),)] * 3
    assert sum(x is not None for x in stats) == 3
    assert all(x.grad.shape == x.shape for x in (hidden, weight, bias))
    assert len(rows) or (loss == 0 and not any(x.grad.any() for x in (hidden, weight, bias)))
    stats = ll.logprobs(logits, rows, entropy="grad")
    right, logged = objective(stats, rows, **given)
    torch.testing.assert_close(loss, right)
    assert metrics.compute() == pytest.approx(logged.compute(), nan_ok=True)
    theirs = torch.autograd.grad(right, (hidden, weight, bias))
    torch.testing.assert_close([x.grad for x in (hidden, weight, bias)], list(theirs))
    buffered = ll.Logits(hidden, weight, bias=bias, weight_grad=buffer)
    ll.policy_loss(buffered, rows, objective, **given)[0].backward()
    torch.testing.assert_close(buffer - 1, weight.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_tokens(dtype: torch.dtype):
    hidden, weight = (torch.zeros(n, 5, dtype=dtype).requires_grad_() for n in (0, 7))
    empty = torch.zeros(0)
    given = {"old_logprob": "current", "advantage": empty}
    loss, _ = ll.policy_loss(ll.Logits(hidden, weight), empty.long(), ll.Objective(), **given)
    loss.backward()
    assert hidden.grad.shape == (0, 5)
    assert not weight.grad.any()


@pytest.mark.parametrize("policy", ["ppo_clip", "gspo"])
@pytest.mark.parametrize("drop_zeros", [True, False])
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_what_does_not_count_is_not_read(backend: str, few: bool, bad: float, drop_zeros: bool, policy: str):
    """NaN in hidden states and fields of masked rows and of tokens without a row: not in loss, gradients or metrics."""
    problem = make(lengths=[30, 30])
    masks = [[1] * 30 for _ in range(2)]
    for t in (5,) if few else range(3, 25, 2):
        masks[0][t] = 0
    problem = replace(problem, batch=replace(problem.batch, masks=masks))
    objective = ll.Objective(**POLICIES[policy][0] | {"entropy_coef": 0.1})
    options = {"drop_zeros": drop_zeros, "backend": backend, "memory": room(30)}
    right = ran(problem, objective, **options)
    rows = problem.batch.rows()
    left_out = torch.ones(66, dtype=torch.bool).index_fill(0, rows.index[rows.counted], False)
    dirty = problem.operands.hidden.clone()
    dirty[left_out] = bad
    given = {name: torch.where(rows.counted, x, bad) for name, x in problem.fields(rows).items()}
    poisoned = replace(problem, operands=problem.operands._replace(hidden=dirty))
    ours = ran(poisoned, objective, given=given, **options)
    assert_same(ours, right, 0.0)
    assert not ours.gradients["hidden"][left_out].any()


def test_ignored_targets_may_have_any_hidden_state():
    hidden, weight = torch.randn(40, 17), torch.randn(63, 17)
    target, advantage = torch.randint(63, (40,)), torch.randn(40)
    target[7] = -100
    runs = []
    for value in (0.0, NAN):
        x, w = hidden.index_fill(0, torch.tensor([7]), value).requires_grad_(), weight.clone().requires_grad_()
        fields = {"old_logprob": "current", "advantage": advantage.index_fill(0, torch.tensor([7]), value)}
        for drop_zeros in (True, False):
            loss, _ = ll.policy_loss(ll.Logits(x, w), target, ll.Objective(), drop_zeros=drop_zeros, **fields)
            runs.append((loss.detach(), *torch.autograd.grad(loss, (x, w))))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


def test_a_bad_row_that_counts_is_seen():
    """Never a plausible number: NaN in the loss and in the gradients."""
    problem = make(lengths=[9])
    problem.operands.hidden[4] = NAN
    batch = replace(problem.batch, masks=[[1] * 9])
    values = {**batch.values, "old_logprob": [torch.zeros(9)], "ref_logprob": [torch.zeros(9)]}
    ours = ran(replace(problem, batch=replace(batch, values=values)), ll.Objective(**PPO))
    assert ours.loss.isnan()
    assert ours.gradients["weight"].isnan().all()


# Out of memory.


@pytest.mark.parametrize("policy", ["ppo_clip", "gspo"])
def test_out_of_memory_is_raised_and_says_what_to_do(policy: str):
    problem, objective = make(lengths=[300, 200], vocab=40, width=3), ll.Objective(policy=policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", refusing(torch.empty, 260 * 40, "logitless.sources.linear"))
        with pytest.raises(torch.OutOfMemoryError) as raised:
            ran(problem, objective)
    assert raised.value.__notes__[0].startswith("policy_loss: no room for working memory of [500, 40]")
    ran(problem, objective)


# Errors, by their text.


def bad_call(**changes):
    """A good call, but for what is given."""
    arguments = {
        "hidden": torch.randn(5, 8),
        "weight": torch.randn(7, 8),
        "rows": torch.arange(5),
        "objective": ll.Objective(),
        "old_logprob": "current",
        "advantage": torch.ones(5),
        **changes,
    }
    return loss_from_hidden(**{name: x for name, x in arguments.items() if x is not None})


def test_the_good_call_is_good():
    assert bad_call()[0] == -1.0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"objective": "ppo"}, "policy_loss: objective must be an Objective or a Preference but is str."),
        ({"grad_scale": 2.0}, "policy_loss: grad_scale goes with weight_grad, which is added to before the gra"),
        ({"grad_scale": torch.ones(())}, "policy_loss: grad_scale goes with weight_grad, which is added to"),
        (
            {"grad_scale": torch.ones(1), "weight_grad": torch.zeros(7, 8)},
            "policy_loss: grad_scale must be a number or a 0-dim tensor but is a tensor [1] torch.float32.",
        ),
        ({"weight": torch.randn(8, 7)}, "policy_loss: weight must be [V, 8] ... Did you pass the transposed he"),
        ({"weight": torch.randn(7, 8).half()}, "policy_loss: weight is torch.float16 but hidden is torch.float"),
        ({"bias": torch.zeros(8)}, "policy_loss: bias must be [7] floats but is [8] torch.float32."),
        ({"weight_grad": torch.zeros(7, 9)}, "policy_loss: weight_grad must be float32 [7, 8] but is torch.flo"),
        ({"rows": torch.arange(4)}, "policy_loss: rows were made for 4 tokens but hidden holds 5."),
        ({"rows": torch.full((5,), 7)}, "policy_loss: target 7 of row 0 (sample 0, position 0) is outside the"),
        ({"rows": "all"}, "policy_loss: rows must be a Rows, a tensor of targets or a pair (index, target)"),
        ({"memory": 0}, 'memory: wanted a positive number of bytes or a size such as "512MiB" but got 0.'),
        ({"memory": "much"}, "memory: wanted a positive number of bytes or a size such as"),
        ({"backend": "cuda"}, "backend: wanted one of ['auto', 'reference', 'tiled', 'triton'] but got 'cuda'."),
        ({"match": "float32"}, 'policy_loss: match must be None, "bfloat16" or "float16" but is \'float32\'.'),
        ({"hidden_grad": "sum"}, 'policy_loss: hidden_grad must be "reduced" or "partial" but is \'sum\'.'),
        ({"sequence_parallel": True}, "policy_loss: sequence_parallel=True needs a shard with a group to gathe"),
        ({"shard": ll.VocabShard(0, 6)}, "policy_loss: shard holds columns 0 to 6 (6 of them) but weight has 7"),
        ({"head": ll.Head(temperature=torch.ones(4))}, "Head: temperature has shape [4] but there are 5 rows."),
        ({"kept": ragged([[1]] * 4)}, "policy_loss: kept has 4 rows but rows has 5."),
        ({"advantage": None}, "Objective: policy='ppo_clip' needs the field advantage, a tensor of one value per row,"),
        ({"old_logprob": None}, "Objective: policy='ppo_clip' needs the field old_logprob, a tensor of one value per"),
        ({"old_logprob": "old"}, "Objective: old_logprob must be a tensor or \"current\" but is 'old'."),
        ({"advantage": torch.ones(4)}, "Objective: advantage has shape [4] but there are 5 rows. Give one value per r"),
        ({"advantage": torch.ones(5).requires_grad_()}, "Objective: advantage requires grad, but no gradient flows to"),
        ({"advantages": torch.ones(5)}, "Objective: no part of it reads the field advantages. Did you mean 'advantage"),
        ({"denominator": -1}, "Objective: denominator must be a count of 0 or more, a number or a 0-dim tensor, but i"),
        ({"prompt_tokens": torch.ones(1)}, 'Objective: prompt_tokens go with reduce="prompt_mean", and they came with'),
        ({"objective": ll.Objective(kl="k3", kl_coef=0.1)}, "Objective: kl='k3' needs the field ref_logprob, a tensor"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)  # fmt: skip
def test_bad_arguments(changes, text):
    with raises(text):
        bad_call(**changes)


def test_a_term_that_takes_means_without_saying_so():
    def shy(inputs):
        return inputs.mean_by_sample(inputs.logprob)

    with raises(
        "Objective: a term takes a mean over samples, but may be given rows that cut through them. Declare Objective(le"
    ):
        bad_call(hidden=torch.randn(5, 8).requires_grad_(), objective=ll.Objective(policy=shy))
    rows = ll.Rows.packed([torch.arange(6)], [5])
    bad_call(hidden=torch.randn(6, 8).requires_grad_(), rows=rows, objective=ll.Objective(policy=shy, level="sequence"))


def test_explain_takes_no_part_of_the_objective():
    with raises("policy_loss: objective must be an Objective or a Preference but is dict."):
        ll.explain(ll.policy_loss, ll.Logits(torch.zeros(2, 3), torch.zeros(4, 3)), torch.tensor([1, 2]), {})


def test_the_harness_composes_what_it_says():
    """The two calls of the library are right by themselves."""
    problem = make()
    assert_right(problem, composed(problem, ll.Objective(**PPO)), PPO_FORMULA)
