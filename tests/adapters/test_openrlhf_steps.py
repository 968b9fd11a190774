"""OpenRLHF's own PPO step with a reference model, whose logits are not computed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts import load
from patched import with_deferred_logits
from ranks import close_ranks
from shared.deepspeed import engine_of, needs_deepspeed
from shared.host_steps import OnRank, fewer_bytes, notices, on_rank, same_on_ranks, same_steps, same_steps_within
from shared.megatron_groups import TIMEOUT
from tiny import qwen3

import logitless

PPO = "openrlhf.trainer.ray.ppo_actor"
B, S, A = 3, 11, 5
HALF = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def openrlhf():
    return load("openrlhf", "openrlhf.models.actor", PPO)


@pytest.fixture(autouse=True)
def eager():
    with torch.compiler.set_stance("force_eager"):
        yield


class Strategy:
    """Backward and optimizer of one process without DeepSpeed, or of DeepSpeed's engine as OpenRLHF's own has it."""

    ring_attn_group = None

    def __init__(self, args: Any) -> None:
        self.args = args

    def backward(self, loss, model, optimizer):
        self.loss = loss.detach()
        if optimizer is None:
            model.model.backward(loss)
        else:
            loss.backward()

    def optimizer_step(self, optimizer, model, scheduler, name="model"):
        if optimizer is None:
            model.model.step()
        else:
            optimizer.step()
            optimizer.zero_grad()

    def get_grad_norm(self, model):
        return 0.0


def actor_of(model: Any) -> Any:
    (module,) = load("openrlhf", "openrlhf.models.actor")
    # Before 0.11.2 torch refuses to train the entropy at another temperature: the logits were changed since.
    late = "temperature=self.temperature" in inspect.getsource(module.Actor.forward)
    actor = module.Actor(model, temperature=1.0 if late else 0.7)
    actor.packing_samples = False
    return actor


def settings(**more: Any) -> Any:
    kl = {"use_loss": True, "init_coef": 0.1, "estimator": "k3", "unbiased_gradient": False}
    correction = {f"is_correction_{x}": None for x in ("level", "mode", "gating", "threshold")}
    actor = {"entropy_coef": 0.02, "aux_loss_coef": 0.0, "eps_clip_low_high": (0.2, 0.2), "dual_clip": None}
    actor |= {"loss_agg_mode": "token-mean", "policy_loss_type": "ppo"}
    return SimpleNamespace(
        train=SimpleNamespace(dynamic_batch_enable=False, max_epochs=1, colocate_all=False, async_enable=False),
        actor=SimpleNamespace(**actor | more),
        algo=SimpleNamespace(kl=SimpleNamespace(**kl), advantage=SimpleNamespace(**correction)),
        ds=SimpleNamespace(packing_samples=False),
        vllm=SimpleNamespace(),
    )


def ppo(
    dtype: torch.dtype = torch.float32,
    vocab: int = 253,
    length: int = S,
    rate: float = 0.5,
    engine: Callable[[Any], Any] | None = None,
) -> Any:
    """A policy and a step of ``ActorPPOTrainer.training_step``, with log-probs of a reference model."""
    ppo_actor, experience = load("openrlhf", PPO, "openrlhf.trainer.ppo_utils.experience")
    actor, reference = (actor_of(qwen3(vocab).to(HALF).to(dtype)) for _ in range(2))
    optimizer = None
    if engine is None:
        optimizer = torch.optim.SGD(actor.parameters(), lr=rate)
    else:
        actor.model, reference.model = engine(actor.model), engine(reference.model)
    trainer = make_trainer(ppo_actor, settings(), actor, optimizer)

    def step(n: int) -> Any:
        draw = torch.Generator().manual_seed(n)
        tokens = torch.randint(2, vocab, (B, length), generator=draw)
        mask, actions = torch.ones(B, length, dtype=torch.int64), torch.ones(B, A, dtype=torch.int64)
        actions[0, -2:] = 0
        with torch.no_grad():
            base = reference(tokens, actions, mask)
        noise = 0.1 * torch.randn(B, A, generator=draw)
        batch = experience.Experience(
            sequences=tokens,
            attention_mask=mask,
            action_mask=actions,
            action_log_probs=base + noise,
            base_action_log_probs=base,
            advantages=torch.randn(B, A, generator=draw),
            info={},
        )
        ppo_actor.ActorPPOTrainer.training_step(trainer, batch, 0.1, n)
        return trainer.strategy.loss

    return actor, step


def make_trainer(module: Any, args: Any, actor: Any, optimizer: Any) -> Any:
    """The trainer's own fields, without the cluster that its constructor asks for."""
    loss = module.PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.2)
    return SimpleNamespace(
        strategy=Strategy(args),
        args=args,
        actor=actor,
        ema_model=None,
        actor_optim=optimizer,
        actor_scheduler=SimpleNamespace(get_last_lr=lambda: [0.1]),
        actor_loss_fn=loss,
        aux_loss=False,
        replay_buffer=None,
    )


def test_ppo():
    # The policy and the reference.
    same_steps("openrlhf", ppo, models=2)


def test_ppo_in_half_precision():
    same_steps("openrlhf", lambda: ppo(HALF), models=2, exact=lambda: ppo(torch.float64))


def test_ppo_notices_a_wrong_number():
    notices("openrlhf", ppo, models=2)


def test_ppo_holds_no_logits():
    vocab = 8192
    fewer_bytes("openrlhf", lambda: ppo(vocab=vocab, length=64), 3 * 4 * B * 64 * vocab)


def in_deepspeed(model: Any, rank: int, world: int, stage: int) -> Any:
    """As OpenRLHF's strategy does."""
    import transformers.integrations.deepspeed  # noqa: F401

    return engine_of(rank, world, model, stage)


def steps_on_rank(rank: int, world: int, stages: tuple[int, ...]) -> list[OnRank]:
    """All in one job: DeepSpeed keeps the group that it saw first."""
    load("openrlhf", "openrlhf.models.actor", PPO)
    with torch.compiler.set_stance("force_eager"):
        engines = (partial(in_deepspeed, rank=rank, world=world, stage=stage) for stage in stages)
        return [on_rank("openrlhf", rank, partial(ppo, engine=engine)) for engine in engines]


@needs_deepspeed
def test_ppo_on_two_ranks(ranks):
    close_ranks()
    found = ranks(steps_on_rank, 2, (2, 3), timeout=TIMEOUT)
    close_ranks()
    for outcomes in zip(*found, strict=True):
        same_on_ranks(list(outcomes), models=2)


def test_the_host_may_keep_its_logits():
    actor, step = ppo()
    logitless.install("openrlhf", logits="host")
    step(0)
    assert logitless.status().hosts[0].logits == ("logits: computed by the host's own head",)
    assert "forward" not in vars(actor.model.lm_head)


def test_the_patch_of_the_page():
    same_steps_within(lambda: with_deferred_logits("openrlhf"), ppo)
