"""One number on both sides: what the plug-ins put in an engine's place, and a trainer's head, under 1, 2 and 4 ranks.

The functions are called as an engine calls them, without the engine; test_vllm.py and test_sglang.py run its own code.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import logitless as ll
from logitless import LogitlessError
from logitless.adapters.host import PassOn
from logitless.adapters.replacing import held
from logitless.engines import PARTS, VARIABLE, asked, plug_into_vllm
from logitless.engines.canonical import all_logprobs, normaliser, product, token_logprobs
from logitless.engines.contract import TRAINER, told
from logitless.engines.sglang import _compute_lm_head
from logitless.engines.vllm import (
    SCORING,
    _apply_head,
    _not_deferred,
    compute_logprobs,
    compute_token_logprobs,
    compute_topk_scores,
    forward,
)
from logitless.objectives.mismatch import mismatch

T, D, V = 21, 48, 1000
PADDED = 1024


def operands() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(T, D).bfloat16(), (3 * torch.randn(V, D) / D**0.5).bfloat16()
    return hidden, weight, torch.randint(V, (T, 4))


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def engine(hidden: Tensor, weight: Tensor) -> Tensor:
    """A shard's logits by what stands in for vLLM's head."""
    head = SimpleNamespace(weight=weight, quant_method=type("UnquantizedEmbeddingMethod", (), {})())
    apply: Any = _apply_head.make(pytest.fail, {})
    return apply(SimpleNamespace(head_dtype=torch.float32), head, hidden, None)


def both_sides(rank: int, world: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the engine, whose ranks gather their logits, and of the trainer, whose ranks do not."""
    hidden, weight, ids = operands()
    width = PADDED // world
    padded = torch.cat([weight, torch.zeros(PADDED - V, D, dtype=weight.dtype)])
    part = engine(hidden, padded[rank * width : (rank + 1) * width])
    parts = [torch.empty_like(part) for _ in range(world)]
    dist.all_gather(parts, part)
    logits = torch.cat(parts, 1)[:, :V]
    shard = ll.VocabShard(rank * width, min((rank + 1) * width, V), dist.group.WORLD)
    trained = weight[shard.start : shard.stop].requires_grad_()
    out = ll.logprobs(ll.Logits(hidden, trained, shard=shard, bits="canonical"), ids[:, 0], ids=ids)
    assert out.ids_logprobs is not None
    return compute_token_logprobs.make(pytest.fail, {})(logits, ids), out.ids_logprobs.detach(), out.logprob.detach()


@pytest.mark.parametrize("world", [2, 4])
def test_every_tensor_parallel_degree(ranks, world: int):
    hidden, weight, ids = operands()
    one = ll.logprobs(ll.Logits(hidden, weight, bits="canonical"), ids[:, 0], ids=ids)
    rows = ll.Rows.packed([ids[:, 0]], [T - 1])
    for theirs, ours, logprob in ranks(both_sides, world):
        assert same(theirs, ours)
        assert same(theirs, one.ids_logprobs)
        report = mismatch(logprob[rows.index], theirs[rows.index, 0], rows)
        assert (report.kl_k1, report.kl_k3, report.largest, report.effective_tokens) == (0.0, 0.0, 0.0, 1.0)


class LogitsProcessor(SimpleNamespace):
    """Of vLLM, as far as the part ``prompt`` asks it."""


