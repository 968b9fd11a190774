"""Divergences over the ids that samplers kept, against float64 masks over the vocabulary: values, gradients, shards."""

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
from logitless import Head, Kept, LogitlessError, Teacher, VocabShard
from logitless.backends.divergences import Divergence

# NumPy, which runs the kernels in Triton's interpreter, reports what a selection then leaves out.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")

ROWS, VOCAB = 12, 83
SCOPES = ("vocabulary", "support")


class Batch(NamedTuple):
    """Operands of both, and masks over the vocabulary of what each sampler kept."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    other_hidden: Tensor
    other_weight: Tensor
    target: Tensor
    mask: Tensor
    other_mask: Tensor

    @staticmethod
    def draw(device="cpu", dtype=torch.float32) -> Batch:
        """Rows of one id, of all, of none but the target; the teacher keeps those of the student and a few others."""
        target = torch.randint(VOCAB, (ROWS,))
        target[3] = -100
        mask, more = torch.rand(ROWS, VOCAB) < 0.1, torch.rand(ROWS, VOCAB) < 0.05
        mask[0] = False
        mask[1] = True
        mask[torch.arange(ROWS), target.clamp_min(0)] = True
        sizes = ((ROWS, 16), (VOCAB, 16), (VOCAB,), (ROWS, 24), (VOCAB, 24))
        floats = (torch.randn(size).to(device, dtype) for size in sizes)
        return Batch(*floats, target.to(device), mask.to(device), (mask | more).to(device))

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        return [x.detach().to(dtype).requires_grad_() for x in self[:3]]

    def kept(self, mask: Tensor) -> Kept:
        # The target is forced in whether it is named or not, and a name that comes twice counts once.
        lists = [row.nonzero()[:, 0].tolist() for row in mask]
        lists[2] += lists[2][:1]
        lists[0] = [] if mask is self.mask else lists[0]
        return Kept.from_lists(lists, mask.device)


class Outcome(NamedTuple):
    values: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]


def right(batch: Batch, kind: str, dtype: torch.dtype, scope: str, own: bool, heads=(None, None)) -> Outcome:
    """By masks over the vocabulary: divergence, log-prob, entropy, teacher's log-prob and entropy, and gradients."""
    hidden, weight, bias = batch.leaves(dtype)
    z = shaped(hidden @ weight.T + bias, heads[0])
    y = shaped(batch.other_hidden.to(dtype) @ batch.other_weight.to(dtype).T, heads[1])
    log_p = z.masked_fill(~batch.mask, -torch.inf).log_softmax(-1)
    log_q = y.masked_fill(~(batch.other_mask if own else batch.mask), -torch.inf).log_softmax(-1)
    counted, at = batch.target != -100, batch.target.clamp_min(0)[:, None]

    def entropy(x: Tensor) -> Tensor:
        return -(x.exp() * x.masked_fill(x == -torch.inf, 0.0)).sum(-1)

    # Autograd has no derivative of 0 * log 0.
    listed = log_p.masked_fill((log_p == -torch.inf) & (log_q > -torch.inf), -800.0)
    found = [
        textbook(listed, log_q, kind, **KINDS[kind]),
        log_p.gather(1, at)[:, 0],
        entropy(log_p if scope == "support" else z.log_softmax(-1)),
        log_q.gather(1, at)[:, 0],
        entropy(log_q),
    ]
    found = [torch.where(counted, x, 0.0) for x in found]
    scale = torch.arange(1, ROWS + 1, device=hidden.device)
    (scale * (found[0] + 0.3 * found[1] - 0.2 * found[2])).sum().backward()
    return Outcome(tuple(x.detach() for x in found), tuple(x.grad for x in (hidden, weight, bias)))  # pyright: ignore


