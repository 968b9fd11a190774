"""``benchmarks/whole_step.py`` where there is no GPU: a tiny model's steps agree, and searches end where they say."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import longest_batch  # noqa: E402
import whole_step  # noqa: E402
from whole_step_model import MODELS, Trainer  # noqa: E402


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer(MODELS["tiny"], torch.device("cpu"))


def test_contenders_agree_from_the_same_weights(trainer):
    plain, ours = whole_step.steps(trainer, ["plain torch", "ours"], repeats=1)
    assert (plain["contender"], ours["contender"]) == ("plain torch", "ours")
    # The first of these is of the loss alone, the second of every weight, the tied one included.
    assert ours["loss_difference"] < 1e-6
    assert ours["grad_norm_difference"] < 1e-6
    for line in (plain, ours):
        # Two times of one lap each, on a machine that others use: how large the share is, no test can tell.
        assert line["loss_share"] > 0
        assert line["tokens_per_s"] == pytest.approx(1e3 * line["tokens"] / line["ms"])
    # Plain torch has the response's logits and more, three lots of 64 rows in float32.
    assert plain["peak_bytes"] > ours["peak_bytes"] > 3 * 4 * sum(x.numel() for x in trainer.model.parameters())


def test_a_step_changes_the_weights_and_a_comparison_does_not(trainer):
    batch = whole_step.with_old(whole_step.draw(trainer.shape, 1, trainer.device), trainer.model)
    weight = trainer.model.lm_head.weight
    before = weight.detach().clone()
    trainer.compare("ours", batch)
    assert torch.equal(weight, before)
    trainer.step("ours", batch)
    assert not torch.equal(weight, before)


def test_an_attempt_is_refused_beyond_its_memory(trainer):
    found = longest_batch.attempt(trainer, "ours", 2, 1 << 30)
    assert found.peak is not None
    assert longest_batch.attempt(trainer, "ours", 2, found.peak - 1).peak is None


def searching(per_sequence: int, ends: float, kink: int = 10**9) -> tuple[longest_batch.Search, list[int]]:
    """A search where memory is known: 1000 bytes, and so many per sequence; half as many more from ``kink`` on."""
    tried = []

    def attempt(name: str, n: int, budget: int) -> longest_batch.Tried:
        tried.append(n)
        peak = 1000 + n * per_sequence + max(0, n - kink) * per_sequence // 2
        return longest_batch.Tried(peak if peak <= budget else None, 0.0)

    return longest_batch.Search(MODELS["0.6B"], "ours", 0.0, ends, attempt), tried


@pytest.mark.parametrize("kink", [10**9, 64])
@pytest.mark.parametrize("budget", [9000, 100_000, 103_333])
def test_a_search_ends_within_six_percent(budget, kink):
    search, tried = searching(100, time.perf_counter() + 60, kink)
    search.probe(10**6)
    line = search.longest(budget)
    most = max(n for n in range(2000) if 1000 + n * 100 + max(0, n - kink) * 50 <= budget)
    low, high = line["tokens"] // 2048, line["refused_tokens"] // 2048
    assert low <= most < high <= max(low + 1, round(1.06 * low))
    assert line["peak_bytes"] <= budget
    # On a line the first guess is nearly right; each size costs a step of training.
    assert len(tried) <= (5 if kink == 10**9 else 12)


def test_without_time_nothing_is_tried():
    search, tried = searching(100, time.perf_counter() - 1)
    search.probe(10**6)
    assert "no time" in search.longest(10**6)["status"]
    assert tried == []
