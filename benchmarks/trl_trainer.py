"""Steps of TRL's own GRPOTrainer, as it is and with our adapter installed: the same trainer, the same batch.

    python benchmarks/trl_trainer.py --peers FOLDER --out benchmarks/results/whole-step.jsonl [--models 0.6B]

The trainer's loop runs, with its loss, its optimizer and its metrics; only the batch is given, instead of completions
that it would generate. Models and sizes are those of ``whole_step.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from longest_batch import say
from trl_alone import trl_module
from whole_step_model import MODELS, Shape, make_model

import logitless as ll
from benchmarks.bench.providers import add_peers
from benchmarks.bench.records import Environment

NAMES = {
    "TRL's trainer": None,
    "TRL's trainer, adapter": {},
    "TRL's trainer, adapter, accurate": {"accurate": True},
    "TRL's trainer, adapter, one pass": {"one_pass": True},
}
"""Contenders, with the options of ``install``; None installs nothing."""


def batch_of(shape: Shape, device: torch.device) -> dict[str, Any]:
    """What TRL's loss reads, with advantages of groups and no old log-probs: the first step after a rollout."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, shape.vocab, (shape.sequences, shape.length), generator=generator).to(device)
    advantages = torch.randn(shape.sequences, generator=generator).to(device)
    mask = torch.ones_like(ids)
    return {
        "prompt_ids": ids[:, : shape.prompt],
        "prompt_mask": mask[:, : shape.prompt],
        "completion_ids": ids[:, shape.prompt :],
        "completion_mask": mask[:, shape.prompt :],
        "advantages": advantages,
        "num_items_in_batch": mask[:, shape.prompt :].sum(),
    }


def make_trainer(shape: Shape, device: torch.device, repeats: int) -> Any:
    """A GRPOTrainer whose batch is given, and which notes the time, the loss and the gradients of each step."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback

    module = trl_module("trl.trainer.grpo_trainer")
    given = batch_of(shape, device)

    class Given(module.GRPOTrainer):
        def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
            return given

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.marks: list[tuple[float, float]] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begun = now(device)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.marks.append((self.begun, now(device)))

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a"))
    clock = Clock()
    trainer = Given(
        model=make_model(shape, device),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=module.GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=device.type == "cpu",
            per_device_train_batch_size=shape.sequences,
            num_generations=shape.sequences,
            max_steps=repeats + 1,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            optim="adamw_torch_fused",
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            bf16=False,
        ),
        train_dataset=prompts(module.Dataset),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
        callbacks=[clock],
    )
    trainer.clock = clock
    return trainer


def prompts(base: Any) -> Any:
    """Prompts for every step, as a dataset of TRL's kind, which may be a stand-in."""
    if hasattr(base, "from_dict"):
        return base.from_dict({"prompt": ["a"] * 64})
    names = {"column_names": ["prompt"], "cache_files": []}
    of_list = {"__len__": lambda self: 64, "__getitem__": lambda self, index: {"prompt": "a"}}
    return type("Prompts", (base,), names | of_list)()


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def steps(shape: Shape, device: torch.device, repeats: int) -> Iterator[dict]:
    """One record per contender, each with a model of its own from the same seed. The first step does not count."""
    first = None
    trl_module("trl.trainer.grpo_trainer")
    for name, options in NAMES.items():
        if options is not None:
            ll.install("trl", **options)
        try:
            trainer = make_trainer(shape, device, repeats)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            trainer.train()
            answered = sum(x.calls - x.passed_on for host in ll.status().hosts for x in host.replaced)
        finally:
            if options is not None:
                ll.uninstall("trl")
        if bool(answered) != (options is not None):
            raise RuntimeError(f"{name}: {answered} calls of TRL were answered by the adapter")
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        laps = [1e3 * (end - begin) for begin, end in trainer.clock.marks[1:]]
        tokens, ms = shape.sequences * shape.length, statistics.median(laps)
        logged = trainer.state.log_history[0]
        line = {"kind": "trainer", "contender": name, "tokens": tokens, "ms": ms, "repeats": repeats}
        line |= {
            "range_ms": [min(laps), max(laps)],
            "tokens_per_s": 1e3 * tokens / ms,
            "peak_bytes": peak,
            "calls": answered,
        }
        line |= {x: float(logged[x]) for x in ("loss", "grad_norm", "entropy")}
        first = first or line
        for what in ("grad_norm", "entropy"):
            line[f"{what}_difference"] = abs(line[what] - first[what]) / abs(first[what])
        del trainer
        torch.cuda.empty_cache()
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to append records to")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: 0.6B, or the tiny one on a CPU")
    parser.add_argument("--peers", type=Path, help="folder of unpacked packages to import TRL from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--commit")
    options = parser.parse_args()
    if options.peers is not None:
        add_peers(options.peers)
    # Nothing is asked of a network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    device = torch.device(options.device)
    for model in options.models or (["tiny"] if device.type == "cpu" else ["0.6B"]):
        for line in steps(MODELS[model], device, options.repeats):
            line = {"model": model, "shape": asdict(MODELS[model]), **line}
            say(json.dumps(line))
            if options.out is not None:
                line["environment"] = asdict(Environment.here(device, options.commit))
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
