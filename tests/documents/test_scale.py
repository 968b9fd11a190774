"""The table of ``docs/how-to/scale.md`` is what the record and ``explain`` say, and so is what the page says of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import make_scale  # noqa: E402
from make_scale import Split, cost, measured  # noqa: E402


def test_the_page_is_what_is_made_now():
    """Run ``python docs/make_scale.py`` after new records."""
    assert make_scale.made() == make_scale.PAGE.read_text(encoding="utf-8")


def test_both_figures_are_there():
    text = make_scale.PAGE.read_text()
    for style in ("light", "dark"):
        name = f"{make_scale.NAME}-{style}.png"
        assert f"../figures/{name}" in text
        assert (make_scale.FIGURES / name).exists()


def test_bytes_are_those_of_the_formula():
    """What the page says a card sends: 4 T D (n - 1) / n of d_hidden and 16 T (n - 1) of statistics."""
    record, n = measured(), 8
    tokens, width = make_scale.STEP, record.case["hidden"]
    sent = 4 * tokens * width * (n - 1) / n + 16 * tokens * (n - 1)
    assert cost(Split(8, tp=8), record).sent == pytest.approx(1e3 * sent / make_scale.NVLINK)


def test_where_the_head_stops():
    """Products and bytes of tensor parallelism take as long at n = 1.5 V B / F: 170 and 19 ranks."""
    record = measured()
    case = record.case
    speed = 6 * case["tokens"] * case["hidden"] * case["vocab"] / (1e-3 * record.total_ms)
    for link, ranks in ((make_scale.NVLINK, 170), (make_scale.INFINIBAND, 19)):
        assert 1.5 * case["vocab"] * link / speed == pytest.approx(ranks, rel=0.05)
    within = cost(Split(8, tp=8), record)
    assert within.sent / within.compute == pytest.approx(0.042, abs=0.01)
    many = cost(Split(1024), record)
    assert many.weight > many.compute
