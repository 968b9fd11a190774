"""Model directories that somebody else made: read as data, never run, and only where they lie."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import logitless as ll
from logitless.tools import untrusted
from logitless.tools.presets import find_model
from logitless.tools.score.model import check_model
from logitless.tools.untrusted import INDEX, check_weights

CONFIG = {"model_type": "llama", "hidden_size": 8, "vocab_size": 16}


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


class Runs:
    """A pickle of it runs code when it is read."""

    def __reduce__(self):
        return pytest.fail, ("code out of a model directory was run",)


def test_pickled_weights_are_refused(folder):
    torch.save({"weight": Runs()}, folder / "pytorch_model.bin")
    with pytest.raises(ll.LogitlessError, match=r"has no \.safetensors file\. Other formats .* run code"):
        check_model(folder)


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (["../outside.safetensors"], "names '../outside.safetensors', which is no .safetensors file beside it"),
        (["/etc/hosts"], "names '/etc/hosts', which is no"),
        (["a.bin"], "names 'a.bin', which is no"),
        (["a.safetensors", "b.safetensors"], "names b.safetensors, which is not there"),
        ([], "has no weight_map"),
    ],
)
def test_an_index_names_files_beside_it(folder, files: list[str], text: str):
    (folder / "a.safetensors").touch()
    (folder.parent / "outside.safetensors").touch()
    (folder / INDEX).write_text(json.dumps({"weight_map": {str(i): name for i, name in enumerate(files)}}))
    with pytest.raises(ll.LogitlessError, match=text):
        check_weights("score", folder)


def test_weights_in_one_file_or_several(folder):
    (folder / "a.safetensors").touch()
    check_weights("score", folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    check_weights("score", folder)


def test_code_of_a_model_directory_is_not_run(folder):
    """Its config names a class in a file of its own."""
    pytest.importorskip("transformers")
    from logitless.tools.score.model import Scorer

    (folder / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}})
    )
    (folder / "own.py").write_text("raise SystemExit('code out of a model directory was run')")
    (folder / "a.safetensors").touch()
    with pytest.raises(ll.LogitlessError, match="could not be loaded"):
        Scorer.load(folder, device="cpu", dtype="float32", temperature=1.0, memory="1MiB")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_size": 1 << 40}, "hidden_size must be a positive integer of at most"),
        ({"vocab_size": "16"}, "vocab_size must be a positive integer"),
        ({"logits_scaling": "x"}, "logits_scaling must be a number of 0 or more but is 'x'"),
        ({"final_logit_softcapping": [1]}, "final_logit_softcapping must be a number"),
        ({"logit_scale": 1e999}, "logit_scale must be a number"),
    ],
)
def test_sizes_and_numbers_of_a_config(folder, change: dict, text: str):
    (folder / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(ll.LogitlessError, match=text):
        find_model(str(folder / "config.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"text_config": 7}))
    assert find_model(str(folder / "config.json")).vocab == 16


@pytest.mark.parametrize(("content", "text"), [("[" * 100_000, "is not JSON"), ("[1]", "must hold a JSON object")])
def test_json_that_is_no_config(folder, content: str, text: str):
    (folder / "config.json").write_text(content)
    with pytest.raises(ll.LogitlessError, match=text):
        find_model(str(folder / "config.json"))


def test_a_file_too_large_for_a_config(folder, monkeypatch):
    monkeypatch.setattr(untrusted, "LARGEST_JSON", 10)
    with pytest.raises(ll.LogitlessError, match=r"is not read\. Is it another file"):
        find_model(str(folder / "config.json"))
