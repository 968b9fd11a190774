"""TRL's GRPOTrainer with logitless inside: ``python examples/trl_trainer.py``. Nothing is downloaded.

One line is ours, ``install("trl")``; the rest is a GRPO run as TRL documents it, on a model and a tokenizer that are
made here: a one-layer Qwen3 over 64 words, rewarded for even numbers.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import logitless

WORDS = ["<pad>", "<end>", "<unk>", *(str(number) for number in range(61))]


def tokenizer() -> PreTrainedTokenizerFast:
    """One id per word."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "head_dim": 16,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **ids))


def even_words(completions: list[str], **_) -> list[float]:
    """The share of numbers that are even, among eight."""
    return [sum(word.isdigit() and int(word) % 2 == 0 for word in text.split()) / 8 for text in completions]


def trainer(folder: str, steps: int) -> GRPOTrainer:
    sizes = {"per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 8, "max_steps": steps}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    return GRPOTrainer(
        model=model(),
        reward_funcs=even_words,
        args=GRPOConfig(output_dir=folder, learning_rate=1e-2, use_cpu=True, bf16=False, **sizes, **quiet),
        train_dataset=Dataset.from_dict({"prompt": [f"{n} {n + 1}" for n in range(32)]}),
        processing_class=tokenizer(),
    )


def main(steps: int) -> None:
    logitless.install("trl", audit=4)  # compare four rows of every call with float64
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(folder, steps)
        run.train()
    rewards = [entry["reward"] for entry in run.state.log_history if "reward" in entry]
    print(f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f} in {len(rewards)} steps")
    print(logitless.status())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    main(parser.parse_args().steps)
