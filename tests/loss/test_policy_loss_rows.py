"""``policy_loss``: which rows, in which chunks, with which of them dropped, in one pass or two: same numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from objective_truth import FIELDS, Formula
from shared.linear import GRADIENT_PROMISE, Operands, ragged
from shared.objective_terms import PARTS, POLICIES, formula_of
from shared.policy_loss import (
    LENGTHS,
    NAMES,
    PPO,
    PPO_FORMULA,
    VOCAB,
    WIDTH,
    Ran,
    assert_metrics,
    assert_right,
    assert_same,
    check,
    composed,
    differentiated,
    make,
    ran,
    room,
    told,
)
from truth import truth

import logitless as ll
from logitless import machine
from logitless.call import Asked, resolve
from logitless.machine import H200
from logitless.passes import one_pass
from logitless.route import loss_plan

pytestmark = pytest.mark.usefixtures("one_thread")

# Rows.


@pytest.mark.parametrize("memory", ["1GiB", room(4)])
@pytest.mark.parametrize("wanted", [NAMES, ("hidden",), ("weight",), ("bias",)], ids="-".join)
def test_masks_and_rows_left_out(wanted, memory):
    """The rows of masked tokens scored or not: same loss and gradients, and none for tokens without a row."""
    problem = make()
    for mask_only in (False, True):
        rows = problem.batch.rows(loss_mask_only=mask_only)
        ours = ran(problem, ll.Objective(**PPO), rows, wanted, memory=memory)
        assert_right(problem, ours, PPO_FORMULA, wanted=wanted)
        if "hidden" in wanted:
            left_out = sorted(set(range(47)) - set(rows.index[rows.counted].tolist()))
            assert not ours.gradients["hidden"][left_out].any()


def test_every_way_to_name_rows():
    """Packed rows, pairs in any order, and a target for every token with -100 where there is no row."""
    problem = make()
    rows = problem.batch.rows(loss_mask_only=True)
    fields, count = problem.fields(rows), len(rows)
    shuffled = torch.randperm(count)
    target = torch.full((47,), -100)
    target[rows.index] = rows.target
    whole = {name: torch.full((47,), torch.nan, dtype=torch.float64) for name in fields}
    for name, x in fields.items():
        whole[name][rows.index] = x
    with_ignored = rows.target.clone()
    pairs = (
        torch.cat([rows.index[shuffled], torch.tensor([0])]),
        torch.cat([with_ignored[shuffled], torch.tensor([-100])]),
    )
    padded = {name: torch.cat([x[shuffled], torch.tensor([torch.inf])]) for name, x in fields.items()}
    right = ran(problem, ll.Objective(**PPO), rows)
    objective = ll.Objective(**PPO)
    for chosen, given in (
        (target, whole),
        (ll.Rows.every(target), whole),
        (pairs, padded),
        (ll.Rows.at(*pairs), padded),
    ):
        for memory in ("1GiB", room(5)):
            leaf = problem.operands.leaves()
            logits = ll.Logits(leaf.hidden, leaf.weight, bias=leaf.bias)
            loss, metrics = ll.policy_loss(logits, chosen, objective, memory=memory, **given)
            assert_same(Ran(loss.detach(), differentiated(loss, leaf, 1.7), metrics.compute()), right, 2e-6)
    assert_right(problem, right, PPO_FORMULA)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padded_lines(padding: str):
    """``[N, S, D]`` hidden, gradients in the same shape."""
    problem = make()
    batch, width = problem.batch, max(map(len, problem.batch.tokens)) + 2
    rows = ll.Rows.padded(batch.tokens, batch.lengths, batch.masks, max_length=width, padding=padding)
    hidden = torch.randn(len(batch), width, WIDTH)
    hidden.view(-1, WIDTH)[rows.index] = problem.operands.hidden[problem.index]
    hidden.requires_grad_()
    weight = problem.operands.weight.clone().requires_grad_()
    logits = ll.Logits(hidden, weight, bias=problem.operands.bias)
    loss, _ = ll.policy_loss(logits, rows, ll.Objective(**PPO), memory=room(4), **problem.fields(rows))
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight), torch.tensor(1.7))
    assert d_hidden.shape == hidden.shape
    picked = torch.zeros(47, WIDTH)
    picked[problem.index] = d_hidden.view(-1, WIDTH)[rows.index]
    ours = Ran(loss.detach(), {"hidden": picked, "weight": d_weight}, {})
    assert_right(problem, ours, PPO_FORMULA, wanted=NAMES[:2])
    others = torch.ones(len(batch) * width, dtype=torch.bool).index_fill(0, rows.index, False)
    assert not d_hidden.view(-1, WIDTH)[others].any()


@pytest.mark.parametrize(
    "cut", [lambda x: x[:, ::2], lambda x: x.T[: x.shape[1] // 2].T, lambda x: x[:1].expand(len(x), -1)[:, ::2]]
)
@pytest.mark.parametrize("in_order", [False, True])
def test_strided_hidden(cut, in_order: bool):
    base = torch.randn(9, 34, dtype=torch.float64).requires_grad_()
    weight = torch.randn(63, 17, dtype=torch.float64).requires_grad_()
    target = torch.randint(63, (9,))
    rows = target if in_order else (torch.arange(9).flip(0), target)
    given = {"old_logprob": "current", "advantage": torch.randn(9)}
    runs = []
    for hidden in (cut(base), cut(base).contiguous()):
        objective = ll.Objective(**PPO | {"kl_coef": 0.0})
        loss, _ = ll.policy_loss(ll.Logits(hidden, weight), rows, objective, memory=room(4, 63), **given)
        runs.append((loss.detach(), *torch.autograd.grad(loss, (base, weight))))
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["reference", "tiled", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hidden_stored_the_other_way_round(dtype: torch.dtype, backend: str, device: torch.device):
    """Columns, not rows, are contiguous; the gradient has a layout of its own."""
    hidden, weight = torch.randn(17, 9).to(device, dtype).T, torch.randn(63, 17).to(device, dtype)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    target = torch.randint(63, (9,), device=device)
    given = {"old_logprob": "current", "advantage": torch.randn(9, device=device)}
    runs = []
    for x in (hidden, hidden.detach().contiguous().requires_grad_()):
        loss, _ = ll.policy_loss(ll.Logits(x, weight), target, ll.Objective(), backend=backend, **given)
        runs.append((loss.detach(), *torch.autograd.grad(1.7 * loss, (x, weight))))
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b)


# Chunks, and rows without a gradient.


@pytest.mark.parametrize("policy", ["ppo_clip", "gspo"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_chunks_do_not_show(policy: str, dtype: torch.dtype):
    problem, objective = make(dtype), ll.Objective(**POLICIES[policy][0] | {"entropy_coef": 0.1})
    size = 8 if dtype == torch.float64 else 4
    right = ran(problem, objective)
    for num_rows in (0, 1, 2, 13, 14, 28, 29, 30, 10_000):
        ours = ran(problem, objective, memory=max(room(num_rows, itemsize=size), 2 * 13 * VOCAB))
        # Either may be off by the promise.
        assert_same(ours, right, 1e-12 if dtype == torch.float64 else 2 * GRADIENT_PROMISE)


def zero_cases() -> dict[str, Any]:
    """Advantages of the 29 rows, by what they leave without a gradient."""
    return {
        "some": torch.tensor([0.0 if i % 3 else 1.0 for i in range(29)]),
        "one": torch.tensor([0.0, *[1.0] * 28]),
        "all but one": torch.tensor([*[0.0] * 28, 1.0]),
        "the first chunk": torch.tensor([*[0.0] * 10, *[-1.0] * 19]),
        "a later chunk": torch.tensor([*[1.0] * 10, *[0.0] * 10, *[1.0] * 9]),
        "all": torch.zeros(29),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("case", zero_cases())
def test_dropping_rows_without_a_gradient_changes_nothing(case: str, buffered: bool, dtype: torch.dtype):
    """Zero advantages, with clipped and masked rows among the others, in one chunk or several."""
    problem, objective = make(dtype), ll.Objective(clip=0.05)
    given, size = {"advantage": zero_cases()[case]}, 8 if dtype == torch.float64 else 4
    # Adding to ones rounds by 6e-8 in each of 1717 places.
    off = 1e-5 if buffered else 1e-12
    for memory in ("1GiB", room(10, itemsize=size)):
        buffers = [torch.ones(VOCAB, WIDTH) if buffered else None for _ in range(3)]
        wanted = ("hidden", "bias") if buffered else NAMES
        runs = []
        for drop, buffer in ((True, buffers[0]), (False, buffers[1])):
            leaf = problem.operands.leaves()
            rows = problem.batch.rows()
            fields = problem.fields(rows) | given
            logits = ll.Logits(leaf.hidden, leaf.weight, bias=leaf.bias, weight_grad=buffer)
            loss, metrics = ll.policy_loss(logits, rows, objective, drop_zeros=drop, memory=memory, **fields)
            loss.backward()
            runs.append(Ran(loss.detach(), {n: getattr(leaf, n).grad for n in wanted}, metrics.compute()))
            if buffer is not None:
                runs[-1].gradients["weight"] = buffer - 1
                assert leaf.weight.grad is None
        assert_same(*runs, off if dtype == torch.float64 else GRADIENT_PROMISE)
        values = {**problem.batch.values, "advantage": list(given["advantage"].double().split(LENGTHS))}
        changed = replace(problem, batch=replace(problem.batch, values=values))
        exact = told(changed, Formula(options={"low": 0.05, "high": 0.05}), upstream=1.0)
        for name, g in exact.gradients.items():
            limit = {torch.float64: off, torch.bfloat16: GRADIENT_PROMISE}[dtype]
            assert (runs[0].gradients[name].double() - g).norm() <= limit * max(float(g.norm()), 1e-3), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_rows_of_zero_advantage_keep_their_entropy_bonus(dtype: torch.dtype):
    """They have no gradient by their log-prob, and one by their entropy."""
    problem, objective = make(dtype), ll.Objective(entropy_coef=0.05)
    given = {"advantage": zero_cases()["all but one"].double()}
    dropped, kept = (ran(problem, objective, given=given, drop_zeros=drop) for drop in (True, False))
    assert_same(dropped, kept, 1e-12 if dtype == torch.float64 else GRADIENT_PROMISE)
    assert int((kept.gradients["hidden"] != 0).any(1).sum()) == int(problem.batch.rows().counted.sum())


def asked_in_chunks(monkeypatch, advantage: torch.Tensor, memory: int) -> list[int]:
    """The numbers of rows with a gradient that a loss asks for."""
    found: list[int] = []

    def read_later(number, dry):
        found.append(int(number))
        return lambda: int(number)

    hidden, weight = torch.randn(48, 8, requires_grad=True), torch.randn(100, 8, requires_grad=True)
    fields = {"old_logprob": "current", "advantage": advantage, "memory": memory, "backend": "tiled"}
    with monkeypatch.context() as patch:
        patch.setattr(one_pass, "_read_later", read_later)
        ll.policy_loss(ll.Logits(hidden, weight), torch.randint(100, (48,)), ll.Objective(), **fields)[0].backward()
    return found


def test_the_last_chunk_is_asked_where_others_had_rows_to_drop(monkeypatch):
    """Otherwise the CPU would wait for a number that is likely to be that of all rows."""
    ones, some = torch.ones(48), torch.ones(48)
    some[:3] = 0.0
    # Half of the memory is for working space: 16 rows of 100 float32 logits.
    assert asked_in_chunks(monkeypatch, ones, 12800) == [16, 16]
    assert asked_in_chunks(monkeypatch, some, 12800) == [13, 16, 16]
    assert asked_in_chunks(monkeypatch, some, 1 << 20) == [45]
    costs = H200.costs
    assert costs is not None
    monkeypatch.setattr(machine, "CPU", replace(machine.CPU, costs=costs._replace(flops=1e15)))
    assert asked_in_chunks(monkeypatch, some, 1 << 20) == []


# One pass or two.


def test_samples_split_over_ranks_go_in_two_passes():
    """A rank that went in one pass would take means over its own part of a sample."""
    rows = ll.Rows.packed([[1] * 8], [5], cp=ll.Zigzag(0, 2))
    hidden, weight = torch.zeros(4, 3, requires_grad=True), torch.zeros(7, 3, requires_grad=True)
    logits = ll.Logits(hidden, weight)
    call, _ = resolve("policy_loss", logits, rows, Asked())
    plan = loss_plan(call, ll.Objective(policy="gspo"))
    assert plan.kind == "two passes"
    assert "split over context-parallel ranks" in str(plan)
    assert loss_plan(call, ll.Objective()).kind == "one pass"


def test_staying_rows_move_a_few_at_a_time(monkeypatch):
    """Each move writes where later moves have read, and never where they have yet to read."""
    hidden, weight, target = torch.randn(60, 8), torch.randn(50, 8), torch.randint(50, (60,))
    # Gaps of two and three rows, so that what stays moves further and further up.
    advantage = torch.randn(60).where(torch.arange(60) % 5 > 2, torch.zeros(60))
    gradients = []
    for at_a_time in (60, 7, 1):
        monkeypatch.setattr("logitless.passes.one_pass.MOVED", at_a_time * 50 * 4)
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        fields = {"old_logprob": "current", "advantage": advantage}
        ll.policy_loss(ll.Logits(x, w), target, ll.Objective(), **fields)[0].backward()
        gradients.append((x.grad, w.grad))
    for others in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(others, gradients[0], strict=True))


def test_samples_that_fit_a_chunk_go_in_one_pass():
    problem, objective = make(), ll.Objective(policy="gspo", clip=(0.03, 0.05))
    rows = problem.batch.rows()
    call, given = (ll.policy_loss, ll.Logits(*problem.operands[:2]), rows), problem.fields(rows)
    fits, splits = (ll.explain(*call, objective, memory=room(n), **given) for n in (13, 12))
    assert (fits.kind, fits.chunks) == ("one pass", ((0, 7), (7, 20), (20, 29)))
    assert str(fits) == (
        "one pass: 3 matrix products, because the loss of a row depends on its own sample. 3 chunks of whole samples, "
        "of at most 13 rows of logits."
    )
    assert str(splits) == (
        "two passes: 4 matrix products, because the objective takes means over samples, and the longest has 13 rows "
        "where memory= holds 12."
    )
    tokens = ll.explain(*call, ll.Objective(), memory=room(12), **given)
    assert (tokens.kind, tokens.rows, len(tokens.chunks)) == ("one pass", 10, 3)
    assert "depends on nothing but its own log-prob" in str(tokens)
    for memory in (room(13), room(12)):
        check(problem, POLICIES["gspo"][0], formula_of("gspo"), memory=memory)


def test_what_cannot_be_chunked_goes_in_two_passes():
    problem = make(torch.float64)
    objective, rows = ll.Objective(**PPO), problem.batch.rows()
    logits = ll.Logits(*problem.operands[:2], bits="canonical")
    plan = ll.explain(ll.policy_loss, logits, rows, objective, **problem.fields(rows))
    assert plan.kind == "two passes"
    assert 'bits="canonical"' in str(plan)
    ours = ran(problem, objective, bits="canonical")
    assert_same(ours, composed(problem, objective, bits="canonical"), 1e-12)
    assert_right(problem, ours, PPO_FORMULA)


@pytest.mark.parametrize("policy", ["ppo_clip", "gspo"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_kept_ids_in_one_pass_and_in_two(dtype: torch.dtype, policy: str):
    """Log-probs over the kept ids and the target, entropy over the vocabulary."""
    kept = [torch.randint(VOCAB, (i % 5,)).tolist() for i in range(29)]
    told_of = make(dtype, head={"kept": kept})
    problem, rows = replace(told_of, head={}), told_of.batch.rows()
    options, formula = (PPO, PPO_FORMULA) if policy == "ppo_clip" else (POLICIES["gspo"][0], formula_of("gspo"))
    size = max(4, dtype.itemsize)
    for call, more, kind in (
        ({}, {}, "one pass"),
        ({"memory": room(14, itemsize=size)}, {}, "one pass"),
        ({"memory": room(14, itemsize=size), "drop_zeros": False}, {}, "one pass"),
        ({}, {"level": "batch"}, "two passes"),
    ):
        objective, logits = ll.Objective(**options, **more), ll.Logits(*problem.operands.leaves()[:2])
        plan = ll.explain(ll.policy_loss, logits, rows, objective, kept=ragged(kept), **call, **problem.fields(rows))
        assert plan.kind == kind
        ours = ran(problem, objective, kept=ragged(kept), **call)
        assert_right(told_of, ours, formula)
        assert_metrics(ours, composed(problem, objective, kept=ragged(kept)))


# Results besides the loss.


@pytest.mark.parametrize("policy", ["ppo_clip", "gspo"])
@pytest.mark.parametrize("recorded", [True, False])
def test_statistics_of_the_rows(policy: str, recorded: bool):
    """Masked rows are scored like the others, and nothing has a graph."""
    problem, objective = make(torch.float64), ll.Objective(**POLICIES[policy][0])
    rows = problem.batch.rows()
    leaf = problem.operands.leaves(NAMES if recorded else ())
    exact = problem.scores(truth, problem.operands.leaves((), torch.float64))
    for memory in (room(13, itemsize=8), room(12, itemsize=8)):
        logits = ll.Logits(leaf.hidden, leaf.weight, bias=leaf.bias)
        more = {"memory": memory, "return_stats": True}
        loss, _, stats = ll.policy_loss(logits, rows, objective, **more, **problem.fields(rows))
        assert loss.requires_grad == recorded
        assert not any(x.requires_grad for x in stats if x is not None)
        for mine, right in zip((stats.logprob, stats.entropy, stats.log_z), exact, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backward_inside", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_is_a_cast_of_the_operands(dtype: torch.dtype, backward_inside: bool):
    problem, objective = make(dtype), ll.Objective(**PPO)
    cast = replace(problem, operands=Operands(*(x.bfloat16() for x in problem.operands)))
    right = ran(cast, objective, memory=room(6))
    rows, leaf = problem.batch.rows(), problem.operands.leaves()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = ll.Logits(leaf.hidden, leaf.weight, bias=leaf.bias)
        loss, metrics = ll.policy_loss(logits, rows, objective, memory=room(6), **problem.fields(rows))
        gradients = differentiated(loss, leaf, 1.7) if backward_inside else {}
    gradients = gradients or differentiated(loss, leaf, 1.7)
    assert loss.dtype == torch.float32
    assert all(g.dtype == dtype for g in gradients.values())
    assert_same(Ran(loss.detach(), gradients, metrics.compute()), right, 0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        off = ran(problem, objective, memory=room(6))
    assert_same(off, ran(problem, objective, memory=room(6)), 0.0)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_same_bits_on_every_run(backend: str):
    problem, objective = make(torch.bfloat16), ll.Objective(**PPO)
    runs = [ran(problem, objective, backend=backend, memory=room(6)) for _ in range(2)]
    assert_same(*runs, 0.0)


def test_the_fields_are_all_read():
    """The harness itself: every field changes the loss of the objective that reads it."""
    problem, rows = make(torch.float64), None
    assert set(PARTS) < set(FIELDS)
    objective = ll.Objective(**PPO, correction="tis")
    right = ran(problem, objective, rows)
    for name in PARTS:
        other = ran(problem, objective, rows, given={name: problem.fields(problem.batch.rows())[name] - 0.05})
        assert other.loss != right.loss, name
