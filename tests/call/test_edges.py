"""Values at the edge of a format, memory that only the other half of a call needs, arguments of a wrong kind."""

from __future__ import annotations

import math

import pytest
import torch
from calls import from_hidden

import logitless as ll

# Float16 gradients of the one-pass loss.


def float16_problem(seed: int = 0):
    torch.manual_seed(seed)
    hidden, weight = torch.randn(24, 16).half(), (torch.randn(40, 16) / 4).half()
    return hidden, weight, torch.randint(0, 40, (24,))


def gradients_of(hidden, weight, target, dtype: torch.dtype, one_pass: bool, memory, **fields) -> list[torch.Tensor]:
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
    objective = ll.Objective()
    if one_pass:
        # Room for a few rows at a time, so that later chunks meet larger gradients than earlier ones.
        logits = ll.Logits(hidden, weight)
        assert ll.explain(ll.policy_loss, logits, target, objective, memory=memory).kind == "one pass"
        loss, _ = ll.policy_loss(logits, target, objective, memory=memory, **fields)
    else:
        loss, _ = objective(ll.logprobs(ll.Logits(hidden, weight), target), ll.Rows.every(target), **fields)
    loss.backward()
    return [loss.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("memory", ["1GiB", 2048])
@pytest.mark.parametrize("size", [3e5, 3e-6])
def test_float16_gradients_of_any_size(size: float, memory):
    """Advantages of 3e4 and more overflowed in one pass, where two passes are finite: the weights alone were scaled."""
    problem = float16_problem()
    # Rising from row to row.
    fields = {"old_logprob": "current", "advantage": size * torch.logspace(-4, 0, 24)}
    found = gradients_of(*problem, torch.float16, True, memory, **fields)
    truth = gradients_of(*problem, torch.float64, False, None, **fields)
    plain = gradients_of(*problem, torch.float32, False, None, **fields)
    for ours, theirs, wide in zip(found, truth, plain, strict=True):
        assert ours.isfinite().all()
        # Rounded to float16 once on the way, and once at the end.
        bound = 4 * torch.finfo(torch.float16).eps * theirs.abs().max() + 2.0**-24
        assert (ours.double() - theirs).abs().max() <= bound + (wide.double() - theirs).abs().max()


def test_float16_gradients_with_a_large_ratio():
    """A = -5 with a log-ratio of 10 is an upstream gradient of 1e5, past the range of float16."""
    hidden, weight, target = float16_problem()
    old = ll.logprobs(ll.Logits(hidden, weight), target).logprob.float()
    old = old - torch.where(torch.arange(24) == 20, 10.0, 0.0)
    fields = {"old_logprob": old, "advantage": torch.full((24,), -5.0)}
    for memory in ("1GiB", 2048):
        found = gradients_of(hidden, weight, target, torch.float16, True, memory, **fields)
        truth = gradients_of(hidden, weight, target, torch.float64, False, None, **fields)
        for ours, theirs in zip(found, truth, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=float(theirs.abs().max()) / 250)


# What only backward needs.


def test_forward_alone_is_not_refused_for_the_tiles_of_backward():
    hidden, weight, target = torch.randn(200, 8), torch.randn(64, 8), torch.zeros(200, dtype=torch.int64)
    with torch.no_grad():
        narrow = ll.logprobs(ll.Logits(hidden, weight.requires_grad_()), target, memory=1000)
    assert torch.allclose(narrow.logprob, torch.log_softmax(hidden @ weight.detach().T, -1)[:, 0], atol=1e-5)
    with pytest.raises(ll.LogitlessError, match="do not hold one column"):
        ll.logprobs(ll.Logits(hidden, weight), target, memory=200)
    assert "backward" not in str(ll.explain(ll.logprobs, ll.Logits(hidden, weight.detach()), target))


def test_a_frozen_head_and_an_ignored_row_far_below():
    """Its logits are near -95, where e^-z is past float32; what it must give is a gradient of 0, and it gave NaN."""
    hidden, weight = torch.full((2, 4), -5.0), torch.full((6, 4), 4.75)
    for dtype in (torch.float32, torch.bfloat16):
        leaf = hidden.to(dtype, copy=True).requires_grad_()
        ll.logprobs(ll.Logits(leaf, weight.to(dtype)), torch.tensor([-100, 1])).logprob.sum().backward()
        assert leaf.grad[0].tolist() == [0.0] * 4
        assert leaf.grad[1].abs().max() <= 4 * torch.finfo(dtype).eps * 4.75


def test_kernels_in_float64_are_refused_before_anything_runs():
    """Rounded logits hid the operands' dtype from the kernels, and a frozen head did not ask: compiler errors."""
    hidden, weight = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True), torch.zeros(4, 3, dtype=torch.float64)
    for options in ({"match": "float16"}, {}):
        with pytest.raises(ll.LogitlessError, match=r"its kernels take float32, .* not torch\.float64"):
            from_hidden(hidden, weight, torch.tensor([1, 2]), backend="triton", **options)


