"""Divergences at their edges: close distributions, special values, ranks, refusals, batch invariance, pairs."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from calls import from_hidden, logits_of, loss_from_hidden
from close import assert_close_to_truth
from shared.divergence import BACKENDS, KINDS, Batch, Outcome, assert_right, ours, right, shaped, textbook
from torch import Tensor

import logitless as ll
from logitless import Teacher
from logitless.backends.divergences import Divergence
from logitless.machine import SLAB
from logitless.sources.linear import Projection

WIDE = (torch.float64, torch.float32)

# NumPy, which runs the kernels in Triton's interpreter, reports what a selection then leaves out.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")


def test_close_distributions_keep_their_digits(device: torch.device):
    """Of float32 logits that differ by 1e-4, a KL of 1e-8 to three digits; the textbook's form has none there."""
    z = torch.randn(16, 4000, device=device) * 3
    y = z + 1.4e-4 * torch.randn(16, 4000, device=device)
    target = torch.zeros(16, dtype=torch.int64, device=device)
    log_p, log_q = z.double().log_softmax(-1), y.double().log_softmax(-1)
    d, p, q = log_q - log_p, log_p.exp(), log_q.exp()
    truth = {
        "forward_kl": (q * d - (q - p)).sum(-1),
        "reverse_kl": (-p * d - (p - q)).sum(-1),
        "hellinger": (0.5 * p * torch.expm1(d / 2).square()).sum(-1),
        "tv": 0.5 * (p - q).abs().sum(-1),
    }
    assert 3e-9 < float(truth["forward_kl"].mean()) < 3e-8
    for kind, exact in truth.items():
        found = ll.logprobs(z, target, teacher=y, divergence=kind).divergence.double()  # pyright: ignore[reportArgumentType]
        # A variation is of first order in d, and feels the rounding of log Z itself; the others are of second order.
        assert ((found - exact).abs() <= (5e-3 if kind == "tv" else 1e-3) * exact).all(), kind
        assert (found >= 0).all()
    mixed = ll.logprobs(z, target, teacher=y, divergence="jsd").divergence.double()
    # A quarter of the other's quarter, to first order.
    torch.testing.assert_close(mixed, truth["forward_kl"] / 4, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_slope_of_a_variation(backend: str, device: torch.device):
    """None where two models agree but for rounding, whose sign may be another in backward; a half beyond."""
    z, apart = torch.zeros(2, 2, device=device, requires_grad=True), torch.tensor([1e-6, 1e-3], device=device)
    y = torch.stack([apart, torch.zeros_like(apart)], 1)
    target = torch.zeros(2, dtype=torch.int64, device=device)
    out = ll.logprobs(z, target, teacher=y, divergence="tv", backend=backend).divergence
    out.sum().backward()
    torch.testing.assert_close(out.detach(), apart / 4, rtol=2e-3, atol=0.0)
    assert z.grad is not None
    torch.testing.assert_close(z.grad, torch.tensor([[0.0, 0.0], [-0.25, 0.25]], device=device))


@pytest.mark.parametrize("backend", BACKENDS)
def test_special_values(backend: str, device: torch.device):
    """Excluded tokens, infinite divergences, and NaN that stays in its row."""
    inf = torch.inf
    z = torch.tensor([[0.0, 0.0, -inf], [0.0, 1.0, -inf], [0.0, 0.0, 0.0], [torch.nan, 0.0, 0.0]], device=device)
    y = torch.tensor([[0.0, 0.0, -inf], [0.0, 1.0, 2.0], [0.0, 0.0, -inf], [0.0, 0.0, 0.0]], device=device)
    target, log = torch.zeros(4, dtype=torch.int64, device=device), torch.log
    forward, reverse, jsd, tv = (
        ll.logprobs(z, target, teacher=y, divergence=kind, backend=backend).divergence  # pyright: ignore[reportArgumentType]
        for kind in ("forward_kl", "reverse_kl", "jsd", "tv")
    )
    for x in (forward, reverse, jsd, tv):
        assert x[0] == 0
        assert x[3].isnan()
    assert forward[1] == inf
    assert reverse[2] == inf
    torch.testing.assert_close(forward[2], log(torch.tensor(1.5, device=device)))
    assert 0 < jsd[1] < 0.7
    assert 0 < tv[2] < 1
    # The gradient of an infinite forward KL is finite, as its formula is.
    leaf = z[:3].clone().requires_grad_()
    ll.logprobs(
        leaf, target[:3], teacher=y[:3], divergence="forward_kl", entropy="grad", backend=backend
    ).divergence.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_second_derivatives_of_float64_are_refused_and_first_ones_checked(device: torch.device):
    hidden = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, device=device, requires_grad=True)
    teacher = Teacher(ll.Logits(torch.randn(3, 5, device=device).double(), torch.randn(7, 5, device=device).double()))
    target = torch.tensor([1, 0, 6], device=device)
    for kind, numbers in KINDS.items():
        if kind in ("tv", "acceptance", "log_acceptance", "lk_hybrid"):
            # Kinks, and a weight that is held fixed.
            continue

        def score(h: Tensor, w: Tensor, kind: Any = kind, numbers: Any = numbers) -> Tensor:
            out = ll.logprobs(ll.Logits(h, w), target, teacher=teacher, divergence=Divergence(kind, **numbers))
            assert out.divergence is not None
            return out.divergence

        assert torch.autograd.gradcheck(score, (hidden, weight))
    total = ll.logprobs(ll.Logits(hidden, weight), target, teacher=teacher).divergence.sum()
    with pytest.raises(ll.LogitlessError, match="create_graph=True"):
        torch.autograd.grad(total, hidden, create_graph=True)


