"""A Hugging Face model directory as a function from records to results.

Samples are padded on the right and the model is given no mask: a causal model never looks to the right, and attention
without a mask is faster. Whether the model is causal is tried once, when it is loaded.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from logitless.errors import LogitlessError, first_line
from logitless.readings.table import Table
from logitless.rows import Rows
from logitless.tools.score.files import STATISTICS, Record, Reject
from logitless.tools.untrusted import check_weights

T = TypeVar("T")
TooLong = Literal["stop", "truncate", "skip"]


class Scored(NamedTuple):
    """One line per record, results or a rejection; how many have results, and for how many tokens."""

    lines: list[bytes]
    records: int
    tokens: int


def check_model(folder: Path) -> None:
    """Raise unless the folder looks like a model directory and transformers is installed."""
    if not (folder / "config.json").is_file():
        raise LogitlessError(f"score: {folder} is no model directory: there is no config.json in it.")
    check_weights("score", folder)
    if importlib.util.find_spec("transformers") is None:
        raise LogitlessError("score: transformers is not installed. Install it, or logitless with its extra [score].")


@dataclass(frozen=True, eq=False)
class Scorer:
    """A loaded model that scores batches: patched by :func:`logitless.adapters.transformers.patch`.

    The other fields are those of :class:`~logitless.tools.score.run.Job`.
    """

    model: Any
    temperature: float
    max_length: int | None = None
    too_long: TooLong = "stop"
    stats: tuple[str, ...] = ()

    @staticmethod
    def load(folder: Path, *, device: str, dtype: str, temperature: float, memory: int | str, **limits: Any) -> Scorer:
        """Load the model in evaluation mode, and make sure that it is causal."""
        from transformers import AutoModelForCausalLM, __version__
        from transformers.utils import logging

        from logitless.adapters.signatures import numbers
        from logitless.adapters.transformers import patch

        # The bar of transformers would be drawn over ours.
        logging.disable_progress_bar()
        named = {"dtype" if numbers(__version__) >= (4, 56) else "torch_dtype": dtype}
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, **named, local_files_only=True, use_safetensors=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            raise LogitlessError(f"score: the model in {folder} could not be loaded: {first_line(error)}") from error
        model = patch(model.to(device).eval(), bits="canonical", memory=memory)
        scorer = Scorer(model, temperature, **limits)
        scorer._check_causal()
        return scorer

    def score(self, records: Sequence[Record | Reject], tokens_per_batch: int, *, skip: bool = False) -> Scored:
        """Results of the records, in their order; ``skip`` rejects a record that cannot be scored, without raising."""
        skipped = LogitlessError if skip else TooManyTokens if self.too_long == "skip" else ()
        fitted = [r if isinstance(r, Reject) else _tried(skipped, r, self._fit) for r in records]
        kept = [record for record in fitted if isinstance(record, Record)]
        lines: dict[int, bytes | Reject] = {reject.index: reject for reject in fitted if isinstance(reject, Reject)}
        nothing = {name: [] for name in self._columns}
        empty = ((record, nothing) for record in kept if not record.response)
        ran = (zip(batch, self._run(batch), strict=True) for batch in batches(kept, tokens_per_batch))
        for record, numbers in itertools.chain(empty, itertools.chain.from_iterable(ran)):
            lines[record.index] = _tried(skipped, record, _line, numbers, self.too_long == "truncate")
        scored = [record for record in kept if isinstance(lines[record.index], bytes)]
        tokens = sum(len(record.tokens) for record in scored)
        ordered = (lines[record.index] for record in records)
        return Scored([x.line() if isinstance(x, Reject) else x for x in ordered], len(scored), tokens)

    @property
    def _columns(self) -> tuple[str, ...]:
        """Fields of a result that have a number for each token."""
        table = Table.of(self.stats, 0, None, negative=False, start=0)
        asked = {name for reading in (table.readings if table else ()) for name in reading.names}
        return ("logprob", "entropy", *(name for name in STATISTICS if name in asked))

    @torch.inference_mode()
    def _run(self, batch: Sequence[Record]) -> list[dict[str, list[Any]]]:
        """The numbers of each record's tokens, by name."""
        tokens = [[*record.prompt, *record.response] for record in batch]
        lengths = [len(record.response) for record in batch]
        width = max(map(len, tokens))
        # Padding repeats the sample's last token: an id that the model knows, and no special padding id.
        ids = torch.tensor([[*x, *x[-1:] * (width - len(x))] for x in tokens], device=self.model.device)
        masks = [torch.tensor(record.scored or [True] * len(record.response), dtype=torch.bool) for record in batch]
        rows = Rows.padded(tokens, lengths, masks, loss_mask_only=True, max_length=width, device=ids.device)
        out = self.model(input_ids=ids, rows=rows, entropy="value", temperature=self.temperature, stats=self.stats)
        split = {name: rows.split(getattr(out.stats or out, name).cpu()) for name in self._columns}
        return [{name: x[i][mask].tolist() for name, x in split.items()} for i, mask in enumerate(masks)]

    def _fit(self, record: Record) -> Record:
        """The record, cut to the length that is allowed; raises where it cannot be scored."""
        vocabulary = self.model.get_input_embeddings().num_embeddings
        largest = max([*record.prompt, *record.response], default=0)
        if largest >= vocabulary:
            raise LogitlessError(
                f"score: {record.place}: token id {largest} is outside of the model's vocabulary of {vocabulary}. Was "
                f"the file made with another tokenizer?"
            )
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        limits = [limit for limit in (positions, self.max_length) if limit is not None]
        if not limits or record.num_tokens <= min(limits):
            return record
        room = min(limits) - len(record.prompt)
        if self.too_long == "truncate" and room > 0:
            mask = None if record.scored is None else record.scored[:room]
            cut = replace(record, response=record.response[:room], scored=mask, truncated=len(record.response) - room)
            if cut.tokens:
                return cut
        whose = f"the model's {positions} positions (max_position_embeddings)"
        whose = whose if min(limits) == positions else f"--max-length {self.max_length}"
        rest = ", and nothing of the response is left" if self.too_long == "truncate" else ""
        raise TooManyTokens(
            f"score: {record.place}: {record.num_tokens} tokens are more than {whose}{rest}. Cut the prompt, or see "
            f"--too-long."
        )

    def _check_causal(self) -> None:
        """Raise if padding behind a sample changes its results."""
        vocabulary = self.model.get_input_embeddings().num_embeddings
        ids = torch.randint(vocabulary, (9,), generator=torch.Generator().manual_seed(0)).tolist()
        short, longer = (Record(i, "a trial", ids[:2], ids[2:stop]) for i, stop in enumerate((4, 9)))
        alone, beside = (self._run(batch)[0]["logprob"] for batch in ([short], [short, longer]))
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


class TooManyTokens(LogitlessError):
    """The error for a record that is longer than it may be."""


def _tried(skipped: Any, record: Record, act: Callable[..., T], *more: Any) -> T | Reject:
    """``act(record, *more)``; where that ends in an error of a class that is skipped, the rejection of the record."""
    try:
        return act(record, *more)
    except skipped as error:
        return Reject(record.index, record.place, str(error))


def _line(record: Record, numbers: dict[str, list[Any]], truncated: bool = False) -> bytes:
    if not all(map(math.isfinite, [*numbers["logprob"], *numbers["entropy"]])):
        raise LogitlessError(
            f"score: {record.place}: a log-prob or entropy is not finite. The model overflows here or its weights are "
            f"broken; float16 overflows easily, --dtype bfloat16 or float32 do not."
        )
    # Nine digits bring back the same float32.
    short = {name: [float(f"{x:.9g}") if type(x) is float else x for x in xs] for name, xs in numbers.items()}
    fields = {"index": record.index, **record.kept, "tokens": record.tokens, **short}
    fields |= {"truncated": record.truncated} if truncated else {}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
