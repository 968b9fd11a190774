"""What ran with which versions: ``python benchmarks/versions.py report.xml`` adds pytest's report to the records.

``benchmarks/results/versions.jsonl`` has a line per run; the table of ``docs/reliability.md`` is the newest line of
each set of versions, and is written anew. The exit code is 1 if a test failed: the record is made either way.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "results" / "versions.jsonl"
PAGE = ROOT / "docs" / "reliability.md"
START, END = "<!-- table: nox -->\n", "<!-- end of table -->"
NAMES = ("python", "torch", "triton")


def read_records() -> list[dict[str, Any]]:
    """One of each set of versions, the newest, in the order of their numbers."""
    lines = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    newest = {tuple(line[name] for name in NAMES): line for line in lines}
    return [newest[key] for key in sorted(newest, key=lambda key: [number(x) for x in (key[1], key[2], key[0])])]


def number(text: str) -> tuple[int, ...]:
    """``(2, 13, 0)`` of ``2.13.0+cpu``.

    >>> number("2.13.0+cpu") > number("2.9.1")
    True
    """
    return tuple(int(part) for part in text.partition("+")[0].split("."))


def table(records: list[dict[str, Any]]) -> str:
    head = (
        "| torch | Triton | Python | passed | failed | skipped | day | commit |\n|---|---|---|---:|---:|---:|---|---|\n"
    )
    return head + "".join(
        f"| {r['torch']} | {r['triton']} | {r['python']} | {r['passed']} | {len(r['failed'])} | {r['skipped']} "
        f"| {r['date']} | `{r['commit']}` |\n"
        for r in records
    )


def with_table(page: str, records: list[dict[str, Any]]) -> str:
    before, rest = page.split(START)
    return before + START + table(records) + END + rest.split(END)[1]


def record(report: Path) -> dict[str, Any]:
    """Of a report of pytest, with the versions of this process."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "triton": version("triton"),
        "passed": len(cases) - len(failed) - len(skipped),
        "skipped": len(skipped),
        "failed": sorted(f"{c.get('classname')}::{c.get('name')}" for c in failed),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit[:12],
    }


def main() -> None:
    new = record(Path(sys.argv[1]))
    with RECORDS.open("a") as file:
        file.write(json.dumps(new) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), read_records()))
    sys.exit(bool(new["failed"]))


if __name__ == "__main__":
    main()
