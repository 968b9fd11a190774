"""TRL's GRPO loss in the pass of its log-probs: the same runs as without, and the right gradients if it was another."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hosts import put_first
from tiny import trainer

import logitless

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
    # SGD moves a parameter by its gradient; Adam by 1, whatever rounding has left of a gradient that is nearly 0.
    made = trainer("GRPO", folder, optim="sgd", learning_rate=0.1, **settings)
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
