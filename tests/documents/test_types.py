"""What a type checker knows of a caller's code: results by their types, names of recipes, no ``Any`` on the way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from logitless.objectives.preference import KindName
from logitless.objectives.preference_terms import KINDS
from logitless.objectives.settings import RECIPES, RecipeName

ROOT = Path(__file__).parents[2]
PYRIGHT = Path(sys.executable).with_name("pyright")

CALLER = """
from typing import assert_type

import torch
import logitless as ll

logits, rows = torch.zeros(3, 5), ll.Rows.packed([[0, 1, 2]], [2])
objective = ll.Objective.recipe("gspo", entropy_coef=0.1)
assert_type(objective, ll.Objective)
assert_type(ll.logprobs(logits, rows), ll.TokenStats)
assert_type(ll.logprobs(logits, rows).logprob, torch.Tensor)
assert_type(ll.policy_loss(logits, rows, objective, advantage=torch.ones(2)), tuple[torch.Tensor, ll.Metrics])
assert_type(
    ll.policy_loss(logits, rows, objective, return_stats=True), tuple[torch.Tensor, ll.Metrics, ll.TokenStats]
)
assert_type(rows.expand(torch.zeros(2), at="tokens"), torch.Tensor)
assert_type(ll.Preference("dpo"), ll.Preference)
"""
WRONG = """
import torch
import logitless as ll

logits, rows = torch.zeros(3, 5), ll.Rows.packed([[0, 1, 2]], [2])
loss, metrics, stats = ll.policy_loss(logits, rows, ll.Objective())
rows.expand(torch.zeros(2), at="labels")
"""


def complaints(code: str, folder: Path) -> list[int]:
    """Lines of the code that pyright has an error for."""
    if not PYRIGHT.exists():
        pytest.skip("pyright is not installed; make installs it with the other packages of [dev]")
    (folder / "caller.py").write_text(code)
    settings = {"include": ["caller.py"], "extraPaths": [str(ROOT / "src")], "typeCheckingMode": "standard"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [PYRIGHT, "--outputjson", "--pythonpath", sys.executable, "--project", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = json.loads(done.stdout)
    return sorted({1 + x["range"]["start"]["line"] for x in found["generalDiagnostics"] if x["severity"] == "error"})


def test_results_have_types(tmp_path: Path):
    assert complaints(CALLER, tmp_path) == []


def test_what_is_wrong_is_found(tmp_path: Path):
    assert complaints(WRONG, tmp_path) == [6, 7]


def test_names_that_editors_offer_are_those_that_exist():
    assert get_args(RecipeName) == tuple(RECIPES)
    assert get_args(KindName) == tuple(KINDS)
