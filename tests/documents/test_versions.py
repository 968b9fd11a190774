"""What pyproject.toml claims was tried: the table of versions is that of the records, and the floors have run clean."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from logitless import LogitlessError
from logitless.collectives import table_over

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import versions  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECORDS = versions.read_records()
FLOORS = {
    "python": PROJECT["requires-python"],
    "torch": next(x for x in PROJECT["dependencies"] if x.startswith("torch")),
    "triton": PROJECT["optional-dependencies"]["triton"][0],
}
REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_b"/>
<testcase classname="tests.test_a" name="test_c"><failure/></testcase>
<testcase classname="tests.test_a" name="test_d"><skipped/></testcase>
</testsuite></testsuites>"""


def test_the_page_has_the_newest_record_of_each_set_of_versions():
    page = versions.PAGE.read_text()
    assert versions.with_table(page, RECORDS) == page
    older = {**RECORDS[0], "passed": 1}
    assert "| 1 |" in versions.with_table(page, [older])


@pytest.mark.parametrize("name", FLOORS)
def test_the_oldest_version_that_is_claimed_has_run_clean(name: str):
    floor = versions.number(re.fullmatch(r"(?:torch|triton)?>=([\d.]+)", FLOORS[name])[1])
    clean = [r for r in RECORDS if not r["failed"]]
    assert any(versions.number(r[name])[: len(floor)] == floor for r in clean), f"no clean run with {FLOORS[name]}"
    assert all(versions.number(r[name]) >= floor for r in RECORDS)


def test_what_make_installs_has_run_clean():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    wanted = [versions.number(pins[name]) for name in ("torch", "triton")]
    assert any(
        [versions.number(r[name]) for name in ("torch", "triton")] == wanted and not r["failed"] for r in RECORDS
    )


def test_a_report_is_counted(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    found = versions.record(tmp_path / "report.xml")
    assert (found["passed"], found["skipped"], found["failed"]) == (1, 1, ["tests.test_a::test_c"])


def test_without_numpy_ranks_say_what_they_need(monkeypatch):
    monkeypatch.setattr("logitless.collectives.find_spec", lambda name: None)
    with pytest.raises(LogitlessError, match=r"all_gather_object, which needs numpy. Install numpy\."):
        table_over(None, (1,))  # pyright: ignore[reportArgumentType]