def ours(batch: Batch, teacher: Any, kind: Any, scope: Any, head: Head | None = None, **options) -> Outcome:
    hidden, weight, bias = batch.leaves(batch.hidden.dtype)
    given: dict[str, Any] = {"bias": bias, "head": head, "kept": batch.kept(batch.mask).over(scope)}
    given |= {"teacher": teacher, "divergence": Divergence(kind, **KINDS[kind])}
    out = from_hidden(hidden, weight, batch.target, entropy="grad", **given, **options)
    scale = torch.arange(1, ROWS + 1, device=hidden.device)
    (scale * (out.divergence + 0.3 * out.logprob - 0.2 * out.entropy)).sum().backward()
    assert (out.log_z is None) == (scope == "support")
    values = (out.divergence, out.logprob, out.entropy, out.teacher_logprob, out.teacher_entropy)
    return Outcome(tuple(x.detach() for x in values), tuple(x.grad for x in (hidden, weight, bias)))  # pyright: ignore


def assert_right(found: Outcome, exact: Outcome, plain: Outcome) -> None:
    names = ("divergence", "logprob", "entropy", "teacher_logprob", "teacher_entropy")
    for name, *x in zip(names, found.values, exact.values, plain.values, strict=True):
        assert_close_to_truth(*x, name=name)
    for name, *x in zip(("hidden", "weight", "bias"), found.gradients, exact.gradients, plain.gradients, strict=True):
        assert_gradient_close_to_truth(*x, name=f"d_{name}")


def check(batch: Batch, kind: str, scope: str, own: bool, heads=(None, None), **options) -> None:
    exact, plain = (right(batch, kind, x, scope, own, heads) for x in (torch.float64, batch.hidden.dtype))
    kept = batch.kept(batch.other_mask) if own else None
    teacher = Teacher(ll.Logits(batch.other_hidden, batch.other_weight), head=heads[1], kept=kept)
    assert_right(ours(batch, teacher, kind, scope, heads[0], **options), exact, plain)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, scope: str, device: torch.device):
    check(Batch.draw(device), kind, scope, own=False, memory=6000)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("forward_kl", "lk_hybrid")])
def test_a_teacher_with_ids_of_its_own(kind: str, device: torch.device):
    """Some of which the student has not: its KL to the teacher is finite, and so are all symmetric ones."""
    check(Batch.draw(device), kind, "support", own=True)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_backends_and_heads(backend: str, device: torch.device):
    heads = Head(softcap=3.0, temperature=1.3), Head(scale=-0.5)
    check(Batch.draw(device), "jsd", "support", own=True, heads=heads, backend=backend)


@pytest.mark.parametrize("scope", SCOPES)
def test_logits_that_may_be_overwritten(scope: Any, device: torch.device):
    """Over the vocabulary two graphs read them, and neither may find what the other has written."""
    batch, seen = Batch.draw(device), []
    logits, other = batch.hidden @ batch.weight.T, batch.other_hidden @ batch.other_weight.T
    for overwrite in (False, True):
        leaf = logits.clone().requires_grad_()
        given = ll.Logits.given(leaf * 1.0, overwrite=overwrite)
        asked: dict[str, Any] = {"kept": batch.kept(batch.mask).over(scope), "entropy": "grad"}
        out = ll.logprobs(given, batch.target, teacher=other, divergence="jsd", **asked)
        (out.divergence + 0.3 * out.logprob - 0.2 * out.entropy).sum().backward()
        seen.append(leaf.grad)
    assert torch.equal(*seen)


def test_what_is_infinite(device: torch.device):
    """Forward KL where the teacher keeps an id that the student does not; reverse KL the other way round."""
    batch = Batch.draw(device)
    more = (batch.other_mask & ~batch.mask).any(1) & (batch.target != -100)
    assert more.any()
    assert not more.all()
    teacher = Teacher(ll.Logits(batch.other_hidden, batch.other_weight), kept=batch.kept(batch.other_mask))
    kept = batch.kept(batch.mask)
    weight = batch.weight.detach().requires_grad_()
    forward = ll.logprobs(
        ll.Logits(batch.hidden, weight),
        batch.target,
        teacher=teacher,
        divergence="forward_kl",
        entropy="grad",
        kept=kept.over("support"),
    ).divergence
    assert torch.equal(forward.isinf(), more)
    # The gradient is finite, as its formula is, and reaches no id that the student has not kept.
    row = int(more.nonzero()[0])
    forward[row].backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()
    assert torch.equal(weight.grad.any(1), batch.mask[row])
    fewer = Kept.from_lists([[int(t)] if t >= 0 else [] for t in (batch.target + 1) % VOCAB], device)
    alone = Teacher(ll.Logits(batch.other_hidden, batch.other_weight), kept=fewer)
    reverse = ll.logprobs(ll.Logits(*batch[:2]), batch.target, teacher=alone, entropy="grad", kept=kept.over("support"))
    assert torch.equal(reverse.divergence.isinf(), batch.target != -100)
    # The target is not forced into what the teacher kept.
    assert torch.equal(reverse.teacher_logprob.isneginf(), batch.target != -100)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("form", ["logits", "head", "head, a factor for each token"])
