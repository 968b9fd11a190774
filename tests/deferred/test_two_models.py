"""Distillation as people write it, on the logits of two models that are not computed, against torch in float64.

``strict=True`` raises wherever logits of the student are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from close import assert_close_to_truth, assert_gradient_close_to_truth
from torch import Tensor
from torch.distributions import Categorical, kl_divergence
from torch.utils.checkpoint import checkpoint

import logitless as ll
from benchmarks.bench.measure import peak_bytes
from logitless.operands.logits import MADE

B, S, V, D, W = 3, 6, 41, 5, 7
GENERATOR = torch.Generator().manual_seed(8)
IDS = torch.randint(V, (B, S, 1), generator=GENERATOR)
MASK = torch.rand(B, S, generator=GENERATOR) < 0.6

Program = Callable[[Any, Any], Any]


def results(program: Program, deferred: bool, dtype: torch.dtype = torch.float64, **kind: Any) -> list[Tensor]:
    """What a program returns, and the gradients of the student's hidden states, head and whatever else it has."""
    torch.manual_seed(4)
    sizes = {"hidden": (B, S, D), "weight": (V, D)} | ({"bias": (V,)} if kind.get("bias") else {})
    student = {name: torch.randn(size).to(torch.bfloat16).to(dtype) for name, size in sizes.items()}
    teacher = {"hidden": torch.randn(B, S, W), "weight": torch.randn(V, W), "bias": torch.randn(V)}
    teacher = {name: z.to(torch.bfloat16).to(dtype) for name, z in teacher.items()}
    leaves = [z.requires_grad_() for z in student.values()]
    if deferred:
        options = {"strict": not kind.get("computes"), "match": kind.get("match")}
        x, y = ll.Logits(**student, **options), ll.Logits(**teacher, **options)
    else:
        x, y = F.linear(*student.values()), F.linear(*teacher.values())
        # Rounded with the gradient of what was not: that of a cast would be rounded, too.
        x, y = (z + (z.bfloat16().to(dtype) - z).detach() if kind.get("match") else z for z in (x, y))
    change = kind.get("change", lambda z: z)
    out = program(change(x), change(y))
    out = list(out) if isinstance(out, (tuple, list)) else [out]
    trained = [z for z in out if z.requires_grad]
    up = [torch.rand(z.shape, dtype=z.dtype, generator=torch.Generator().manual_seed(1)) for z in trained]
    gradients = torch.autograd.grad(trained, leaves, up) if trained else []
    return [*(z.detach() for z in out), *gradients]


def same(program: Program, **kind: Any) -> None:
    torchs, ours = (results(program, deferred, **kind) for deferred in (False, True))
    truth = results(program, False, **kind | {"dtype": torch.float64})
    for right, mine, plain in zip(truth, ours, torchs, strict=True):
        assert (plain.dtype, plain.shape) == (mine.dtype, mine.shape)
        check = assert_gradient_close_to_truth if right.shape[-1:] in ((V,), (D,)) else assert_close_to_truth
        check(mine, right, plain)


def log_p(x: Any) -> Any:
    return torch.log_softmax(x, dim=-1)


def p(x: Any) -> Any:
    return F.softmax(x, -1)


