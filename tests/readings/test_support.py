"""Kept ids whose scope is the support: all results over them and the target, from single rows of the weight."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from calls import from_hidden
from shared import linear as shared_linear
from shared import logprobs as shared_logprobs
from shared.errors import raises
from shared.linear import BACKENDS, DTYPES, HALF, Operands, draw, draw_rows, ragged
from shared.linear_parallel import NAMES, WORLDS, make_case, run
from shared.policy_loss import VOCAB, assert_same, composed, make, ran

import logitless as ll
from logitless.backends import OTHERS, load, tiled

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))


pytestmark = pytest.mark.usefixtures("one_thread")


def draw_ids(num_rows: int, vocab: int) -> list[list[int]]:
    """No ids, one, a few with repeats, many."""
    return [torch.randint(vocab, ((0, 1, 3, 25)[i % 4],)).tolist() for i in range(num_rows)]


def check(operands: Operands, index, target, kept, **options) -> shared_linear.Scored:
    return shared_linear.check(operands, index, target, kept=kept, scope="support", **options)


# Against float64.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "vocab", "width"), [(17, 1, 17), (19, 63, 33), (40, 507, 17)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_sizes(backend: str, num_rows: int, vocab: int, width: int, dtype: torch.dtype, device: torch.device):
    if backend == "triton" and dtype == torch.float64:
        return
    rows = draw_rows(num_rows + 4, num_rows, vocab)
    operands = draw(num_rows + 4, vocab, width, dtype)
    # A bias of 16 bits has sums in which rounded terms cancel.
    wanted = NAMES[: 2 if dtype in HALF else 3]
    for memory in ("256MiB", 1000):
        check(operands, *rows, draw_ids(num_rows, vocab), wanted=wanted, backend=backend, device=device, memory=memory)


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_every_option_of_the_head(backend: str, device: torch.device):
    index, target = draw_rows(23, 17, 100)
    options = {"vocab_size": 100, "softcap": 6.0, "scale": 1.5, "temperature": torch.linspace(0.5, 2, 17)}
    check(draw(23, 131, 17), index, target, draw_ids(17, 100), backend=backend, device=device, **options)


@pytest.mark.parametrize("entropy", [None, "value"])
@pytest.mark.parametrize("wanted", [("hidden",), ("weight",), ("bias",), NAMES])
def test_what_needs_no_gradient_gets_none(wanted: tuple[str, ...], entropy, device: torch.device):
    check(draw(20, 63, 9), *draw_rows(20, 20, 63), draw_ids(20, 63), wanted=wanted, entropy=entropy, device=device)


@pytest.mark.parametrize("backend", BACKENDS)
def test_transposed_operands(backend: str, device: torch.device):
    x = draw(20, 63, 24)
    turned = Operands(x.hidden.T.contiguous().T, x.weight.T.contiguous().T, x.bias)
    leaf = turned._replace(
        hidden=turned.hidden.to(device), weight=turned.weight.to(device), bias=turned.bias.to(device)
    )
    kept, target = draw_ids(20, 63), torch.randint(63, (20,))
    results = []
    for some in (leaf, leaf._replace(hidden=leaf.hidden.contiguous(), weight=leaf.weight.contiguous())):
        some = Operands(*(t.detach().requires_grad_() for t in some))
        logits, support = ll.Logits(some.hidden, some.weight, bias=some.bias), ragged(kept, device).over("support")
        out = ll.logprobs(logits, target.to(device), kept=support, backend=backend)
        results.append([out.logprob, *torch.autograd.grad(out.logprob.sum(), some)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_rounded_logits_are_those_of_the_whole_product(device: torch.device):
    """``match=``, beside the path that multiplies with the whole vocabulary."""
    x, target = draw(30, 63, 64, torch.bfloat16).leaves(device=device), torch.randint(63, (30,), device=device)
    kept = ragged(draw_ids(30, 63), device)
    ours, theirs = (
        ll.logprobs(ll.Logits(x.hidden, x.weight, bias=x.bias, match="bfloat16"), target, kept=kept.over(scope))
        for scope in ("support", "vocabulary")
    )
    # A logit that lies between two bfloat16 numbers may be rounded either way; most are not.
    same = (ours.logprob - theirs.logprob).abs() < 1e-5
    assert same.float().mean() > 0.9
    unrounded = ll.logprobs(ll.Logits(x.hidden, x.weight, bias=x.bias), target, kept=kept.over("support"))
    assert ((ours.logprob - unrounded.logprob).abs() > 1e-4).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_from_logits(backend: str, dtype: torch.dtype, device: torch.device):
    if backend == "triton" and dtype == torch.float64:
        return
    logits, (index, target) = shared_logprobs.make_logits(24, 107, dtype), draw_rows(24, 17, 100)
    kept = draw_ids(17, 100)
    kept[3] = [int(target[3]), *kept[3], int(target[3])]
    options = {"vocab_size": 100, "softcap": 9.0, "temperature": torch.linspace(0.5, 2, 17)}
    shared_logprobs.check(logits, index, target, kept, device, scope="support", backend=backend, **options)


def test_from_logits_reads_the_support_alone(device: torch.device):
    logits = torch.full((3, 40), torch.nan, device=device)
    logits[:, :4] = 1.0
    logits = (logits * 1.0).requires_grad_()
    kept = ll.Kept.from_lists([[0, 1], [2], [3, 1, 0]], device)
    out = ll.logprobs(logits, torch.tensor([1, 3, 3], device=device), kept=kept.over("support"), entropy="grad")
    torch.testing.assert_close(out.logprob.cpu(), -torch.tensor([2.0, 2.0, 3.0]).log())
    out.logprob.sum().backward()
    assert (logits.grad[:, 4:] == 0).all()


# What it costs: nothing for one id, nothing of size [T, V], no matrix product.


def test_a_row_with_one_id_is_not_read(device: torch.device):
    """Its log-prob, entropy and gradient are 0, whatever its hidden state."""
    x = draw(4, 20, 8).leaves(device=device)
    with torch.no_grad():
        x.hidden[[0, 2, 3]] = torch.nan
    target = torch.tensor([5, 6, 7, -100], device=device)
    kept = ll.Kept.from_lists([[5, 5], [1, 2], [], [3, 4]], device)
    out = ll.logprobs(ll.Logits(x.hidden, x.weight), target, kept=kept.over("support"), entropy="grad")
    (out.logprob.sum() + out.entropy.sum()).backward()
    assert out.logprob[[0, 2, 3]].tolist() == out.entropy[[0, 2, 3]].tolist() == [0, 0, 0]
    assert out.logprob[1] < 0
    assert (x.hidden.grad[[0, 2, 3]] == 0).all()
    assert x.weight.grad.isfinite().all()
    assert x.weight.grad.any(1).nonzero().flatten().tolist() == [1, 2, 6]


def test_neither_a_product_nor_a_tile(monkeypatch):
    """The backend is asked for dot products and sums, and for nothing else; the plan says so."""
    asked = []

    class Counting:
        def __getattr__(self, name):
            asked.append(name)
            return getattr(tiled, name)

    monkeypatch.setitem(OTHERS, "counting", Counting())
    x, kept = draw(12, 50, 8).leaves(), ragged(draw_ids(12, 50))
    call = (x.hidden, x.weight, torch.randint(50, (12,)))
    from_hidden(*call, kept=kept.over("support"), backend="counting").logprob.sum().backward()
    # Of every backend it is asked whether it has products that end in a softmax.
    assert [name for name in asked if name != "products"] == ["dots", "sums", "sums"]
    plan = ll.explain(ll.logprobs, ll.Logits(*call[:2]), call[2], kept=kept.over("support"))
    assert (plan.kind, plan.products) == ("support", 0)
    assert str(plan) == (
        "support: no matrix product, because only the ids that the sampler kept and the targets are asked for. "
        f"{kept.ids.numel() + 12} dot products."
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_bits_in_any_batch(backend: str, device: torch.device):
    x, target, ids = draw(24, 63, 40), torch.randint(63, (24,)), draw_ids(24, 63)

    def score(rows: slice) -> tuple:
        leaf = x.leaves(device=device)
        hidden = leaf.hidden[rows].detach().requires_grad_()
        logits, kept = ll.Logits(hidden, leaf.weight), ragged(ids[rows], device).over("support")
        out = ll.logprobs(logits, target[rows].to(device), kept=kept, entropy="grad", backend=backend)
        out.logprob.sum().backward()
        return out.logprob.detach(), out.entropy.detach(), hidden.grad

    whole = score(slice(0, 24))
    for rows in (slice(0, 1), slice(3, 4), slice(5, 24), slice(0, 17)):
        assert all(torch.equal(a, b[rows]) for a, b in zip(score(rows), whole, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_do_not_look_where_the_factor_is_zero(backend: str, device: torch.device):
    """Rows that were left out may hold anything."""
    x = torch.ones(3, 5, device=device)
    x[1] = torch.nan
    out, starts = torch.full((2, 5), 7.0, device=device), torch.tensor([0, 2, 4], device=device)
    factor, at = torch.tensor([1.0, 0.0, 2.0, 3.0], device=device), torch.tensor([0, 1, 2, 0], device=device)
    load(backend).sums(factor, x, at, starts, out, add=False, memory=1000)
    assert out.tolist() == [[1.0] * 5, [5.0] * 5]
    load(backend).sums(factor, x, at, starts, out, torch.tensor([1, 0], device=device), add=True, memory=1000)
    assert out.tolist() == [[6.0] * 5, [6.0] * 5]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [300, 1100])
def test_sums_of_very_different_lengths(count: int, backend: str, device: torch.device):
    """Some are made in parts: none, a short one, a part and one more, a part exactly, and a long one."""
    lengths = torch.tensor([0, 5, 257, 0, 256, count, 1, 0])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(starts[-1])
    x, at = torch.randn(9, 33, dtype=torch.float64), torch.randint(9, (total + 7,))
    factor = torch.randn(total + 7)
    factor[total:] = 0
    wanted = torch.stack([(factor[a:b, None].double() * x[at[a:b]]).sum(0) for a, b in pairwise(starts.tolist())])
    given = [t.to(device) for t in (factor, x.float(), at, starts)]
    out = torch.full((8, 33), 7.0, device=device)
    load(backend).sums(*given, out, add=False, memory=1 << 20, uneven=True)
    torch.testing.assert_close(out.double().cpu(), wanted, rtol=1e-5, atol=1e-4)
    place = torch.tensor([3, 1, 0, 2, 7, 5, 4, 6], device=device)
    load(backend).sums(*given, out, place, add=True, memory=1 << 20, uneven=True)
    torch.testing.assert_close(out.double().cpu()[place.cpu()], wanted + wanted[place.cpu()], rtol=1e-5, atol=1e-4)


# Where the weight's gradient goes.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_weights_gradient_as_rows_and_into_a_buffer(backend: str, dtype: torch.dtype, device: torch.device):
    x, target = draw(30, 63, 17, dtype), torch.randint(60, (30,), device=device)
    kept = ragged(draw_ids(30, 60), device)

    def gradient(**options):
        leaf = x.leaves(device=device)
        logits = ll.Logits(leaf.hidden, leaf.weight, **options)
        out = ll.logprobs(logits, target, kept=kept.over("support"), backend=backend, head=ll.Head(vocab_size=60))
        out.logprob.sum().backward()
        return leaf.weight.grad

    dense = gradient()
    rows = gradient(sparse_weight_grad=True)
    assert rows.is_sparse
    assert torch.equal(rows.to_dense(), dense)
    assert set(rows.coalesce().indices()[0].tolist()) >= set(dense.any(1).nonzero().flatten().tolist())
    buffer = torch.full(x.weight.shape, 2.0, device=device)
    assert gradient(weight_grad=buffer) is None
    torch.testing.assert_close(buffer - 2.0, dense.float(), rtol=2**-8 if dtype in HALF else 1e-5, atol=1e-6)
    assert (buffer[60:] == 2.0).all()


def test_sparse_adam_takes_the_rows():
    weight = torch.nn.Parameter(draw(1, 40, 8).weight)
    before, hidden = weight.detach().clone(), torch.randn(6, 8)
    kept = ll.Kept.from_lists([[1, 2], [3], [], [4, 2], [9], [1]])
    out = ll.logprobs(
        ll.Logits(hidden, weight, sparse_weight_grad=True), torch.tensor([1, 3, 5, 4, 9, 2]), kept=kept.over("support")
    )
    out.logprob.sum().backward()
    torch.optim.SparseAdam([weight], lr=0.1).step()
    assert (weight.detach() != before).any(1).nonzero().flatten().tolist() == [1, 2, 4]


# Over ranks.


@pytest.mark.parametrize("world", list(WORLDS))
def test_shards(ranks, world):
    """One all_gather in forward; in backward what hidden's gradient takes, and nothing else."""
    bounds = WORLDS[world]
    kept = [torch.randperm(127)[: 2 + 3 * n].tolist() for n in range(17)]
    kept[0], kept[1], kept[2] = [], list(range(127)), [0, 5, 5, 0]
    few = [[i for i in ids if i < 120] for ids in kept]
    options = {"scope": "support", "entropy": "grad"}
    cases = [
        make_case(bounds, kept=kept, options=options),
        make_case(bounds, kept=kept, options=options | {"entropy": None}, wanted=("hidden",)),
        make_case(bounds, kept=kept, options=options | {"hidden_grad": "partial"}, dtype=torch.float64),
        make_case(bounds, kept=few, options=options, head={"softcap": 7.0, "temperature": 0.7, "vocab_size": 120}),
    ]
    if 24 % world == 0:
        cases.append(make_case(bounds, kept=kept, options=options | {"sequence_parallel": True}))
    for by_rank in run(ranks, world, cases)[:1]:
        for scored in by_rank:
            assert scored.forward_calls == [("all_gather", 4 * 17)]
            assert [name for name, _ in scored.backward_calls] == ["allreduce_"]


