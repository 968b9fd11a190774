"""The tests of kernels on a GPU, the most important files first, within a few minutes: ``make gpu``.

    python benchmarks/gpu_suite.py                                  three minutes; appends a record
    python benchmarks/gpu_suite.py --seconds 60 --json runs.jsonl   shorter, and elsewhere
    python benchmarks/gpu_suite.py --jobs 8                         as many processes: most of the time kernels compile
    python benchmarks/gpu_suite.py tests/readings                   other files, all of them

Only tests that take the device run (``pytest --device cuda --only-device``): the others are the CPU suite's. The record
says how many passed, were skipped and failed in each file, what was not reached, with which versions and commit. The
exit code is 1 if a test failed, or if none ran.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
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

    def __init__(self, seconds: float, share: tuple[int, int] = (0, 1)) -> None:
        self.ends, self.collected, self.share = time.monotonic() + seconds, 0, share
        self.files: dict[str, dict[str, int]] = defaultdict(lambda: {"passed": 0, "skipped": 0, "failed": 0})
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Every so many tests, of the order in which all of them are collected."""
        first, step = self.share
        items[:] = items[first::step]

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


def joined(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of several processes, each of which had a share of the tests."""
    files: dict[str, dict[str, int]] = defaultdict(lambda: {"passed": 0, "skipped": 0, "failed": 0})
    for record in records:
        for name, counts in record["files"].items():
            for outcome, count in counts.items():
                files[name][outcome] += count
    numbers = {name: sum(x[name] for x in records) for name in ("passed", "skipped", "failed", "not_run")}
    failures = [name for record in records for name in record["failures"]]
    seconds = max(x["seconds"] for x in records)
    return records[0] | numbers | {"failures": failures, "files": dict(sorted(files.items())), "seconds": seconds}


def run(asked: argparse.Namespace, share: tuple[int, int]) -> dict[str, Any]:
    """The record of the tests of this process."""
    import pytest

    began, counted = time.monotonic(), Counted(asked.seconds, share)
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "--device", asked.device, "--only-device"]
    paths = f"pythonpath={ROOT / 'src'} {ROOT} {ROOT / 'tests'}"
    pytest.main([*options, "-o", paths, "--rootdir", str(ROOT), *(asked.files or FILES)], plugins=[counted])
    here = Environment.here(torch.device(asked.device))
    where = {"device": here.device, "commit": here.commit, "versions": here.versions, "date": here.date}
    return counted.record(began) | where


def run_shares(words: list[str], jobs: int) -> dict[str, Any]:
    """The same in so many processes, each with a share of the tests."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.jsonl" for i in range(jobs)]
        command = [sys.executable, __file__, *words]
        own = [[*command, "--jobs", "1", "--share", str(i), str(jobs), "--json", str(x)] for i, x in enumerate(files)]
        for process in [subprocess.Popen(x) for x in own]:
            process.wait()
        return joined([json.loads(x.read_text(encoding="utf-8")) for x in files])


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The tests of kernels on a GPU, within a few minutes.")
    parser.add_argument("files", nargs="*", help="default: the most important ones")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=180.0, help="no test is begun after so long; default 180")
    parser.add_argument("--json", type=Path, default=RECORDS, help="file to append the record to")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time; default 1")
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help="of this process: the tests I, I + N, ...")
    words = sys.argv[1:] if words is None else words
    asked = parser.parse_args(words)
    found = run_shares(words, asked.jobs) if asked.jobs > 1 else run(asked, tuple(asked.share))
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    with asked.json.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")
    told = ", ".join(f"{found[name]} {name.replace('_', ' ')}" for name in ("passed", "skipped", "failed", "not_run"))
    sys.stdout.write(f"{told}, {found['seconds']} s\n")
    return int(bool(found["failed"]) or not found["passed"])


if __name__ == "__main__":
    sys.exit(main())
