"""Tables of what calls cost, on the pages of those calls, from the records of their benchmarks.

Run by ``python docs/make_costs.py``, held by a test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitless.spec import format_bytes

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- costs: python docs/make_costs.py -->\n", "<!-- end of costs -->\n"

Record = dict[str, Any]


def supports(lines: list[Record]) -> str:
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


def divergences(lines: list[Record]) -> str:
    out = [
        "| D, teacher's D | | kind | ms | x products | peak | error of d_hidden |",
        "|---:|---|---|---:|---:|---:|---:|",
    ]
    last = None
    for line in lines:
        case = line["case"]
        opens, last = case["name"] != last, case["name"]
        cells = (
            f"{case['hidden']}, {case['teacher']}" if opens else "",
            line["contender"],
            line["kind"],
            f"{line['ms']:.1f}" if "ms" in line else line["status"],
            f"{line['ms'] / line['products_ms']:.2f} of {line['products']}" if "ms" in line else "",
            format_bytes(line["peak_bytes"]) if "peak_bytes" in line else "",
            f"{line['errors']['d_hidden']:.1e}" if "errors" in line else "",
        )
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def drafts(lines: list[Record]) -> str:
    out = [
        "| | loss | ms | x products | peak | error of d_hidden |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for line in lines:
        cells = (
            line["contender"],
            line["loss"].partition(",")[0],
            f"{line['ms']:.1f}" if "ms" in line else line["status"],
            f"{line['ms'] / line['products_ms']:.2f} of {line['products']}" if "ms" in line else "",
            format_bytes(line["peak_bytes"]) if "peak_bytes" in line else "",
            f"{line['errors']['d_hidden']:.1e}" if "errors" in line else "",
        )
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def extras(lines: list[Record]) -> str:
    out = [
        "| asked for | from hidden states ms | and backward ms | from logits ms | working memory, forward |",
        "|---|---:|---:|---:|---:|",
    ]
    for line in lines:
        times = [f"{line[f'{kind}_ms']:.1f}" if f"{kind}_ms" in line else "" for kind in ("hidden", "step", "logits")]
        peak = format_bytes(line["forward_peak_bytes"]) if "forward_peak_bytes" in line else ""
        out.append(f"| {' | '.join((line['asked'], *times, peak))} |")
    return "\n".join(out) + "\n"


@dataclass(frozen=True)
class Page:
    """A page, the records of its tables, and how a table is made of those of one machine.

    Attributes:
        names: fields that tell records of one case apart, the newest of which counts.
    """

    path: str
    records: str
    names: tuple[str, ...]
    table: Callable[[list[Record]], str]

    @property
    def file(self) -> Path:
        return ROOT / "docs" / self.path

    def read(self) -> list[Record]:
        """The newest record of each case and contender, in the order of their first appearance."""
        lines = [_renamed(json.loads(line)) for line in (RESULTS / self.records).read_text("utf-8").splitlines()]
        return list({(x["case"]["name"], *(x[name] for name in self.names)): x for x in lines}.values())

    def made(self) -> str:
        """The page with its tables made anew: one for each device, commit and sizes."""
        records, parts = self.read(), []
        for where in dict.fromkeys(map(_where, records)):
            lines = [line for line in records if _where(line) == where]
            parts.append(f"{where}:\n\n{self.table(lines)}")
        before, rest = self.file.read_text(encoding="utf-8").split(BEGIN)
        return before + BEGIN + "\n".join(parts) + END + rest.split(END)[1]


PAGES = (
    Page("how-to/replay.md", "supports.jsonl", ("contender",), supports),
    Page("distillation.md", "divergences.jsonl", ("contender", "kind"), divergences),
    Page("drafts.md", "drafts.jsonl", ("contender",), drafts),
    Page("statistics.md", "extras.jsonl", ("asked",), extras),
)


RENAMED = {
    **{f"further_ids of {k}": f"ids of {k}" for k in (8, 64)},
    "linear_logprobs": "logprobs",
}
"""Names in records that are older than the calls that they are of."""


def _renamed(record: Record) -> Record:
    """The record in today's words."""
    return {key: RENAMED.get(x, x) if isinstance(x, str) else x for key, x in record.items()}


def _where(record: Record) -> str:
    here, case = record["environment"], record["case"]
    sizes = f"T = {case['tokens']}, V = {case['vocab']}, {case['dtype']}"
    return f"{here['device']}, torch {here['versions']['torch']}, commit `{here['commit'][:7]}`, {sizes}"


def main() -> None:
    for page in PAGES:
        page.file.write_text(page.made(), encoding="utf-8")


if __name__ == "__main__":
    main()
