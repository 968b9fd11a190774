"""Result lines on their way to the output: as they are, or as the columns of a Parquet file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from logitless.errors import LogitlessError
from logitless.tools.score.files import REJECTED, RESULTS, ROW_GROUP, STATISTICS


def write_results(lines: Callable[[], Iterable[bytes]], path: Path, suffix: str) -> None:
    """Write result lines as they are, or as the columns of a Parquet file. Rejected records are left out.

    Args:
        lines: gives all lines, each time that it is called.
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


def count_results(path: Path) -> int:
    """Whole records in a file of results: a line without its end is none, nor is anything in Parquet without its."""
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

    own = {"index": pa.int64(), "tokens": pa.list_(pa.int64())}
    own |= {"logprob": pa.list_(pa.float32()), "entropy": pa.list_(pa.float32()), "truncated": pa.int64()}
    kinds = {int: pa.int64(), float: pa.float32(), bool: pa.bool_()}
    own |= {name: pa.list_(kinds[kind]) for name, kind in STATISTICS.items()}
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
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise LogitlessError(
                f"score: the fields to keep have no one type, as a Parquet column must: {reason}. Write .jsonl."
            ) from None
    return schema


def _groups(lines: Iterable[bytes]) -> Iterator[list[dict[str, Any]]]:
    lines = iter(lines)
    while group := [json.loads(line) for line in itertools.islice(lines, ROW_GROUP)]:
        yield group
