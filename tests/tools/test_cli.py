"""The command line: what it prints, what it leaves behind, and what it says when something is missing."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import logitless
from logitless.errors import LogitlessError
from logitless.tools.cli import app, main
from logitless.tools.outputs import default_folder, text_table

ROOT = Path(__file__).parents[2]


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.fixture
def run_main(monkeypatch, capsys):
    """What :func:`main` ends with, as the shell sees it: its exit code, and what it said on stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["logitless", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, capsys.readouterr().err.removesuffix("\n")

    return run


def test_version_and_help_come_at_once_without_torch():
    """Measured without other work: 0.2 s, where torch alone takes 2."""
    for arguments, said in ((["--version"], f"logitless {logitless.__version__}"), (["plan", "-h"], "--response-frac")):
        code = (
            "import sys, logitless.tools.cli as cli\n"
            f"sys.argv = ['logitless', *{arguments!r}]\n"
            "try: cli.main()\n"
            "finally: print('loaded', *{'torch', 'numpy', 'triton'} & set(sys.modules))"
        )
        lines = python(code).stdout.splitlines()
        assert said in "\n".join(lines)
        assert lines[-1] == "loaded"


def test_flags_have_no_type_and_other_options_do():
    lines = invoke("plan", "--help").stdout.splitlines()
    assert any(line.startswith("  --full  ") for line in lines)
    assert any(line.startswith("  --tp <int>") for line in lines)
    assert "bool" not in "".join(lines)


@pytest.mark.parametrize("command", [(), ("plan",), ("score",), ("doctor",), ("tune",)])
def test_help_reads_at_80_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = invoke(*command, "--help")
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    if not command:
        assert all(f" {name} " in result.stdout for name in ("plan", "score", "doctor", "tune"))
        assert not any(f" {name} " in result.stdout for name in ("sweep", "bench", "plot", "demo"))
        assert "without paying for the logits" in result.stdout


PLAN = ["plan", "--model", "qwen3-8b", "--tokens", 32768, "--response-fraction", 0.5]


def test_plan_prints_ways_items_and_a_call():
    """The answer comes first, then the code, then why."""
    arguments = [*PLAN, "--tp", 2, "--dtype", "bf16", "--card", "h100-80g", "--in-use", "60GiB"]
    result = invoke(*arguments, "--full")
    answer, _, rest = result.stdout.partition("\n\n")
    code, _, why = rest.partition("\nWhy\n")
    assert answer.startswith(
        'Write policy_loss(ll.Logits(hidden, weight), ..., memory="1GiB"): 3 matrix products, peak '
    )
    assert "\nMicro-batch: 32,768 tokens fit; the largest that fits has " in answer
    *brief, hint = invoke(*arguments).stdout.strip().splitlines()
    assert "\n".join(brief) == answer
    assert hint.startswith("With --full: ")
    compile(code, "plan", "exec")
    for text in ("plain torch", "slime-style", "logprobs of Logits", "most tokens", "d_weight [75968, 4096]"):
        assert text in why


def test_a_pipe_gets_sentences_in_one_line():
    lines = invoke(*PLAN, "--full").stdout.splitlines()
    (route,) = [line for line in lines if line.startswith("one pass: 3 matrix products")]
    assert len(route) > 80
    assert route.endswith(" written by the product itself.")


def test_the_page_of_commands_shows_what_plan_answers():
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    (words,) = re.findall(r"^logitless (plan .+)$", page, re.MULTILINE)
    said = invoke(*words.split(), "--full").stdout
    shown = re.findall(r"```text\n(Write .+?|way .+?)```", page, re.DOTALL)
    assert len(shown) == 2
    for text in shown:
        assert text in said


def test_plan_as_json_and_its_exit_code(run_main):
    answer = json.loads(invoke(*PLAN, "--json").stdout)
    assert answer["step"]["rows"] == 16384
    assert answer["free"] is None
    busy = json.loads(invoke(*PLAN, "--json", "--card", "80GiB", "--in-use", "60GiB").stdout)
    assert busy["free"] == 20 << 30
    assert busy["call"]["peak"] <= 20 << 30
    assert run_main(*PLAN, "--json", "--card", "80GiB", "--in-use", "79.99GiB")[0] == 1
    assert run_main(*PLAN, "--json", "--card", "80GiB")[0] == 0
    assert run_main(*PLAN, "--card", "1MiB")[0] == 1
    assert run_main(*PLAN, "--card", "nothing")[0] == 2
    code, text = run_main(*PLAN, "--in-use", "60GiB")
    assert (code, "there is no --card" in text) == (2, True)
    for used in ("80GiB", "90GiB"):
        code, text = run_main(*PLAN, "--card", "80GiB", "--in-use", used)
        assert (code, "nothing is left for the step" in text) == (2, True)


def test_plan_imports_nothing_heavy():
    code = (
        "import sys; from typer.testing import CliRunner; from logitless.tools.cli import app;"
        "r = CliRunner().invoke(app, ['plan', '--model', 'gemma2-9b', '--tokens', '8192']); assert r.exit_code == 0;"
        "print({'transformers', 'matplotlib', 'triton', 'pyarrow', 'datasets'} & set(sys.modules))"
    )
    assert python(code).stdout.strip() == "set()"


def test_doctor_says_whether_all_is_well(monkeypatch, run_main):
    from logitless.tools import doctor

    monkeypatch.setattr(doctor, "NAMES", ("tiled",))
    monkeypatch.setattr(doctor, "HOSTS", ("transformers",))
    result = invoke("doctor", "--device", "cpu")
    assert "All that runs here is exact." in result.stdout
    assert json.loads(invoke("doctor", "--device", "cpu", "--json").stdout)["ok"] is True
    monkeypatch.setattr(doctor, "VALUE_TOLERANCE", 1e-12)
    assert run_main("doctor", "--device", "cpu")[0] == 1


def test_score_prints_a_summary(tmp_path, run_main):
    """What is scored is tested in test_score; here a job that has nothing to score."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "in.jsonl").write_text("")
    arguments = ["score", tmp_path, tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "--device", "cpu"]
    assert "out.jsonl: 0 records" in invoke(*arguments).stdout
    summary = json.loads(invoke(*arguments, "--json").stdout)
    assert (summary["records"], summary["scored_tokens"]) == (0, 0)
    said = "logitless: score: temperature must be a positive finite number but is 0.0."
    assert run_main(*arguments, "--temperature", 0) == (2, said)


def test_an_error_is_one_line_unless_debugging(monkeypatch, run_main):
    code, text = run_main("plan", "--model", "nope", "--tokens", 5)
    assert code == 2
    assert text.startswith("logitless: plan: model must be a config.json")
    monkeypatch.setattr(sys, "argv", ["logitless", "--debug", "plan", "--model", "nope", "--tokens", "5"])
    with pytest.raises(LogitlessError):
        main()


def test_an_unexpected_error_is_one_line_too(monkeypatch, run_main):
    def broken(*args):
        raise KeyError("lost\nand more")

    monkeypatch.setattr("logitless.tools.presets.find_model", broken)
    code, text = run_main(*PLAN)
    assert code == 3
    assert text.startswith("logitless: KeyError: ")
    assert text.endswith("(logitless --debug shows where)")
    assert "\n" not in text


@pytest.mark.parametrize("command", ["demo", "bench", "sweep", "plot"])
def test_a_command_that_only_a_checkout_has_says_where_it_is(command, run_main):
    code, text = run_main(command, "--device", "cpu")
    assert code == 2
    assert text.startswith(f"logitless: {command} is not in the installed package. In a checkout of the project, run ")
    (module,) = re.findall(r"run python -m ([\w.]+)", text)
    assert (ROOT / module.replace(".", "/") / "__main__.py").is_file()


def test_wrong_usage_is_exit_code_2(run_main):
    assert run_main("plan", "--tokens", "many")[0] == 2


def test_without_out_files_go_to_the_cache_or_to_out_of_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with monkeypatch.context() as moved:
        moved.chdir(tmp_path)
        assert default_folder() == tmp_path / "cache" / "logitless"
    monkeypatch.chdir(ROOT)
    assert default_folder() == Path("out")


@pytest.mark.parametrize(
    ("device", "text"), [("tpu", 'device must be "cpu", "cuda"'), ("cuda:9", "torch sees no CUDA device")]
)
def test_a_bad_device_is_named(device, text, monkeypatch, run_main):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert text in run_main("doctor", "--device", device)[1]


@pytest.mark.parametrize("rich", [True, False])
def test_tables_of_few_rows_and_of_none(rich, monkeypatch):
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.box", None)
    assert text_table((), []) == ""
    assert text_table(("way", "peak"), []) == ("way  peak\n---- ----" if rich else "way\tpeak")
    assert text_table((), [("ours", "runs"), ("a", "b")]) == ("ours  runs\na     b" if rich else "ours\truns\na\tb")


def test_tables_print_every_character_and_numbers_to_the_right():
    table = text_table(("what", "how many"), [("[red]:smile:[/red]", "4 B"), ("b", "none")])
    assert table.splitlines() == [
        "what                how many",
        "------------------- --------",
        "[red]:smile:[/red]       4 B",
        "b                       none",
    ]
    assert text_table((), [("b", "4 B"), ("c", "12345 B")]).splitlines() == ["b  4 B", "c  12345 B"]
    assert text_table(("way", "peak"), [("a", "b")]).splitlines()[-1] == "a    b"


def test_without_typer_one_line_says_what_to_install():
    run = python("import sys; sys.modules['typer'] = None; import logitless.tools.cli")
    assert run.returncode == 2
    assert run.stderr.strip().splitlines()[-1].startswith("logitless: ")
    assert "its extra [cli]" in run.stderr
    assert "Traceback" not in run.stderr
