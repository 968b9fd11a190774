"""The tables of faults in ``docs/reliability.md`` are what the record says, and it is of the faults of today."""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import inject_faults  # noqa: E402
from failing import STEPS  # noqa: E402
from faults import PATHS, abouts  # noqa: E402

RECORD = json.loads(inject_faults.RECORD.read_text())
PAGE = inject_faults.PAGE.read_text(encoding="utf-8")


def test_the_page_is_what_the_record_says():
    """Run ``make faults`` if the faults, or what they do, changed on purpose."""
    assert inject_faults.with_tables(PAGE, inject_faults.tables(RECORD)) == PAGE


def test_another_record_changes_the_page():
    other = deepcopy(RECORD)
    other["allocations"]["linear, buffer"]["points"] += 1000
    other["ranks"]["count_over"]["raised"] += 1000
    other["disagreements"]["logprobs"]["dtype"] = "never heard of"
    ours, theirs = (inject_faults.tables(x).splitlines() for x in (RECORD, other))
    assert len([1 for a, b in zip(ours, theirs, strict=True) if a != b]) == 5


def test_the_record_is_of_the_faults_of_today():
    assert list(RECORD["allocations"]) == list(STEPS)
    assert list(RECORD["ranks"]) == list(PATHS)
    assert {path: list(said) for path, said in RECORD["disagreements"].items()} == {
        path: abouts(path) for path in inject_faults.CALLS
    }


@pytest.mark.parametrize("path", PATHS)
def test_every_kill_has_an_end(path: str):
    """Three moments of every collective, by two ranks of two and three of three; one peer each, or two."""
    counts = RECORD["ranks"][path]
    assert counts["points"] == counts["collectives"] * 3 * (2 + 3)
    assert counts["raised"] + counts["right"] == counts["collectives"] * 3 * (2 * 1 + 3 * 2)
