"""The table of tested hosts in ``docs/adapters/index.md`` from the record that ``make hosts`` writes.

Run by ``python docs/make_hosts.py``, held by a test.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from logitless.adapters import HOSTS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "adapters" / "index.md"
RECORDS = ROOT / "benchmarks" / "results" / "hosts.jsonl"
BEGIN, END = "<!-- table: make hosts -->\n", "<!-- end of table -->\n"


def read() -> list[dict[str, Any]]:
    """The records, one per host and version."""
    return [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]


def table(records: list[dict[str, Any]]) -> str:
    """One line per record, under the range of versions that the adapter installs into without a warning."""
    lines = [
        "| host | versions | run on | tests | values, gradients | the host's own | calls, passed on |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for host in HOSTS:
        versions = ", ".join(importlib.import_module(f"logitless.adapters.{host}").HOST.versions)
        for i, record in enumerate(x for x in records if x["host"] == host):
            failed = f", {record['failed']} failed" if record["failed"] else ""
            passed_on = sum(record["passed_on"].values())
            why = f" ({', '.join(record['passed_on'])})" if passed_on else ""
            cells = (
                host if i == 0 else "",
                versions if i == 0 else "",
                _run_on(record),
                f"{record['passed']}{failed}",
                _errors(record["value"], record["gradient"]),
                _errors(record["host_value"], record["host_gradient"]),
                f"{record['calls']}, {passed_on}{why}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _run_on(record: dict[str, Any]) -> str:
    commit = f" `{record['commit']}`" if record["commit"] else ""
    if record["on"] in ("installed", "double"):
        return f"{record['on']} {record['version'] or ''}".strip()
    return f"{record['on']}{commit}"


def _errors(*errors: float | None) -> str:
    return ", ".join("-" if x is None else f"{x:.0e}" for x in errors)


def page(text: str, records: list[dict[str, Any]]) -> str:
    """The page with the table of these records."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table(records)}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), read()), encoding="utf-8")
