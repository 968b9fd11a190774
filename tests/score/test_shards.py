"""Vocabulary shards over real processes: the unsharded answer on every rank, in one collective.

A case is made once, here; every rank cuts its own columns out of it, scores them, and sends back its values, the
gradient of its columns and the collectives it took part in.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from calls import from_logits
from close import assert_close_to_truth, assert_gradient_close_to_truth
from shared.shards import Collectives, bits
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from truth import Scores, float64_leaf, plain, truth

from logitless import Head, Kept, LogitlessError, Logits, Rows, VocabShard, logprobs

WORLDS = {
    1: [(0, 507)],
    2: [(0, 200), (200, 507)],
    3: [(0, 129), (129, 129), (129, 507)],
    4: [(400, 507), (1, 130), (0, 1), (130, 400)],
}
"""Bounds by rank of 507 columns: a lone rank, an uneven cut, an empty shard, and shards out of order."""


@dataclass(frozen=True)
class Case:
    """One call of ``logprobs``, and the upstream gradients of its three results."""

    logits: Tensor
    index: Tensor
    target: Tensor
    upstream: Tensor
    bounds: list[tuple[int, int]]
    head: dict[str, Any] = field(default_factory=dict)
    kept: list[list[int]] | None = None
    options: dict[str, Any] = field(default_factory=lambda: {"entropy": "grad"})


class Scored(NamedTuple):
    """What a rank sends back."""

    logprob: Tensor
    entropy: Tensor
    log_z: Tensor
    gradient: Tensor
    forward_calls: list[tuple[str, int]]
    backward_calls: list[tuple[str, int]]


def make_case(bounds, *, tokens=29, rows=17, dtype=torch.float32, spread=3.0, **changes) -> Case:
    vocab = max(stop for _, stop in bounds)
    case = Case(
        logits=(torch.randn(tokens, vocab) * spread).to(dtype),
        index=torch.randperm(tokens)[:rows],
        target=torch.randint(0, changes.get("head", {}).get("vocab_size", vocab), (rows,)),
        upstream=torch.randn(3, rows, dtype=torch.float64),
        bounds=bounds,
    )
    return replace(case, **changes)


# What runs in the ranks.


def score(rank: int, world: int, cases: list[Case]) -> list[Scored]:
    return [score_one(case, VocabShard(*case.bounds[rank], dist.group.WORLD)) for case in cases]


def score_one(case: Case, shard: VocabShard | None) -> Scored:
    start, stop = (0, case.logits.shape[1]) if shard is None else (shard.start, shard.stop)
    # Kernels run in the interpreter on the CPU, or for real where there is a GPU: all ranks on it, over gloo.
    device = "cuda" if case.options.get("backend") == "triton" and torch.cuda.is_available() else "cpu"
    leaf = case.logits[:, start:stop].contiguous().to(device).requires_grad_()
    logits = leaf * 1.0 if case.options.get("overwrite") else leaf
    kept = None
    if case.kept is not None:
        flat = [i for ids in case.kept for i in ids]
        lengths = [len(ids) for ids in case.kept]
        kept = Kept(*(torch.tensor(x, dtype=torch.int64, device=device) for x in (flat, lengths)))
    with Collectives() as forward:
        rows = Rows.at(case.index.to(device), case.target.to(device))
        out = from_logits(logits, rows, shard=shard, head=Head(**case.head), kept=kept, **case.options)
    with Collectives() as backward:
        weighted(out, case.upstream.to(device)).backward()
    entropy = torch.zeros(len(rows)) if out.entropy is None else out.entropy
    results = (x.detach().cpu() for x in (out.logprob, entropy, out.log_z, leaf.grad))
    return Scored(*results, forward.calls, backward.calls)


def weighted(out: Any, upstream: Tensor) -> Tensor:
    """The loss: every result that carries a graph, times its upstream gradient."""
    values = zip(out[:3], upstream, strict=True)
    return sum((g.to(x.dtype) * x).sum() for x, g in values if x is not None and x.requires_grad)


# What every test asks of the results.


def assert_same_bits(results: list[Scored]) -> None:
    for rank, other in enumerate(results):
        for name in ("logprob", "entropy", "log_z"):
            mine, theirs = getattr(results[0], name), getattr(other, name)
            assert torch.equal(bits(mine), bits(theirs)), f"{name} of rank {rank} differs from rank 0"


def whole_gradient(case: Case, results: list[Scored]) -> Tensor:
    """The gradients of all shards, in column order."""
    by_start = sorted(zip(case.bounds, results, strict=True), key=lambda item: item[0])
    return torch.cat([scored.gradient for _, scored in by_start], dim=1)


def assert_truth(case: Case, results: list[Scored]) -> None:
    assert_same_bits(results)
    true, true_gradient = with_gradient(truth, float64_leaf(case.logits), case)
    rough, rough_gradient = with_gradient(plain, case.logits.clone().requires_grad_(), case)
    for name in ("logprob", "entropy", "log_z"):
        if name == "entropy" and case.options["entropy"] is None:
            continue
        assert_close_to_truth(getattr(results[0], name), getattr(true, name), getattr(rough, name), name)
    ours = whole_gradient(case, results)
    assert ours.dtype == case.logits.dtype
    assert_gradient_close_to_truth(ours, true_gradient, rough_gradient)
    left_out = torch.ones(len(case.logits), dtype=torch.bool)
    left_out[case.index[case.target != -100]] = False
    assert not ours[left_out].any(), "rows that were not scored have a gradient"


def with_gradient(oracle, leaf: Tensor, case: Case) -> tuple[Scores, Tensor]:
    out = oracle(leaf, case.index, case.target, **case.head, kept=case.kept)
    counted = case.upstream if case.options["entropy"] == "grad" else case.upstream * torch.tensor([[1.0], [0], [1]])
    weighted(out, counted).backward()
    return out, leaf.grad


# Values and gradients.


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_shards_give_the_unsharded_answer(ranks, world, dtype):
    bounds = WORLDS[world]
    cases = [
        make_case(bounds, dtype=dtype),
        make_case(bounds, dtype=dtype, spread=12.0),
        make_case(bounds, dtype=dtype, head={"temperature": 0.7, "scale": 1.3}),
        make_case(bounds, dtype=dtype, head={"softcap": 15.0, "temperature": 1.6}),
        make_case(bounds, dtype=dtype, head={"temperature": torch.rand(17) + 0.3}),
        make_case(bounds, dtype=dtype, head={"vocab_size": 450}),
        make_case(bounds, dtype=dtype, options={"entropy": "value"}),
        make_case(bounds, dtype=dtype, options={"entropy": None}),
        make_case(bounds, dtype=dtype, options={"entropy": "grad", "memory": 1000}),
    ]
    results = ranks(score, world, cases)
    for case, *by_rank in zip(cases, *results, strict=True):
        assert_truth(case, by_rank)


@pytest.mark.parametrize("backend", ["reference", "tiled", "triton"])
@pytest.mark.parametrize("world", [2, 3])
def test_every_backend(ranks, world, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    bounds = {2: [(0, 50), (50, 63)], 3: [(40, 63), (0, 0), (0, 40)]}[world]
    options = {"entropy": "grad", "backend": backend}
    cases = [
        make_case(bounds, tokens=7, rows=5, options=options),
        make_case(bounds, tokens=7, rows=5, options=options, head={"softcap": 9.0, "vocab_size": 45}),
        make_case(bounds, tokens=7, rows=5, options=options, kept=[[3, 60], [], [41, 42, 43], [0], [62, 1, 1]]),
    ]
    for case, *by_rank in zip(cases, *ranks(score, world, cases), strict=True):
        assert_truth(case, by_rank)


def test_one_part_has_the_bits_of_no_shard(ranks):
    case = make_case(WORLDS[1], head={"temperature": 0.7})
    [[sharded]] = ranks(score, 1, [case])
    alone = score_one(case, None)
    assert_same_bits([alone, sharded])
    assert torch.equal(sharded.gradient, alone.gradient)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_cuts(ranks, world):
    cases = []
    for vocab in (1, 2, 3, 63, 64, 1000):
        cuts = [0, *sorted(torch.randint(0, vocab + 1, (world - 1,)).tolist()), vocab]
        in_order = list(pairwise(cuts))
        bounds = [in_order[i] for i in torch.randperm(world).tolist()]
        cases.append(make_case(bounds, tokens=13, rows=13))
        cases.append(make_case(bounds, tokens=13, rows=13, head={"softcap": 20.0}))
    for case, *by_rank in zip(cases, *ranks(score, world, cases), strict=True):
        assert_truth(case, by_rank)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_targets_at_both_ends_of_every_shard(ranks, world):
    bounds = WORLDS[world]
    ends = sorted({column for start, stop in bounds if start < stop for column in (start, stop - 1)})
    target = torch.tensor([*ends, -100, 5, -100])
    case = make_case(bounds, rows=len(target), target=target)
    results = [scored for [scored] in ranks(score, world, [case])]
    assert_truth(case, results)
    for name in ("logprob", "entropy", "log_z"):
        assert not getattr(results[0], name)[target == -100].any(), f"an ignored row has a {name}"
    assert results[0].logprob[target != -100].all()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_shard_of_nothing_but_padding(ranks, world):
    """The last columns are padding, whatever they hold; one shard has no true column at all."""
    bounds = {2: [(0, 400), (400, 507)], 3: [(300, 507), (0, 100), (100, 300)], 4: WORLDS[4]}[world]
    vocab_size = {2: 400, 3: 300, 4: 129}[world]
    for garbage in (torch.nan, 1e4, -torch.inf):
        case = make_case(bounds, head={"vocab_size": vocab_size})
        case.logits[:, vocab_size:] = garbage
        results = [scored for [scored] in ranks(score, world, [case])]
        assert not whole_gradient(case, results)[:, vocab_size:].any(), "padding has a gradient"
        true, _ = with_gradient(truth, float64_leaf(case.logits[:, :vocab_size]), case)
        assert_truth(replace(case, logits=case.logits[:, :vocab_size].clone()), cut(case, results, vocab_size))
        assert results[0].logprob.isfinite().all() == true.logprob.isfinite().all()


def cut(case: Case, results: list[Scored], width: int) -> list[Scored]:
    """The same results with the columns from ``width`` on taken off every gradient."""
    keep = [max(0, min(stop, width) - start) for start, stop in case.bounds]
    return [r._replace(gradient=r.gradient[:, :n]) for r, n in zip(results, keep, strict=True)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("entropy", [None, "grad"])
def test_kept(ranks, world, entropy):
    """Kept ids anywhere: many, none, only on other shards than the target, twice, and on a row that is left out."""
    bounds = WORLDS[world]
    target = torch.randint(0, 507, (17,))
    target[3], target[4], target[5], target[6] = 506, 0, -100, 130
    kept = [torch.randperm(507)[: 2 + 3 * n].tolist() for n in range(17)]
    kept[0], kept[1], kept[2] = [], list(range(507)), [int(target[2])]
    kept[3], kept[4], kept[6] = [0, 5, 5, 0], [506, 450, 449], [128, 129, 131]
    cases = [
        make_case(bounds, target=target, kept=kept, options={"entropy": entropy}),
        make_case(bounds, target=target, kept=kept, options={"entropy": entropy}, dtype=torch.float64),
        make_case(
            bounds,
            target=target.clamp_max(449),
            kept=[[i for i in ids if i < 450] for ids in kept],
            options={"entropy": entropy},
            head={"vocab_size": 450, "softcap": 12.0, "temperature": torch.rand(17) + 0.3},
        ),
    ]
    for case, *by_rank in zip(cases, *ranks(score, world, cases), strict=True):
        assert_truth(case, by_rank)


def test_kept_gradient_of_the_log_prob_alone(ranks):
    """Without upstream gradients of entropy and log Z, ids that were not kept have a gradient of exactly zero."""
    target = torch.tensor([10, 300, 506, 0, 200])
    kept = [[300, 301], [1], [505, 504], [], [199, 200, 201]]
    upstream = torch.zeros(3, 5, dtype=torch.float64)
    upstream[0] = torch.randn(5)
    case = make_case(WORLDS[4], rows=5, target=target, kept=kept, upstream=upstream, options={"entropy": None})
    results = [scored for [scored] in ranks(score, 4, [case])]
    assert_truth(case, results)
    inside = torch.zeros_like(case.logits, dtype=torch.bool)
    for row, t, ids in zip(case.index.tolist(), target.tolist(), kept, strict=True):
        inside[row, [t, *ids]] = True
    assert not whole_gradient(case, results)[~inside].any()


@pytest.mark.parametrize("world", [2, 3])
def test_infinities_and_nans_stay_in_their_row(ranks, world):
    bounds = WORLDS[world]
    case = make_case(bounds, tokens=17)
    start, stop = bounds[0]
    rows = case.index.tolist()
    case.target[0], case.target[1], case.target[2] = start + 3, stop + 4, 490
    case.logits[rows[0], stop:] = -torch.inf
    case.logits[rows[1], start:stop] = -torch.inf
    clean = [scored for [scored] in ranks(score, world, [case])]
    assert_truth(case, clean)
    case.logits[rows[2], 7] = torch.nan
    case.logits[rows[3], case.target[3]] = -torch.inf
    results = [scored for [scored] in ranks(score, world, [case])]
    assert_same_bits(results)
    assert results[0].logprob[2].isnan()
    assert results[0].logprob[3] == -torch.inf
    assert results[0].entropy[3].isfinite()
    others = [i for i in range(17) if i not in (2, 3)]
    assert torch.equal(results[0].logprob[others], clean[0].logprob[others])
    before, after = whole_gradient(case, clean), whole_gradient(case, results)
    assert torch.equal(after[case.index[others]], before[case.index[others]])


def test_overwriting_gives_the_same_gradient(ranks):
    plainly = make_case(WORLDS[3], head={"temperature": 0.7})
    over = replace(plainly, options={"entropy": "grad", "overwrite": True})
    for rank, (first, second) in enumerate(ranks(score, 3, [plainly, over])):
        assert torch.equal(first.gradient, second.gradient), rank
        assert_same_bits([first, second])


def test_the_entropy_gate_does_not_move_the_log_probs(ranks):
    case = make_case(WORLDS[3])
    modes = [replace(case, options={"entropy": mode}) for mode in (None, "value", "grad")]
    for results in ranks(score, 3, modes):
        assert torch.equal(results[0].logprob, results[1].logprob)
        assert torch.equal(results[0].logprob, results[2].logprob)
        assert torch.equal(bits(results[1].entropy), bits(results[2].entropy))
        assert torch.equal(results[0].gradient, results[1].gradient)


def test_the_same_bits_on_every_run(ranks):
    case = make_case(WORLDS[4], kept=[[n, 3 * n, 500 - n] for n in range(17)])
    for first, second in ranks(score, 4, [case, case]):
        assert_same_bits([first, second])
        assert torch.equal(first.gradient, second.gradient)


# Collectives.


def count_known_collectives(rank: int, world: int) -> list[tuple[str, int]]:
    with Collectives() as seen:
        torch.zeros(3).sum()
        dist.all_reduce(torch.zeros(5))
        dist.all_gather([torch.zeros(7) for _ in range(world)], torch.zeros(7))
    return seen.calls


def test_the_counter_counts(ranks):
    assert ranks(count_known_collectives, 2) == [[("allreduce_", 5), ("all_gather", 7)]] * 2


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("num_rows", [17, 1, 0])
def test_one_gather_in_forward_and_nothing_in_backward(ranks, world, num_rows):
    """Also with no rows at all: a rank cannot know that its peers have none."""
    cases = [make_case(WORLDS[world], rows=num_rows, options={"entropy": mode}) for mode in (None, "value", "grad")]
    cases.append(make_case(WORLDS[world], rows=num_rows, kept=[[1, 400]] * num_rows))
    for results in ranks(score, world, cases):
        gathered = [4 * num_rows] * 3 + [6 * num_rows]
        assert [scored.forward_calls for scored in results] == [[("all_gather", sent)] for sent in gathered]
        assert [scored.backward_calls for scored in results] == [[]] * 4


@pytest.mark.parametrize("world", WORLDS)
def test_no_rows_still_have_a_gradient(ranks, world):
    cases = [make_case(WORLDS[world], rows=0), make_case(WORLDS[world], rows=0, kept=[])]
    for case, *by_rank in zip(cases, *ranks(score, world, cases), strict=True):
        assert torch.equal(whole_gradient(case, by_rank), torch.zeros_like(case.logits))
        assert all(scored.logprob.shape == (0,) for scored in by_rank)


@pytest.mark.parametrize("world", [2, 4])
def test_no_tokens_at_all(ranks, world):
    case = make_case(WORLDS[world], tokens=0, rows=0)
    results = [scored for [scored] in ranks(score, world, [case])]
    assert whole_gradient(case, results).shape == (0, 507)
    assert all(scored.forward_calls == [("all_gather", 0)] for scored in results)


def score_without_a_group(rank: int, world: int, case: Case) -> tuple[Scored, Scored]:
    assert dist.is_initialized()
    with Collectives() as making:
        shard = VocabShard(0, case.logits.shape[1], group=None)
        even = VocabShard.even(case.logits.shape[1], None)
    assert making.calls == []
    assert (even.start, even.stop, even.vocab_size) == (0, 507, 507)
    if rank == 1:
        # A collective over the default group would now wait for rank 0 for ever.
        case = replace(case, index=case.index[:0], target=case.target[:0], upstream=case.upstream[:, :0])
    return score_one(case, None), score_one(case, shard)


def test_no_group_means_no_collective(ranks):
    case = make_case([(0, 507)])
    results = ranks(score_without_a_group, 2, case, timeout=20)
    for unsharded, whole in results:
        assert unsharded.forward_calls == unsharded.backward_calls == []
        assert whole.forward_calls == whole.backward_calls == []
        assert torch.equal(unsharded.logprob, whole.logprob)
        assert torch.equal(unsharded.gradient, whole.gradient)
    assert_truth(case, [results[0][1]])


# Groups.


def score_on_a_mesh(rank: int, world: int, cases: list[Case]) -> tuple[Scored, Scored, str]:
    """Two sequence ranks by two vocabulary ranks: each pair scores a case of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    case, place = cases[mesh["cp"].get_local_rank()], mesh["tp"].get_local_rank()
    try:
        VocabShard(*case.bounds[place], mesh)
        text = ""
    except LogitlessError as error:
        text = str(error)
    by_mesh = score_one(case, VocabShard(*case.bounds[place], mesh["tp"]))
    by_group = score_one(case, VocabShard(*case.bounds[place], mesh.get_group("tp")))
    return by_mesh, by_group, text


