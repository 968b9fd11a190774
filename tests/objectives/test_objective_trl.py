"""TRL's own loss as an outside oracle: the same padded batch through ``GRPOTrainer._compute_loss`` and an Objective.

Its trainer is not run. The method gets what it reads: the settings of one loss type, the log-probs as the model's
answer, an accelerator of one process. Both are float64, so they must agree to rounding.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from objective_truth import FIELDS, Batch, draw, stats_of
from shared.objective_terms import PARTS

from logitless import Objective

trl = pytest.importorskip("trl")

WIDTH = 17


def lines(batch: Batch, name: str) -> torch.Tensor:
    """``[N, WIDTH]``, right-padded with zeros."""
    return torch.stack([torch.nn.functional.pad(x, (0, WIDTH - len(x))) for x in batch.values[name]])


def their_loss(batch: Batch, loss_type: str, **settings):
    """Loss, and its gradient at ``[N, WIDTH]`` log-probs."""
    from accelerate import Accelerator

    x = {name: lines(batch, name) for name in FIELDS}
    logprob = x["logprob"].requires_grad_()
    mask = torch.stack([torch.tensor([*m, *[0] * (WIDTH - len(m))], dtype=torch.float64) for m in batch.masks])
    own = {
        **dict(
            epsilon_low=0.2, epsilon_high=0.2, beta=0.0, importance_sampling_level="token", top_entropy_quantile=1.0
        ),
        **dict(off_policy_mask_threshold=None, use_vllm=False, vllm_importance_sampling_correction=False),
        **dict(_entropy_bonus_enabled=False, aux_loss_enabled=False, max_completion_length=WIDTH),
        **settings,
    }
    arguments = dict(
        delta=own.pop("delta", None),
        use_bias_correction_kl=own.pop("use_bias_correction_kl", False),
        # TRL keeps these in float32, so they are numbers that float32 has.
        sapo_temperature_pos=0.75,
        sapo_temperature_neg=1.25,
        steps_per_generation=1,
    )
    trainer = SimpleNamespace(
        loss_type=loss_type,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(**arguments),
        accelerator=Accelerator(cpu=True),
        current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprob, x["entropy"], None),
        get_off_policy_mask=trl.GRPOTrainer.get_off_policy_mask,
        **own,
    )
    ids = torch.zeros(len(batch), WIDTH, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :3],
        "prompt_mask": ids[:, :3],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": x["advantage"][:, 0],
        "old_per_token_logps": x["old_logprob"],
        "ref_per_token_logps": x["ref_logprob"],
        "num_items_in_batch": mask.sum(),
    }
    loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(loss, logprob)
    return loss.detach(), gradient


CASES = {
    "grpo": (Objective.recipe("grpo", kl_coef=0.04), dict(beta=0.04)),
    "grpo, both bounds": (
        Objective.recipe("grpo", clip=(0.1, 0.3), dual_clip=2.0),
        dict(epsilon_low=0.1, epsilon_high=0.3, delta=2.0),
    ),
    "dapo": (Objective.recipe("dapo"), dict(epsilon_high=0.28)),
    "dr_grpo": (Objective.recipe("dr_grpo", length=WIDTH), {}),
    "bnpo": (Objective.recipe("ppo"), {}),
    "cispo": (Objective.recipe("cispo", clip=(1.0, 0.5)), dict(epsilon_high=1.5)),
    "sapo": (Objective.recipe("sapo", policy_options={"positive": 0.75, "negative": 1.25}), {}),
    "grpo, sequence": (
        Objective.recipe("gspo", clip=(0.03, 0.05)),
        dict(importance_sampling_level="sequence", epsilon_low=0.03, epsilon_high=0.05),
    ),
    "grpo, opsm": (
        Objective.recipe("grpo", correction="opsm", correction_bounds=0.02),
        dict(off_policy_mask_threshold=0.02),
    ),
    "grpo, weighted kl": (
        Objective.recipe("grpo", kl="k3_weighted", kl_coef=0.1),
        dict(beta=0.1, use_bias_correction_kl=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_same_loss_as_trl(name):
    objective, settings = CASES[name]
    # A sample that is wholly masked, but none without tokens: TRL logs means per sample.
    batch = draw([7, 2, 13, 1, 5, 3], masked=(5,))
    loss, gradient = their_loss(batch, name.split(",")[0], **settings)
    rows = batch.rows()
    x = batch.fields(rows, torch.float64)
    stats = stats_of(x)
    ours, _ = objective(stats, rows, **{part: x[part] for part in PARTS})
    torch.testing.assert_close(ours.detach(), loss, atol=1e-12, rtol=0)
    (mine,) = torch.autograd.grad(ours, stats.logprob)
    torch.testing.assert_close(mine, gradient[rows.sample, rows.position], atol=1e-12, rtol=0)
    assert mine.abs().max() > 1e-3
