"""AReaL's Megatron engine behind a real Megatron-Core model, with its own head and with logits that are not computed.

Three times ``forward_backward_batch`` with the engine's own pass over logits: it copies those of each sequence without
padding, and logs their smallest, largest, mean and norm over the columns of each rank. Needs AReaL's sources
(``LOGITLESS_HOSTS``, see hosts.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts import checkout, load, put_first
from ranks import close_ranks
from shared.megatron import megatron
from shared.megatron_groups import TIMEOUT
from shared.megatron_step import HOW, Descent, Largest, Outcome, V, check_steps, installed, model_of, on_cpu

pytestmark = [
    pytest.mark.skipif(
        not find_spec("megatron") or not find_spec("megatron.core"), reason="megatron-core is not installed"
    ),
    pytest.mark.skipif(not put_first("areal"), reason="LOGITLESS_HOSTS names no checkout of AReaL"),
]

ENDS, OWN = (0, 16, 40), (0, 13, 36)
"""Where the sequences of a pack end, each of them padded; and without."""

HEADS = "areal.models.mcore.vocab_parallel_head"
DEFERRED = "logits: not computed (deferred); 1 models so far"


@pytest.fixture(scope="module", autouse=True)
def fresh_workers() -> Iterator[None]:
    yield
    close_ranks()


class Batches(list[Any]):
    max_seqlen = 24


def batches() -> Batches:
    found = Batches()
    for n in range(2):
        made = torch.Generator().manual_seed(n)
        ids, ends = torch.randint(V, (ENDS[-1],), generator=made), torch.tensor(ENDS, dtype=torch.int32)
        places = torch.cat([torch.arange(b - a) for a, b in ((0, 16), (16, 40))])
        padded = {"input_ids": ids, "cu_seqlens": ends, "max_seqlen": 24, "position_ids": places[None]}
        kept = torch.cat([torch.arange(a, a + c - b) for a, b, c in zip(ENDS[:-1], OWN[:-1], OWN[1:], strict=True)])
        weight = {"input_ids": ids[kept], "old": torch.randn(OWN[-1], generator=made)}
        item = {"padded_mb": padded, "orig_mb": weight, "padding_length": 0, "old_cu_seqlens": torch.tensor(OWN)}
        found.append(SimpleNamespace(**item, padded_to_length=None))
    return found


def loss_of(logprobs: Any, entropy: Any, inputs: Any, **seen: Any) -> Any:
    ratio = (logprobs - logprobs.detach() + 0.1 * inputs["old"]).exp()
    logged = sum(x.mean() for x in seen.values() if x is not None)
    return -(ratio * inputs["old"]).mean() - 0.05 * entropy.mean() + 1e-3 * logged


def run(rank: int, world: int, how: str, tp: int, own_head: bool = False) -> Outcome:
    logging.disable(logging.CRITICAL)
    (module,) = load("areal", "areal.engine.megatron_engine")
    with megatron(tp), on_cpu(), installed("areal", how) as told:
        chunks = [model_of(tp)]
        if own_head:
            (heads,) = load("areal", HEADS)
            heads.replace_output_layer_with_areal_lm_head(chunks[0].module, fp32_output=True)
        engine, optimizer = object.__new__(module.MegatronEngine), Descent(chunks)
        off = {"enable_chunked_logits": own_head, "entropy_requires_grad": True, "lm_head_loss_chunk_size": 0}
        vars(engine).update(
            model=torch.nn.ModuleList(chunks),
            config=SimpleNamespace(is_critic=False, temperature=0.8, logprobs_chunk_size=8),
            mcore_config=SimpleNamespace(**off),
            enable_tree_training=False,
            is_vision_model=False,
            use_padded_seq=False,
            use_model_packed_seq=False,
            dtype=torch.float32,
        )
        engine._ensure_ready = lambda: None
        losses, largest = [], Largest(V // tp)
        for _ in range(3):
            chunks[0].zero_grad_buffer()
            found: list[Any] = []

            def process(output: Any, inputs: Any, found: list[Any] = found) -> Any:
                weights = (lambda _: torch.tensor(1.0)), torch.tensor(2.0)
                found.append(engine._compute_logprobs_and_loss(output, inputs, loss_of, *weights, loss_multiplier=2))
                return found[-1]

            with largest:
                engine.forward_backward_batch(batches(), process)
            optimizer.step()
            losses.append(float(sum(x.detach() for x in found)))
    return Outcome(losses, [], optimizer.masters, largest.elements, **told)


@pytest.mark.parametrize("tp", [1, 2])
def test_three_steps_of_areal(ranks, tp):
    before, ours, wrong = (ranks(run, tp, how, tp, timeout=TIMEOUT) for how in HOW)
    for a, b, c in zip(before, ours, wrong, strict=True):
        check_steps(a, b, torch.float32, ENDS[-1] * V // tp)
        with pytest.raises(AssertionError, match=r"(losses|scores|parameters): "):
            check_steps(a, c, torch.float32, ENDS[-1] * V // tp)


def test_a_head_of_areals_own_computes(ranks):
    """``enable_chunked_logits`` makes it one whose product AReaL rounds in its own way."""
    if not (checkout("areal") / f"{HEADS.replace('.', '/')}.py").exists():
        pytest.skip("this AReaL has no head of its own")
    (before,), (ours,) = (ranks(run, 1, how, 1, True, timeout=TIMEOUT) for how in ("before", "deferred"))
    assert ours.deferred == "logits: not computed (deferred); 0 models so far"
    check_steps(before, ours._replace(largest=0, deferred=DEFERRED), torch.float32, ENDS[-1] * V)
