"""The options of ``score``, from Python and from the command line: what is none is named before anything is done."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from shared.score import write

from logitless.errors import LogitlessError
from logitless.tools.cli import main
from logitless.tools.score import Job, score_file

LONG = "a" * 240


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job with nothing to score, for which no model is loaded."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    return Job(tmp_path, write(tmp_path / "in.jsonl", []), tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"max_length": math.nan}, "max_length must be an integer of 1 to 4611686018427387904 but is nan"),
        ({"max_length": 1.5}, "max_length must be an integer of 1 to 4611686018427387904 but is 1.5"),
        ({"tokens_per_batch": math.nan}, "tokens_per_batch must be an integer of 1 to 4611686018427387904 but is nan"),
        ({"tokens_per_batch": None}, "tokens_per_batch must be an integer of 1 to 4611686018427387904 but is None"),
        ({"tokens_per_batch": True}, "tokens_per_batch must be an integer of 1 to 4611686018427387904 but is True"),
        ({"records_per_part": 10**30}, "records_per_part must be an integer of 1 to 4611686018427387904 but is 1000"),
        ({"records_per_part": 0}, "records_per_part must be 1 or more but is 0"),
        ({"overwrite": "no"}, "overwrite must be True or False but is 'no'"),
        ({"special_tokens": 0}, "special_tokens must be True or False but is 0"),
        ({"device": None}, 'device must be a device such as "cpu" or "cuda:0" but is None'),
        ({"device": "cpu:x"}, 'device must be a device such as "cpu" or "cuda:0" but is \'cpu:x\''),
        ({"temperature": True}, "temperature must be a positive finite number but is True"),
        ({"temperature": "1"}, "temperature must be a positive finite number but is '1'"),
        ({"temperature": 10**400}, "temperature must be a positive finite number but is 1000"),
        ({"temperature": math.inf}, "temperature must be a positive finite number but is inf"),
        ({"keep": "id"}, "keep must be a tuple of names but is 'id'"),
        ({"keep": (1,)}, "keep must be a tuple of names but is a tuple"),
        ({"stats": "rank"}, "stats must be a tuple of names but is 'rank'"),
        ({"prompt_key": None}, "prompt_key must be a str but is None"),
        ({"out": "out.jsonl"}, "out must be a Path but is 'out.jsonl'. Pass Path(out)."),
        ({"model": None}, "model must be a Path but is None"),
    ],
)
def test_an_option_of_another_kind_is_named(job: Job, change: dict, text: str):
    with pytest.raises(LogitlessError) as caught:
        replace(job, **change)
    assert str(caught.value).startswith(f"score: {text}")


def test_the_largest_options_are_taken(job: Job):
    assert score_file(replace(job, records_per_part=1 << 62, tokens_per_batch=1 << 62, max_length=1 << 62)).records == 0


def test_a_device_may_be_one_of_torch(job: Job):
    other = replace(job, device=torch.device("cpu"))
    assert other.settings() == job.settings()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"out": f"{LONG}.jsonl"}, "--out "),
        # Its own name is short enough, and that of a draft of rejects is not.
        ({"out": f"{LONG[:225]}.jsonl"}, "--out "),
        ({"data": f"{LONG}{LONG}.jsonl"}, "the input "),
        ({"model": LONG + LONG}, "the model "),
    ],
)
def test_a_name_that_is_too_long_is_told(job: Job, tmp_path: Path, change: dict, text: str, monkeypatch, capsys):
    names = {name: str(getattr(job, name)) for name in ("model", "data", "out")}
    names |= {name: str(tmp_path / long) for name, long in change.items()}
    arguments = ["score", names["model"], names["data"], "--out", names["out"], "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["logitless", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr().err
    assert stop.value.code == 2, said
    assert said.startswith(f"logitless: score: {text}{tmp_path}/aaaa")
    assert "aa: File name too long. Give a shorter one" in said.replace(".jsonl", "")
    assert ("Files beside it have names of 28 letters more." in said) == ("out" in change)
    assert not list(tmp_path.glob("aaa*"))


def test_a_name_that_is_just_short_enough(job: Job, tmp_path: Path):
    """A file has at most 255 letters."""
    out = tmp_path / f"{'a' * (255 - 28 - 6)}.jsonl"
    assert score_file(replace(job, out=out)).records == 0


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (["--records-per-part", str(10**30)], "score: records_per_part must be an integer of 1 to"),
        (["--device", "cpu:x"], 'device must be "cpu", "cuda" or "cuda:1" and so on but is \'cpu:x\''),
    ],
)
def test_a_bad_option_is_exit_code_2(job: Job, option: list[str], text: str, monkeypatch, capsys):
    given = {"--device": "cpu", "--out": str(job.out)} | dict([option])
    flat = [x for pair in given.items() for x in pair]
    monkeypatch.setattr(sys, "argv", ["logitless", "score", str(job.model), str(job.data), *flat])
    with pytest.raises(SystemExit) as stop:
        main()
    assert (stop.value.code, text in capsys.readouterr().err) == (2, True)
