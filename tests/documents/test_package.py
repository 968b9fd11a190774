"""What is built is what was tested: the wheel has the files of src, bytes and all, and its page has links that work.

``make smoke`` tries the wheel in an environment for each extra; that takes minutes and is a job of its own.
"""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import logitless

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parents[1] / "smoke"), str(ROOT / "docs")]

import inside  # noqa: E402
from fold_changelog import folded  # noqa: E402

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
REPOSITORY = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
NAME = f"logitless-{logitless.__version__}"
LINK = re.compile(r"""\]\(([^)\s]+)\)|(?:src|srcset|href)="([^"]+)\"""")


def build(what: str, source: Path, out: Path) -> Path:
    """Wheel or source distribution of a source tree, by the backend that pyproject.toml names, with nothing fetched."""
    pytest.importorskip("hatchling", reason="make installs it, with the other packages of [dev]")
    program = f"from hatchling.build import {what} as build; print(build({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    archive = build("build_sdist", ROOT, folder)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return archive, build("build_wheel", folder / NAME, folder)


def test_the_build_backend_is_installed_with_the_tools():
    assert any(need.startswith("hatchling") for need in PROJECT["optional-dependencies"]["dev"])
    assert PYPROJECT["build-system"]["build-backend"] == "hatchling.build"


def test_the_wheel_has_the_files_of_the_source(built: tuple[Path, Path]):
    files = {path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    with zipfile.ZipFile(built[1]) as wheel:
        found = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == {str(path.relative_to(ROOT / "src")): path.read_bytes() for path in files}
    assert "logitless/py.typed" in found
    assert {name.split("/")[0] for name in found} == {"logitless"}


def test_the_wheel_answers_for_itself(built: tuple[Path, Path], tmp_path: Path):
    """Unpacked as an installer does it, it is what the command runs, and it knows its version."""
    with zipfile.ZipFile(built[1]) as wheel:
        wheel.extractall(tmp_path)
        entries = wheel.read(f"{NAME}.dist-info/entry_points.txt").decode()
    assert "logitless = logitless.tools.cli:main" in entries
    assert "logitless = logitless.provider:get" in entries
    program = "import logitless; print(logitless.__file__, flush=True); from logitless.tools.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--version"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    place, said = done.stdout.split("\n", 1)
    assert place == str(tmp_path / "logitless" / "__init__.py")
    assert logitless.__version__ in said


def test_a_checkout_installed_with_e_has_its_benchmarks_and_examples(tmp_path: Path):
    """Nothing else makes ``python docs/make_figures.py`` find the package that draws."""
    with zipfile.ZipFile(build("build_editable", ROOT, tmp_path)) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".pth")]
        folders = {Path(line) for line in wheel.read(name).decode().split()}
    assert folders == {ROOT / "src", ROOT}


def test_the_page_of_the_package_has_links_that_work(built: tuple[Path, Path]):
    with zipfile.ZipFile(built[1]) as wheel:
        metadata = email.message_from_bytes(wheel.read(f"{NAME}.dist-info/METADATA"))
    assert metadata["Version"] == logitless.__version__
    urls = dict(value.split(", ") for value in metadata.get_all("Project-URL", []))
    assert urls["Repository"] == REPOSITORY
    assert {"Documentation", "Changelog", "Issues"} <= set(urls)
    text = metadata.get_payload()
    assert re.findall(r"pip install (\S+)", text)[:3] == ["logitless", '"logitless[triton]"', '"logitless[cli]"']
    links = [one or other for one, other in LINK.findall(text)]
    ours = [link for link in links if link.startswith(REPOSITORY)]
    assert len(ours) > 20
    assert [link for link in links if not link.startswith("https://")] == []
    for link in ours:
        kind, tag, path = link.removeprefix(REPOSITORY + "/").split("/", 2)
        assert (kind == "raw") == path.endswith(".png"), link
        assert tag == f"v{logitless.__version__}"
        assert (ROOT / path.partition("#")[0]).exists(), link


def test_the_source_distribution_can_be_tested(built: tuple[Path, Path]):
    with tarfile.open(built[0]) as tar:
        found = {name.removeprefix(f"{NAME}/") for name in tar.getnames()}
    wanted = {
        "Makefile",
        "constraints.txt",
        "hatch_build.py",
        "CITATION.cff",
        ".ci/run",
        "tests/conftest.py",
        "LICENSE",
    }
    assert wanted | {".github/workflows/release.yml", "docs/index.md"} <= found
    assert {"benchmarks/bench/cases.py", "benchmarks/commands.py", "examples/demo/run.py"} <= found
    assert not [name for name in found if "__pycache__" in name or name.startswith(("out/", "site/", ".venv"))]


def test_nothing_but_the_settings_names_the_repository():
    """So that a fork or a move changes one line; the version likewise is written down once."""
    files = [
        *ROOT.glob("*.*"),
        *(ROOT / ".github").rglob("*.*"),
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("docs/*.py"),
    ]
    files += [path for path in (ROOT / "src").rglob("*.py")]
    assert [path.name for path in files if path.is_file() and REPOSITORY in path.read_text()] == ["pyproject.toml"]
    version = re.compile(rf"^(?:__)?version(?:__)?\s*[:=].*{re.escape(logitless.__version__)}", re.MULTILINE)
    assert [path.name for path in files if path.is_file() and version.search(path.read_text())] == ["__init__.py"]


def test_the_newest_release_of_the_changelog_is_this_version():
    """A release is a tag away: its section has a date, and what comes later has a place above it."""
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(logitless.__version__)} - 20\d\d-\d\d-\d\d", headings[1])


def test_a_release_takes_what_is_unreleased_heading_by_heading():
    """Into a section that was prepared, or into one of its own; of this changelog no entry is lost."""
    today, new = "2026-11-17", "### Added\n\n- a\n\n### Fixed\n\n- c"
    text = f"# Log\n\n## Unreleased\n\n{new}\n\n## 0.1.0 - 2020-01-01\n\nFirst.\n\n### Added\n\n- b\n"
    prepared = (
        f"# Log\n\n## Unreleased\n\n## 0.1.0 - {today}\n\nFirst.\n\n### Added\n\n- a\n\n- b\n\n### Fixed\n\n- c\n"
    )
    assert folded(text, "0.1.0", today) == prepared
    own = folded(text, "0.2.0", today)
    assert own.startswith(f"# Log\n\n## Unreleased\n\n## 0.2.0 - {today}\n\n{new}\n\n## 0.1.0 -")
    assert folded(prepared, "0.1.0", today) == prepared
    with pytest.raises(AssertionError, match="Mended"):
        folded(text.replace("Fixed", "Mended"), "0.1.0", today)
    ours = (ROOT / "CHANGELOG.md").read_text()
    lines = re.compile(r"^- .+$", re.MULTILINE)
    assert sorted(lines.findall(folded(ours, "0.1.0", today))) == sorted(lines.findall(ours))


def test_every_extra_of_users_is_tried_by_make_smoke():
    assert set(inside.CHECKS) == {"none", *PROJECT["optional-dependencies"]} - {"dev", "docs"}
