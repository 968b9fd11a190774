"""``stats=``, ``top_k=`` and ``ids=``: values and gradients of every backend and path against float64.

The oracle sorts, counts and sums whole rows. Operands of the path from hidden states are small integers, so that its
logits are exact in float32, ties included: what is counted and ordered has one right answer.
"""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import from_hidden, from_logits
from close import assert_close_to_truth, assert_gradient_close_to_truth
from shared.divergence import textbook
from shared.shards import Collectives
from torch import Tensor
from torch.utils import _pytree

import logitless as ll
from logitless.backends import load
from logitless.backends.contract import Listed
from logitless.backends.divergences import Divergence
from logitless.backends.selection import best_columns, group_size
from logitless.passes.look import best_lines
from logitless.readings.table import Table

INF, NAN = torch.inf, torch.nan
T, V, D, K, F = 13, 67, 5, 6, 4
BACKENDS = ("reference", "tiled", "triton")
STATS = ("top1", "collision", "mean_logit", "logit_variance", "max_logit", "rank")
GRADED = ("logprob", "entropy", "log_z", "collision", "mean_logit", "ids_logprobs")
WHOLE = ("top1_id", "top1_hit", "rank", "top_k_ids")
EXTRA_RESULTS = (
    *("top1_id", "top1_logprob", "top1_hit", "collision", "mean_logit", "logit_variance", "max_logit", "rank"),
    *("top_k_ids", "top_k_logprobs", "ids_logprobs"),
)
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperatures": {"temperature": torch.linspace(0.5, 2.0, T)},
    "softcap": {"softcap": 5.0, "scale": 0.5},
    "turned": {"scale": -0.7, "vocab_size": V - 2},
}


def expected(
    x: Tensor,
    target: Tensor,
    ids: Tensor,
    k: int = K,
    *,
    temperature: Any = 1.0,
    scale=1.0,
    softcap=None,
    vocab_size=None,
) -> dict[str, Tensor]:
    """Every result from whole rows of logits, in their dtype and with a graph."""
    z = x[:, :vocab_size] * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z / (temperature[:, None].to(z) if isinstance(temperature, Tensor) else temperature)
    ignored, log_p, there = target == -100, torch.log_softmax(z, -1), z != -INF
    own = target.masked_fill(ignored, 0)[:, None]
    # Descending, and of equal ones the smaller id first.
    best = z.sort(dim=1, descending=True, stable=True).indices
    rank = (best == own).int().argmax(1)
    mean = torch.where(there, z, 0.0).sum(1) / there.sum(1)
    variance = torch.where(there, z - mean[:, None], 0.0).square().sum(1) / there.sum(1)
    p = log_p.exp()
    found = {
        "logprob": log_p.gather(1, own)[:, 0],
        "entropy": -(p * log_p.masked_fill(p == 0, 0.0)).sum(1),
        "log_z": torch.logsumexp(z, 1),
        "top1_id": best[:, 0],
        "top1_logprob": log_p.amax(1),
        "top1_hit": rank == 0,
        "collision": p.square().sum(1),
        "mean_logit": mean,
        "logit_variance": variance,
        "max_logit": z.amax(1),
        "rank": rank,
        "top_k_ids": best[:, :k],
        "top_k_logprobs": log_p.gather(1, best[:, :k]),
        "ids_logprobs": log_p.gather(1, ids.clamp_min(0)).masked_fill(ids == -100, 0.0),
    }
    return {name: _ignoring(v, ignored) for name, v in found.items()}


def _ignoring(x: Tensor, ignored: Tensor) -> Tensor:
    ignored = ignored[:, None] if x.dim() == 2 else ignored
    return x.masked_fill(ignored, False if x.dtype == torch.bool else -1 if x.dtype == torch.int64 else 0)


