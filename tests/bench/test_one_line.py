"""``benchmarks/one_line.py`` where there is no GPU: the same code on deferred logits gives the same steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import longest_batch
import one_line
import whole_step
from whole_step_model import MODELS


@pytest.fixture(scope="module")
def trainer() -> one_line.Unchanged:
    return one_line.Unchanged(MODELS["tiny"], torch.device("cpu"))


def test_unchanged_code_gives_the_same_loss_and_gradients(trainer):
    lines = {line["contender"]: line for line in whole_step.steps(trainer, list(trainer.names), repeats=1)}
    assert not [line["text"] for line in lines.values() if "status" in line]
    for name in one_line.LOSSES:
        before, after = lines[name], lines[name + one_line.AFTER]
        # A KL of 0.01 is a sum of differences of log-probs near -7, which are rounded by 5e-7.
        assert after["loss_difference"] < (1e-5 if name == one_line.DISTIL else 1e-6)
        assert after["grad_norm_difference"] < 1e-6
        assert after["loss"] > 0
        if name not in ("DPO by a loop of log_softmax", one_line.DISTIL):
            # A loop over sequences this short has little to save, and two models have twice as many tiles.
            assert after["peak_bytes"] < before["peak_bytes"]


def test_the_head_is_the_models_own_again(trainer):
    assert "forward" not in vars(trainer.model.lm_head)
    found = longest_batch.attempt(trainer, trainer.names[1], 3, 1 << 30)
    assert found.peak is not None
    assert "forward" not in vars(trainer.model.lm_head)
