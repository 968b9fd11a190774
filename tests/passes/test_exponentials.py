"""Exponentials relative to a guessed reference, and gradients from them: every backend against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import logitless as ll
from logitless.backends import load
from logitless.backends.contract import Problem, Running
from logitless.route import plan as plans
from logitless.softmax import SKIP, Coefficients, Normaliser, merge

BACKENDS = ("reference", "tiled", "triton")
INF = torch.inf
# bfloat16 keeps 8 digits of a number, and rounds by half of the last.
ROUNDING = 2**-8


def problem_of(logits: Tensor, column: Tensor, first: int = 0, squash: float = 0.0, gain: float = 1.25) -> Problem:
    rows = len(column)
    return Problem(
        logits=logits,
        index=None,
        column=column,
        gain=torch.full((rows,), gain, device=logits.device),
        squash=squash,
        columns=logits.shape[1],
        entropy=True,
        memory=1 << 14,
        first=first,
    )


def z_of(problem: Problem) -> Tensor:
    x, gain = problem.logits.double(), problem.gain.double()[:, None]
    return gain * torch.tanh(problem.squash * x) if problem.squash else gain * x


def run(backend: str, problem: Problem, before: Tensor, dtype=torch.bfloat16, slope=False, **options):
    stats = torch.full((4, problem.num_rows), torch.nan, device=before.device)
    reference = torch.full_like(before, torch.nan)
    out = torch.full(problem.logits.shape, torch.nan, dtype=dtype, device=before.device)
    load(backend).exponentials(problem, stats, Running(before, reference, **options), out, slope)
    return stats, reference, out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1, 33, 1024, 2500])
def test_guesses(backend: str, dtype: torch.dtype, width: int, device):
    """Right, too low, too high, far too low and far too high, and none yet."""
    off = torch.tensor([0.0, 7.0, -7.0, 9.0, -9.0, 120.0, -120.0, INF], device=device)
    logits = torch.randn(len(off), width, device=device)
    problem = problem_of(logits, torch.arange(len(off), device=device) * 300)
    z = z_of(problem)
    top = z.amax(1)
    stats, reference, out = run(backend, problem, (top - off).float(), dtype)
    held = off.abs() <= 8
    torch.testing.assert_close(reference.double(), torch.where(held, top - off, top), atol=1e-5, rtol=1e-5)
    # What is below e^-9 of the largest is subnormal in float16.
    wanted = (z - reference.double()[:, None]).exp()
    columns = torch.arange(width, device=device)
    wanted = torch.where(columns == problem.column[:, None], 0.0, wanted)
    torch.testing.assert_close(out.double(), wanted, rtol=ROUNDING, atol=1e-7 if dtype == torch.float16 else 0.0)
    torch.testing.assert_close(stats[0].double(), top, atol=1e-6, rtol=1e-6)
    e = (z - top[:, None]).exp()
    torch.testing.assert_close(stats[1].double(), e.sum(1), rtol=3e-6, atol=0.0)
    torch.testing.assert_close(stats[2].double(), (e * (z - top[:, None])).sum(1), rtol=1e-5, atol=1e-5)
    here = problem.column < width
    torch.testing.assert_close(stats[3, here].double(), z[here].gather(1, problem.column[here, None])[:, 0].to(z))
    assert stats[3, ~here].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_follow_the_reference(backend: str, device):
    """Upwards only, and by the same factor as the exponentials that come next."""
    logits = torch.randn(3, 700, device=device)
    problem = problem_of(logits, torch.full((3,), -1, device=device))
    top = z_of(problem).amax(1)
    before = (top - torch.tensor([20.0, 0.0, -20.0], device=device)).float()
    sums = torch.randn(3, 50, device=device)
    was = sums.double()
    stats, reference, _ = run(backend, problem, before, drop=INF, sums=sums)
    assert reference.tolist() == pytest.approx([float(top[0]), float(before[1]), float(before[2])])
    torch.testing.assert_close(sums.double(), was * (before.double() - reference.double()).exp()[:, None])
    # The third is below its reference by 20, and its statistics are as good as those of the others.
    whole = merge(stats[None].double())
    torch.testing.assert_close(whole[0] + whole[1].log(), z_of(problem).logsumexp(1), atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_far_below_the_reference_nothing_is_lost_or_invented(backend: str, device):
    """200 below, e^(z - reference) is 0; as a part of the row it is, too, and the merged row says so."""
    logits = torch.stack([torch.zeros(40), torch.full((40,), -200.0), torch.full((40,), -INF)]).to(device)
    column = torch.full((3,), -1, device=device)
    stats, _, out = run(backend, problem_of(logits, column, gain=1.0), torch.zeros(3, device=device), drop=INF)
    assert out.double().sum(1).tolist() == [40.0, 0.0, 0.0]
    zero = torch.tensor([0.0, 1.0, 0.0, torch.nan], device=device)[:, None].expand(4, 3)
    merged = merge(torch.stack([zero, stats]))
    assert merged[:2].tolist() == [[0.0, 0.0, 0.0], [41.0, 1.0, 1.0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_nothing_and_rows_to_skip(backend: str, device):
    """A tile of -inf leaves no reference behind; skipped rows may hold anything; NaN stays NaN."""
    logits = torch.stack([torch.full((20,), -INF), torch.full((20,), torch.nan), torch.ones(20)]).to(device)
    logits[2, 3] = torch.nan
    column = torch.tensor([-1, SKIP, -1], device=device)
    stats, reference, out = run(backend, problem_of(logits, column), torch.zeros(3, device=device))
    assert reference[0] == -INF
    assert out[:2].eq(0).all()
    # A maximum of 0 here would outweigh what comes near -300.
    assert stats[:2, 0].tolist() == [-INF, 0.0]
    assert stats[1, 2].isnan()
    later = problem_of(torch.full((3, 20), -300.0, device=device), column, first=20)
    sums = torch.zeros(3, 4, device=device)
    stats, reference, out = run(backend, later, reference, drop=INF, sums=sums)
    assert reference[0] == -375.0
    assert out[0].double().tolist() == [1.0] * 20
    assert stats[:2, 0].tolist() == [-375.0, 20.0]
    assert sums[0].eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_softcap_and_its_slope(backend: str, device):
    logits = 15 * torch.randn(5, 300, device=device)
    problem = problem_of(logits, torch.arange(5, device=device), squash=1 / 30, gain=30.0)
    for before in (25.0, 0.0):
        _, reference, out = run(backend, problem, torch.full((5,), before, device=device), torch.float32, slope=True)
        y = torch.tanh(logits.double() / 30)
        wanted = (z_of(problem) - reference.double()[:, None]).exp() * (1 - y * y)
        wanted = torch.where(torch.eye(5, 300, device=device) > 0, 0.0, wanted)
        torch.testing.assert_close(out.double(), wanted, rtol=3e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_from_exponentials(backend: str, entropy: bool, in_place: bool, device):
    """Slabs with references of their own, one of them all -inf, and a target in each of the others."""
    rows, slab, width = 6, 130, 400
    z = 3 * torch.randn(rows, width, device=device).double()
    z[0, slab : 2 * slab] = -INF
    column = torch.tensor([0, 131, 270, 399, -1, SKIP], device=device)
    parts = z.split(slab, 1)
    references = torch.stack([part.amax(1) for part in parts]).float() + torch.tensor([0.0, 2.0, -3.0, 1.0])[
        :, None
    ].to(z)
    references = references.float()
    base = torch.where(references == -INF, 0.0, references).double()
    e = torch.cat([(part - base[i][:, None]).exp() for i, part in enumerate(parts)], 1)
    e[torch.arange(5), column[:5].clamp_min(0)] = torch.where(column[:5] >= 0, 0.0, e[torch.arange(5), 0])
    e = e.bfloat16()
    m = z.amax(1)
    norm = Normaliser(m.float(), (z.logsumexp(1) - m).float())
    plain, product, at = (torch.randn(rows, device=device) for _ in range(3))
    coef = Coefficients(plain, product if entropy else None, at)
    problem = problem_of(e, column)
    out = e if in_place else torch.empty_like(e)
    exact = e.double()
    load(backend).gradient_from(problem, references, slab, norm, coef, out)
    log_e = exact.log() + torch.cat([base[i][:, None].expand_as(part) for i, part in enumerate(parts)], 1)
    d = (log_e - m[:, None]).clamp_min(-1e30)
    wanted = (log_e - z.logsumexp(1)[:, None]).exp() * (plain[:, None] + (product[:, None] * d if entropy else 0.0))
    wanted = torch.where(torch.arange(width, device=device) == column[:, None], at[:, None].double(), wanted) * 1.25
    wanted[5] = 0.0
    torch.testing.assert_close(out.double(), wanted, rtol=ROUNDING, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_stored_rows_that_end_within_a_block(share: float, backend: str, monkeypatch):
    """More rows than columns are worked off in blocks: of one of them a part is stored, and every row must be right."""
    monkeypatch.setattr(plans, "WORK", 16 << 10)
    rows, columns = 300, 64
    hidden, weight = torch.randn(rows, 16).bfloat16().requires_grad_(), (torch.randn(columns, 16) / 4).bfloat16()
    target, weight = torch.randint(columns, (rows,)), weight.requires_grad_()
    memory = (16 << 10) + int(share * rows * columns * 2)
    options = {"entropy": "grad", "memory": memory, "backend": backend}
    plan = ll.explain(ll.logprobs, ll.Logits(hidden, weight), target, **options)
    assert plan.backward is not None
    assert plan.backward.block < plan.kept_rows < rows
    assert plan.kept_rows % plan.backward.block
    out = ll.logprobs(ll.Logits(hidden, weight), target, **options)
    (out.logprob.sum() + 0.3 * out.entropy.sum()).backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logp = (exact[0] @ exact[1].T).log_softmax(-1)
    (logp.gather(1, target[:, None]).sum() - 0.3 * (logp.exp() * logp).sum()).backward()
    off = (hidden.grad.double() - exact[0].grad).norm(dim=1) / exact[0].grad.norm(dim=1)
    assert off.max() < 1.2e-2
    assert (weight.grad.double() - exact[1].grad).norm() < 4e-3 * exact[1].grad.norm()