def prompts(rank: int, world: int, columns: int) -> Any:
    """Log-probs, most likely ids and ranks of prompts, whose heads are in shards of so many columns."""
    hidden, weight, ids = operands()
    start, stop = rank * columns, min((rank + 1) * columns, V)
    padded = torch.nn.functional.pad(weight[start:stop], (0, 0, 0, columns - (stop - start)), value=100.0)
    indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=stop)
    method = type("UnquantizedEmbeddingMethod", (), {})()
    head = SimpleNamespace(weight=padded, quant_method=method, tp_size=world, shard_indices=indices)
    processor = LogitsProcessor(
        head_dtype=torch.float32, logits_as_input=False, soft_cap=None, scale=0.5, org_vocab_size=V
    )
    group = SimpleNamespace(device_group=dist.group.WORLD)
    state, outputs = SimpleNamespace(get_tp_group=lambda: group), SimpleNamespace(LogprobsTensors=dict)
    there = {"vllm.distributed.parallel_state": state, "vllm.v1.outputs": outputs}
    with patch.dict(sys.modules, there), torch.inference_mode(), held(SCORING, True):
        logits = forward.make(pytest.fail, {})(processor, head, hidden)
        if isinstance(logits, PassOn):
            return logits.why
        found = compute_topk_scores.make(pytest.fail, {})(logits, 5, ids[:, 0])
        return {**found, "given": token_logprobs(logits, ids)}


@pytest.mark.parametrize("world", [2, 4])
def test_prompts_under_every_tensor_parallel_degree(ranks, world: int):
    hidden, weight, ids = operands()
    z = 0.5 * product(hidden, weight, None, torch.empty(T, V))
    one = ll.logprobs(ll.Logits.given(z, bits="canonical"), ids[:, 0], ids=ids, top_k=5)
    assert one.top_k_logprobs is not None
    for found in ranks(prompts, world, PADDED // world):
        assert same(found["given"], one.ids_logprobs)
        assert same(found["logprobs"], torch.cat([one.logprob[:, None], one.top_k_logprobs], 1))
        assert torch.equal(found["logprob_token_ids"][:, 1:], one.top_k_ids)
        assert torch.equal(found["selected_token_ranks"], (z >= z.gather(1, ids[:, :1])).sum(1))


def test_shards_within_a_block_are_left_to_vllm(ranks):
    """On all ranks, though the first has nothing against it: vLLM pads vocabularies to 64 columns."""
    assert ranks(prompts, 2, 576) == ["shards of 576 columns begin within a block of 128"] * 2


@pytest.mark.parametrize(
    ("weight", "hidden", "logits", "left"),
    [
        (torch.bfloat16, torch.bfloat16, None, False),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, False),
        (torch.bfloat16, torch.bfloat16, torch.float32, False),
        (torch.float32, torch.bfloat16, torch.float32, True),
        (torch.bfloat16, torch.float32, torch.float32, True),
        (torch.bfloat16, torch.bfloat16, torch.float16, True),
    ],
    ids=str,
)
def test_heads_of_two_dtypes_are_left_to_vllm(weight: Any, hidden: Any, logits: Any, left: bool):
    method = type("UnquantizedEmbeddingMethod", (), {})()
    head = SimpleNamespace(weight=torch.zeros(V, D, dtype=weight), quant_method=method, tp_size=1)
    processor = type("LogitsProcessor", (SimpleNamespace,), {})(logits_as_input=False, head_dtype=logits)
    why = _not_deferred(processor, head, torch.zeros(T, D, dtype=hidden))
    assert why == ("hidden states and head have two dtypes" if left else None)


@pytest.mark.parametrize("rows", [slice(None), slice(4, 5), slice(2, 19)])
def test_one_rank(rows: slice):
    """Every batch; the head of SGLang; all columns as samplers want them; and a head without ours is another."""
    hidden, weight, ids = operands()
    right = ll.logprobs(ll.Logits(hidden, weight, bits="canonical"), ids[:, 0], ids=ids).ids_logprobs
    assert right is not None
    z = engine(hidden[rows], weight)
    assert same(compute_token_logprobs.make(pytest.fail, {})(z, ids[rows].int()), right[rows])
    assert same(compute_logprobs.make(pytest.fail, {})(z).gather(1, ids[rows]), right[rows])
    other = product(hidden[rows], weight, None, torch.empty(len(z), V))
    assert same(z, other)
    strided = torch.zeros(len(z), 2 * V)[:, ::2].copy_(z)
    assert same(token_logprobs(strided, ids[rows]), right[rows])
    if len(z) == T:
        assert not same(z.log_softmax(-1).gather(1, ids), right)


