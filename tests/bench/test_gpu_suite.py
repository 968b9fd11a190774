"""``benchmarks/gpu_suite.py`` where there is no GPU: what it counts, when it stops, and what the page says of it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs")]

import gpu_suite  # noqa: E402
import make_reliability  # noqa: E402

HERE = {"device": "NVIDIA H200", "commit": "0" * 40, "versions": {"torch": "2.11.0", "triton": "3.6.0"}}


@pytest.mark.parametrize("file", gpu_suite.FILES)
def test_the_files_are_there(file: str):
    path = ROOT / file
    texts = [path.read_text(encoding="utf-8")] if path.is_file() else [x.read_text() for x in path.glob("test_*.py")]
    takes = any("device" in text for text in texts) or path.name.startswith("test_cuda")
    assert takes, "no test of it takes the device"


def counted(seconds: float = 60.0) -> gpu_suite.Counted:
    counted = gpu_suite.Counted(seconds)
    counted.pytest_collection_finish(SimpleNamespace(items=[None] * 9))
    outcomes = {"a": ("call", "passed"), "b": ("call", "failed"), "c": ("setup", "skipped"), "d": ("setup", "failed")}
    for name, (when, outcome) in outcomes.items():
        said = {"when": when, "outcome": outcome, "failed": outcome == "failed", "nodeid": f"tests/x.py::{name}"}
        counted.pytest_runtest_logreport(
            SimpleNamespace(when="setup", outcome="passed", failed=False, nodeid="tests/x")
        )
        counted.pytest_runtest_logreport(SimpleNamespace(**said))
    return counted


def test_what_is_counted():
    found = counted().record(time.monotonic())
    assert found["files"] == {"tests/x.py": {"passed": 1, "skipped": 1, "failed": 2}}
    assert [found[name] for name in ("passed", "skipped", "failed", "not_run")] == [1, 1, 2, 5]
    assert found["failures"] == ["tests/x.py::b", "tests/x.py::d"]


@pytest.mark.parametrize(("seconds", "stops"), [(60.0, False), (-1.0, True)])
def test_it_stops_when_the_time_is_over(seconds: float, stops: bool):
    item = SimpleNamespace(session=SimpleNamespace(shouldstop=False))
    counted(seconds).pytest_runtest_protocol(item)
    assert bool(item.session.shouldstop) == stops


def test_the_page_has_the_newest_run_of_each_pair():
    old, new = ({**counted().record(0.0), **HERE, "date": f"2026-11-{day}"} for day in (16, 17))
    other = {**new, "versions": {"torch": "2.11.0", "triton": "3.7.1"}, "failures": [], "not_run": 0}
    said = make_reliability.gpu_section([old, new, other])
    assert "2026-11-16" not in said
    assert "and these failed: tests/x.py::b, tests/x.py::d; 5 were not reached" in said
    assert "none failed. NVIDIA H200, torch 2.11.0, triton 3.7.1, 2026-11-17" in said


def test_shares_are_one_record():
    one, other = (counted().record(0.0) | HERE for _ in range(2))
    other["files"] = {"tests/y.py": {"passed": 3, "skipped": 0, "failed": 0}, **other["files"]}
    found = gpu_suite.joined([one, other | {"passed": 4, "seconds": one["seconds"] + 7}])
    assert found["files"]["tests/x.py"] == {"passed": 2, "skipped": 2, "failed": 4}
    assert found["files"]["tests/y.py"]["passed"] == 3
    assert (found["passed"], found["skipped"], found["failed"], found["not_run"]) == (5, 2, 4, 10)
    assert len(found["failures"]) == 4
    assert found["seconds"] == one["seconds"] + 7


def test_every_test_is_in_one_share():
    whole = list(range(11))
    found = []
    for i in range(3):
        items = list(whole)
        gpu_suite.Counted(1.0, (i, 3)).pytest_collection_modifyitems(items)
        found += items
    assert sorted(found) == whole
