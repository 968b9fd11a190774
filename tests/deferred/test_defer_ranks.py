"""Deferred models in the wrappers of two ranks: three steps with the losses and the parameters of the model without it.

``strict=True`` raises wherever logits are computed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankFailed
from torch import Tensor, nn

import logitless as ll

V, STEPS = 61, 3


def model_of() -> Any:
    sys.path.append(str(Path(__file__).parents[1] / "adapters"))
    from tiny import qwen3

    return qwen3(V).double()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(3, V, (2, 9), generator=draw)
    return ids, ids.masked_fill(torch.rand(2, 9, generator=draw) < 0.3, -100)


def loss_of(kind: str, model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    if kind == "labels":
        return model(ids, labels=labels).loss
    logits = model(ids).logits
    if kind == "logprobs":
        return -ll.logprobs(logits[:, :-1] / 0.7, ids[:, 1:]).logprob.mean()
    return -torch.log_softmax(logits[:, :-1] / 0.7, -1).gather(-1, ids[:, 1:, None]).mean()


def wrapped(kind: str, model: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.nn.parallel import DistributedDataParallel

    layers = list(model.model.layers)
    if kind.startswith("DDP"):
        options = {"DDP": {}, "DDP, static graph": {"static_graph": True}}
        return DistributedDataParallel(model, **options.get(kind, {"find_unused_parameters": True}))
    if kind.startswith("FSDP1"):
        units = {type(layers[0]), *((nn.Linear,) if "own unit" in kind else ())}
        policy = ModuleWrapPolicy(units)
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params="flat" not in kind
        )
    for layer in layers:
        fully_shard(layer)
    if "output dtype" in kind:
        return fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))
    if "own unit" in kind:
        fully_shard(model.lm_head, reshard_after_forward="resharded" in kind)
    return fully_shard(model, reshard_after_forward=True) if "root resharded" in kind else fully_shard(model)


def trained(rank: int, world: int, kind: str, loss: str, deferred: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps, and the parameters after them, whole."""
    import warnings

    # Of DDP, of parameters that are all used.
    warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
    model = model_of()
    if deferred == "before":
        ll.defer(model, strict=True)
    outside = wrapped(kind, model)
    if deferred == "after":
        ll.defer(outside, strict=True)
    optimizer = torch.optim.SGD(outside.parameters(), lr=0.3)
    losses = []
    for step in range(STEPS):
        value = loss_of(loss, outside, *batch(rank, step))
        value.backward()
        losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
    found = {name: x.detach() for name, x in outside.named_parameters()}
    return losses, {name: x.full_tensor() if hasattr(x, "full_tensor") else x.clone() for name, x in found.items()}


KINDS = ["DDP", "DDP, static graph", "DDP, find_unused_parameters", "FSDP1", "FSDP1, flat", "FSDP2"]
KINDS += ["FSDP2, own unit", "FSDP2, own unit, resharded", "FSDP2, root resharded", "FSDP2, output dtype"]


def assert_same(wanted: Any, ours: Any, rtol: float) -> None:
    for (losses, parameters), (own_losses, own) in zip(wanted, ours, strict=True):
        torch.testing.assert_close(torch.tensor(own_losses), torch.tensor(losses), rtol=1e-6, atol=0)
        assert sorted(own) == sorted(parameters)
        for name, right in parameters.items():
            assert (own[name] - right).norm() <= rtol * right.norm(), name


@pytest.mark.parametrize("loss", ["labels", "idiom", "logprobs"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks(ranks, kind, loss):
    pytest.importorskip("transformers")
    wanted, ours = (ranks(trained, 2, kind, loss, deferred) for deferred in ("", "before"))
    # Transformers' loss of labels is float32.
    assert_same(wanted, ours, 1e-6 if loss == "labels" else 1e-12)


@pytest.mark.parametrize("kind", ["DDP", "FSDP1", "FSDP2", "FSDP2, root resharded"])
def test_a_model_that_is_wrapped_already(ranks, kind):
    pytest.importorskip("transformers")
    wanted, ours = (ranks(trained, 2, kind, "idiom", deferred) for deferred in ("", "after"))
    assert_same(wanted, ours, 1e-12)


def test_a_head_that_fsdp1_lets_go_of_is_refused_by_name(ranks):
    pytest.importorskip("transformers")
    with pytest.raises(RankFailed, match=r"weight was let go of since its module's forward.*root unit.*FSDP2"):
        ranks(trained, 2, "FSDP1, own unit", "idiom", "before")
    with pytest.raises(RankFailed, match=r"defer: the head is an FSDP1 unit of its own with FULL_SHARD.*root unit"):
        ranks(trained, 2, "FSDP1, own unit", "idiom", "after")


def stepped_under_fsdp1(rank: int, world: int, kind: str) -> str:
    model = model_of()
    ll.defer(model, strict=True)
    outside = wrapped(kind, model)
    optimizer = torch.optim.SGD(outside.parameters(), lr=0.3)
    (ids, labels), other = batch(rank, 0), batch(rank, 1)[0]
    logits = outside(ids).logits
    loss_of("labels", outside, ids, labels).backward()
    optimizer.step()
    with torch.no_grad():
        # Which makes the weight whole again, with other numbers.
        outside(other)
    try:
        logits.detach().logsumexp(-1)
    except ll.LogitlessError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["FSDP1", "FSDP1, flat"])
def test_a_step_of_fsdp1_between_forward_and_reading_is_refused(ranks, kind):
    pytest.importorskip("transformers")
    for said in ranks(stepped_under_fsdp1, 2, kind):
        assert said.startswith("Logits: weight was changed in place after the logits were made")


def prepared(rank: int, world: int, deferred: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps with accelerate, which prepares model and optimizer and runs backward."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    model = model_of()
    if deferred:
        ll.defer(model, strict=True)
    try:
        accelerator = Accelerator(cpu=True)
        outside, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
        losses = []
        for step in range(STEPS):
            value = loss_of("idiom", outside, *batch(rank, step))
            accelerator.backward(value)
            losses.append(value.item())
            optimizer.step()
            optimizer.zero_grad()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    return losses, {name: x.detach().clone() for name, x in model.named_parameters()}


def test_accelerate(ranks):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    wanted, ours = (ranks(prepared, 2, deferred, timeout=120) for deferred in (False, True))
    assert_same(wanted, ours, 1e-12)


def test_a_trainer_of_transformers(tmp_path):
    """Three real steps of an unchanged Trainer, in one process."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    found = []
    for deferred in (False, True):
        model = model_of().float()
        if deferred:
            ll.defer(model, strict=True)
        settings = {"max_steps": STEPS, "logging_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
        quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "seed": 3}
        arguments = transformers.TrainingArguments(output_dir=str(tmp_path), **settings, **quiet)
        lines = [dict(zip(("input_ids", "labels"), (x[0] for x in batch(0, n)), strict=True)) for n in range(6)]
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=lines)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(losses) == STEPS
        found.append((losses, {name: x.detach().clone() for name, x in model.named_parameters()}))
    (wanted, exact), (ours, mine) = found
    assert ours == pytest.approx(wanted, rel=1e-5)
    for name, right in exact.items():
        assert (mine[name] - right).norm() <= 1e-6 * right.norm(), name
