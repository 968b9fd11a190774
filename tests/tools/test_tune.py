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
    assert len(table["milliseconds"]) == 8 + machine.Machine.of(device).turns
    assert all(x > 0 for x in table["milliseconds"].values())
    assert table["refused"] is None
    assert set(table["costs"]) == set(machine.Costs._fields)
    ms, costs = table["milliseconds"], table["costs"]
    assert costs["flops"] == pytest.approx(2 * 20 * 300 * 32 / (1e-3 * ms["product"]))
    more = ms["product that ends in dZ"] - ms["product"]
    assert costs["gradient"] == pytest.approx(max(0.0, 1e-3 * more) / 6000)


def test_every_step_is_reported():
    told = []
    tune.measure(HERE, SMALL, told.append)
    assert len(told) == tune.num_steps(HERE)


def test_on_a_card_with_turns_those_are_what_is_taken(monkeypatch):
    monkeypatch.setattr(tune, "copy_bandwidth", lambda device: 4711.0)
    monkeypatch.setattr(tune, "by_turns", lambda device: True)
    case = tune._Case(torch.device("cpu"), SMALL)
    assert tune.ENDS["turns"] in case.epilogues()
    # Apart, two products and both kernels take 7 ms.
    slow = MS | {"product that ends in dZ": 99.0}
    for ms, faster in ((3.49, True), (3.51, False)):
        table = case.table(slow | {tune.ENDS["turns"]: ms}, None)
        assert table["epilogues"] is faster
        assert table["costs"]["turns"] == pytest.approx((ms - 2.0) * 1e-3 / 6000)


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


MS = {
    "product": 2.0,
    "product, float32": 2.5,
    "statistic of logits": 0.75,
    "dZ of logits": 1.25,
    "product that is added": 1.5,
    "product that ends in the statistic": 2.625,
    "product that ends in dZ": 3.5,
    "product that ends in exponentials": 2.25,
}
"""Milliseconds that nobody measured, each of which tells."""


@pytest.fixture
def case(monkeypatch) -> tune._Case:
    monkeypatch.setattr(tune, "copy_bandwidth", lambda device: 4711.0)
    return tune._Case(torch.device("cpu"), SMALL)


def test_what_a_chunk_adds_is_read_and_written(case: tune._Case):
    """Twice the same product leaves twice its number, and that of the first 8 rows alone."""
    case.out.copy_(torch.randn(20, 300))
    add = case.apart()["product that is added"]
    add()
    add()
    wanted = 2 * (case.out[:8].double().T @ case.x[:8].double())
    torch.testing.assert_close(case.accumulated.double(), wanted, rtol=1e-5, atol=1e-5)


def test_costs_by_hand(case: tune._Case):
    """Of 20 rows, 300 columns, 32 numbers each, and chunks of 8 rows."""
    table = case.table(MS, None)
    wanted = machine.H200.costs._asdict() | {
        "flops": 2 * 20 * 300 * 32 / 2e-3,
        "bandwidth": 4711.0,
        # A product of 8 rows in place of 20 takes 0.8 ms; the rest is reading and writing of 300 x 32 float32.
        "adding": 8 * 300 * 32 / 0.7e-3,
        "statistic": 0.625e-3 / 6000,
        "gradient": 1.5e-3 / 6000,
        "exponentials": 0.25e-3 / 6000,
    }
    assert table["costs"] == pytest.approx(wanted)
    assert (table["card"], table["refused"], table["milliseconds"]) == ("cpu", None, MS)
    assert table["sizes"] == {"rows": 20, "columns": 300, "width": 32, "chunk": 8, "repeats": 1}
    assert table["torch"] == torch.__version__
    assert table["multiprocessors"] == machine.multiprocessors(torch.device("cpu"))


def test_costs_are_never_negative(case: tune._Case):
    """Where a fused product is no slower than the plain one, or adding costs nothing beyond the product."""
    fast = MS | {"product that ends in the statistic": 1.9, "product that is added": 0.5}
    costs = case.table(fast, None)["costs"]
    assert costs["statistic"] == 0.0
    assert costs["adding"] == pytest.approx(8 * 300 * 32 / 1e-6)


@pytest.mark.parametrize(
    ("changes", "faster"),
    [
        # Apart, two products and both kernels take 7 ms; fused, 2.625 + 3.5.
        ({}, True),
        ({"product that ends in dZ": 4.37}, True),
        ({"product that ends in dZ": 4.38}, False),
        ({"product that ends in the statistic": 3.49}, True),
        ({"product that ends in the statistic": 3.51}, False),
        ({"product, float32": 2.07}, True),
        ({"product, float32": 2.06}, False),
        ({"statistic of logits": 0.0, "dZ of logits": 1.0}, False),
        ({"dZ of logits": 0.37}, False),
        ({"product that ends in exponentials": 99.0}, True),
        ({"product, float32": 2.0, "statistic of logits": 1.0, "dZ of logits": 1.125}, False),
    ],
)
def test_fused_kernels_are_taken_where_both_together_are_faster(case: tune._Case, changes: dict, faster: bool):
    """Not where they are as fast: the last case."""
    assert case.table(MS | changes, None)["epilogues"] is faster
    refused = case.table(MS | changes, "no shared memory")
    assert (refused["epilogues"], refused["refused"]) == (False, "no shared memory")


def test_costs_of_a_kernel_that_was_not_run_are_those_of_the_h200(case: tune._Case):
    ran = {name: x for name, x in MS.items() if "ends in" not in name}
    costs, known = case.table(ran, "no shared memory")["costs"], machine.H200.costs
    assert (costs["statistic"], costs["gradient"], costs["exponentials"]) == (
        *(known.statistic, known.gradient, known.exponentials),
    )


def test_the_median_after_two_turns_of_warming_up(case: tune._Case, monkeypatch):
    """A clock that is set by hand: the first turns compile and fill caches."""
    laps, now = [900.0, 500.0, 3.0, 1.0, 2.0, 8.0, 7.0], [100.0]
    turns = iter(laps)

    def step() -> None:
        now[0] += next(turns) / 1e3

    monkeypatch.setattr("logitless.tools.stopwatch.time.perf_counter", lambda: now[0])
    case.sizes = SMALL._replace(repeats=5)
    assert case.milliseconds(step) == pytest.approx(3.0)
    assert list(turns) == []
