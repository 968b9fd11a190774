"""Cross-entropy, its weighted and dynamic forms, and z-loss: against float64 torch, and TRL's SFTTrainer's loss.

The truth is a log-softmax in float64 and autograd through it; the yardstick is the same in float32.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from calls import logits_of, loss_from_hidden
from close import assert_close_to_truth, assert_gradient_close_to_truth
from ranks import run_ranks
from torch.nn.functional import cross_entropy, log_softmax

import logitless as ll

COUNTS = [5, 0, 9, 1, 4]
VOCAB, WIDTH = 83, 11
Z = 0.03


def batch(dtype=torch.float32, spread=2.0):
    """Rows with a masked token or two, hidden states, a weight, and a weight per row."""
    tokens = [torch.randint(VOCAB, (2 + n,)).tolist() for n in COUNTS]
    masks = [[int(x) for x in torch.rand(n) < 0.8] for n in COUNTS]
    rows = ll.Rows.packed(tokens, COUNTS, masks)
    hidden, weight = torch.randn(rows.num_tokens, WIDTH) * spread, torch.randn(VOCAB, WIDTH)
    return rows, hidden.to(dtype), weight.to(dtype), torch.rand(len(rows))


def told(rows, hidden, weight, token_weight, dtype, *, policy="cross_entropy", z=0.0, smoothing=0.0):
    """Loss and gradients by log-softmax over all logits."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
    logits = leaves[0][rows.index] @ leaves[1].T
    logp = log_softmax(logits, -1).gather(1, rows.target[:, None]).squeeze(1)
    nll = cross_entropy(logits, rows.target, reduction="none", label_smoothing=smoothing)
    nll = nll if token_weight is None else token_weight.to(dtype) * nll
    nll = nll * logp.detach().exp() if policy == "dft" else nll
    losses = nll + z * torch.logsumexp(logits, -1).square()
    loss = losses[rows.counted].sum() / rows.counted.sum()
    return loss.detach(), torch.autograd.grad(loss, leaves)


def ours(rows, hidden, weight, objective, fields, **options):
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    loss, metrics = loss_from_hidden(*leaves, rows, objective, **fields, **options)
    return loss.detach(), torch.autograd.grad(loss, leaves), metrics.compute()


CASES = {
    "plain": dict(),
    "weighted": dict(weighted=True),
    "z-loss": dict(z=Z),
    "dft, z-loss, weighted": dict(policy="dft", weighted=True, z=Z),
    "smoothed": dict(smoothing=0.1),
    "smoothed, z-loss, weighted": dict(smoothing=0.3, weighted=True, z=Z),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, dtype):
    case = {"policy": "cross_entropy", "weighted": False, "z": 0.0, "smoothing": 0.0} | CASES[name]
    rows, hidden, weight, token_weight = batch(dtype)
    given = token_weight if case["weighted"] else None
    exact, usual = (
        told(rows, hidden, weight, given, wide, **{k: x for k, x in case.items() if k != "weighted"})
        for wide in (torch.float64, torch.float32)
    )
    more = {"policy_options": {"label_smoothing": case["smoothing"]}} if case["smoothing"] else {}
    objective = ll.Objective(policy=case["policy"], z_coef=case["z"], **more)
    # In chunks, in one piece, in two passes, and in two calls.
    for options in ({"memory": 2 * 4 * VOCAB * 4}, {}, {"bits": "canonical"}):
        loss, gradients, _ = ours(rows, hidden, weight, objective, {"token_weight": given}, **options)
        assert_close_to_truth(loss, exact[0], usual[0], "loss")
        for mine, right, theirs in zip(gradients, exact[1], usual[1], strict=True):
            assert_gradient_close_to_truth(mine, right, theirs.to(dtype))
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    stats = ll.logprobs(ll.Logits(*leaves), rows, entropy=objective.entropy, stats=objective.stats)
    loss, _ = objective(stats, rows, token_weight=given)
    assert_close_to_truth(loss, exact[0], usual[0], "loss")
    for mine, right, theirs in zip(torch.autograd.grad(loss, leaves), exact[1], usual[1], strict=True):
        assert_gradient_close_to_truth(mine, right, theirs.to(dtype))


