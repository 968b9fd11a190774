"""The table of a card: measured, written, read, and refused where it is of another."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import logitless as ll
from logitless import machine
from logitless.call import Asked, resolve
from logitless.tools import tune
from logitless.tools.cli import app

SMALL = tune.Sizes(rows=20, columns=300, width=32, chunk=8, repeats=1)


HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where kernels run: compiled on a card, and otherwise in Triton's interpreter."""


@pytest.fixture(scope="module")
def table() -> dict:
    return tune.measure(HERE, SMALL)


def test_what_is_measured(table, device: torch.device):
    """Every step that the costs are made of; in Triton's interpreter the times mean nothing."""
    assert len(table["milliseconds"]) == 8
    assert all(x > 0 for x in table["milliseconds"].values())
    assert table["refused"] is None
    assert set(table["costs"]) == set(machine.Costs._fields)
    ms, costs = table["milliseconds"], table["costs"]
    assert costs["flops"] == pytest.approx(2 * 20 * 300 * 32 / (1e-3 * ms["product"]))
    more = ms["product that ends in dZ"] - ms["product"]
    assert costs["gradient"] == pytest.approx(max(0.0, 1e-3 * more) / 6000)


def test_a_kernel_that_does_not_run_is_not_taken(monkeypatch, device: torch.device):
    from triton.runtime.errors import OutOfResources

    def fail(*_, **__):
        raise OutOfResources(300000, 232448, "shared memory")

    monkeypatch.setattr(tune.products, "gradient", fail)
    found = tune.measure(HERE, SMALL)
    assert not found["epilogues"]
    assert "shared memory" in found["refused"]
    assert found["costs"]["gradient"] == machine.H200.costs.gradient


@pytest.mark.parametrize("faster", [True, False])
def test_calls_choose_by_it(monkeypatch, table, faster: bool, tmp_path):
    path = tmp_path / "deep" / "down" / "machine.json"
    tune.write({**table, "card": "Some card", "multiprocessors": 108, "epilogues": faster}, path)
    found = machine.tuned(path, "Some card", 108, 8)
    assert found.costs == machine.Costs(**table["costs"])
    hidden, weight = (torch.empty(n, 32, dtype=torch.bfloat16, device="meta") for n in (12, 40))
    rows = torch.empty(12, dtype=torch.int64, device="meta")
    monkeypatch.setattr(machine.Machine, "of", lambda device: found)
    call, _ = resolve("logprobs", ll.Logits(hidden, weight), rows, Asked(backend="triton"))
    assert call.apart is None if faster else call.apart is not None and "logitless tune" in call.apart


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("", "Some card", r"is none \(JSONDecodeError"),
        ('{"card": "Some card"}', "Some card", r"is none \(KeyError"),
        (
            None,
            "Another card",
            "was measured on Some card with 108 .*, and this card is Another card with 108",
        ),
    ],
)
def test_what_is_no_table_of_this_card(table, text, name: str, said: str, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**table, "card": "Some card", "multiprocessors": 108}) if text is None else text)
    with pytest.raises(ll.LogitlessError, match=f"LOGITLESS_MACHINE: .*{said}"):
        machine.tuned(path, name, 108, 8)
    with pytest.raises(ll.LogitlessError, match="FileNotFoundError"):
        machine.tuned(tmp_path / "nothing", name, 108, 8)


def test_the_command(monkeypatch, table, tmp_path):
    path = tmp_path / "machine.json"
    refused = CliRunner().invoke(app, ["tune", "--device", "cpu", "--out", str(path)])
    assert isinstance(refused.exception, ll.LogitlessError)
    assert "wanted a CUDA device" in str(refused.exception)
    monkeypatch.setattr(tune, "require_card", lambda device: None)
    monkeypatch.setattr(tune, "measure", lambda device, report: table)
    said = CliRunner().invoke(app, ["tune", "--device", "cpu", "--out", str(path)])
    assert f"LOGITLESS_MACHINE={path}" in said.stdout.replace("\n", "")
    assert json.loads(path.read_text()) == table
