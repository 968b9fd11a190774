"""Records of hosts' steps before and after installing ours (``adapters.py``), and the tables that are made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from logitless.spec import format_bytes

START, END = "<!-- table: python -m benchmarks.bench.adapters -->\n", "<!-- end of table -->"


@dataclass(frozen=True)
class AdapterRecord:
    """Peak bytes beyond those alive before the step, median milliseconds, and the largest log-prob difference.

    Those of the step with logits that are not computed are None where it was not measured; ``made`` counts the logits
    that it computed after all, by ``file:line``.
    """

    host: str
    version: str
    point: str
    sizes: str
    before_bytes: int
    after_bytes: int
    before_ms: float
    after_ms: float
    difference: float
    environment: dict[str, Any]
    deferred_bytes: int | None = None
    deferred_ms: float | None = None
    deferred_difference: float | None = None
    made: dict[str, int] | None = None


def append(path: Path, record: AdapterRecord) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(record), allow_nan=False) + "\n")


def read(path: Path) -> list[AdapterRecord]:
    """All records, oldest first."""
    return [AdapterRecord(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line]


def table(host: str, records: Sequence[AdapterRecord]) -> str:
    """The newest record of every device, as Markdown."""
    newest = {record.environment["device"]: record for record in records if record.host == host}
    if not newest:
        return "No machine has measured this step yet; what tests have counted is above.\n\n"
    columns = ("before", "after", "deferred") if any(x.deferred_bytes for x in newest.values()) else ("before", "after")
    heads = [f"{what} {column}" for what in ("peak", "time") for column in columns]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    notes = []
    for record in newest.values():
        where, numbers = record.environment, asdict(record)
        peaks = [numbers[f"{column}_bytes"] for column in columns]
        times = [numbers[f"{column}_ms"] for column in columns]
        cells = ["" if x is None else format_bytes(x) for x in peaks]
        cells += ["" if x is None else f"{x:,.0f} ms" for x in times]
        lines.append(f"| {where['device']} | {' | '.join(cells)} |")
        notes.append(
            f"{where['device']}: {record.point}, forward and backward of {record.sizes}; {host} {record.version}, "
            f"torch {where['versions']['torch']}, commit `{where['commit']}`. Log-probs differ by at most "
            f"{record.difference:.1g}"
            + ("." if record.deferred_difference is None else f", deferred by {record.deferred_difference:.1g}.")
            + "".join(
                f" Logits made {count} times, by `{_short(place)}`." for place, count in (record.made or {}).items()
            )
        )
    if "deferred" in columns:
        notes.insert(
            0, "*Before* is the framework alone, *after* with ours, and *deferred* with logits that are not computed."
        )
    return "\n".join(lines) + "\n\n" + "\n\n".join(notes) + "\n\n"


def _short(place: str) -> str:
    """The last two parts of ``file:line``."""
    return "/".join(place.split("/")[-2:])


def with_table(text: str, host: str, records: Sequence[AdapterRecord]) -> str:
    """The text of a page with its table made anew."""
    head, rest = text.split(START)
    return head + START + table(host, records) + END + rest.split(END)[1]
