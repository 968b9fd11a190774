"""SkyRL's FSDP policy worker: its own forward and backward of a micro-batch, whose logits are not computed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts import load
from patched import with_deferred_logits
from shared.host_steps import OnRank, fewer_bytes, notices, on_rank, same_on_ranks, same_steps, same_steps_within
from shared.megatron_groups import TIMEOUT
from test_skyrl_fsdp import pad, unpad
from tiny import qwen3

import logitless

WORKER, WRAPPER = "skyrl.backends.skyrl_train.workers.worker", "skyrl.backends.skyrl_train.workers.model_wrapper"
HALF, B, S, A = torch.bfloat16, 3, 11, 5


@contextmanager
def on_cpu():
    load("skyrl")
    load("skyrl", WORKER)
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.compiler.set_stance("force_eager"),
        warnings.catch_warnings(),
    ):
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(sys.modules[WRAPPER], "unpad_input", unpad)
        patch.setattr(sys.modules[WRAPPER], "pad_input", pad)
        # The worker's autocast is CUDA's.
        warnings.filterwarnings("ignore", "CUDA is not available")
        yield


@pytest.fixture(autouse=True)
def skyrl():
    with on_cpu():
        yield


class Strategy:
    def backward(self, loss, model, optimizer):
        loss.backward()

    def optimizer_step(self, optimizer, model, scheduler, name):
        optimizer.step()
        optimizer.zero_grad()


def ppo(
    dtype: torch.dtype = torch.float32,
    vocab: int = 253,
    length: int = S,
    packed: bool = False,
    bonus: bool = True,
    wrap: Callable[[Any], Any] = lambda model: model,
) -> Any:
    """A policy, and a step of ``PolicyWorkerBase`` with a KL to a reference of the same kind, and an entropy bonus."""
    worker, wrapper = sys.modules[WORKER], sys.modules[WRAPPER]
    policy, reference = (wrapper.HFModelWrapper(qwen3(vocab).to(HALF).to(dtype), bf16=False) for _ in range(2))
    for model in (policy, reference):
        model.model = wrap(model.model)
    policy.remove_microbatch_padding = packed
    algorithm = {"policy_loss_type": "regular", "temperature": 0.7, "use_entropy_loss": bonus, "use_kl_loss": True}
    algorithm |= {"entropy_loss_coef": 0.02, "kl_estimator_type": "k3", "kl_loss_coef": 0.1, "eps_clip_low": 0.2}
    algorithm |= {
        "enable_sample_support_replay": False,
        "eps_clip_high": 0.2,
        "clip_ratio_c": 3.0,
        "loss_reduction": "token_mean",
        "max_seq_len": length,
    }
    correction = {f"{kind}_{what}": None for kind in ("tis", "sequence_mask", "outlier") for what in ("ratio_type",)}
    algorithm["off_policy_correction"] = SimpleNamespace(**correction)
    self = SimpleNamespace(
        model=policy,
        cfg=SimpleNamespace(algorithm=SimpleNamespace(**algorithm)),
        policy_loss_fn=sys.modules["skyrl.backends.skyrl_train.utils.ppo_utils"].ppo_policy_loss,
        strategy=Strategy(),
        optimizer=torch.optim.SGD(policy.parameters(), lr=0.3),
        scheduler=SimpleNamespace(get_last_lr=lambda: [0.3]),
        mesh_rank=SimpleNamespace(dp_size=1),
    )

    def step(n: int) -> Any:
        draw = torch.Generator().manual_seed(n)
        tokens = torch.randint(3, vocab, (B, length), generator=draw)
        mask, actions = torch.ones_like(tokens), torch.ones(B, A)
        mask[0, :3], actions[1, -2:] = 0, 0
        with torch.no_grad():
            base = reference(tokens, A, mask.clone(), temperature=0.7)
        experience = SimpleNamespace(
            to_device=lambda device: None,
            sequences=tokens,
            action_log_probs=base + 0.1 * torch.randn(B, A, generator=draw),
            base_action_log_probs=base,
            advantages=torch.randn(B, A, generator=draw),
            num_actions=A,
            attention_mask=mask,
            loss_mask=actions,
            response_mask=None,
            action_mask=None,
            rollout_logprobs=None,
            pixel_values=None,
            image_grid_thw=None,
        )
        status = worker.PolicyWorkerBase._forward_backward_micro(self, experience, 1.0)
        worker.PolicyWorkerBase.optim_step(self)
        return torch.tensor(status["final_loss"])

    return policy, step


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("rows_before_head", [True, False])
@pytest.mark.parametrize("bonus", [True, False])
def test_ppo(packed, rows_before_head, bonus):
    same_steps("skyrl", lambda: ppo(packed=packed, bonus=bonus), models=2, rows_before_head=rows_before_head)


def test_ppo_in_half_precision():
    same_steps("skyrl", lambda: ppo(HALF), models=2, exact=lambda: ppo(torch.float64))


def test_ppo_notices_a_wrong_number():
    notices("skyrl", ppo, models=2)


def test_ppo_holds_no_logits():
    vocab = 8192
    fewer_bytes("skyrl", lambda: ppo(vocab=vocab, length=64), 2 * 4 * B * 64 * vocab)


def sharded(model: Any) -> Any:
    """As ``FSDPStrategy`` does."""
    (utils,) = load("skyrl", "skyrl.backends.skyrl_train.distributed.fsdp_utils")
    utils.apply_fsdp2(model, {"reshard_after_forward": True}, SimpleNamespace(wrap_policy={}))
    return model


def steps_on_rank(rank: int, world: int, packed: bool, rows_before_head: bool) -> OnRank:
    with on_cpu():
        build = partial(ppo, packed=packed, wrap=sharded)
        return on_rank("skyrl", rank, build, rows_before_head=rows_before_head)


@pytest.mark.parametrize(("packed", "rows_before_head"), [(False, True), (True, False)])
def test_ppo_on_two_ranks(ranks, packed, rows_before_head):
    same_on_ranks(ranks(steps_on_rank, 2, packed, rows_before_head, timeout=TIMEOUT), models=2)


def test_the_host_may_keep_its_logits():
    policy, step = ppo()
    logitless.install("skyrl", logits="host")
    step(0)
    assert "forward" not in vars(policy.model.lm_head)


def test_the_patch_of_the_page():
    same_steps_within(lambda: with_deferred_logits("skyrl"), ppo)
