"""``benchmarks/sanitize.py`` where there is no GPU: it launches every kernel, and reads what the tools say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs")]

import make_reliability  # noqa: E402
import sanitize  # noqa: E402

NAMES = sanitize.all_kernels(sanitize.kernel_source())
LAUNCHED = f"{sanitize.SAID}{json.dumps(dict.fromkeys(NAMES, 3))}\n"
OUT_OF_BOUNDS = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at gradient_kernel+0x3d0 in kernels.py:240
=========     by thread (3,0,0) in block (1,0,0)
=========     Address 0x7f00 is out of bounds
=========
========= ERROR SUMMARY: 1 error
"""
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at statistics_kernel+0x1b0 in kernels.py:88
=========     and Read access at statistics_kernel+0x2f0 in kernels.py:90 [64 hazards]
=========
========= Warning: Race reported between Write access at void at::native::reduce_kernel<float>(float *)+0x10
=========     and Read access at void at::native::reduce_kernel<float>(float *)+0x20 [8 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
UNNAMED = """========= COMPUTE-SANITIZER
========= Error: something else
=========
========= ERROR SUMMARY: 2 errors
"""
CLEAN = {
    "memcheck": "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
}


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.usefixtures("one_thread")
def test_the_program_launches_every_kernel(monkeypatch, device: torch.device):
    """A new kernel that no call of the program launches fails here, and on the GPU."""
    # The interpreter is slow, and what is launched does not depend on the width.
    monkeypatch.setattr(sanitize, "COLUMNS", 67)
    small = {name: entry for name, entry in sanitize.CALLS.items() if "tile" not in name and "padding" not in name}
    monkeypatch.setattr(sanitize, "CALLS", small)
    launched = sanitize.launched_by(device.type, (torch.bfloat16,))
    # Those in Gluon are for cards alone.
    assert sorted(launched) == [name for name in NAMES if device.type == "cuda" or not name.startswith("turns_")]
    assert min(launched.values()) > 0


def test_kernels_are_those_that_no_other_kernel_calls():
    source = sanitize.kernel_source() + "\n\n@triton.jit\ndef new_kernel(x):\n    tl.store(x, tanh(0.0))\n"
    assert sanitize.all_kernels(source) == sorted([*NAMES, "new_kernel"])
    assert [name for name in NAMES if not name.endswith("_kernel")] == []


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (LAUNCHED + CLEAN["memcheck"], []),
        (LAUNCHED + CLEAN["racecheck"], []),
        (LAUNCHED + OUT_OF_BOUNDS, ["1 in gradient_kernel"]),
        (LAUNCHED + RACE, ["1 in statistics_kernel"]),
        (LAUNCHED + UNNAMED, ["2 in no kernel that is named"]),
        (LAUNCHED, ["it did not come to its summary"]),
        (CLEAN["memcheck"], [f"never launched: {', '.join(NAMES)}"]),
    ],
)
def test_what_a_tool_says(said: str, told: list[str]):
    found = sanitize.verdict("memcheck", said, NAMES) | {"rc": 0, "seconds": 1.0}
    assert sanitize.failures(found, NAMES) == told
    assert sum(found["others"].values()) == (said == LAUNCHED + RACE)
    assert sanitize.failures(found | {"rc": 3}, NAMES) == [*told, "exit code 3"]


def test_options_are_those_that_the_tool_describes():
    assert sanitize.command("racecheck", "cs", "")[:3] == ["cs", "--tool", "racecheck"]
    assert "--kernel-name" not in sanitize.command("racecheck", "cs", "")
    both = sanitize.command("memcheck", "cs", "--kernel-name ... --report-api-errors")
    assert both[3:7] == ["--kernel-name", "kns=_kernel", "--report-api-errors", "no"]


# The page.

TOOL = {"tool": "memcheck", "summary": 0, "others": {}, "launched": {"a_kernel": 3, "b_kernel": 4}, "seconds": 41.2}
RECORD = {"kind": "sanitizer", "kernels": ["a_kernel", "b_kernel"], "tools": [TOOL | {"failures": []}]}
HERE = {"device": "NVIDIA H200", "commit": "0123456789ab", "date": "2026-11-20", "versions": {"torch": "2.11.0"}}
TESTS = {"kind": "tests", "passed": 14, "skipped": 0, "failed": [], **HERE}


def test_the_page_shows_the_records():
    """Run ``python docs/make_reliability.py`` after a new record."""
    page = make_reliability.PAGE.read_text(encoding="utf-8")
    records = make_reliability.gpu_records()
    assert page == make_reliability.with_gpu(page, records)
    assert ("## On the GPU" in page) == bool(records)


def test_the_section_says_what_a_record_says():
    page = make_reliability.PAGE.read_text(encoding="utf-8")
    assert "## On the GPU" not in make_reliability.with_gpu(page, [])
    said = make_reliability.gpu_section([RECORD | HERE, TESTS])
    assert "| memcheck | 2 of 2 | 7 | 0 | 0 | 41 s |" in said
    assert "All 14 tests of `tests/test_cuda_trust.py` passed" in said
    bad = RECORD | HERE | {"tools": [TOOL | {"failures": ["2 in a_kernel"], "launched": {"a_kernel": 3}}]}
    said = make_reliability.gpu_section([RECORD | HERE, bad, {**TESTS, "failed": ["tests.test_cuda_trust::test_x"]}])
    assert "| memcheck | 1 of 2 | 3 | 2 in a_kernel | 0 | 41 s |" in said
    assert "14 tests passed, and these failed: tests.test_cuda_trust::test_x." in said
    assert "same bits" not in said


def test_a_report_of_pytest_is_recorded(tmp_path):
    report, out = tmp_path / "report.xml", tmp_path / "out.jsonl"
    report.write_text("<testsuites><testsuite><testcase classname='a' name='b'/></testsuite></testsuites>")
    assert sanitize.main(["--tests", str(report), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert (found["kind"], found["passed"], found["failed"]) == ("tests", 1, [])
    report.write_text("<testsuites><testsuite/></testsuites>")
    assert sanitize.main(["--tests", str(report), "--json", str(out)]) == 1
