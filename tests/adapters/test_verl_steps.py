"""verl's FSDP engine without fused kernels: its own forward step and PPO loss, whose logits are not computed."""

from __future__ import annotations

import sys
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
from tiny import qwen3
from torch import Tensor

import logitless

ENGINE, LOSSES = "verl.workers.engine.fsdp.transformer_impl", "verl.workers.utils.losses"
TENSORDICTS = "verl.utils.tensordict_utils"
HALF = torch.bfloat16
LENGTHS, ANSWERS = [11, 7, 9], [5, 2, 4]


class Data(SimpleNamespace):
    """What a dictionary of tensors holds besides."""

    def __init__(self, data: Any) -> None:
        super().__init__(data=data)


class Batch(dict):
    """As much of tensordict's dictionary as a step asks for."""

    def to(self, *_: Any) -> Batch:
        return self

    def copy(self) -> Batch:
        return Batch(self)

    def select(self, *names: str) -> Batch:
        return Batch({name: self[name] for name in names})

    def to_padded_tensor(self) -> Batch:
        return Batch({name: x.to_padded_tensor(0) if x.is_nested else x for name, x in self.items()})

    batch_size = property(lambda self: [self["input_ids"].shape[0]])


@contextmanager
def on_cpu():
    load("verl")
    load("verl", ENGINE, LOSSES)
    tensordicts = sys.modules[TENSORDICTS]
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        patch.setattr(tensordicts, "TensorDict", Batch)
        patch.setattr(tensordicts, "NonTensorData", Data)
        for name in ("get_device_id", "get_device_name"):
            patch.setattr(sys.modules[ENGINE], name, lambda: "cpu")
        yield


@pytest.fixture(autouse=True)
def verl():
    with on_cpu():
        yield


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def batch(n: int, vocab: int, settings: dict[str, Any], scale: int) -> Batch:
    draw = torch.Generator().manual_seed(n)
    ids = [torch.randint(2, vocab, (scale * length,), generator=draw) for length in LENGTHS]
    answers = [torch.randn(scale * length, generator=draw) for length in ANSWERS]
    floats = {
        "old_log_probs": nested([0.1 * x - 5 for x in answers]),
        "ref_log_prob": nested([0.2 * x - 5 for x in answers]),
        "advantages": nested(answers),
        "response_mask": nested([torch.ones_like(x) for x in answers]),
    }
    given = {"dp_size": 1, "batch_num_tokens": sum(len(x) for x in answers), "global_batch_size": len(ids)}
    return Batch(
        input_ids=nested(ids),
        position_ids=nested([torch.arange(len(x)) for x in ids]),
        prompts=nested([x[: len(x) - len(y)] for x, y in zip(ids, answers, strict=True)]),
        responses=nested([x[len(x) - len(y) :] for x, y in zip(ids, answers, strict=True)]),
        **floats,
        **given,
        **settings,
    )


def engine_of(
    module: Any, kind: str = "FSDPEngineWithLMHead", checkpointing: bool = False, chunks: bool = False
) -> Any:
    """The engine around a model, without what starts a cluster."""
    engine = object.__new__(getattr(sys.modules[ENGINE], kind))
    functional = sys.modules["verl.utils.torch_functional"]
    name = "entropy_from_logits_with_chunking" if chunks else "entropy_from_logits"
    sizes = {"entropy_from_logits_with_chunking": chunks, "entropy_from_logits_chunk_size": 5}
    vars(engine).update(
        module=module,
        engine_config=SimpleNamespace(entropy_checkpointing=checkpointing, **sizes),
        compute_entropy_from_logits=getattr(functional, name),
        use_ulysses_sp=False,
        ulysses_sequence_parallel_size=1,
        pad_to_length=None,
        _autocast_dtype=torch.float32,
        get_data_parallel_group=lambda: None,
        _get_packed_pad_size=lambda length: 0,
    )
    return engine