def draw(vocab: int = V, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and weight of small integers, targets of which one is ignored, and listed ids."""
    hidden, weight = torch.randint(-2, 3, (T, D)).float(), torch.randint(-2, 3, (V, D)).float()
    target, ids = torch.randint(vocab, (T,)), torch.randint(vocab, (T, F))
    target[3], ids[0, 1], ids[1, 2], ids[2, 0] = -100, ids[0, 0], -100, target[2]
    return hidden.to(device), weight.to(device), target.to(device), ids.to(device)


def upstream_of(results: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Results that have a gradient, each with one that depends on its name alone."""
    pairs = []
    for n, name in enumerate(GRADED):
        g = torch.randn(results[name].shape, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
        pairs.append((results[name], g.to(results[name])))
    return pairs


def gradients_of(results: dict[str, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    out, g = zip(*upstream_of(results), strict=True)
    return list(torch.autograd.grad(out, leaves, g))


def check(ours: dict[str, Tensor], right: dict[str, Tensor], usual: dict[str, Tensor]) -> None:
    for name, mine in ours.items():
        if name in WHOLE:
            assert torch.equal(mine.cpu(), right[name].cpu()), name
        else:
            assert_close_to_truth(mine, right[name], usual[name], name)


def named(out: ll.TokenStats) -> dict[str, Tensor]:
    return {name: x for name, x in out._asdict().items() if x is not None}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_from_logits(backend: str, head: str, device: torch.device):
    options = HEADS[head]
    hidden, weight, target, ids = draw(options.get("vocab_size") or V, device)
    logits = 0.5 * hidden @ weight.T
    leaf, exact, usual = (logits.to(d).requires_grad_() for d in (torch.float32, torch.float64, torch.float32))
    asked = {"stats": STATS, "top_k": K, "ids": ids, "entropy": "grad", "backend": backend, "memory": 4000}
    ours = named(ll.logprobs(leaf, target, head=ll.Head(**options), **asked))
    right, plain = expected(exact, target, ids, **options), expected(usual, target, ids, **options)
    check(ours, right, plain)
    (mine,), (truth,), (theirs,) = (gradients_of(r, [x]) for r, x in ((ours, leaf), (right, exact), (plain, usual)))
    assert_gradient_close_to_truth(mine, truth, theirs)
    assert not any(x.requires_grad for name, x in ours.items() if name not in GRADED)


@pytest.mark.parametrize("head", ["temperatures", "softcap", "turned"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_from_hidden_states(backend: str, head: str, device: torch.device):
    """In tiles of a few columns: lines are merged, and targets counted against all tiles."""
    options = HEADS[head]
    hidden, weight, target, ids = draw(options.get("vocab_size") or V, device)
    leaves, exact, usual = (
        [x.to(d).requires_grad_() for x in (hidden, weight)] for d in (torch.float32, torch.float64, torch.float32)
    )
    asked = {"stats": STATS, "top_k": K, "ids": ids, "entropy": "grad", "backend": backend}
    # Kernels need no room beside a tile.
    asked["memory"] = 6000 if device.type == "cpu" else 3000
    asked["head"] = ll.Head(**options)
    plan = ll.explain(ll.logprobs, ll.Logits(*leaves), target, **asked)
    assert plan.forward.columns < V
    assert (plan.products, plan.ranked, "made once more" in str(plan)) == (5, True, True)
    ours = named(from_hidden(*leaves, target, **asked))
    right, plain = (expected(x @ w.T, target, ids, **options) for x, w in (exact, usual))
    check(ours, right, plain)
    for mine, truth, theirs in zip(
        gradients_of(ours, leaves), gradients_of(right, exact), gradients_of(plain, usual), strict=True
    ):
        assert_gradient_close_to_truth(mine, truth, theirs)


@pytest.mark.parametrize("path", ["logits", "hidden"])
@pytest.mark.parametrize("kept", [False, True])
def test_gradcheck(path: str, kept: bool):
    """Second copies of an id, ids that are the target's or the sampler's, and places that are left out."""
    hidden, weight, target, ids = draw()
    support = ll.Kept(torch.cat([ids[:, :1], torch.randint(V, (T, 2))], 1).flatten().abs() % V, torch.full((T,), 3))
    asked: dict[str, Any] = {"stats": ("collision", "mean_logit"), "ids": ids, "entropy": "grad"}
    asked |= {"kept": support if kept else None, "head": ll.Head(softcap=4.0, temperature=0.8), "memory": 6000}

    def results(*leaves: Tensor) -> tuple[Tensor, ...]:
        out = ll.logprobs(*leaves, target, **asked) if path == "logits" else from_hidden(*leaves, target, **asked)
        return tuple(getattr(out, name) for name in GRADED)

    leaves = [hidden @ weight.T * 0.3] if path == "logits" else [hidden, weight]
    assert torch.autograd.gradcheck(results, [x.double().requires_grad_() for x in leaves], fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_and_minus_infinity(backend: str, device: torch.device):
    """Equal logits are ordered by id, -inf last; rank, top-1 and top-k agree; -inf has no part in mean and variance."""
    logits = torch.randint(-1, 2, (T, V), device=device).float()
    logits[0], logits[1, :], logits[1, 40:50] = 0.0, -INF, 2.0
    logits[2, 5:] = -INF
    target, ids = torch.randint(V, (T,), device=device), torch.zeros((T, 1), dtype=torch.int64, device=device)
    target[1], target[2] = 44, 66
    out = ll.logprobs(logits, target, stats=STATS, top_k=K, ids=ids, backend=backend)
    right = expected(logits.double(), target, ids)
    ours = named(out)
    check({name: ours[name] for name in (*WHOLE, "mean_logit", "logit_variance", "top_k_logprobs")}, right, right)
    listed = out.top_k_ids == target[:, None]
    assert torch.equal(listed.any(1), out.rank < K)
    assert torch.equal(out.top1_hit, out.rank == 0)
    leaf = logits.clone().requires_grad_()
    ll.logprobs(leaf, target, stats=("mean_logit",), backend=backend).mean_logit.sum().backward()
    assert torch.equal(leaf.grad == 0, logits == -INF)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_far_from_zero(backend: str, device: torch.device):
    """An offset of a thousand leaves mean and variance the digits that the logits have."""
    logits = torch.randn(T, 503, device=device) + 1000
    target, ids = torch.randint(503, (T,), device=device), torch.zeros((T, 1), dtype=torch.int64, device=device)
    wanted = ("collision", "mean_logit", "logit_variance", "max_logit")
    out = ll.logprobs(logits, target, stats=wanted, backend=backend)
    right, plain = expected(logits.double(), target, ids), expected(logits, target, ids)
    check({name: getattr(out, name) for name in wanted}, right, plain)
    weight, hidden = logits[0][:, None], torch.ones(2, 1, device=device)
    tiles = ll.logprobs(ll.Logits(hidden, weight), target[:2], stats=wanted, backend=backend, memory=3000)
    assert_close_to_truth(tiles.logit_variance, right["logit_variance"][[0, 0]], plain["logit_variance"][[0, 0]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_distribution(backend: str, device: torch.device):
    """Ignored rows are 0 and -1, whatever they hold; a row with NaN is NaN and -1. Neither reaches another row."""
    logits = torch.randn(5, V, device=device)
    logits[1], logits[3, 7], logits[4] = NAN, NAN, -INF
    target, ids = torch.tensor([3, -100, 5, 6, 7], device=device), torch.full((5, 2), 9, device=device)
    out = ll.logprobs(logits, target, stats=STATS, top_k=2, ids=ids, backend=backend)
    for name in EXTRA_RESULTS:
        x = getattr(out, name)
        if x.dtype == torch.bool:
            assert not x[[1, 3, 4]].any()
        elif x.dtype == torch.int64:
            assert (x[[1, 3, 4]] == -1).all()
            assert (x[[0, 2]] >= 0).all()
        else:
            assert (x[1] == 0).all()
            assert x[[3, 4]].isnan().all()
            assert x[[0, 2]].isfinite().all()
    leaf = logits[:4].clone().requires_grad_()
    asked = {"stats": ("collision", "mean_logit"), "ids": ids[:4], "backend": backend}
    out = ll.logprobs(leaf, target[:4], **asked)
    (out.collision[:3].sum() + out.mean_logit[:3].sum() + out.ids_logprobs[:3].sum()).backward()
    assert leaf.grad[[0, 2]].isfinite().all()
    assert (leaf.grad[1] == 0).all()


@pytest.mark.parametrize("vocab", [V, 9])
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_copies_of_an_id(backend: str, vocab: int, device: torch.device):
    """A dozen places for five ids, the target among them and some left out: in slabs of columns, in blocks of rows."""
    hidden, weight, target, _ = draw(9, device)
    weight, memory = weight[:vocab], 3000 if vocab == V else 700
    ids = torch.randint(5, (T, 12), device=device)
    ids[:, 3], ids[2], ids[4, ::2] = target.clamp_min(0), 7, -100
    found = []
    for d in (torch.float32, torch.float64, torch.float32):
        leaves = [(x * 0.7).to(d).requires_grad_() for x in (hidden, weight)]
        if found:
            results = expected(leaves[0] @ leaves[1].T, target, ids)["ids_logprobs"]
        else:
            asked = {"ids": ids, "memory": memory, "backend": backend}
            backward = ll.explain(ll.logprobs, ll.Logits(*leaves), target, **asked).backward
            assert backward.columns < vocab if vocab == V else backward.block < T
            results = from_hidden(*leaves, target, **asked).ids_logprobs
        g = torch.randn((T, 12), generator=torch.Generator().manual_seed(1)).to(results)
        found.append(torch.autograd.grad(results, leaves, g))
    for mine, truth, theirs in zip(*found, strict=True):
        assert_gradient_close_to_truth(mine, truth, theirs)


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_listed_columns_are_written_and_no_others(backend: str, indexed: bool, device: torch.device):
    column = torch.tensor([[5, 9, 5], [-1, 4, 10], [10, 3, -1], [6, 6, 9]], device=device)
    value = torch.tensor([[1.0, 2, 1], [3, 4, 5], [6, 7, 8], [9, 9, 11]], device=device)
    out, right = (torch.zeros(7, 8, device=device, dtype=torch.bfloat16) for _ in range(2))
    rows = torch.tensor([6, 0, 3, 2], device=device) if indexed else torch.arange(4, device=device)
    for r, k, written in ((0, 1, 1.0), (0, 5, 2.0), (1, 0, 4.0), (3, 2, 9.0), (3, 5, 11.0)):
        right[rows[r], k] = written
    load(backend).write(Listed(column, value, first=4, columns=6), out, rows if indexed else None)
    assert torch.equal(out, right)


@pytest.mark.parametrize("backend", BACKENDS)
def test_from_stored_exponentials(backend: str, device: torch.device, monkeypatch):
    """Where 16-bit exponentials of forward are differentiated, collision and listed ids are too."""
    monkeypatch.setattr("logitless.route.plan.WORK", 1 << 14)
    hidden, weight, target, ids = draw(device=device)
    asked = {"stats": ("collision",), "top_k": 2, "ids": ids, "backend": backend, "memory": "1MiB"}
    both = [x.bfloat16().requires_grad_() for x in (0.5 * hidden, weight)]
    assert ll.explain(ll.logprobs, ll.Logits(*both), target, **asked).kind == "keep"
    assert ll.explain(ll.logprobs, ll.Logits(*both), target, stats=("mean_logit",), memory="1MiB").kept_rows == 0
    found = []
    for leaves in (both, [x.detach().double().requires_grad_() for x in both]):
        if leaves is both:
            out = from_hidden(*leaves, target, **asked)
            results = [out.logprob, out.collision, out.ids_logprobs]
        else:
            right = expected(leaves[0] @ leaves[1].T, target, ids)
            results = [right[name] for name in ("logprob", "collision", "ids_logprobs")]
        g = [torch.linspace(-1, 2, x.numel(), device=device).view(x.shape).to(x) for x in results]
        found.append(torch.autograd.grad(results, leaves, g))
    for mine, truth in zip(*found, strict=True):
        # Three roundings to 16 bits on the way: the exponentials, dZ and the gradient.
        assert float((mine.double() - truth).norm() / truth.norm()) < 3 * 2**-9


def test_a_frozen_head_stays_frozen_unless_something_is_differentiated():
    hidden, weight, target, ids = draw()
    hidden.requires_grad_()
    best = {"stats": ("top1", "rank"), "top_k": K}
    assert ll.explain(ll.logprobs, ll.Logits(hidden, weight), target, **best).kind == "frozen"
    assert ll.explain(ll.logprobs, ll.Logits(hidden, weight), target, ids=ids).kind != "frozen"
    out = from_hidden(hidden, weight, target, **best, memory=6000)
    right = expected(hidden.detach().double() @ weight.double().T, target, ids)
    for name in ("top1_id", "rank", "top_k_ids"):
        assert torch.equal(getattr(out, name), right[name])
    alone = ll.logprobs(ll.Logits(hidden, weight), target, memory=6000).logprob
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            torch.autograd.grad(out.logprob.sum(), hidden), torch.autograd.grad(alone.sum(), hidden), strict=True
        )
    )


def test_whatever_was_kept_they_are_over_the_vocabulary():
    hidden, weight, target, ids = draw()
    kept = ll.Kept(torch.zeros(T, dtype=torch.int64), torch.ones(T, dtype=torch.int64))
    asked = {"stats": STATS, "top_k": K, "ids": ids}
    ours, without = (ll.logprobs(hidden @ weight.T, target, kept=k, **asked) for k in (kept, None))
    assert not torch.equal(ours.logprob, without.logprob)
    for name in EXTRA_RESULTS:
        assert torch.equal(getattr(ours, name), getattr(without, name)), name


@pytest.mark.parametrize("teacher", ["head", "logits", "several"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("path", ["logits", "hidden", "canonical"])
def test_beside_a_teacher(path: str, backend: str, teacher: str, device: torch.device):
    """All of them, with their gradients beside that of the divergence; in chunks of a few rows."""
    if (path, teacher) == ("canonical", "several"):
        return
    hidden, weight, target, ids = draw(device=device)
    hidden, heat = 0.5 * hidden, torch.linspace(0.7, 2.0, T, device=device)
    others = [(torch.randn(T, 7, device=device), torch.randn(V, 7, device=device)) for _ in range(2)]
    logits, which = torch.randn(T, V, device=device), torch.arange(T, device=device) % 3
    made = [ll.Teacher(ll.Logits(*others[0]), head=ll.Head(scale=0.3)), ll.Logits(*others[1]), logits]
    given: Any = {"head": made[0], "logits": logits, "several": ll.Teacher.by_row(made, which)}[teacher]
    asked = {"stats": STATS, "top_k": K, "ids": ids, "entropy": "grad", "backend": backend, "memory": 6000}
    asked |= {"head": ll.Head(temperature=heat), "teacher": given, "divergence": Divergence("jsd", beta=0.3)}

    def whole(dtype: torch.dtype, leaves: list[Tensor]) -> dict[str, Tensor]:
        x = leaves[0] @ leaves[1].T if len(leaves) == 2 else leaves[0]
        each = [others[0][0].to(dtype) @ others[0][1].to(dtype).T * 0.3]
        each += [others[1][0].to(dtype) @ others[1][1].to(dtype).T, logits.to(dtype)]
        picked = torch.stack(each)[which, torch.arange(T, device=device)]
        y = {"head": each[0], "logits": each[2], "several": picked}[teacher]
        far = textbook(x / heat.to(dtype)[:, None], y, "jsd", beta=0.3)
        entropy = -(y.softmax(-1) * y.log_softmax(-1)).sum(-1).masked_fill(target == -100, 0.0)
        found = expected(x, target, ids, temperature=heat)
        return found | {"divergence": far.masked_fill(target == -100, 0.0), "teacher_entropy": entropy}

    def gradients(results: dict[str, Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
        steps = torch.linspace(-1, 2, T, device=device).to(results["divergence"])
        out, g = zip(*upstream_of(results), (results["divergence"], steps), strict=True)
        return torch.autograd.grad(out, leaves, g)

    operands = [hidden @ weight.T] if path == "logits" else [hidden, weight]
    leaves, exact, usual = (
        [x.to(d).requires_grad_() for x in operands] for d in (torch.float32, torch.float64, torch.float32)
    )
    bits = "canonical" if path == "canonical" else "fast"
    source = leaves[0] if path == "logits" else ll.Logits(*leaves, bits=bits)
    ours = named(ll.logprobs(source, target, **asked))
    right, plain = whole(torch.float64, exact), whole(torch.float32, usual)
    assert ours.keys() == {*GRADED, *EXTRA_RESULTS, "divergence", "teacher_logprob", "teacher_entropy"}
    check({name: x for name, x in ours.items() if name != "teacher_logprob"}, right, plain)
    for mine, truth, theirs in zip(
        gradients(ours, leaves), gradients(right, exact), gradients(plain, usual), strict=True
    ):
        assert_gradient_close_to_truth(mine, truth, theirs)


@pytest.mark.parametrize("path", ["logits", "hidden"])
@pytest.mark.parametrize("name", ["ids_logprobs", "collision", "mean_logit"])
def test_one_of_them_beside_a_teacher(name: str, path: str):
    """Each takes the gradient of a divergence another way, whether others are there or not."""
    hidden, weight, target, ids = draw()
    other, heat = torch.randn(T, V, dtype=torch.float64), torch.linspace(0.5, 2, T, dtype=torch.float64)
    asked: dict[str, Any] = {"ids": ids} if name == "ids_logprobs" else {"stats": (name,)}

    def results(*leaves: Tensor) -> tuple[Tensor, ...]:
        source = leaves[0] if path == "logits" else ll.Logits(*leaves)
        out = ll.logprobs(source, target, teacher=other, divergence="jsd", memory=6000, **asked)
        return out.logprob, getattr(out, name), heat * out.divergence

    leaves = [hidden @ weight.T * 0.3] if path == "logits" else [0.5 * hidden, weight]
    assert torch.autograd.gradcheck(results, [x.double().requires_grad_() for x in leaves], fast_mode=True)


def score_shard(rank: int, world: int, operands: tuple, cuts: list[int], stats: tuple) -> tuple:
    hidden, weight, target, ids = operands
    shard = ll.VocabShard(cuts[rank], cuts[rank + 1], dist.group.WORLD)
    leaves = [hidden.clone().requires_grad_(), weight[cuts[rank] : cuts[rank + 1]].clone().requires_grad_()]
    head = ll.Head(vocab_size=V - 2)
    asked = {"stats": stats, "top_k": K, "ids": ids, "entropy": "grad", "shard": shard, "head": head}
    with Collectives() as seen:
        out = from_hidden(*leaves, target, **asked, memory=6000)
    results = named(out)
    same = from_logits(hidden @ leaves[1].detach().T, target, **asked)
    for name in WHOLE:
        assert name not in results or torch.equal(results[name], getattr(same, name))
    if "mean_logit" not in stats:
        return seen.calls, {}, []
    return seen.calls, {name: x.detach() for name, x in results.items()}, gradients_of(results, leaves)


@pytest.mark.parametrize("cuts", [[0, 41, V], [0, 66, V]])
def test_shards(ranks, cuts: list[int]):
    """Over two ranks, of which one may hold nothing but padding: one all_gather, and one sum more for ranks."""
    operands = draw(V - 2)
    hidden, weight, target, ids = operands
    exact, usual = ([x.to(d).requires_grad_() for x in (hidden, weight)] for d in (torch.float64, torch.float32))
    right, plain = (expected(x @ w.T, target, ids, vocab_size=V - 2) for x, w in (exact, usual))
    truth, theirs = gradients_of(right, exact), gradients_of(plain, usual)
    found = ranks(score_shard, 2, operands, cuts, STATS)
    for rank, (calls, results, gradients) in enumerate(found):
        assert [name for name, _ in calls] == ["all_gather", "allreduce_"]
        check(results, right, plain)
        own = slice(cuts[rank], cuts[rank + 1])
        assert_gradient_close_to_truth(gradients[0], truth[0], theirs[0])
        assert_gradient_close_to_truth(gradients[1], truth[1][own], theirs[1][own])
    calls = ranks(score_shard, 2, operands, cuts, ("top1", "collision"))[0][0]
    assert [name for name, _ in calls] == ["all_gather"]


def test_selection_is_exact():
    """Groups of any size, tails included, against a stable sort of whole rows."""
    for width, k in ((1, 1), (7, 2), (64, 1), (67, 5), (300, 3), (1031, 20), (513, 128)):
        x = torch.randint(-3, 4, (5, width)).float()
        x[0], x[1, width // 2 :], x[2, -1] = 0.0, -INF, 9.0
        value, column = best_columns(x, k)
        right = x.sort(dim=1, descending=True, stable=True)
        assert torch.equal(value, right.values[:, :k]), (width, k)
        assert torch.equal(column, right.indices[:, :k]), (width, k)
    assert group_size(1031, 20) > 1


def test_long_rows_in_few_lanes(monkeypatch):
    """The kernel with four lanes of many columns each, in its interpreter, full of ties."""
    if torch.cuda.is_available():
        pytest.skip("kernels run on CPU tensors in Triton's interpreter alone")
    sizes = {"BLOCK": 4, "DEEP": 16, "num_warps": 1}
    monkeypatch.setattr("logitless.backends.triton.best_sizes", lambda columns: sizes)
    logits = torch.randint(-1, 2, (3, 61)).float()
    logits[1] = 0.0
    out = ll.logprobs(logits, torch.zeros(3, dtype=torch.int64), top_k=20, backend="triton")
    right = logits.sort(dim=1, descending=True, stable=True).indices[:, :20]
    assert torch.equal(out.top_k_ids, right)


def test_results_in_the_shape_of_the_targets_and_of_samples():
    logits, target = torch.randn(2, 3, V), torch.randint(V, (2, 3))
    ids = torch.randint(V, (2, 3, F))
    out = ll.logprobs(logits, target, stats=("top1",), top_k=K, ids=ids)
    assert out.top1_id.shape == (2, 3)
    assert out.top_k_ids.shape == out.top_k_logprobs.shape == (2, 3, K)
    assert out.ids_logprobs.shape == (2, 3, F)
    rows = ll.Rows.packed([torch.randint(V, (5,)), torch.randint(V, (4,))], [3, 2])
    some = ll.logprobs(torch.randn(9, V), rows, top_k=K)
    assert [tuple(x.shape) for x in rows.split(some.top_k_ids)] == [(3, K), (2, K)]


def test_one_tuple_of_all_results_whatever_is_asked_for():
    logits, target = torch.randn(2, V), torch.randint(V, (2,))
    plain, more = ll.logprobs(logits, target), ll.logprobs(logits, target, stats=("rank",))
    logprob, log_z = plain.logprob, plain.log_z
    assert plain.rank is None
    assert (plain.entropy, len(plain), len(more), more.collision) == (None, 21, 21, None)
    assert [name for name, x in more._asdict().items() if x is not None] == ["logprob", "log_z", "rank"]
    assert torch.equal(more.logprob, logprob)
    for out in (plain, more):
        moved = _pytree.tree_map(lambda x: x, out)
        for other in (ll.TokenStats(*out), out._replace(entropy=log_z), copy.copy(out), moved):
            assert isinstance(other, ll.TokenStats)
            assert len(other) == len(out)
            assert other.rank is out.rank
        assert torch.equal(pickle.loads(pickle.dumps(out)).logprob, logprob)
    with pytest.raises(TypeError, match="ranks"):
        ll.TokenStats(logprob, None, log_z, ranks=logprob)


def test_refusals():
    logits, target = torch.randn(2, V), torch.randint(V, (2,))
    kept = ll.Kept(torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64))
    ids = torch.zeros((2, 1), dtype=torch.int64)
    for wrong, words in (
        ({"stats": ("top2",)}, "out of .*top1.* but is"),
        ({"stats": "top1"}, "a tuple of names"),
        ({"top_k": 0}, "between 1 and 67"),
        ({"top_k": V + 1}, "smaller of 128 and the vocabulary"),
        ({"top_k": True}, "but is True"),
        ({"ids": [1, 2]}, "int64 tensor but is list"),
        ({"ids": ids.int()}, "int64 tensor but is torch.int32"),
        ({"ids": ids[:, 0]}, "K ids for every row"),
        ({"ids": ids + V}, "outside the vocabulary of 67"),
        ({"ids": ids - 1}, "-100 for places"),
        ({"stats": ("rank",), "kept": kept.over("support")}, "never made where the scope is the support"),
    ):
        with pytest.raises(ll.LogitlessError, match=words):
            ll.logprobs(logits, target, **wrong)
    with pytest.raises(ll.LogitlessError, match="no part of it reads the field stats"):
        ll.policy_loss(logits, target, ll.Objective.recipe("sft"), stats=("rank",))


def test_the_same_log_probs_and_no_more_work_without_them():
    """Asking changes no bit of what is returned anyway."""
    hidden, weight, target, ids = draw()
    options = {"entropy": "value", "memory": 6000}
    plain = from_hidden(hidden, weight, target, **options)
    more = from_hidden(hidden, weight, target, stats=STATS, top_k=K, ids=ids, **options)
    for a, b in zip(plain[:3], more[:3], strict=True):
        assert torch.equal(a, b)


def test_statistics_among_the_metrics_of_a_loss():
    """Means over the tokens that count, of whatever the results bring, but not of what an objective asks for itself."""
    tokens, lengths = [torch.randint(V, (n,)) for n in (6, 7, 5, 8)], [3, 4, 2, 5]
    masks = [(torch.arange(n) % 3 > 0).long() for n in lengths]
    rows = ll.Rows.packed(tokens, lengths, masks)
    hidden, weight, *_ = draw()
    hidden = hidden.repeat(2, 1)
    names = ("top1_hit", "top1_logprob", "collision", "mean_logit", "logit_variance", "max_logit", "rank")
    right = expected((hidden.double() @ weight.double().T)[rows.index], rows.target, rows.target[:, None])
    given = {"old_logprob": "current", "advantage": torch.ones(len(rows))}
    out = ll.logprobs(ll.Logits(hidden, weight), rows, stats=STATS)
    pairs = ll.Preference("simpo")
    for metrics in (ll.Objective()(out, rows, **given)[1], pairs(out, rows)[1]):
        found = metrics.compute()
        for name in names:
            assert found[name] == pytest.approx(float(right[name][rows.counted].double().mean()), rel=1e-5), name
    bare = ll.logprobs(ll.Logits(hidden, weight), rows)
    assert not set(names) & {*ll.Objective()(bare, rows, **given)[1].compute(), *pairs(bare, rows)[1].compute()}
    smooth = ll.Objective.recipe("sft", policy_options={"label_smoothing": 0.1})
    asked = {"entropy": smooth.entropy, "stats": smooth.stats}
    by_two = smooth(from_hidden(hidden, weight, rows, **asked), rows)[1]
    assert by_two.compute().keys() == ll.policy_loss(ll.Logits(hidden, weight), rows, smooth)[1].compute().keys()


@pytest.mark.parametrize("trained", [True, False], ids=["step", "forward"])
@pytest.mark.parametrize("memory", ["256MiB", "20KiB"])
def test_the_best_token_from_products_that_end_in_their_softmax(memory: str, trained: bool, device: torch.device):
    """Of 16-bit operands that are whole numbers: ties are ties, and logits stay in the kernels that make them."""
    hidden, weight = (torch.randint(-2, 3, (n, 16), device=device).bfloat16() for n in (T, 300))
    weight[150:] = weight[:150]
    target = torch.randint(150, (T,), device=device)
    target[3] = -100
    leaves = [x.requires_grad_(trained) for x in (hidden, weight)]
    asked = {"stats": ("top1", "max_logit"), "backend": "triton", "memory": memory, "head": ll.Head(temperature=0.7)}
    plan = ll.explain(ll.logprobs, ll.Logits(*leaves), target, **asked)
    assert plan.forward.fused
    assert plan.apart is None
    for more, why in (({"top_k": 2}, "top1 and max_logit alone"), ({"head": ll.Head(softcap=3.0)}, "a softcap")):
        other = ll.explain(ll.logprobs, ll.Logits(*leaves), target, **{**asked, **more})
        assert not other.forward.fused
        assert why in str(other)
    ours = named(from_hidden(*leaves, target, **asked))
    both = [[x.detach().to(d) for x in leaves] for d in (torch.float64, torch.float32)]
    right, usual = (expected(x @ w.T, target, target[:, None], temperature=0.7) for x, w in both)
    check({name: x for name, x in ours.items() if name != "ids_logprobs"}, right, usual)
    assert {"top1_id", "top1_logprob", "top1_hit", "max_logit"} <= ours.keys()
    if trained:
        plain = ll.logprobs(ll.Logits(*leaves), target, backend="triton", memory=memory, head=asked["head"])
        found = [torch.autograd.grad(x.sum(), leaves) for x in (ours["logprob"], plain.logprob)]
        assert all(map(torch.equal, *found))


def test_lines_of_a_product_count_from_the_shards_first_column():
    table = Table.of(("top1",), 0, None, negative=False, start=41)
    p: Any = SimpleNamespace(call=SimpleNamespace(table=table, start=41))
    lines = best_lines(p, torch.tensor([[0.5, 1.0, 2.0], [0.0, 7.0, 25.0]]))
    assert lines.tolist() == [[0.5, 1.0, 2.0], [41.0, 48.0, 66.0]]
