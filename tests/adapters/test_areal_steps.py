"""AReaL's FSDP engine: its own pass over micro-batches with a PPO loss, whose logits are not computed."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts import checkout, load
from patched import with_deferred_logits
from shared.host_steps import fewer_bytes, notices, same_steps, same_steps_within
from tiny import qwen3

import logitless

pytestmark = pytest.mark.skipif(checkout("areal") is None, reason="LOGITLESS_HOSTS names no checkout of AReaL")

ENGINE = "areal.engine.fsdp_engine"
HALF, S = torch.bfloat16, 23


@pytest.fixture(scope="module", autouse=True)
def areal():
    # Its logger stands on a package that is stood in for.
    logging.disable(logging.CRITICAL)
    load("areal", ENGINE)
    yield
    logging.disable(logging.NOTSET)


def ppo(dtype: torch.dtype = torch.float32, vocab: int = 253, length: int = S, weight: float = 1.0) -> Any:
    """A policy, and an update of ``FSDPEngine`` over two micro-batches; the loss reads all that AReaL's losses may."""
    model = qwen3(vocab).to(HALF).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    engine = object.__new__(sys.modules[ENGINE].FSDPEngine)
    vars(engine).update(
        model=model,
        config=SimpleNamespace(is_critic=False, temperature=0.7, logprobs_chunk_size=7),
        parallel_helper=SimpleNamespace(sp_size=1, tp_size=1, tp_group=None),
        enable_tree_training=False,
        seen=[],
    )

    def prepared(n: int) -> Any:
        ids = torch.randint(3, vocab, (1, length), generator=torch.Generator().manual_seed(n))
        old = torch.randn(length, generator=torch.Generator().manual_seed(n))
        fields = {"trie_node": None, "pad_length": 2, "ulysses_pad_size": 0, "model_inputs": {"input_ids": ids}}
        ctx = SimpleNamespace(**fields, mb_input={"old": old[:-2] - 5}, to_dict=lambda: vars(ctx))
        return {"input_ids": ids, "use_cache": False}, ctx

    engine._prepare_mb_inputs = lambda item: prepared(item)
    engine.device = torch.device("cpu")

    def loss_fn(logprobs, entropy, inputs, vocab_min_logits, vocab_max_logits):
        ratio = (logprobs - inputs["old"]).clamp(-3, 3).exp()
        engine.seen.append(torch.stack([vocab_min_logits.mean(), vocab_max_logits.mean()]).tolist())
        return -(ratio * inputs["old"].sin()).mean() - 0.02 * entropy.mean()

    losses = []

    def process(logits: Any, ctx: dict[str, Any]) -> Any:
        context = SimpleNamespace(**ctx)
        weights = (lambda _: torch.tensor(weight)), torch.tensor(2.0)
        losses.append(engine._compute_logprobs_and_loss(logits, context, loss_fn, *weights))
        return losses[-1]

    def step(n: int) -> Any:
        losses.clear()
        engine.forward_backward_batch([2 * n, 2 * n + 1], process)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            scored: list[Any] = []
            engine.forward_backward_batch(
                [99], lambda x, ctx: scored.append(engine._compute_forward_result(x, SimpleNamespace(**ctx))), True
            )
        seen = torch.tensor(engine.seen[-1]).sum() if engine.seen else 0.0
        return sum(x.detach() for x in losses) + 1e-3 * seen + 1e-3 * scored[0].mean() + n * (weight == 0)

    return model, step


def test_ppo():
    same_steps("areal", ppo)


def test_ppo_in_half_precision():
    same_steps("areal", lambda: ppo(HALF), exact=lambda: ppo(torch.float64))


def test_ppo_notices_a_wrong_number():
    notices("areal", ppo)


def test_ppo_holds_no_logits():
    vocab, length = 8192, 120
    fewer_bytes("areal", lambda: ppo(vocab=vocab, length=length), 2 * 4 * length * vocab)


def test_a_rank_without_tokens():
    """The engine multiplies the mean of all logits by 0."""
    model, step = ppo(weight=0.0)
    logitless.install("areal")
    step(0)
    assert logitless.status().hosts[0].made == {}
    assert "forward" in vars(model.lm_head)


def test_a_critic_is_left_alone():
    model = qwen3(253)
    engine = object.__new__(sys.modules[ENGINE].FSDPEngine)
    vars(engine).update(model=model, config=SimpleNamespace(is_critic=True))
    logitless.install("areal")
    engine.forward_backward_batch([], None)
    assert "forward" not in vars(model.lm_head)


def test_the_patch_of_the_page():
    same_steps_within(lambda: with_deferred_logits("areal"), ppo)
