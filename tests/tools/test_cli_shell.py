"""What the command does for whoever sits at a shell: completes words, colours, JSON, and how long it will take."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import typer

from benchmarks.commands import app as benchmarks_app
from examples.demo.__main__ import app as demo_app
from logitless.tools.cli import app, shared
from logitless.tools.presets import CARDS, PRESETS

RUN = "import sys, logitless.tools.cli as cli; sys.argv = ['logitless']; cli.main()"


def completed(line: str, monkeypatch) -> list[str]:
    """What bash would offer at the end of the line."""
    words = line.split(" ")
    monkeypatch.setenv("_LOGITLESS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("logitless ", ["plan", "score", "doctor", "tune"]),
        ("logitless plan --model qwen3-", [name for name in PRESETS if name.startswith("qwen3-")]),
        ("logitless plan --model qwen3-8b --card h1", [name for name in CARDS if name.startswith("h1")]),
        ("logitless plan --response", ["--response-fraction"]),
        ("logitless plan --model no-such", []),
    ],
)
def test_a_shell_completes(line: str, offered: list[str], monkeypatch):
    assert completed(line, monkeypatch) == offered


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [100.0]
    monkeypatch.setattr(shared.time, "monotonic", lambda: now[0])
    return now


def test_lines_say_the_time_that_is_left(clock, capsys):
    """From the steps that are done, once a minute has gone by."""
    with shared.progress(11) as step:
        step("one")
        clock[0] += 60
        step("two")
        clock[0] += 60
        step("three")
        clock[0] += 480
        step("four")
    lines = capsys.readouterr().err.splitlines()
    # Two steps in two minutes, nine to go; then three in ten minutes, eight to go.
    assert lines == ["one", "two", "three (about 9 min left)", "four (about 27 min left)"]


def test_a_bar_says_the_time_that_is_left(capsys, monkeypatch):
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    with shared.progress(3) as step:
        step("one")
        step("two")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert re.search(r"1/3 0:00:\d\d left -:--:-- one", text) or re.search(r"1/3 0:00:\d\d left 0:00:\d\d one", text)
    assert re.search(r"2/3 0:00:\d\d left 0:00:\d\d two", text)


def test_every_command_answers_in_json():
    commands = [typer.main.get_command(demo_app)]
    for one in (app, benchmarks_app):
        commands += typer.main.get_command(one).commands.values()
    assert len(commands) == 8
    assert [x.name for x in commands if not any("--json" in param.opts for param in x.params)] == []


def test_colours_are_for_terminals(capsys, monkeypatch):
    """Not where text is piped, and not where NO_COLOR says so."""
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    shared.console().print("piped", style="green")
    monkeypatch.setenv("FORCE_COLOR", "1")
    shared.console().print("seen", style="green")
    monkeypatch.setenv("NO_COLOR", "1")
    shared.console().print("plain", style="green")
    piped, seen, plain = capsys.readouterr().out.splitlines()
    assert (piped, seen) == ("piped", "\x1b[32mseen\x1b[0m")
    assert "[32m" not in plain


DOCTOR = """
import sys, logitless.tools.cli as cli
from logitless.tools import doctor
versions = {f"package {i}": "1.0" for i in range(9999)}
doctor.examine = lambda device, head: doctor.Findings(versions, "cpu", "", (), (), (), ())
sys.argv = ["logitless", "doctor", "--device", "cpu", *sys.argv[1:]]
cli.main()
"""


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_leaves_is_no_backend_that_is_wrong(options: list[str]):
    """``doctor | head -1``: more text than a pipe holds, of which one line is read."""
    command = [sys.executable, "-c", DOCTOR, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait() == 141
        assert process.stderr.read() == ""


def test_a_reader_that_left_before_is_told_when_the_text_is_flushed():
    """Text shorter than the buffer is written in the end."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", DOCTOR.replace("9999", "2"), "--json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
