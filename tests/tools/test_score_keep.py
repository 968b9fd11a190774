"""``score --keep`` to Parquet: values that no column holds are named with their record, before anything is scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from shared.score import write

from logitless.errors import LogitlessError
from logitless.tools.score.files import MOST_LEVELS, Reject, Source, write_results
from logitless.tools.score.texts import Texts

pq = pytest.importorskip("pyarrow.parquet")


def nested(levels: int, objects: bool = False) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value} if objects else [value]
    return value


def read(folder: Path, values: list, *, columns: bool = True, skip: bool = False) -> list:
    records = [{"prompt": [1], "response": [2], "meta": value} for value in values]
    source = Source(write(folder / "in.jsonl", records), keep=("meta",), columns=columns)
    ((_, _, found),) = source.parts(8, lambda part: True, Texts(folder), skip=skip)
    return found


LARGE = [2**63, -(2**63) - 1, [1, 2**63], {"a": {"b": [2**63]}}, 10**40]
DEEP = [nested(MOST_LEVELS + 1), nested(MOST_LEVELS + 1, objects=True), nested(200)]


@pytest.mark.parametrize("value", [*LARGE, *DEEP], ids=lambda value: str(value)[:20])
def test_a_value_that_no_column_holds_is_named(tmp_path: Path, value: Any):
    with pytest.raises(LogitlessError) as caught:
        read(tmp_path, [3, value])
    text = str(caught.value)
    why = "in more than 40 levels" if value in DEEP else ", beyond 64 bits"
    assert text.startswith("score: in.jsonl, line 2: 'meta' has ")
    assert f"{why}, which Parquet does not hold. Write .jsonl, or leave it out of --keep." in text
    assert len(text) < 200
    good, bad = read(tmp_path, [3, value], skip=True)
    assert (good.kept, type(bad)) == ({"meta": 3}, Reject)
    # JSON holds it.
    assert read(tmp_path, [3, value], columns=False)[1].kept == {"meta": value}


def written(folder: Path, values: list) -> list:
    lines = [{"index": i, "meta": x, "tokens": [2], "logprob": [-1.0], "entropy": [1.0]} for i, x in enumerate(values)]
    out = folder / "out.parquet"
    write_results(lambda: [json.dumps(line).encode() + b"\n" for line in lines], out, ".parquet")
    return [row["meta"] for row in pq.read_table(out).to_pylist()]


@pytest.mark.parametrize(
    "value",
    [2**63 - 1, -(2**63), nested(MOST_LEVELS), nested(MOST_LEVELS, objects=True), [], [[]], {"a": None}, None],
    ids=lambda value: str(value)[:20],
)
def test_a_value_that_a_column_holds_is_kept(tmp_path: Path, value: Any):
    (record,) = read(tmp_path, [value])
    assert written(tmp_path, [record.kept["meta"]]) == [value]


@pytest.mark.parametrize("value", [{}, {"a": {}}, [{}], {"a": [{"b": {}}]}], ids=str)
def test_an_object_that_is_always_empty_is_named(tmp_path: Path, value: Any):
    with pytest.raises(LogitlessError, match=r"score: 'meta' has an object that is empty in every record.*\.jsonl, or"):
        written(tmp_path, [value, None])


def test_an_object_that_is_empty_in_some_records_is_kept(tmp_path: Path):
    assert written(tmp_path, [{}, {"a": 1}]) == [{"a": None}, {"a": 1}]


def test_integers_beyond_64_bits_among_results(tmp_path: Path):
    """Parts of an earlier version may hold them."""
    with pytest.raises(LogitlessError, match=r"have no one type, as a Parquet column must: .*Write \.jsonl"):
        written(tmp_path, [2**63])