def test_tokens_of_a_teacher_beside_rows(form: str, scope: str, device: torch.device):
    """``Teacher(at=)``, which was refused: as of a teacher whose tokens lie in the order of the rows."""
    batch = Batch.draw(device)
    at = torch.randint(ROWS, (ROWS,), device=device)
    factor = 0.5 + torch.rand(ROWS, 1, device=device)
    logits = ll.Logits(batch.other_hidden, batch.other_weight)
    theirs = {"logits": logits.computed(), "head": logits}.get(form)
    theirs = logits * factor if theirs is None else theirs
    kept, found = batch.kept(batch.mask).over(scope), []
    for teacher in (Teacher(theirs, at=at), Teacher(theirs[at])):
        leaves = batch.leaves(torch.float32)
        out = ll.logprobs(ll.Logits(*leaves[:2], bias=leaves[2]), batch.target, teacher=teacher, kept=kept)
        assert out.divergence is not None
        out.divergence.sum().backward()
        found.append((out.divergence, out.teacher_logprob, *(x.grad for x in leaves)))
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=0)


def test_several_teachers_and_kinds_of_them(device: torch.device):
    """Logits that exist, another order of columns, a smaller vocabulary: each row has the result of its own."""
    batch = Batch.draw(device)
    ids, logits = torch.randperm(VOCAB, device=device), torch.randn(ROWS, VOCAB, device=device)
    members = [
        Teacher(ll.Logits(batch.other_hidden, batch.other_weight), head=Head(temperature=0.7)),
        Teacher(logits),
        Teacher(ll.Logits(batch.other_hidden, batch.other_weight), ids=ids, head=Head(softcap=4.0)),
    ]
    which = torch.arange(ROWS, device=device) % 3
    kept, wanted = batch.kept(batch.mask), torch.zeros(ROWS, device=device, dtype=torch.float64)
    y = (batch.other_hidden.double() @ batch.other_weight.double().T).cpu()
    capped = torch.zeros_like(y)
    capped[:, ids.cpu()] = 4 * torch.tanh(y / 4)
    z = batch.hidden.double() @ batch.weight.double().T
    for number, right_logits in enumerate((y / 0.7, logits.double(), capped)):
        log_p, log_q = (x.to(device).masked_fill(~batch.mask, -torch.inf).log_softmax(-1) for x in (z, right_logits))
        wanted = torch.where(which == number, textbook(log_p, log_q, "forward_kl"), wanted)
    wanted = wanted.masked_fill(batch.target == -100, 0.0)
    out = ll.logprobs(
        ll.Logits(*batch[:2]),
        batch.target,
        teacher=Teacher.by_row(members, which),
        divergence="forward_kl",
        entropy="grad",
        kept=kept.over("support"),
    )
    assert_close_to_truth(out.divergence, wanted, wanted.float())
    supports = [batch.kept(x) for x in (batch.mask.clone(), batch.other_mask, batch.mask.clone())]
    own = [Teacher(ll.Logits(batch.other_hidden, batch.other_weight), kept=x) for x in supports]
    each = [
        ll.logprobs(
            ll.Logits(*batch[:2]), batch.target, teacher=x, divergence="tv", entropy="grad", kept=kept
        ).divergence
        for x in own
    ]
    joint = ll.logprobs(
        ll.Logits(*batch[:2]),
        batch.target,
        teacher=Teacher.by_row(own, which),
        divergence="tv",
        entropy="grad",
        kept=kept,
    ).divergence
    assert torch.equal(joint, torch.stack(each).gather(0, which[None])[0])
    assert not torch.equal(joint, each[0])


