"""What is said of hosts, from records: those tested, in ``docs/adapters/index.md``, those measured, in README.md and
``docs/maintainers.md``; and the figure of the first page, which ``docs/make_figures.py`` draws.

Run by ``python docs/make_hosts.py``, held by tests. ``make hosts`` writes the record of the tests, and
``python -m benchmarks.bench.adapters`` that of memory and time.
"""

from __future__ import annotations

import importlib
import json
import textwrap
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from make_demo import HEIGHT, WIDTH

from benchmarks.bench.adapters import RESULTS, AdapterRecord, by_default
from benchmarks.bench.adapters import read as read_measured
from logitless.adapters import HOSTS
from logitless.spec import format_bytes
from logitless.tools.style import Style, dress, save

NAME = "h200-hosts"
LEAST = 20 * 2**30
"""Peaks of hosts in the figure: with less before, there was little to save."""

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
SHOWN = ("slime", "torchtitan", "verl")
"""Hosts that the README gives times of; the others are on the page for maintainers."""


def read() -> list[dict[str, Any]]:
    """The records, one per host and version."""
    return [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]


def table(records: list[dict[str, Any]]) -> str:
    """One line per record, under the range of versions that the adapter installs into without a warning."""
    lines = [
        "| host | versions | run on | tests | of steps | values, gradients | the host's own | calls, passed on |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    for host in dict.fromkeys([*HOSTS, *(x["host"] for x in records)]):
        there = host in HOSTS
        versions = ", ".join(importlib.import_module(f"logitless.adapters.{host}").HOST.versions) if there else "-"
        for i, record in enumerate(x for x in records if x["host"] == host):
            failed = f", {record['failed']} failed" if record["failed"] else ""
            passed_on = sum(record["passed_on"].values())
            why = f" ({', '.join(record['passed_on'])})" if passed_on else ""
            cells = (
                host if i == 0 else "",
                versions if i == 0 else "",
                _run_on(record),
                f"{record['passed']}{failed}",
                str(record.get("steps", "-")),
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
    """The README with the time of a step of some hosts, before and after."""
    said = [
        f"{by_default(x)[1]:.0f} ms instead of {x.before_ms:.0f} in [{TITLES.get(x.host, x.host)}]"
        f"(docs/adapters/{x.host}.md)"
        for x in records
        if x.host in SHOWN
    ]
    line = (
        f"One step of head and loss then also takes less time: {', '.join(said)} ([all of them](docs/maintainers.md))."
    )
    return _between(text, MEASURED_BEGIN, f"{textwrap.fill(line, 142, break_on_hyphens=False)}\n")


def maintainers(text: str, records: list[AdapterRecord]) -> str:
    """The page for maintainers with the same figures, one line for each host."""
    lines = ["| | peak before | peak after | time before | time after |", "|---|---:|---:|---:|---:|"]
    for x in records:
        peak, ms = by_default(x)
        peaks = f"{format_bytes(x.before_bytes)} | {format_bytes(peak)}"
        name = f"[{TITLES.get(x.host, x.host)}](adapters/{x.host}.md)"
        lines.append(f"| {name} | {peaks} | {x.before_ms:,.0f} ms | {ms:,.0f} ms |")
    return _between(text, MEASURED_BEGIN, "\n".join(lines) + "\n\n")


def drawn(records: list[AdapterRecord]) -> list[AdapterRecord]:
    """Hosts of the figure, the largest peak first."""
    return sorted((x for x in records if x.before_bytes >= LEAST), key=lambda x: -x.before_bytes)


def said(records: list[AdapterRecord]) -> str:
    """The numbers of the figure."""
    pairs = ((x.host, x.before_bytes, by_default(x)[0]) for x in drawn(records))
    return "; ".join(f"{host} {before / 2**30:.0f} {after / 2**30:.1f}" for host, before, after in pairs)


def draw(records: list[AdapterRecord], path: Path, style: Style) -> None:
    """A bar for each host: the peak of a step before, and within it the peak after."""
    hosts = drawn(records)
    figure, axis = plt.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
    dress(axis, style, "Peak memory of head and loss, before and after", 12)
    text = {"va": "center", "fontsize": 11, "color": style.text}
    for place, x in enumerate(hosts):
        peak, _ = by_default(x)
        axis.barh(place, x.before_bytes, 0.72, color=style.others)
        axis.barh(place, peak, 0.72, color=style.ours)
        before = axis.annotate(f"{x.before_bytes / 2**30:.0f} \u2192 ", (x.before_bytes + 2**29, place), **text)
        after = f"{peak / 2**30:.1f} GiB"
        axis.annotate(after, (1, 0.5), xycoords=before, **text | {"color": style.ours, "fontweight": "bold"})
    axis.set_yticks(range(len(hosts)), [TITLES.get(x.host, x.host) for x in hosts], fontsize=11, color=style.text)
    axis.set(xticks=[], ylim=(len(hosts) - 0.5, -0.5), xlim=(0, 1.36 * max(x.before_bytes for x in hosts)))
    axis.grid(visible=False)
    save(figure, path, style, said(records))


def _between(text: str, begin: str, new: str) -> str:
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(END)
    return f"{before}{begin}{new}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), read()), encoding="utf-8")
    README.write_text(readme(README.read_text(encoding="utf-8"), measured()), encoding="utf-8")
    MAINTAINERS.write_text(maintainers(MAINTAINERS.read_text(encoding="utf-8"), measured()), encoding="utf-8")