def ppo(
    dtype: torch.dtype = torch.float32,
    vocab: int = 253,
    scale: int = 1,
    packed: bool = True,
    temperature: Any = 0.7,
    squares: bool = False,
    wrap: Callable[[Any], Any] = lambda model: model,
    **how: Any,
) -> Any:
    """A policy, and a forward step of verl's engine with its PPO loss, an entropy bonus and a KL to a reference."""
    model = wrap(qwen3(vocab).to(HALF).to(dtype))
    engine, optimizer = engine_of(model, **how), torch.optim.SGD(model.parameters(), lr=0.3)
    config = SimpleNamespace(
        global_batch_info={},
        loss_scale_factor=None,
        loss_agg_mode="token-mean",
        policy_loss={"loss_mode": "vanilla"},
        entropy_coeff=0.02,
        use_kl_loss=True,
        kl_loss_type="low_var_kl",
        kl_loss_coef=0.1,
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        get=lambda name, default=None: default,
    )
    settings = {"temperature": temperature, "calculate_entropy": True, "use_remove_padding": packed}
    settings |= {"calculate_sum_pi_squared": squares}

    def loss_of(model_output: Any, data: Any, dp_group: Any) -> Any:
        loss, metrics = sys.modules[LOSSES].ppo_loss(config, model_output, data, dp_group)
        return (loss + model_output["sum_pi_squared"].values().mean() if squares else loss), metrics

    def step(n: int) -> Any:
        # One sequence has one set of positions, so that attention without its own kernel sees a single line.
        loss, _ = engine.forward_step(batch(n, vocab, settings, scale), loss_of, False)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, step


@contextmanager
def quiet():
    """verl's own checkpoint of the entropy is warned of by torch."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor([0.6, 0.7, 1.1])], ids=["1", "0.7", "each"])
def test_ppo(packed, temperature):
    same_steps("verl", lambda: ppo(packed=packed, temperature=temperature))


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("how", [{"checkpointing": True}, {"chunks": True}, {"squares": True}], ids=str)
def test_ppo_with_other_entropies(packed, how):
    with quiet():
        same_steps("verl", lambda: ppo(packed=packed, **how))


def test_ppo_in_half_precision():
    same_steps("verl", lambda: ppo(HALF), exact=lambda: ppo(torch.float64))


def test_ppo_notices_a_wrong_number():
    notices("verl", ppo)


def test_ppo_holds_no_logits():
    vocab, scale = 8192, 6
    fewer_bytes("verl", lambda: ppo(vocab=vocab, scale=scale), 2 * 4 * sum(LENGTHS) * scale * vocab)


def sharded(model: Any, strategy: str) -> Any:
    """As the engine's ``_build_fsdp_module`` does."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    utils = sys.modules["verl.utils.fsdp_utils"]
    if strategy == "fsdp2":
        utils.apply_fsdp2(model, {"reshard_after_forward": True}, {})
        return model
    policy = utils.get_fsdp_wrap_policy(model, {})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params="original" in strategy
    )


def steps_on_rank(rank: int, world: int, strategy: str) -> OnRank:
    with on_cpu():
        return on_rank("verl", rank, lambda: ppo(wrap=partial(sharded, strategy=strategy)))


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp, original parameters", "fsdp2"])
def test_ppo_on_two_ranks(ranks, strategy):
    same_on_ranks(ranks(steps_on_rank, 2, strategy, timeout=TIMEOUT))


def test_a_value_model_is_left_alone():
    model = qwen3(253)
    engine = engine_of(model, "FSDPEngineWithValueHead")
    logitless.install("verl")
    with pytest.raises(KeyError):
        # An empty batch ends the step before its model is called.
        engine.forward_step(Batch(), None, True)
    assert "forward" not in vars(model.lm_head)
    with pytest.raises(KeyError):
        engine_of(model).forward_step(Batch(), None, True)
    assert "forward" in vars(model.lm_head)


def test_the_patch_of_the_page():
    same_steps_within(lambda: with_deferred_logits("verl"), ppo)
