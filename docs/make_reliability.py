"""The recorded runs on ``docs/reliability.md``, from ``benchmarks/results/fuzz-*.jsonl``: held by a test.

    python docs/make_reliability.py

Only what stands between the two marks is written; the rest of the page is by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from fuzz.record import read, table  # noqa: E402

PAGE = Path(__file__).parent / "reliability.md"
BEGIN, END = "<!-- runs of the fuzzer: begin -->", "<!-- runs of the fuzzer: end -->"


def section(records: list[dict]) -> str:
    """All recorded runs, the largest first."""
    runs = sorted((r for r in records if r["kind"] == "fuzz"), key=lambda r: -r["cases"])
    soaks = [r for r in records if r["kind"] == "soak"]
    parts = [f"{_title(r)}\n\n{table(r)}" for r in runs]
    parts += [_soak(r) for r in soaks]
    return "\n\n".join(parts)


def _title(r: dict) -> str:
    how = f"{r['ranks']} ranks of a gloo group" if r["ranks"] > 1 else f"{r['jobs']} process{'es' * (r['jobs'] > 1)}"
    return f"**{r['cases']:,} cases** on {r['device']} in {how}, {r['seconds']:,.0f} s, {_where(r)}:"


def _soak(r: dict) -> str:
    grown = f"in the second half of them the process grew by {r['resident_growth_bytes'] // 1024} KiB"
    memory = f"{r['live_tensors'][0]} live tensors whenever they were counted, and {grown}"
    if r["device"] != "cpu":
        memory = f"{r['allocated_bytes'][0]:,} bytes allocated after every one of them"
    return (
        f"**Soak: {r['steps']:,} steps** on {r['device']}, {_where(r)}: {memory}. "
        f"Step {r['compared_step']:,} of a fresh process has the same bits."
    )


def _where(r: dict) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in r["versions"].items())
    return f"{versions}, {r['machine']}, commit `{r['commit']}`"


def filled(page: str, records: list[dict]) -> str:
    """The page with the runs between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    assert found, f"{PAGE.name} has lost its marks"
    return f"{before}{BEGIN}\n\n{section(records)}\n\n{END}{after}"


def records() -> list[dict]:
    return [r for file in sorted(ROOT.glob("benchmarks/results/fuzz-*.jsonl")) for r in read(file)]


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), records()), encoding="utf-8")