def test_label_smoothing_with_what_it_does_not_go_with():
    rows, hidden, weight, _ = batch()
    objective = ll.Objective(policy="cross_entropy", policy_options={"label_smoothing": 0.1})
    kept = ll.Kept.from_lists([[1, 2]] * len(rows))
    with pytest.raises(ll.LogitlessError, match=r"label_smoothing spreads the target .* does not go with kept="):
        ours(rows, hidden, weight, objective, {}, kept=kept)
    with pytest.raises(ll.LogitlessError, match=r"label_smoothing needs the mean logit.* stats=objective.stats"):
        objective(ll.logprobs(ll.Logits(hidden, weight), rows), rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_label_smoothing_in_one_pass_and_in_two(dtype):
    """The mean logit is read off a chunk while its logits are there."""
    rows, hidden, weight, _ = batch(dtype)
    objective = ll.Objective(policy="cross_entropy", policy_options={"label_smoothing": 0.2}, z_coef=Z)
    exact, usual = (
        told(rows, hidden, weight, None, wide, z=Z, smoothing=0.2) for wide in (torch.float64, torch.float32)
    )
    for options, kind in (
        ({}, "one pass"),
        ({"memory": 2 * 4 * VOCAB * 4}, "one pass"),
        ({"bits": "canonical"}, "two passes"),
    ):
        logits, verb = logits_of(hidden.requires_grad_(), weight.requires_grad_(), options)
        assert ll.explain(ll.policy_loss, logits, rows, objective, **verb).kind == kind
        loss, gradients, _ = ours(rows, hidden, weight, objective, {}, **options)
        assert_close_to_truth(loss, exact[0], usual[0], "loss")
        for mine, right, theirs in zip(gradients, exact[1], usual[1], strict=True):
            assert_gradient_close_to_truth(mine, right, theirs.to(dtype))


def smoothed_beside(rows, hidden, weight, teacher, kind, dtype):
    """Loss and gradients of a smoothed cross-entropy plus half a KL, by log-softmax over all logits."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
    logits = leaves[0][rows.index] @ leaves[1].T
    log_p, log_q = log_softmax(logits, -1), log_softmax(teacher.to(dtype)[rows.index], -1)
    first, second = (log_p, log_q) if kind == "reverse_kl" else (log_q, log_p)
    losses = cross_entropy(logits, rows.target, reduction="none", label_smoothing=0.2)
    losses = losses + 0.5 * (first.exp() * (first - second)).sum(-1)
    loss = losses[rows.counted].sum() / rows.counted.sum()
    return loss.detach(), torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("backend", ["reference", "tiled", "triton"])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
@pytest.mark.parametrize("form", ["Logits", "tensor"])
def test_label_smoothing_beside_a_teacher(form, kind, backend):
    """In one pass, in chunks and on given logits: the mean logit is one more reading of the student's chunk."""
    rows, hidden, weight, _ = batch()
    other, other_weight = torch.randn(rows.num_tokens, WIDTH), torch.randn(VOCAB, WIDTH)
    teacher = ll.Logits(other, other_weight) if form == "Logits" else other @ other_weight.T
    exact, usual = (
        smoothed_beside(rows, hidden, weight, other @ other_weight.T, kind, wide)
        for wide in (torch.float64, torch.float32)
    )
    smooth = {"label_smoothing": 0.2}
    objective = ll.Objective(policy="cross_entropy", policy_options=smooth, divergence=kind, divergence_coef=0.5)
    for made, options in ((False, {}), (False, {"memory": 4 * 4 * VOCAB * 4}), (True, {})):
        leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
        logits = leaves[0] @ leaves[1].T if made else ll.Logits(*leaves)
        loss, _ = ll.policy_loss(logits, rows, objective, teacher=teacher, backend=backend, **options)
        assert_close_to_truth(loss.detach(), exact[0], usual[0], "loss")
        for mine, right, theirs in zip(torch.autograd.grad(loss, leaves), exact[1], usual[1], strict=True):
            assert_gradient_close_to_truth(mine, right, theirs)


def test_one_pass_and_its_metrics():
    rows, hidden, weight, _ = batch()
    objective = ll.Objective.recipe("sft", z_coef=Z)
    plan = ll.explain(ll.policy_loss, ll.Logits(hidden.requires_grad_(), weight.requires_grad_()), rows, objective)
    assert plan.kind == "one pass"
    _, _, numbers = ours(rows, hidden, weight, objective, {})
    log_z = torch.logsumexp((hidden[rows.index] @ weight.T).detach().double(), -1)[rows.counted]
    assert numbers["log_z"] == pytest.approx(float(log_z.mean()), rel=1e-6)
    assert numbers["z_loss"] == pytest.approx(Z * float(log_z.square().mean()), rel=1e-6)
    assert numbers["loss"] == pytest.approx(numbers["policy_loss"] + numbers["z_loss"])


def test_a_frozen_head_and_logits():
    """The route with unit gradients made in forward, and the path from logits, have the gradient of log Z too."""
    rows, hidden, weight, _ = batch(torch.float64)
    exact = told(rows, hidden, weight, None, torch.float64, z=Z)
    objective = ll.Objective(policy="cross_entropy", z_coef=Z)
    leaf = hidden.clone().requires_grad_()
    loss, _ = ll.policy_loss(ll.Logits(leaf, weight), rows, objective)
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], exact[1][0], rtol=1e-10, atol=1e-12)
    loss, _ = objective(ll.logprobs(leaf @ weight.T, rows), rows)
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], exact[1][0], rtol=1e-10, atol=1e-12)


