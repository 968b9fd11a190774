"""A small language model, trained within a minute on text that lies on the machine: see ``trained_inputs.py``.

texts      Python sources, headers and documents of the interpreter and its packages, in one fixed order
Ids        a byte-level BPE of them, and the texts as ids: most to train on, the rest held out
train      a model with the shape of Qwen3 and a head of its own, by our own supervised loss
look       hidden states, head and targets of held-out text
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

import logitless as ll
from benchmarks.bench.inputs import Trained

SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh")
FILE_BYTES = (200, 1 << 18)
END = "<end>"
LONGEST_TOKEN = 64
HELD_OUT = 0.02
# Texts that are encoded at a time: their ids are Python numbers for a while.
TOGETHER = 512
WARM, LEAST = 0.05, 0.1
"""The share of the time in which the rate rises, and what is left of it at the end."""
TOLD = 20
"""How often the loss is told."""


@dataclass(frozen=True)
class Sizes:
    """A model, and the sequences it is trained on."""

    vocab: int = 151_936
    hidden: int = 1024
    layers: int = 6
    heads: int = 16
    length: int = 1024
    batch: int = 8


class Effort(NamedTuple):
    """Seconds of training, or steps if they are over sooner, and the highest learning rate."""

    seconds: float
    steps: int
    rate: float


class Ids(NamedTuple):
    """``[N]`` ids to train on, ``[M]`` held out, and how many different ones the tokenizer has."""

    train: Tensor
    held_out: Tensor
    known: int


def machine_folders() -> list[Path]:
    """Where the interpreter and its packages lie; none within another."""
    names = [sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")]
    folders = sorted({Path(name).resolve() for name in (*names, Path(torch.__file__).parents[1])})
    return [f for f in folders if not any(other in f.parents for other in folders)]


def texts(folders: Sequence[Path], most: int) -> list[str]:
    """Texts of all files of these folders, mixed, up to so many bytes; none twice."""
    files = [path for folder in folders for path in _files(folder)]
    random.Random(0).shuffle(files)
    found: list[str] = []
    seen: set[bytes] = set()
    total = 0
    for path in files:
        content = path.read_bytes()
        mark = hashlib.sha256(content).digest()
        if mark in seen:
            continue
        seen.add(mark)
        found.append(content.decode("utf-8", "ignore"))
        total += len(content)
        if total >= most:
            break
    return found


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders.sort()
        for path in (Path(place, name) for name in sorted(names) if name.endswith(SUFFIXES)):
            if os.access(path, os.R_OK) and path.is_file() and FILE_BYTES[0] <= path.stat().st_size <= FILE_BYTES[1]:
                yield path


def tokenize(found: Sequence[str], vocab: int, most: int, needed: int) -> Ids:
    """Ids of the texts, by a byte-level BPE of the first of them.

    Args:
        most: characters that the BPE is made of.
        needed: ids that must be held out.
    """
    # Asked for by name, or its threads complain whenever the compiler starts processes.
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        show_progress=False,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=LONGEST_TOKEN,
    )
    tokenizer.train_from_iterator(_first(found, most), trainer)
    end, parts = tokenizer.token_to_id(END), []
    for start in range(0, len(found), TOGETHER):
        encoded = tokenizer.encode_batch_fast(list(found[start : start + TOGETHER]))
        parts += [torch.tensor([end, *one.ids], dtype=torch.int32) for one in encoded]
    held, count = 0, 0
    while held < len(parts) and (count < needed or held < HELD_OUT * len(parts)):
        held += 1
        count += len(parts[-held])
    if count < needed or held == len(parts):
        raise SystemExit(f"the text has too few tokens: {sum(map(len, parts))}, of which {needed} are to be held out")
    return Ids(torch.cat(parts[:-held]), torch.cat(parts[-held:]), tokenizer.get_vocab_size())


def _first(found: Sequence[str], most: int) -> Iterator[str]:
    total = 0
    for text in found:
        yield text
        total += len(text)
        if total >= most:
            return


def make_model(sizes: Sizes, device: torch.device) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=max(1, sizes.heads // 2),
        head_dim=sizes.hidden // sizes.heads,
        max_position_embeddings=sizes.length,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        pad_token_id=None,
        eos_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3ForCausalLM(config).train()


def train(model: Any, ids: Tensor, sizes: Sizes, effort: Effort, tell: Callable[[str], None]) -> list[dict[str, float]]:
    """Train the model; the loss as it went."""
    device, start = model.device, time.perf_counter()
    settings = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": device.type == "cuda"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=effort.rate, **settings)
    objective, generator = ll.Objective.recipe("sft"), torch.Generator().manual_seed(0)
    history: list[dict[str, float]] = []
    step, share = 0, 0.0
    while share < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = effort.rate * _rate(share)
        window = _windows(ids, sizes, generator).to(device)
        logits = ll.Logits(*_operands(model, window[:, :-1]))
        loss, _ = ll.policy_loss(logits, window[:, 1:].reshape(-1), objective, memory="2.5GiB")
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # Waits for the step, so that the clock tells of work that is done.
        value, step = float(loss.detach()), step + 1
        share = max((time.perf_counter() - start) / effort.seconds, step / effort.steps)
        if step == 1 or share >= len(history) / TOLD:
            history.append({"step": step, "seconds": time.perf_counter() - start, "loss": value})
            tell(f"step {step}, {history[-1]['seconds']:.1f} s: loss {value:.3f}")
    return history


def _rate(share: float) -> float:
    """Of the highest learning rate: rises at first, then falls along a cosine."""
    return min(share / WARM + 0.01, LEAST + (1 - LEAST) * (1 + math.cos(math.pi * min(share, 1.0))) / 2)


def _windows(ids: Tensor, sizes: Sizes, generator: torch.Generator) -> Tensor:
    """``[B, S + 1]`` ids from anywhere."""
    start = torch.randint(len(ids) - sizes.length, (sizes.batch, 1), generator=generator)
    return ids[start + torch.arange(sizes.length + 1)].long()


def _operands(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """``[B * S, D]`` hidden states and the head, in bfloat16; weights stay in float32."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        hidden = model.model(tokens, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1).bfloat16(), model.lm_head.weight.bfloat16()


@torch.no_grad()
def look(model: Any, ids: Tensor, sizes: Sizes, tokens: int) -> Trained:
    """What the model makes of so many ids, in sequences as long as those it was trained on, from all over the text."""
    start = torch.linspace(0, len(ids) - sizes.length - 1, tokens // sizes.length, dtype=torch.float64).long()
    window = ids[start[:, None] + torch.arange(sizes.length + 1)].long().to(model.device)
    model.eval()
    hidden, weight = zip(*(_operands(model, x[:, :-1]) for x in window.split(sizes.batch)), strict=True)
    return Trained(torch.cat(hidden), weight[0], window[:, 1:].flatten())
