"""A student over part of its teacher's vocabulary, as a draft head is, against float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from shared.divergence import BACKENDS, KINDS, textbook
from torch import Tensor

import logitless as ll
from logitless import LogitlessError, Teacher
from logitless.backends.divergences import Divergence

# NumPy, which runs the kernels in Triton's interpreter, reports what a selection then leaves out.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")

ROWS, WIDE, VOCAB = 13, 97, 41
STATS = ("acceptance", "teacher_log_z", "teacher_shared", "teacher_top1")
FINITE = [kind for kind in KINDS if kind not in ("forward_kl", "lk_hybrid")]


class Draft(NamedTuple):
    """A teacher of 97 ids, and a student of 41 of them; two of the student's own the teacher does not have."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    ids: Tensor
    target: Tensor

    @staticmethod
    def draw(device: torch.device | str = "cpu", dtype=torch.float32, tokens: int = ROWS) -> Draft:
        sizes = ((ROWS, 16), (VOCAB, 16), (VOCAB,), (tokens, 24), (WIDE, 24))
        floats = [(0.5 * torch.randn(size)).to(device, dtype) for size in sizes]
        ids = torch.full((WIDE,), -1)
        ids[torch.randperm(WIDE)[: VOCAB - 2]] = torch.randperm(VOCAB)[: VOCAB - 2]
        target = torch.randint(VOCAB, (ROWS,))
        target[3] = -100
        return Draft(*floats, ids.to(device), target.to(device))

    def teacher(self, tail: Any = "renormalise", given: bool = False, **more: Any) -> Teacher:
        logits = ll.Logits(self.teacher_hidden, self.teacher_weight)
        x = self.teacher_hidden @ self.teacher_weight.T if given else logits
        return Teacher(x, ids=self.ids, tail=tail, **more)


class Outcome(NamedTuple):
    values: dict[str, Tensor]
    gradients: tuple[Tensor | None, ...]


def right(draft: Draft, kind: str, tail: str, dtype: torch.dtype, at: Tensor | None = None, **numbers: Any) -> Outcome:
    """Plain torch over the ids of both: the student's, then those that only the teacher has."""
    hidden, weight, bias = (x.detach().to(dtype).requires_grad_() for x in draft[:3])
    z = hidden @ weight.T + bias
    y = draft.teacher_hidden.to(dtype) @ draft.teacher_weight.to(dtype).T
    y = y if at is None else y[at]
    has, full = draft.ids >= 0, y.logsumexp(-1)
    shared = y.new_full((ROWS, VOCAB), -torch.inf).index_copy(1, draft.ids[has], y[:, has])
    accepted = torch.minimum(z.log_softmax(-1).exp(), (shared - full[:, None]).exp()).sum(-1)
    if tail == "bucket":
        # No log 0: what is never drawn is drawn once in e^60.
        wide = torch.nn.functional.pad(z, (0, WIDE - int(has.sum())), value=-60.0)
        found = textbook(wide, torch.cat([shared, y[:, ~has]], 1), kind, **numbers)
    else:
        found = textbook(z, shared, kind, full=full, **numbers)
    counted = draft.target != -100
    values = {
        "divergence": found,
        "acceptance": accepted,
        "teacher_log_z": full,
        "teacher_shared": (shared.logsumexp(-1) - full).exp(),
        "teacher_top1_id": y.argmax(-1),
    }
    values = {name: torch.where(counted, x, 0) for name, x in values.items()}
    scale = torch.arange(1, ROWS + 1, device=z.device)
    (scale * (values["divergence"] + 0.3 * values["acceptance"])).sum().backward()
    return Outcome({name: x.detach() for name, x in values.items()}, (hidden.grad, weight.grad, bias.grad))


