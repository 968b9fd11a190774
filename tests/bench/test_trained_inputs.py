"""``benchmarks/trained_inputs.py`` where there is no GPU: a tiny model is trained, looked at and measured."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import trained_inputs  # noqa: E402
import trained_model  # noqa: E402

from benchmarks.bench.inputs import Trained  # noqa: E402
from benchmarks.bench.records import read_records  # noqa: E402
from logitless.backends import reference  # noqa: E402
from logitless.backends.contract import Problem, Running  # noqa: E402

TINY = "--vocab 300 --hidden 16 --layers 1 --heads 2 --length 16 --batch 4 --tokens 64 --device cpu".split()
TINY += ["--steps", "12", "--rate", "0.02"]
WORDS = "the model reads a row of logits and says which token is next".split()


@pytest.fixture
def folder(tmp_path):
    """Twenty-four files of words, one of them there twice, and some that are no text."""
    draw = random.Random(1)
    for number in range(24):
        (tmp_path / f"{number}.py").write_text(" ".join(draw.choices(WORDS, k=60)))
    (tmp_path / "again.md").write_bytes((tmp_path / "3.py").read_bytes())
    (tmp_path / "short.py").write_text("pass")
    (tmp_path / "picture.png").write_text("x" * 500)
    return tmp_path


@pytest.mark.parametrize("falls", [False, True])
def test_guesses_are_right_where_the_library_does_not_move_its_reference(falls):
    torch.manual_seed(0)
    rows, columns, slack = 40, 7, 3.0
    # Some slabs of some rows lie far from the others.
    z = torch.randn(rows, 5, columns) + 4 * torch.randn(rows, 5, 1)
    wrong = trained_inputs.wrong_guesses(z.amax(2), slack, falls)
    guess = torch.zeros(rows)
    for slab in range(5):
        drop = slack if falls or slab == 0 else torch.inf
        problem = Problem(z[:, slab], None, torch.full((rows,), -1), torch.ones(rows), 0.0, columns, True, 7 * slab)
        running = Running(guess, torch.empty(rows), slack, drop)
        reference.exponentials(problem, torch.empty(4, rows), running, torch.empty(rows, columns), slope=False)
        assert torch.equal(wrong[:, slab], running.reference != guess)
        guess = running.reference
    assert 0.1 < wrong.float().mean() < 0.9


def test_a_launch_is_made_again_for_any_of_its_rows():
    route = trained_inputs.Route("x", rows=2, columns=1, slack=1.0, falls=False, used=True)
    found = trained_inputs.guesses(route, torch.tensor([[0.0, 0.5], [0.0, 5.0], [0.0, 0.0], [0.5, -9.0]]))
    assert (found["right"], found["right_first"], found["rows_right"]) == (1 - 1 / 8, 1.0, 0.75)
    assert (found["launches"], found["launches_right"]) == (4, 0.75)


def test_facts_are_those_of_float64(monkeypatch):
    monkeypatch.setattr("benchmarks.bench.inputs.BLOCK_ELEMENTS", 5 * 33)
    torch.manual_seed(0)
    hidden, weight, target = 2 * torch.randn(21, 8), torch.randn(33, 8), torch.randint(33, (21,))
    # Some rows are sure, and some of those are right.
    hidden[:12] *= 4
    target[:9] = (hidden[:9] @ weight.T).argmax(1)
    given = Trained(hidden, weight, target)
    found = trained_inputs.facts(given, trained_inputs.routes(given))
    z = hidden.double() @ weight.double().T
    logp = z.log_softmax(1)
    logprob = logp.gather(1, target[:, None]).squeeze(1)
    assert found["logprob"]["mean"] == pytest.approx(float(logprob.mean()), rel=1e-5)
    assert found["logprob"]["quantiles"]["0.5"] == pytest.approx(float(logprob.median()), rel=1e-5)
    assert found["entropy"]["mean"] == pytest.approx(float(-(logp.exp() * logp).sum(1).mean()), rel=1e-5)
    assert found["row_maximum"]["deviation"] == pytest.approx(float(z.amax(1).std(correction=0)), rel=1e-5)
    assert found["row_minimum"]["quantiles"]["0.0"] == pytest.approx(float(z.min()), rel=1e-5)
    assert found["largest_logit"] == pytest.approx(float(z.abs().max()), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float((z.argmax(1) == target).double().mean()))
    assert found["targets_above_99"] == pytest.approx(float((logprob.exp() > 0.99).double().mean()))
    assert found["rows_above_99"] == pytest.approx(float((logp.amax(1).exp() > 0.99).double().mean()))
    assert 0 < found["targets_above_99"] < found["rows_above_99"] < 1
    assert [guess["name"] for guess in found["guesses"]] == ["frozen head", "stored exponentials"]


def test_texts_come_once_and_in_the_same_order(folder):
    found = trained_model.texts([folder], 1 << 20)
    assert len(found) == 24
    assert found == trained_model.texts([folder], 1 << 20)
    assert len(trained_model.texts([folder], 1000)) < 6


def test_held_out_ids_are_of_other_texts(folder):
    found = trained_model.texts([folder], 1 << 20)
    ids = trained_model.tokenize(found, 300, 1 << 20, needed=65)
    assert len(ids.held_out) >= 65
    # Every text begins with the same id.
    assert int((ids.train == 0).sum() + (ids.held_out == 0).sum()) == 24
    assert int(ids.train.max()) < ids.known <= 300
    with pytest.raises(SystemExit, match="too few tokens"):
        trained_model.tokenize(found, 300, 1 << 20, needed=10**6)


def test_every_hidden_state_stands_beside_the_token_that_follows_it():
    sizes = trained_model.Sizes(vocab=50, hidden=16, layers=1, heads=2, length=4, batch=2)
    model = trained_model.make_model(sizes, torch.device("cpu"))
    ids = torch.randperm(50, dtype=torch.int32)
    found = trained_model.look(model, ids, sizes, tokens=12)
    # Three sequences of four, from the beginning, the middle and the end.
    assert found.target.tolist() == [*ids[1:5], *ids[23:27], *ids[46:]]
    wanted = model.model(ids[None, 22:26].long()).last_hidden_state[0]
    torch.testing.assert_close(found.hidden[4:8].float(), wanted, atol=0.0, rtol=2**-8)
    assert torch.equal(found.weight, model.lm_head.weight.bfloat16())


def test_gaussian_inputs_of_the_same_sizes_are_beside_each_case():
    given = Trained(torch.zeros(6, 4), torch.zeros(9, 4), torch.zeros(6, dtype=torch.long))
    plain, both = (trained_inputs.cases(given, torch.device("cpu"), gaussian) for gaussian in (False, True))
    assert both[::2] == plain
    for trained, other in zip(plain, both[1::2], strict=True):
        assert (trained.logits, other.logits) == ("trained", "gaussian")
        assert replace(other, name=trained.name, logits="trained") == trained
        assert other.name != trained.name
    assert {(case.tokens, case.vocab, case.hidden) for case in plain} == {(6, 9, 4), (6, 9, None)}


def test_a_model_is_trained_and_measured_and_what_was_saved_is_measured_again(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("logitless.tools.stopwatch.CPU_COPY_BYTES", 1 << 20)
    out, saved = tmp_path / "trained.jsonl", tmp_path / "trained.pt"
    given = [*TINY, "--out", str(out), "--repeats", "1", "--provider", "logitless", "logitless-loss"]
    trained_inputs.main([*given, "--text", str(folder), "--save", str(saved), "--case", "*-loss"])
    trained_inputs.main([*given, "--inputs", str(saved), "--case", "*-fp32-grad"])
    records = read_records(out)
    assert [(r.case["name"], r.provider, r.status) for r in records] == [
        ("linear-trained-loss", "logitless", "ok"),
        ("linear-trained-loss", "logitless-loss", "ok"),
        ("trained-fp32-grad", "logitless", "ok"),
    ]
    first, second = (json.loads(x) for x in (tmp_path / "trained-model.jsonl").read_text().splitlines())
    assert first["logprob"] == second["logprob"]
    history = [point["loss"] for point in first["model"]["history"]]
    assert history[-1] < 0.8 * history[0]
    # Held-out text of the same words is no surprise to it either.
    assert -first["logprob"]["mean"] < 0.8 * history[0]
    assert "trained-fp32-grad: T=64 V=300 float32 trained" in (said := capsys.readouterr()).out
    assert (
        "stored exponentials, slabs of 300 columns, slack 8: 100 % of guesses right, 100 % of 1 launches\n" in said.err
    )
