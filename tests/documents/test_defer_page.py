"""Figures on the page of ``defer``, held to their records."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORDS = [json.loads(line) for line in (ROOT / "benchmarks/results/one-line.jsonl").read_text().splitlines()]
PAGE = (ROOT / "docs/defer.md").read_text()


def test_the_table_is_what_the_records_say():
    newest = {(r["model"], r["contender"]): r for r in RECORDS if r["kind"] == "step"}
    pairs = [(key, r, newest[key[0], f"{key[1]}, deferred"]) for key, r in newest.items() if "deferred" not in key[1]]
    assert len(pairs) == 9
    for (model, code), before, after in pairs:
        peaks = " | ".join(f"{r['peak_bytes'] / 2**30:.1f} GiB" for r in (before, after))
        times = " | ".join(f"{r['ms']:.0f} ms" for r in (before, after))
        assert f"| {model} | {code} | {peaks} | {times} |" in PAGE
        assert abs(after["loss"] - before["loss"]) <= 1e-6 * abs(before["loss"])


def test_the_longest_batches_are_what_the_records_say():
    for r in RECORDS:
        asked = r["contender"].startswith("SFT") or r["model"] == "1.7B"
        if r["kind"] == "longest" and asked and r["budget_bytes"] == 80_000_000_000:
            assert f"{r['tokens']:,}" in PAGE