def ours(draft: Draft, teacher: Teacher, kind: Any, linear: bool = True, **options: Any) -> Outcome:
    hidden, weight, bias = (x.detach().clone().requires_grad_() for x in draft[:3])
    logits = ll.Logits(hidden, weight, bias=bias) if linear else hidden @ weight.T + bias
    what = Divergence(kind, **KINDS[kind])
    out = ll.logprobs(logits, draft.target, teacher=teacher, divergence=what, stats=STATS, **options)
    scale = torch.arange(1, ROWS + 1, device=hidden.device)
    assert out.divergence is not None
    assert out.acceptance is not None
    (scale * (out.divergence + 0.3 * out.acceptance)).sum().backward()
    names = ("divergence", "acceptance", "teacher_log_z", "teacher_shared", "teacher_top1_id")
    return Outcome({name: getattr(out, name).detach() for name in names}, (hidden.grad, weight.grad, bias.grad))


def assert_right(found: Outcome, exact: Outcome, plain: Outcome) -> None:
    for name, x in found.values.items():
        if name == "teacher_top1_id":
            assert torch.equal(x, exact.values[name])
        else:
            assert_close_to_truth(x, exact.values[name], plain.values[name], name=name)
    for name, *x in zip(("hidden", "weight", "bias"), found.gradients, exact.gradients, plain.gradients, strict=True):
        assert_gradient_close_to_truth(*x, name=f"d_{name}")  # pyright: ignore[reportArgumentType]


def check(draft: Draft, kind: str, tail: str, teacher: Teacher, at: Tensor | None = None, **options: Any) -> None:
    exact, plain = (right(draft, kind, tail, x, at, **KINDS[kind]) for x in (torch.float64, torch.float32))
    assert_right(ours(draft, teacher, kind, **options), exact, plain)


@pytest.mark.parametrize("memory", [6000, "1MiB"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reverse_kl"])
def test_over_the_ids_that_both_have(kind: str, backend: str, memory: Any, device: torch.device):
    """With rows of the teacher's weight looked up tile by tile, and all at once."""
    draft = Draft.draw(device)
    check(draft, kind, "renormalise", draft.teacher(), backend=backend, memory=memory)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [kind for kind in FINITE if kind != "reverse_kl"])
def test_over_all_ids(kind: str, backend: str, device: torch.device):
    """One outcome more is as many as there are ids that only the teacher has."""
    draft = Draft.draw(device)
    check(draft, kind, "bucket", draft.teacher("bucket"), backend=backend, memory=6000)


@pytest.mark.parametrize("tail", ["bucket", "renormalise"])
def test_reverse_kl_of_a_student_whose_ids_the_teacher_has(tail: str, device: torch.device):
    draft = Draft.draw(device)
    ids = torch.full((WIDE,), -1, device=device)
    ids[torch.randperm(WIDE, device=device)[:VOCAB]] = torch.arange(VOCAB, device=device)
    draft = draft._replace(ids=ids)
    check(draft, "reverse_kl", tail, draft.teacher(tail), memory=6000)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("kind", "tail"), [("jsd", "bucket"), ("lk_hybrid", "renormalise")])
def test_logits_of_either_that_exist(kind: str, tail: str, given: bool, linear: bool, device: torch.device):
    draft = Draft.draw(device)
    check(draft, kind, tail, draft.teacher(tail, given), linear=linear, memory=4000)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("linear", [False, True])
def test_several_steps_ahead(linear: bool, given: bool, device: torch.device):
    """Three rows of the draft beside one token of the teacher, in any order, and tokens that no row is beside."""
    draft = Draft.draw(device, tokens=9)
    at = torch.tensor([0, 2, 4, 5, 1, 0, 2, 7, 4, 0, 1, 5, 2], device=device)
    for kind, tail in (("log_acceptance", "renormalise"), ("tv", "bucket")):
        check(draft, kind, tail, draft.teacher(tail, given, at=at), at=at, linear=linear, memory=4000)


