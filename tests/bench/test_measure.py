"""Measurement: peak memory to the byte, and a truth that catches what is wrong."""

import pytest
import torch

from benchmarks.bench.cases import Case
from benchmarks.bench.inputs import fill_logits, make_batch
from benchmarks.bench.measure import compare, peak_bytes, sample_truth
from benchmarks.bench.providers import plain
from logitless.tools.stopwatch import StopWatch, copy_bandwidth

CPU = torch.device("cpu")
SIZE = 4 * 1_000_000


def test_peak_counts_what_is_alive_together():
    x = torch.ones(1_000_000)
    assert peak_bytes(lambda: x.neg(), "cpu") == SIZE
    assert peak_bytes(lambda: x.neg() + x.abs(), "cpu") == 3 * SIZE
    assert peak_bytes(lambda: x.neg_(), "cpu") == 0


def test_peak_forgets_what_was_released():
    x = torch.ones(1_000_000)

    def one_after_the_other():
        for _ in range(5):
            x.neg()

    assert peak_bytes(one_after_the_other, "cpu") == SIZE


def test_peak_says_nothing_on_stderr(capfd):
    peak_bytes(lambda: torch.zeros(3), "cpu")
    assert capfd.readouterr().err == ""


def test_laps_are_the_times_between_marks():
    clock = StopWatch(CPU)
    for _ in range(3):
        clock.mark()
    laps = clock.laps_ms()
    assert len(laps) == 2
    assert min(laps) >= 0
    assert clock.laps_ms() == []


def test_bandwidth_is_positive(monkeypatch):
    monkeypatch.setattr("logitless.tools.stopwatch.CPU_COPY_BYTES", 1 << 20)
    assert copy_bandwidth(CPU, repeats=2) > 0


@pytest.fixture
def scored():
    """A small peaked case with prompt rows, and plain torch's results on it."""
    batch = make_batch(Case("x", "cpu", 60, 101, entropy="grad", response=0.5, logits="peaked"), CPU)
    logits = fill_logits(batch, torch.empty(60, 101)).requires_grad_()
    logprob, entropy = plain(logits, batch.index, batch.rows.target, "grad")
    (gradient,) = torch.autograd.grad([logprob, entropy], [logits], [batch.g_logprob, batch.g_entropy])
    return sample_truth(batch, logits.detach(), 32), logprob, entropy, gradient


def test_plain_torch_is_close_to_the_truth(scored):
    errors = compare(*scored, "grad")
    assert max(errors.logprob, errors.entropy, errors.gradient) < 2e-6


def test_the_gradient_without_entropy_is_another_one(scored):
    assert compare(*scored, "value").gradient > 1e-2


def test_the_truth_samples_prompt_rows_and_wants_zero_there(scored):
    truth, logprob, entropy, gradient = scored
    prompt = truth.token[truth.slot < 0]
    assert prompt.numel() >= 8
    spoiled = gradient.clone()
    spoiled[prompt[0], 0] = 1e-2
    assert compare(truth, logprob, entropy, spoiled, "grad").gradient > 1e-3


@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_is_an_error_of_nan(scored, which):
    truth, *results = scored
    results[which] = results[which] * torch.nan
    errors = compare(truth, *results, "grad")
    assert errors[which] != errors[which]
