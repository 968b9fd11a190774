"""``logprobs`` of ``Logits`` over real processes: a sharded head, partial and reduced d_hidden, sequence parallelism.

A case is made once, here; every rank cuts its own rows out of the weight and bias (and, under sequence parallelism, its
own tokens out of hidden), and sends back its values, its gradients and the collectives it took part in.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import from_hidden
from shared.linear import Operands, draw, ragged
from shared.linear_parallel import (
    NAMES,
    WORLDS,
    Case,
    assert_same_bits,
    assert_truth,
    make_case,
    run,
    score,
    score_one,
    whole_gradients,
)
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from truth import truth

from logitless import Head, LogitlessError, Rows, VocabShard, Zigzag

# What runs in the ranks.


# What every test asks of the results.


# Values and gradients.


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_shards_give_the_unsharded_answer(ranks, world, dtype):
    bounds = WORLDS[world]
    cases = [
        make_case(bounds, dtype=dtype),
        make_case(bounds, dtype=dtype, options={"memory": 6000}),
        make_case(bounds, dtype=dtype, tokens=160, rows=150, options={"memory": 100_000}),
        make_case(bounds, dtype=dtype, options={"hidden_grad": "partial"}),
        make_case(bounds, dtype=dtype, options={"sequence_parallel": True}),
        make_case(bounds, dtype=dtype, head={"softcap": 15.0, "temperature": torch.rand(17) + 0.5}),
        make_case(bounds, dtype=dtype, head={"vocab_size": 110, "scale": 1.3}),
        make_case(bounds, dtype=dtype, options={"entropy": "value"}),
        make_case(bounds, dtype=dtype, options={"entropy": None}, wanted=("weight",)),
    ]
    run(ranks, world, cases)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("entropy", [None, "value", "grad"])
def test_frozen_head(ranks, world, entropy):
    bounds, wanted = WORLDS[world], ("hidden",)
    cases = [
        make_case(bounds, wanted=wanted, options={"entropy": entropy}),
        make_case(bounds, wanted=wanted, options={"entropy": entropy, "hidden_grad": "partial", "memory": 6000}),
        make_case(bounds, wanted=wanted, options={"entropy": entropy, "sequence_parallel": True}),
        make_case(bounds, wanted=wanted, options={"entropy": entropy}, head={"softcap": 9.0, "vocab_size": 110}),
        make_case(bounds, wanted=wanted, options={"entropy": entropy}, dtype=torch.bfloat16),
        make_case(bounds, wanted=wanted, options={"entropy": entropy}, rows=0),
    ]
    run(ranks, world, cases)


@pytest.mark.parametrize("backend", ["reference", "tiled", "triton"])
def test_every_backend(ranks, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    options = {"backend": backend}
    bounds = [(20, 31), (0, 0), (0, 20)]
    cases = [
        make_case(bounds, tokens=6, rows=5, options=options),
        make_case(bounds, tokens=6, rows=5, options=options, kept=[[3, 30], [], [21, 22], [0], [29, 1, 1]]),
        make_case(bounds, tokens=6, rows=5, options=options | {"entropy": None}, wanted=("hidden",)),
        # Of a width and dtype whose products end in the softmax, where a backend has such.
        make_case(bounds, tokens=6, rows=5, width=16, dtype=torch.float16, options=options),
        make_case(
            bounds, tokens=6, rows=5, width=16, dtype=torch.float16, options=options | {"sequence_parallel": True}
        ),
    ]
    run(ranks, 3, cases)


@pytest.mark.parametrize("world", [2, 3])
def test_kept(ranks, world):
    """Kept ids anywhere: many, none, only on other shards than the target, twice, and on a row that is left out."""
    bounds = WORLDS[world]
    kept = [torch.randperm(127)[: 2 + 3 * n].tolist() for n in range(17)]
    kept[0], kept[1], kept[2] = [], list(range(127)), [0, 5, 5, 0]
    cases = [make_case(bounds, kept=kept, options={"entropy": mode, "memory": 9000}) for mode in (None, "grad")]
    cases.append(make_case(bounds, kept=kept, options={"entropy": None}, wanted=("hidden",)))
    cases.append(make_case(bounds, kept=kept, options={"sequence_parallel": True}, dtype=torch.float64))
    cases.append(make_case(bounds, kept=kept, options={"entropy": None, "hidden_grad": "partial"}))
    run(ranks, world, cases)


@pytest.mark.parametrize("wanted", [NAMES, ("hidden",)], ids="-".join)
@pytest.mark.parametrize("entropy", [None, "grad"])
def test_a_shard_of_nothing_but_padding(ranks, entropy, wanted):
    """The last rows of the weight are padding, whatever they hold; one shard has no true column at all."""
    case = make_case([(0, 50), (50, 100), (100, 127)], head={"vocab_size": 90}, options={"entropy": entropy})
    case = replace(case, wanted=wanted)
    clean = case.operands
    dirty = clean._replace(weight=clean.weight.clone(), bias=clean.bias.clone())
    dirty.weight[90:], dirty.bias[90:] = torch.nan, torch.inf
    results = [scored for [scored] in ranks(score, 3, [replace(case, operands=dirty)])]
    assert_truth(case, results)
    assert not whole_gradients(case, results).get("weight", torch.zeros(127))[90:].any(), "padding has a gradient"


@pytest.mark.parametrize("world", [2, 4])
def test_targets_at_both_ends_of_every_shard(ranks, world):
    ends = sorted({column for start, stop in WORLDS[world] for column in (start, stop - 1)})
    target = torch.tensor([*ends, -100, 5])
    run(ranks, world, [make_case(WORLDS[world], rows=len(target), target=target)])


def test_match_under_shards(ranks):
    """Logits rounded on every shard alike: the same bits as unsharded with the same tiles."""
    cases = [make_case(WORLDS[3], options={"match": "bfloat16"}), make_case([(0, 127)], options={"match": "bfloat16"})]
    cases[1] = replace(cases[0], bounds=[(0, 127)])
    sharded = [scored for [scored] in ranks(score, 3, cases[:1])]
    [[alone]] = ranks(score, 1, cases[1:])
    assert_same_bits(sharded)
    assert (sharded[0].logprob - alone.logprob).abs().max() <= 1e-6


def test_the_same_bits_on_every_run(ranks):
    case = make_case(WORLDS[4], options={"memory": 9000})
    for first, second in ranks(score, 4, [case, case]):
        assert_same_bits([first, second])
        assert all(torch.equal(first.gradients[name], second.gradients[name]) for name in NAMES)


def add_to_a_buffer(rank: int, world: int, case: Case) -> tuple[Tensor, Tensor, bool]:
    shard = VocabShard(*case.bounds[rank], dist.group.WORLD)
    buffer = torch.ones(shard.stop - shard.start, case.operands.weight.shape[1])
    returned = score_one(case, rank, shard).gradients["weight"]
    into = score_one(replace(case, options=case.options | {"weight_grad": buffer}), rank, shard)
    return buffer - 1, returned, "weight" in into.gradients


def test_weight_gradient_of_a_shard_into_a_buffer(ranks):
    for added, returned, has_own in ranks(add_to_a_buffer, 3, make_case(WORLDS[3])):
        assert not has_own
        torch.testing.assert_close(added, returned, rtol=1e-5, atol=1e-5)


# Collectives.


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("num_rows", [17, 1, 0])
def test_collectives(ranks, world, num_rows):
    """The same on every rank, also without rows: a rank cannot know that its peers have none."""
    cases = [
        make_case(WORLDS[world], rows=num_rows, options={"entropy": mode, **options}, wanted=wanted)
        for options in ({"hidden_grad": "partial"}, {"hidden_grad": "reduced"}, {"sequence_parallel": True})
        for mode in (None, "grad")
        for wanted in (NAMES, ("hidden",))
    ]
    for results in ranks(score, world, cases):
        assert all(scored.sent == scored.told for scored in results)
        forward, backward = results[0].told
        assert forward == [("all_gather", 4 * 4 * num_rows)]
        assert backward == []


def test_a_frozen_hidden_sends_nothing_in_backward(ranks):
    cases = [
        make_case(WORLDS[2], wanted=("weight", "bias"), options={"hidden_grad": rule})
        for rule in ("reduced", "partial")
    ]
    for by_rank in run(ranks, 2, cases):
        assert all(scored.backward_calls == [] for scored in by_rank)


@pytest.mark.parametrize("world", WORLDS)
def test_no_rows_still_have_gradients(ranks, world):
    rules = ({}, {"hidden_grad": "partial"}, {"sequence_parallel": True})
    cases = [make_case(WORLDS[world], rows=0, options=rule) for rule in rules]
    for case, by_rank in zip(cases, run(ranks, world, cases), strict=True):
        for name, gradient in whole_gradients(case, by_rank).items():
            assert gradient.shape == getattr(case.operands, name).shape
            assert not gradient.any()


# Disagreement between ranks.


def disagree(rank: int, world: int, about: str) -> str:
    shard = VocabShard(rank * 10, (rank + 1) * 10, dist.group.WORLD, check_calls=True)
    odd = rank == 1
    dtype = torch.bfloat16 if odd and about == "dtype" else torch.float32
    width = 9 if odd and about == "a local error" else 10
    hidden, weight = torch.zeros(6, 4, dtype=dtype), torch.zeros(width, 4, dtype=dtype)
    num_rows = 4 if odd and about == "rows" else 5
    options: dict[str, Any] = {}
    if odd:
        hidden.requires_grad_(about == "gradient")
        options = {"entropy": {"entropy": "value"}, "hidden_grad": {"hidden_grad": "partial"}}.get(about, {})
        options |= {"kept": {"kept": ragged([[1]] * 5)}, "vocabulary": {"head": Head(vocab_size=25)}}.get(about, {})
    try:
        out = from_hidden(hidden, weight, (torch.arange(num_rows), torch.arange(num_rows)), shard=shard, **options)
        return f"{float(out.logprob.sum()):.4f}"
    except LogitlessError as error:
        return str(error)


@pytest.mark.parametrize(
    ("about", "text"),
    [
        ("rows", "the number of rows: rank by rank it is [5, 4, 5]."),
        ("dtype", "the dtype of hidden: rank by rank it is ['torch.float32', 'torch.bfloat16', 'torch.float32']."),
        ("entropy", "entropy: rank by rank it is [None, 'value', None]."),
        (
            "kept",
            "the kept ids: rank by rank it is [None, ('[5] 31fa9ad6292cd860', '[5] 31fa9ad6292cd860', 'vocabulary'), ",
        ),
        ("vocabulary", "the vocabulary size: rank by rank it is [30, 25, 30]."),
        ("hidden_grad", "hidden_grad: rank by rank it is "),
        ("gradient", "whether hidden needs a gradient: rank by rank it is [False, True, False]."),
    ],
)
def test_checked_calls_turn_disagreement_into_an_error(ranks, about, text):
    for came in ranks(disagree, 3, about, timeout=20):
        assert came.startswith(f"logprobs: ranks of one vocabulary group disagree about {text}")


def test_checked_calls_stop_together_when_one_rank_cannot_start(ranks):
    local = "logprobs: shard holds columns 10 to 20 (10 of them) but weight has 9 rows."
    elsewhere = f"logprobs: rank 1 of this rank's vocabulary group stopped with: {local}"
    assert ranks(disagree, 3, "a local error", timeout=20) == [elsewhere, local, elsewhere]


def test_checked_calls_that_agree(ranks):
    # Five rows of 30 equal logits: 5 * -log 30.
    assert ranks(disagree, 3, "nothing", timeout=20) == ["-17.0060"] * 3


def wrong_options(rank: int, world: int) -> list[str]:
    shard = VocabShard(rank * 10, (rank + 1) * 10, dist.group.WORLD)
    texts = []
    for rows, options in (
        (torch.arange(6), {"sequence_parallel": True, "hidden_grad": "partial"}),
        (torch.arange(6), {"sequence_parallel": True}),
        (torch.arange(5), {}),
    ):
        try:
            from_hidden(torch.zeros(6, 4), torch.zeros(10, 4), rows, shard=shard, **options)
            texts.append("no error")
        except LogitlessError as error:
            texts.append(str(error))
    return texts


def test_options_that_do_not_go_together(ranks):
    for both, short, plainly in ranks(wrong_options, 2, timeout=20):
        assert both.startswith("logprobs: sequence_parallel=True gathers hidden here, so its gradient is summed")
        assert short == "logprobs: rows were made for 6 tokens but hidden holds 12."
        assert plainly.startswith("logprobs: rows were made for 5 tokens but hidden holds 6. Row t predicts")


# Context parallelism by tensor parallelism.

LENGTHS, RESPONSES = [12, 4, 8], [7, 1, 6]


def score_on_a_mesh(rank: int, world: int, operands: Operands, ids: list[list[int]], weights: list[Tensor], sp: bool):
    """Two sequence ranks by two vocabulary ranks: whole responses, and this rank's gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    cp, tp = mesh["cp"].get_local_rank(), mesh["tp"].get_local_rank()
    rows = Rows.packed(ids, RESPONSES, cp=Zigzag(cp, 2))
    start, stop = [(0, 20), (20, 63)][tp]
    hidden = operands.hidden[held(cp)]
    if sp:
        hidden = hidden.chunk(2)[tp]
    leaf = Operands(hidden, operands.weight[start:stop], operands.bias[start:stop]).leaves()
    shard = VocabShard(start, stop, mesh["tp"])
    options = {"bias": leaf.bias, "entropy": "grad", "shard": shard, "sequence_parallel": sp}
    out = from_hidden(leaf.hidden, leaf.weight, rows, **options)
    (rows.from_responses(weights) * (out.logprob + 0.3 * out.entropy)).sum().backward()
    whole = rows.gather((out.logprob.detach(), out.entropy.detach()), mesh["cp"], grad=None)
    return cp, tp, whole, [x.grad for x in leaf]


