"""The catalogue of seeded bugs fits the source and the tests, and the page about it says what its record says."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import replace

import pytest
from catalogue import ROOT, SOURCE, Stale, load
from run import Verdict, _outcome, record, summary

sys.path.insert(0, str(ROOT / "docs"))

import make_reliability

MUTANTS = load()


def test_every_entry_applies_and_names_tests():
    """Whoever moves the code moves the entry: a bug that cannot be seeded proves nothing."""
    for mutant in MUTANTS:
        mutant.check()


def test_every_part_of_the_package_has_seeded_bugs():
    assert len(MUTANTS) >= 100
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []
    parts = {mutant.file.split("/")[0] for mutant in MUTANTS}
    folders = {path.parent.name for path in (SOURCE / "logitless").glob("*/__init__.py")}
    assert parts >= {*folders, "softmax.py", "spec.py", "collectives.py", "score.py", "loss.py", "policy_head.py"}
    kernels = (SOURCE / "logitless/backends/triton/kernels.py").read_text()
    narrowed = [m for m in MUTANTS if m.name.startswith("32-bit-offsets")]
    assert len(narrowed) >= len(re.findall(r"^def \w+_kernel\(", kernels, re.MULTILINE))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"old": "no such line"}, r"occurs 0 times in logitless/rows/rows.py, not 1"),
        ({"count": 2}, r"occurs 1 times in logitless/rows/rows.py, not 2"),
        ({"file": "rows/column.py"}, r"there is no file logitless/rows/column.py"),
        ({"new": "scored if self.mask is None else"}, r"is not Python"),
        ({"tests": ()}, r"names no tests"),
        (
            {"tests": ("tests/rows/test_rows.py::test_nothing",)},
            r"there is no test tests/rows/test_rows.py::test_nothing",
        ),
    ],
)
def test_a_stale_entry_is_an_error(change: dict, text: str):
    mutant = next(m for m in MUTANTS if m.name == "counted-by-mask-alone")
    mutant.check()
    with pytest.raises(Stale, match=text):
        replace(mutant, **change).check()


def test_what_the_end_of_pytest_means():
    assert _outcome(0, "") == (True, "")
    assert _outcome(1, "..F\nFAILED tests/rows/test_rows.py::test_x - assert 1 == 2\n") == (
        False,
        "tests/rows/test_rows.py::test_x",
    )
    assert _outcome(-11, "") == (False, "killed by SIGSEGV")
    # No such test, nothing collected, or the tests ran on another copy.
    for code in (4, 5, 70):
        with pytest.raises(Stale, match=f"pytest ended with {code}: the reason"):
            _outcome(code, "the reason\n")


def test_survivors_are_named():
    verdicts = [Verdict("a", "rows/rows.py", "caught", "test", 1.0), Verdict("b", "loss.py", "survived", "pain", 2.0)]
    lines = summary(verdicts).splitlines()
    assert lines[-1] == "survived: b (loss.py): pain"
    assert lines[-2].split() == ["all", "2", "1", "1", "0"]
    facts, *rest = (json.loads(line) for line in record(verdicts).splitlines())
    assert (facts["seeded"], facts["caught"], facts["survived"], facts["stale"]) == (2, 1, 1, 0)
    assert [entry["name"] for entry in rest] == ["a", "b"]


def test_the_page_says_what_the_record_says():
    """Run ``make mutants`` after a change of the catalogue, and then ``python docs/make_reliability.py``."""
    facts, *verdicts = make_reliability.seeded_record()
    assert {(x["name"], x["file"]) for x in verdicts} == {(mutant.name, mutant.file) for mutant in MUTANTS}
    counts = Counter(verdict["verdict"] for verdict in verdicts)
    assert (counts["caught"], counts["survived"], counts["stale"]) == (len(MUTANTS), 0, 0)
    assert facts | {"seeded": len(MUTANTS), "caught": len(MUTANTS), "survived": 0, "stale": 0} == facts
    page = make_reliability.PAGE.read_text(encoding="utf-8")
    assert page == make_reliability.with_seeded(page, [facts, *verdicts])