def test_a_token_beside_several_rows_is_multiplied_once(monkeypatch: pytest.MonkeyPatch):
    draft, seen = Draft.draw(tokens=4), []
    at = torch.arange(ROWS) % 4
    from logitless.sources.linear import Projection

    project = Projection.project
    monkeypatch.setattr(
        Projection, "project", lambda p, first, out: (seen.append(out.shape), project(p, first, out))[1]
    )
    ll.logprobs(
        ll.Logits(draft.hidden, draft.weight),
        draft.target,
        teacher=draft.teacher(at=at),
        divergence="log_acceptance",
        backend="tiled",
    )
    assert sorted(map(tuple, seen)) == [(4, VOCAB), (4, WIDE), (ROWS, VOCAB)]


def test_a_temperature_for_every_row(device: torch.device):
    """Rows beside one token may differ in theirs."""
    draft = Draft.draw(device, tokens=5)
    at, heat = torch.arange(ROWS, device=device) % 5, torch.rand(ROWS, device=device) + 0.5
    teacher = draft.teacher("bucket", at=at, head=ll.Head(temperature=heat))
    out = ours(draft, teacher, "jsd", memory=6000)
    wide = draft._replace(teacher_hidden=draft.teacher_hidden[at] / heat[:, None])
    exact, plain = (right(wide, "jsd", "bucket", x, **KINDS["jsd"]) for x in (torch.float64, torch.float32))
    assert_right(out, exact, plain)


def test_the_same_vocabulary(device: torch.device):
    """Nothing is missing: the shared ids are all, and the most likely one needs no product of its own."""
    draft = Draft.draw(device)
    draft = draft._replace(ids=torch.arange(VOCAB, device=device), teacher_weight=draft.teacher_weight[:VOCAB])
    hidden, weight, bias = draft[:3]
    teacher = ll.Logits(draft.teacher_hidden, draft.teacher_weight)
    out = ll.logprobs(
        ll.Logits(hidden, weight, bias=bias), draft.target, teacher=teacher, divergence="tv", stats=STATS, memory=6000
    )
    counted = draft.target != -100
    y = draft.teacher_hidden.double() @ draft.teacher_weight.double().T
    torch.testing.assert_close(out.teacher_shared, counted.float())
    torch.testing.assert_close(out.acceptance, torch.where(counted, 1 - out.divergence, 0.0), rtol=1e-5, atol=1e-6)
    assert torch.equal(out.teacher_top1_id, torch.where(counted, y.argmax(-1), 0))
    torch.testing.assert_close(out.teacher_log_z.double(), torch.where(counted, y.logsumexp(-1), 0.0))


def test_an_acceptance_near_0_keeps_its_digits(device: torch.device):
    """Value and gradient of its logarithm are as large as ever."""
    z, y = torch.randn(3, 9, dtype=torch.float64, device=device), torch.randn(3, 9, dtype=torch.float64, device=device)
    z[:, 0], y[:, 1] = 24.0, 24.0
    leaves = [x.requires_grad_() for x in (z.clone(), z.float())]
    truth = textbook(leaves[0], y, "log_acceptance")
    truth.sum().backward()
    out = ll.logprobs(
        leaves[1], torch.zeros(3, dtype=torch.int64, device=device), teacher=y.float(), divergence="log_acceptance"
    )
    out.divergence.sum().backward()
    assert truth.min() > 20
    torch.testing.assert_close(out.divergence.double(), truth, rtol=1e-5, atol=0)
    torch.testing.assert_close(leaves[1].grad.double(), leaves[0].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["forward_kl", "lk_hybrid", "reverse_kl"])
