"""The record of ``make hosts`` and the table that is made from it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import hosts
import matrix
import pytest

from logitless import LogitlessError
from logitless.adapters import HOSTS
from logitless.adapters.signatures import covers

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import make_hosts  # noqa: E402

RECORDS = make_hosts.read()


def test_the_table_is_what_the_records_say():
    """Run ``python docs/make_hosts.py`` after new records."""
    text = make_hosts.PAGE.read_text(encoding="utf-8")
    assert make_hosts.page(text, RECORDS) == text
    changed = [RECORDS[0] | {"passed": 4711}, *RECORDS[1:]]
    assert "4711" in make_hosts.page(text, changed) != text


@pytest.mark.parametrize(
    ("path", "made", "shown"),
    [
        (make_hosts.README, make_hosts.readme, "4711 ms instead of"),
        (make_hosts.MAINTAINERS, make_hosts.maintainers, "4,711 ms"),
    ],
    ids=["README", "maintainers"],
)
def test_first_pages_say_what_was_measured(path, made, shown):
    """Run ``python docs/make_hosts.py`` after new records of the benchmark."""
    text, records = path.read_text(encoding="utf-8"), make_hosts.measured()
    assert made(text, records) == text
    assert len(records) >= 5
    slower = [replace(x, after_ms=4711.0, deferred_ms=4711.0) if x.host == make_hosts.SHOWN[0] else x for x in records]
    assert shown in made(text, slower) != text


def test_an_installation_is_recorded(tmp_path):
    lines, here = tmp_path / "lines", Path(__file__).parent
    lines.touch()
    paths = [here, here.parent, here / "doubles", ROOT / "src", ROOT]
    given = {**os.environ, matrix.FILE: str(lines), "PYTHONPATH": os.pathsep.join(map(str, paths))}
    subprocess.run(
        [sys.executable, "-c", "import hosts, logitless; logitless.install('prime_rl')"], env=given, check=True
    )
    assert [json.loads(line)["host"] for line in lines.read_text().splitlines()] == ["prime_rl"]


@pytest.mark.parametrize("record", RECORDS, ids=lambda x: f"{x['host']} {x['on']}")
def test_nothing_recorded_has_failed(record):
    assert record["failed"] == 0
    assert record["passed"] > 0
    assert record["calls"] > 0 or record["host"] in matrix.CALLERS
    # Hosts that round half-precision logits are followed, so their own error is the yardstick.
    assert record["value"] <= 2 * record["host_value"] + 5e-7
    if record["host"] in HOSTS:
        host = importlib.import_module(f"logitless.adapters.{record['host']}").HOST
        assert record["version"] == "unknown" or covers(host.versions, record["version"])


@pytest.mark.parametrize("host", HOSTS)
def test_deferred_by_default_rests_on_steps(host):
    """The newest of a host has run its own training steps, on logits that were not computed."""
    if importlib.import_module(f"logitless.adapters.{host}").HOST.logits == "deferred":
        records = [record for record in RECORDS if record["host"] == host]
        assert any(record.get("steps") for record in records if record["on"] == records[-1]["on"])


def test_a_record_takes_the_place_of_the_older_one(tmp_path):
    file = tmp_path / "hosts.jsonl"
    for host, on, passed in (("verl", "main", 1), ("slime", "0.3.0", 2), ("verl", "main", 3)):
        matrix.keep({"host": host, "on": on, "passed": passed}, file)
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(x["host"], x["on"], x["passed"]) for x in kept] == [("slime", "0.3.0", 2), ("verl", "main", 3)]
    for on in ("0.10.0", "0.9.1"):
        matrix.keep({"host": "verl", "on": on}, file)
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert [x["on"] for x in kept] == ["0.3.0", "0.9.1", "0.10.0", "main"]


def test_checkouts_are_found_newest_last(tmp_path, monkeypatch):
    for name in ("verl-0.10.0", "verl-main", "verl-0.9.1", "slime-0.3.0", "verl-empty"):
        (tmp_path / name).mkdir()
        if name != "verl-empty":
            (tmp_path / name / name.split("-")[0]).mkdir()
    monkeypatch.setenv(hosts.CHECKOUTS, str(tmp_path))
    assert [x.name for x in hosts.checkouts("verl")] == ["verl-0.9.1", "verl-0.10.0", "verl-main"]
    assert hosts.checkout("verl").name == "verl-main"
    assert hosts.checkout("skyrl") is None
    monkeypatch.setenv(hosts.CHECKOUTS, str(tmp_path / "slime-0.3.0"))
    assert hosts.checkout("slime").name == "slime-0.3.0"
    assert hosts.checkout("verl") is None
    monkeypatch.setenv(hosts.CHECKOUTS, str(tmp_path / "gone"))
    with pytest.raises(LogitlessError, match="is not a folder"):
        hosts.checkout("verl")


def test_only_hosts_are_recorded():
    assert {record["host"] for record in RECORDS} <= {*HOSTS, *matrix.CALLERS}
