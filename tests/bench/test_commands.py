"""``python -m benchmarks``: what it prints, what it leaves behind, and what it says when something is missing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.bench.records import records_folder
from benchmarks.commands import app, main
from logitless.tools.outputs import default_folder

ROOT = Path(__file__).parents[2]
BENCH = ["bench", "--device", "cpu", "--repeats", "1", "--provider", "torch", "--provider", "logitless*"]


@pytest.fixture(autouse=True)
def _small_bandwidth_buffer(monkeypatch):
    monkeypatch.setattr("logitless.tools.stopwatch.CPU_COPY_BYTES", 1 << 20)


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result


def python(code):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def run_main(monkeypatch, capsys):
    """What :func:`main` ends with, as the shell sees it: its exit code, and what it said on stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, capsys.readouterr().err.removesuffix("\n")

    return run


def test_bench_then_plot(tmp_path):
    out = tmp_path / "cpu.jsonl"
    result = invoke(*BENCH, "--case", "smoke-fp32-grad", "--out", out)
    assert "logitless-overwrite  + entropy grad" in result.stdout
    drawn = json.loads(invoke("plot", out, "--out", tmp_path, "--json").stdout)
    names = sorted(path.name for path in tmp_path.glob("*.png"))
    assert names == [f"cpu-{what}-{style}.png" for what in ("memory", "time") for style in ("dark", "light")]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in tmp_path.glob("*.png"))
    assert sorted(drawn) == [str(tmp_path / name) for name in names]


def test_bench_as_json(tmp_path):
    result = invoke(*BENCH, "--case", "smoke-fp32-forward", "--out", tmp_path / "x.jsonl", "--json")
    records = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [r["provider"] for r in records] == ["torch", "logitless", "logitless-overwrite"]


def test_list_measures_nothing():
    assert "reference-fp32-grad-peaked" in invoke("bench", "--list").stdout
    listed = json.loads(invoke("bench", "--list", "--json").stdout)
    assert {"name": "torch", "from": "logits", "computes": "entropy grad", "cuda_only": False} in listed["providers"]
    (case,) = [case for case in listed["cases"] if case["name"] == "smoke-fp32-grad"]
    assert case["backward"] is True


def test_a_bad_name_is_one_line(run_main):
    code, text = run_main("bench", "--device", "cpu", "--case", "nope")
    assert code == 2
    assert text.startswith("python -m benchmarks: bench: no case matches 'nope'.")
    assert "\n" not in text


@pytest.mark.parametrize("command", [(), ("bench",), ("sweep",), ("plot",)])
def test_help_reads_at_80_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = invoke(*command, "--help")
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    if not command:
        assert all(f" {name} " in result.stdout for name in ("bench", "sweep", "plot"))


def test_an_unexpected_error_is_one_line_unless_debugging(monkeypatch, run_main):
    def broken():
        raise KeyError("lost\nand more")

    monkeypatch.setattr("benchmarks.bench.run.listing", broken)
    code, text = run_main("bench", "--list")
    assert code == 3
    assert text.startswith("python -m benchmarks: KeyError: ")
    assert text.endswith("(python -m benchmarks --debug shows where)")
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--debug", "bench", "--list"])
    with pytest.raises(KeyError):
        main()


def test_the_modules_run_from_the_top_of_a_checkout_without_an_installation():
    """Nothing but the folder that they are started in, and the package's, is needed to import them."""
    for module, said in (("benchmarks", "bench"), ("benchmarks.bench", "--base"), ("examples.demo", "--steps")):
        ran = subprocess.run(
            [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        assert said in ran.stdout


def test_records_that_are_not_there_or_torn_are_named(tmp_path, run_main):
    file = tmp_path / "records.jsonl"
    assert run_main("plot", file) == (
        2,
        f"python -m benchmarks: there is no file of records {file}. Give one that bench or sweep wrote.",
    )
    for content, said in (("\n", "holds no records"), ('{"case": 1}\n', "line 1 is no record"), ("\n{", "line 2 is")):
        file.write_text(content)
        code, text = run_main("plot", file)
        assert code == 2
        assert said in text
        assert str(file) in text


def test_no_command_writes_into_the_folder_it_is_started_in(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with monkeypatch.context() as moved:
        moved.chdir(elsewhere)
        assert default_folder() == records_folder() == tmp_path / "cache" / "logitless"
        invoke(*BENCH, "--case", "smoke-fp32-forward")
        invoke("plot", records_folder() / "cpu.jsonl")
    assert list(elsewhere.iterdir()) == []
    assert len(list((tmp_path / "cache" / "logitless").glob("cpu-*.png"))) == 4
    monkeypatch.chdir(ROOT)
    assert (default_folder(), records_folder()) == (Path("out"), Path("benchmarks/results"))


def test_import_needs_none_of_the_extras():
    code = "import sys, benchmarks.bench.__main__; print({'typer', 'rich', 'matplotlib'} & set(sys.modules))"
    assert python(code).stdout.strip() == "set()"
