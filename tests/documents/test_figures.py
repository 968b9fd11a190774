"""The layout figures are what ``Rows`` says today, and each says what it should. Bars are drawn from records alone."""

from __future__ import annotations

import importlib
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import PIL.Image
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import layout_figures  # noqa: E402
from layout_figures import LENGTHS, RESPONSES, Cell, Strip  # noqa: E402

FIGURES = ROOT / "docs" / "figures"
DRAWN = layout_figures.figures()


@pytest.mark.parametrize("name", DRAWN)
def test_the_committed_figure_is_the_one_drawn_now(name: str):
    """Run ``python docs/make_figures.py`` if the library changed on purpose."""
    assert (FIGURES / name).read_text(encoding="utf-8") == DRAWN[name]


@pytest.mark.parametrize("name", DRAWN)
def test_figures_are_well_formed_and_within_the_page(name: str):
    root = ET.fromstring(DRAWN[name])
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    boxes = [e.attrib for e in root.iter() if e.tag.endswith("rect") and "x" in e.attrib]
    assert boxes
    assert max(float(b["x"]) + float(b["width"]) for b in boxes) <= width
    assert max(float(b["y"]) + float(b["height"]) for b in boxes) <= height


def test_no_layout_figure_is_left_behind():
    assert {path.name for path in FIGURES.glob("*.svg")} == set(DRAWN)


@pytest.mark.parametrize("style", ["light", "dark"])
@pytest.mark.parametrize("made", ["make_hosts", "make_demo"])
def test_figures_of_the_first_screen_are_drawn_from_the_newest_records(made: str, style: str):
    """Run ``python docs/make_figures.py`` after new records."""
    module = importlib.import_module(made)
    wanted = module.said(module.measured() if made == "make_hosts" else module.read())
    assert PIL.Image.open(FIGURES / f"{module.NAME}-{style}.png").text["Description"] == wanted


def scored(strips: list[Strip]) -> list[tuple[int | None, int | None]]:
    return sorted((cell.sample, cell.scored) for strip in strips for cell in strip.cells if cell.scored is not None)


@pytest.mark.parametrize("draw", ["_zigzag", "_zigzag_padded", "_contiguous"])
def test_the_ranks_of_a_figure_score_every_response_token_once(draw: str):
    strips = [strip for strip in getattr(layout_figures, draw)() if strip.label != "whole stream"]
    assert scored(strips) == [(sample, r) for sample, n in enumerate(RESPONSES) for r in range(n)]
    held = sorted((cell.sample, cell.offset) for strip in strips for cell in strip.cells if cell.sample is not None)
    assert held == [(sample, t) for sample, n in enumerate(LENGTHS) for t in range(n)]


def test_a_drawing_that_contradicts_the_plan_is_refused():
    with pytest.raises(AssertionError):
        layout_figures._check(Cell(0, 3, 0), 0, 13)
