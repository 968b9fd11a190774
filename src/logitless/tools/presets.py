"""Heads of models that people train, and sizes of the cards they train on.

The numbers are those of the published ``config.json`` files; any other model is read from its ``config.json``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from logitless.errors import LogitlessError, did_you_mean
from logitless.machine import Machine
from logitless.spec import parse_memory
from logitless.tools.untrusted import read_object

LARGEST_SIZE = 1 << 31
"""Hidden sizes and vocabularies of a config.json beyond this are refused."""


@dataclass(frozen=True)
class ModelShape:
    """The head of a model: its weight is ``[vocab, hidden]``, and its logits have a softcap (or None) and a scale.

    ``tied`` says whether the head's weight is the embedding's.
    """

    name: str
    hidden: int
    vocab: int
    softcap: float | None = None
    scale: float = 1.0
    tied: bool = False


def _family(prefix: str, vocab: int, sizes: dict[str, int], **more: Any) -> dict[str, ModelShape]:
    names = {f"{prefix}-{size}": hidden for size, hidden in sizes.items()}
    return {name: ModelShape(name, hidden, vocab, **more) for name, hidden in names.items()}


PRESETS = {
    **_family("qwen2.5", 151936, {"0.5b": 896, "1.5b": 1536, "3b": 2048}, tied=True),
    **_family("qwen2.5", 152064, {"7b": 3584, "14b": 5120, "32b": 5120, "72b": 8192}),
    **_family("qwen3", 151936, {"0.6b": 1024, "1.7b": 2048, "4b": 2560}, tied=True),
    **_family("qwen3", 151936, {"8b": 4096, "14b": 5120, "32b": 5120, "30b-a3b": 2048, "235b-a22b": 4096}),
    **_family("qwen3.5", 248320, {"35b-a3b": 2048}),
    **_family("llama3.2", 128256, {"1b": 2048, "3b": 3072}, tied=True),
    **_family("llama3.1", 128256, {"8b": 4096, "70b": 8192, "405b": 16384}),
    **_family("gemma2", 256000, {"2b": 2304, "9b": 3584, "27b": 4608}, softcap=30.0, tied=True),
    **_family("gemma3", 262144, {"1b": 1152}, tied=True),
    **_family("gemma3", 262208, {"4b": 2560, "12b": 3840, "27b": 5376}, tied=True),
    **_family("glm4", 151552, {"9b": 4096, "32b": 6144}),
    **_family("glm4.5", 151552, {"air": 4096, "355b": 5120}),
    **_family("deepseek-v2", 102400, {"lite": 2048, "236b": 5120}),
    **_family("deepseek-v3", 129280, {"671b": 7168}),
}


class Card(NamedTuple):
    """A card: its memory in MiB as nvidia-smi shows it, its multiprocessors, and its compute capability."""

    memory: int
    multiprocessors: int
    capability: int


CARDS = {
    "a100-40g": Card(40960, 108, 8),
    "a100-80g": Card(81920, 108, 8),
    "h100-80g": Card(81559, 132, 9),
    "h200-141g": Card(143771, 132, 9),
    "b200-180g": Card(183359, 148, 10),
    "l40s-48g": Card(46068, 142, 8),
    "rtx4090-24g": Card(24564, 128, 8),
    "rtx5090-32g": Card(32607, 170, 12),
}


def find_model(model: str) -> ModelShape:
    """A preset by its name, or the shape that a ``config.json`` (or the directory it is in) describes.

    >>> find_model("qwen3-8b").hidden
    4096
    """
    if model.lower() in PRESETS:
        return PRESETS[model.lower()]
    path, reason = Path(model), ""
    try:
        path = path / "config.json" if path.is_dir() else path
        if path.is_file():
            return _read_config(path)
    except OSError as error:
        # A name that is too long, a folder that may not be read.
        reason = f" ({error.strerror})"
    shown = repr(model) if len(model) < 100 else f"{model[:97]!r}..."
    raise LogitlessError(
        f"plan: model must be a config.json, a folder with one, or a preset but is {shown}{reason}."
        f"{did_you_mean(model.lower(), PRESETS)} Known: {', '.join(PRESETS)}."
    )


def find_card(card: str) -> int:
    """Bytes of a card, by its name or as a size such as ``"80GiB"``.

    >>> find_card("h100-80g") >> 20, find_card("H100") >> 20
    (81559, 81559)
    """
    if (named := _named(card)) is not None:
        return CARDS[named].memory << 20
    try:
        return parse_memory(card)
    except LogitlessError:
        raise LogitlessError(
            f'plan: card must be a size such as "80GiB" or a name but is {card!r}.'
            f"{did_you_mean(card.lower(), CARDS)} Known: {', '.join(CARDS)}."
        ) from None


def machine_of(card: str | None) -> Machine | Literal["cuda"]:
    """The machine of a card by its name; for a size, the one at hand."""
    if card is None or (named := _named(card)) is None:
        return "cuda"
    return Machine.card(named, CARDS[named].multiprocessors, CARDS[named].capability)


def _named(card: str) -> str | None:
    """The card of that name, or the only one that begins with it: ``h100``, but not ``a100``."""
    found = [name for name in CARDS if card.lower() in (name, name.partition("-")[0])]
    return found[0] if len(found) == 1 else None


def find_count(text: str, option: str = "--tokens") -> int:
    """A number of tokens as people write it: ``65536``, ``65_536``, ``64k`` (of 1024) or ``1m``.

    >>> find_count("64k"), find_count("1.5m"), find_count("131,072")
    (65536, 1572864, 131072)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([km]?)", text.strip().lower().replace(",", "").replace("_", ""))
    count = float(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2]] if match else 0.0
    if count > 1 << 53:
        raise LogitlessError(f"plan: {option} must be at most {1 << 53} tokens but is {text.strip()[:40]!r}.")
    if count < 1 or count != int(count):
        raise LogitlessError(f"plan: {option} must be a number of tokens, as 65536 or 64k, but is {text!r}.")
    return int(count)


def _read_config(path: Path) -> ModelShape:
    fields = read_object("plan", path)
    # A model for images and text has a config of its own for the language model.
    own = fields.get("text_config", {})
    text = {**fields, **(own if isinstance(own, dict) else {})}
    sizes: dict[str, Any] = {
        "hidden_size": text.get("hidden_size", text.get("n_embd")),
        # ChatGLM's configs have a name of their own for the rows of the head.
        "vocab_size": text.get("padded_vocab_size") or text.get("vocab_size"),
    }
    for name, value in sizes.items():
        if type(value) is not int or not 1 <= value <= LARGEST_SIZE:
            raise LogitlessError(
                f"plan: {path}: {name} must be a positive integer of at most {LARGEST_SIZE} but is {value!r}."
            )
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        value = text.get(name)
        if value is not None and (type(value) not in (int, float) or not 0 <= value < math.inf):
            raise LogitlessError(f"plan: {path}: {name} must be a number of 0 or more but is {value!r}.")
    return ModelShape(
        name=str(text.get("_name_or_path") or text.get("model_type") or path.parent.name),
        hidden=sizes["hidden_size"],
        vocab=sizes["vocab_size"],
        softcap=text.get("final_logit_softcapping"),
        # Granite divides the logits, Cohere multiplies them.
        scale=1 / text["logits_scaling"] if text.get("logits_scaling") else float(text.get("logit_scale") or 1.0),
        tied=bool(text.get("tie_word_embeddings", True)),
    )