def test_a_frozen_head_that_both_share(kind: Any, backend: str, device: torch.device):
    """One weight for the draft's hidden states and the policy's: unit gradients in forward, and once more where another
    result has a gradient, too."""
    shared, target = torch.randn(83, 16, device=device), torch.randint(83, (11,), device=device)
    hidden, other = 0.5 * torch.randn(2, 11, 16, device=device)
    target[3], scale = -100, torch.arange(11, device=device) / 3
    for more in (0.0, 0.3):
        truths = []
        for dtype in (torch.float64, torch.float32):
            leaf, weight = hidden.clone().to(dtype).requires_grad_(), shared.to(dtype)
            z = leaf @ weight.T
            rows = textbook(z, other.to(dtype) @ weight.T, kind) * scale
            rows = rows + more * z.log_softmax(-1).gather(1, target.clamp_min(0)[:, None])[:, 0]
            torch.where(target != -100, rows, 0.0).sum().backward()
            truths.append(leaf.grad)
        leaf = hidden.clone().requires_grad_()
        given: dict[str, Any] = {"teacher": ll.Logits(other, shared), "divergence": kind, "backend": backend}
        plan = ll.explain(ll.logprobs, ll.Logits(leaf, shared), target, memory=6000, **given)
        assert str(plan).startswith("pair: 3 matrix products, because the head needs no gradient")
        out = ll.logprobs(ll.Logits(leaf, shared), target, memory=6000, **given)
        assert out.divergence is not None
        loss = (out.divergence * scale).sum()
        (loss + more * out.logprob.sum() if more else loss).backward()
        assert_gradient_close_to_truth(leaf.grad, *truths)  # pyright: ignore[reportArgumentType]


def test_a_frozen_head_whose_logits_are_rounded(device: torch.device):
    """Rows of 16-bit logits have no room for a float32 gradient: they are made again in backward."""
    hidden, weight, target = torch.randn(5, 8, device=device), torch.randn(19, 8, device=device), torch.arange(5)
    teacher, found = torch.randn(5, 19, device=device), []
    for frozen in (False, True):
        leaf, own = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
        logits = ll.Logits(leaf, own, match="bfloat16")
        out = ll.logprobs(logits, target.to(device), teacher=teacher, divergence="forward_kl")
        assert out.divergence is not None
        out.divergence.sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)  # pyright: ignore[reportArgumentType]


def test_as_a_term_of_an_objective(device: torch.device):
    """A loss in one pass over a draft's rows: its value is the mean of the rows."""
    draft = Draft.draw(device)
    objective = ll.Objective.recipe("distill", divergence=Divergence("lk_hybrid", eta=2.0))
    hidden, weight, bias = (x.detach().clone().requires_grad_() for x in draft[:3])
    logits = ll.Logits(hidden, weight, bias=bias)
    loss, _ = ll.policy_loss(logits, draft.target, objective, teacher=draft.teacher(), memory=6000)
    loss.backward()
    exact = []
    for dtype in (torch.float64, torch.float32):
        own = [x.detach().to(dtype).requires_grad_() for x in draft[:3]]
        z, y = own[0] @ own[1].T + own[2], draft.teacher_hidden.to(dtype) @ draft.teacher_weight.to(dtype).T
        has = draft.ids >= 0
        shared = y.new_full((ROWS, VOCAB), -torch.inf).index_copy(1, draft.ids[has], y[:, has])
        rows = textbook(z, shared, "lk_hybrid", eta=2.0, full=y.logsumexp(-1))
        (rows[draft.target != -100].sum() / (ROWS - 1)).backward()
        exact.append([(rows[draft.target != -100].sum() / (ROWS - 1)).detach(), *(x.grad for x in own)])
    assert_close_to_truth(*(torch.atleast_1d(x) for x in (loss.detach(), exact[0][0], exact[1][0])))
    for x, *truths in zip((hidden, weight, bias), exact[0][1:], exact[1][1:], strict=True):
        assert_gradient_close_to_truth(x.grad, *truths)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["forward_kl", "lk_hybrid", "tv"])