def held(cp: int) -> list[int]:
    """Tokens of the pack on a context-parallel rank of two: of the four chunks of each sample, number cp and 3 - cp."""
    places, start = [], 0
    for length in LENGTHS:
        chunk = length // 4
        for number in (cp, 3 - cp):
            places += range(start + number * chunk, start + (number + 1) * chunk)
        start += length
    return places


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_context_by_tensor_parallel(ranks, sequence_parallel):
    operands = draw(24, 63, 17, torch.float64)
    ids = [torch.randint(63, (n,)).tolist() for n in LENGTHS]
    weights = [torch.randn(n, dtype=torch.float64) for n in RESPONSES]
    leaf, index, target, start = operands.leaves(), [], [], 0
    for tokens, length, response in zip(ids, LENGTHS, RESPONSES, strict=True):
        index += range(start + length - response - 1, start + length - 1)
        target += tokens[length - response :]
        start += length
    exact = truth(leaf.logits(), index, target)
    (torch.cat(weights) * (exact.logprob + 0.3 * exact.entropy)).sum().backward()
    d_hidden, d_weight, d_bias = (torch.zeros_like(x) for x in operands)
    results = ranks(score_on_a_mesh, 4, operands, ids, weights, sequence_parallel)
    for cp, tp, whole, gradients in results:
        for mine, right in zip(whole, (exact.logprob, exact.entropy), strict=True):
            torch.testing.assert_close(torch.cat(mine), right.detach(), rtol=1e-12, atol=1e-12)
        part = slice(0, 20) if tp == 0 else slice(20, 63)
        # Over the sequence group losses are parts: gradients of the head add up.
        d_weight[part] += gradients[1]
        d_bias[part] += gradients[2]
        tokens = torch.tensor(held(cp))
        if sequence_parallel:
            d_hidden[tokens.chunk(2)[tp]] = gradients[0]
        elif tp == 0:
            d_hidden[tokens] = gradients[0]
        else:
            assert torch.equal(d_hidden[tokens], gradients[0])
    for mine, x in zip((d_hidden, d_weight, d_bias), leaf, strict=True):
        assert (mine - x.grad).norm() <= 1e-12 * x.grad.norm()