# Losses.


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_a_policy_loss_over_the_support(name: str):
    """Same loss and gradients as the objective on log-probs over the support."""
    problem, objective = make(torch.float64), ll.Objective.recipe(name)
    options = {"kept": ragged([torch.randint(VOCAB, (i % 5,)).tolist() for i in range(29)]).over("support")}
    plan = ll.explain(
        ll.policy_loss,
        ll.Logits(problem.operands.hidden, problem.operands.weight),
        problem.batch.rows(),
        objective,
        **options,
    )
    assert str(plan).startswith("support: no matrix product, because only the ids")
    assert_same(ran(problem, objective, **options), composed(problem, objective, **options), 1e-12)


# What is refused.


def test_what_does_not_go_together():
    x, target = draw(3, 10, 4), torch.tensor([1, 2, 3])
    kept, call = ll.Kept.from_lists([[1], [2], [3]]), (x.hidden, x.weight, target)
    with raises('Kept: scope must be "vocabulary" or "support" but is \'row\'.'):
        kept.over("row")
    with raises('sparse_weight_grad=True goes with kept ids whose scope is "support"'):
        from_hidden(*call, kept=kept, sparse_weight_grad=True)
    with raises("Pass one of them."):
        from_hidden(*call, kept=kept.over("support"), sparse_weight_grad=True, weight_grad=torch.zeros(10, 4))
    with raises("kept ids run from 1 to 10, outside the vocabulary of 10."):
        from_hidden(*call, kept=ll.Kept.from_lists([[1], [2], [10]]).over("support"))
    out = ll.logprobs(ll.Logits(x.hidden, x.weight.requires_grad_()), target, kept=kept.over("support"))
    with raises("logprobs: "):
        torch.autograd.grad(out.logprob.sum(), x.weight, create_graph=True)