def test_the_head_of_sglang():
    head: Any = _compute_lm_head.make(pytest.fail, {})
    hidden, weight, _ = operands()
    processor = SimpleNamespace(use_fp32_lm_head=False, use_fp32_lm_head_output=False)
    assert head(processor, hidden, SimpleNamespace(weight=weight)).why == "the head is not float32"


@pytest.mark.parametrize("temperature", [0.3, 0.6, 0.7, 0.9, 1.0, 1.1, 1.3, 2.0])
def test_temperatures_as_numbers_and_as_an_engine_keeps_them(temperature: float):
    """A trainer's number and an engine's float32 tensor are one factor of the logits."""
    hidden, weight, ids = operands()
    logits = ll.Logits(hidden, weight, bits="canonical")
    right = ll.logprobs(logits, ids[:, 0], head=ll.Head(temperature=temperature)).logprob
    z, kept = engine(hidden, weight), torch.full((T,), temperature)
    assert same(all_logprobs(z, kept).gather(1, ids[:, :1])[:, 0], right)
    assert same(all_logprobs(z, temperature).gather(1, ids[:, :1])[:, 0], right)
    assert same(ll.logprobs(logits, ids[:, 0], head=ll.Head(temperature=kept)).logprob, right)


def test_what_is_no_number():
    """Masked columns, rows of nothing, and NaN, as engines have them."""
    z = torch.randn(4, V)
    z[0, 5:], z[1], z[2, 3] = -torch.inf, -torch.inf, torch.nan
    found = token_logprobs(z, torch.tensor([[0, 7], [0, 7], [0, 7], [0, 7]]))
    assert found[0, 1] == -torch.inf
    assert found[0, 0].isfinite()
    assert found[1:3].isnan().all()
    assert found[3].isfinite().all()
    assert len(token_logprobs(torch.empty(0, V), torch.empty(0, 2, dtype=torch.int64))) == 0
    with pytest.raises(LogitlessError, match="logits must be a matrix of logits"):
        normaliser(torch.zeros(3))


def test_what_the_environment_asks_for(monkeypatch):
    assert asked("vllm") == ()
    plug_into_vllm()
    monkeypatch.setenv(VARIABLE, " head ,logprobs,")
    assert asked("vllm") == asked("sglang") == ("logprobs", "head")
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(
        LogitlessError, match=r"there is no part '1' for vllm\. Known: logprobs, head, prompt, contract"
    ):
        plug_into_vllm()
    assert set(PARTS) == {"sglang", "vllm"}
    assert not ll.status().hosts


def test_an_engine_that_is_not_here(monkeypatch):
    monkeypatch.setenv(VARIABLE, "logprobs")
    monkeypatch.setattr("logitless.adapters.patching.is_there", lambda _: False)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(LogitlessError, match="the package vllm is not installed"):
        plug_into_vllm()


@pytest.mark.parametrize("text", ["", "7", "[]", '{"temprature": 1.0}', '{"match": "float32"}', '{"kept": 1}'])
def test_a_contract_that_is_none(monkeypatch, text: str):
    monkeypatch.setenv(TRAINER, text)
    with pytest.raises(LogitlessError, match="LOGITLESS_TRAINER must be a JSON object"):
        told()


def test_a_contract(monkeypatch):
    monkeypatch.setenv(TRAINER, '{"temperature": 0.7, "softcap": null, "match": "float16", "kept": true}')
    found = told()
    assert (found.head.temperature, found.head.softcap, found.match, found.kept) == (0.7, None, "float16", True)
    monkeypatch.setenv(TRAINER, '{"temperature": 0}')
    with pytest.raises(LogitlessError, match="temperature must be a positive finite number"):
        told()
