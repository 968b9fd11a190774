"""The table of ``docs/how-to/replay.md`` from the records of ``benchmarks/supports.py``.

Run by ``python docs/make_supports.py``, held by a test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from logitless.spec import format_bytes

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "how-to" / "replay.md"
RECORDS = ROOT / "benchmarks" / "results" / "supports.jsonl"
BEGIN, END = "<!-- supports: python docs/make_supports.py -->\n", "<!-- end of supports -->\n"


def read() -> list[dict[str, Any]]:
    """The newest record of each case and contender, in the order of their first appearance."""
    lines = [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]
    return list({(line["case"]["name"], line["contender"]): line for line in lines}.values())


def tables(records: list[dict[str, Any]]) -> str:
    """One table for each device and commit."""
    parts = []
    for where in dict.fromkeys(map(_where, records)):
        lines = [line for line in records if _where(line) == where]
        parts.append(f"{where}:\n\n{_table(lines)}")
    return "\n".join(parts)


def _where(record: dict[str, Any]) -> str:
    here, case = record["environment"], record["case"]
    sizes = f"T = {case['tokens']}, V = {case['vocab']}, {case['dtype']}"
    return f"{here['device']}, torch {here['versions']['torch']}, commit `{here['commit'][:7]}`, {sizes}"


def _table(lines: list[dict[str, Any]]) -> str:
    out = [
        "| D | ids of a token | | forward ms | forward + backward ms | x bytes at copy speed | beyond gradients |",
        "|---:|---:|---|---:|---:|---:|---:|",
    ]
    for line in lines:
        case, opens = line["case"], line["contender"] == "torch's gather"
        ids = "mix" if case["ids"] is None else str(case["ids"])
        beyond = format_bytes(line["peak_bytes"] - line["gradients_bytes"]) if "peak_bytes" in line else ""
        total = f"{line['total_ms']:.2f}" if "total_ms" in line else line["status"]
        cells = (
            str(case["hidden"]) if opens else "",
            ids if opens else "",
            line["contender"],
            f"{line['forward_ms']:.2f}" if "forward_ms" in line else "",
            total,
            f"{line['total_ms'] / line['floor_ms']:.1f}" if "total_ms" in line else "",
            beyond,
        )
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def with_tables(page: str, records: list[dict[str, Any]]) -> str:
    before, rest = page.split(BEGIN)
    return before + BEGIN + tables(records) + END + rest.split(END)[1]


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), read()), encoding="utf-8")


if __name__ == "__main__":
    main()