def test_rows_that_have_a_gradient_by_log_z_alone():
    """Weight 0 takes a token out of the cross-entropy, but not out of the z-loss."""
    rows, hidden, weight, _ = batch(torch.float64)
    none = torch.zeros(len(rows))
    exact = told(rows, hidden, weight, none, torch.float64, z=Z)
    objective = ll.Objective(policy="cross_entropy", z_coef=Z)
    _, gradients, _ = ours(rows, hidden, weight, objective, {"token_weight": none})
    torch.testing.assert_close(gradients[1], exact[1][1], rtol=1e-10, atol=1e-12)
    assert gradients[1].abs().max() > 1e-3


def sharded(rank, world, rows, hidden, weight):
    cut = VOCAB // 2 + 7
    start, stop = (0, cut) if rank == 0 else (cut, VOCAB)
    shard = ll.VocabShard(start, stop, torch.distributed.group.WORLD)
    objective = ll.Objective(policy="cross_entropy", z_coef=Z)
    loss, (d_hidden, d_weight), _ = ours(rows, hidden, weight[start:stop], objective, {}, shard=shard, memory=4096)
    return loss, d_hidden, d_weight


def test_over_a_vocabulary_group():
    rows, hidden, weight, _ = batch(torch.float64)
    loss, (d_hidden, d_weight) = told(rows, hidden, weight, None, torch.float64, z=Z)
    parts = run_ranks(sharded, 2, rows, hidden, weight)
    for part in parts:
        torch.testing.assert_close(part[0], loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(part[1], d_hidden, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([part[2] for part in parts]), d_weight, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "fields", "text"),
    [
        (dict(policy="dft", policy_options={"label_smoothing": 0.1}), {}, "takes no label_smoothing: .* Take policy="),
        (dict(policy_options={"label_smoothing": 1.0}), {}, "label_smoothing must be in 0 .. 1 but is 1.0"),
        (dict(policy="ppo_clip"), {"token_weight": 1}, "no part of it reads the field token_weight"),
        (dict(z_coef=float("nan")), {}, "z_coef must be a finite number but is nan"),
    ],
)
def test_errors(settings, fields, text):
    rows, hidden, weight, _ = batch()
    given = {name: torch.ones(len(rows)) for name in (*fields, *(("old_logprob", "advantage") if fields else ()))}
    with pytest.raises(ll.LogitlessError, match=text):
        ours(rows, hidden, weight, ll.Objective(**{"policy": "cross_entropy"} | settings), given)


def test_z_loss_of_results_without_log_z():
    rows, hidden, weight, _ = batch()
    with pytest.raises(ll.LogitlessError, match=r"z_coef is 0\.1 but log Z was not computed"):
        ll.Objective(policy="cross_entropy", z_coef=0.1)(ll.TokenStats(torch.zeros(len(rows)), None, None), rows)
    kept = ll.Kept.from_lists([[1, 2]] * len(rows)).over("support")
    with pytest.raises(ll.LogitlessError, match=r"has a z_coef, but where the scope is the support there is no log Z"):
        ours(rows, hidden, weight, ll.Objective(policy="cross_entropy", z_coef=0.1), {}, kept=kept)


# TRL's own loss.


@pytest.mark.parametrize("kind", ["nll", "dft"])
def test_same_loss_as_trl(kind):
    """``SFTTrainer.compute_loss`` gets what it reads; its model answers with our log-probs."""
    trl = pytest.importorskip("trl")
    from collections import defaultdict

    from accelerate import Accelerator

    rows, hidden, weight, _ = batch(torch.float64)
    logits = (hidden[rows.index] @ weight.T).requires_grad_()
    logp = log_softmax(logits, -1).gather(1, rows.target[:, None]).squeeze(1)
    mask = rows.counted
    zeros = torch.zeros(1, len(rows))
    answer = SimpleNamespace(
        log_probs=torch.where(mask, logp, 0.0)[None], label_mask=mask[None], entropy=zeros, is_top1=zeros.bool()
    )
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        accelerator=Accelerator(cpu=True),
        compute_loss_func=None,
        label_smoother=None,
        args=SimpleNamespace(loss_type=kind, average_tokens_across_devices=False),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"labels": rows.target[None], "attention_mask": torch.ones(1, len(rows))}
    theirs = trl.SFTTrainer.compute_loss(trainer, lambda **_: answer, inputs)
    objective = ll.Objective.recipe({"nll": "sft"}.get(kind, kind))
    mine, _ = objective(ll.logprobs(logits, rows.target), rows)
    torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)
    both = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (mine, theirs)]
    torch.testing.assert_close(*both, atol=1e-12, rtol=0)
