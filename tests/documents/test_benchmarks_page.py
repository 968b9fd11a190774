"""``docs/benchmarks.md`` is what the records say, and its tables say what a record says."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bench.records import newest, read_records

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import make_benchmarks  # noqa: E402
import make_figures  # noqa: E402
import make_whole_step  # noqa: E402

RECORDS = read_records(make_figures.RECORDS)
FOUND = {(r.case["name"], r.provider): r for r in newest(RECORDS)}


def test_the_page_is_what_the_records_say():
    """Run ``python docs/make_figures.py`` after new records."""
    page = make_benchmarks.page(RECORDS, make_whole_step.read(), make_benchmarks.read_trained())
    assert make_benchmarks.PAGE.read_text(encoding="utf-8") == page


def test_a_newer_record_changes_the_page():
    old = FOUND["linear-reference-grad", "logitless"]
    page = make_benchmarks.page([*RECORDS, replace(old, total_ms=77.7, ratio=0.5)])
    assert "| 77.7 |" in page
    assert "| 77.7 |" not in make_benchmarks.page(RECORDS)


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"total_ms": 7.214, "ratio": 1.027, "peak_bytes": 1 << 30, "computes": "grad"}, ["7.21", "1.03", "1.00 GiB"]),
        ({"total_ms": 712.4, "ratio": None, "peak_bytes": 5, "computes": None}, ["712\\*", "-", "5 B\\*"]),
        (
            {"total_ms": 71.24, "ratio": 2.0, "peak_bytes": 5, "computes": "mean"},
            ["71.2\\*\\*", "2.00\\*\\*", "5 B\\*\\*"],
        ),
        ({"status": "out of memory", "total_ms": None}, ["out of memory"] * 3),
        ({"status": "absent", "total_ms": None}, ["-"] * 3),
    ],
)
def test_a_cell_is_one_number_or_why_there_is_none(changes, texts):
    record = replace(FOUND["reference-fp32-grad", "torch"], **changes)
    assert [make_benchmarks.cell(record, show) for show in make_benchmarks.MEASURED.values()] == texts


def test_every_commit_device_and_version_on_the_page_is_in_its_runs():
    page = make_benchmarks.page(RECORDS)
    runs = page[page.index("## Runs") :]
    for record in FOUND.values():
        assert f"`{record.environment['commit']}`" in runs
        assert record.environment["device"] in runs
        assert f"torch {record.environment['versions']['torch']}" in runs
    assert sum(int(n) for n in re.findall(r"\| (\d+) \| `", runs)) == len(FOUND)


def test_the_figures_on_the_page_are_drawn_light_and_dark():
    names = set(re.findall(r"figures/([\w-]+)\.png", make_benchmarks.PAGE.read_text(encoding="utf-8")))
    assert {f"h200-{what}-{style}" for what in ("linear", "growth", "response") for style in ("light", "dark")} <= names
    assert all((make_figures.FIGURES / f"{name}.png").exists() for name in names)


def test_the_response_figure_has_three_shares_from_logits_and_from_hidden_states(monkeypatch):
    seen = []
    monkeypatch.setattr(make_figures, "draw_response", lambda groups, *rest: seen.append(groups))
    make_figures.response_figure(RECORDS, Path("x.png"), make_figures.LIGHT)
    for group in seen[0]:
        assert {r.case["response"] for r in group} == {1.0, 0.25, 0.03}
        assert {"torch", "logitless"} <= {r.provider for r in group}
        assert all(r.computes == "grad" for r in group)