def test_frozen_head_and_buffers(device: torch.device):
    """Only hidden needs a gradient; then the weight's goes to a buffer, on top of what is there."""
    batch = Batch.draw(device, dtype=torch.bfloat16)
    teacher = Teacher(ll.Logits(batch.teacher_hidden, batch.teacher_weight))
    hidden, weight, bias = batch.leaves(torch.bfloat16)
    ll.logprobs(
        ll.Logits(hidden, weight, bias=bias), batch.target, teacher=teacher, entropy="grad"
    ).divergence.sum().backward()
    again, frozen = batch.hidden.detach().requires_grad_(), weight.detach()
    ll.logprobs(
        ll.Logits(again, frozen, bias=bias.detach()), batch.target, teacher=teacher, entropy="grad"
    ).divergence.sum().backward()
    assert torch.equal(hidden.grad, again.grad)
    buffer = torch.ones(83, 16, device=device)
    other = weight.detach().clone().requires_grad_()
    ll.logprobs(
        ll.Logits(again, other, bias=bias.detach(), weight_grad=buffer), batch.target, teacher=teacher, entropy="grad"
    ).divergence.sum().backward()
    assert other.grad is None
    torch.testing.assert_close((buffer - 1).bfloat16(), weight.grad, rtol=2e-2, atol=1e-2)


def sharded(rank: int, world: int, batch: Batch, teacher_columns: int, sequence_parallel: bool) -> Outcome:
    """One rank's call, with its columns of both heads and, under sequence parallelism, its tokens."""
    start, stop = [(0, 30), (30, 83)][rank]
    shard = ll.VocabShard(start, stop, torch.distributed.group.WORLD)
    size = len(batch.hidden) // world
    tokens = slice(rank * size, (rank + 1) * size) if sequence_parallel else slice(None)
    part = batch._replace(hidden=batch.hidden[tokens], weight=batch.weight[start:stop], bias=batch.bias[start:stop])
    teacher = Teacher(ll.Logits(batch.teacher_hidden[tokens], batch.teacher_weight[start : min(stop, teacher_columns)]))
    options = {"shard": shard, "memory": 4000, "sequence_parallel": sequence_parallel}
    return ours(part, teacher, "jsd", **KINDS["jsd"], **options)