# Rows whose log-prob is not a number, or infinite.


def test_a_log_prob_that_is_nan_leaves_other_gradients_alone():
    """A support that holds NaN: the log-prob over it is NaN, log Z of a row need not be."""
    logits = torch.randn(2, 6, dtype=torch.float64)
    kept = ll.Kept(torch.tensor([1, 2]), torch.tensor([1, 1]))
    found = []
    for some in (kept, None):
        x = logits.clone().requires_grad_()
        out = ll.logprobs(x, torch.tensor([-100, 3]), kept=some)
        out.log_z.sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


def test_log_z_of_a_row_whose_support_is_impossible():
    """All ids of the support are -inf, so that the log-prob is NaN and log Z is not."""
    logits = torch.tensor([[0.0, 1.0, -math.inf, -math.inf]], dtype=torch.float64, requires_grad=True)
    kept = ll.Kept(torch.tensor([2]), torch.tensor([1]))
    out = ll.logprobs(logits, torch.tensor([3]), kept=kept)
    assert out.logprob.isnan().all()
    out.log_z.sum().backward()
    torch.testing.assert_close(logits.grad, torch.softmax(logits.detach(), -1))


@pytest.mark.parametrize("policy", ["cispo", "reinforce"])
def test_an_impossible_target(policy: str):
    """Its ratio is 0, so CISPO gives it no weight; and a row without an advantage has no loss."""
    rows = ll.Rows.every(torch.zeros(3, dtype=torch.int64))
    logprob = torch.tensor([-1.0, -math.inf, -math.inf], requires_grad=True)
    stats = ll.TokenStats(logprob, torch.zeros(3), torch.zeros(3))
    advantage = torch.tensor([1.0, 1.0 if policy == "cispo" else 0.0, 0.0])
    fields = {"advantage": advantage} | ({"old_logprob": torch.full((3,), -1.0)} if policy == "cispo" else {})
    loss, _ = ll.Objective(policy=policy)(stats, rows, **fields)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(1 / 3)
    assert logprob.grad.tolist() == pytest.approx([-1 / 3, 0.0, 0.0])


def test_an_impossible_target_with_an_advantage_has_an_infinite_loss():
    stats = ll.TokenStats(torch.tensor([-math.inf]), torch.zeros(1), torch.zeros(1))
    loss, _ = ll.Objective(policy="reinforce")(stats, ll.Rows.every(torch.tensor([0])), advantage=torch.ones(1))
    assert float(loss) == math.inf


# Arguments of a wrong kind.

X, W, TARGET = torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ll.logprobs(ll.Logits(X, W), TARGET, head={}), "head must be a Head or None but is dict"),
        (lambda: ll.logprobs(X, TARGET, head=0.7), "head must be a Head or None but is float"),
        (lambda: ll.logprobs(X, TARGET, kept=[[1], [2]]), "kept must be a Kept or None but is list"),
        (lambda: ll.logprobs(ll.Logits(X, W, shard=(0, 4)), TARGET), "shard must be a VocabShard or None but is tuple"),
        (lambda: ll.Kept([1, 2], [1, 1]), r"Kept: ids must be a 1-D integer tensor but is a list\. Pass torch\.tensor"),
        (lambda: ll.Rows.every([1, 2]), "Rows.every: target must be a tensor but is a list"),
        (lambda: ll.logprobs(X, TARGET, head=ll.Head(temperature=1e-40)), "temperature of 1e-40 .* does not hold"),
    ],
)
def test_arguments_of_a_wrong_kind(call, text: str):
    with pytest.raises(ll.LogitlessError, match=text):
        call()


def test_explain_takes_what_its_verb_takes():
    logits, fields = ll.Logits(X, W), {"old_logprob": "current", "advantage": torch.ones(2)}
    with pytest.raises(TypeError, match="memry"):
        ll.explain(ll.logprobs, logits, TARGET, memry="1GiB")
    assert ll.explain(ll.policy_loss, logits, TARGET, ll.Objective(), **fields).kind == "one pass"


def test_supports_are_sorted_once_for_all_tiles(monkeypatch):
    """They were sorted again for every slab of columns: 22 s where 2.4 would do."""
    sorts = []
    plain = torch.Tensor.sort
    monkeypatch.setattr(torch.Tensor, "sort", lambda x, **kwargs: sorts.append(1) or plain(x, **kwargs))
    kept = ll.Kept(torch.tensor([1, 2]), torch.tensor([1, 1]))
    weight = torch.randn(4000, 3, requires_grad=True)
    ll.logprobs(ll.Logits(X, weight), TARGET, kept=kept, memory=4096).logprob.sum().backward()
    assert len(sorts) == 2  # in forward and in backward
