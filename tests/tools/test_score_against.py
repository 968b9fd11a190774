"""``score --against``: numbers that are none, results that are none, and reports that are JSON in any case."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from logitless.errors import LogitlessError
from logitless.tools.cli import main
from logitless.tools.score.against import Compared, compare, report_text, write
from logitless.tools.score.files import check_field, read_fields
from logitless.tools.score.run import Summary

RESULT = {"index": 0, "tokens": [5, 6], "logprob": [-1.0, -2.0], "entropy": [1.0, 1.0]}


def files(folder: Path, engine: object, results: list[dict] | None = None) -> tuple[Path, Path]:
    data, out = folder / "in.jsonl", folder / "out.jsonl"
    data.write_text(json.dumps({"prompt": [1], "response": [5, 6], "engine": engine}) + "\n")
    out.write_text("".join(json.dumps(result) + "\n" for result in results or [RESULT]))
    return data, out


def strict(text: str) -> dict:
    """JSON, which has no NaN and nothing infinite."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def compared(folder: Path, engine: list) -> tuple[Compared, dict]:
    data, out = files(folder, engine)
    found = write(compare(data, out, "engine"), out)
    return found, strict(out.with_name("out.jsonl.mismatch.json").read_text())


@pytest.fixture
def run_score(monkeypatch, capsys):
    """What the command says on stderr where it fails."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr(
            sys, "argv", ["logitless", "score", *map(str, arguments[:2]), "--out", *map(str, arguments[2:])]
        )
        with pytest.raises(SystemExit):
            main()
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize("engine", [[math.nan, math.inf], [-math.inf, -math.inf]])
def test_no_token_is_finite(tmp_path: Path, engine: list):
    found, report = compared(tmp_path, engine)
    assert (report["tokens"], report["not_finite"], report["kl_k1"]) == (2, 2, None)
    assert report["outliers"][0]["rollout_logprob"] is None
    assert [path.name for path in found.files] == ["out.jsonl.mismatch.json"]
    summary = Summary("out.jsonl", 1, 1, 2, 1.0)
    assert "no figure: no token has two finite log-probs." in report_text(summary, found, False)
    assert strict(report_text(summary, found, True))["mismatch"] == report


@pytest.mark.parametrize("bad", ['{"prompt": [1], "resp', '{"text": 3}'])
def test_a_rejected_record_need_not_have_the_field(tmp_path: Path, bad: str):
    data, out = files(tmp_path, [-1.5, -1.0], [RESULT | {"index": 1}])
    data.write_text(f"{bad}\n{data.read_text()}{bad}\n")
    assert compare(data, out, "engine").report.tokens == 2


def test_a_field_that_no_record_has_is_named_before_anything_is_scored(tmp_path: Path):
    data, _ = files(tmp_path, [-1.5, -1.0])
    check_field(data, "engine")
    with pytest.raises(LogitlessError, match=r"in\.jsonl has no field 'x' in its first .* 'prompt', 'response',"):
        check_field(data, "x")
    data.write_text(f"{{\n{data.read_text()}")
    check_field(data, "engine")
    # Records that cannot be read at all are for those who score them.
    data.write_text("{\n")
    check_field(data, "x")


def test_a_column_that_is_not_there_is_named_beside_those_that_are(tmp_path: Path):
    """They were said to be none, because only the columns asked for are read."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    data = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": [[1]], "response": [[2]]}), data)
    for read in (lambda: check_field(data, "x"), lambda: list(read_fields(data, ("prompt", "x")))):
        with pytest.raises(LogitlessError, match=r"in\.parquet has no field 'x'; it has 'prompt', 'response'\.$"):
            read()


def test_the_command_names_the_field_first(tmp_path: Path, run_score):
    data, out = files(tmp_path, [-1.5, -1.0])
    assert "has no field 'x'" in run_score(tmp_path / "no-model", data, out.with_name("other.jsonl"), "--against", "x")


def test_one_token_is_finite(tmp_path: Path):
    pytest.importorskip("matplotlib")
    found, report = compared(tmp_path, [-1.5, math.nan])
    assert (report["not_finite"], report["outliers"][0]["position"]) == (1, 1)
    assert len(found.files) == 3


def test_the_figure_is_of_the_trainer_against_the_engine(tmp_path: Path, monkeypatch):
    """In this order: the middle panel is over the engine's probability."""
    figure, drawn = pytest.importorskip("logitless.tools.score.figure", exc_type=ImportError), []
    monkeypatch.setattr(figure, "draw_mismatch", lambda *given: drawn.append(given[:3]))
    compared(tmp_path, [-1.5, -4.0])
    assert [[x.tolist() for x in numbers] for numbers in drawn] == [[[-1.0, -2.0], [-1.5, -4.0], [0, 1]]] * 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device on which nothing has room")
def test_a_disk_that_is_full_for_the_report(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    out.with_name("out.jsonl.mismatch.json").symlink_to("/dev/full")
    with pytest.raises(LogitlessError, match=r"mismatch\.json: No space left on device"):
        compared(tmp_path, [-1.5, -4.0])


def test_nothing_to_compare(tmp_path: Path):
    data, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    data.touch()
    out.touch()
    found = write(compare(data, out, "engine"), out)
    report = strict(report_text(Summary(str(out), 0, 0, 0, 1.0), found, True))["mismatch"]
    assert report["tokens"] == 0
    assert set(report["quantiles"].values()) == {None}


@pytest.mark.parametrize("large", [10**400, -(10**400)], ids=["above", "below"])
def test_an_integer_that_no_float_holds(tmp_path: Path, large: int):
    data, out = files(tmp_path, [-1.0, large])
    with pytest.raises(LogitlessError, match=r"in\.jsonl, line 1: 'engine' must be a list of log-probs but has an int"):
        compare(data, out, "engine")


def test_an_integer_that_a_float_holds(tmp_path: Path):
    data, out = files(tmp_path, [-1, -(10**30)])
    assert compare(data, out, "engine").rollout_logprob.tolist() == [-1.0, -1e30]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"logprob": [-1.0, "x"]}, r"'logprob' must be a list of log-probs but is \[-1.0, 'x'\]"),
        ({"logprob": [-1.0, 10**400]}, r"'logprob' must be a list of log-probs but has an integer"),
        ({"logprob": 3}, r"'logprob' must be a list of log-probs but is 3"),
        ({"logprob": [-1.0]}, r"is no result: wanted an 'index', 'tokens' and as many 'logprob' but got"),
        ({"tokens": [5, "x"]}, "is no result"),
        ({"tokens": [5, 10**30]}, "is no result"),
        ({"tokens": None}, "is no result"),
        ({"index": [0]}, "is no result.*Was the file changed after it was written"),
    ],
)
def test_a_result_that_is_none_is_named(tmp_path: Path, change: dict, text: str):
    data, out = files(tmp_path, [-1.0, -2.0], [RESULT | change])
    with pytest.raises(LogitlessError, match=rf"out\.jsonl, line 1.*{text}"):
        compare(data, out, "engine")


@pytest.mark.parametrize(("seconds", "speed"), [(2.0, "300 tokens in 2.0 s, 150 tokens/s"), (0.0, "in 0.0 s, 3000000")])
def test_the_summary_tells_the_speed(seconds: float, speed: str):
    text = report_text(Summary("out.jsonl", 5, 3, 300, seconds), None, False)
    assert text.splitlines()[0] == "out.jsonl: 5 records (2 were there)"
    assert speed.replace("tokens in", "response tokens in") in text
