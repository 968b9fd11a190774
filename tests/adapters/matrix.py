"""The matrix of hosts: every adapter's parity tests on the installed host or its double, and on each checkout found.

    make hosts                       on what is installed
    make hosts LOGITLESS_HOSTS=F     also on the checkouts in the folder F: slime-0.3.0, nemo_rl-main, verl-0.8.0, ...
    make hosts312                    the same in an environment of Python 3.12, which some hosts ask for

Each run is a process of its own, because a process can import one version of a host. The record of each run goes to
benchmarks/results/hosts.jsonl, in place of the record of the same host, version and Python; ``docs/make_hosts.py``
makes the table of docs/adapters/index.md from them. A checkout is named by its folder; a file ``COMMIT`` in it, or git,
tells its commit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORDS = ROOT / "benchmarks" / "results" / "hosts.jsonl"
sys.path[:0] = [str(HERE), str(HERE.parent)]

from hosts import CHECKOUTS, checkout, checkouts, commit, named  # noqa: E402
from record import FILE  # noqa: E402

import logitless  # noqa: E402
from logitless.adapters import HOSTS  # noqa: E402

ON_CHECKOUTS = {
    "trl": "every_release or half_precision or strided or (fused_head and not trainers) or real_run or dpo_steps",
}
"""Tests that checkouts run, where others need the packages that this release was written for."""

MORE = {
    "megatron": ("megatron_deferred", "megatron_stages", "megatron_rl_step"),
    "nemo_rl": ("nemo_rl_draft",),
    "skyrl": ("skyrl_fsdp", "skyrl_support", "skyrl_worker"),
    "slime": ("slime_options",),
    "torchtitan": ("torchtitan_trainer",),
    "trl": ("trl_distillation", "trl_dpo_steps", "trl_losses", "trl_one_pass"),
    "verl": ("verl_rows",),
}
"""Further files of tests of a host, besides those of its training steps: ``test_HOST_step*.py``."""

CALLERS = {"vime": (HERE.parent / "test_provider.py", "vime_itself")}
"""Frameworks without an adapter, that call ours (``provider.py``), by the file and the name of their test."""

STEPS = r"_steps?$|_trainer$|test_megatron_(deferred|stages)$"
"""Files of whole training steps, and of whole models where a host has no trainer."""

BESIDE = {"nemo_rl": "megatron", "skyrl": "megatron"}
"""Hosts whose main branch wants a Megatron-Core that is not released: the newest checkout of it comes along."""

WHOLE = ("transformers", "trl")
"""Hosts whose folder is what ``pip install --target`` made, with all that differs from what is installed here: it comes
first in every process, also in those that import hosts before a test asks for one."""


def run(host: str, folder: Path | None) -> dict[str, Any]:
    """Run the tests of one host on a checkout, or on the installed host or its double."""
    with tempfile.TemporaryDirectory() as scratch:
        lines, report = Path(scratch) / "lines", Path(scratch) / "report.xml"
        lines.touch()
        environment = {**os.environ, FILE: str(lines), "OMP_NUM_THREADS": "1"}
        environment.pop(CHECKOUTS, None)
        environment |= {} if folder is None else {CHECKOUTS: str(_with_others(host, folder, Path(scratch)))}
        if folder is not None and host in WHOLE:
            environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [environment.get("PYTHONPATH")])])
        chosen = ["-k", ON_CHECKOUTS[host]] if folder is not None and host in ON_CHECKOUTS else []
        chosen += ["-k", CALLERS[host][1]] if host in CALLERS else []
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *map(str, files(host)), *chosen]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(f"{host} {folder or ''}: pytest wrote no report.\n{done.stdout[-2000:]}\n{done.stderr}")
        if done.returncode:
            print(done.stdout[-4000:], file=sys.stderr)
        suite = ElementTree.parse(report).getroot()[0]
        noted = [json.loads(line) for line in lines.read_text().splitlines()]
    return {
        "host": host,
        "on": _kind(host, folder),
        "version": next((x["version"] for x in noted if x.get("host") == host), None),
        "commit": None if folder is None else commit(folder),
        **_tests(suite),
        "steps": _steps(suite),
        **_differences(noted),
        "calls": sum("calls" in x for x in noted),
        "passed_on": dict(Counter(x["passed_on"] or "not said" for x in noted if "passed_on" in x)),
        "logitless": logitless.__version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def files(host: str) -> list[Path]:
    """The files of tests of a host."""
    if host in CALLERS:
        return [CALLERS[host][0]]
    named_so = [HERE / f"test_{name}.py" for name in (host, *MORE.get(host, ()))]
    return [*named_so, *sorted(HERE.glob(f"test_{host}_step*.py"))]


def _with_others(host: str, folder: Path, scratch: Path) -> Path:
    """The checkout, or a folder of it and of the one that comes along."""
    beside = checkout(BESIDE[host]) if host in BESIDE else None
    if beside is None:
        return folder
    both = scratch / "checkouts"
    both.mkdir()
    for place in (folder, beside):
        (both / place.name).symlink_to(place)
    return both


def _kind(host: str, folder: Path | None) -> str:
    if folder is not None:
        return named(host, folder)
    return "double" if (HERE / "doubles" / host).is_dir() else "installed"


def _tests(suite: ElementTree.Element) -> dict[str, int]:
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped, total = int(suite.get("skipped", 0)), int(suite.get("tests", 0))
    return {"passed": total - failed - skipped, "skipped": skipped, "failed": failed}


def _steps(suite: ElementTree.Element) -> int:
    """How many tests of whole steps passed."""
    of = [case for case in suite.iter("testcase") if re.search(STEPS, case.get("classname", ""))]
    return sum(all(part.tag not in ("failure", "error", "skipped") for part in case) for case in of)


def _differences(noted: list[dict[str, Any]]) -> dict[str, Any]:
    """Largest error to float64 of ours and of the host, for float32 results and gradients."""
    found: dict[str, Any] = {"compared": sum("kind" in x for x in noted)}
    for kind in ("value", "gradient"):
        of = [x for x in noted if x.get("kind") == kind and x["dtype"] == "float32"]
        found[kind] = max((x["ours"] for x in of), default=None)
        found[f"host_{kind}"] = max((x["theirs"] for x in of), default=None)
    return found


def keep(record: dict[str, Any], file: Path) -> None:
    """Put the record in place of the one of the same host, version and Python."""
    there = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    there = [x for x in there if _key(x) != _key(record)]
    ordered = sorted([*there, record], key=_order)
    file.write_text("".join(json.dumps(x) + "\n" for x in ordered))


def _key(record: dict[str, Any]) -> tuple[str, str, str]:
    # Of records from before Pythons were told apart: the oldest that is served.
    return record["host"], record["on"], record.get("python", "3.11")


def _order(record: dict[str, Any]) -> tuple[Any, ...]:
    """By host; of each, releases by their numbers, then branches and what is installed."""
    numbers = tuple(map(int, re.findall(r"\d+", record["on"])))
    return record["host"], not numbers, numbers, record["on"], _key(record)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the adapters' tests on every host that is found.")
    parser.add_argument("hosts", nargs="*", default=[], help="hosts or checkouts: slime, slime-0.3.0; all if none")
    asked = set(parser.parse_args().hosts)
    failed = 0
    for host in (*HOSTS, *CALLERS):
        # A new host may have no installable package and no double: it is tested on checkouts alone.
        places = [None] if (HERE / f"test_{host}.py").exists() else []
        for folder in [*places, *checkouts(host)]:
            if asked and not asked & {host, folder.name if folder else ""}:
                continue
            record = run(host, folder)
            if record["passed"]:
                keep(record, RECORDS)
            failed += record["failed"]
            shown = {name: record[name] for name in ("passed", "skipped", "failed", "calls")}
            print(host, record["on"], shown, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
