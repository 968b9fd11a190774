"""The ``sweep`` command: a process per point, records that a kill cannot spoil, and only what is left is measured."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.bench import point as points
from benchmarks.bench import sweep as sweeping
from benchmarks.bench.cases import Case
from benchmarks.bench.point import NO_ROOM, Point, measure_apart, measure_here, outcome
from benchmarks.bench.providers import PROVIDERS, Provider
from benchmarks.bench.records import Environment, read_records
from benchmarks.bench.sweep import Grid, Options, Sweep, choose_providers, resolve_sweep, run_sweep, sweep_table
from benchmarks.commands import app
from logitless import LogitlessError

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
HERE = Environment.here(CPU)
SMALL = ["sweep", "--device", "cpu", "--tokens", "63", "--vocab", "507", "--repeats", "1", "--response", "1,0.25"]


def invoke(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def measured(monkeypatch):
    """Points that were asked for, answered at once by records that look measured."""
    asked = []

    def answer(point, environment):
        asked.append((point.case.response, point.provider))
        record = points.lost_record(point, environment, "ok", "")
        return replace(record, total_ms=point.case.tokens / 1e3, peak_bytes=point.case.logits_bytes, bandwidth=1e9)

    monkeypatch.setattr(sweeping, "measure_apart", answer)
    return asked


def test_a_sweep_that_is_interrupted_leaves_a_valid_file_and_goes_on(tmp_path, monkeypatch):
    """With real processes: Ctrl-C while a point is measured, then the same command again."""
    out = tmp_path / "s.jsonl"
    command = [*SMALL, "--provider", "torch", "--out", str(out)]
    # A shell's background jobs, these tests perhaps among them, ignore SIGINT, and so would their children.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    run = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", *command], cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=heeds
    )
    until = time.monotonic() + 120
    while not (out.exists() and out.read_text().endswith("\n")) and time.monotonic() < until and run.poll() is None:
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    told = run.communicate(timeout=60)[1]
    assert run.returncode == 130
    assert "the same command goes on from there" in told
    assert "Traceback" not in told
    (first,) = read_records(out)
    assert (first.status, first.provider, first.case["response"]) == ("ok", "torch", 1.0)

    asked, real = [], sweeping.measure_apart
    monkeypatch.setattr(sweeping, "measure_apart", lambda p, e: asked.append(p.case.response) or real(p, e))
    # As a kill would leave it: the last line cut off.
    with out.open("a") as file:
        file.write(first.to_json()[:200])
    printed = invoke(*command).stdout
    assert asked == [0.25]
    assert [r.case["response"] for r in read_records(out)] == [1.0, 0.25]
    assert "T=63 V=507 float32, forward + backward, entropy grad" in printed
    assert (tmp_path / "s-light.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "s-dark.png").exists()
    both = [json.loads(line) for line in invoke(*command, "--json").stdout.splitlines() if line.startswith("{")]
    assert asked == [0.25]
    assert [r["peak_bytes"] for r in both] == [r.peak_bytes for r in read_records(out)]
    assert all(r["errors"]["gradient"] < 1e-5 for r in both)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is bounded on Linux only")
def test_a_point_that_needs_more_than_it_may_take_is_recorded_and_ends_alone():
    case = Case("big", "cpu", 64, 1000, entropy="grad")
    record = measure_apart(Point(case, "torch", repeats=1, limit=64 << 20), HERE)
    assert (record.status, record.detail, record.total_ms) == ("out of memory", NO_ROOM, None)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("[enforce fail at x.cpp] DefaultCPUAllocator: can't allocate memory"), "out of memory"),
        (MemoryError("no"), "out of memory"),
        (RuntimeError("something else"), "failed"),
    ],
)
def test_a_provider_that_runs_out_of_memory_on_a_cpu_is_told_from_one_that_fails(error, status, monkeypatch):
    def load():
        def score(batch, logits):
            raise error

        return score

    monkeypatch.setitem(PROVIDERS, "torch", Provider(load))
    monkeypatch.setattr("logitless.tools.stopwatch.CPU_COPY_BYTES", 1 << 20)
    assert measure_here(Point(Case("x", "cpu", 9, 11), "torch", repeats=1)).status == status


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [(-9, "out of memory", "killed"), (-11, "failed", "code -11: it said nothing"), (1, "failed", "code 1: last")],
)
def test_the_end_of_a_process_says_what_became_of_the_point(code, status, text):
    point = Point(Case("x", "cpu", 9, 11), "torch")
    record = outcome(point, HERE, code, "", "first\nlast\n" if code == 1 else "")
    assert record.status == status
    assert text in record.detail
    assert (record.case["name"], record.provider, record.logits_bytes) == ("x", "torch", 9 * 11 * 4)
    assert json.loads(record.to_json())["bandwidth"] is None


def test_a_point_survives_its_way_to_the_child():
    point = Point(Case("x", "cpu", 9, 11, hidden=5, memory="1MiB"), "torch", 2, 77, "peers")
    assert Point.from_json(point.to_json()) == point


def test_a_grid_is_every_combination_under_a_name_of_its_own():
    grid = Grid([8, 16], [100], [1.0, 0.5, 0.125], [None, "grad"], [4, 8], ["1MiB", "2MiB"], "bfloat16")
    cases = grid.cases("cpu")
    assert len({case.name for case in cases}) == len({replace(case, name="") for case in cases}) == 48
    assert cases[0].name == "sweep-t8-v100-d4-bf16-1MiB-logprob-100pct"
    assert cases[-1].name == "sweep-t16-v100-d8-bf16-2MiB-grad-12.5pct"
    assert [case.response for case in cases[:3]] == [1.0, 0.5, 0.125]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (Options(tokens="many"), "tokens must be a list of numbers such as 1024,2048 but is 'many'"),
        (Options(entropy="some"), "entropy must be a list of none, value or grad but is 'some'"),
        (Options(vocab="0"), r"vocab must be 1 or more but is \[0\]"),
        (Options(response=","), "response needs at least one value"),
        (Options(vocab=","), "vocab needs at least one value"),
        (Options(response="2"), r"response must be in \(0, 1\] but is 2"),
        (Options(memory="1MiB"), "Give --hidden with it"),
        (Options(hidden="8", memory="much"), "memory: wanted a positive number"),
        (Options(backward=False), 'entropy "grad" needs a backward'),
        (Options(dtype="float8"), "dtype must be one of"),
        (Options(providers=["nobody"]), "no provider matches 'nobody'"),
        (Options(device="tpu"), "device must be"),
        (Options(repeats=0), "repeats must be 1 or more"),
    ],
)
def test_a_bad_sweep_is_refused_before_anything_runs(options, text):
    with pytest.raises(LogitlessError, match=text):
        resolve_sweep(options if options.device else replace(options, device="cpu"))


def test_without_options_the_known_regime_scaled_to_the_machine(monkeypatch):
    monkeypatch.setattr(sweeping, "free_bytes", lambda device: 8 << 30)
    sweep = resolve_sweep(Options(device="cpu"))
    case = sweep.points[0].case
    assert (case.tokens, case.vocab, case.dtype, case.entropy, case.backward) == (384, 76032, "float32", "grad", True)
    assert [p.case.response for p in sweep.points[::3]] == [1.0, 0.5, 0.25, 0.1, 0.03]
    assert [p.provider for p in sweep.points[:3]] == ["torch", "logitless", "logitless-overwrite"]
    assert {p.limit for p in sweep.points} == {int(0.8 * (8 << 30))}
    assert sweep.out.as_posix() == "out/sweep-cpu.jsonl"
    monkeypatch.setattr(sweeping, "free_bytes", lambda device: 100 << 20)
    assert resolve_sweep(Options(device="cpu")).points[0].case.tokens == 64
    assert 0 < sweeping.default_tokens("cuda", 80 << 30, 76032 * 4) < 205280


def test_providers_start_from_what_the_grid_starts_from_and_run_where_it_runs():
    logits, hidden = Grid([8], [9]), Grid([8], [9], hidden=[4])
    assert choose_providers((), hidden, "cpu") == ["torch", "logitless", "logitless-logits"]
    assert "liger" in choose_providers((), logits, "cuda")
    assert "liger" not in choose_providers(["*"], logits, "cpu")
    assert "cce" in choose_providers(["*"], hidden, "cuda")


def test_only_points_of_this_machine_commit_and_versions_count_as_finished(tmp_path, measured):
    out = tmp_path / "s.jsonl"
    sweep = Sweep.of(Grid([8], [9], [1.0, 0.5]), ["torch"], CPU, out)
    _, earlier = run_sweep(sweep)
    assert earlier == frozenset()
    told = []
    records, earlier = run_sweep(
        replace(sweep, points=[*sweep.points, replace(sweep.points[0], provider="mine")]), told.append
    )
    assert earlier == {0, 1}
    assert [line.endswith("(measured before)") for line in told] == [True, True, False]
    lines = sweep_table(records, earlier).splitlines()
    assert ["torch *" in line for line in lines[4:7]] == [True, True, False]
    assert lines[-1] == "* measured by an earlier run: 2 of 3 points"
    assert len(measured) == 3
    run_sweep(replace(sweep, environment=replace(sweep.environment, commit="another")))
    assert len(measured) == 5
    lines = out.read_text().splitlines()
    out.write_text(
        "\n".join([lines[0].replace('"ok"', '"failed"'), lines[1].replace('"ok"', '"out of memory"')]) + "\n"
    )
    run_sweep(sweep)
    assert measured[5:] == [(1.0, "torch")]


def test_an_absent_peer_is_tried_once_and_not_written_down(tmp_path, monkeypatch):
    asked = []

    def answer(point, environment):
        asked.append(point.provider)
        return points.lost_record(point, environment, "absent" if point.provider == "trl" else "ok", "no module")

    monkeypatch.setattr(sweeping, "measure_apart", answer)
    records, _ = run_sweep(Sweep.of(Grid([8], [9], [1.0, 0.5]), ["torch", "trl"], CPU, tmp_path / "s.jsonl"))
    assert asked == ["torch", "trl", "torch"]
    assert [r.status for r in records] == ["ok", "absent", "ok"]
    assert [r.provider for r in read_records(tmp_path / "s.jsonl")] == ["torch", "torch"]


def test_the_table_has_what_varies_and_what_became_of_each_point(measured, tmp_path):
    records, _ = run_sweep(Sweep.of(Grid([8, 16], [9], [0.5]), ["torch", "logitless"], CPU, tmp_path / "s.jsonl"))
    records[3] = replace(records[3], status="wrong", detail="off by 1", total_ms=None)
    lines = sweep_table(records).splitlines()
    assert lines[0] == "V=9 float32, forward + backward, entropy grad, response 50%"
    assert lines[2].split()[:3] == ["T", "provider", "total"]
    assert lines[4].split()[:6] == ["8", "torch", "0.01", "288", "B", "100.0%"]
    assert lines[7].split()[:3] == ["16", "logitless", "wrong"]
    assert lines[-1] == "logitless: wrong, off by 1"
    records[0] = replace(records[0], total_range_ms=(1.0, 1.6))
    assert "unsteady machine: repeats vary by over half at 1 of 4 points" in sweep_table(records)


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("out of memory", 0), ("wrong", 1), ("failed", 1)])
def test_exit_codes(status, code, tmp_path, monkeypatch):
    monkeypatch.setattr(sweeping, "measure_apart", lambda p, e: points.lost_record(p, e, status, "why"))
    result = invoke(*SMALL, "--provider", "torch", "--out", tmp_path / "s.jsonl", code=code)
    assert "torch" in result.stdout


def test_help_reads_at_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    printed = invoke("sweep", "--help").stdout
    assert max(len(line) for line in printed.splitlines()) <= 80
    assert "each point in a process of its own" in " ".join(printed.split())
