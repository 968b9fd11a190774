"""A Hugging Face model directory as a function from records to results.

Samples are padded on the right and the model is given no mask: a causal model never looks to the right, and attention
without a mask is faster. Whether the model is causal is tried once, when it is loaded.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from logitless.errors import LogitlessError
from logitless.rows import Rows
from logitless.tools.score.files import Record
from logitless.tools.untrusted import check_weights

DTYPES = ("auto", "bfloat16", "float16", "float32")


def check_model(folder: Path) -> None:
    """Raise unless the folder looks like a model directory and transformers is installed."""
    if not (folder / "config.json").is_file():
        raise LogitlessError(f"score: {folder} is no model directory: there is no config.json in it.")
    check_weights("score", folder)
    if importlib.util.find_spec("transformers") is None:
        raise LogitlessError("score: transformers is not installed. Run pip install 'logitless[score]'.")


@dataclass(frozen=True)
class Texts:
    """Token ids of texts, by the tokenizer of the model directory, which is loaded for the first text."""

    folder: Path
    special_tokens: bool = True

    def encode(self, text: str, opens: bool) -> list[int]:
        return self._tokenizer(text, add_special_tokens=opens and self.special_tokens)["input_ids"]

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise self._missing(str(error).strip().splitlines()[0]) from error
        names = list(tokenizer.vocab_files_names.values())
        # Without its files a tokenizer may still load, with an empty vocabulary: every text would be empty.
        if names and not any((self.folder / name).is_file() for name in names):
            raise self._missing(f"there is none of {', '.join(names)}.")
        return tokenizer

    def _missing(self, reason: str) -> LogitlessError:
        return LogitlessError(
            f"score: the input has texts, but no tokenizer could be loaded from {self.folder}: {reason} Put its files "
            f"there, or give token ids."
        )


@dataclass(frozen=True, eq=False)
class Scorer:
    """A loaded model that scores batches.

    Attributes:
        model: patched by :func:`logitless.adapters.transformers.patch`.
        temperature: temperature at which the responses were sampled.
    """

    model: Any
    temperature: float

    @staticmethod
    def load(folder: Path, *, device: str, dtype: str, temperature: float, memory: int | str) -> Scorer:
        """Load the model in evaluation mode, and make sure that it is causal."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        from logitless.adapters.transformers import patch

        # The bar of transformers would be drawn over ours.
        logging.disable_progress_bar()
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0]
            raise LogitlessError(f"score: the model in {folder} could not be loaded: {reason}") from error
        model = patch(model.to(device).eval(), batch_invariant=True, memory=memory)
        scorer = Scorer(model, temperature)
        scorer._check_causal()
        return scorer

    def score(self, records: Sequence[Record], tokens_per_batch: int) -> list[bytes]:
        """One line of results per record, in the order of the records."""
        for record in records:
            self._check(record)
        lines = {record.index: _line(record, [], []) for record in records if not record.response}
        for batch in batches(records, tokens_per_batch):
            for record, logprob, entropy in zip(batch, *self._run(batch), strict=True):
                lines[record.index] = _line(record, logprob, entropy)
        return [lines[record.index] for record in records]

    @torch.inference_mode()
    def _run(self, batch: Sequence[Record]) -> tuple[list[list[float]], list[list[float]]]:
        tokens = [[*record.prompt, *record.response] for record in batch]
        lengths = [len(record.response) for record in batch]
        width = max(map(len, tokens))
        # Padding repeats the sample's last token: an id that the model knows, and no special padding id.
        ids = torch.tensor([[*x, *x[-1:] * (width - len(x))] for x in tokens], device=self.model.device)
        rows = Rows.padded(tokens, lengths, max_length=width, device=ids.device)
        out = self.model(input_ids=ids, rows=rows, entropy="value", temperature=self.temperature)
        logprob, entropy = (rows.split(x.cpu()) for x in (out.logprob, out.entropy))
        return [x.tolist() for x in logprob], [x.tolist() for x in entropy]

    def _check(self, record: Record) -> None:
        vocabulary = self.model.get_input_embeddings().num_embeddings
        largest = max([*record.prompt, *record.response], default=0)
        if largest >= vocabulary:
            raise LogitlessError(
                f"score: {record.place}: token id {largest} is outside of the model's vocabulary of {vocabulary}. Was "
                f"the file made with another tokenizer?"
            )
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if longest is not None and record.num_tokens > longest:
            raise LogitlessError(
                f"score: {record.place}: {record.num_tokens} tokens are more than the model's {longest} positions "
                f"(max_position_embeddings). Cut the prompt."
            )

    def _check_causal(self) -> None:
        """Raise if padding behind a sample changes its results."""
        vocabulary = self.model.get_input_embeddings().num_embeddings
        ids = torch.randint(vocabulary, (9,), generator=torch.Generator().manual_seed(0)).tolist()
        short = Record(0, "a trial", ids[:2], ids[2:4])
        (alone,), _ = self._run([short])
        (beside, _), _ = self._run([short, Record(1, "a trial", ids[:2], ids[2:])])
        off = max(abs(a - b) for a, b in zip(alone, beside, strict=True))
        allowed = 64 * torch.finfo(self.model.dtype).eps * max(1.0, *map(abs, alone))
        if not off <= allowed:
            raise LogitlessError(
                f"score: log-probs of {type(self.model).__name__} change by {off:.3g} with what follows them (allowed "
                f"{allowed:.3g}). Only causal models can be scored in padded batches."
            )


def batches(records: Sequence[Record], tokens_per_batch: int) -> Iterator[list[Record]]:
    """Micro-batches of records of similar lengths: one record, or at most ``tokens_per_batch`` tokens with padding.

    Longest first, so that a batch too large for the device comes first. Records with empty responses are left out.
    """
    ordered = sorted((r for r in records if r.response), key=lambda r: (-r.num_tokens, r.index))
    batch: list[Record] = []
    for record in ordered:
        if batch and batch[0].num_tokens * (len(batch) + 1) > tokens_per_batch:
            yield batch
            batch = []
        batch.append(record)
    if batch:
        yield batch


def _line(record: Record, logprob: list[float], entropy: list[float]) -> bytes:
    if not all(map(math.isfinite, [*logprob, *entropy])):
        raise LogitlessError(
            f"score: {record.place}: a log-prob or entropy is not finite. The model overflows here or its weights are "
            f"broken; float16 overflows easily, --dtype bfloat16 or float32 do not."
        )
    numbers = {"logprob": [_short(x) for x in logprob], "entropy": [_short(x) for x in entropy]}
    fields = {"index": record.index, "tokens": record.response, **numbers}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _short(x: float) -> float:
    """Nine digits bring back the same float32."""
    return float(f"{x:.9g}")
