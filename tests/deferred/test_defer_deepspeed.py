"""Deferred models in DeepSpeed's engine, on two real ranks: three steps with the losses and the parameters without it.

With the DeepSpeed of constraints-deepspeed.txt, or one that is installed; and with a double of what ZeRO-3 does to a
weight.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from close import assert_gradient_close_to_truth
from ranks import close_ranks
from shared.deepspeed import engine_of, needs_deepspeed
from test_defer import IDS, LABELS, Plain, idiom
from test_defer_ranks import STEPS, V, assert_same, batch, loss_of
from torch import Tensor

import logitless as ll


@pytest.fixture(scope="module", autouse=True)
def fresh_workers() -> Iterator[None]:
    """DeepSpeed leaves global state behind, so the workers that have imported it are not reused."""
    yield
    close_ranks()


def model_of() -> Any:
    sys.path.append(str(Path(__file__).parents[1] / "adapters"))
    from tiny import qwen3

    return qwen3(V)


def trained(rank: int, world: int, stage: int, loss: str, deferred: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps, and the parameters after them, whole."""
    warnings.simplefilter("ignore")
    model = model_of()
    if deferred == "before":
        ll.defer(model, strict=True)
    engine = engine_of(rank, world, model, stage)
    if deferred == "after":
        ll.defer(engine, strict=True)
    losses = []
    for step in range(STEPS):
        value = loss_of(loss, engine, *batch(rank, step))
        engine.backward(value)
        engine.step()
        losses.append(value.item())
    import deepspeed

    found = {}
    for name, x in model.named_parameters():
        with deepspeed.zero.GatheredParameters([x], enabled=stage == 3):
            found[name] = x.detach().clone()
    return losses, found


CASES = [("labels", "before"), ("idiom", "before"), ("logprobs", "before"), ("idiom", "after")]


def stages(rank: int, world: int, stage: int) -> list[tuple[Any, Any]]:
    """Every case without and with, in one job: DeepSpeed keeps the group that it saw first."""
    return [tuple(trained(rank, world, stage, loss, how) for how in ("", when)) for loss, when in CASES]


@needs_deepspeed
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero(ranks, stage):
    close_ranks()
    for found in ranks(stages, 2, stage, timeout=150):
        for wanted, ours in found:
            assert_same([wanted], [ours], 1e-5)


def accumulated(rank: int, world: int, deferred: bool) -> tuple[list[float], dict[str, Tensor]]:
    """ZeRO-3: scores without a graph, two forwards before one backward, and two micro-batches."""
    warnings.simplefilter("ignore")
    model = model_of()
    engine = engine_of(rank, world, model, 3, gradient_accumulation_steps=2)
    # Found where engine_of looks for it.
    import deepspeed

    if deferred:
        ll.defer(engine, strict=True)
    losses = []
    for step in range(2):
        ids, labels = batch(rank, step)
        with torch.no_grad():
            losses.append(loss_of("idiom", engine, ids.repeat(16, 1), labels).item())
        value = loss_of("idiom", engine, ids, labels) + loss_of("idiom", engine, ids.flip(0), labels)
        engine.backward(value)
        engine.step()
        losses.append(value.item())
    with deepspeed.zero.GatheredParameters([model.lm_head.weight]):
        return losses, {"weight": model.lm_head.weight.detach().clone()}


def both(rank: int, world: int) -> list[Any]:
    return [accumulated(rank, world, deferred) for deferred in (False, True)]


@needs_deepspeed
def test_zero_3_with_more_forwards_than_steps(ranks):
    close_ranks()
    for wanted, ours in ranks(both, 2, timeout=150):
        assert_same([wanted], [ours], 1e-5)


# A double of ZeRO-3 in one process: the weight has its numbers within the head's forward and backward alone.


class _Gathers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, gather: Any) -> Tensor:
        ctx.gather = gather
        return out.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.gather()
        return *gradients, None


def partition(layer: Any, mark: bool) -> None:
    """What ZeRO-3 does to the parameters of a layer."""
    whole = {name: x.data for name, x in layer.named_parameters()}

    def gather(*_: Any) -> None:
        for name, x in layer.named_parameters():
            x.data = whole[name]

    def release(*_: Any) -> None:
        for x in layer.parameters():
            x.data = torch.empty(0, dtype=x.dtype)

    layer.register_forward_pre_hook(gather)
    layer.register_forward_hook(release)
    layer.register_forward_hook(lambda module, given, out: _Gathers.apply(out, gather))
    for number, x in enumerate(layer.parameters()):
        x.register_post_accumulate_grad_hook(lambda x: setattr(x, "data", torch.empty(0, dtype=x.dtype)))
        if mark:
            x.ds_id = number
    release()


@pytest.mark.parametrize("read", ["idiom", "cross_entropy", "logprobs"])
def test_a_weight_that_has_other_data_after_the_forward(read):
    found = []
    for deferred in (False, True):
        model = Plain()
        if deferred:
            # The model's own product saves a weight that is gone.
            partition(model.lm_head, mark=True)
            ll.defer(model, strict=True)
        logits = model(IDS)
        assert (model.lm_head.weight.numel() == 0) == deferred
        reads = {
            "idiom": idiom,
            "cross_entropy": lambda x: torch.nn.functional.cross_entropy(x.flatten(0, 1), LABELS.flatten()),
            "logprobs": lambda x: ll.logprobs(x, IDS, entropy="grad").logprob.sum(),
        }
        value = reads[read](logits)
        value.backward()
        found.append({"loss": value.detach()} | {name: x.grad for name, x in model.named_parameters()})
    wanted, ours = found
    assert sorted(wanted) == sorted(ours)
    for name, right in wanted.items():
        assert_gradient_close_to_truth(ours[name], right, right, name)


def test_a_weight_of_other_data_that_nobody_named_is_refused():
    model = Plain()
    partition(model.lm_head, mark=False)
    ll.defer(model)
    with pytest.raises(
        ll.LogitlessError, match=r"weight was let go of .* is \[0\] without numbers now: FSDP1 and ZeRO-3"
    ):
        idiom(model(IDS))


def test_a_lora_on_a_partitioned_head_is_refused():
    """Nobody calls the modules that ZeRO-3 would gather the matrices for."""
    pytest.importorskip("transformers")
    sys.path.append(str(Path(__file__).parents[1] / "adapters"))
    from test_peft import LoraOfPeft

    model: Any = Plain()
    model.lm_head = LoraOfPeft(model.lm_head).eval()
    partition(model.lm_head.base_layer, mark=True)
    with pytest.raises(ll.LogitlessError, match=r"inside of the LoRA on the head has forward hooks"):
        ll.defer(model)
    model.lm_head.base_layer._forward_hooks.clear()
    model.lm_head.base_layer._forward_pre_hooks.clear()
    ll.defer(model)
    with pytest.raises(ll.LogitlessError, match=r"LoRA: weight must be a matrix of floats.*ZeRO-3.*use a PolicyHead"):
        model(IDS)
