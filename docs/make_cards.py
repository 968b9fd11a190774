"""The table of ``docs/cards.md``: what every kernel takes on cards that it was compiled for, from the record of them.

    make cards                  compiles all of them anew, minutes, and then runs this

Held by a test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "benchmarks" / "results" / "cards.jsonl"
PAGE = ROOT / "docs" / "cards.md"
BEGIN, END = "<!-- cards: python docs/make_cards.py -->\n", "<!-- end of cards -->\n"

Line = dict[str, Any]


def read() -> list[Line]:
    return [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]


def section(lines: list[Line]) -> str:
    """A row for each kernel, a column for each card; the most that any of a kernel's variants takes."""
    targets = list(dict.fromkeys(line["target"] for line in lines))
    kernels = list(dict.fromkeys(line["kernel"] for line in lines))
    versions = ", ".join(f"{name} {number}" for name, number in lines[0]["versions"].items())
    out = [
        f"{len(lines)} compilations, {versions}. "
        "Registers of a thread / bytes of it that spilled / KiB of shared memory:\n",
        f"| kernel | variants | {' | '.join(targets)} |",
        f"|---|---:|{'---:|' * len(targets)}",
    ]
    for kernel in kernels:
        own = [line for line in lines if line["kernel"] == kernel]
        cells = [_cell([line for line in own if line["target"] == target]) for target in targets]
        variants = len(own) // len({line["target"] for line in own})
        out.append(f"| `{kernel}` | {variants} | {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def _cell(lines: list[Line]) -> str:
    if not lines:
        return "-"
    registers, spilled, shared = (max(line[name] for line in lines) for name in ("registers", "spilled", "shared"))
    return f"{registers} / {spilled} / {round(shared / 1024)}"


def made() -> str:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + section(read()) + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(made(), encoding="utf-8")