def test_a_dimension_of_a_mesh_is_a_group(ranks):
    cases = [make_case(WORLDS[2]), make_case([(300, 507), (0, 300)], rows=5)]
    results = ranks(score_on_a_mesh, 4, cases)
    for case, pair in zip(cases, (results[:2], results[2:]), strict=True):
        assert_truth(case, [by_mesh for by_mesh, _, _ in pair])
        for by_mesh, by_group, text in pair:
            assert_same_bits([by_mesh, by_group])
            assert torch.equal(by_mesh.gradient, by_group.gradient)
            assert text == (
                "VocabShard.group: a DeviceMesh with 2 dimensions does not name one group. "
                'Pass one dimension of it, for example mesh["tp"].'
            )


def even_shards(rank: int, world: int, sizes: list[int]) -> list[Any]:
    answers = []
    for size in sizes:
        try:
            shard = VocabShard.even(size, dist.group.WORLD)
            answers.append((shard.start, shard.stop, shard.vocab_size))
        except LogitlessError as error:
            answers.append(str(error))
    return answers


def test_even_shards(ranks):
    text = "VocabShard.even: vocab_size 508 does not divide into 3 equal shards. Pad it to a multiple and set "
    for rank, (first, second) in enumerate(ranks(even_shards, 3, [507, 508])):
        assert first == (rank * 169, (rank + 1) * 169, 507)
        assert second == f"{text}Head(vocab_size=508), or give start and stop yourself."