@pytest.mark.parametrize(("columns", "sequence_parallel"), [(83, False), (71, True)])
def test_shards_give_the_unsharded_answer(ranks, columns: int, sequence_parallel: bool):
    batch = Batch.draw("cpu", rows=12)
    whole = batch._replace(teacher_weight=batch.teacher_weight[:columns])
    exact, plain = (right(whole, "jsd", dtype, **KINDS["jsd"]) for dtype in (torch.float64, torch.float32))
    first, second = ranks(sharded, 2, batch, columns, sequence_parallel)
    assert all(torch.equal(a, b) for a, b in zip(first.values, second.values, strict=True))
    hidden = torch.cat([first.gradients[0], second.gradients[0]]) if sequence_parallel else first.gradients[0]
    joined = (hidden, *(torch.cat(x) for x in zip(first.gradients[1:], second.gradients[1:], strict=True)))
    assert_right(Outcome(first.values, joined), exact, plain)


def test_what_does_not_go_together_is_refused(device: torch.device):
    batch = Batch.draw(device)
    teacher = Teacher(ll.Logits(batch.teacher_hidden, batch.teacher_weight))
    logits, target = ll.Logits(*batch[:2]), batch.target
    wrong: dict[str, Any] = {
        "kind 'kl' is not known": lambda: ll.logprobs(logits, target, teacher=teacher, divergence="kl"),  # pyright: ignore[reportArgumentType]
        "beta is the teacher's share of the mixture, between 0 and 1, but is 1.0": lambda: Divergence("jsd", beta=1.0),
        "teacher must be logits, Logits, a Teacher or Teacher.by_row but is list": lambda: ll.logprobs(
            logits, target, teacher=[teacher]
        ),  # pyright: ignore[reportArgumentType]
        "They must be of the same tokens": lambda: ll.logprobs(
            ll.Logits(*batch[:2]),
            batch.target,
            teacher=Teacher(ll.Logits(batch.teacher_hidden[:5], batch.teacher_weight)),
            entropy="grad",
        ),
        "KL(student || teacher) is infinite": lambda: ll.logprobs(
            ll.Logits(*batch[:2]),
            batch.target,
            teacher=Teacher(ll.Logits(batch.teacher_hidden, batch.teacher_weight[:80])),
            entropy="grad",
        ),
        "the teacher has 83 columns here and the student 60": lambda: ll.logprobs(
            ll.Logits(batch.hidden, batch.weight[:60]), batch.target.clamp_max(59), teacher=teacher, entropy="grad"
        ),
        "divergence='reverse_kl' and the call no teacher": lambda: ll.policy_loss(
            ll.Logits(*batch[:2]), batch.target, ll.Objective.recipe("distill")
        ),
        "divergence=None and the call a teacher": lambda: ll.policy_loss(
            ll.Logits(*batch[:2]), batch.target, ll.Objective(policy="none"), teacher=teacher
        ),
        "divergence_coef is 0.5 but divergence is None": lambda: ll.Objective(divergence_coef=0.5),
        "which runs from 0 to 3, but there are 1 members": lambda: Teacher.by_row([teacher], torch.tensor([0, 3])),
        "ids name one of the student's ids twice": lambda: Teacher(
            ll.Logits(batch.teacher_hidden, batch.teacher_weight), ids=torch.zeros(83, dtype=torch.int64)
        ),
    }
    for text, act in wrong.items():
        with pytest.raises(ll.LogitlessError) as caught:
            act()
        assert text in str(caught.value)


def test_no_rows(device: torch.device):
    batch = Batch.draw(device)
    hidden = batch.hidden.detach().requires_grad_()
    teacher = Teacher(ll.Logits(batch.teacher_hidden, batch.teacher_weight))
    none = (torch.zeros(0, dtype=torch.int64, device=device),) * 2
    out = ll.logprobs(ll.Logits(hidden, batch.weight), none, teacher=teacher, entropy="grad")
    out.divergence.sum().backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()
    logits = torch.randn(11, 83, device=device, requires_grad=True)
    ll.logprobs(logits, none, teacher=teacher).divergence.sum().backward()
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize("teacher", ["head", "top k", None])
def test_no_rows_in_a_loss(teacher: str | None, device: torch.device):
    """Whatever its terms are on: a loss of 0, and gradients of 0."""
    batch = Batch.draw(device)
    hidden, weight = batch.hidden.detach().requires_grad_(), batch.weight.detach().requires_grad_()
    none = (torch.zeros(0, dtype=torch.int64, device=device),) * 2
    sent = Teacher.from_top_k(torch.zeros(0, 2, device=device), torch.zeros(0, 2, dtype=torch.int64, device=device))
    smooth = ll.Objective.recipe("sft", policy_options={"label_smoothing": 0.1})
    objective = smooth if teacher is None else ll.Objective.recipe("distill")
    given = {"head": ll.Logits(*batch[3:5]), "top k": sent}.get(str(teacher))
    loss, _, stats = ll.policy_loss(ll.Logits(hidden, weight), none, objective, teacher=given, return_stats=True)
    assert float(loss.detach()) == 0
    assert teacher is None or stats.divergence.shape == (0,)
    loss.backward()
    for x in (hidden, weight):
        assert x.grad is not None
        assert not x.grad.any()


