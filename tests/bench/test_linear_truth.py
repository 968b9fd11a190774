"""The truth from hidden states: the same as float64 all the way, and sharp enough to catch what is wrong."""

import pytest
import torch

from benchmarks.bench.cases import Case
from benchmarks.bench.inputs import fill_operands, make_batch
from benchmarks.bench.linear_truth import sample_linear_truth
from benchmarks.bench.measure import compare, gemm_times

T, V, D = 60, 101, 17


@pytest.fixture(params=["gaussian", "peaked"])
def scored(request, monkeypatch):
    """A batch with prompt rows, its operands, and float64 results with their gradients of everything."""
    # Several blocks of rows, of columns and of logits.
    monkeypatch.setattr("benchmarks.bench.linear_truth.BLOCK_ELEMENTS", 4 * 7 * D)
    case = Case("x", "cpu", T, V, entropy="grad", response=0.5, logits=request.param, hidden=D)
    batch = make_batch(case, torch.device("cpu"))
    hidden, weight = fill_operands(batch, torch.empty(T, D), torch.empty(V, D))
    x, w = (leaf.double().requires_grad_() for leaf in (hidden, weight))
    logp = torch.log_softmax(x[batch.rows.index] @ w.T, dim=-1)
    logprob = logp.gather(1, batch.rows.target[:, None]).squeeze(1)
    entropy = -(logp.exp() * logp).sum(-1)
    upstream = [batch.g_logprob.double(), batch.g_entropy.double()]
    d_hidden, d_weight = torch.autograd.grad([logprob, entropy], [x, w], upstream)
    return sample_linear_truth(batch, hidden, weight, 24), logprob.detach(), entropy.detach(), d_hidden, d_weight


def test_float64_is_the_truth_up_to_the_statistics_of_the_other_rows(scored):
    truth, logprob, entropy, d_hidden, d_weight = scored
    errors = compare(truth, logprob, entropy, d_hidden, "grad", d_weight)
    assert max(errors.logprob, errors.entropy, errors.gradient) < 1e-12
    # A row whose target is nearly certain has a gradient near zero, which a sum of parts near one leaves.
    assert errors.gradient_row < 1e-9
    assert 0 < max(errors.weight, errors.weight_rest) < 1e-5
    assert abs(truth.linear.mean - float(logprob.mean())) < 1e-5


def test_the_samples_hold_targets_others_prompt_rows_and_the_last_of_each(scored):
    truth = scored[0]
    assert truth.linear.is_target.any()
    assert not truth.linear.is_target.all()
    assert truth.linear.column[-1] == V - 1
    assert truth.token[-1] == T - 1
    assert (truth.slot < 0).any()


def test_the_gradients_without_entropy_are_others(scored):
    truth, logprob, entropy, d_hidden, d_weight = scored
    errors = compare(truth, logprob, entropy, d_hidden, "value", d_weight)
    assert min(errors.gradient, errors.weight, errors.weight_rest) > 1e-2


def test_small_gradients_that_are_dropped_show_as_such(scored):
    truth, logprob, entropy, d_hidden, d_weight = scored
    spoiled = d_weight.clone()
    spoiled[truth.linear.column[~truth.linear.is_target]] = 0
    errors = compare(truth, logprob, entropy, d_hidden, "grad", spoiled)
    assert errors.weight < 1e-5
    assert errors.weight_rest == 1.0


def test_a_gradient_at_a_prompt_row_is_an_error(scored):
    truth, logprob, entropy, d_hidden, d_weight = scored
    spoiled = d_hidden.clone()
    spoiled[truth.token[truth.slot < 0][0]] = d_hidden.abs().max()
    assert compare(truth, logprob, entropy, spoiled, "grad", d_weight).gradient > 1e-2


@pytest.mark.parametrize("which", [2, 3])
def test_nan_is_an_error_of_nan(scored, which):
    truth, *results = scored
    results[which] = results[which] * torch.nan
    logprob, entropy, d_hidden, d_weight = results
    errors = compare(truth, logprob, entropy, d_hidden, "grad", d_weight)
    off = errors.gradient if which == 2 else errors.weight
    assert off != off


def test_a_mean_is_compared_with_the_mean_and_its_gradients_with_its_own():
    batch = make_batch(Case("x", "cpu", T, V, response=0.5, hidden=D), torch.device("cpu"))
    hidden, weight = fill_operands(batch, torch.empty(T, D), torch.empty(V, D))
    truth = sample_linear_truth(batch.with_mean_loss(), hidden, weight)
    x, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(x @ w.T, batch.labels)
    d_hidden, d_weight = torch.autograd.grad(loss, [x, w])
    errors = compare(truth, -loss.detach(), None, d_hidden, "mean", d_weight)
    assert errors.entropy is None
    assert max(errors.logprob, errors.weight, errors.weight_rest) < 1e-5
    # A share of 1 / 30 is rounded to float32.
    assert errors.gradient < 1e-7


def test_products_take_longer_the_more_there_are():
    times = gemm_times(torch.randn(33, 16), torch.randn(65, 16))
    assert len(times) == 4
    assert times == sorted(times)
    assert times[0] > 0
