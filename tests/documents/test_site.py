"""The built site in a browser: its search, its pages on a phone, its figures in the dark. ``make docs`` runs it.

Skipped where the site is not built, or is older than a page of it, or where there is no browser.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from browser import Site

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))

SEARCH = """
await open("index.html")
const document = frame.contentDocument, input = document.querySelector(".md-search__input")
const sleep = (ms) => new Promise((done) => setTimeout(done, ms))
const results = () => [...document.querySelectorAll(".md-search-result__link")].map((link) => link.getAttribute("href"))
input.focus()
input.value = TYPED
for (let turn = 0; turn < 100 && !results().length; turn++) {
  input.dispatchEvent(new Event("keyup", { bubbles: true }))
  input.dispatchEvent(new Event("input", { bubbles: true }))
  await sleep(200)
}
return results()
"""

LOOK = """
const out = {}, sleep = (ms) => new Promise((done) => setTimeout(done, ms))
const wide = (e, w) => {
  if (e.getBoundingClientRect().right <= w + 1) return false
  for (let a = e.parentElement; a.tagName !== "ARTICLE"; a = a.parentElement)
    if (/auto|scroll|hidden/.test(frame.contentWindow.getComputedStyle(a).overflowX)) return false
  return true
}
for (const page of PAGES) {
  await open(page)
  const all = (query) => [...frame.contentDocument.querySelectorAll(query)], w = frame.clientWidth
  frame.contentDocument.body.setAttribute("data-md-color-scheme", "slate")
  await sleep(10)
  const pictures = all("picture img")
  await Promise.all(pictures.map((img) => img.decode()))
  out[page] = {
    wide: all("article *").filter((e) => wide(e, w)).map((e) => e.outerHTML.slice(0, 80)),
    ways: all(".md-footer__link").length,
    edit: all("a[rel=edit]").length,
    light: pictures.filter((img) => !img.currentSrc.includes("-dark.")).length,
  }
}
return out
"""


@pytest.fixture(scope="module")
def site() -> Site:
    index = ROOT / "site" / "index.html"
    if not index.exists() or index.stat().st_mtime < max(path.stat().st_mtime for path in PAGES):
        pytest.skip("the site is not built from these pages: run make docs")
    return Site(index.parent)


@pytest.mark.parametrize(("typed", "wanted"), [("from_mask", "api/rows.html"), ("defer", "defer.html")])
def test_a_search_finds_names_as_they_are_written(site: Site, tmp_path: Path, typed: str, wanted: str):
    links = site.ask(SEARCH.replace("TYPED", json.dumps(typed)), tmp_path)
    assert any(wanted in link for link in links[:3]), links[:10]


def test_pages_fit_a_phone_lead_on_and_have_figures_for_the_dark(site: Site, tmp_path: Path):
    """Nothing is wider than the window unless it scrolls by itself, and there is a way on, back, and to edit a page."""
    pages = [str(path.relative_to(DOCS).with_suffix(".html")) for path in PAGES]
    found = site.ask(LOOK.replace("PAGES", json.dumps(pages)), tmp_path)
    assert set(found) == set(pages)
    for page, said in found.items():
        # Decisions are listed on a page of their own, and stand outside the order of the others.
        ways = 0 if page.startswith("decisions/") else 1 if page in ("index.html", "decisions.html") else 2
        assert said == {"wide": [], "ways": ways, "edit": 1, "light": 0}, page