@pytest.mark.parametrize("scope", SCOPES)
def test_as_a_term_of_an_objective(scope: Any, device: torch.device):
    batch, advantage = Batch.draw(device), torch.randn(ROWS, device=device)
    objective = ll.Objective(policy="reinforce", entropy_coef=0.1, divergence="reverse_kl", divergence_coef=0.7)

    def plain(dtype: torch.dtype) -> Outcome:
        hidden, weight, bias = batch.leaves(dtype)
        z, counted = hidden @ weight.T + bias, batch.target != -100
        y = batch.other_hidden.to(dtype) @ batch.other_weight.to(dtype).T
        log_p, log_q = (x.masked_fill(~batch.mask, -torch.inf).log_softmax(-1) for x in (z, y))
        spread = log_p if scope == "support" else z.log_softmax(-1)
        own = log_p.gather(1, batch.target.clamp_min(0)[:, None])[:, 0]
        lower = (spread.exp() * spread.masked_fill(spread == -torch.inf, 0.0)).sum(-1)
        each = 0.7 * textbook(log_p, log_q, "reverse_kl") - advantage.to(dtype) * own + 0.1 * lower
        loss = torch.where(counted, each, 0.0).sum() / counted.sum()
        loss.backward()
        return Outcome((loss.detach()[None],), tuple(x.grad for x in (hidden, weight, bias)))  # pyright: ignore

    hidden, weight, bias = batch.leaves(torch.float32)
    teacher = Teacher(ll.Logits(batch.other_hidden, batch.other_weight))
    given: dict[str, Any] = {"bias": bias, "teacher": teacher, "kept": batch.kept(batch.mask).over(scope)}
    logits, options = logits_of(hidden, weight, given)
    plan = ll.explain(ll.policy_loss, logits, batch.target, objective, **options)
    words = "support: no matrix product" if scope == "support" else "two passes: 4 matrix products"
    assert str(plan).startswith(words)
    loss, metrics = loss_from_hidden(hidden, weight, batch.target, objective, advantage=advantage, **given)
    loss.backward()
    assert metrics.compute()["divergence"] > 0
    exact, usual = plain(torch.float64), plain(torch.float32)
    assert_close_to_truth(loss.detach()[None], exact.values[0], usual.values[0])
    for x, *others in zip((hidden, weight, bias), exact.gradients, usual.gradients, strict=True):
        assert x.grad is not None
        assert_gradient_close_to_truth(x.grad, *others)


