"""Figures on the page of ``Logits``, held to their records."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORDS = [json.loads(line) for line in (ROOT / "benchmarks/results/float32-head.jsonl").read_text().splitlines()]
PAGE = (ROOT / "docs/logits.md").read_text()


def test_the_table_of_float32_heads_is_what_the_records_say():
    newest = {(r["hidden_size"], r["way"]): r for r in RECORDS}
    assert len(newest) == 14
    for (size, way), r in newest.items():
        times = [f"{r[name]:.0f} ms ({r[name] / r['product_ms']:.1f})" for name in ("forward_ms", "both_ms")]
        errors = [f"{r[name]:.1e}" for name in ("logprob_error", "hidden_gradient_error")]
        cells = [str(size), way, *times, *errors, f"{r['peak_bytes'] / 2**30:.2f} GiB"]
        assert f"| {' | '.join(cells)} |" in PAGE
    # What the page says: log-probs as good as float32's beside bfloat16's, at a fraction of its time.
    for size in (4096, 2048, 1024):
        rounded, parts, ieee = (newest[size, way] for way in ("bfloat16", "two parts", "float32"))
        assert parts["logprob_error"] < rounded["logprob_error"] / 100
        assert parts["both_ms"] < ieee["both_ms"] / 8
    # With float32 hidden states: fifty times nearer than TF32, for less than twice its time forward.
    for size in (2048, 1024):
        three, tf32, ieee = (newest[size, way] for way in ("bfloat16x3", "tf32", "float32"))
        assert ieee["logprob_error"] < three["logprob_error"] < tf32["logprob_error"] / 40
        assert three["both_ms"] < tf32["both_ms"] < ieee["both_ms"] / 5
