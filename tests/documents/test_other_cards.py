"""``docs/cards.md`` says what the record says, the record has every kernel, and all of them fit on every card."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import make_cards  # noqa: E402

LINES = make_cards.read()
HOPPER = ("product_rows_kernel", "product_columns_kernel", "turns_statistics_kernel", "turns_gradient_kernel")
"""Kernels that are launched on cards of capability 9 alone."""
SHARED = dict(re.findall(r"^\| `(\w+)` \| .* \| (\d+) KiB \|$", make_cards.PAGE.read_text(), re.MULTILINE))
FUSED = ("product_", "merge_", "follow_", "gradient_from_tiles_", "pair_", "turns_")
"""Names of kernels that other cards have only where they were tuned."""
FEW = ("pair_sums_kernel", "turns_statistics_kernel")
"""Kernels some of whose registers spill on Hopper's cards, three at most."""


def test_the_page_says_what_the_record_says():
    """Run ``make cards`` after a change of kernels, or ``python docs/make_cards.py`` after a change of its words."""
    assert make_cards.made() == make_cards.PAGE.read_text(encoding="utf-8")


def test_every_kernel_is_in_the_record():
    """``benchmarks/cards.py --kernel NAME`` compiles those that are missing, for every card."""
    found = set()
    for path in (ROOT / "src" / "logitless" / "backends" / "triton").glob("*kernels.py"):
        found |= set(re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE))
    assert {line["kernel"] for line in LINES} == found
    for kernel in found:
        cards = {"sm_90"} if kernel in HOPPER else set(SHARED)
        assert {line["target"] for line in LINES if line["kernel"] == kernel} == cards, kernel


def test_all_fit():
    """Shared memory and registers, everywhere. Where no tuning is asked for first, next to nothing spills."""
    assert set(SHARED) == {line["target"] for line in LINES}
    for line in LINES:
        assert line["shared"] <= 1024 * int(SHARED[line["target"]]), line
        assert line["registers"] <= (512 if line["target"].startswith("gfx") else 255), line
        if line["target"] == "sm_90":
            assert line["spilled"] <= (12 if line["kernel"] in FEW else 0), line
        if not line["kernel"].startswith(FUSED):
            assert line["spilled"] <= 4, line
