"""The tables of hosts from their records: those tested, in ``docs/adapters/index.md``, those measured, in README.md
and ``docs/maintainers.md``.

Run by ``python docs/make_hosts.py``, held by tests. ``make hosts`` writes the record of the tests, and
``python -m benchmarks.bench.adapters`` that of memory and time.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from benchmarks.bench.adapters import RESULTS, AdapterRecord, by_default
from benchmarks.bench.adapters import read as read_measured
from logitless.adapters import HOSTS
from logitless.spec import format_bytes

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "adapters" / "index.md"
RECORDS = ROOT / "benchmarks" / "results" / "hosts.jsonl"
BEGIN, END = "<!-- table: make hosts -->\n", "<!-- end of table -->\n"
README, MAINTAINERS = ROOT / "README.md", ROOT / "docs" / "maintainers.md"
MEASURED_BEGIN = "<!-- table: python docs/make_hosts.py -->\n"
TITLES = {"areal": "AReaL", "megatron": "Megatron-Core", "ms_swift": "ms-swift", "nemo_rl": "NeMo-RL"}
TITLES |= {
    "openrlhf": "OpenRLHF",
    "prime_rl": "prime-rl",
    "skyrl": "SkyRL",
    "transformers": "Transformers",
    "trl": "TRL",
}
SHOWN = ("megatron", "nemo_rl", "skyrl", "slime", "torchtitan", "verl")
"""Hosts of the README's table; the others are on the page for maintainers."""


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
    python = f", Python {record['python']}" if record.get("python", "3.11") != "3.11" else ""
    if record["on"] in ("installed", "double"):
        return f"{record['on']} {record['version'] or ''}".strip() + python
    return f"{record['on']}{commit}{python}"


def _errors(*errors: float | None) -> str:
    return ", ".join("-" if x is None else f"{x:.0e}" for x in errors)


def page(text: str, records: list[dict[str, Any]]) -> str:
    """The page with the table of these records."""
    return _between(text, BEGIN, f"{table(records)}\n")


def measured() -> list[AdapterRecord]:
    """The newest record of each host on a GPU, by name."""
    newest = {record.host: record for record in read_measured(ROOT / RESULTS) if record.sizes.endswith("bfloat16")}
    return [newest[host] for host in HOSTS if host in newest]


def readme(text: str, records: list[AdapterRecord]) -> str:
    """The README with peak and time of a step of some hosts, before and after."""
    columns = [
        (
            f"[{TITLES.get(x.host, x.host)}](docs/adapters/{x.host}.md)",
            "---:",
            *(f"{y / 2**30:.1f} GiB" for y in (x.before_bytes, by_default(x)[0])),
            *(f"{y:.0f} ms" for y in (x.before_ms, by_default(x)[1])),
        )
        for x in records
        if x.host in SHOWN
    ]
    names = ("", "---", "peak before", "peak after", "time before", "time after")
    lines = zip(names, *columns, strict=True)
    return _between(text, MEASURED_BEGIN, "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n")


def maintainers(text: str, records: list[AdapterRecord]) -> str:
    """The page for maintainers with the same figures, one line for each host."""
    lines = ["| | peak before | peak after | time before | time after |", "|---|---:|---:|---:|---:|"]
    for x in records:
        peak, ms = by_default(x)
        peaks = f"{format_bytes(x.before_bytes)} | {format_bytes(peak)}"
        name = f"[{TITLES.get(x.host, x.host)}](adapters/{x.host}.md)"
        lines.append(f"| {name} | {peaks} | {x.before_ms:,.0f} ms | {ms:,.0f} ms |")
    return _between(text, MEASURED_BEGIN, "\n".join(lines) + "\n\n")


def _between(text: str, begin: str, new: str) -> str:
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(END)
    return f"{before}{begin}{new}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), read()), encoding="utf-8")
    README.write_text(readme(README.read_text(encoding="utf-8"), measured()), encoding="utf-8")
    MAINTAINERS.write_text(maintainers(MAINTAINERS.read_text(encoding="utf-8"), measured()), encoding="utf-8")
