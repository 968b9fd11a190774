"""``explain`` names every collective of a call: what it lists is what gloo ranks are seen to send, kinds, bytes, order.

A rank makes each case, asks ``explain``, then makes the call and counts. Its cases come from one table, so that a world
is started once; the same lists are what ``check_calls=True`` compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared.shards import Collectives, as_told
from torch import Tensor

import logitless as ll
from logitless import Kept, Objective, Preference, Teacher
from logitless.route import Collective, Plan

V, T, R, D = 127, 24, 17, 9
LENGTHS = (5, 0, 8, 3)


@dataclass
class Case:
    """What one rank has of a batch.

    Attributes:
        tp, cp: this rank's groups; None where there is one rank.
        rank, ranks: of the vocabulary group.
        other: (number, ranks) of the sequence group.
    """

    tp: Any
    cp: Any
    rank: int
    ranks: int
    other: tuple[int, int]
    checked: bool = False

    def bounds(self, vocabulary: int) -> tuple[int, int]:
        """Of this rank's columns: the second of several ranks has a single one, where no blocks are to be whole."""
        cuts = [vocabulary * i // self.ranks for i in range(self.ranks + 1)]
        if self.ranks > 2 and vocabulary % 128:
            cuts[2] = cuts[1] + 1
        return cuts[self.rank], cuts[self.rank + 1]

    def shard(self, vocabulary: int = V) -> ll.VocabShard:
        return ll.VocabShard(*self.bounds(vocabulary), self.tp, check_calls=self.checked)

    def given(self, vocabulary: int = V, **options: Any) -> Any:
        start, stop = self.bounds(vocabulary)
        x = torch.randn(T, vocabulary)[:, start:stop].clone().requires_grad_()
        return ll.Logits.given(x, shard=self.shard(vocabulary), **options)

    def canonical(self, trained: str = "hidden weight bias", split: bool = False) -> ll.Logits:
        """A head whose shards are whole blocks."""
        return self.logits(trained, vocabulary=128 * self.ranks, split=split, bits="canonical")

    def logits(
        self,
        trained: str = "hidden weight bias",
        dtype: torch.dtype = torch.float32,
        vocabulary: int = V,
        split: bool = False,
        width: int = D,
        **options: Any,
    ) -> ll.Logits:
        """A head, with the tokens of this rank where they are split."""
        start, stop = self.bounds(vocabulary)
        hidden, weight, bias = (torch.randn(n, dtype=dtype) for n in ((T, width), (vocabulary, width), (vocabulary,)))
        hidden = hidden.chunk(self.ranks)[self.rank] if split else hidden
        weight, bias = weight[start:stop].clone(), bias[start:stop].clone()
        for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias)):
            x.requires_grad_(name in trained)
        return ll.Logits(hidden, weight, bias=bias, shard=self.shard(vocabulary), sequence_parallel=split, **options)

    def teacher(self, split: bool = False, **options: Any) -> Teacher:
        return Teacher(self.logits("", split=split, width=7, **options))

    def rows(self) -> tuple[Tensor, Tensor]:
        return torch.randperm(T)[:R], torch.randint(V, (R,))

    def samples(self) -> ll.Rows:
        """Of packed samples, of which a rank of the sequence group has a part."""
        number, size = self.other
        tokens = [torch.randint(V, (n + 2,)) for n in LENGTHS]
        cp = None if size == 1 else ll.Contiguous(number, size)
        return ll.Rows.packed(tokens, response_lengths=list(LENGTHS), cp=cp, num_tokens=T)

    def kept(self, scope: str) -> Kept:
        return Kept.from_lists([[i % V, 3 * i % V, 77][: i % 4] for i in range(R)]).over(scope)

    def fields(self, rows: ll.Rows) -> dict[str, Tensor]:
        names = ("old_logprob", "advantage", "rollout_logprob")
        return {name: torch.randn(len(rows)) for name in names}


Made = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def log(logits: Any, rows: Any, **options: Any) -> Made:
    return ll.logprobs, (logits, rows), options


def loss(case: Case, logits: Any, objective: Any, **options: Any) -> Made:
    rows = case.samples()
    return ll.policy_loss, (logits, rows, objective), case.fields(rows) | {"group": case.cp} | options


def top_k(tail: str) -> Teacher:
    ids = torch.stack([torch.randperm(V)[:5] for _ in range(R)])
    return Teacher.from_top_k(torch.randn(R, 5).log_softmax(-1) - 0.1, ids, tail)


