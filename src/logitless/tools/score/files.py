"""Records in, results out: JSONL and Parquet, read and written as streams.

A record holds a prompt and a response, each a list of token ids or a text, or chat messages. It is parsed only if its
part is wanted: records that are already scored are read and skipped.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from logitless.errors import LogitlessError, first_line
from logitless.tools.score.texts import NoTokenizer, Texts, are_messages

SUFFIXES = (".jsonl", ".parquet")
STATISTICS = {"top1_id": int, "top1_logprob": float, "top1_hit": bool, "collision": float, "mean_logit": float}
STATISTICS |= {"logit_variance": float, "max_logit": float, "rank": int}
"""Fields that ``--stats`` adds to a result, a number for each token, and what kind of number."""

LISTS = {"tokens": int, "logprob": float, "entropy": float, **STATISTICS}
"""Fields of a result with a number for each token, and what kind of number."""

RESULTS = ("index", *LISTS, "truncated")
"""Fields of a result, which no field of the input may be kept as."""

MOST_LEVELS = 40
"""Lists or objects in each other in a field that goes to Parquet. PyArrow reads a hundred levels, two for a list."""

ROW_GROUP = 4096
"""Records of a row group of the Parquet output, which are held in memory while it is written."""


@dataclass(frozen=True)
class Record:
    """One sample: its number, its place in the file as people count, and the token ids of prompt and response.

    Attributes:
        scored: which tokens of the response are scored; None for all.
        kept: fields that go into its result.
        truncated: tokens that were cut off the response.
    """

    index: int
    place: str
    prompt: list[int]
    response: list[int]
    scored: list[bool] | None = None
    kept: dict[str, Any] = field(default_factory=dict)
    truncated: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.response)

    @property
    def tokens(self) -> list[int]:
        """The response tokens that are scored."""
        return self.response if self.scored is None else list(itertools.compress(self.response, self.scored))


@dataclass(frozen=True)
class Reject:
    """A record that cannot be scored: its number, its place in the file, and why."""

    index: int
    place: str
    reason: str

    def line(self) -> bytes:
        """The line that stands among the results of a part."""
        # The last words of the place are "line 7" or "row 6".
        unit, number = self.place.split()[-2:]
        fields = {"index": self.index, unit: int(number), "reason": self.reason}
        return REJECTED + json.dumps(fields).encode() + b"\n"


REJECTED = b"rejected "
"""How the line of a record that was rejected begins; results begin with a brace."""


class Row(NamedTuple):
    """A record: its file and place there, a function that parses it, and its bytes where it has any of its own."""

    place: str
    parse: Callable[[], dict[str, Any]]
    raw: bytes = b""


@dataclass(frozen=True)
class Source:
    """A file of records, the names of the fields that are read, and of those that go into the results (``keep``).

    ``columns`` says that the results will be Parquet, which does not hold every value that JSON does.
    """

    path: Path
    prompt_key: str = "prompt"
    response_key: str = "response"
    messages_key: str = "messages"
    keep: Sequence[str] = ()
    columns: bool = False

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise LogitlessError(f"score: there is no file {self.path}. Give a .jsonl or .parquet file of records.")
        check_format("the input", self.path)

    def survey(self, size: int) -> tuple[int, tuple[str, ...]]:
        """The number of records and, of a JSONL file, which is read through, a digest of each part's records."""
        if self.path.suffix == ".parquet":
            return _open_parquet(self.path).metadata.num_rows, ()
        found = [(len(chunk), _digest(chunk)) for chunk in _chunks(_lines(self.path), size)]
        return sum(count for count, _ in found), tuple(digest for _, digest in found)

    def parts(
        self, size: int, wanted: Callable[[int], bool], texts: Texts, *, skip: bool = False
    ) -> Iterator[tuple[int, str, list[Record | Reject]]]:
        """Number, digest and records of every wanted part: ``size`` consecutive records, fewer in the last part.

        With ``skip``, a record that cannot be read is a :class:`Reject`, and nothing is raised.
        """
        rows = _parquet_rows(self) if self.path.suffix == ".parquet" else _lines(self.path)
        for part, chunk in enumerate(_chunks(rows, size)):
            if wanted(part):
                read = [self._read(part * size + i, row, texts, skip) for i, row in enumerate(chunk)]
                yield part, _digest(chunk), read

    def _read(self, index: int, row: Row, texts: Texts, skip: bool) -> Record | Reject:
        try:
            return self._record(index, row.place, row.parse(), texts)
        except LogitlessError as error:
            if not skip or isinstance(error, NoTokenizer):
                raise
            return Reject(index, row.place, str(error))

    def _record(self, index: int, place: str, fields: dict[str, Any], texts: Texts) -> Record:
        kept = {key: _kept_value(fields, key, place, self.columns) for key in self.keep}
        chat = fields.get(self.messages_key)
        if chat is not None and fields.get(self.prompt_key) is None:
            made = _named(f"{place}: {self.messages_key!r}", lambda: texts.conversation(chat))
            return Record(index, place, *made, kept=kept)
        prompt = self._ids(fields, self.prompt_key, place, texts, opens=True)
        response = self._ids(fields, self.response_key, place, texts, opens=False)
        if not prompt and response:
            raise LogitlessError(
                f"score: {place}: {self.prompt_key!r} has no tokens, so nothing predicts the first token of the "
                f"response. Give at least one, for example the id that opens a sequence."
            )
        return Record(index, place, prompt, response, kept=kept)

    def _ids(self, fields: dict[str, Any], key: str, place: str, texts: Texts, *, opens: bool) -> list[int]:
        """Token ids of a field: as they are, of a text or, where the field opens the sequence, of messages."""
        if fields.get(key) is None and (key not in fields or self.messages_key in fields):
            raise _without(place, key, fields, hint=NAME_THEM)
        value = fields[key]
        if isinstance(value, str):
            return _named(f"{place}: {key!r}", lambda: texts.encode(value, opens))
        if isinstance(value, list) and all(type(x) is int and x >= 0 for x in value):
            return value
        if opens and are_messages(value):
            return _named(f"{place}: {key!r}", lambda: texts.opening(value))
        came = repr(value) if len(repr(value)) < 60 else f"{repr(value)[:57]}..."
        raise LogitlessError(
            f"score: {place}: {key!r} must be a list of token ids or a text but is {came}. A whole conversation goes "
            f"into {self.messages_key!r}."
        )