# What engines return.


def test_forms_of_kept_ids():
    lists = [[5, 7], [], [9]]
    wanted = ll.Kept.from_lists(lists)
    mask = torch.zeros(3, 11, dtype=torch.bool)
    for row, ids in enumerate(lists):
        mask[row, ids] = True
    words = torch.zeros(3, 2, dtype=torch.uint8)
    for row, ids in enumerate(lists):
        for i in ids:
            words[row, i // 8] |= 1 << i % 8
    forms = [
        ll.Kept.from_offsets(torch.tensor([5, 7, 9]), torch.tensor([0, 2, 2, 3])),
        ll.Kept.from_padded(torch.tensor([[5, 7, -1], [-1, -1, -1], [-1, 9, -1]])),
        ll.Kept.from_mask(mask),
        ll.Kept.from_bits(words, 11),
    ]
    for form in forms:
        assert (form.ids.tolist(), form.lengths.tolist()) == (wanted.ids.tolist(), wanted.lengths.tolist())
    # The highest bit is the sign.
    assert ll.Kept.from_bits(torch.tensor([[-(2**31)]], dtype=torch.int32), 32).ids.tolist() == [31]


def test_what_vllm_and_sglang_return_for_each_response():
    rows = ll.Rows.packed([[1, 2, 3, 4], [5, 6, 7]], [2, 1], [[0, 1], [1]], loss_mask_only=True)
    vllm = [SimpleNamespace(token_ids=[[3, 9], [4]]), SimpleNamespace(token_ids=[[7]])]
    whole = [SimpleNamespace(token_ids=[1, 2], sampling_mask=vllm[0]), SimpleNamespace(sampling_mask=vllm[1])]
    ends = [SimpleNamespace(token_ids=[3, 9, 4], offsets=[0, 2, 3]), SimpleNamespace(token_ids=[7], offsets=[0, 1])]
    sglang = [[[3, 9], [4]], [[7]]]
    chunks = [SimpleNamespace(token_ids=torch.tensor([3, 9, 4]), lengths=torch.tensor([2, 1])), [[7]]]
    for supports in (vllm, whole, ends, sglang, chunks):
        kept = ll.Kept.from_engine(rows, supports)
        assert (kept.ids.tolist(), kept.lengths.tolist()) == ([4, 7], [1, 1])


def test_forms_that_are_refused():
    rows = ll.Rows.packed([[1, 2, 3]], [2])
    with raises("sample 0 has no list of ids for response token 1 but NoneType. An engine that recorded nothing"):
        ll.Kept.from_engine(rows, [[[3], None]])
    with raises(
        "sample 0 must have ids for each response token, a list each, or token_ids with offsets or lengths, but is int"
    ):
        ll.Kept.from_engine(rows, [7])
    with raises("sample 0 has none. Ask the engine for them (return_sampling_mask)"):
        ll.Kept.from_engine(rows, [SimpleNamespace(sampling_mask=None)])
    with raises("sample 0 has no list of ids for response token 0 but NoneType."):
        ll.Kept.from_engine(rows, [SimpleNamespace(token_ids=[None, [3]])])
    with raises("sample 0 has lengths for 1 tokens but its response has 2."):
        ll.Kept.from_engine(rows, [[[3]]])
    with raises("offsets must begin with 0 but begin with 1."):
        ll.Kept.from_offsets(torch.tensor([1]), torch.tensor([1, 2]))
    with raises("offsets must have an entry more than there are rows but has none."):
        ll.Kept.from_offsets(torch.tensor([1]), torch.tensor([], dtype=torch.int64))
    with raises("words of 8 bits must be [R, 2] for a vocab_size of 11 but are [1, 1]."):
        ll.Kept.from_bits(torch.zeros(1, 1, dtype=torch.uint8), 11)
    with raises("words of 8 bits must be [R, 2] for a vocab_size of 16 but are [1, 3]."):
        ll.Kept.from_bits(torch.zeros(1, 3, dtype=torch.uint8), 16)
    with raises("mask must be [R, V] torch.bool but is a tensor [2] torch.bool."):
        ll.Kept.from_mask(torch.ones(2, dtype=torch.bool))
    with raises("ids must be a 2-D integer tensor but is a tensor [2, 2] torch.float32."):
        ll.Kept.from_padded(torch.ones(2, 2))
