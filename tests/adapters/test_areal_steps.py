"""AReaL's FSDP engine: its own pass over micro-batches with a PPO loss, whose logits are not computed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts import checkout, load
from patched import with_deferred_logits
from shared.host_steps import OnRank, fewer_bytes, notices, on_rank, same_on_ranks, same_steps, same_steps_within
from shared.megatron_groups import TIMEOUT
from tiny import qwen3
from torch.distributed.device_mesh import init_device_mesh

import logitless
from logitless.operands.stands import Stands

pytestmark = pytest.mark.skipif(checkout("areal") is None, reason="LOGITLESS_HOSTS names no checkout of AReaL")

ENGINE, PARALLEL = "areal.engine.fsdp_engine", "areal.engine.fsdp_utils.parallel"
HALF, S = torch.bfloat16, 23


@contextmanager
def imported():
    # Its logger stands on a package that is stood in for.
    logging.disable(logging.CRITICAL)
    load("areal", ENGINE, PARALLEL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module", autouse=True)
def areal():
    with imported():
        yield


def ppo(
    dtype: torch.dtype = torch.float32,
    vocab: int = 253,
    length: int = S,
    weight: float = 1.0,
    wrap: Callable[[Any], Any] = lambda model: model,
    tp_group: Any = None,
) -> Any:
    """A policy, and an update of ``FSDPEngine`` over two micro-batches; the loss reads all that AReaL's losses may."""
    model = wrap(qwen3(vocab, num_key_value_heads=2).to(HALF).to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    engine = object.__new__(sys.modules[ENGINE].FSDPEngine)
    vars(engine).update(
        model=model,
        config=SimpleNamespace(is_critic=False, temperature=0.7, logprobs_chunk_size=7),
        parallel_helper=SimpleNamespace(sp_size=1, tp_size=tp_group.size() if tp_group else 1, tp_group=tp_group),
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


def test_ppo_logs_the_logits_of_one_product(monkeypatch):
    """The smallest and the largest logit of each token, of two micro-batches."""
    rows, plain = [], Stands.computed
    monkeypatch.setattr(Stands, "computed", lambda x: rows.append(x.hidden.shape[:-1].numel()) or plain(x))
    logitless.install("areal")
    _, step = ppo()
    step(0)
    assert sum(rows) == 2 * S


def test_ppo_in_half_precision():
    same_steps("areal", lambda: ppo(HALF), exact=lambda: ppo(torch.float64))


def test_ppo_notices_a_wrong_number():
    notices("areal", ppo)


def test_ppo_holds_no_logits():
    vocab, length = 8192, 120
    fewer_bytes("areal", lambda: ppo(vocab=vocab, length=length), 2 * 4 * length * vocab)


def parallel(model: Any, mesh: Any) -> Any:
    """As the engine does, by its own functions."""
    tp = mesh["tp"].size()
    helper = SimpleNamespace(tp_enabled=tp > 1, tp_size=tp)
    config = SimpleNamespace(dtype="float32", grad_reduce_dtype="float32")
    sys.modules[PARALLEL].parallelize_model(model, config, model.config, mesh, helper)
    return model


def steps_on_rank(rank: int, world: int, tp: int) -> OnRank:
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp_sp", "tp"))
    group = mesh["tp"].get_group() if tp > 1 else None
    with imported():
        # Ranks of a tensor-parallel group have the same tokens.
        build = partial(ppo, vocab=254, length=24, wrap=partial(parallel, mesh=mesh), tp_group=group)
        return on_rank("areal", rank // tp, build)


@pytest.mark.parametrize("tp", [1, 2])
def test_ppo_on_two_ranks(ranks, tp):
    same_on_ranks(ranks(steps_on_rank, 2, tp, timeout=TIMEOUT), distinct=tp == 1)


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
