"""The documentation runs: every snippet and link, the site's contents, the README's numbers, the promised lengths."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
import typer
import yaml
from pages import ON_RANKS, compiled, snippets

import logitless
from benchmarks.bench.records import format_bytes, newest, read_records
from benchmarks.commands import app as benchmarks_app
from examples.demo.__main__ import app as demo_app
from logitless.tools.cli import app

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "tests" / "adapters")]

import hosts  # noqa: E402
import make_costs  # noqa: E402
import make_figures  # noqa: E402
import make_notes  # noqa: E402
import make_whole_step  # noqa: E402

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
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
    assert len(snippets(ROOT / "README.md")) >= 2
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


def test_code_of_others_is_at_least_code():
    """Blocks marked ``py`` show calls of packages that the tests do not install, each before a block that runs."""
    text = (ROOT / "docs" / "how-to" / "migrate.md").read_text()
    theirs = [block for language, block in BLOCK.findall(text) if language == "py"]
    assert len(theirs) == 4
    for block in theirs:
        assert isinstance(ast.parse(block).body[0], ast.ImportFrom)


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
    # Decisions are on a page of their own, in their order.
    decisions = re.findall(r"^\d+\. \[.+\]\((.+)\)$", (ROOT / "docs/decisions.md").read_text(), re.MULTILINE)
    assert decisions == sorted(decisions)
    listed += decisions
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
    text = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    names = re.findall(r"^::: logitless\.(?:\w+\.)*(\w+)$", text, re.MULTILINE)
    assert sorted(names) == logitless.__all__
    table = re.findall(r"`(\w+)`", (ROOT / "docs" / "api" / "index.md").read_text())
    assert sorted(table) == logitless.__all__


@pytest.mark.parametrize("path", DOCS, ids=NAMES)
def test_prose_is_ascii(path: Path):
    assert path.read_text().isascii()


@pytest.mark.parametrize("page", make_costs.PAGES, ids=lambda page: page.path)
def test_costs_are_what_the_records_say(page: make_costs.Page):
    """Run ``python docs/make_costs.py`` after new records."""
    assert page.made() == page.file.read_text(encoding="utf-8")


def test_the_table_is_what_the_records_say():
    """Run ``python docs/make_figures.py`` after new records."""
    text = (ROOT / "README.md").read_text()
    assert make_figures.with_table(text, make_figures.table(read_records(make_figures.RECORDS))) == text


def test_notes_under_the_table_say_what_its_records_say():
    """Changed records change the notes: each number is made, none is written."""
    records = newest(read_records(make_figures.RECORDS))
    before = make_notes.notes(records)
    longer = [replace(r, total_ms=None if r.total_ms is None else 1.5 * r.total_ms) for r in records]
    after = make_notes.notes([replace(r, case=r.case | {"memory": "3GiB"}) for r in longer])
    found = {r.provider: r for r in records if r.case["name"] == "linear-reference-loss"}
    for provider in ("torch", "torch.compile", "verl-kernel", "logitless-loss", "logitless"):
        ms, peak = found[provider].total_ms, format_bytes(found[provider].peak_bytes)
        assert f"{ms:.0f} ms and {peak}" in re.sub(r"\s+", " ", before), provider
        assert f"{1.5 * ms:.0f} ms and {peak}" in re.sub(r"\s+", " ", after), provider
    assert 'memory="2.5GiB"' in before
    assert 'memory="3GiB"' in after


def test_the_whole_step_is_what_its_records_say():
    """Run ``python docs/make_figures.py`` after new records."""
    text = (ROOT / "README.md").read_text()
    records = read_records(make_figures.RECORDS)
    assert make_whole_step.with_readme(text, make_whole_step.read(), records) == text


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


# Commands, options and extras that the documents name.

OURS, MEASURING = (typer.main.get_command(one).commands for one in (app, benchmarks_app))
DEMO = typer.main.get_command(demo_app)
COMMANDS = OURS | MEASURING | {"demo": DEMO}
GLOBAL = {option for param in typer.main.get_command(app).params for option in param.opts} | {"-h", "--help"}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CALLED = re.compile(r"(?<![\w./-])(logitless |-m benchmarks |-m examples\.)((?:--[\w-]+ )*)([a-z]+)([^|\n]*)")
EXTRA = re.compile(r"""(?:logitless|["'. ]\.)\[([a-z]+(?:,[a-z]+)*)\]""")
PROGRAMS = {"logitless ": OURS, "-m benchmarks ": MEASURING, "-m examples.": {"demo"}}
OF_OTHERS = {"--nproc-per-node"}
"""Options of torchrun."""


def options(command: str) -> set[str]:
    return {option for param in COMMANDS[command].params for option in (*param.opts, *param.secondary_opts)} | GLOBAL


def called(text: str) -> list[tuple[str, str, set[str]]]:
    """Every command that the code in a text calls, with the program it is of and its options; prose is left out."""
    blocks = [block for language, block in BLOCK.findall(text) if language in ("", "sh", "text")]
    spans = re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
    code = re.sub(r"#.*", "", "\n".join([*blocks, *spans]).replace("\\\n", " "))
    return [
        (program, name, set(re.findall(r"(?<!\w)--?[a-z][\w-]*", first + rest)))
        for program, first, name, rest in CALLED.findall(code)
    ]


def test_there_are_commands_to_check():
    block = "```sh\nlogitless --debug plan --tokens 5  # logitless is --fast\n```"
    text = f"The `logitless nope --thing` of\n{block}\nlogitless is it.\n```python\nimport logitless as ll\n```"
    assert called(text) == [("logitless ", "plan", {"--debug", "--tokens"}), ("logitless ", "nope", {"--thing"})]
    assert called("`python -m benchmarks bench --list`, `torchrun -m examples.demo --tp 2`") == [
        ("-m benchmarks ", "bench", {"--list"}),
        ("-m examples.", "demo", {"--tp"}),
    ]
    page = called((ROOT / "docs" / "commands.md").read_text())
    assert {name for _, name, _ in page} >= {"plan", "score", "doctor", "tune", "sweep", "bench", "plot", "demo"}
    assert EXTRA.findall('pip install ".[cli]" or "logitless[cli,score]"') == ["cli", "cli,score"]


@pytest.mark.parametrize("path", DOCS, ids=NAMES)
def test_commands_options_and_extras_exist(path: Path):
    text = path.read_text()
    for program, command, given in called(text):
        assert command in PROGRAMS[program], f"there is no {program}{command}"
        assert given <= options(command) | OF_OTHERS, f"logitless {command} has no {given - options(command)}"
    for extras in EXTRA.findall(text):
        assert set(extras.split(",")) <= set(EXTRAS), f"there is no extra {extras}"


def test_the_page_of_commands_has_their_options_and_no_others():
    text = (ROOT / "docs" / "commands.md").read_text()
    sections = re.split(r"^## (\w+)$", text, flags=re.MULTILINE)
    pages = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert set(pages) == set(COMMANDS)
    for command, page in pages.items():
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page))
        assert named <= options(command) | OF_OTHERS, f"logitless {command} has no {named - options(command)}"
    # The table at the top says what each command needs.
    needs = dict(re.findall(r"^\| \[`(\w+)`\]\(#\w+\) \| `\[(\w+)\]` \|", sections[0], re.MULTILINE))
    assert needs == {**dict.fromkeys(("plan", "doctor", "tune"), "cli"), "score": "score"}


def test_every_extra_that_brings_a_command_brings_the_command_line():
    """The one answer to how to get the command, in the documents and in the error of an installation without it."""
    assert "logitless[cli]" in EXTRAS["score"]
    assert {re.split(r"\W", need)[0] for need in EXTRAS["cli"]} == {"typer", "rich"}
    for name in ("README.md", "docs/quickstart.md", "docs/commands.md"):
        (line, *_) = [line for line in (ROOT / name).read_text().splitlines() if "the `logitless` command" in line]
        assert EXTRA.findall(line) == ["cli"], f"{name}: {line}"
    assert "its extra [cli]" in (ROOT / "src/logitless/tools/cli/__init__.py").read_text()


def test_extras_that_errors_name_exist():
    """They name the extra, and no command: where the package comes from is not theirs to know."""
    text = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert set(re.findall(r"extra \[(\w+)\]", text)) == {"triton", "cli", "score"}
    assert "pip install 'logitless" not in text.replace('"', "'")