PROGRAMS: dict[str, Program] = {
    **{
        f"kl_div, {reduction}": lambda x, y, r=reduction: F.kl_div(log_p(x), p(y), reduction=r)
        for reduction in ("sum", "mean", "batchmean")
    },
    **{
        f"kl_div to log-probs, {reduction}": lambda x, y, r=reduction: F.kl_div(
            log_p(x), log_p(y), reduction=r, log_target=True
        )
        for reduction in ("sum", "mean", "batchmean")
    },
    "kl_div to the student": lambda x, y: F.kl_div(log_p(y), log_p(x), reduction="batchmean", log_target=True),
    "kl_div of each row": lambda x, y: F.kl_div(log_p(x), p(y), reduction="none").sum(-1),
    "kl_div of each row to the student": lambda x, y: F.kl_div(log_p(y), p(x), reduction="none").sum(-1, keepdim=True),
    "kl_div of some rows": lambda x, y: F.kl_div(log_p(x), p(y), reduction="none")[MASK].sum(dim=-1),
    "kl_div of other rows": lambda x, y: F.kl_div(log_p(x), p(y), reduction="none")[:, 1:].transpose(0, 1).sum(-1),
    "kl_div, masked": lambda x, y: (F.kl_div(log_p(x), p(y), reduction="none") * MASK[..., None]).sum() / MASK.sum(),
    "kl_div, masked, one sample": lambda x, y: (MASK[..., None] * F.kl_div(log_p(x), p(y), reduction="none"))[1].sum(
        -1
    ),
    "kl_div, mean over all": lambda x, y: F.kl_div(log_p(x), p(y), reduction="none").mean(),
    "kl_div, mean over ids": lambda x, y: F.kl_div(log_p(x), p(y), reduction="none").mean(-1),
    "KLDivLoss at a temperature": lambda x, y: (
        torch.nn.KLDivLoss(reduction="batchmean")(F.log_softmax(x / 2, dim=-1), F.softmax(y / 2, dim=-1)) * 4
    ),
    "forward KL by hand": lambda x, y: (p(y) * (log_p(y) - log_p(x))).sum(-1),
    "reverse KL by hand": lambda x, y: ((log_p(x) - log_p(y)) * log_p(x).exp()).sum(-1).mean(),
    "reverse KL, negative and halved": lambda x, y: -(log_p(x).exp() * (log_p(x) - log_p(y)) / 2).sum(dim=-1),
    "cross entropy by hand": lambda x, y: -(p(y) * log_p(x)).sum(-1),
    "cross entropy from the student": lambda x, y: -(p(x) * log_p(y)).sum(-1),
    "cross entropy less entropy": lambda x, y: (p(y) * log_p(y) - p(y) * log_p(x)).sum(-1),
    "entropy and KL at once": lambda x, y: (p(x) * log_p(x) + (p(x) * log_p(x) - p(x) * log_p(y)) * 0.5).sum(-1),
    "cross_entropy with probabilities": lambda x, y: F.cross_entropy(x.view(-1, V), p(y).view(-1, V)),
    "cross_entropy of each row": lambda x, y: F.cross_entropy(x.flatten(0, 1), p(y.flatten(0, 1)), reduction="none"),
    "cross_entropy of one row": lambda x, y: F.cross_entropy(x[0, 1], p(y[0, 1]), reduction="sum"),
    "log-ratios of ids": lambda x, y: (log_p(x) - log_p(y)).gather(-1, IDS),
    "weighed log-ratios of ids": lambda x, y: ((log_p(x) - log_p(y)) * MASK[..., None].double()).gather(-1, IDS),
    "all log-ratios": lambda x, y: (log_p(x) - log_p(y)).sum(-1),
    "the teacher's own rows": lambda x, y: F.kl_div(log_p(x)[0], p(y)[0], reduction="sum"),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_torch_says(name: str):
    same(PROGRAMS[name])


@pytest.mark.parametrize("name", ["kl_div of each row", "reverse KL by hand", "cross entropy from the student"])
@pytest.mark.parametrize(
    "kind",
    [
        {"bias": True},
        {"change": lambda z: z / 0.7},
        {"change": lambda z: 3 * torch.tanh(z / 3)},
        {"change": lambda z: z / torch.linspace(0.5, 2, B * S, dtype=z.dtype).view(B, S, 1)},
        {"change": lambda z: z[:, :-1].transpose(0, 1)},
        {"dtype": torch.float32},
        {"match": "bfloat16"},
    ],
    ids=["bias", "temperature", "softcap", "a temperature for each row", "rows", "float32", "rounded"],
)
def test_with_what_models_do_to_logits(name: str, kind: dict[str, Any]):
    same(PROGRAMS[name], **kind)


@pytest.mark.parametrize("name", ["kl_div of each row", "reverse KL by hand"])
def test_half_precision_is_rounded_once(name: str):
    """torch rounds log-probs, their difference and each product: it is ten times as far off."""
    found, torchs = (results(PROGRAMS[name], deferred, torch.bfloat16)[0] for deferred in (True, False))
    truth = results(PROGRAMS[name], False)[0]
    assert found.dtype == torchs.dtype == torch.bfloat16
    ours, plain = ((x - truth).abs().max() / truth.abs().max() for x in (found, torchs))
    assert ours < min(2**-7, plain)


def test_a_model_and_its_detached_copy():
    """The same numbers, of which one side has a gradient."""
    same(lambda x, y: F.kl_div(log_p(x), p(y), reduction="none").sum(-1), change=lambda z: z)
    same(lambda x, _: F.kl_div(log_p(x), p(x.detach() / 2), reduction="none").sum(-1))
    same(lambda x, _: F.kl_div(log_p(x.detach()), log_p(x / 3), log_target=True, reduction="none").sum(-1))


def test_without_a_gradient():
    def program(x: Any, y: Any) -> Any:
        with torch.no_grad():
            return F.kl_div(log_p(x), p(y), reduction="none").sum(-1), F.kl_div(log_p(y), p(x), reduction="batchmean")

    same(program)


@pytest.mark.filterwarnings("ignore::logitless.operands.logits.LogitsMade")
@pytest.mark.parametrize(
    "program",
    [
        lambda x, y: F.kl_div(log_p(x), p(x / 2), reduction="none").sum(-1),
        lambda x, y: (log_p(x) - log_p(x / 2)).gather(-1, IDS),
        lambda x, y: F.kl_div(log_p(x), p(y), reduction="none").clamp(max=0.1).sum(-1),
        lambda x, y: (log_p(x) - log_p(y)).exp()[..., 3],
        lambda x, y: (log_p(x) - log_p(y)).data.sum(-1),
        lambda x, y: torch.stack([log_p(x) - log_p(y), log_p(y)]).logsumexp(0).sum(-1),
        lambda x, y: F.kl_div(2 * log_p(x), p(y), reduction="none").sum(-1),
        lambda x, y: kl_divergence(Categorical(logits=x), Categorical(logits=y)),
        lambda x, y: kl_divergence(Categorical(logits=y), Categorical(logits=x)),
        lambda x, y: (p(x) * (log_p(x) - log_p(x / 2)) + p(x) * log_p(y)).sum(-1),
        lambda x, y: ((log_p(x) - log_p(y)) * MASK[..., None]).gather(0, IDS[1:] % B),
        lambda x, y: ((log_p(x) - log_p(y)) * MASK[..., None]).gather(-1, IDS[1:, 1:]),
        lambda x, y: (log_p(x) - log_p(y)).sum(None, keepdim=True),
        lambda x, y: ((log_p(x) - log_p(y)) * 0).exp(),
    ],
    ids=[
        *("both have a gradient", "log-ratios, both have a gradient", "clamped", "another function", "data"),
        *("a mixture", "a multiple", "kl_divergence", "kl_divergence to the student", "three models"),
        *("other rows of ids", "some rows of ids", "the sum of all, with dimensions", "times 0"),
    ],
)
def test_what_nothing_answers_is_computed(program: Program):
    same(program, computes=True)


def test_a_mask_is_taken_as_it_was():
    def program(x: Any, y: Any) -> Any:
        mask, x = MASK[..., None].float(), x.detach()
        masked = F.kl_div(log_p(x), p(y), reduction="none") * mask
        mask.zero_()
        return masked.sum(-1)

    same(program)
    same(program, dtype=torch.float32)
    assert results(program, True, torch.bfloat16)[0].dtype == results(program, False, torch.bfloat16)[0].dtype


@pytest.mark.filterwarnings("ignore::logitless.operands.logits.LogitsMade")
@pytest.mark.parametrize("pick", [lambda gap, rows: gap[rows], lambda gap, rows: gap.index_select(0, rows)])
def test_rows_are_those_that_were_picked(pick: Callable[[Any, Tensor], Any]):
    """A list of rows makes a copy: neither the list nor what it was taken of changes it."""

    def program(x: Any, y: Any) -> Any:
        rows, gap = torch.tensor([2, 0]), log_p(x.detach()) - log_p(y)
        part = pick(gap, rows)
        rows.zero_()
        gap[..., 3] = 0
        return part.exp(), part.sum(-1)

    same(program, computes=True)


def test_what_has_its_dtype_already_keeps_its_graph():
    def program(x: Any, y: Any) -> Any:
        gap = log_p(x) - log_p(y)
        with torch.no_grad():
            gap = gap.double().contiguous()
        return gap.sum(-1)

    same(program)


def test_the_dtype_is_the_widest():
    def program(x: Any, y: Any) -> Any:
        return (F.softmax(x, -1, dtype=torch.float32) * (log_p(x) - log_p(y))).sum(-1)

    found, plain = (results(program, deferred, torch.bfloat16)[0] for deferred in (True, False))
    assert found.dtype == plain.dtype == torch.float32


@pytest.mark.parametrize(
    "program",
    [
        lambda x, y: F.kl_div(log_p(x), p(y), reduction="batchmean"),
        lambda x, y: F.kl_div(log_p(x), log_p(y), reduction="none", log_target=True).sum(-1),
        lambda x, y: F.cross_entropy(x.view(-1, V), p(y).view(-1, V)),
        lambda x, y: (p(x) * (log_p(x) - log_p(y))).sum(-1),
    ],
)
def test_the_dtype_under_autocast_is_torchs(program: Program):
    with torch.autocast("cpu", torch.bfloat16):
        found, plain = (results(program, deferred, torch.bfloat16)[0] for deferred in (True, False))
    assert found.dtype == plain.dtype
    torch.testing.assert_close(found, plain, atol=0.05, rtol=0.05)


def test_logits_of_either_model_are_counted():
    """The teacher forbids to compute its own, also where the student does not."""
    x = ll.Logits(torch.randn(B, D), torch.randn(V, D))
    y = ll.Logits(torch.randn(B, W), torch.randn(V, W), strict=True)
    gap = log_p(x) - log_p(y)
    with pytest.warns(ll.operands.logits.LogitsMade), pytest.raises(ll.LogitlessError, match="strict=True"):
        gap.exp()


@pytest.mark.filterwarnings("ignore::logitless.operands.logits.LogitsMade")
@pytest.mark.parametrize("look", [lambda gap: gap.view(-1), lambda gap: gap[..., :3], lambda gap: gap.unsqueeze(-1)])
def test_logits_of_each_model_are_computed_once(look: Callable[[Any], Any]):
    MADE.clear()
    same(lambda x, y: look(log_p(x) - log_p(y)), computes=True)
    assert sum(MADE.values()) == 2


def test_probabilities_know_no_ignored_index():
    x, y = (ll.Logits(torch.randn(B, D), torch.randn(V, D)) for _ in range(2))
    with pytest.raises(RuntimeError, match="ignore_index"), pytest.warns(ll.operands.logits.LogitsMade):
        F.cross_entropy(x, p(y), ignore_index=0)


@pytest.mark.filterwarnings("ignore::logitless.operands.logits.LogitsMade")
def test_what_is_written_to_is_a_tensor_like_any_other():
    """As in torch, it and its views share memory."""

    def written(x: Any, y: Any) -> Any:
        gap = log_p(x) - log_p(y)
        part, before = gap[1:], gap.sum(-1)
        gap[..., 3] = 0
        part.mul_(2)
        return before, gap.sum(-1), part.sum(-1), (gap * p(x)).sum(-1)

    MADE.clear()
    same(written, computes=True)
    assert sum(MADE.values()) == 3  # of each model once, and of p(x)


@pytest.mark.filterwarnings("ignore::logitless.operands.logits.LogitsMade")
@pytest.mark.parametrize(
    "program",
    [
        lambda x, y: checkpoint(lambda z: F.kl_div(log_p(z), p(y), reduction="none").sum(-1), x, use_reentrant=True),
        lambda x, y: F.kl_div(checkpoint(log_p, x, use_reentrant=True), p(y), reduction="none").sum(-1),
        lambda x, y: (p(y) * (log_p(y) - checkpoint(log_p, x, use_reentrant=True))).sum(-1),
        lambda x, y: (checkpoint(p, x, use_reentrant=True) * (log_p(y) - log_p(x.detach()))).sum(-1),
        lambda x, y: checkpoint(lambda z: log_p(z) - log_p(y), x, use_reentrant=True).gather(-1, IDS),
    ],
    ids=["the loss", "log-probs", "log-probs by hand", "probabilities", "log-ratios"],
)
def test_a_reentrant_checkpoint_keeps_the_gradient(program: Program):
    """What it returns is put into the graph afterwards, and its logits are not."""
    found = []
    for deferred in (False, True):
        torch.manual_seed(4)
        hidden, weight, other, head = (
            torch.randn(n, dtype=torch.float64) for n in ((B, S, D), (V, D), (B, S, W), (V, W))
        )
        hidden.requires_grad_()
        x, y = ((ll.Logits(*z) if deferred else z[0] @ z[1].T) for z in ((hidden, weight), (other, head)))
        program(x, y).square().sum().backward()
        found.append(hidden.grad)
    assert_gradient_close_to_truth(found[1], found[0], found[0])


def test_tokens_that_both_exclude():
    """torch's terms are 0 times minus infinity there, and NaN; a token that nobody says adds nothing."""
    bias = torch.zeros(V, dtype=torch.float64).masked_fill(torch.arange(V) == 3, -torch.inf)
    hidden, weight = torch.randn(B, D, dtype=torch.float64), torch.randn(V, D, dtype=torch.float64)
    x, y = ll.Logits(hidden, weight, bias=bias, strict=True), ll.Logits(-hidden, weight, bias=bias, strict=True)
    a, b = ((sign * hidden @ weight.T + bias).log_softmax(-1) for sign in (1, -1))
    wanted = (b.exp() * (b - a)).nan_to_num(0).sum(-1)
    torch.testing.assert_close(F.kl_div(log_p(x), p(y), reduction="none").sum(-1), wanted)


def test_a_token_that_only_one_excludes():
    """Also where the logits are computed; torch's gradient is NaN."""
    bias = torch.zeros(V, dtype=torch.float64).masked_fill(torch.arange(V) == 3, -torch.inf)
    hidden, weight = torch.randn(B, D, dtype=torch.float64).requires_grad_(), torch.randn(V, D, dtype=torch.float64)
    x, y = ll.Logits(hidden, weight, bias=bias), ll.Logits(hidden.detach(), weight)
    with pytest.warns(ll.operands.logits.LogitsMade):
        found = F.kl_div(log_p(y / 2), p(x), reduction="none").exp()
    z = hidden @ weight.T
    wanted = F.kl_div(log_p(z / 2), p(z + bias), reduction="none").exp()
    assert_close_to_truth(found, wanted, wanted)
    assert torch.autograd.grad(found.sum(), hidden)[0].isfinite().all()


@pytest.mark.usefixtures("one_thread")
def test_the_memory_of_two_models_is_that_of_tiles():
    rows, columns = 2048, 8192
    hidden, other = torch.randn(rows, 8), torch.randn(rows, 12)
    student, teacher = torch.nn.Linear(8, columns), torch.nn.Linear(12, columns)

    def step() -> None:
        with torch.no_grad():
            y = teacher(other)
        torch.nn.KLDivLoss(reduction="batchmean")(log_p(student(hidden) / 2), p(y / 2)).backward()
        student.zero_grad()

    logits = rows * columns * 4
    assert peak_bytes(step, "cpu") > 4 * logits
    with ll.defer(student, head=student, memory="8MiB"), ll.defer(teacher, head=teacher):
        assert peak_bytes(step, "cpu") < logits // 4


# Beside probabilities that exist: those of a teacher that is not deferred, of a server, or labels that are smoothed.

ROWS_OF_ZEROS = MASK[..., None].double() * torch.linspace(0.5, 2, B * S, dtype=torch.float64).view(B, S, 1)

OF_GIVEN: dict[str, Program] = {
    **{
        f"kl_div, {reduction}": lambda x, q, r=reduction: F.kl_div(log_p(x), q, reduction=r)
        for reduction in ("sum", "mean", "batchmean")
    },
    "kl_div to log-probs": lambda x, q: F.kl_div(log_p(x), q.log(), reduction="sum", log_target=True),
    "kl_div of the student": lambda x, q: F.kl_div(q.log(), p(x), reduction="batchmean"),
    "kl_div of the student's log-probs": lambda x, q: F.kl_div(q.log(), log_p(x), reduction="sum", log_target=True),
    "kl_div that does not add up to 1": lambda x, q: F.kl_div(log_p(x), q * ROWS_OF_ZEROS.to(q), reduction="sum"),
    "kl_div to log-probs that do not": lambda x, q: F.kl_div(log_p(x), q.log() - 1, reduction="sum", log_target=True),
    "kl_div to logits": lambda x, q: F.kl_div(q.log() + 2, p(x), reduction="sum"),
    "cross entropy": lambda x, q: F.cross_entropy(x.view(-1, V), q.view(-1, V)),
    "cross entropy of each row": lambda x, q: F.cross_entropy(x.flatten(0, 1), q.flatten(0, 1), reduction="none"),
    "cross entropy of one row": lambda x, q: F.cross_entropy(x[0, 1], q[0, 1]),
    "cross entropy, masked": lambda x, q: F.cross_entropy(
        x.view(-1, V), (q * ROWS_OF_ZEROS.to(q)).view(-1, V), reduction="none"
    ),
    "KLDivLoss": lambda x, q: torch.nn.KLDivLoss(reduction="batchmean")(F.log_softmax(x / 2, dim=-1), q),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", OF_GIVEN)
def test_beside_probabilities_that_exist(name: str, dtype: torch.dtype):
    def program(x: Any, y: Any) -> Any:
        q = p(y.computed() if isinstance(y, ll.Logits) else y)
        before = q.clone()
        found = OF_GIVEN[name](x, q)
        assert torch.equal(q, before)
        return found

    same(program, dtype=dtype)


def test_given_probabilities_decide_on_the_dtype():
    def program(x: Any, y: Any) -> Any:
        q = p((y.computed() if isinstance(y, ll.Logits) else y).float())
        return F.kl_div(log_p(x), q, reduction="sum"), F.kl_div(log_p(x), q.bfloat16(), reduction="sum")

    found, torchs = (results(program, deferred, torch.bfloat16) for deferred in (True, False))
    assert [x.dtype for x in found] == [x.dtype for x in torchs]
    truth = results(program, False)[0]
    assert (found[0] - truth).abs() < (torchs[0] - truth).abs()


@pytest.mark.filterwarnings("ignore::logitless.operands.logits.LogitsMade")
@pytest.mark.parametrize(
    "program",
    [
        lambda x, q: F.kl_div(log_p(x), q, reduction="none").sum(-1),
        lambda x, q: F.kl_div(log_p(x), q[0], reduction="sum"),
        lambda x, q: F.cross_entropy(x.view(-1, V), q.view(-1, V), label_smoothing=0.1),
        lambda x, q: F.cross_entropy(x.view(-1, V), q.view(-1, V), weight=torch.linspace(0, 1, V, dtype=q.dtype)),
        lambda x, q: (q * (q.log() - log_p(x))).sum(-1),
    ],
    ids=["not reduced", "of another shape", "smoothed", "class weights", "by hand"],
)
def test_what_nothing_answers_beside_a_tensor_is_computed(program: Program):
    same(lambda x, y: program(x, p(y.computed() if isinstance(y, ll.Logits) else y)), computes=True)


@pytest.mark.filterwarnings("ignore::logitless.operands.logits.LogitsMade")
def test_given_probabilities_with_a_gradient_get_it():
    hidden, weight = torch.randn(B, D, dtype=torch.float64), torch.randn(V, D, dtype=torch.float64)
    q = torch.rand(B, V, dtype=torch.float64, requires_grad=True)
    losses = [F.kl_div(log_p(x), q, reduction="sum") for x in (ll.Logits(hidden, weight), hidden @ weight.T)]
    ours, torchs = (torch.autograd.grad(loss, q)[0] for loss in losses)
    assert_gradient_close_to_truth(ours, torchs, torchs)


# Log-probs as distributions of torch write them.

OF_ONE: dict[str, Callable[[Any], Any]] = {
    "logits less log Z": lambda x: (x - x.logsumexp(-1, keepdim=True)).gather(-1, IDS),
    "logits less log Z, by another name": lambda x: torch.sub(x, torch.logsumexp(x, -1).unsqueeze(-1)).gather(-1, IDS),
    "log_prob": lambda x: Categorical(logits=x, validate_args=True).log_prob(IDS[..., 0]),
    "entropy": lambda x: Categorical(logits=x, validate_args=True).entropy(),
    "both": lambda x: [f(Categorical(logits=x)) for f in (lambda d: d.entropy(), lambda d: d.log_prob(IDS[..., 0]))],
    "unchecked": lambda x: Categorical(logits=x, validate_args=False).log_prob(IDS[..., 0]),
    "probabilities of log-probs": lambda x: F.softmax(F.log_softmax(x, -1), -1).gather(-1, IDS),
    "take_along_dim": lambda x: (log_p(x).take_along_dim(IDS, -1), torch.take_along_dim(x, indices=IDS, dim=2)),
}


@pytest.mark.parametrize("name", OF_ONE)
def test_log_probs_as_distributions_write_them(name: str):
    same(lambda x, _: OF_ONE[name](x))


@pytest.mark.filterwarnings("ignore::logitless.operands.logits.LogitsMade")
@pytest.mark.parametrize("bounds", [(-3.0, None), (None, -2.0), (torch.finfo(torch.float64).min, -2.0)])
def test_a_log_prob_that_is_clamped_is_clamped(bounds: Any):
    same(lambda x, _: log_p(x).clamp(*bounds).gather(-1, IDS), computes=True)


def test_a_finite_log_prob_of_a_token_that_is_excluded():
    bias = torch.zeros(V).masked_fill(torch.arange(V) == 3, -torch.inf)
    hidden, weight, least = torch.randn(B, D), torch.randn(V, D), torch.finfo(torch.float32).min
    finite = log_p(ll.Logits(hidden, weight, bias=bias)).clamp(min=least)
    with pytest.warns(ll.operands.logits.LogitsMade):
        assert finite.gather(-1, torch.full((B, 1), 3)).eq(least).all()
    with pytest.warns(ll.operands.logits.LogitsMade):
        assert finite.sum(-1).isfinite().all()


def test_a_clamped_log_prob_has_a_graph_of_its_own():
    x = ll.Logits(torch.randn(B, D, requires_grad=True), torch.randn(V, D))
    logs = log_p(x)
    with torch.no_grad():
        assert not logs.clamp(min=torch.finfo(torch.float32).min).requires_grad


def test_distributions_in_inference_mode():
    x = ll.Logits(torch.randn(B, D), torch.randn(V, D))
    with torch.inference_mode(), pytest.warns(ll.operands.logits.LogitsMade):
        found = Categorical(logits=x, validate_args=False).log_prob(IDS[:, 0, 0])
    torch.testing.assert_close(found, Categorical(logits=x.computed()).log_prob(IDS[:, 0, 0]))


def test_a_bad_sample_is_refused_as_by_torch():
    logits = ll.Logits(torch.randn(4, D), torch.randn(V, D), strict=True)
    with pytest.raises(ValueError, match="within the support"):
        Categorical(logits=logits, validate_args=True).log_prob(torch.tensor([0, 1, 2, V]))
    with pytest.raises(ValueError, match="invalid values"), pytest.warns(ll.operands.logits.LogitsMade):
        Categorical(logits=ll.Logits(torch.full((4, D), torch.nan), torch.randn(V, D)), validate_args=True)


def less_transposed(x: Any) -> Any:
    return x - x.logsumexp(-1).T[..., None]


@pytest.mark.filterwarnings("ignore::logitless.operands.logits.LogitsMade")
@pytest.mark.parametrize(
    "less",
    [
        lambda x: x - x.logsumexp(-1, keepdim=True).detach(),
        lambda x: x - (x / 2).logsumexp(-1, keepdim=True),
        lambda x: x - x.logsumexp(-1, keepdim=True) * 2,
        lambda x: x - x.logsumexp(-1)[:, :1, None],
        lambda x: x - x.logsumexp(-1)[:, :3].transpose(0, 1)[:1].unsqueeze(-1)[:, :1],
        lambda x: less_transposed(x[:3, :3]),
        lambda x: torch.sub(x, x.logsumexp(-1, keepdim=True), alpha=2),
    ],
    ids=["detached", "of others", "doubled", "broadcast", "of other rows", "transposed", "alpha"],
)
def test_what_is_not_log_z_is_subtracted_as_it_is(less: Callable[[Any], Any]):
    same(lambda x, _: less(x).gather(-1, IDS[: less(x).shape[0], : less(x).shape[1]]), computes=True)


def test_log_z_without_a_graph_leaves_its_gradient_out():
    def program(x: Any, _: Any) -> Any:
        with torch.no_grad():
            z = x.logsumexp(-1, keepdim=True)
        return (x - z).gather(-1, IDS)

    with pytest.warns(ll.operands.logits.LogitsMade):
        same(program, computes=True)
