"""The job: find the parts that are missing, score them on their ranks, and write the output when none is missing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from logitless.collectives import table_over
from logitless.errors import LogitlessError
from logitless.spec import parse_memory
from logitless.tools.score.files import Source, check_format
from logitless.tools.score.journal import Journal, facts
from logitless.tools.score.model import DTYPES, Scorer, Texts, check_model

T = TypeVar("T")

CHANGED = (
    "score: the input or the model was changed while it was read, so that the results belong to neither. Run again "
    "with --overwrite."
)


@dataclass(frozen=True)
class Job:
    """The options of ``logitless score``.

    Args:
        model: Hugging Face model directory.
        data: .jsonl or .parquet file of records.
        out: .jsonl or .parquet file of results.
        temperature: temperature at which the responses were sampled.
        dtype: ``"auto"`` for the checkpoint's dtype, or a name.
        device: device of this rank, for example ``"cuda:1"``.
        tokens_per_batch: most tokens of a micro-batch, padding included; a longer record is a batch by itself.
        records_per_part: most records that a kill loses, per rank.
        prompt_key, response_key: names of the fields.
        special_tokens: whether the tokenizer may open a prompt that is text with its special tokens.
        memory: working memory of the head.
        overwrite: start anew, and replace the output.
    """

    model: Path
    data: Path
    out: Path
    temperature: float = 1.0
    dtype: str = "auto"
    device: str = "cpu"
    tokens_per_batch: int = 16384
    records_per_part: int = 64
    prompt_key: str = "prompt"
    response_key: str = "response"
    special_tokens: bool = True
    memory: int | str = "256MiB"
    overwrite: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.temperature, int | float) and 0 < self.temperature < math.inf):
            raise LogitlessError(f"score: temperature must be a positive finite number but is {self.temperature!r}.")
        if self.dtype not in DTYPES:
            raise LogitlessError(f"score: dtype must be one of {list(DTYPES)} but is {self.dtype!r}.")
        for name in ("tokens_per_batch", "records_per_part"):
            if getattr(self, name) < 1:
                raise LogitlessError(f"score: {name} must be 1 or more but is {getattr(self, name)}.")
        if self.out == self.data:
            raise LogitlessError("score: the output would replace the input. Give another --out.")
        check_format("the output", self.out)
        parse_memory(self.memory)

    def settings(self) -> dict[str, Any]:
        """The options and files that decide about the results. The number of ranks does not."""
        chosen = ("temperature", "dtype", "tokens_per_batch", "records_per_part", "prompt_key", "response_key")
        return {
            **{name: getattr(self, name) for name in chosen},
            "special_tokens": self.special_tokens,
            "memory": parse_memory(self.memory),
            "device": self.device.partition(":")[0],
            "model": facts(self.model),
            "input": facts(self.data),
        }


class Progress(NamedTuple):
    """Progress of this rank: parts done and in all, records and response tokens scored."""

    done: int
    total: int
    records: int
    tokens: int


@dataclass(frozen=True)
class Summary:
    """Counts of a run, all ranks together.

    Attributes:
        out: the finished file.
        records: records in the file.
        scored_records, scored_tokens: records and response tokens that this run scored; the rest is from earlier runs.
        seconds: duration of the run.
    """

    out: str
    records: int
    scored_records: int
    scored_tokens: int
    seconds: float


def score_file(job: Job, report: Callable[[Progress], None] = lambda _: None, group: Any = None) -> Summary:
    """Score all records that have no results yet, and write the output when every one has.

    Args:
        job: what to do.
        report: called after the model is loaded and after every part.
        group: process group whose ranks share the work, on one file system; None for this process alone.

    Raises:
        LogitlessError: on every rank, if one of them cannot go on. Finished parts are kept.
    """
    start = time.monotonic()
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    journal = _together(group, lambda: _open(job, first=rank == 0))
    finished = journal.finished
    mine = frozenset(part for part in range(rank, journal.num_parts, size) if not finished and not journal.has(part))
    counts = _together(group, lambda: _score_parts(job, journal, mine, report))
    table = [counts] if group is None else table_over(group, counts)
    if not finished:
        _together(group, lambda: _finish(job, journal) if rank == 0 else None)
    records, tokens = (sum(column) for column in zip(*table, strict=True))
    return Summary(str(job.out), journal.num_records, records, tokens, time.monotonic() - start)


def _open(job: Job, *, first: bool) -> Journal:
    check_model(job.model)
    source = Source(job.data, job.prompt_key, job.response_key)
    journal = Journal(job.out, job.settings(), source.count(), job.records_per_part)
    if first:
        journal.open(overwrite=job.overwrite)
    return journal


def _score_parts(
    job: Job, journal: Journal, mine: frozenset[int], report: Callable[[Progress], None]
) -> tuple[int, int]:
    """Score and commit this rank's parts; returns their numbers of records and response tokens."""
    if not mine:
        return 0, 0
    scorer = Scorer.load(job.model, device=job.device, dtype=job.dtype, temperature=job.temperature, memory=job.memory)
    texts = Texts(job.model, job.special_tokens)
    source = Source(job.data, job.prompt_key, job.response_key)
    num_records = num_tokens = done = 0
    report(Progress(0, len(mine), 0, 0))
    for part, records in source.parts(job.records_per_part, mine.__contains__, texts.encode):
        if len(records) != journal.size_of(part):
            raise LogitlessError(CHANGED)
        journal.commit(part, scorer.score(records, job.tokens_per_batch))
        done, num_records = done + 1, num_records + len(records)
        num_tokens += sum(len(record.response) for record in records)
        report(Progress(done, len(mine), num_records, num_tokens))
    return num_records, num_tokens


def _finish(job: Job, journal: Journal) -> None:
    if facts(job.data) != journal.settings["input"] or facts(job.model) != journal.settings["model"]:
        raise LogitlessError(CHANGED)
    journal.finish()


def _together(group: Any, act: Callable[[], T]) -> T:
    """``act()`` on every rank; if any rank raises, all raise the error of the first that did. Waits for all."""
    if group is None:
        return act()
    result, failure = None, None
    try:
        result = act()
    except LogitlessError as error:
        failure = error
    texts = [text for (text,) in table_over(group, (None if failure is None else str(failure),))]
    first = next((text for text in texts if text is not None), None)
    if first is not None:
        raise LogitlessError(first) from failure
    return result  # pyright: ignore[reportReturnType]
