"""Steps of TRL's DPO trainer before it had a fused head: logits of the policy and of its reference are not computed.

Needs a release of TRL from 1.0 to 1.14 (``LOGITLESS_HOSTS``, see matrix.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hosts import put_first
from shared.host_steps import fewer_bytes, notices, same_steps
from tiny import CHOSEN, PROMPTS, REJECTED, WORDS, qwen3, tokenizer

put_first("trl")
trl = pytest.importorskip("trl", minversion="1.0")
RELEASE = tuple(map(int, trl.__version__.split(".")[:2]))

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(RELEASE > (1, 14), reason="from 1.15 on, DPO computes no logits"),
]
HALF = torch.bfloat16

SETTINGS: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "with SFT": {"loss_type": ["sigmoid", "sft"]},
    "WPO weights": {"use_weighting": True},
    "IPO": {"loss_type": ["ipo"]},
}


def steps_of(folder: Path, dtype: torch.dtype = torch.float32, vocab: int = len(WORDS), **more: Any) -> Any:
    """A model, and a step of the trainer's loop: ``training_step`` and the optimizer. Its metrics are in the result."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": False}
    settings = {"per_device_train_batch_size": 2, "max_steps": 3, "gradient_checkpointing": False, "seed": 3}
    trainer = trl.DPOTrainer(
        model=qwen3(vocab).to(HALF).to(dtype),
        ref_model=qwen3(vocab).to(HALF).to(dtype),
        args=trl.DPOConfig(output_dir=str(folder), **settings, **quiet, **more),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS, "chosen": CHOSEN, "rejected": REJECTED}),
        processing_class=tokenizer(),
    )

    def told(loss: Any) -> Any:
        found = trainer._metrics["train"]
        # Of equal models, which answer has the higher reward is decided by rounding.
        seen = [torch.as_tensor(found[name][-1]) for name in sorted(found) if name != "rewards/accuracies"]
        return loss + 1e-3 * torch.stack([x.float() for x in seen]).sum()

    return tiny.steps_of(trainer, told)


@pytest.mark.parametrize("kind", SETTINGS)
def test_steps(kind, tmp_path):
    report = same_steps("trl", lambda: steps_of(tmp_path, **SETTINGS[kind]), models=2)
    assert report.passed_on == 0


def test_steps_in_half_precision(tmp_path):
    same_steps("trl", lambda: steps_of(tmp_path, HALF), models=2, exact=lambda: steps_of(tmp_path, torch.float64))


def test_steps_notice_a_wrong_number(tmp_path):
    notices("trl", lambda: steps_of(tmp_path), models=2)


def test_steps_hold_no_logits(tmp_path):
    vocab = 1 << 15
    # Of two pairs, with seven tokens at least where an answer is longest.
    fewer_bytes("trl", lambda: steps_of(tmp_path, vocab=vocab), 4 * 2 * 2 * 7 * vocab)