def test_a_bucket_of_nothing(kind: str, backend: str, given: bool, device: torch.device):
    """The teacher has the student's ids in another order, and columns of padding: no outcome is left for a bucket."""
    draft = whole_vocabulary(Draft.draw(device))
    teacher = draft.teacher("bucket", given, head=ll.Head(vocab_size=VOCAB))
    draft = draft._replace(ids=draft.ids[:VOCAB], teacher_weight=draft.teacher_weight[:VOCAB])
    found = ours(draft, teacher, kind, backend=backend, memory=6000)
    assert torch.equal(found.values["teacher_shared"], (draft.target != -100).float())
    exact, plain = (right_wide(draft, kind, x) for x in (torch.float64, torch.float32))
    assert_right(found, exact, plain)


def whole_vocabulary(draft: Draft) -> Draft:
    """With a teacher whose first columns are all of the student's, in another order, and whose others are padding."""
    ids = torch.cat([torch.randperm(VOCAB), torch.full((WIDE - VOCAB,), -1)])
    return draft._replace(ids=ids.to(draft.ids.device))


def right_wide(draft: Draft, kind: str, dtype: torch.dtype) -> Outcome:
    """Of a teacher with the student's ids, over them."""
    return right(draft, kind, "renormalise", dtype, **KINDS[kind])


def sharded(
    rank: int, world: int, draft: Draft, kind: str, tail: str, columns: int, cut: int = 60, check: bool = False
) -> Outcome:
    """Ranks share the columns of both vocabularies, in parts of other sizes; ids are anybody's."""
    group, wide = torch.distributed.group.WORLD, len(draft.ids)
    own = slice(0, columns) if rank == 0 else slice(columns, VOCAB)
    theirs = slice(0, cut) if rank == 0 else slice(cut, wide)
    shard, other = (ll.VocabShard(x.start, x.stop, group, check_calls=check) for x in (own, theirs))
    hidden, weight, bias = (x.clone().requires_grad_() for x in (draft.hidden, draft.weight[own], draft.bias[own]))
    teacher = Teacher(
        ll.Logits(draft.teacher_hidden, draft.teacher_weight[theirs], shard=other), ids=draft.ids[theirs], tail=tail
    )
    what = Divergence(kind, **KINDS[kind])
    logits = ll.Logits(hidden, weight, bias=bias, shard=shard)
    out = ll.logprobs(logits, draft.target, teacher=teacher, divergence=what, stats=STATS, memory=6000)
    (torch.arange(1, ROWS + 1) * (out.divergence + 0.3 * out.acceptance)).sum().backward()
    names = ("divergence", "acceptance", "teacher_log_z", "teacher_shared", "teacher_top1_id")
    return Outcome({name: getattr(out, name).detach() for name in names}, (hidden.grad, weight.grad, bias.grad))


@pytest.mark.parametrize(("kind", "tail", "columns"), [("lk_hybrid", "renormalise", 17), ("tv", "bucket", 40)])
def test_over_the_ranks_of_a_vocabulary_group(ranks, kind: str, tail: str, columns: int):
    draft = Draft.draw()
    exact, plain = (right(draft, kind, tail, x, **KINDS[kind]) for x in (torch.float64, torch.float32))
    assert_right_over_ranks(ranks(sharded, 2, draft, kind, tail, columns), exact, plain)


@pytest.mark.parametrize(("kind", "tail"), [("lk_hybrid", "renormalise"), ("tv", "bucket")])
@pytest.mark.parametrize(("columns", "cut"), [(17, 0), (17, WIDE), (0, WIDE), (VOCAB, 0)])
def test_a_rank_without_columns_of_the_teacher(ranks, kind: str, tail: str, columns: int, cut: int):
    """Nor, in the last two cases, of the student, or of either. Ranks that compare their calls have other ids."""
    draft = Draft.draw()
    exact, plain = (right(draft, kind, tail, x, **KINDS[kind]) for x in (torch.float64, torch.float32))
    assert_right_over_ranks(ranks(sharded, 2, draft, kind, tail, columns, cut, True), exact, plain)


