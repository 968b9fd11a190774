"""TRL's GRPO loss in the pass of its log-probs: the same runs as without, and the right gradients if it was another."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hosts import put_first
from tiny import trainer

import logitless
from logitless import Head, Logits, Objective
from logitless.adapters.expected import Expectations, Expected, score_expecting

put_first("trl")

NUMBERS = ("loss", "grad_norm", "entropy", "kl", "clip_ratio/region_mean")

FORESEEN: dict[str, dict[str, Any]] = {
    "dapo, KL": {},
    "grpo": {"loss_type": "grpo", "beta": 0.0},
    "bnpo, plain KL": {"loss_type": "bnpo", "use_bias_correction_kl": False},
    "dr_grpo, two-sided": {"loss_type": "dr_grpo", "delta": 1.4},
    "two updates": {"num_iterations": 2, "epsilon": 0.05},
    "accumulated": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "num_generations": 2},
}

OTHERS: dict[str, dict[str, Any]] = {
    "sequences": {"importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "entropy bonus": {"entropy_coef": 0.01},
    "high entropies": {"top_entropy_quantile": 0.5},
}


def run(folder: Any, **settings: Any) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    made = trainer("GRPO", folder, **settings)
    made.train()
    history = [{n: entry[n] for n in NUMBERS if n in entry} for entry in made.state.log_history if "loss" in entry]
    return history, [x.detach().clone() for x in made.model.parameters()]


def same(theirs: Any, ours: Any) -> None:
    assert len(theirs[0]) == len(ours[0]) == 3
    for want, mine in zip(theirs[0], ours[0], strict=True):
        assert want.keys() == mine.keys()
        for name in mine:
            assert math.isclose(mine[name], want[name], rel_tol=1e-5, abs_tol=1e-6), name
    for want, mine in zip(theirs[1], ours[1], strict=True):
        torch.testing.assert_close(mine, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("settings", FORESEEN.values(), ids=FORESEEN)
@pytest.mark.filterwarnings("default")
def test_a_run_with_a_loss_that_is_foreseen(settings, tmp_path):
    pytest.importorskip("trl", minversion="1.16")
    theirs = run(tmp_path, **settings)
    logitless.install("trl", one_pass=True, audit=4)
    same(theirs, run(tmp_path, **settings))
    report = logitless.status().hosts[0]
    steps = 3 * settings.get("gradient_accumulation_steps", 1)
    assert f"losses in the pass of their log-probs: {steps} of {steps}" in report.logits
    assert report.audit.passed


@pytest.mark.parametrize("settings", OTHERS.values(), ids=OTHERS)
@pytest.mark.filterwarnings("default")
def test_a_run_with_another_loss_is_as_without(settings, tmp_path):
    pytest.importorskip("trl", minversion="1.16")
    theirs = run(tmp_path, **settings)
    logitless.install("trl", one_pass=True)
    same(theirs, run(tmp_path, **settings))
    assert not any("losses in the pass" in line for line in logitless.status().hosts[0].logits)


@pytest.mark.filterwarnings("default")
def test_a_run_whose_loss_was_misjudged_is_right(tmp_path, monkeypatch):
    """A trainer of somebody's own, with another clip: the gradients are made again."""
    trl = pytest.importorskip("trl", minversion="1.16")
    compute = trl.GRPOTrainer._compute_loss

    def other(self, model, inputs):
        return compute(self, model, {**inputs, "advantages": inputs["advantages"].clamp(min=-0.1)})

    settings = {"beta": 0.0}
    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", other)
    theirs = run(tmp_path, **settings)
    monkeypatch.undo()
    logitless.install("trl", one_pass=True)
    installed = trl.GRPOTrainer._compute_loss
    ours = trl.trainer.grpo_trainer.GRPOTrainer

    def misjudged(self, model, inputs):
        from logitless.adapters import trl_loss

        before = trl_loss._batch.set(trl_loss._batch_of(self, inputs))
        try:
            return compute(self, model, {**inputs, "advantages": inputs["advantages"].clamp(min=-0.1)})
        finally:
            trl_loss._batch.reset(before)

    assert installed is not compute
    monkeypatch.setattr(ours, "_compute_loss", misjudged)
    found = run(tmp_path, **settings)
    monkeypatch.undo()
    same(theirs, found)
    assert "losses in the pass of their log-probs: 0 of 3" in logitless.status().hosts[0].logits


# Without a host.


def made(dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 7, dtype=dtype).requires_grad_(), torch.randn(31, 7, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(31, (9,)), torch.randn(9)


@pytest.mark.parametrize("factor", [1.0, -0.3, 0.0])
def test_a_multiple_of_what_was_expected(factor):
    hidden, weight, target, advantage = made()
    counts = Expectations()
    expected = Expected(Objective(), {"advantage": advantage, "old_logprob": "current"})
    asked = {"head": Head(temperature=0.7), "memory": "1MiB"}
    out = score_expecting(Logits(hidden, weight), target, expected, counts, **asked)
    assert out.entropy is not None
    (-factor * (advantage * out.logprob).sum()).backward()
    assert counts.lines() == ["losses in the pass of their log-probs: 1 of 1"]
    wide, head = (x.detach().double().requires_grad_() for x in (hidden, weight))
    log_p = (wide @ head.T / 0.7).log_softmax(-1)
    torch.testing.assert_close(out.entropy.double(), -(log_p.exp() * log_p).sum(-1).detach(), rtol=1e-5, atol=1e-5)
    (-factor * (advantage * log_p.gather(1, target[:, None])[:, 0]).sum()).backward()
    torch.testing.assert_close(hidden.grad.double(), wide.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), head.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("what", ["another loss", "one row", "entropy", "both", "NaN"])
def test_anything_else_is_made_again(what):
    hidden, weight, target, advantage = made()
    counts = Expectations()
    expected = Expected(Objective(), {"advantage": advantage, "old_logprob": "current"})
    out = score_expecting(Logits(hidden, weight), target, expected, counts, head=Head(), memory="1MiB")
    off = advantage.clone()
    off[3] += {"one row": 1e-3, "NaN": math.nan}.get(what, 0.0)
    losses = {"another loss": lambda p, h: (p * p).sum(), "entropy": lambda p, h: h.sum()}
    losses |= {"both": lambda p, h: -(advantage * p).sum() - 0.1 * h.sum()}
    loss = losses.get(what, lambda p, h: -(off * p).sum())
    loss(out.logprob, out.entropy).backward()
    assert (counts.met, counts.missed) == (0, 1)
    wide, head = (x.detach().double().requires_grad_() for x in (hidden, weight))
    log_p = (wide @ head.T).log_softmax(-1)
    loss(log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)).backward()
    torch.testing.assert_close(hidden.grad.double(), wide.grad, rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(weight.grad.double(), head.grad, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_a_frozen_head_and_a_second_backward():
    hidden, weight, target, advantage = made()
    expected = Expected(Objective(), {"advantage": advantage, "old_logprob": "current"})
    counts = Expectations()
    out = score_expecting(Logits(hidden, weight.detach()), target, expected, counts, head=Head(), memory="1MiB")
    loss = -(advantage * out.logprob).sum()
    (one,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (two,) = torch.autograd.grad(3 * loss, hidden)
    torch.testing.assert_close(two, 3 * one)
    assert counts.met == 2