@pytest.mark.parametrize("sort", ["head", "logits", "bucket", "renormalise", "kept"])
def test_batch_invariant_bits(sort: str):
    """A token's results do not depend on how many or which others come with it, nor on where it stands."""
    rows = 61
    hidden, weight = torch.randn(rows, 48), torch.randn(301, 48)
    other, other_weight = torch.randn(rows, 40), torch.randn(301, 40)
    target, (best, ids) = torch.randint(301, (rows,)), torch.randn(rows, 301).log_softmax(-1).topk(5)

    def score(index: Tensor) -> Any:
        teachers = {
            "logits": lambda: Teacher(other @ other_weight.T),
            "bucket": lambda: Teacher.from_top_k(best[index], ids[index]),
            "renormalise": lambda: Teacher.from_top_k(best[index], ids[index], "renormalise"),
        }
        teacher = teachers.get(sort, lambda: Teacher(ll.Logits(other, other_weight)))()
        options: dict[str, Any] = {"bits": "canonical", "memory": 40_000}
        if sort == "kept":
            options["kept"] = ll.Kept(ids[index].flatten(), torch.full_like(index, 5), "support")
        return from_hidden(
            hidden, weight, (index, target[index]), teacher=teacher, divergence="jsd", entropy="grad", **options
        )

    full = score(torch.arange(rows))
    # What is fixed is the order of sums, and not the result.
    loose = ll.logprobs(
        ll.Logits(hidden, weight),
        target,
        teacher=Teacher(ll.Logits(other, other_weight)),
        divergence="jsd",
        entropy="grad",
    )
    if sort in ("head", "logits"):
        torch.testing.assert_close(full.divergence, loose.divergence)
    for index in (torch.tensor([7]), torch.arange(40, 57), torch.randperm(rows)):
        for name, whole, part in zip(full._fields, full, score(index), strict=True):
            if whole is None:
                continue
            assert torch.equal(whole[index].nan_to_num(7.0), part.nan_to_num(7.0)), name


def test_batch_invariance_as_a_loss_and_with_several_teachers():
    batch = Batch.draw("cpu")
    teacher, objective = Teacher(ll.Logits(*batch[3:5])), ll.Objective.recipe("distill", divergence="forward_kl")
    hidden = batch.hidden.clone().requires_grad_()
    given: dict[str, Any] = {"teacher": teacher, "bits": "canonical", "memory": 6000}
    logits, options = logits_of(hidden, batch.weight, given)
    plan = ll.explain(ll.policy_loss, logits, batch.target, objective, **options)
    assert str(plan).startswith('two passes: 6 matrix products, because bits="canonical" fixes the')
    loss, _, stats = loss_from_hidden(hidden, batch.weight, batch.target, objective, return_stats=True, **given)
    each = ll.logprobs(
        ll.Logits(hidden, batch.weight, bits="canonical"),
        batch.target,
        teacher=teacher,
        divergence="forward_kl",
        entropy="grad",
        memory=6000,
    )
    assert torch.equal(stats.divergence, each.divergence)
    (found,) = torch.autograd.grad(loss, hidden)
    (wanted,) = torch.autograd.grad(each.divergence.sum() / 10, hidden)
    torch.testing.assert_close(found, wanted)
    several = Teacher.by_row([teacher], torch.zeros(11, dtype=torch.int64))
    with pytest.raises(ll.LogitlessError, match='bits="canonical" goes with one Teacher'):
        ll.logprobs(ll.Logits(*batch[:2], bits="canonical"), batch.target, teacher=several, entropy="grad")


