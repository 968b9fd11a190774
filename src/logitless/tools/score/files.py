"""Records in, results out: JSONL and Parquet, read and written as streams.

A record holds a prompt and a response, each a list of token ids or a text. A record is parsed only if its part is
wanted: records that are already scored are read and skipped.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from logitless.errors import LogitlessError

SUFFIXES = (".jsonl", ".parquet")

ROW_GROUP = 4096
"""Records of a row group of the Parquet output, which are held in memory while it is written."""


@dataclass(frozen=True)
class Record:
    """One sample: its number in the file, its place there for people, and the token ids of prompt and response."""

    index: int
    place: str
    prompt: list[int]
    response: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.response)


Encode = Callable[[str, bool], list[int]]
"""``encode(text, opens)``: token ids of a text; ``opens`` says that the text opens the sequence."""

NAMED = " Name the fields with --prompt-key and --response-key."

Row = tuple[str, Callable[[], dict[str, Any]]]
"""Place of a record in the file, and a function that parses it."""


@dataclass(frozen=True)
class Source:
    """A file of records, and the names of the two fields that are read."""

    path: Path
    prompt_key: str = "prompt"
    response_key: str = "response"

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise LogitlessError(f"score: there is no file {self.path}. Give a .jsonl or .parquet file of records.")
        check_format("the input", self.path)

    def count(self) -> int:
        """Number of records; a JSONL file is read through to count them."""
        if self.path.suffix == ".parquet":
            return _parquet().ParquetFile(self.path).metadata.num_rows
        return sum(1 for _ in _lines(self.path))

    def parts(self, size: int, wanted: Callable[[int], bool], encode: Encode) -> Iterator[tuple[int, list[Record]]]:
        """Number and records of every wanted part: ``size`` consecutive records, fewer in the last part."""
        rows = _rows(self.path, (self.prompt_key, self.response_key), NAMED)
        for part in itertools.count():
            chunk = list(itertools.islice(rows, size))
            if not chunk:
                return
            if wanted(part):
                yield part, [self._record(part * size + i, *row, encode) for i, row in enumerate(chunk)]

    def _record(self, index: int, place: str, parse: Callable[[], dict[str, Any]], encode: Encode) -> Record:
        fields, place = parse(), f"{self.path.name}, {place}"
        prompt = _token_ids(fields, self.prompt_key, place, lambda text: encode(text, True))
        response = _token_ids(fields, self.response_key, place, lambda text: encode(text, False))
        if not prompt and response:
            raise LogitlessError(
                f"score: {place}: {self.prompt_key!r} has no tokens, so nothing predicts the first token of the "
                f"response. Give at least one, for example the id that opens a sequence."
            )
        return Record(index, place, prompt, response)


def read_fields(path: Path, keys: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and fields of every record, each of which must have these."""
    for place, parse in _rows(path, keys, ""):
        fields, place = parse(), f"{path.name}, {place}"
        for key in keys:
            if key not in fields:
                raise LogitlessError(_missing(place, key, list(fields), ""))
        yield place, fields


def check_format(what: str, path: Path) -> None:
    """Raise unless the file's name ends in .jsonl, or in .parquet with pyarrow installed."""
    if path.suffix not in SUFFIXES:
        raise LogitlessError(f"score: {what} must end in {' or '.join(SUFFIXES)} but is {path.name}.")
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise LogitlessError(
            f"score: {what} is a Parquet file, which needs pyarrow. Install it with pip install 'logitless[score]', or "
            f"use .jsonl."
        )


def write_results(lines: Iterable[bytes], path: Path, suffix: str) -> None:
    """Write result lines as they are, or as the columns of a Parquet file."""
    if suffix == ".parquet":
        _write_parquet(lines, path)
        return
    with path.open("wb") as file:
        file.writelines(lines)


def count_results(path: Path) -> int:
    """Whole records in a file of results: a line without its end is none, nor is anything in Parquet without its."""
    if path.suffix == ".jsonl":
        with path.open("rb") as file:
            return sum(line.endswith(b"\n") for line in file)
    try:
        return _parquet().ParquetFile(path).metadata.num_rows
    except ValueError:
        return 0


def _write_parquet(lines: Iterable[bytes], path: Path) -> None:
    import pyarrow as pa

    numbers = {"logprob": pa.list_(pa.float32()), "entropy": pa.list_(pa.float32())}
    schema = pa.schema({"index": pa.int64(), "tokens": pa.list_(pa.int64()), **numbers})
    lines = iter(lines)
    with _parquet().ParquetWriter(path, schema) as writer:
        while group := [json.loads(line) for line in itertools.islice(lines, ROW_GROUP)]:
            writer.write_table(pa.Table.from_pylist(group, schema=schema))


def _lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.isspace():
                yield f"line {number}", partial(_parse_line, line, f"{path.name}, line {number}")


def _parse_line(line: bytes, place: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise LogitlessError(f"score: {place} is not JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise LogitlessError(f"score: {place}: wanted a JSON object but got {type(fields).__name__}.")
    return fields


def _rows(path: Path, keys: tuple[str, ...], hint: str) -> Iterator[Row]:
    return _parquet_rows(path, keys, hint) if path.suffix == ".parquet" else _lines(path)


def _parquet_rows(path: Path, keys: tuple[str, ...], hint: str) -> Iterator[Row]:
    file = _parquet().ParquetFile(path)
    for key in keys:
        if key not in file.schema_arrow.names:
            raise LogitlessError(_missing(path.name, key, file.schema_arrow.names, hint))
    first = 0
    for batch in file.iter_batches(batch_size=256, columns=list(dict.fromkeys(keys))):
        for i in range(batch.num_rows):
            yield f"row {first + i}", lambda batch=batch, i=i: batch.slice(i, 1).to_pylist()[0]
        first += batch.num_rows


def _parquet() -> Any:
    import pyarrow.parquet

    return pyarrow.parquet


def _token_ids(fields: dict[str, Any], key: str, place: str, encode: Callable[[str], list[int]]) -> list[int]:
    if key not in fields:
        raise LogitlessError(_missing(place, key, list(fields), NAMED))
    value = fields[key]
    if isinstance(value, str):
        return encode(value)
    if isinstance(value, list) and all(type(x) is int and x >= 0 for x in value):
        return value
    came = repr(value) if len(repr(value)) < 60 else f"{repr(value)[:57]}..."
    raise LogitlessError(
        f"score: {place}: {key!r} must be a list of token ids or a text but is {came}. Chat messages go through the "
        f"tokenizer's chat template first."
    )


def _missing(place: str, key: str, names: list[str], hint: str) -> str:
    return f"score: {place} has no field {key!r}; it has {', '.join(map(repr, names)) or 'none'}.{hint}"
