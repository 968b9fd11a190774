"""Deferred models under peft on two real ranks: three steps with the losses and the adapters of the model without it.

In one process see ``tests/adapters/test_peft.py``. ``strict=True`` raises wherever logits are computed.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from test_defer_ranks import STEPS, V, assert_same, batch, loss_of
from torch import Tensor

import logitless as ll

pytestmark = pytest.mark.skipif(not find_spec("peft") or not find_spec("transformers"), reason="peft is not installed")

ADAPTERS: dict[str, dict[str, Any]] = {
    "on the head": {"target_modules": ["q_proj", "lm_head"]},
    "on all linear layers": {"target_modules": "all-linear"},
    "a copy of the head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


def model_of(adapters: str) -> Any:
    sys.path.append(str(Path(__file__).parents[1] / "adapters"))
    import peft
    from tiny import qwen3

    torch.manual_seed(4)
    config = peft.LoraConfig(
        r=3, init_lora_weights=False, lora_dropout=0.0, task_type="CAUSAL_LM", **ADAPTERS[adapters]
    )
    return peft.get_peft_model(qwen3(V), config).double()


def wrapped(kind: str, model: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if kind == "DDP":
        return DistributedDataParallel(model)
    if kind == "FSDP1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    if kind == "FSDP2, own unit":
        fully_shard(model.get_base_model().lm_head)
    return fully_shard(model)


def trained(rank: int, world: int, kind: str, adapters: str, deferred: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps, before them those with the adapters switched off, and what is trained after them."""
    model = model_of(adapters)
    outside = wrapped(kind, model)
    if deferred:
        ll.defer(outside, strict=True)
    optimizer = torch.optim.SGD([x for x in outside.parameters() if x.requires_grad], lr=0.3)
    losses = []
    for step in range(STEPS):
        ids, labels = batch(rank, step)
        # Under FSDP, peft would switch the parameters that FSDP has gathered.
        if kind == "DDP":
            with model.disable_adapter(), torch.no_grad():
                losses.append(loss_of("idiom", outside, ids, labels).item())
        value = loss_of("idiom", outside, ids, labels)
        value.backward()
        losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
    found = {name: x.detach() for name, x in outside.named_parameters() if x.requires_grad}
    return losses, {name: x.full_tensor() if hasattr(x, "full_tensor") else x.clone() for name, x in found.items()}


@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("kind", ["DDP", "FSDP1", "FSDP2", "FSDP2, own unit"])
def test_two_ranks(ranks, kind, adapters):
    wanted, ours = (ranks(trained, 2, kind, adapters, deferred) for deferred in (False, True))
    assert any("lm_head" in name for name in wanted[0][1]) == (adapters != "on all linear layers")
    assert_same(wanted, ours, 1e-12)


@pytest.mark.parametrize("adapters", ["on the head", "a copy of the head"])
def test_a_loss_that_is_taken_while_the_adapters_are_off(adapters):
    """As of a KL to the reference, whose forward they are off for: peft freezes what is off."""
    found = []
    for deferred in (False, True):
        model, (ids, _) = model_of(adapters), batch(0, 0)
        if deferred:
            ll.defer(model, strict=True)
        logits = model(ids).logits
        with model.disable_adapter():
            with torch.no_grad():
                of_reference = model(ids).logits.softmax(-1)
            log_p = logits.log_softmax(-1)
            loss = torch.nn.functional.kl_div(log_p, of_reference, reduction="batchmean")
            loss = loss - log_p.gather(-1, ids[..., None]).mean()
        loss.backward()
        found.append({name: x.grad for name, x in model.named_parameters() if x.grad is not None})
    plain, ours = found
    assert sorted(plain) == sorted(ours)
    assert any("lm_head" in name for name in ours)
    for name, right in plain.items():
        torch.testing.assert_close(ours[name], right, rtol=1e-9, atol=1e-12)
