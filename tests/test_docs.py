"""The documentation runs: every snippet and link, the site's contents, the README's numbers, the promised lengths."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml
from pages import ON_RANKS, compiled, snippets

import logitless
from logitless.tools.bench.records import format_bytes, newest, read_records

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "tests" / "adapters")]

import hosts  # noqa: E402
import make_figures  # noqa: E402

PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCS = sorted([*ROOT.glob("*.md"), *PAGES, *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "examples").glob("*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCS]

FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"""\]\(([^)\s]+)\)|(?:src|srcset|href)="([^"]+)\"""")


def anchors(path: Path) -> set[str]:
    """The anchors of a file's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_is_something_to_check():
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/layouts.md", "docs/math.md"} <= set(NAMES)
    assert len(snippets(ROOT / "README.md")) >= 3
    assert "what-it-costs" in anchors(ROOT / "README.md")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ON_RANKS])
def test_snippets_run(name: str):
    """In order, in one namespace."""
    path = ROOT / name
    namespace: dict = {"__name__": "snippet"}
    if path.parent.name == "adapters" and (hosts.FOLDER / path.stem).is_dir():
        hosts.load(path.stem)
    try:
        for code in compiled(path):
            exec(code, namespace)
    finally:
        # A snippet that fails must not leave its process group to the next file.
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("path", DOCS, ids=NAMES)
def test_links_lead_somewhere(path: Path):
    for found in LINK.finditer(FENCED.sub("", path.read_text())):
        link = found[1] or found[2]
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        place = (path.parent / file) if file else path
        assert place.exists(), f"{link} does not exist"
        assert not anchor or anchor in anchors(place), f"{link}: no such heading"


# The site, without building it: `make docs` does, strictly, with packages that the tests do not need.


def nav_pages(entry) -> list[str]:
    """The files of mkdocs.yml's nav, in order."""
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in nav_pages(part)]


def test_every_page_is_in_the_nav_once():
    listed = nav_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(listed) == sorted(str(path.relative_to(ROOT / "docs")) for path in PAGES)


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_links_of_a_page_stay_on_the_site(path: Path):
    for found in LINK.finditer(FENCED.sub("", path.read_text())):
        link = (found[1] or found[2]).partition("#")[0]
        if link and not re.match(r"[a-z]+:", link):
            place = (path.parent / link).resolve()
            assert place.is_file(), f"{link} is not a file"
            assert place.is_relative_to(ROOT / "docs"), f"{link} leaves the site"


def test_the_api_reference_has_every_public_name():
    names = re.findall(r"^::: logitless\.(?:\w+\.)*(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(names) == logitless.__all__


@pytest.mark.parametrize("path", DOCS, ids=NAMES)
def test_prose_is_ascii(path: Path):
    assert path.read_text().isascii()


def test_the_table_is_what_the_records_say():
    """Run ``python docs/make_figures.py`` after new records."""
    text = (ROOT / "README.md").read_text()
    assert make_figures.with_table(text, make_figures.table(read_records(make_figures.RECORDS))) == text


def test_the_policy_loss_costs_what_the_records_say():
    """The README's sentence about ``linear_policy_loss``, number by number."""
    text = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    records = newest(read_records(make_figures.RECORDS))
    found = {r.provider: r for r in records if r.case["name"] == "linear-reference-loss"}
    for provider in ("torch", "torch.compile", "verl-kernel", "logitless-loss", "logitless"):
        record = found[provider]
        assert f"{record.total_ms:.0f} ms and {format_bytes(record.peak_bytes)}" in text, provider
        assert f"(commit `{record.environment['commit']}`)" in text
    assert f"Three bare products take {found['torch'].floor_ms:.0f} ms" in text


@pytest.mark.parametrize(("name", "most"), [("README.md", 150), ("CONTRIBUTING.md", 100)])
def test_first_pages_are_short(name: str, most: int):
    assert len((ROOT / name).read_text().splitlines()) < most


def test_the_file_map_is_complete():
    names = re.findall(r"^\| (`[^|]+`) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    files = [name.strip("` ") for line in names for name in line.split(",")]
    package = ROOT / "src" / "logitless"
    modules = [path.name for path in package.glob("*.py") if not path.name.startswith("__")]
    folders = [f"{path.parent.name}/" for path in package.glob("*/__init__.py")]
    assert sorted(files) == sorted(modules + folders)