# Errors, the same on every rank.


def shard_error(rank: int, world: int, bounds: list[tuple[int, int]]) -> str:
    try:
        VocabShard(*bounds[rank], dist.group.WORLD)
    except LogitlessError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        (
            [(0, 10), (12, 20), (20, 30)],
            "VocabShard: the shards leave a gap at column 10: rank 1 starts at 12 where 10 was expected. "
            "Bounds by rank: [(0, 10), (12, 20), (20, 30)].",
        ),
        (
            [(18, 30), (0, 10), (10, 20)],
            "VocabShard: the shards overlap at column 18: rank 0 starts at 18 where 20 was expected. "
            "Bounds by rank: [(18, 30), (0, 10), (10, 20)].",
        ),
        (
            [(0, 10), (0, 10), (10, 20)],
            "VocabShard: the shards overlap at column 0: rank 1 starts at 0 where 10 was expected. "
            "Bounds by rank: [(0, 10), (0, 10), (10, 20)].",
        ),
        (
            [(0, 10), (10, 20), (20, 15)],
            "VocabShard: rank 2 has start 20 and stop 15. Wanted 0 <= start <= stop.",
        ),
        ([(0, 10), (10, 10), (10, 20)], "no error"),
    ],
)
def test_shards_that_do_not_tile_the_vocabulary(ranks, bounds, text):
    assert ranks(shard_error, 3, bounds, timeout=20) == [text] * 3


