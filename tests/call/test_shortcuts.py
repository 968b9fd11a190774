"""What a backend may leave out where a call says so: the same bits, and logits as they were."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import logitless as ll
from logitless.backends import tiled
from logitless.backends.contract import Problem
from logitless.softmax import Statistic, coefficients, mean_shift, normaliser

R, V = 7, 63


def problem(dtype: torch.dtype, indexed: bool, entropy: bool, memory: int) -> Problem:
    torch.manual_seed(0)
    logits = torch.randn(R + 2 * indexed, V + 2).to(dtype)
    logits[1, 3] = -torch.inf
    index = torch.tensor([0, 1, 2, 4, 5, 6, 8]) if indexed else None
    return Problem(logits, index, torch.randint(V, (R,)), torch.ones(R), 0.0, V, entropy, memory)


def gradient(p: Problem, overwrite: bool) -> torch.Tensor:
    row = Statistic.of(tiled.statistics(p))
    norm, mean = normaliser(row), mean_shift(row)
    logprob = row.t - norm.reference - norm.log_sum
    upstream = torch.linspace(-1, 2, R)
    coef = coefficients(logprob, norm, mean, upstream, upstream.flip(0) if p.entropy else None, None)
    out = p.logits if overwrite else torch.full(p.logits.shape, torch.nan, dtype=p.logits.dtype)
    tiled.gradient(p, norm, coef, out, p.index)
    return out


@pytest.mark.parametrize("memory", [1 << 20, 400], ids=["one tile", "tiles of columns too"])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shortcuts_give_the_same_bits(dtype: torch.dtype, indexed: bool, entropy: bool, memory: int):
    plain = problem(dtype, indexed, entropy, memory)
    before = plain.logits.clone()
    short = replace(plain, unit=True, found=True)
    assert torch.equal(tiled.statistics(short), tiled.statistics(plain))
    wanted = gradient(plain, overwrite=False)
    assert torch.equal(gradient(short, overwrite=False), wanted)
    # Neither has been written to yet, though nothing was copied.
    assert torch.equal(plain.logits, before)
    assert torch.equal(gradient(short, overwrite=True), wanted)


@pytest.mark.parametrize(
    ("head", "unit"),
    [
        (None, True),
        (ll.Head(), True),
        (ll.Head(temperature=0.5, scale=0.5), True),
        (ll.Head(temperature=0.5), False),
        (ll.Head(scale=-1.0), False),
        (ll.Head(softcap=1.0), False),
        (ll.Head(temperature=torch.ones(R)), False),
    ],
)
def test_heads_that_leave_logits_as_they_are(head: ll.Head | None, unit: bool):
    """The result is that of a head whose temperature is a tensor, of which nobody asks."""
    logits, target = torch.randn(R, V), torch.randint(V, (R,))
    assert (head is None or head.unit) == unit
    if head is not None and head.softcap is None:
        per_row = replace(head, temperature=torch.ones(R) * head.temperature)
        assert torch.equal(ll.logprobs(logits, target, head=head).logprob, ll.logprobs(logits, target, head=per_row)[0])


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("from_hidden", [False, True])
def test_targets_inside_and_one_ignored(from_hidden: bool, ignored: bool):
    """One ignored row changes nothing of the other rows."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(R, 8, requires_grad=True), torch.randn(V, 8)
    target = torch.randint(V, (R,))
    some = target.clone()
    some[2] = -100 if ignored else some[2]
    scored = some != -100

    def run(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = ll.logprobs(ll.Logits(hidden, weight), ids) if from_hidden else ll.logprobs(hidden @ weight.T, ids)
        return out.logprob.detach(), torch.autograd.grad(out.logprob.sum(), hidden)[0]

    for mine, whole in zip(run(some), run(target), strict=True):
        assert torch.equal(mine[scored], whole[scored])
        assert not mine[~scored].any()


def test_masked_logits_at_a_low_temperature_under_a_loss_scale():
    """Factors of a row are multiplied before they meet differences, of which those at -inf must stay finite."""
    logits, target = torch.randn(R, V), torch.randint(V, (R,))
    logits[:, 5] = -torch.inf
    logits.requires_grad_()
    out = ll.logprobs(logits, target.clamp_max(4), entropy="grad", head=ll.Head(temperature=1e-3))
    (gradient,) = torch.autograd.grad(1e6 * out.entropy.sum(), logits)
    assert gradient.isfinite().all()


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_call_that_no_compiler_traces_goes_around_the_operators():
    """They take as long as the work on a hundred rows."""
    logits, target = torch.randn(R, V, requires_grad=True), torch.randint(V, (R,))
    with _Seen() as seen:
        torch.autograd.grad(ll.logprobs(logits, target).logprob.sum(), logits)
    assert seen.names
    assert not [name for name in seen.names if name.startswith("logitless")]
