"""TRL's distillation with and without ours: its kernel from both hidden states, and real training runs.

The tolerance rule with TRL's own function as the yardstick: at most twice its error to float64.
"""

from __future__ import annotations

import math

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import put_first
from tiny import offline_trainer

import logitless
from logitless import LogitlessError
from logitless.adapters.audit import Audit

put_first("trl")
pytest.importorskip("trl")

N, V, STUDENT, TEACHER = 37, 211, 16, 24
BETAS = (0.0, 1.0, 0.3)
HEADS = {"plain": (), "all": (0.8, 0.5, 4.0, 1.5, 7.0)}
"""Temperature, and scale and softcap of student and teacher."""


def kernel():
    return pytest.importorskip("trl.kernels.chunked_divergence").ChunkedDivergenceFunction


def operands(dtype=torch.float32):
    """The student's three, which get a gradient, and the teacher's."""
    student = [torch.randn(N, STUDENT), torch.randn(V, STUDENT), torch.randn(V)]
    teacher = [torch.randn(N, TEACHER), torch.randn(V, TEACHER), torch.randn(V)]
    return [x.to(dtype).requires_grad_() for x in student], [x.to(dtype) for x in teacher]


def true_divergence(student, teacher, beta, temperature=1.0, scale=1.0, softcap=None, scale_t=1.0, softcap_t=None):
    def log_softmax(hidden, weight, bias, scale, softcap):
        z = (hidden @ weight.T + bias) * scale
        return ((z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature).log_softmax(-1)

    log_p, log_q = log_softmax(*student, scale, softcap), log_softmax(*teacher, scale_t, softcap_t)
    p, q = log_p.exp(), log_q.exp()
    entropy = -(p * log_p).sum(-1)
    if beta == 0:
        return (q * (log_q - log_p)).sum(-1), entropy
    if beta == 1:
        return (p * (log_p - log_q)).sum(-1), entropy
    m = (beta * q + (1 - beta) * p).log()
    return (beta * q * (log_q - m) + (1 - beta) * p * (log_p - m)).sum(-1), entropy


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel(beta, head, dtype):
    student, teacher = operands(dtype)
    upstream = torch.randn(N)
    exact = [x.detach().double().requires_grad_() for x in student]
    wanted = true_divergence(exact, [x.double() for x in teacher], beta, *HEADS[head])
    theirs = kernel().apply(*student, *teacher, beta, *HEADS[head])
    assert logitless.install("trl", memory="64KiB", audit=5).replaced[1].name.endswith("DivergenceFunction.apply")
    ours = kernel().apply(*student, *teacher, beta, *HEADS[head])
    for i, name in enumerate(("divergence", "entropy")):
        assert ours[i].dtype == theirs[i].dtype == torch.float32
        assert ours[i].requires_grad == theirs[i].requires_grad == (name == "divergence")
        assert_close_to_truth(ours[i].detach(), wanted[i].detach(), theirs[i].detach(), name)
    gradients = [
        torch.autograd.grad(x, leaves, upstream.to(x))
        for x, leaves in ((ours[0], student), (wanted[0], exact), (theirs[0], student))
    ]
    for mine, exactly, other in zip(*gradients, strict=True):
        assert mine.dtype == other.dtype
        assert_gradient_close_to_truth(mine, exactly, other)
    status = logitless.status().hosts[0]
    assert (status.calls, status.passed_on) == (1, 0)
    assert status.audit.rows == 10
    assert status.audit.passed


def test_the_audit_notices_another_divergence():
    student, teacher = operands()
    found, audit = true_divergence(student, teacher, 0.3), Audit(rows=5)
    both = [(logitless.Logits(h, w, bias=b), logitless.Head()) for h, w, b in (student, teacher)]
    audit.of_pair("f", *both, 0.3, *found)
    assert audit.report().passed
    with pytest.warns(RuntimeWarning, match="f divergence differs from float64"):
        audit.of_pair("f", *both, 0.7, *found)
    assert not audit.report().passed


def test_autocast_and_a_head_with_padding():
    """Operands in the dtype of autocast; rows of the teacher's head beyond the student's vocabulary do not count."""
    student, teacher = operands()
    padded = [teacher[0], *(torch.cat([x, x[:5]]) for x in teacher[1:])]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = kernel().apply(*student, *padded, 0.3)[0]
        logitless.install("trl")
        ours = kernel().apply(*student, *padded, 0.3)[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    with pytest.raises(LogitlessError, match="the teacher's head has 210 rows and the student's 211"):
        kernel().apply(*student, teacher[0], teacher[1][:-1], None, 0.3)
    student[1].ds_id = 3
    kernel().apply(*student, *teacher, 1.0)
    assert logitless.status().hosts[0].replaced[1].why == {"ZeRO-3": 1}


def weights(run) -> torch.Tensor:
    return torch.cat([x.detach().flatten() for x in run.model.parameters()])


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.filterwarnings("default")
def test_a_real_run(beta, tmp_path):
    """The same prompts and seed with and without: the same numbers in the log and the same weights, every call ours."""
    runs = []
    for installed in (False, True):
        if installed:
            logitless.install("trl", audit=4)
        run = offline_trainer("Distillation", tmp_path, max_completion_length=5, beta=beta)
        before = weights(run)
        run.train()
        history = [entry for entry in run.state.log_history if "loss" in entry]
        runs.append((history, weights(run) - before))
    (plain, their_moves), (ours, our_moves) = runs
    assert len(plain) == len(ours) == 2
    for theirs, mine in zip(plain, ours, strict=True):
        assert theirs.keys() == mine.keys()
        assert {"loss", "grad_norm", "entropy"} <= mine.keys()
        assert mine["loss"] > 0.01
        for number in mine.keys() - {"step_time"}:
            assert math.isclose(mine[number], theirs[number], rel_tol=1e-4, abs_tol=1e-5), number
    # As the numbers above: of all that the weights have moved.
    assert (our_moves - their_moves).norm() <= 1e-4 * their_moves.norm()
    report = logitless.status().hosts[0]
    assert (report.replaced[1].calls, report.passed_on) == (2, 0)
    assert report.audit.rows == 16
    assert report.audit.passed
