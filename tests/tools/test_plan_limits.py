"""``logitless plan`` with sizes that no step has: an error that names the option, and never one of torch."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from logitless.errors import LogitlessError
from logitless.tools.cli import main
from logitless.tools.cli.shared import pick_device
from logitless.tools.plan import LossStep, plan_model
from logitless.tools.plan.ways import MOST_TOKENS, OVER_SUPPORT, forecast, largest_fitting
from logitless.tools.presets import LARGEST_SIZE, ModelShape, find_count, find_model

SMALL = LossStep(ModelShape("small", hidden=64, vocab=1000), tokens=512, dtype="float32")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--tokens", "9" * 30], "plan: --tokens must be at most 9007199254740992 tokens but is '999999999"),
        (["--tokens", "9" * 400], "plan: --tokens must be at most 9007199254740992 tokens but is '999999999"),
        (["--tokens", "9" * 15], "plan: tokens must be at most 268435456 with a vocabulary of 151936 and a hidden "),
        (["--tp", "9" * 30], "plan: tp must be at most 151936 with a vocabulary of 151936"),
        (["--cp", "9" * 30], "plan: cp must be at most 5764607523"),
        (["--kept-ids", "inf"], "plan: kept_ids must be at most the vocabulary of 151936 but is inf"),
        (["--kept-ids", "1e12"], "plan: kept_ids must be at most the vocabulary of 151936 but is 1000000000000.0"),
        (["--model", "a" * 300], "plan: model must be a config.json, a folder with one, or a preset but is 'aaaaaaa"),
        (["--entropy", "x"], "plan: --entropy must be one of none, value, grad but is 'x'"),
    ],
)
def test_sizes_that_no_step_has_are_named(options: list[str], text: str, monkeypatch, capsys):
    given = {"--model": "qwen3-8b", "--tokens": "1024"} | dict([options])
    monkeypatch.setattr(sys, "argv", ["logitless", "plan", *(x for pair in given.items() for x in pair)])
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr().err
    assert (stop.value.code, said.count("\n")) == (2, 1), said
    assert said.startswith(f"logitless: {text}")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"entropy": "none"}, r'plan: entropy must be None, "value" or "grad" but is \'none\''),
        ({"kept_ids": 1001}, "plan: kept_ids must be at most the vocabulary of 1000 but is 1001"),
        ({"tokens": 2 * MOST_TOKENS, "cp": 1}, "plan: tokens must be at most 268435456 with a vocabulary of 1000"),
        ({"model": ModelShape("large", 1 << 30, 1 << 31)}, "have more elements than 64 bits can count. Is it another"),
    ],
)
def test_steps_that_have_no_sizes_are_named(change: dict, text: str):
    with pytest.raises(LogitlessError, match=text):
        replace(SMALL, **change)


def test_the_largest_sizes_have_a_plan():
    """On ranks that share them, twice as many tokens; of a card without end, the most that there are."""
    replace(SMALL, tokens=2 * MOST_TOKENS, cp=2)
    replace(SMALL, kept_ids=1000, tp=1000)
    assert replace(SMALL, model=ModelShape("wide", 2, LARGEST_SIZE)).largest == (1 << 59) // LARGEST_SIZE
    found = forecast(OVER_SUPPORT, replace(SMALL, kept_ids=2.0), 1 << 90)
    assert found.most_tokens == MOST_TOKENS


def test_a_config_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text("{}")

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(LogitlessError, match=r"plan: model must be .* but is .*config\.json' \(Permission denied\)"):
        find_model(str(path))


def test_a_long_name_is_cut():
    with pytest.raises(LogitlessError) as caught:
        find_model("a" * 300)
    assert f"but is '{'a' * 97}'... (File name too long)." in str(caught.value)


def test_counts_are_exact_to_the_last():
    assert find_count(str(1 << 53)) == 1 << 53
    with pytest.raises(LogitlessError, match="must be at most"):
        find_count("8589934593m")


@pytest.mark.parametrize("device", ["cpu:x", "cuda:x", "cuda:", "cpu:-1", "cuda:99999999999", "CPU", "cpux", ""])
def test_a_device_that_is_none_is_named(device: str):
    with pytest.raises(LogitlessError, match=rf'device must be "cpu", "cuda" or "cuda:1" .* but is \'{device}\''):
        pick_device(device, 0)


def test_a_device_beyond_those_that_are_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [pick_device(x, 1) for x in ("cuda", "cuda:0", None, "cpu", "cpu:0")] == [
        *("cuda:1", "cuda:0", "cuda:1", "cpu", "cpu:0")
    ]
    for device, rank in (("cuda:2", 0), ("cuda", 2)):
        with pytest.raises(LogitlessError, match=r'device is "cuda:2" but torch sees 2 CUDA devices, from cuda:0 on'):
            pick_device(device, rank)


def test_no_ids_are_fewer_than_one():
    """A sampler that kept none but the target: its step has no ids beyond the rows' targets."""
    none, one = (plan_model(replace(SMALL, kept_ids=n)).call for n in (0.0, 1.0))
    assert (none.plan.ids, one.plan.ids) == (512, 1024)
    assert none.peak < one.peak


def test_nothing_fits():
    """No micro-batch at all: not the smallest that is tried."""
    assert largest_fitting(lambda n: 100 + n, free=50, limit=9, known=(4.0, 104)) == 0
    assert largest_fitting(lambda n: 100 * n, free=100, limit=9, known=(4.0, 400)) == 1
    plan = plan_model(SMALL, free=1000)
    assert [found.most_tokens for found in plan.forecasts] == [0] * len(plan.forecasts)
