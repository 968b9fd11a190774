"""The page of shapes says what its record says, and names its figures."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import make_shapes  # noqa: E402


def test_the_page_says_what_the_record_says():
    """Run ``python docs/make_shapes.py`` after new records."""
    assert make_shapes.made() == make_shapes.PAGE.read_text(encoding="utf-8")


def test_figures_are_there():
    text = make_shapes.PAGE.read_text(encoding="utf-8")
    for style in ("light", "dark"):
        name = f"{make_shapes.NAME}-{style}.png"
        assert f"figures/{name}" in text
        assert (make_shapes.FIGURES / name).exists()


def test_what_the_page_says_of_an_odd_vocabulary():
    (line,) = [x for x in make_shapes.read() if x["model"] == "gpt2"]
    assert round(line["calls"]["loss"]["ms"], 1) == 8.9
    assert "8.9 ms" in make_shapes.PAGE.read_text(encoding="utf-8")
