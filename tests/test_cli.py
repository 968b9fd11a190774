"""The command line: what it prints, what it leaves behind, and what it says when something is missing."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from logitless.errors import LogitlessError
from logitless.tools.cli import app, main

BENCH = ["bench", "--device", "cpu", "--repeats", "1", "--provider", "torch", "--provider", "logitless*"]


@pytest.fixture(autouse=True)
def _small_bandwidth_buffer(monkeypatch):
    monkeypatch.setattr("logitless.tools.bench.measure.CPU_COPY_BYTES", 1 << 20)


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


def test_a_bad_name_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["logitless", "bench", "--device", "cpu", "--case", "nope"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert str(stop.value).startswith("logitless: bench: no case matches 'nope'.")
    assert "\n" not in str(stop.value)


def run_main(monkeypatch, *arguments):
    """What :func:`main` ends with, as the shell sees it."""
    monkeypatch.setattr(sys, "argv", ["logitless", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code


@pytest.mark.parametrize("command", [(), ("plan",), ("score",), ("doctor",), ("bench",), ("plot",), ("demo",)])
def test_help_reads_at_80_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = invoke(*command, "--help")
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    if not command:
        assert all(f" {name} " in result.stdout for name in ("plan", "score", "doctor", "bench", "plot", "demo"))
        assert "without paying for the logits" in result.stdout


PLAN = ["plan", "--model", "qwen3-8b", "--tokens", 32768, "--response-fraction", 0.5]


def test_plan_prints_ways_items_and_a_call():
    result = invoke(*PLAN, "--tp", 2, "--card", "h100-80g", "--in-use", "60GiB")
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    for text in ("plain torch", "slime-style", "linear_logprobs", "most tokens", "d_weight [75968, 4096]"):
        assert text in result.stdout
    code = result.stdout[result.stdout.index("import logitless as ll") :]
    compile(code, "plan", "exec")


def test_plan_as_json_and_its_exit_code(monkeypatch):
    answer = json.loads(invoke(*PLAN, "--json").stdout)
    assert answer["step"]["rows"] == 16384
    assert answer["free"] is None
    busy = json.loads(invoke(*PLAN, "--json", "--card", "80GiB", "--in-use", "60GiB").stdout)
    assert busy["free"] == 20 << 30
    assert busy["call"]["peak"] <= 20 << 30
    assert run_main(monkeypatch, *PLAN, "--json", "--card", "80GiB", "--in-use", "79.99GiB") == 1
    assert run_main(monkeypatch, *PLAN, "--json", "--card", "80GiB") == 0
    assert run_main(monkeypatch, *PLAN, "--json", "--card", "1MiB") == 1


def test_plan_imports_nothing_heavy():
    code = (
        "import sys; from typer.testing import CliRunner; from logitless.tools.cli import app;"
        "r = CliRunner().invoke(app, ['plan', '--model', 'gemma2-9b', '--tokens', '8192']); assert r.exit_code == 0;"
        "print({'transformers', 'matplotlib', 'triton', 'pyarrow', 'datasets'} & set(sys.modules))"
    )
    assert python(code).stdout.strip() == "set()"


def test_doctor_says_whether_all_is_well(monkeypatch):
    from logitless.tools import doctor

    monkeypatch.setattr(doctor, "NAMES", ("tiled",))
    monkeypatch.setattr(doctor, "HOSTS", ("transformers",))
    result = invoke("doctor", "--device", "cpu")
    assert "All that runs here is exact." in result.stdout
    assert json.loads(invoke("doctor", "--device", "cpu", "--json").stdout)["ok"] is True
    monkeypatch.setattr(doctor, "VALUE_TOLERANCE", 1e-12)
    assert run_main(monkeypatch, "doctor", "--device", "cpu") == 1


def test_score_prints_a_summary(tmp_path, monkeypatch):
    """What is scored is tested in test_score; here a job that has nothing to score."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "in.jsonl").write_text("")
    arguments = ["score", tmp_path, tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "--device", "cpu"]
    assert "out.jsonl: 0 records" in invoke(*arguments).stdout
    summary = json.loads(invoke(*arguments, "--json").stdout)
    assert (summary["records"], summary["scored_tokens"]) == (0, 0)
    text = run_main(monkeypatch, *arguments, "--temperature", 0)
    assert text == "logitless: score: temperature must be a positive finite number but is 0.0."


def test_an_error_is_one_line_unless_debugging(monkeypatch):
    text = run_main(monkeypatch, "plan", "--model", "nope", "--tokens", 5)
    assert text.startswith("logitless: plan: model must be a config.json")
    monkeypatch.setattr(sys, "argv", ["logitless", "--debug", "plan", "--model", "nope", "--tokens", "5"])
    with pytest.raises(LogitlessError):
        main()


def test_an_unexpected_error_is_one_line_too(monkeypatch):
    def broken(*args):
        raise KeyError("lost\nand more")

    monkeypatch.setattr("logitless.tools.presets.find_model", broken)
    text = run_main(monkeypatch, *PLAN)
    assert text.startswith("logitless: KeyError: ")
    assert text.endswith("(logitless --debug shows where)")
    assert "\n" not in text


def test_wrong_usage_is_exit_code_2(monkeypatch):
    assert run_main(monkeypatch, "plan", "--tokens", "many") == 2


@pytest.mark.parametrize(
    ("device", "text"), [("tpu", 'device must be "cpu", "cuda"'), ("cuda:9", "torch sees no CUDA device")]
)
def test_a_bad_device_is_named(device, text, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert text in run_main(monkeypatch, "doctor", "--device", device)


def test_without_typer_one_line_says_what_to_install():
    run = python("import sys; sys.modules['typer'] = None; import logitless.tools.cli")
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1].startswith("logitless: ")
    assert "pip install 'logitless[bench]'" in run.stderr
    assert "Traceback" not in run.stderr


def test_import_needs_none_of_the_extras():
    code = "import sys, logitless.tools.bench.__main__; print({'typer', 'rich', 'matplotlib'} & set(sys.modules))"
    assert python(code).stdout.strip() == "set()"