@pytest.mark.parametrize("kind", ["forward_kl", "lk_hybrid"])
def test_a_bucket_of_nothing_over_ranks(ranks, kind: str):
    draft = whole_vocabulary(Draft.draw())
    draft = draft._replace(ids=draft.ids[:VOCAB], teacher_weight=draft.teacher_weight[:VOCAB])
    exact, plain = (right_wide(draft, kind, x) for x in (torch.float64, torch.float32))
    assert_right_over_ranks(ranks(sharded, 2, draft, kind, "bucket", 17, 30), exact, plain)


def refused(rank: int, world: int, draft: Draft) -> str:
    with pytest.raises(LogitlessError) as found:
        sharded(rank, world, draft, "forward_kl", "bucket", 17, 30)
    return str(found.value)


@pytest.mark.parametrize("wide", [VOCAB, WIDE])
def test_ids_of_one_rank_make_a_kl_infinite_for_all(ranks, wide: int):
    """Of as many ids as the student's one is another, on the second rank; or there are more of them."""
    draft = whole_vocabulary(Draft.draw())
    ids = draft.ids[:wide].clone()
    ids[VOCAB - 1] = -1
    draft = draft._replace(ids=ids, teacher_weight=draft.teacher_weight[:wide])
    for text in ranks(refused, 2, draft, timeout=20):
        assert 'infinite with tail="bucket". Take tail="renormalise"' in text


def named_twice(rank: int, world: int, draft: Draft, looked_at: bool) -> str | Outcome:
    if looked_at:
        with pytest.raises(LogitlessError) as found:
            sharded(rank, world, draft, "tv", "renormalise", 17, 30)
        return str(found.value)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("logitless.sources.teachers.inspectable", lambda x: False)
        return sharded(rank, world, draft, "tv", "renormalise", 17, 30)


@pytest.mark.parametrize("looked_at", [True, False], ids=["cpu", "as on a GPU"])
def test_an_id_that_two_ranks_name(ranks, looked_at: bool):
    """Their columns were added up, silently."""
    draft = Draft.draw()
    ids = draft.ids.clone()
    ids[0] = ids[30:].max()
    for found in ranks(named_twice, 2, draft._replace(ids=ids), looked_at, timeout=20):
        if isinstance(found, str):
            assert "name one of the student's ids on several ranks" in found
        else:
            assert found.values["divergence"].isnan().any()


def assert_right_over_ranks(found: list[Outcome], exact: Outcome, plain: Outcome) -> None:
    first, second = found
    for name, x in first.values.items():
        assert torch.equal(x, second.values[name])
    whole = (first.gradients[0], *(torch.cat(x) for x in zip(first.gradients[1:], second.gradients[1:], strict=True)))
    assert_right(Outcome(first.values, whole), exact, plain)


def test_ids_from_the_map_of_a_draft():
    d2t = torch.tensor([3, 3, 5, 5])
    ids = Teacher.ids_from_d2t(d2t, 12)
    t2d = torch.zeros(12, dtype=torch.bool).index_fill_(0, torch.arange(4) + d2t, True)
    assert torch.equal(ids, torch.where(t2d, t2d.cumsum(0) - 1, -1))
    with pytest.raises(LogitlessError, match=r"d2t leads to ids from 3 to 8, outside of 8 columns"):
        Teacher.ids_from_d2t(d2t, 8)