def wrong_width(rank: int, world: int) -> str:
    shard = VocabShard(rank * 10, (rank + 1) * 10, dist.group.WORLD)
    try:
        logprobs(Logits.given(torch.zeros(3, 9), shard=shard), torch.tensor([0, 1, 2]))
    except LogitlessError as error:
        return str(error)
    return "no error"


def test_logits_of_another_width_than_the_shard(ranks):
    assert ranks(wrong_width, 2, timeout=20) == [
        "logprobs: shard holds columns 0 to 10 (10 of them) but logits has 9 columns.",
        "logprobs: shard holds columns 10 to 20 (10 of them) but logits has 9 columns.",
    ]


def outside_the_vocabulary(rank: int, world: int) -> str:
    shard = VocabShard(rank * 10, (rank + 1) * 10, dist.group.WORLD)
    try:
        logprobs(Logits.given(torch.zeros(3, 10), shard=shard), torch.tensor([0, 19, 20]))
    except LogitlessError as error:
        return str(error)
    return "no error"


def test_a_target_outside_all_shards(ranks):
    text = "logprobs: target 20 of row 2 (sample 0, position 2) is outside the vocabulary of 20. Use -100 to leave "
    assert ranks(outside_the_vocabulary, 2, timeout=20) == [f"{text}a row out."] * 2


