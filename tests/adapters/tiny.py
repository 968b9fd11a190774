"""Tiny models, a tokenizer and trainers made in this process: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(250))]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    # Named, because transformers 4 adds types of tokens, which the models do not take.
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )


def qwen3(vocab_size: int = len(WORDS), **more) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(5)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    settings = sizes | heads | ids | {"tie_word_embeddings": False, "initializer_range": 0.5} | more
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=vocab_size, **settings))


PROMPTS = ["w1 w2 w3", "w4 w5", "w6 w7 w8 w9", "w10"]
CHOSEN, REJECTED = [" w3 w4 w5", " w7 w8", " w11 w12 w13 w14", " w15 w16"], [" w8 w9", " w1", " w2 w3 w4", " w5"]
WHOLE = [[p + c for p, c in zip(PROMPTS, some, strict=True)] for some in (CHOSEN, REJECTED)]
DATA = {
    "SFT": {"prompt": PROMPTS, "completion": CHOSEN},
    "DPO": {"prompt": PROMPTS, "chosen": CHOSEN, "rejected": REJECTED},
    "KTO": {"prompt": PROMPTS, "completion": CHOSEN, "label": [True, False, True, False]},
    "Reward": {"chosen": WHOLE[0], "rejected": WHOLE[1]},
    "Distillation": {"prompt": PROMPTS},
    "GKD": {
        "messages": [
            [{"role": "user", "content": p}, {"role": "assistant", "content": c}]
            for p, c in zip(PROMPTS, CHOSEN, strict=True)
        ]
    },
}


def offline_trainer(kind: str, folder: Path, **more) -> Any:
    """A trainer of two steps on data with answers; a teacher, where it has one, of other weights."""
    import trl
    from datasets import Dataset, disable_progress_bars
    from transformers import Qwen3ForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    disable_progress_bars()
    model, place = qwen3(), trl
    if kind == "Reward":
        model.config.num_labels = 1
        model = Qwen3ForSequenceClassification(model.config)
    model.save_pretrained(folder / "model")
    given: dict[str, Any] = {}
    if kind in ("Distillation", "GKD"):
        qwen3(num_hidden_layers=2).save_pretrained(folder / "teacher")
        given["teacher_model"] = str(folder / "teacher")
    if kind == "GKD":
        from trl.experimental import gkd as place
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    settings = {"learning_rate": 1e-2, "max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": False}
    return getattr(place, f"{kind}Trainer")(
        model=str(folder / "model"),
        args=getattr(place, f"{kind}Config")(output_dir=str(folder), seed=3, **settings | quiet | more),
        train_dataset=Dataset.from_dict(DATA[kind]),
        processing_class=words,
        **given,
    )


def trainer(kind: str, folder: Path, model: Any = None, **more) -> Any:
    """A GRPO or RLOO trainer of three steps on four prompts, with a reference model and a reward of its own."""
    import trl
    from datasets import Dataset
    from transformers.utils import logging

    logging.disable_progress_bar()
    (qwen3() if model is None else model).save_pretrained(folder / "model")
    settings = {"beta": 0.1, "temperature": 0.9, "learning_rate": 1e-2, "max_steps": 3, "logging_steps": 1}
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 7}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": False}
    arguments = {"output_dir": str(folder), "seed": 3} | settings | sizes | quiet | more
    return getattr(trl, f"{kind}Trainer")(
        model=str(folder / "model"),
        reward_funcs=lambda completions, **_: [float(len(text) % 5) for text in completions],
        args=getattr(trl, f"{kind}Config")(**arguments),
        train_dataset=Dataset.from_dict({"prompt": ["w1 w2 w3", "w4 w5", "w6 w7 w8 w9", "w10"]}),
        processing_class=tokenizer(),
    )


def steps_of(trainer: Any, told: Callable[[Any], Any]) -> tuple[Any, Callable[[int], Any]]:
    """The model of a trainer of TRL, and a step of its loop: ``training_step`` and the optimizer; ``told`` gives the
    result, of the loss."""
    trainer.current_gradient_accumulation_steps = 1
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.05)
    batches = [*trainer.get_train_dataloader()]

    def step(n: int) -> Any:
        trainer.model.train()
        loss = trainer.training_step(trainer.model, dict(batches[n % len(batches)]), None)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return told(loss)

    return trainer.model, step