def test_what_cannot_be_had():
    draft = Draft.draw()
    student = ll.Logits(draft.hidden, draft.weight)
    for kind in ("forward_kl", "lk_hybrid"):
        with pytest.raises(LogitlessError, match=r"infinite with tail=\"bucket\""):
            ll.logprobs(student, draft.target, teacher=draft.teacher("bucket"), divergence=kind)
    with pytest.raises(LogitlessError, match="tail must be 'bucket' or 'renormalise' but is 'buckets'"):
        draft.teacher("buckets")
    with pytest.raises(LogitlessError, match=r"at=\) is \[2\] but there are 13 rows"):
        ll.logprobs(student, draft.target, teacher=draft.teacher(at=torch.tensor([0, 1])), divergence="tv")
    with pytest.raises(LogitlessError, match=r"runs from 0 to 13, but the teacher has 13 tokens"):
        ll.logprobs(student, draft.target, teacher=draft.teacher(at=torch.arange(13) + (torch.arange(13) > 11)))
    with pytest.raises(LogitlessError, match="Those of a teacher need its logits"):
        ll.logprobs(student, draft.target, stats=("acceptance",))
    with pytest.raises(LogitlessError, match=r"eta is a number, 0 or more, but is -1"):
        Divergence("lk_hybrid", eta=-1)
    student = ll.Logits(draft.hidden, draft.weight, shard=ll.VocabShard(0, VOCAB))
    with pytest.raises(LogitlessError, match="needs Logits with a shard of their own"):
        ll.logprobs(student, draft.target, teacher=draft.teacher(), divergence="tv")


@pytest.mark.parametrize("given", [True, False])
def test_several_teachers_with_a_temperature_for_every_row(given: bool):
    """Rows are grouped by teacher, and so are the temperatures over all of a teacher's ids."""
    drafts = [Draft.draw(dtype=torch.float64) for _ in range(3)]
    which, temperature = torch.arange(ROWS) % 3, torch.rand(ROWS, dtype=torch.float64) + 0.3
    members = [draft.teacher(given=given, head=ll.Head(temperature=temperature)) for draft in drafts]
    first = drafts[0]
    out = ll.logprobs(
        first.hidden @ first.weight.T,
        first.target,
        teacher=Teacher.by_row(members, which),
        divergence="tv",
        stats=STATS,
    )
    for row in range(ROWS):
        draft = drafts[which[row]]
        y = draft.teacher_weight @ draft.teacher_hidden[row] / temperature[row]
        if first.target[row] == -100:
            continue
        assert_close_to_truth(out.teacher_log_z[row], y.logsumexp(-1), y.logsumexp(-1))
        shared = y.softmax(-1)[draft.ids >= 0].sum()
        assert_close_to_truth(out.teacher_shared[row], shared, shared)


@pytest.mark.parametrize("factor", [2.0, -1.5])
@pytest.mark.parametrize("softcap", [None, 1.2])
def test_a_factor_that_a_teachers_logits_carry(factor: float, softcap: float | None):
    """It comes before a softcap, and a negative one makes the smallest number the most likely id."""
    draft, head = Draft.draw(dtype=torch.float64), ll.Head(softcap=softcap)
    y = factor * (draft.teacher_hidden @ draft.teacher_weight.T)
    logits = factor * ll.Logits(draft.teacher_hidden, draft.teacher_weight)
    wanted, found = (ours(draft, Teacher(x, head, draft.ids), "jsd") for x in (y, logits))
    assert_right(found, wanted, wanted)
    counted = draft.target != -100
    assert torch.equal(found.values["teacher_top1_id"][counted], y.argmax(-1)[counted])


def test_a_factor_for_each_row_of_a_teacher_with_a_softcap_is_refused():
    draft = Draft.draw()
    logits = ll.Logits(draft.teacher_hidden, draft.teacher_weight) / torch.full((ROWS, 1), 0.5)
    with pytest.raises(LogitlessError, match=r"Teacher: head has a softcap, and the Logits carry one factor per row"):
        Teacher(logits, ll.Head(softcap=3.0))


def test_members_with_different_tails_are_refused():
    members = [Teacher(torch.randn(4, 3), ids=torch.arange(3), tail=tail) for tail in ("bucket", "renormalise")]
    both = Teacher.by_row(members, torch.tensor([0, 1, 0, 1]))
    with pytest.raises(ll.LogitlessError, match=r"members have different tail=\. Call once for each of them"):
        ll.logprobs(torch.randn(4, 7), torch.tensor([1, 2, 3, 4]), teacher=both)