def from_other_ids(case: Case, tail: str, **more: Any) -> Teacher:
    """Of a larger vocabulary, in another order, of which the student has some."""
    start, stop = case.bounds(150)
    ids = torch.cat([torch.randperm(V)[:90], torch.full((60,), -1)])[torch.randperm(150)]
    return Teacher(case.logits("", vocabulary=150, width=7), ids=ids[start:stop], tail=tail, **more)


def two_teachers(case: Case) -> Any:
    which = torch.arange(R) % 2
    return Teacher.by_row([case.teacher(), case.teacher()], which)


def lora(case: Case, **options: Any) -> Made:
    start, stop = case.bounds(V)
    hidden, weight = torch.randn(T, D).requires_grad_(), torch.randn(V, D)[start:stop]
    a, b = torch.randn(3, D).requires_grad_(), torch.randn(V, 3)[start:stop].clone().requires_grad_()
    return log(ll.Logits(hidden, ll.LoRA(weight, a, b, 0.5), shard=case.shard()), case.rows(), **options)


SCORES: dict[str, Callable[[Case], Made]] = {
    "given": lambda c: log(c.given(), c.rows(), entropy="grad"),
    "given, canonical": lambda c: log(c.given(128 * c.ranks, bits="canonical"), c.rows()),
    "given, statistics": lambda c: log(c.given(), c.rows(), stats=("rank", "top1", "collision"), top_k=3),
    "given, teacher": lambda c: log(c.given(), c.rows(), teacher=c.given().logits.detach()),
    "given, teacher's head": lambda c: log(c.given(), c.rows(), teacher=c.teacher(), memory=9000 // c.ranks),
    "hidden": lambda c: log(c.logits(), c.rows(), entropy="grad"),
    "hidden, in doubles": lambda c: log(c.logits(dtype=torch.float64), c.rows()),
    "hidden, in halves": lambda c: log(c.logits(dtype=torch.bfloat16), c.rows(), memory=9000),
    "hidden, every row": lambda c: log(c.logits(), torch.randint(V, (T,))),
    "no rows": lambda c: log(c.logits(), (torch.arange(0), torch.arange(0))),
    "partial": lambda c: log(c.logits(hidden_grad="partial"), c.rows()),
    "frozen head": lambda c: log(c.logits("hidden"), c.rows()),
    "frozen model": lambda c: log(c.logits("weight bias"), c.rows()),
    "no gradient": lambda c: log(c.logits(""), c.rows()),
    "canonical": lambda c: log(c.canonical(), c.rows(), entropy="value"),
    "rank": lambda c: log(c.logits(), c.rows(), stats=("rank",)),
    "statistics": lambda c: log(
        c.logits(), c.rows(), stats=("mean_logit", "max_logit"), top_k=4, ids=torch.ones(R, 2).long()
    ),
    "kept": lambda c: log(c.logits(), c.rows(), kept=c.kept("vocabulary")),
    "support": lambda c: log(c.logits(), c.rows(), kept=c.kept("support"), entropy="grad"),
    "given, support": lambda c: log(c.given(), c.rows(), kept=c.kept("support")),
    "LoRA": lambda c: lora(c, entropy="grad"),
    "LoRA, support": lambda c: lora(c, kept=c.kept("support")),
    "LoRA, teacher": lambda c: lora(c, teacher=c.teacher(), memory=12000),
    "LoRA, support, teacher": lambda c: lora(c, kept=c.kept("support"), teacher=c.teacher()),
    "LoRA, teacher's K": lambda c: lora(c, teacher=top_k("renormalise")),
    "teacher": lambda c: log(c.logits(), c.rows(), teacher=c.teacher(), memory=12000),
    "teacher's acceptance": lambda c: log(
        c.logits(), c.rows(), teacher=c.teacher(), divergence="tv", stats=("acceptance", "teacher_top1")
    ),
    "teacher, frozen head": lambda c: log(c.logits("hidden"), c.rows(), teacher=c.teacher(), memory=12000),
    "teacher, canonical": lambda c: log(c.canonical(), c.rows(), teacher=Teacher(c.canonical(""))),
    "teacher and rank": lambda c: log(c.logits(), c.rows(), teacher=c.teacher(), stats=("rank",), memory=12000),
    "two teachers": lambda c: log(c.logits(), c.rows(), teacher=two_teachers(c)),
    "teacher of other ids": lambda c: log(c.logits(), c.rows(), teacher=from_other_ids(c, "renormalise")),
    "teacher of more ids": lambda c: log(
        c.logits(),
        c.rows(),
        teacher=from_other_ids(c, "bucket", at=torch.arange(R) // 2),
        divergence="tv",
        stats=("teacher_top1",),
    ),
    "teacher's K, bucket": lambda c: log(c.logits(), c.rows(), teacher=top_k("bucket")),
    "teacher's K": lambda c: log(c.logits(), c.rows(), teacher=top_k("renormalise")),
    "given, teacher's K": lambda c: log(c.given(), c.rows(), teacher=top_k("renormalise")),
    "kept, teacher": lambda c: log(c.logits(), c.rows(), teacher=c.teacher(), kept=c.kept("vocabulary")),
    "support, teacher": lambda c: log(c.logits(), c.rows(), teacher=c.teacher(), kept=c.kept("support")),
}

SPLIT: dict[str, Callable[[Case], Made]] = {
    "three parts": lambda c: log(c.logits(split=True, precision="bfloat16x3"), c.rows(), backend="triton"),
    "hidden": lambda c: log(c.logits(split=True), c.rows(), entropy="grad"),
    "frozen head": lambda c: log(c.logits("hidden", split=True), c.rows()),
    "frozen model": lambda c: log(c.logits("weight bias", split=True), c.rows()),
    "rank": lambda c: log(c.logits(split=True), c.rows(), stats=("rank",)),
    "support": lambda c: log(c.logits(split=True), c.rows(), kept=c.kept("support")),
    "support, frozen head": lambda c: log(c.logits("hidden bias", split=True), c.rows(), kept=c.kept("support")),
    "teacher": lambda c: log(c.logits(split=True), c.rows(), teacher=c.teacher(split=True), memory=12000),
    "teacher, frozen head": lambda c: log(c.logits("hidden", split=True), c.rows(), teacher=c.teacher(split=True)),
    "kept, teacher": lambda c: log(
        c.logits(split=True), c.rows(), teacher=c.teacher(split=True), kept=c.kept("vocabulary")
    ),
    "teacher's K": lambda c: log(c.logits(split=True), c.rows(), teacher=top_k("renormalise")),
    "one pass": lambda c: loss(c, c.logits(split=True), Objective(), memory=6000 // c.ranks),
    "one pass, teacher": lambda c: loss(c, c.logits(split=True), TAUGHT, teacher=c.teacher(split=True), memory=9000),
    "two passes": lambda c: loss(c, c.canonical(split=True), Objective()),
}

TAUGHT = Objective(divergence="reverse_kl", divergence_coef=0.3)

LOSSES: dict[str, Callable[[Case], Made]] = {
    "one pass": lambda c: loss(c, c.logits(), Objective(entropy_coef=0.1), memory=6000 // c.ranks),
    "one pass, partial": lambda c: loss(c, c.logits(hidden_grad="partial"), Objective()),
    "one pass, exponentials": lambda c: loss(c, c.logits(dtype=torch.bfloat16), Objective(), memory=3000 // c.ranks),
    "one pass, teacher": lambda c: loss(c, c.logits(), TAUGHT, teacher=c.teacher(), memory=9000 // c.ranks),
    "one pass, smoothed": lambda c: loss(
        c,
        c.logits(),
        Objective(policy="cross_entropy", policy_options={"label_smoothing": 0.1}),
        old_logprob=None,
        advantage=None,
        rollout_logprob=None,
    ),
    "no gradient": lambda c: loss(c, c.logits(""), Objective()),
    "two passes": lambda c: loss(c, c.canonical(), Objective()),
    "two passes, teacher": lambda c: loss(c, c.canonical(), TAUGHT, teacher=Teacher(c.canonical(""))),
    "given": lambda c: loss(c, c.given(), Objective()),
    "gspo": lambda c: loss(c, c.logits(), Objective(policy="gspo")),
    "gspo, corrected": lambda c: loss(c, c.logits(), Objective(policy="gspo", correction="geometric_tis")),
    "masked": lambda c: loss(c, c.logits(), Objective(correction="opsm")),
    "dpo": lambda c: preference(c, Preference("dpo"), ref_logprob=True),
    "dpo and sft": lambda c: preference(c, Preference("dpo", sft_coef=0.5), ref_logprob=True),
    "dpo, summed": lambda c: preference(c, Preference("dpo"), ref_sample_logprob=True),
    "simpo": lambda c: preference(c, Preference("simpo")),
}


def preference(case: Case, objective: Preference, **given: bool) -> Made:
    rows = case.samples()
    sizes = {"ref_logprob": len(rows), "ref_sample_logprob": len(LENGTHS)}
    fields = {name: torch.randn(sizes[name]) for name in given}
    return ll.policy_loss, (case.logits(), rows, objective), {"group": case.cp, **fields}


TABLES = {"scores": SCORES, "split": SPLIT, "losses": LOSSES}


@dataclass
class Counted:
    """What a rank was told, and what it sent."""

    plan: Plan
    forward: list[tuple[str, int]]
    backward: list[tuple[str, int]]


def counted(made: Made) -> Counted:
    verb, args, options = made
    plan = ll.explain(verb, *args, **options)
    with Collectives() as forward:
        out = verb(*args, **options)
    graded = [x for x in out[: 1 if verb is ll.policy_loss else None] if x is not None and x.requires_grad]
    # Unit gradients are those of the divergence; other results would have logits computed again.
    graded = [out.divergence] if plan.unit else graded
    with Collectives() as backward:
        if graded:
            torch.stack([x.double().sum() for x in graded]).sum().backward()
    return Counted(plan, forward.sent, backward.sent)


def groups(rank: int, world: int, tp: int) -> Case:
    """A rank's place among ``tp`` ranks of the vocabulary and ``world / tp`` of the sequence."""
    grid, (c, t) = torch.arange(world).view(-1, tp), divmod(rank, tp)
    rows, columns = ([dist.new_group(line) for line in x.tolist()] for x in (grid, grid.T))
    return Case(rows[c], columns[t] if world > tp else None, t, tp, (c, world // tp))


def in_ranks(rank: int, world: int, tp: int, tables: tuple[str, ...]) -> dict[str, Counted]:
    """Every case of the tables."""
    case, found = groups(rank, world, tp), {}
    for table in tables:
        for name, make in TABLES[table].items():
            torch.manual_seed(11)
            found[f"{table}: {name}"] = counted(make(case))
    return found


def check(by_rank: list[dict[str, Counted]]) -> dict[str, Counted]:
    """Those of the first rank; on every rank what was told was sent."""
    for found in by_rank:
        for name, x in found.items():
            assert x.forward == as_told(x.plan, "forward"), f"forward of {name}: {x.plan}"
            assert x.backward == as_told(x.plan, "backward"), f"backward of {name}: {x.plan}"
    return by_rank[0]


@pytest.mark.parametrize("tp", [1, 8])
def test_over_one_rank_and_eight(ranks, tp: int):
    check(ranks(in_ranks, tp, tp, ("split", "losses")))


@pytest.mark.parametrize("tp", [2, 4])
def test_over_the_vocabulary(ranks, tp: int):
    found = check(ranks(in_ranks, tp, tp, ("scores", "split", "losses")))
    # The table has what it says it has.
    kinds = {name: x.plan.kind for name, x in found.items()}
    wanted = {"frozen head": "frozen", "frozen model": "recompute", "teacher": "pair", "support": "support"}
    assert {name: kinds[f"scores: {name}"] for name in wanted} == wanted
    assert all(kinds[f"losses: {name}"] == name for name in ("one pass", "two passes"))
    assert len(found["losses: one pass"].plan.chunks) > 1
    assert found["losses: one pass, exponentials"].plan.tiles is not None
    assert found["scores: teacher, frozen head"].plan.unit


@pytest.mark.parametrize(("world", "tp"), [(2, 1), (4, 1), (4, 2), (8, 2)])
def test_over_the_sequence(ranks, world: int, tp: int):
    tables = ("losses", "split") if tp == 2 else ("losses",)
    found = check(ranks(in_ranks, world, tp, tables))
    numbers = 4 * len(LENGTHS)
    over = {
        name: [(x.when, x.bytes) for x in found[f"losses: {name}"].plan.collectives if x.over == "sequence"]
        for name in LOSSES
    }
    assert over["one pass"] == []
    assert over["gspo, corrected"] == [("forward", numbers)] * 2 + [("backward", numbers)]
    assert over["dpo and sft"] == [("forward", 2 * numbers)] * 2 + [("backward", 2 * numbers)] * 2


# What is compared, and what cannot be known.


def two_means(inputs: Any) -> Tensor:
    return inputs.mean_by_sample(inputs.logprob) * inputs.mean_by_sample(inputs.log_ratio).detach()


def own_term(rank: int, world: int) -> Counted:
    case = groups(rank, world, 1)
    return counted(loss(case, case.logits(), Objective(policy=two_means, level="sequence", needs=("old_logprob",))))


def test_means_of_a_term_of_ones_own_are_not_counted_before_it_runs(ranks):
    for found in ranks(own_term, 2):
        each = [x for x in found.plan.collectives if x.each]
        assert [(x.when, x.bytes) for x in each] == [("forward", 16), ("backward", 16)]
        assert (found.forward.count(("all_reduce", 16)), found.backward.count(("all_reduce", 16))) == (2, 1)
        assert (
            "all_reduce of a sum over each sample for each mean that a term of the caller's own takes, 16 B each"
            in str(found.plan)
        )


def compared(rank: int, world: int) -> list[Counted]:
    case = groups(rank, world, 2)
    case.checked = True
    return [counted(SCORES["hidden"](case)), counted(loss(case, case.logits(), Objective(), check_group=True))]


def test_comparing_calls_is_named(ranks):
    """As one gather of pickled facts, which is two: of their lengths, and of the facts."""
    for found in ranks(compared, 4):
        for x, over in zip(found, (["vocabulary"], ["vocabulary", "sequence"]), strict=True):
            first = x.plan.collectives[: len(over)]
            assert [y.over for y in first if y.kind == "all_gather_object"] == over
            assert [kind for kind, _ in x.forward[: 2 * len(over)]] == ["all_gather"] * 2 * len(over)
            assert x.forward[2 * len(over) :] == as_told(x.plan, "forward")[len(over) :]
            assert x.backward == as_told(x.plan, "backward")


def one_gradient_less(rank: int, world: int) -> str:
    """Hidden states of rank 0 need a gradient, and the LoRA's a of rank 1: both ranks have gradients of the tokens."""
    case = groups(rank, world, 2)
    start, stop = case.bounds(V)
    torch.manual_seed(11)
    hidden, a = torch.randn(T, D).requires_grad_(rank == 0), torch.randn(3, D).requires_grad_(rank == 1)
    weight = ll.LoRA(torch.randn(V, D)[start:stop], a, torch.randn(V, 3)[start:stop], 0.5)
    case.checked = True
    try:
        ll.logprobs(ll.Logits(hidden, weight, shard=case.shard()), case.rows())
    except ll.LogitlessError as error:
        return str(error)
    return "nothing was said"


def test_ranks_that_would_wait_for_each_other_are_told(ranks):
    """Whatever the reason: the list of collectives is compared."""
    for text in ranks(one_gradient_less, 2, timeout=20):
        assert "ranks of one vocabulary group disagree about what is sent: rank by rank it is" in text
        assert "all_reduce of d_hidden, 864 B, over 2 ranks of the vocabulary" in text


def test_one_rank_is_told_of_nothing():
    plan = ll.explain(ll.logprobs, ll.Logits(torch.zeros(2, 3), torch.zeros(4, 3)), torch.tensor([1, 2]))
    assert plan.collectives == ()
    assert "\n" not in str(plan)


def test_kept_ids_of_several_teachers_without_numbers():
    """``estimate`` has no number to tell whose rows are whose: an error of torch's."""
    shard, kept, target = ll.VocabShard.imagined(10, 2), Kept.from_lists([[1, 2]] * 6), torch.zeros(6).long()
    logits = ll.Logits(torch.randn(6, 3, requires_grad=True), torch.randn(5, 3), shard=shard)
    one = Teacher(ll.Logits(torch.randn(6, 2), torch.randn(5, 2)), kept=kept)
    several = Teacher.by_row([one, one], torch.arange(6) % 2)
    plans = [
        ll.estimate(ll.logprobs, logits, target, kept=kept, teacher=teacher, divergence="tv").plan
        for teacher in (one, several)
    ]
    assert plans[0].collectives == plans[1].collectives != ()


def test_bytes_on_a_ring():
    made = {kind: Collective(kind, "x", 1200, "forward", "vocabulary", 4) for kind in RING}
    assert {kind: x.wire for kind, x in made.items()} == RING


RING = {"all_gather": 3600, "all_reduce": 1800, "reduce_scatter": 900, "all_gather_object": 0}
