"""``sampled_entropy``: an unbiased mean with its standard error, from some of the rows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from close import assert_close_to_truth
from shared.errors import raises
from shared.linear import draw
from truth import plain, truth

import logitless as ll
from logitless.entropy_sample import sampled_entropy

pytestmark = pytest.mark.usefixtures("one_thread")


def test_all_rows_are_the_mean_itself(device: torch.device):
    x, target = draw(40, 63, 17), torch.randint(63, (40,))
    target[::7] = -100
    scored = (target >= 0).nonzero().squeeze(1)
    temperature = torch.linspace(0.5, 2, 40)
    operands = [t.to(device) for t in x[:2]]
    out = sampled_entropy(
        ll.Logits(*operands, bias=x.bias.to(device)),
        target.to(device),
        head=ll.Head(temperature=temperature.to(device)),
    )
    exact, usual = (
        oracle(x.logits(), scored, target[scored], temperature=temperature[scored]).entropy for oracle in (truth, plain)
    )
    assert_close_to_truth(out.entropy, exact, usual)
    assert out.taken.tolist() == scored.tolist()
    torch.testing.assert_close(float(out.mean), float(exact.mean()), rtol=1e-6, atol=0)
    assert float(out.error) == 0


def test_the_mean_is_unbiased_and_the_error_is_its_spread():
    """Over 400 draws of 12 out of 60 rows: the mean of the means, and their spread beside what was said of it."""
    x, target = draw(60, 63, 9, torch.float64, spread=8.0), torch.randint(63, (60,))
    target[:10] = -100
    draws = [sampled_entropy(ll.Logits(x.hidden, x.weight), target, sample=12, seed=seed) for seed in range(400)]
    means, errors = (torch.stack([getattr(out, name) for out in draws]) for name in ("mean", "error"))
    right = sampled_entropy(ll.Logits(x.hidden, x.weight), target, sample=50)
    # Four standard errors of the mean of 400 means.
    assert abs(means.mean() - right.mean) < 4 * means.std() / 20
    torch.testing.assert_close(errors.square().mean().sqrt(), means.std(), rtol=0.12, atol=0)
    assert len({tuple(out.taken.tolist()) for out in draws}) == 400
    assert all(int(out.taken.min()) >= 10 for out in draws)


def test_a_share_of_the_rows_and_no_graph():
    x, target = draw(100, 20, 5).leaves(), torch.randint(20, (100,))
    out = sampled_entropy(ll.Logits(x.hidden, x.weight), target, sample=0.07)
    assert len(out.taken) == 7
    assert not out.mean.requires_grad
    again = sampled_entropy(ll.Logits(x.hidden, x.weight), ll.Rows.every(target), sample=7)
    assert torch.equal(out.entropy, again.entropy)
    one = sampled_entropy(ll.Logits(x.hidden, x.weight), target, sample=1)
    assert float(one.error) != float(one.error)


def share(rank: int, world: int, hidden, weight, target):
    shard = ll.VocabShard.even(len(weight), dist.group.WORLD)
    return sampled_entropy(ll.Logits(hidden, weight[shard.start : shard.stop], shard=shard), target, sample=9)


def test_ranks_take_the_same_rows(ranks):
    x, target = draw(30, 20, 5), torch.randint(20, (30,))
    whole = sampled_entropy(ll.Logits(x.hidden, x.weight), target, sample=9)
    for out in ranks(share, 2, x.hidden, x.weight, target):
        assert torch.equal(out.taken, whole.taken)
        torch.testing.assert_close(out.mean, whole.mean)


def test_what_is_refused():
    logits = ll.Logits(torch.zeros(3, 2), torch.zeros(4, 2))
    call = logits, torch.tensor([1, 2, 3])
    with raises("sampled_entropy: sample must be a number of rows, or a share below 1, but is 0."):
        sampled_entropy(*call, sample=0)
    with raises("sample is 2.5, but a share is below 1. Pass whole rows as an int."):
        sampled_entropy(*call, sample=2.5)
    with raises("there is no row to draw from: of 3 rows none is scored."):
        sampled_entropy(logits, torch.full((3,), -100))
    with raises("sampled_entropy: entropy is no option of it."):
        sampled_entropy(*call, entropy="grad")
