"""The job: find the parts that are missing, score them on their ranks, and write the output when none is missing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from logitless.collectives import table_over
from logitless.errors import LogitlessError, did_you_mean
from logitless.errors.arguments import LARGEST, check_flags, device_named, instance, refused, sequence
from logitless.readings.table import STATS
from logitless.spec import parse_memory
from logitless.tools.score.files import RESULTS, Source, check_format
from logitless.tools.score.journal import Journal, check_apart, facts
from logitless.tools.score.model import Scorer, TooLong, check_model
from logitless.tools.score.texts import Texts, Turns

T = TypeVar("T")

CHANGED = (
    "score: the input or the model was changed while it was read, so that the results belong to neither. Run again "
    "with --overwrite."
)

CHOICES = {
    "dtype": ("auto", "bfloat16", "float16", "float32"),
    "turns": get_args(Turns),
    "too_long": get_args(TooLong),
    "on_error": ("stop", "skip"),
}


@dataclass(frozen=True)
class Job:
    """The options of ``logitless score``; its ``--help`` describes each.

    Args:
        device: device of this rank, for example ``"cuda:1"``.
        tokens_per_batch: most tokens of a micro-batch, padding included; a longer record is a batch by itself.
        records_per_part: most records that a kill loses, per rank.
        special_tokens: whether the tokenizer may open a prompt that is text with its special tokens.
        too_long: a longer record is an error (``"stop"``), loses the end of its response (``"truncate"``), or is
            rejected (``"skip"``).
        on_error: a record that cannot be scored ends the job (``"stop"``), or is rejected (``"skip"``).
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
    messages_key: str = "messages"
    turns: Turns = "all"
    keep: tuple[str, ...] = ()
    max_length: int | None = None
    too_long: TooLong = "stop"
    on_error: Literal["stop", "skip"] = "stop"
    stats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_kinds()
        if type(self.temperature) not in (int, float) or not 0 < self.temperature <= LARGEST:
            raise LogitlessError(f"score: temperature must be a positive finite number but is {self.temperature!r}.")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise LogitlessError(f"score: {name} must be one of {list(known)} but is {getattr(self, name)!r}.")
        for name in self.stats:
            if name not in STATS:
                hint = did_you_mean(name, STATS)
                raise LogitlessError(f"score: stats are out of {', '.join(STATS)}, but {name!r} is none.{hint}")
        for name in self.keep:
            if name in RESULTS:
                raise LogitlessError(f"score: the results have a field {name!r} of their own, so it cannot be kept.")
        check_format("the output", self.out)
        check_apart(self.data, self.model, self.out)
        parse_memory(self.memory)

    def _check_kinds(self) -> None:
        """Raise for an option of another kind than the command line makes of it."""
        for name in ("model", "data", "out"):
            instance(getattr(self, name), Path, f"score: {name}", f" Pass Path({name}).")
        for name in ("prompt_key", "response_key", "messages_key"):
            instance(getattr(self, name), str, f"score: {name}")
        for name in ("keep", "stats"):
            given = sequence(getattr(self, name), f"score: {name}", "a tuple of names")
            if not all(isinstance(x, str) for x in given):
                raise refused(f"score: {name}", "a tuple of names", given)
        for name in ("tokens_per_batch", "records_per_part", "max_length"):
            number = getattr(self, name)
            if name == "max_length" and number is None:
                continue
            if type(number) is not int or not 1 <= number <= LARGEST:
                wanted = "1 or more" if type(number) is int and number < 1 else f"an integer of 1 to {LARGEST}"
                raise refused(f"score: {name}", wanted, number)
        device_named(self.device, "score: device")
        check_flags("score", overwrite=self.overwrite, special_tokens=self.special_tokens)

    def source(self) -> Source:
        keys = (self.prompt_key, self.response_key, self.messages_key)
        return Source(self.data, *keys, self.keep, columns=self.out.suffix == ".parquet")

    def settings(self) -> dict[str, Any]:
        """The options and files that decide about the results. The number of ranks does not."""
        chosen = ("temperature", "dtype", "tokens_per_batch", "records_per_part", "prompt_key", "response_key")
        chosen += ("messages_key", "turns", "keep", "max_length", "too_long", "special_tokens")
        # Jobs of earlier versions, whose settings have no stats, go on where none are asked for.
        chosen += ("stats",) if self.stats else ()
        return {
            **{name: getattr(self, name) for name in chosen},
            "memory": parse_memory(self.memory),
            "device": device_named(self.device, "score: device").type,
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
        out, records: the finished file, and its records.
        scored_records, scored_tokens: records and response tokens that this run scored; the rest is from earlier runs.
        rejected, rejects: records without results, of all runs, and the file that says why, or None.
    """

    out: str
    records: int
    scored_records: int
    scored_tokens: int
    seconds: float
    rejected: int = 0
    rejects: str | None = None


def score_file(job: Job, report: Callable[[Progress], None] = lambda _: None, group: Any = None) -> Summary:
    """Score all records that have no results yet, and write the output when every one has.

    Args:
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
    rejected = journal.num_rejects
    told = (rejected, str(journal.rejects) if rejected else None)
    return Summary(str(job.out), journal.num_records, records, tokens, time.monotonic() - start, *told)


def _open(job: Job, *, first: bool) -> Journal:
    check_model(job.model)
    num_records, digests = job.source().survey(job.records_per_part)
    journal = Journal(job.out, job.settings(), num_records, job.records_per_part, digests)
    if first:
        journal.open(overwrite=job.overwrite)
    return journal


def _score_parts(
    job: Job, journal: Journal, mine: frozenset[int], report: Callable[[Progress], None]
) -> tuple[int, int]:
    """Score and commit this rank's parts; returns their numbers of records and response tokens."""
    if not mine:
        return 0, 0
    names = ("device", "dtype", "temperature", "memory", "max_length", "too_long", "stats")
    scorer = Scorer.load(job.model, **{name: getattr(job, name) for name in names})
    texts, skip = Texts(job.model, job.special_tokens, job.turns), job.on_error == "skip"
    num_records = num_tokens = done = 0
    report(Progress(0, len(mine), 0, 0))
    for part, digest, records in job.source().parts(job.records_per_part, mine.__contains__, texts, skip=skip):
        if len(records) != journal.size_of(part) or (journal.digests and journal.digests[part] != digest):
            raise LogitlessError(CHANGED)
        scored = scorer.score(records, job.tokens_per_batch, skip=skip)
        journal.commit(part, scored.lines)
        done, num_records, num_tokens = done + 1, num_records + scored.records, num_tokens + scored.tokens
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
