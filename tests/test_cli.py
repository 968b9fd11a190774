"""The command line: what it prints, what it leaves behind, and what it says when something is missing."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from logitless import demo
from logitless.bench.measure import Errors
from logitless.cli import app, main

BENCH = ["bench", "--device", "cpu", "--repeats", "1", "--provider", "torch", "--provider", "logitless*"]


@pytest.fixture(autouse=True)
def _small_bandwidth_buffer(monkeypatch):
    monkeypatch.setattr("logitless.bench.measure.CPU_COPY_BYTES", 1 << 20)


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_bench_then_plot(tmp_path):
    out = tmp_path / "cpu.jsonl"
    result = invoke(*BENCH, "--case", "smoke-fp32-grad", "--out", out)
    assert "logitless-overwrite  + entropy grad" in result.stdout
    invoke("plot", out, "--out", tmp_path)
    names = sorted(path.name for path in tmp_path.glob("*.png"))
    assert names == [f"cpu-{what}-{style}.png" for what in ("memory", "time") for style in ("dark", "light")]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in tmp_path.glob("*.png"))


def test_bench_as_json(tmp_path):
    result = invoke(*BENCH, "--case", "smoke-fp32-forward", "--out", tmp_path / "x.jsonl", "--json")
    records = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [r["provider"] for r in records] == ["torch", "logitless", "logitless-overwrite"]


def test_list_measures_nothing():
    assert "reference-fp32-grad-peaked" in invoke("bench", "--list").stdout


def test_a_bad_name_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["logitless", "bench", "--device", "cpu", "--case", "nope"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert str(stop.value).startswith("logitless: bench: no case matches 'nope'.")
    assert "\n" not in str(stop.value)


def test_demo_prints_a_table_a_verdict_and_saves_a_figure(tmp_path, monkeypatch):
    small = demo.run_demo
    monkeypatch.setattr(demo, "run_demo", lambda report: small(report, (20, 9), (12, 7), 301))
    result = invoke("demo", "--out", tmp_path / "new" / "demo.png")
    assert "2 samples packed into 48 tokens, 19 of them response (40%)" in result.stdout
    assert "logitless, overwriting" in result.stdout
    assert "Writing the gradient over the logits, logitless needs" in result.stdout
    assert (tmp_path / "new" / "demo.png").stat().st_size > 1000


def test_the_verdict_follows_the_numbers():
    def verdict(seconds, peak, error):
        errors = Errors(error, error, error, error)
        plain = demo.Outcome("plain torch", 1.0, 1000, Errors(1e-6, 1e-6, 1e-6, 1e-6))
        return demo.verdict([plain, plain, demo.Outcome("logitless, overwriting", seconds, peak, errors)])

    assert "(10.0x less), is 2.0x faster, and its worst result is 4.0x closer" in verdict(0.5, 100, 0.25e-6)
    assert "(2.0x more), is 4.0x slower, and its worst result is 3.0x further" in verdict(4.0, 2000, 3e-6)
    assert "neither faster nor slower" in verdict(1.01, 100, 1e-6)


def test_without_typer_one_line_says_what_to_install():
    run = python("import sys; sys.modules['typer'] = None; import logitless.cli")
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1].startswith("logitless: ")
    assert "pip install 'logitless[bench]'" in run.stderr
    assert "Traceback" not in run.stderr


def test_import_needs_none_of_the_extras():
    code = "import sys, logitless, logitless.bench.__main__; print({'typer', 'rich', 'matplotlib'} & set(sys.modules))"
    assert python(code).stdout.strip() == "set()"