@pytest.mark.parametrize("seed", range(60))
def test_pairs_of_features(seed: int):
    """Drawn at random: kind, dtype, sizes, budget, heads of both, a smaller vocabulary, distances and offsets."""
    r, kinds = random.Random(seed), list(KINDS)
    torch.manual_seed(seed)
    kind, dtype = r.choice(kinds), r.choice((torch.float32, torch.float64))
    rows, vocab = r.choice((4, 5, 9, 17)), r.choice((2, 3, 17, 64, 101))
    batch = Batch.draw("cpu", rows, vocab, dtype, near=r.choice((None, None, 1e-2)))
    if r.random() < 0.3 and kind != "reverse_kl" and vocab > 2:
        batch = batch._replace(teacher_weight=batch.teacher_weight[: r.randint(2, vocab)])
    if r.random() < 0.3:
        batch = batch._replace(bias=batch.bias + r.choice((-300.0, 300.0)))
    if r.random() < 0.3:
        batch = batch._replace(hidden=batch.hidden * 8)
    heads = [None, ll.Head(temperature=0.6, scale=-1.5), ll.Head(softcap=7.0), ll.Head(scale=0.3)]
    head, other = r.choice(heads), r.choice(heads)
    memory = r.choice((2000, 9000, "1MiB"))
    options = {"head": head, "backend": r.choice(("reference", "tiled")), "memory": memory, **KINDS[kind]}
    exact, plain = (right(batch, kind, d, head, other, **KINDS[kind]) for d in (torch.float64, dtype))
    found = ours(batch, Teacher(ll.Logits(batch.teacher_hidden, batch.teacher_weight), head=other), kind, **options)
    # Logits are rounded at their own size, before anything is computed of them.
    logits = shaped(batch.hidden @ batch.weight.T + batch.bias, head)
    unit = 4 * torch.finfo(dtype).eps * max(1.0, float(logits.abs().max()))
    for mine, truth, theirs in zip(
        [*found.values, *found.gradients],
        [*exact.values, *exact.gradients],
        [*plain.values, *plain.gradients],
        strict=True,
    ):
        finite = truth.isfinite()
        assert torch.equal(mine[~finite].double(), truth[~finite])
        size = truth[finite].abs().max().clamp_min(1.0) if finite.any() else 1.0
        error, usual = (
            float((x.double() - truth)[finite].abs().max() / size) if finite.any() else 0.0 for x in (mine, theirs)
        )
        # Plain torch has NaN where float32 does not hold a probability.
        assert error <= 8 * (usual if usual == usual else 0.0) + unit


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("verb", ["logprobs", "policy_loss"])
def test_autocast_rounds_the_teacher_as_the_student(verb: str, several: bool):
    """A teacher with the student's own numbers is at no distance, and both are those of operands that were cast."""
    hidden, weight, bias = torch.randn(9, 8), torch.randn(31, 8), torch.randn(31)
    target, which = torch.randint(31, (9,)), torch.arange(9) % 2

    def call(cast, context, own):
        x = cast(hidden.clone()).requires_grad_()
        teachers = [ll.Logits(cast(h), cast(w), bias=cast(bias)) for h, w in ((hidden, own), (hidden.flip(0), own))]
        teacher = Teacher.by_row(teachers, which) if several else Teacher(teachers[0])
        logits = ll.Logits(x, cast(weight), bias=cast(bias))
        with context:
            if verb == "policy_loss":
                objective = ll.Objective.recipe("distill", divergence="forward_kl")
                loss = ll.policy_loss(logits, target, objective, teacher=teacher)[0]
            else:
                loss = ll.logprobs(logits, target, teacher=teacher, divergence="forward_kl").divergence.sum()
        loss.backward()
        return loss.detach(), x.grad.float()

    other = torch.randn(31, 8)
    under = call(lambda x: x, torch.autocast("cpu", torch.bfloat16), other)
    cast = call(lambda x: x.bfloat16(), contextlib.nullcontext(), other)
    for mine, theirs in zip(under, cast, strict=True):
        torch.testing.assert_close(mine, theirs, atol=0, rtol=0)
    if not several:
        assert call(lambda x: x, torch.autocast("cpu", torch.bfloat16), weight)[0] == 0


