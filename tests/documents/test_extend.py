"""The page that adds a statistic, a reading and a host: its changes, made in a copy of the source, do what it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extend.md").read_text()
STEP = re.compile(r"(?:<!-- (file|change): (\S+) -->\n)?^```(py|diff)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def changed(text: str, change: str) -> str:
    """The text with a change made where its context is, which must be in one place."""
    lines = change.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    assert text.count(before) == 1, f"the page changes what is not there once:\n{before}"
    return text.replace(before, after)


def walk(package: Path, steps: list[tuple[str, str, str, str]]) -> str:
    """The page's steps in a package; what is left is its checks, as one program."""
    program = []
    for kind, name, _, code in steps:
        path = package / name
        if kind == "file":
            assert not path.exists()
            path.write_text(code)
        elif kind == "change":
            path.write_text(changed(path.read_text(), code))
        else:
            program.append(code)
    return "\n".join(program)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    def run(steps: list[tuple[str, str, str, str]]) -> subprocess.CompletedProcess[str]:
        folder = tmp_path_factory.mktemp("extended")
        shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "page.py").write_text(walk(folder / "src" / "logitless", steps))
        env = {**os.environ, "PYTHONPATH": str(folder / "src")}
        command = [sys.executable, "page.py"]
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)

    return run


def test_the_page_works_as_it_stands(run):
    done = run(STEP.findall(PAGE))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "toyrl" in done.stdout


def test_a_wrong_step_is_noticed(run):
    """A gradient without its share at the target."""
    wrong = "at_target=at_target, square=square"
    steps = [(*rest, code.replace(wrong, "square=square")) for *rest, code in STEP.findall(PAGE)]
    assert wrong in PAGE
    done = run(steps)
    assert done.returncode != 0
    assert "Tensor-likes are not close" in done.stderr


def test_every_step_is_found():
    kinds = [kind for kind, *_ in STEP.findall(PAGE)]
    assert (kinds.count("file"), kinds.count("change")) == (2, 8)
    assert kinds.count("") >= 5
