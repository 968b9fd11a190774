"""Inputs: reproducible, shaped like a model's output, and handed over without a copy."""

from dataclasses import replace

import pytest
import torch

import logitless as ll
from benchmarks.bench.cases import Case
from benchmarks.bench.inputs import CARRIER, Trained, fill_logits, fill_operands, make_batch, scored_rows
from logitless import LogitlessError
from logitless.memory.meta import hand_over

CPU = torch.device("cpu")


def test_response_rows_end_every_sample():
    index = scored_rows(3 * 1024, 0.25)
    assert index.numel() == 3 * 256
    assert index[:256].tolist() == list(range(768, 1024))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["gaussian", "peaked"])
def test_the_same_seed_gives_the_same_logits(kind, dtype):
    case = Case("x", "cpu", 37, 501, dtype, logits=kind)
    batch = make_batch(case, CPU)
    first, second = (fill_logits(batch, torch.empty(37, 501, dtype=case.torch_dtype)) for _ in range(2))
    assert torch.equal(first, second)
    assert first.float().isfinite().all()


def test_blocks_of_rows_cover_all_rows(monkeypatch):
    monkeypatch.setattr("benchmarks.bench.inputs.BLOCK_ELEMENTS", 5 * 501)
    batch = make_batch(Case("x", "cpu", 37, 501, logits="peaked"), CPU)
    logits = fill_logits(batch, torch.full((37, 501), torch.nan))
    assert logits.isfinite().all()


def test_peaked_targets_run_from_unsure_to_certain():
    batch = make_batch(Case("x", "cpu", 1000, 997, logits="peaked"), CPU)
    logits = fill_logits(batch, torch.empty(1000, 997))
    p = logits.double().softmax(-1).gather(1, batch.labels[:, None]).squeeze(1)
    lifted = p[(p > 0.29)]
    assert 0.8 < lifted.numel() / 1000 < 0.95
    assert lifted.max() <= 0.9999991
    assert lifted.max() > 0.99999
    assert lifted.quantile(0.1) < 0.9


def operands(case):
    batch = make_batch(case, CPU)
    sizes = ((case.tokens, case.hidden), (case.vocab, case.hidden))
    return batch, *fill_operands(batch, *(torch.full(size, torch.nan, dtype=case.torch_dtype) for size in sizes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["gaussian", "peaked"])
def test_the_same_seed_gives_the_same_operands(kind, dtype):
    case = Case("x", "cpu", 37, 501, dtype, logits=kind, hidden=63)
    (_, *first), (_, *second) = operands(case), operands(case)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(x.float().isfinite().all() for x in first)


def test_gaussian_operands_have_products_with_a_spread_of_two():
    _, hidden, weight = operands(Case("x", "cpu", 300, 501, hidden=63))
    assert (hidden @ weight.T).std() == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peaked_operands_have_targets_from_unsure_to_certain(dtype, monkeypatch):
    monkeypatch.setattr("benchmarks.bench.inputs.BLOCK_ELEMENTS", 8 * 256 * 100)
    batch, hidden, weight = operands(Case("x", "cpu", 1000, 997, dtype, logits="peaked", hidden=256))
    p = (hidden.double() @ weight.double().T).softmax(-1).gather(1, batch.labels[:, None]).squeeze(1)
    assert (hidden[:, 0] == CARRIER).all()
    assert 0.7 < (p > 0.29).double().mean() < 0.95
    assert p.quantile(0.3) < 0.9
    assert p.quantile(0.8) > 0.999


def test_a_mean_loss_has_the_same_share_for_every_row():
    batch = make_batch(Case("x", "cpu", 100, 50, response=0.25), CPU).with_mean_loss()
    torch.testing.assert_close(batch.g_logprob, torch.full((25,), -1 / 25))
    assert not batch.g_entropy.any()


def test_prompt_rows_have_no_label():
    batch = make_batch(Case("x", "cpu", 100, 50, response=0.25), CPU)
    assert batch.index is not None
    assert (batch.labels >= 0).sum() == len(batch.rows) == 25
    assert torch.equal(batch.labels[batch.index], batch.rows.target)


def test_handed_over_logits_can_be_overwritten():
    buffer = torch.randn(5, 11)
    logits = hand_over(buffer)
    assert logits.requires_grad
    assert not logits.is_leaf
    assert not logits._is_view()
    out = ll.logprobs(ll.Logits.given(logits, overwrite=True), torch.arange(5))
    (gradient,) = torch.autograd.grad(out.logprob, logits, torch.ones(5))
    assert gradient.data_ptr() == buffer.data_ptr()


def trained_model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return Trained(torch.randn(37, 24).to(dtype), torch.randn(501, 24).to(dtype), torch.randint(501, (37,)))


def test_what_a_trained_model_has_is_taken_as_it_is(monkeypatch):
    monkeypatch.setattr("benchmarks.bench.inputs.BLOCK_ELEMENTS", 5 * 501)
    given = trained_model()
    case = Case("x", "cpu", 37, 501, "bfloat16", logits="trained", hidden=24, response=0.5)
    batch = make_batch(case, CPU, trained=given)
    hidden, weight = fill_operands(batch, torch.empty(37, 24).bfloat16(), torch.empty(501, 24).bfloat16())
    assert torch.equal(hidden, given.hidden)
    assert torch.equal(weight, given.weight)
    assert torch.equal(batch.rows.target, given.target[batch.rows.index])
    assert 0 < len(batch.rows) < 37
    logits = fill_logits(make_batch(replace(case, hidden=None), CPU, trained=given), torch.empty(37, 501))
    torch.testing.assert_close(logits, given.hidden.float() @ given.weight.float().T)


def test_a_trained_model_that_is_missing_or_of_other_sizes_is_refused():
    case = Case("x", "cpu", 37, 501, logits="trained", hidden=24)
    with pytest.raises(LogitlessError, match=r"case x is of a trained model, and none is given"):
        make_batch(case, CPU)
    with pytest.raises(LogitlessError, match=r"T, V, D = \(37, 502, 24\), the trained model \(37, 501, 24\)"):
        make_batch(replace(case, vocab=502), CPU, trained=trained_model())