def beside_nothing(rank: int, world: int, logits: Tensor, teachers: Tensor, kept: bool) -> tuple[Tensor, Tensor]:
    """Several teachers of logits, whose columns are all on the last rank."""
    columns = slice(0, 0) if rank + 1 < world else slice(0, logits.shape[1])
    here = logits[:, columns].clone().requires_grad_()
    shard = ll.VocabShard(columns.start, columns.stop, torch.distributed.group.WORLD)
    which = torch.arange(len(logits)) % len(teachers)
    support = ll.Kept.from_lists([[0, row] for row in range(len(logits))]) if kept else None
    teacher = Teacher.by_row([x[:, columns].clone() for x in teachers], which)
    target = torch.arange(len(logits))
    given = ll.Logits.given(here * 1.0, shard=shard)
    out = ll.logprobs(given, target, teacher=teacher, divergence="tv", kept=support)
    out.divergence.sum().backward()
    return out.divergence.detach(), here.grad


@pytest.mark.parametrize("kept", [False, True])
def test_teachers_beside_a_shard_of_no_columns(ranks, kept: bool):
    """What one rank cannot reshape, the others wait for."""
    logits, teachers = torch.randn(5, 9, dtype=torch.float64), torch.randn(2, 5, 9, dtype=torch.float64)
    (first, nothing), (second, whole) = ranks(beside_nothing, 2, logits, teachers, kept)
    z, y = logits, torch.stack([teachers[row % 2, row] for row in range(5)])
    if kept:
        left_out = torch.ones(5, 9, dtype=torch.bool).scatter(1, torch.tensor([[0, row] for row in range(5)]), False)
        z, y = (x.masked_fill(left_out, -torch.inf) for x in (z, y))
    truth = 0.5 * (z.softmax(-1) - y.softmax(-1)).abs().sum(-1)
    assert_close_to_truth(first, truth, truth)
    assert torch.equal(first, second)
    assert (nothing.shape, whole.isfinite().all()) == ((5, 0), True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_canonical_rows_in_three_parts(backend: str, device: torch.device):
    """Chunks of one height, the last of which is filled up with empty rows. Numbers of 8 bits are one part exactly."""
    hidden, weight, other, theirs = (torch.randn(n, 16).bfloat16().float().to(device) for n in (11, 43, 11, 43))
    target, found = torch.arange(11, device=device), []
    for dtype in WIDE:
        z, y = (a.to(dtype) @ b.to(dtype).T for a, b in ((hidden, weight), (other, theirs)))
        found.append((textbook(z, y, "jsd"), z.log_softmax(-1).gather(1, target[:, None])[:, 0]))
    options: dict[str, Any] = {"bits": "canonical", "precision": "bfloat16x3"}
    logits, teacher = (ll.Logits(*x, **options) for x in ((hidden, weight), (other, theirs)))
    given: dict[str, Any] = {"teacher": teacher, "divergence": "jsd", "backend": backend, "memory": 2000}
    plan = ll.explain(ll.logprobs, logits, target, **given)
    assert plan.chunks[-1][1] > 11
    out = ll.logprobs(logits, target, **given)
    for values in zip((out.divergence, out.logprob), *found, strict=True):
        assert_close_to_truth(*values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_teachers_head_is_widened_a_slab_at_a_time(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """On a CPU, which multiplies 16-bit operands in copies of 32 bits: none of a whole weight is made."""
    widths, project = [], Projection.project
    monkeypatch.setattr(
        Projection, "project", lambda p, first, out: (widths.append(out.shape[1]), project(p, first, out))[1]
    )
    hidden, weight = torch.randn(3, 4).to(dtype), torch.randn(SLAB + 700, 4).to(dtype)
    x, target = torch.randn(3, SLAB + 700), torch.zeros(3, dtype=torch.int64)
    out = ll.logprobs(x, target, teacher=ll.Logits(hidden, weight), divergence="tv")
    assert widths == [SLAB, 700]
    truths = (textbook(x.to(wide), hidden.to(wide) @ weight.to(wide).T, "tv") for wide in WIDE)
    assert_close_to_truth(out.divergence, *truths)
