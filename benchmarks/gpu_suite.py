"""The tests of kernels on a GPU, the most important files first, within a few minutes: ``make gpu``.

    python benchmarks/gpu_suite.py                                  three minutes; appends a record
    python benchmarks/gpu_suite.py --seconds 60 --json runs.jsonl   shorter, and elsewhere
    python benchmarks/gpu_suite.py tests/readings                   other files, all of them

Only tests that take the device run (``pytest --device cuda --only-device``): the others are the CPU suite's. The record
says how many passed, were skipped and failed in each file, what was not reached, with which versions and commit. The
exit code is 1 if a test failed, or if none ran.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.bench.records import Environment  # noqa: E402

RECORDS = ROOT / "benchmarks" / "results" / "gpu-suite.jsonl"
FILES = (
    *("tests/test_cuda.py", "tests/test_cuda_trust.py"),
    *("tests/backends/test_products.py", "tests/backends/test_epilogues.py", "tests/backends/test_float32_head.py"),
    "tests/backends/test_canonical.py",
    *("tests/score/test_logprobs.py", "tests/score/test_linear.py", "tests/score/test_special_values.py"),
    *("tests/score/test_overwrite.py", "tests/loss"),
    *("tests/readings/test_divergence.py", "tests/readings/test_statistics.py", "tests/readings/test_support.py"),
    *("tests/readings/test_part_of_a_vocabulary.py", "tests/readings/test_top_k_teacher.py"),
    *("tests/readings/test_divergence_edges.py", "tests/readings/test_divergence_kept.py"),
    *("tests/route/test_linear_plans.py", "tests/score/test_linear_options.py", "tests/readings/test_entropy_gate.py"),
    *("tests/tools/test_tune.py", "tests/score/test_invariance.py", "tests/operands", "tests/test_provider.py"),
)
"""In the order in which a broken kernel would be seen."""


class Counted:
    """The pytest plugin that counts by file, and stops when the time is over."""

    def __init__(self, seconds: float) -> None:
        self.ends, self.collected = time.monotonic() + seconds, 0
        self.files: dict[str, dict[str, int]] = defaultdict(lambda: {"passed": 0, "skipped": 0, "failed": 0})
        self.failed: list[str] = []

    def pytest_collection_finish(self, session: Any) -> None:
        self.collected = len(session.items)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.files[report.nodeid.partition("::")[0]][report.outcome] += 1
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_protocol(self, item: Any) -> None:
        if time.monotonic() > self.ends:
            item.session.shouldstop = "the time is over"

    def record(self, began: float) -> dict[str, Any]:
        totals = {name: sum(counts[name] for counts in self.files.values()) for name in ("passed", "skipped", "failed")}
        return {
            "kind": "suite",
            **totals,
            "not_run": self.collected - sum(totals.values()),
            "failures": self.failed,
            "files": dict(self.files),
            "seconds": round(time.monotonic() - began, 1),
        }


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The tests of kernels on a GPU, within a few minutes.")
    parser.add_argument("files", nargs="*", help="default: the most important ones")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=180.0, help="no test is begun after so long; default 180")
    parser.add_argument("--json", type=Path, default=RECORDS, help="file to append the record to")
    asked = parser.parse_args(words)
    import pytest

    began, counted = time.monotonic(), Counted(asked.seconds)
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "--device", asked.device, "--only-device"]
    paths = f"pythonpath={ROOT / 'src'} {ROOT} {ROOT / 'tests'}"
    pytest.main([*options, "-o", paths, "--rootdir", str(ROOT), *(asked.files or FILES)], plugins=[counted])
    here = Environment.here(torch.device(asked.device))
    where = {"device": here.device, "commit": here.commit, "versions": here.versions, "date": here.date}
    found = counted.record(began) | where
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    with asked.json.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")
    told = ", ".join(f"{found[name]} {name.replace('_', ' ')}" for name in ("passed", "skipped", "failed", "not_run"))
    sys.stdout.write(f"{told}, {found['seconds']} s\n")
    return int(bool(found["failed"]) or not found["passed"])


if __name__ == "__main__":
    sys.exit(main())