def read_fields(
    path: Path, keys: tuple[str, ...], wanted: Container[int] | None = None
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Number, place and fields of every record, or of those whose numbers are wanted; each must have the keys."""
    for index, row in enumerate(_rows_of(path, keys)):
        if wanted is not None and index not in wanted:
            continue
        fields = row.parse()
        for key in keys:
            if key not in fields:
                raise _without(row.place, key, fields)
        yield index, row.place, fields


def check_field(path: Path, key: str, most: int = 64) -> None:
    """Raise where none of the first records has a field; those that cannot be read are for others to name."""
    first = None
    for row in itertools.islice(_rows_of(path, (key,)), most):
        try:
            fields = row.parse()
        except LogitlessError:
            continue
        if key in fields:
            return
        first = fields if first is None else first
    if first is not None:
        names = f"; the first has {', '.join(map(repr, first))}" if first else ""
        raise LogitlessError(f"score: {path.name} has no field {key!r} in its first records{names}.")


NAME_THEM = " Name the fields with --prompt-key and --response-key, or --messages-key."


def _without(place: str, key: str, names: Iterable[str], what_for: str = "", hint: str = "") -> LogitlessError:
    """The error for a field that a record, or a file of columns, does not have."""
    there = ", ".join(map(repr, names)) or "none"
    return LogitlessError(f"score: {place} has no field {key!r}{what_for}; it has {there}.{hint}")


def _rows_of(path: Path, keys: tuple[str, ...]) -> Iterator[Row]:
    """The records of a file; a Parquet file must have these columns, and is read no further than them."""
    if path.suffix != ".parquet":
        return _lines(path)
    file = _open_parquet(path)
    for key in keys:
        if key not in file.schema_arrow.names:
            raise _without(path.name, key, file.schema_arrow.names)
    return _parquet_columns(path, file, keys)


def check_format(what: str, path: Path) -> None:
    """Raise unless the file's name ends in .jsonl, or in .parquet with pyarrow installed."""
    if path.suffix not in SUFFIXES:
        raise LogitlessError(f"score: {what} must end in {' or '.join(SUFFIXES)} but is {path.name}.")
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise LogitlessError(
            f"score: {what} is a Parquet file, which needs pyarrow. Install it, or logitless with its extra [score], "
            f"or use .jsonl."
        )


def _chunks(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    rows = iter(rows)
    while chunk := list(itertools.islice(rows, size)):
        yield chunk


def _digest(rows: Iterable[Row]) -> str:
    """Sixteen letters that change with the bytes of the records, but for blanks around them."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.raw.strip() + b"\n")
    return digest.hexdigest()[:16]


def _lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.isspace():
                place = f"{path.name}, line {number}"
                yield Row(place, partial(_parse_line, line, place), line)


def _parse_line(line: bytes, place: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        torn = "" if line.endswith(b"\n") else " It is the last line, and has no end: was the file cut off?"
        # The decoder would count lines from this one on.
        why = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
        raise LogitlessError(f"score: {place} is not JSON: {why}.{torn}") from None
    if not isinstance(fields, dict):
        raise LogitlessError(f"score: {place}: wanted a JSON object but got {type(fields).__name__}.")
    return fields


def _named(place: str, act: Callable[[], Any]) -> Any:
    """The result of ``act()``; its errors get the place in front."""
    try:
        return act()
    except NoTokenizer:
        raise
    except LogitlessError as error:
        raise LogitlessError(f"score: {place}: {str(error).removeprefix('score: ').removesuffix('.')}.") from None


def _kept_value(fields: dict[str, Any], key: str, place: str, column: bool = False) -> Any:
    if key not in fields:
        raise _without(place, key, fields, " to keep", " See --keep.")
    try:
        json.dumps(fields[key])
    except (TypeError, ValueError, RecursionError) as error:
        raise LogitlessError(f"score: {place}: {key!r} cannot be kept: {error}. Leave it out of --keep.") from None
    if column and (reason := _no_cell(fields[key])) is not None:
        raise LogitlessError(
            f"score: {place}: {key!r} {reason}, which Parquet does not hold. Write .jsonl, or leave it out of --keep."
        )
    return fields[key]


def _no_cell(value: Any, level: int = 0) -> str | None:
    """Why a value cannot stand in a column of Parquet whatever its type; None where it can."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        which = f"the integer {value}" if abs(value) < 10**30 else "an integer of more than 30 digits"
        return f"has {which}, beyond 64 bits"
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if inner and level == MOST_LEVELS:
        return f"has lists or objects in more than {MOST_LEVELS} levels"
    return next((reason for x in inner if (reason := _no_cell(x, level + 1)) is not None), None)


def _parquet_rows(source: Source) -> Iterator[Row]:
    file = _open_parquet(source.path)
    names, place, pair = file.schema_arrow.names, source.path.name, (source.prompt_key, source.response_key)
    for key in () if source.messages_key in names else pair:
        if key not in names:
            raise _without(place, key, names, hint=NAME_THEM)
    for key in source.keep:
        _kept_value(dict.fromkeys(names), key, place)
    yield from _parquet_columns(source.path, file, (*pair, source.messages_key, *source.keep))


def _parquet_columns(path: Path, file: Any, keys: Iterable[str]) -> Iterator[Row]:
    """Rows with the fields of these names that are there."""
    there = [key for key in dict.fromkeys(keys) if key in file.schema_arrow.names]
    first, batches = 0, file.iter_batches(batch_size=256, columns=there)
    while (batch := _whole(path, lambda: next(batches, None))) is not None:
        for i in range(batch.num_rows):
            yield Row(f"{path.name}, row {first + i}", lambda batch=batch, i=i: batch.slice(i, 1).to_pylist()[0])
        first += batch.num_rows


def _open_parquet(path: Path) -> Any:
    import pyarrow.parquet

    return _whole(path, lambda: pyarrow.parquet.ParquetFile(path))


def _whole(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (ValueError, OSError) as error:
        reason = first_line(error).rstrip(".")
        raise LogitlessError(f"score: {path} is no whole Parquet file: {reason}. Was it cut off?") from None


# Results: lines as they are, or the columns of a Parquet file.


def write_results(lines: Callable[[], Iterable[bytes]], path: Path, suffix: str) -> None:
    """Write result lines as they are, or as the columns of a Parquet file. Rejected records are left out.

    ``lines()`` gives all lines, each time that it is called.
    """

    def results() -> Iterator[bytes]:
        return (line for line in lines() if not line.startswith(REJECTED))

    if suffix == ".parquet":
        _write_parquet(results, path)
        return
    with path.open("wb") as file:
        file.writelines(results())


def write_rejects(lines: Iterable[bytes], path: Path) -> None:
    """Write the lines of rejected records alone, as JSON."""
    with path.open("wb") as file:
        file.writelines(line.removeprefix(REJECTED) for line in lines if line.startswith(REJECTED))


def are_rejects(path: Path) -> bool:
    """Whether every line of a file is one of :func:`write_rejects`, and there is one."""
    forms = [["index", unit, "reason"] for unit in ("line", "row")]
    with path.open("rb") as file:
        for line in file:
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError):
                return False
            if not isinstance(fields, dict) or list(fields) not in forms:
                return False
        return file.tell() > 0


def count_results(path: Path) -> int:
    """Whole records in a file of results: a line that was cut off is none, and a Parquet file that was has none."""
    if path.suffix == ".jsonl":
        with path.open("rb") as file:
            return sum(line.endswith(b"\n") for line in file)
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path).metadata.num_rows
    except ValueError:
        return 0


def _write_parquet(lines: Callable[[], Iterable[bytes]], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    kinds = {int: pa.int64(), float: pa.float32(), bool: pa.bool_()}
    own = {"index": pa.int64(), "truncated": pa.int64()} | {name: pa.list_(kinds[x]) for name, x in LISTS.items()}
    kept = _kept_schema(lines())
    order = next((list(json.loads(line)) for line in lines()), ["index", "tokens", "logprob", "entropy"])
    schema = pa.schema([pa.field(name, own[name]) if name in own else kept.field(name) for name in order])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for group in _groups(lines()):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))


