"""The documentation runs: every Python snippet, every relative link, the README's table, and the promised lengths."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from logitless.bench.records import read_records

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "tests" / "adapters")]

import hosts  # noqa: E402
import make_figures  # noqa: E402

DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCS]

SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"""\]\(([^)\s]+)\)|(?:src|srcset|href)="([^"]+)\"""")


def snippets(path: Path) -> list[tuple[int, str]]:
    """Line of the first statement and text of every Python snippet of a file."""
    text = path.read_text()
    return [(text[: found.start(1)].count("\n"), found[1]) for found in SNIPPET.finditer(text)]


def anchors(path: Path) -> set[str]:
    """The anchors of a file's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_is_something_to_check():
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/layouts.md", "docs/math.md"} <= set(NAMES)
    assert len(snippets(ROOT / "README.md")) >= 3
    assert "what-it-costs" in anchors(ROOT / "README.md")


@pytest.mark.parametrize("path", DOCS, ids=NAMES)
def test_snippets_run(path: Path):
    """In order, in one namespace, with the line numbers of the file in a traceback."""
    namespace: dict = {"__name__": "snippet"}
    if path.parent.name == "adapters" and path.stem in hosts.MODULES:
        hosts.load(path.stem)
    try:
        for line, code in snippets(path):
            tree = ast.increment_lineno(ast.parse(code), line)
            exec(compile(tree, str(path), "exec"), namespace)
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


@pytest.mark.parametrize("path", DOCS, ids=NAMES)
def test_prose_is_ascii(path: Path):
    assert path.read_text().isascii()


def test_the_table_is_what_the_records_say():
    """Run ``python docs/make_figures.py`` after new records."""
    text = (ROOT / "README.md").read_text()
    assert make_figures.with_table(text, make_figures.table(read_records(make_figures.RECORDS))) == text


@pytest.mark.parametrize(("name", "most"), [("README.md", 150), ("CONTRIBUTING.md", 60)])
def test_first_pages_are_short(name: str, most: int):
    assert len((ROOT / name).read_text().splitlines()) < most


def test_the_file_map_names_files_that_exist():
    names = re.findall(r"^\| (`.+`) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    files = [name.strip("` ") for line in names for name in line.split(",")]
    assert len(files) > 10
    assert [name for name in files if not (ROOT / "src" / "logitless" / name).exists()] == []