def disagree(rank: int, world: int, about: str) -> tuple[str, list[tuple[str, int]]]:
    shard = VocabShard(rank * 10, (rank + 1) * 10, dist.group.WORLD, check_calls=True)
    odd = rank == 1
    logits = torch.zeros(5, 10, dtype=torch.bfloat16 if odd and about == "dtype" else torch.float32)
    num_rows = 4 if odd and about == "rows" else 5
    target = torch.arange(num_rows)
    options: dict[str, Any] = {}
    if about == "entropy":
        options["entropy"] = "value" if odd else None
    if about == "a local error" and odd:
        logits = logits[:, :9].contiguous()
    if about == "vocabulary":
        options["head"] = Head(vocab_size=17 + rank)
    if about == "kept" and odd:
        options["kept"] = Kept(torch.arange(5), torch.ones(5, dtype=torch.int64))
    with Collectives() as seen:
        try:
            out = from_logits(logits, (torch.arange(num_rows), target), shard=shard, **options)
            text = f"{float(out.logprob.sum()):.4f}"
        except LogitlessError as error:
            text = str(error)
    return text, seen.calls


@pytest.mark.parametrize(
    ("about", "name", "values"),
    [
        ("rows", "the number of rows", "[5, 4, 5]"),
        ("dtype", "the dtype of the logits", "['torch.float32', 'torch.bfloat16', 'torch.float32']"),
        ("entropy", "entropy", "[None, 'value', None]"),
        ("kept", "the kept ids", "[None, ('[5] eb377da85865badb', '[5] 31fa9ad6292cd860', 'vocabulary'), None]"),
        ("vocabulary", "the vocabulary size", "[17, 18, 19]"),
    ],
)
def test_checked_calls_turn_disagreement_into_an_error(ranks, about, name, values):
    text = f"logprobs: ranks of one vocabulary group disagree about {name}: rank by rank it is {values}. "
    results = ranks(disagree, 3, about, timeout=20)
    assert [came for came, _ in results] == [
        f"{text}Every rank of the group must score the same rows with the same options."
    ] * 3
    assert all(("all_gather", 20) not in calls for _, calls in results), "the call went on to its own collective"


def test_checked_calls_stop_together_when_one_rank_cannot_start(ranks):
    """Without the check the other two would wait for rank 1 in the collective."""
    local = "logprobs: shard holds columns 10 to 20 (10 of them) but logits has 9 columns."
    elsewhere = f"logprobs: rank 1 of this rank's vocabulary group stopped with: {local}"
    assert [text for text, _ in ranks(disagree, 3, "a local error", timeout=20)] == [elsewhere, local, elsewhere]


def test_checked_calls_that_agree(ranks):
    for text, calls in ranks(disagree, 3, "nothing", timeout=20):
        # Five rows of 30 equal logits: 5 * -log 30.
        assert text == "-17.0060"
        assert calls[-1] == ("all_gather", 20)