def _kept_schema(lines: Iterable[bytes]) -> Any:
    """Types of the fields that were kept, wide enough for all records."""
    import pyarrow as pa

    schema = pa.schema([])
    for group in _groups(lines):
        kept = [{name: value for name, value in fields.items() if name not in RESULTS} for fields in group]
        if not kept[0]:
            break
        try:
            found = pa.Table.from_pylist(kept).schema
            schema = pa.unify_schemas([schema, found], promote_options="permissive")
        except UnicodeEncodeError as error:
            raise LogitlessError(
                f"score: a field to keep has half of a surrogate pair, which Parquet does not hold: {error}. Write "
                f".jsonl."
            ) from None
        except (pa.ArrowException, OverflowError) as error:
            reason = first_line(error).rstrip(".")
            raise LogitlessError(
                f"score: the fields to keep have no one type, as a Parquet column must: {reason}. Write .jsonl."
            ) from None
    for column in schema:
        if _is_hollow(column.type):
            raise LogitlessError(
                f"score: {column.name!r} has an object that is empty in every record, which Parquet does not hold. "
                f"Write .jsonl, or leave it out of --keep."
            )
    return schema


def _is_hollow(kind: Any) -> bool:
    """Whether a type has an object without fields in it: one record with a field is enough for all."""
    import pyarrow as pa

    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return (pa.types.is_struct(kind) and not inner) or any(map(_is_hollow, inner))


def _groups(lines: Iterable[bytes]) -> Iterator[list[dict[str, Any]]]:
    lines = iter(lines)
    while group := [json.loads(line) for line in itertools.islice(lines, ROW_GROUP)]:
        yield group
