"""A teacher that sent K log-probs of every row, against float64: the rest as one outcome, or left out of both."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from calls import from_hidden, logits_of, loss_from_hidden
from close import assert_close_to_truth, assert_gradient_close_to_truth
from shared.divergence import KINDS
from shared.top_k_teacher import shaped, textbook
from torch import Tensor

import logitless as ll
from benchmarks.bench.measure import peak_bytes
from logitless import Head, LogitlessError, Teacher, VocabShard
from logitless.backends.divergences import Divergence, elements
from logitless.readings.outcomes import outcome_gradient

# NumPy, which runs the kernels in Triton's interpreter, reports what a selection then leaves out.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")

TAILS = ("bucket", "renormalise")
ROWS, VOCAB, K = 13, 83, 6


class Batch(NamedTuple):
    """Operands, and what a teacher sent: padding at the front, in the middle and at the end, a row of nothing else."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    target: Tensor
    logprobs: Tensor
    ids: Tensor

    @staticmethod
    def draw(device="cpu", dtype=torch.float32, size: float = 1.0) -> Batch:
        hidden, weight, bias = size * torch.randn(ROWS, 16), torch.randn(VOCAB, 16), torch.randn(VOCAB)
        logprobs, ids = (3 * torch.randn(ROWS, VOCAB)).log_softmax(-1).topk(K)
        ids[1, 0] = ids[2, 3] = ids[4, -1] = -1
        ids[5] = -1
        target = torch.randint(VOCAB, (ROWS,))
        target[3], target[6] = -100, ids[6, 2]
        floats = (x.to(device, dtype) for x in (hidden, weight, bias))
        return Batch(*floats, target.to(device), logprobs.to(device), ids.to(device))

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        return [x.detach().to(dtype).requires_grad_() for x in self[:3]]

    def teacher(self, tail: Any) -> Teacher:
        return Teacher.from_top_k(self.logprobs, self.ids, tail)


class Outcome(NamedTuple):
    values: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]


