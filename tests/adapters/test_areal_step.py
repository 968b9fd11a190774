"""AReaL's Megatron engine behind a real Megatron-Core model: what it reads of logits that are not computed.

It copies the logits of each sequence without padding, and logs their smallest, largest, mean and norm over the columns
of each rank. So its models are deferred only if ``install`` is told to; the numbers are the same, the place is named.
Needs AReaL's sources (``LOGITLESS_HOSTS``, see hosts.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts import load, put_first
from ranks import close_ranks
from shared.megatron import megatron
from shared.megatron_groups import TIMEOUT
from shared.megatron_step import Descent, Largest, Outcome, V, check_steps, installed, model_of, on_cpu

pytestmark = [
    pytest.mark.skipif(
        not find_spec("megatron") or not find_spec("megatron.core"), reason="megatron-core is not installed"
    ),
    pytest.mark.skipif(not put_first("areal"), reason="LOGITLESS_HOSTS names no checkout of AReaL"),
]

ENDS = (0, 16, 40)


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
        weight = {"input_ids": ids, "old": torch.randn(ENDS[-1], generator=made)}
        item = {"padded_mb": padded, "orig_mb": weight, "padding_length": 0, "old_cu_seqlens": ends}
        found.append(SimpleNamespace(**item, padded_to_length=None))
    return found


def loss_of(logprobs: Any, entropy: Any, inputs: Any, **seen: Any) -> Any:
    ratio = (logprobs - logprobs.detach() + 0.1 * inputs["old"]).exp()
    logged = sum(x.mean() for x in seen.values() if x is not None)
    return -(ratio * inputs["old"]).mean() - 0.05 * entropy.mean() + 1e-3 * logged


def run(rank: int, world: int, how: str, tp: int) -> Outcome:
    logging.disable(logging.CRITICAL)
    (module,) = load("areal", "areal.engine.megatron_engine")
    asked = {} if how == "default" else {"logits": "deferred"}
    with megatron(tp), on_cpu(), installed("areal", how, **asked) as told:
        chunks = [model_of(tp)]
        engine, optimizer = object.__new__(module.MegatronEngine), Descent(chunks)
        off = {"enable_chunked_logits": False, "entropy_requires_grad": True, "lm_head_loss_chunk_size": 0}
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
def test_what_the_engine_reads_is_named(ranks, tp):
    before, ours = (ranks(run, tp, how, tp, timeout=TIMEOUT) for how in ("before", "deferred"))
    for a, b in zip(before, ours, strict=True):
        (place,) = b.made
        assert place.rpartition(":")[0].endswith("areal/utils/data.py")
        # The copy is as large as the logits.
        assert b.largest >= a.largest
        check_steps(a, b._replace(largest=0, made={}), torch.float32, 40 * V // tp)


def test_its_models_are_left_alone_unless_asked(ranks):
    for found in ranks(run, 2, "default", 2, timeout=TIMEOUT):
        assert found.made == {}
        assert "1 models" not in found.deferred