def sharded(rank: int, world: int, batch: Batch, scope: str, sequence_parallel: bool) -> Outcome:
    start, stop = ((0, 30), (30, VOCAB))[rank]
    size = ROWS // world
    tokens = slice(rank * size, (rank + 1) * size) if sequence_parallel else slice(None)
    part = batch._replace(hidden=batch.hidden[tokens], weight=batch.weight[start:stop], bias=batch.bias[start:stop])
    teacher = Teacher(
        ll.Logits(batch.other_hidden[tokens], batch.other_weight[start:stop]), kept=batch.kept(batch.other_mask)
    )
    shard = VocabShard(start, stop, dist.group.WORLD, check_calls=True)
    return ours(part, teacher, "jsd", scope, shard=shard, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize(("scope", "sequence_parallel"), [("support", False), ("support", True), ("vocabulary", True)])
def test_shards(scope: str, sequence_parallel: bool, ranks):
    batch = Batch.draw()
    exact, plain = (right(batch, "jsd", x, scope, own=True) for x in (torch.float64, torch.float32))
    here, there = ranks(sharded, 2, batch, scope, sequence_parallel)
    assert all(torch.equal(a, b) for a, b in zip(here.values, there.values, strict=True))
    hidden = torch.cat([here.gradients[0], there.gradients[0]]) if sequence_parallel else here.gradients[0]
    joined = (hidden, *(torch.cat(x) for x in zip(here.gradients[1:], there.gradients[1:], strict=True)))
    assert_right(Outcome(here.values, joined), exact, plain)


def sharded_ids(rank: int, world: int, batch: Batch, ids: Tensor, cuts: tuple[int, int]) -> Outcome | str:
    """Ranks share the columns of both vocabularies, in other parts; the teacher's are in an order of their own."""
    (first, last), (low, high) = ((0, cuts[0]), (0, cuts[1])) if rank == 0 else ((cuts[0], VOCAB), (cuts[1], VOCAB))
    shard, other = (VocabShard(*x, dist.group.WORLD) for x in ((first, last), (low, high)))
    part = batch._replace(weight=batch.weight[first:last], bias=batch.bias[first:last])
    logits = ll.Logits(batch.other_hidden, batch.other_weight[ids][low:high], shard=other)
    teacher = Teacher(logits, ids=ids[low:high], kept=batch.kept(batch.other_mask))
    try:
        return ours(part, teacher, "jsd", "support", shard=shard)
    except LogitlessError as error:
        return str(error)


@pytest.mark.parametrize("cuts", [(30, 50), (0, 40), (VOCAB, 0)])
def test_shards_of_a_teacher_with_ids_of_its_own(cuts: tuple[int, int], ranks):
    """Its columns of a rank may be any of the student's, also where the rank has none of those."""
    batch, ids = Batch.draw(), torch.randperm(VOCAB)
    exact, plain = (right(batch, "jsd", x, "support", own=True) for x in (torch.float64, torch.float32))
    here, there = ranks(sharded_ids, 2, batch, ids, cuts)
    assert all(torch.equal(a, b) for a, b in zip(here.values, there.values, strict=True))
    joined = (here.gradients[0], *(torch.cat(x) for x in zip(here.gradients[1:], there.gradients[1:], strict=True)))
    assert_right(Outcome(here.values, joined), exact, plain)


def test_a_kept_id_that_two_ranks_name(ranks):
    batch, ids = Batch.draw(), torch.randperm(VOCAB)
    ids[0] = ids[-1]
    for text in ranks(sharded_ids, 2, batch, ids, (30, 50), timeout=20):
        assert "name one of the student's ids on several ranks" in text


def test_memory_is_that_of_the_ids_alone():
    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(50_000, 8)
    teacher, target = Teacher(ll.Logits(torch.randn(64, 8), torch.randn(50_000, 8))), torch.randint(50_000, (64,))
    kept = Kept(torch.randint(50_000, (256,)), torch.full((64,), 4))

    def step() -> None:
        out = ll.logprobs(ll.Logits(hidden, weight), target, teacher=teacher, entropy="grad", kept=kept.over("support"))
        out.divergence.sum().backward()

    step()
    assert peak_bytes(step, "cpu") < 64 * 5 * 400


def test_what_is_refused():
    batch = Batch.draw()
    kept, teacher = batch.kept(batch.mask), Teacher(ll.Logits(batch.other_hidden, batch.other_weight))
    sent = Teacher.from_top_k(torch.randn(ROWS, 3).log_softmax(-1), torch.arange(3).expand(ROWS, 3))
    own = Teacher(ll.Logits(batch.other_hidden, batch.other_weight), kept=batch.kept(batch.other_mask))
    nothing = Teacher(ll.Logits(batch.other_hidden, batch.other_weight), kept=Kept.from_lists([[]] * ROWS))
    zeros = torch.zeros(ROWS, dtype=torch.int64)
    wrong: dict[str, tuple[Any, dict]] = {
        "kept= does not work with Teacher.from_top_k": (sent, {"kept": kept}),
        "Teacher(kept=) needs kept= for the student too": (own, {}),
        "of several teachers, all have it or none": (Teacher.by_row([own, teacher], zeros), {"kept": kept}),
        "the teacher kept no id at all in a row": (nothing, {"kept": kept}),
    }
    for text, (given, options) in wrong.items():
        with pytest.raises(LogitlessError) as caught:
            ll.logprobs(ll.Logits(*batch[:2]), batch.target, teacher=given, **options)
        assert text in str(caught.value)
    with pytest.raises(LogitlessError, match="Teacher: kept must be a Kept or None but is list"):
        Teacher(ll.Logits(batch.other_hidden, batch.other_weight), kept=[[1]])  # pyright: ignore[reportArgumentType]