def outcomes(z: Tensor, batch: Batch, tail: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Log-probs of student and teacher, by a mask over the vocabulary."""
    empty, at = batch.ids < 0, batch.ids.clamp_min(0)
    log_p, log_q = z.log_softmax(-1), batch.logprobs.double().masked_fill(empty, -torch.inf)
    listed = log_p.gather(1, at).masked_fill(empty, -torch.inf)
    if tail == "bucket":
        taken = torch.zeros_like(z, dtype=torch.bool)
        taken[empty.logical_not().nonzero()[:, 0], batch.ids[~empty]] = True
        rest = z.masked_fill(taken, -torch.inf).logsumexp(-1) - z.logsumexp(-1)
        left = (1 - log_q.exp().sum(-1, keepdim=True)).log()
        return torch.cat([listed, rest[:, None]], 1), torch.cat([log_q, left], 1).to(dtype)
    none = empty.all(-1, keepdim=True)
    listed = listed - listed.masked_fill(none, 0.0).logsumexp(-1, keepdim=True)
    return listed, (log_q - log_q.masked_fill(none, 0.0).logsumexp(-1, keepdim=True)).to(dtype)


def right(batch: Batch, kind: str, tail: str, dtype: torch.dtype, head: Head | None = None, **numbers) -> Outcome:
    hidden, weight, bias = batch.leaves(dtype)
    z = shaped(hidden @ weight.T + bias, head)
    counted = batch.target != -100
    log_p, log_q = outcomes(z, batch, tail, dtype)
    found = torch.where(counted, textbook(log_p, log_q, kind, **numbers), 0.0)
    entropy = torch.where(counted, -(log_q.exp() * log_q.masked_fill(log_q == -torch.inf, 0.0)).sum(-1), 0.0)
    (found * torch.arange(1, ROWS + 1, device=found.device)).sum().backward()
    return Outcome((found.detach(), entropy), tuple(x.grad for x in (hidden, weight, bias)))  # pyright: ignore


def ours(
    batch: Batch, kind: Any, tail: str, head: Head | None = None, options: dict | None = None, **numbers
) -> Outcome:
    hidden, weight, bias = batch.leaves(batch.hidden.dtype)
    given: dict[str, Any] = {"teacher": batch.teacher(tail), "divergence": Divergence(kind, **numbers), "head": head}
    out = from_hidden(hidden, weight, batch.target, bias=bias, entropy="grad", **given, **(options or {}))
    (out.divergence * torch.arange(1, ROWS + 1, device=out.divergence.device)).sum().backward()
    values = (out.divergence.detach(), out.teacher_entropy)
    return Outcome(values, tuple(x.grad for x in (hidden, weight, bias)))  # pyright: ignore


def assert_right(found: Outcome, exact: Outcome, plain: Outcome) -> None:
    for i, x in enumerate(zip(found.values, exact.values, plain.values, strict=True)):
        assert_close_to_truth(*(torch.atleast_1d(y) for y in x), name=f"value {i}")
    for name, *x in zip(("hidden", "weight", "bias"), found.gradients, exact.gradients, plain.gradients, strict=True):
        assert_gradient_close_to_truth(*x, name=f"d_{name}")


def check(batch: Batch, kind: str, tail: str, head: Head | None = None, options: dict | None = None) -> None:
    exact, plain = (right(batch, kind, tail, x, head, **KINDS[kind]) for x in (torch.float64, batch.hidden.dtype))
    assert_right(ours(batch, kind, tail, head, options, **KINDS[kind]), exact, plain)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, tail: str, device: torch.device):
    """In several tiles, so that the rest of a row is merged from parts."""
    check(Batch.draw(device), kind, tail, options={"memory": 3000, "backend": "tiled"})


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("tail", TAILS)
def test_backends(tail: str, backend: str, device: torch.device):
    check(Batch.draw(device), "forward_kl", tail, options={"memory": 3000, "backend": backend})


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(
    "head",
    [Head(temperature=0.7), Head(scale=-0.5), Head(softcap=3.0, temperature=1.3), Head(vocab_size=VOCAB - 1)],
    ids=["temperature", "negative", "softcap", "padding"],
)
def test_heads(head: Head, tail: str, device: torch.device):
    batch = Batch.draw(device)
    batch.target.clamp_max_(VOCAB - 2)
    batch.ids[batch.ids == VOCAB - 1] = -1
    check(batch, "jsd", tail, head)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, tail: str, device: torch.device):
    batch = Batch.draw(device, dtype)
    exact = right(batch, "reverse_kl", tail, torch.float64)
    found = ours(batch, "reverse_kl", tail, options={"memory": "64MiB"})
    if dtype == torch.float64:
        assert_right(found, exact, exact)
        return
    # Results are float32 from the operands as they are; only gradients are rounded.
    wide = batch._replace(**{name: getattr(batch, name).float() for name in ("hidden", "weight", "bias")})
    plain, rounded = (right(x, "reverse_kl", tail, torch.float32) for x in (wide, wide))
    gradients = tuple(x.bfloat16() for x in rounded.gradients)
    assert_right(found, exact, Outcome(plain.values, gradients))


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "hellinger"])
def test_a_student_that_is_nearly_certain(kind: str, device: torch.device):
    """All other ids have less than float32 can tell from 0 beside 1, and the teacher gives them a few percent."""
    batch = Batch.draw(device)
    hidden = batch.hidden.clone()
    hidden += 4.0 * batch.weight[batch.ids[:, 1].clamp_min(0)]
    batch = batch._replace(hidden=hidden)
    z = batch.hidden.double() @ batch.weight.double().T + batch.bias.double()
    rest = outcomes(z, batch, "bucket", torch.float64)[0][:, -1].exp()
    assert ((rest > 0) & (rest < 6e-8)).sum() >= 4
    check(batch, kind, "bucket")


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "hellinger"])
def test_the_gradient_of_a_nearly_certain_outcome(kind: str):
    """Each element of a row has its digits, also that of the certain outcome, which is what is left of far larger
    ones."""
    z, log_q = torch.randn(ROWS, K), torch.randn(ROWS, K).log_softmax(-1)
    z[:, 1] += 15
    leaf = z.double().requires_grad_()
    textbook(leaf.log_softmax(-1), log_q.double(), kind).sum().backward()
    assert leaf.grad is not None
    log_p = z.log_softmax(-1)
    slopes = elements(log_p, log_q, log_q - log_p, Divergence(kind)).weighted_slope  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(outcome_gradient(log_p, slopes).double(), leaf.grad, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["tv", "forward_kl"])
def test_a_student_that_excludes_all_ids(kind: Any, device: torch.device):
    """There is no distribution over what is left of them: NaN, and not what the padding would make of it."""
    batch = Batch.draw(device)
    row = int(((batch.ids < 0).any(1) & (batch.ids >= 0).any(1) & (batch.target >= 0)).nonzero()[0])
    batch.bias[batch.ids[row][batch.ids[row] >= 0]] = -torch.inf
    logits = ll.Logits(batch.hidden, batch.weight, bias=batch.bias)
    out = ll.logprobs(logits, batch.target, teacher=batch.teacher("renormalise"), divergence=kind)
    assert out.divergence[row].isnan()


def test_what_else_is_returned(device: torch.device):
    """The student's own over the vocabulary with a bucket, over the ids without; the teacher's as far as known."""
    batch = Batch.draw(device)
    # Rows without padding whose target is the third id.
    batch.target[6:] = batch.ids[6:, 2]
    batch.target[9] = next(i for i in range(VOCAB) if i not in batch.ids[9].tolist())
    over = {}
    for tail in TAILS:
        over[tail] = ll.logprobs(
            ll.Logits(batch.hidden, batch.weight), batch.target, teacher=batch.teacher(tail), entropy="grad"
        )
        listed = (batch.ids == batch.target[:, None]).any(1)
        assert listed[6]
        missing = torch.isnan if tail == "bucket" else torch.isneginf
        assert missing(over[tail].teacher_logprob).tolist() == (~listed & (batch.target != -100)).tolist()
    whole = ll.logprobs(ll.Logits(batch.hidden, batch.weight), batch.target, entropy="value")
    for name in ("logprob", "entropy", "log_z"):
        torch.testing.assert_close(getattr(over["bucket"], name), getattr(whole, name))
    assert over["bucket"].teacher_logprob[6] == batch.logprobs[6, 2]
    found = over["renormalise"]
    listed = batch.target == batch.ids[:, 2]

    def over_ids(dtype: torch.dtype) -> Tensor:
        z = (batch.hidden.to(dtype) @ batch.weight.to(dtype).T).gather(1, batch.ids.clamp_min(0))[listed]
        log_p = z.log_softmax(-1)
        return torch.stack([log_p[:, 2], -(log_p.exp() * log_p).sum(-1), z.logsumexp(-1)])

    own = torch.stack([found.logprob, found.entropy, found.log_z])[:, listed]
    assert_close_to_truth(own, over_ids(torch.float64), over_ids(torch.float32))
    # A row without a single id has nothing to compare.
    assert found.divergence[5] == 0
    assert over["bucket"].divergence[5] == 0


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("tail", TAILS)
def test_from_logits(tail: Any, overwrite: bool, device: torch.device):
    """Divergence, and over the ids what belongs to the student; some rows of them, in another order."""
    batch = Batch.draw(device)
    order = torch.randperm(ROWS + 4, device=device)[:ROWS]
    logits = torch.randn(ROWS + 4, VOCAB, device=device)

    def both(dtype: torch.dtype) -> Outcome:
        leaf = logits.detach().to(dtype).requires_grad_()
        log_p, log_q = outcomes(leaf[order], batch, tail, dtype)
        found = torch.where(batch.target != -100, textbook(log_p, log_q, "jsd", beta=0.3), 0.0)
        (found * torch.arange(1, ROWS + 1, device=device)).sum().backward()
        return Outcome((found.detach(),), (leaf.grad,))  # pyright: ignore[reportArgumentType]

    leaf = logits.detach().requires_grad_()
    given = leaf * 1.0 if overwrite else leaf
    out = ll.logprobs(
        ll.Logits.given(given, overwrite=overwrite),
        (order, batch.target),
        teacher=batch.teacher(tail),
        divergence=Divergence("jsd", beta=0.3),
        entropy="grad",
    )
    (out.divergence * torch.arange(1, ROWS + 1, device=device)).sum().backward()
    exact, plain = both(torch.float64), both(torch.float32)
    assert_close_to_truth(out.divergence.detach(), exact.values[0], plain.values[0])
    assert leaf.grad is not None
    assert_gradient_close_to_truth(leaf.grad, exact.gradients[0], plain.gradients[0])
    eye = torch.eye(VOCAB, device=device)
    same = ll.logprobs(
        ll.Logits(logits[order], eye),
        batch.target,
        teacher=batch.teacher(tail),
        divergence=Divergence("jsd", beta=0.3),
        entropy="grad",
    )
    for name in ("logprob", "entropy", "log_z", "teacher_logprob", "teacher_entropy"):
        torch.testing.assert_close(getattr(out, name).detach(), getattr(same, name), equal_nan=True, msg=name)


@pytest.mark.parametrize("backend", ["reference", "tiled", "triton"])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("route", ["one pass", "two passes"])
def test_as_a_term_of_an_objective(route: str, tail: str, backend: str, device: torch.device, monkeypatch):
    if route == "two passes":
        monkeypatch.setattr("logitless.route.loss._obstacle", lambda *_: "the test says so")
    batch, advantage = Batch.draw(device), torch.randn(ROWS, device=device)
    objective = ll.Objective(policy="reinforce", entropy_coef=0.1, divergence="forward_kl", divergence_coef=0.7)

    def plain(dtype: torch.dtype) -> Outcome:
        hidden, weight, bias = batch.leaves(dtype)
        z = hidden @ weight.T + bias
        log_p, counted = z.log_softmax(-1), batch.target != -100
        apart = textbook(*outcomes(z, batch, tail, dtype), "forward_kl")
        own = log_p.gather(1, batch.target.clamp_min(0)[:, None])[:, 0]
        each = 0.7 * apart - advantage.to(dtype) * own + 0.1 * (log_p.exp() * log_p).sum(-1)
        loss = torch.where(counted, each, 0.0).sum() / counted.sum()
        loss.backward()
        values = (loss.detach(), torch.where(counted, apart, 0.0).detach())
        return Outcome(values, tuple(x.grad for x in (hidden, weight, bias)))  # pyright: ignore

    hidden, weight, bias = batch.leaves(torch.float32)
    given: dict[str, Any] = {"bias": bias, "teacher": batch.teacher(tail), "memory": 3000, "backend": backend}
    logits, options = logits_of(hidden, weight, given)
    plan = ll.explain(ll.policy_loss, logits, batch.target, objective, **options)
    assert str(plan).startswith(f"{route}: {3 if route == 'one pass' else 4} matrix products")
    assert route == "two passes" or len(plan.chunks) > 1  # pyright: ignore[reportAttributeAccessIssue]
    loss, metrics, stats = loss_from_hidden(
        hidden, weight, batch.target, objective, advantage=advantage, return_stats=True, **given
    )
    loss.backward()
    assert metrics.compute()["divergence"] > 0
    found = Outcome((loss.detach(), stats.divergence), tuple(x.grad for x in (hidden, weight, bias)))
    assert_right(found, plain(torch.float64), plain(torch.float32))
    del given["bias"]
    hidden, weight, bias = leaves = batch.leaves(torch.float32)
    once = ll.policy_loss(hidden @ weight.T + bias, batch.target, objective, advantage=advantage, **given)[0]
    found = Outcome((once.detach(), stats.divergence), torch.autograd.grad(once, leaves))
    assert_right(found, plain(torch.float64), plain(torch.float32))


def sharded(rank: int, world: int, batch: Batch, tail: str, sequence_parallel: bool) -> Outcome:
    bounds = ((0, 30), (30, VOCAB))[rank]
    part = slice(*bounds)
    # As many tokens on either, the last of which is not scored.
    hidden = torch.cat([batch.hidden, torch.zeros(1, 16)]).chunk(world)[rank] if sequence_parallel else batch.hidden
    leaves = [x.detach().requires_grad_() for x in (hidden, batch.weight[part], batch.bias[part])]
    out = ll.logprobs(
        ll.Logits(
            *leaves[:2],
            bias=leaves[2],
            shard=VocabShard(*bounds, dist.group.WORLD, check_calls=True),
            sequence_parallel=sequence_parallel,
        ),
        ll.Rows.at(torch.arange(ROWS), batch.target),
        teacher=batch.teacher(tail),
        divergence=Divergence("jsd", beta=0.3),
        entropy="grad",
    )
    (out.divergence * torch.arange(1, ROWS + 1)).sum().backward()
    return Outcome((out.divergence.detach(), out.teacher_entropy), tuple(x.grad for x in leaves))  # pyright: ignore


@pytest.mark.parametrize("tail", TAILS)
def test_shards(tail: str, ranks):
    """Uneven ones; the same results on both, and gradients that make up the whole."""
    batch = Batch.draw()
    exact, plain = (right(batch, "jsd", tail, x, beta=0.3) for x in (torch.float64, torch.float32))
    here, there = ranks(sharded, 2, batch, tail, False)
    assert all(torch.equal(a, b) for a, b in zip(here.values, there.values, strict=True))
    assert torch.equal(here.gradients[0], there.gradients[0])
    whole = [torch.cat(x) for x in zip(here.gradients[1:], there.gradients[1:], strict=True)]
    assert_right(Outcome(here.values, (here.gradients[0], *whole)), exact, plain)
    here, there = ranks(sharded, 2, batch, tail, True)
    whole = [torch.cat(x) for x in zip(here.gradients, there.gradients, strict=True)]
    assert_right(Outcome(here.values, (whole[0][:ROWS], *whole[1:])), exact, plain)


def sharded_loss(rank: int, world: int, batch: Batch, tail: str, memory: int) -> Outcome:
    bounds = ((0, 30), (30, VOCAB))[rank]
    part = slice(*bounds)
    leaves = [x.detach().requires_grad_() for x in (batch.hidden, batch.weight[part], batch.bias[part])]
    objective = ll.Objective.recipe("distill", divergence=Divergence("jsd", beta=0.3))
    shard = VocabShard(*bounds, dist.group.WORLD, check_calls=True)
    loss, _, stats = ll.policy_loss(
        ll.Logits(*leaves[:2], bias=leaves[2], shard=shard),
        batch.target,
        objective,
        teacher=batch.teacher(tail),
        memory=memory,
        return_stats=True,
    )
    loss.backward()
    return Outcome((stats.divergence, stats.teacher_entropy), tuple(x.grad for x in leaves))  # pyright: ignore


@pytest.mark.parametrize("tail", TAILS)
def test_shards_as_a_loss(tail: str, ranks):
    """In one pass, in chunks of a few rows."""
    batch = Batch.draw()

    def plain(dtype: torch.dtype) -> Outcome:
        hidden, weight, bias = batch.leaves(dtype)
        log_p, log_q = outcomes(hidden @ weight.T + bias, batch, tail, dtype)
        counted = batch.target != -100
        found = torch.where(counted, textbook(log_p, log_q, "jsd", beta=0.3), 0.0)
        (found.sum() / counted.sum()).backward()
        entropy = -(log_q.exp() * log_q.masked_fill(log_q == -torch.inf, 0.0)).sum(-1)
        values = (found.detach(), torch.where(counted, entropy, 0.0))
        return Outcome(values, tuple(x.grad for x in (hidden, weight, bias)))  # pyright: ignore

    here, there = ranks(sharded_loss, 2, batch, tail, 3000)
    assert all(torch.equal(a, b) for a, b in zip(here.values, there.values, strict=True))
    whole = [torch.cat(x) for x in zip(here.gradients[1:], there.gradients[1:], strict=True)]
    assert_right(Outcome(here.values, (here.gradients[0], *whole)), plain(torch.float64), plain(torch.float32))


@pytest.mark.parametrize("tail", TAILS)
def test_no_rows(tail: str, device: torch.device):
    batch = Batch.draw(device)
    hidden, weight, _ = batch.leaves(torch.float32)
    none = Teacher.from_top_k(batch.logprobs[:0], batch.ids[:0], tail)  # pyright: ignore[reportArgumentType]
    out = ll.logprobs(
        ll.Logits(hidden, weight), ll.Rows.at(batch.target[:0], batch.target[:0]), teacher=none, entropy="grad"
    )
    assert out.divergence.shape == (0,)
    out.divergence.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_renormalised_takes_memory_of_its_ids_alone():
    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(50_000, 8)
    ids = torch.randint(50_000, (64, 1)) + torch.arange(4) - 4
    teacher = Teacher.from_top_k(torch.randn(64, 4), ids.clamp_min(-1), "renormalise")
    target = torch.randint(50_000, (64,))

    def step() -> None:
        ll.logprobs(ll.Logits(hidden, weight), target, teacher=teacher, entropy="grad").divergence.sum().backward()

    step()
    assert peak_bytes(step, "cpu") < 64 * 4 * 400


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"logprobs": torch.zeros(ROWS)}, r"logprobs must be \[R, K\] floats but are a tensor \[13\]"),
        (
            {"ids": torch.zeros(ROWS, K)},
            r"ids must be int64 \[13, 6\] like logprobs, and where they are, but are a tensor \[13, 6\] torch.float32",
        ),
        ({"ids": torch.zeros(ROWS, K, dtype=torch.int64)}, "a row names an id twice"),
        ({"logprobs": torch.zeros(ROWS, K)}, "add up to 6. Log-probs are wanted"),
        ({"tail": "buckets"}, "tail must be 'bucket' or 'renormalise' but is 'buckets'. Did you mean 'bucket'?"),
    ],
)
def test_errors_of_what_was_sent(change: dict, text: str):
    batch = Batch.draw()
    given = {"logprobs": batch.logprobs, "ids": torch.arange(K).expand(ROWS, K), "tail": "bucket"}
    with pytest.raises(LogitlessError, match=text):
        Teacher.from_top_k(**given | change)


def test_what_was_sent_must_be_where_the_student_is():
    batch = Batch.draw()
    teacher = Teacher.from_top_k(batch.logprobs.to("meta"), batch.ids.to("meta"), tail="renormalise")
    with pytest.raises(LogitlessError, match="the teacher's log-probs are on meta, the student on cpu"):
        ll.logprobs(ll.Logits(batch.hidden, batch.weight), batch.target, teacher=teacher, divergence="forward_kl")


def test_errors_of_the_call():
    batch = Batch.draw()
    operands = (batch.hidden, batch.weight)
    with pytest.raises(LogitlessError, match=r"log-probs are \[13, 6\] but there are 12 rows. Give K for every scored"):
        ll.logprobs(
            ll.Logits(*operands),
            ll.Rows.at(torch.arange(12), batch.target[:12]),
            teacher=batch.teacher("bucket"),
            entropy="grad",
        )
    beyond = Teacher.from_top_k(batch.logprobs, torch.arange(VOCAB - K + 1, VOCAB + 1).expand(ROWS, K))
    with pytest.raises(LogitlessError, match="ids go up to 83, outside of the student's vocabulary of 83"):
        ll.logprobs(ll.Logits(*operands), batch.target, teacher=beyond, entropy="grad")
    with pytest.raises(LogitlessError, match="Teachers: a member has log-probs of K ids"):
        Teacher.by_row([batch.teacher("bucket")], torch.zeros(ROWS, dtype=torch.int64))


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("source", ["logits", "hidden"])
def test_other_results_stay_and_the_entropy_is_as_asked_for(source: str, tail: Any, device: torch.device):
    """Statistics and the K best are over the vocabulary, whatever the ids that the teacher sent."""
    batch = Batch.draw(device)
    hidden, weight, bias = batch.leaves(torch.float32)
    logits = ll.Logits(hidden, weight, bias=bias) if source == "hidden" else hidden @ weight.T + bias
    asked: dict[str, Any] = {"stats": ("top1", "collision", "rank"), "top_k": 3}
    alone = ll.logprobs(logits, batch.target, **asked)
    for entropy in (None, "value", "grad"):
        out = ll.logprobs(logits, batch.target, teacher=batch.teacher(tail), entropy=entropy, **asked)
        for name in ("top1_id", "top1_logprob", "top1_hit", "rank", "top_k_ids", "top_k_logprobs", "collision"):
            torch.testing.assert_close(getattr(out, name), getattr(alone, name))
        assert out.ids_logprobs is None
        bare = ll.logprobs(logits, batch.target, teacher=batch.teacher(tail), entropy=entropy)
        for name in ("divergence", "logprob", "log_z", "entropy", "teacher_logprob", "teacher_entropy"):
            mine, theirs = getattr(out, name), getattr(bare, name)
            assert (mine is None) == (theirs is None) == (name == "entropy" and entropy is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, equal_nan=True)
        for found in (out, bare):
            assert (found.entropy is not None and found.entropy.requires_grad) == (entropy == "grad")
        grads = [
            torch.autograd.grad(x.divergence.sum(), (hidden, weight, bias), retain_graph=True) for x in (out, bare)
        ]
        for mine, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        (mine,) = torch.autograd.grad(out.collision.sum(), weight, retain_graph=True)
        torch.testing.assert_close(mine, torch.autograd.grad(alone.collision.sum(), weight, retain_graph=True)[0])


def test_the_entropy_beside_an_id_that_the_student_excludes():
    z = torch.randn(3, VOCAB, dtype=torch.float64)
    sent = Teacher.from_top_k(torch.randn(3, K).log_softmax(-1), torch.arange(K).expand(3, K), "renormalise")
    z[0, 2] = z[1, :2] = -torch.inf
    leaf, other = z.clone().requires_grad_(), z[:, :K].clone().requires_grad_()
    found = ll.logprobs(leaf, torch.tensor([0, 3, 4]), teacher=sent, entropy="grad", divergence="tv").entropy
    log_p = other.log_softmax(-1)
    present = log_p.masked_fill(other == -torch.inf, 0.0)
    exact = -(present.exp() * present).where(other > -torch.inf, 0.0).sum(-1)
    assert found is not None
    torch.testing.assert_close(found, exact)
    (gradient,) = torch.autograd.grad(found.sum(), leaf)
    (right,) = torch.autograd.grad(exact.sum(), other)
    torch.testing.assert_close(gradient, torch.nn.functional.pad(right, (0, VOCAB - K)))


# Ids of a student that has some of the teacher's, under other numbers.


@pytest.mark.parametrize(
    ("kind", "tail"),
    [
        *((kind, tail) for kind in ("reverse_kl", "tv", "log_acceptance") for tail in TAILS),
        # Infinite with a bucket that the student never draws.
        *((kind, "renormalise") for kind in ("forward_kl", "lk_hybrid")),
    ],
)
def test_student_ids(kind: Any, tail: Any):
    """A server that sends every id says what its logits say: of those that the student lacks, one outcome or none."""
    theirs, own = 61, 24
    chosen = torch.randperm(theirs)[:own]
    mapped = torch.full((theirs,), -1).index_copy(0, chosen, torch.arange(own))
    logits, z = 2 * torch.randn(ROWS, theirs), torch.randn(ROWS, own, dtype=torch.float64, requires_grad=True)
    target = torch.randint(own, (ROWS,))
    sent = logits.double().log_softmax(-1)
    order = torch.rand(ROWS, theirs).argsort(-1)
    listed = Teacher.from_top_k(sent.gather(1, order), order, tail, student_ids=mapped)
    found = []
    for teacher in (Teacher(logits.double(), ids=mapped, tail=tail), listed):
        out = ll.logprobs(z, target, teacher=teacher, divergence=kind)
        found.append((out.divergence.detach(), *torch.autograd.grad(out.divergence.sum(), z)))
    if tail == "renormalise" and kind in ("log_acceptance", "lk_hybrid"):
        # Over all ids of a teacher that has logits; over those that are left of one that sent them.
        assert (found[0][0] - found[1][0]).abs().max() > 1e-3
        return
    for mine, other in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


def test_student_ids_with_padding_and_errors():
    logprobs, ids = torch.randn(3, 9).log_softmax(-1).topk(4)
    ids[1, 2] = -1
    mapped = torch.tensor([3, -1, 0, -1, 1, 2, -1, 5, 4])
    teacher = Teacher.from_top_k(logprobs, ids, student_ids=mapped)
    assert torch.equal(teacher.top_k.ids, torch.where(ids < 0, -1, mapped[ids]))
    with pytest.raises(LogitlessError, match="ids go up to 8 but student_ids has 8 of the teacher's"):
        Teacher.from_top_k(logprobs, ids.fill_diagonal_(8), student_ids=mapped[:-1])
    with pytest.raises(LogitlessError, match=r"student_ids must be int64 \[W\]"):
        Teacher.from_top_k(logprobs, ids, student_ids=mapped.float())
    with pytest.raises(LogitlessError, match="a row names an id twice"):
        Teacher.from_top_k(logprobs[:, :2], torch.tensor([[0, 1]] * 3), student_ids=torch.tensor([7, 7]))
