"""What a chunk of rows holds, logits or 16-bit exponentials of them: when which, and that either is right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from shared.linear import GRADIENT_PROMISE, HALF
from shared.policy_loss import PPO, PPO_FORMULA, assert_same, check, make, ran, room

import logitless as ll
from logitless.machine import CPU, H200
from logitless.memory import sized
from logitless.route.costs import LossShape
from logitless.route.loss import choose_loss_plan

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [40, 25, 31]
# Chunks of 24 rows of logits, or of 40 and more of exponentials.
SHORT = room(24, 300)


def plan_of(memory: int, counts=(16384,), columns=151936, dtype=torch.bfloat16, sequence_level=False, **more):
    options = {"logits_dtype": torch.float32, "machine": H200, "bias": False, "capped": False} | more
    return choose_loss_plan(LossShape.of(counts, columns, 4096, dtype=dtype, **options), sequence_level, None, memory)


@pytest.mark.parametrize(
    ("memory", "more", "rows", "tile"),
    [
        # 2.3 GiB are 4096 rows of float32 logits; a gibibyte is 1766 of them, or 3409 of exponentials and a tile.
        (5 << 29, {}, 4096, None),
        (1 << 30, {}, 3328, (2048, 4224)),
        (1 << 30, {"capped": True}, 1664, None),
        (1 << 30, {"dtype": torch.float32}, 1664, None),
        (1 << 30, {"logits_dtype": torch.bfloat16}, 3328, None),
        # All rows fit as they are.
        (1 << 30, {"counts": (1000,)}, 1000, None),
        # A sample longer than a chunk of logits.
        (5 << 29, {"counts": (5000, 3000), "sequence_level": True}, 8000, (2048, 4224)),
        (8 << 30, {"counts": (20000, 3000), "sequence_level": True}, 23000, (4096, 8448)),
    ],
)
def test_which(memory: int, more: dict, rows: int, tile: tuple[int, int] | None):
    plan = plan_of(memory, **more)
    assert plan.rows == rows
    assert (plan.tiles and plan.tiles[:2]) == tile


def test_budgets_of_a_few_bytes():
    for memory in (1, 100, 10_000):
        for machine in (CPU, replace(H200, costs=None)):
            plan = plan_of(memory, (7,), 11, machine=machine)
            assert plan.tiles is None or min(plan.tiles[:2]) >= 1
            assert plan.rows >= 1
    # A budget below one row's logits is one row at a time.
    assert plan_of(1, (7,), 11, machine=replace(H200, costs=None), dtype=torch.float32).rows == 1


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("backend", ["reference", "tiled", "triton"])
@pytest.mark.parametrize("bias", [False, True])
def test_exponentials_are_right(dtype: torch.dtype, backend: str, bias: bool):
    lengths, vocab, width, memory = LENGTHS, 300, 33, SHORT
    if backend == "triton":
        # Every row of a tile is slow in the interpreter: fewer rows and fewer tiles, in three chunks all the same.
        lengths, vocab, width, memory = [11, 7, 8], 131, 17, room(9, 131)
    head = {"temperature": torch.linspace(0.6, 1.7, sum(lengths))}
    problem = make(dtype, lengths, vocab, width, spread=8.0, head=head)
    rows = problem.batch.rows()
    wanted = ("hidden", "weight", "bias") if bias else ("hidden", "weight")
    logits = ll.Logits(*problem.operands.leaves()[:2])
    plan = ll.explain(ll.policy_loss, logits, rows, ll.Objective(**PPO), memory=memory, **problem.fields(rows))
    assert "3 chunks, of at most" in str(plan)
    assert "rows of 16-bit exponentials, by tiles of" in str(plan)
    check(problem, PPO, PPO_FORMULA, wanted=wanted, backend=backend, memory=memory)


def test_both_chunks_give_the_same_loss():
    """Log-probs and entropies come from float32 logits either way; gradients differ by a rounding."""
    problem = make(torch.bfloat16, LENGTHS, 300, 33)
    objective = ll.Objective(**PPO)
    logits, exponentials = (ran(problem, objective, memory=memory) for memory in ("1MiB", SHORT))
    assert_same(exponentials, logits, off=2 * GRADIENT_PROMISE)
    torch.testing.assert_close(exponentials.loss, logits.loss, rtol=1e-6, atol=1e-6)


def test_sequence_level_objectives_get_longer_samples():
    problem = make(torch.bfloat16, LENGTHS, 300, 33)
    objective = ll.Objective(policy="gspo", clip=(0.03, 0.05))
    logits, rows = ll.Logits(*problem.operands.leaves()[:2]), problem.batch.rows()
    # 40 rows of logits do not fit, and 40 rows of exponentials with a tile do.
    plan = ll.explain(ll.policy_loss, logits, rows, objective, memory=room(36, 300), **problem.fields(rows))
    assert (plan.kind, plan.whole_samples) == ("one pass", True)
    assert plan.tiles is not None
    one, two = (ran(problem, objective, memory=memory) for memory in (room(36, 300), room(12, 300)))
    assert_same(one, two, off=2 * GRADIENT_PROMISE)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("drop", [False, True])
def test_rows_that_do_not_count_may_hold_anything(drop: bool, kept: bool):
    """NaN in the hidden states of masked rows stays there, and so does what an earlier chunk left in the buffer."""
    clean, weight = torch.randn(91, 16).bfloat16(), torch.randn(200, 16).bfloat16()
    mask, advantage = torch.arange(90) % 3 > 0, torch.randn(90)
    rows = ll.Rows.packed([torch.arange(91)], [90], loss_masks=[mask])
    poisoned = clean.clone()
    poisoned[:90][~mask] = torch.nan
    objective = ll.Objective(clip=0.2, entropy_coef=0.02)
    gradients = []
    for hidden in (clean, poisoned):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        given = {"old_logprob": "current", "advantage": advantage, "drop_zeros": drop, "memory": room(20, 200)}
        given |= {"kept": ll.Kept(torch.arange(180) % 200, torch.full((90,), 2))} if kept else {}
        plan = ll.explain(ll.policy_loss, ll.Logits(x, w), rows, objective, **given)
        assert plan.kind == "one pass"
        assert (plan.tiles is None) == kept
        ll.policy_loss(ll.Logits(x, w), rows, objective, **given)[0].backward()
        gradients.append((x.grad, w.grad))
    for ours, right in zip(*gradients, strict=True):
        assert torch.equal(ours, right)


@pytest.mark.parametrize(("tail", "rows", "copied"), [("bucket", 512, 1 << 24), ("renormalise", 768, None)])
def test_a_bucket_takes_its_copies_out_of_the_budget(tail: str, rows: int, copied: int | None):
    """On a GPU the sum over all ids but the teacher's K works on copies of rows, in a quarter of the memory; the chunk
    has the rest."""
    tokens, columns, memory = 4096, 20011, 1 << 26
    logits, target = sized(tokens, columns, 64)
    sent = torch.empty(tokens, 8, device="meta"), torch.empty(tokens, 8, dtype=torch.int64, device="meta")
    asked = {"teacher": ll.Teacher.from_top_k(*sent, tail), "memory": memory, "device": "cuda"}
    plan = ll.explain(ll.policy_loss, logits, target, ll.Objective.recipe("distill"), **asked)
    assert (plan.kind, plan.rows) == ("one pass", rows)
    assert plan.elementwise == (copied or memory)
    assert rows * columns * 4 + (copied or 0) <= memory
