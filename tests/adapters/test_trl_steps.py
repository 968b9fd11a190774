"""TRL's trainers that read logits: three steps of their own, whose logits are not computed."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hosts import put_first
from shared.host_steps import fewer_bytes, notices, same_steps
from tiny import CHOSEN, PROMPTS, REJECTED, WORDS, qwen3, tokenizer

put_first("trl")
trl = pytest.importorskip("trl", minversion="1.16")

pytestmark = pytest.mark.filterwarnings("default")
HALF = torch.bfloat16
PAIRS = {"prompt": PROMPTS, "chosen": CHOSEN, "rejected": REJECTED}
DATA = {"ORPO": PAIRS, "CPO": PAIRS, "TPO": {**PAIRS, "reference": CHOSEN[::-1]}}


def steps_of(kind: str, folder: Path, dtype: torch.dtype = torch.float32, vocab: int = len(WORDS), **more: Any) -> Any:
    """A model, and a step of the trainer's loop: ``training_step`` and the optimizer."""
    from datasets import Dataset, disable_progress_bars
    from transformers.utils import logging

    logging.disable_progress_bar()
    disable_progress_bars()
    place = importlib.import_module(f"trl.experimental.{kind.lower()}")
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": False}
    settings = {"per_device_train_batch_size": 2, "max_steps": 3, "gradient_checkpointing": False, "seed": 3} | more
    trainer = getattr(place, f"{kind}Trainer")(
        model=qwen3(vocab).to(HALF).to(dtype),
        args=getattr(place, f"{kind}Config")(output_dir=str(folder), **settings, **quiet),
        train_dataset=Dataset.from_dict(DATA[kind]),
        processing_class=tokenizer(),
    )

    def told(loss: Any) -> Any:
        with contextlib.suppress(AttributeError):
            trainer._stored_metrics.clear()
        return loss

    return tiny.steps_of(trainer, told)


@pytest.mark.parametrize("kind", DATA)
def test_steps(kind, tmp_path):
    report = same_steps("trl", lambda: steps_of(kind, tmp_path))
    assert report.passed_on == 0


@pytest.mark.parametrize("kind", ["ORPO"])
def test_steps_in_half_precision(kind, tmp_path):
    same_steps("trl", lambda: steps_of(kind, tmp_path, HALF), exact=lambda: steps_of(kind, tmp_path, torch.float64))


@pytest.mark.parametrize("kind", DATA)
def test_steps_notice_a_wrong_number(kind, tmp_path):
    notices("trl", lambda: steps_of(kind, tmp_path))


@pytest.mark.parametrize("kind", DATA)
def test_steps_hold_no_logits(kind, tmp_path):
    vocab = 1 << 15
    # Of two pairs, with seven tokens at least where an answer is longest.
    fewer_bytes("trl", lambda: steps_of(kind, tmp_path, vocab=vocab), 4 * 2 * 2 * 7 * vocab)
