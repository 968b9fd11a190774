"""Models that Transformers' own tensor parallelism (``tp_plan``) has sharded, on two real ranks: losses and gradients.

``strict=True`` raises wherever logits are computed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from close import assert_gradient_close_to_truth
from torch import Tensor

import logitless as ll
from logitless.deferred import model as deferral

sys.path.append(str(Path(__file__).parents[1] / "adapters"))
from tiny import qwen3

V = 61
IDS = torch.randint(3, V, (3, 8), generator=torch.Generator().manual_seed(6))


def loss_of(kind: str, model: Any) -> Tensor:
    logits = model(IDS).logits
    if kind == "logprobs":
        return -ll.logprobs(logits[:, :-1] / 0.7, IDS[:, 1:]).logprob.mean()
    return -torch.log_softmax(logits[:, :-1] / 0.7, -1).gather(-1, IDS[:, 1:, None]).mean()


def run(rank: int, world: int, folder: Path, kind: str, deferred: bool) -> dict[str, Any]:
    """A loss, scores without a graph of few and of many rows, generated tokens, and all gradients, whole."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    options = {"distributed_config": DistributedConfig(tp_size=world), "dtype": torch.float64}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    before, placed = model.lm_head.forward, hasattr(model(IDS).logits, "placements")
    handle = ll.defer(model, strict=True) if deferred else None
    found: dict[str, Any] = {}
    few = deferral.FEW
    for rows in (few, 0):
        deferral.FEW = rows
        try:
            with torch.no_grad():
                found[f"scores, {rows}"] = loss_of(kind, model)
        finally:
            deferral.FEW = few
    value = loss_of(kind, model)
    value.backward()
    if handle is not None:
        assert isinstance(model(IDS).logits, ll.Logits)
        # A plan whose model is handed plain tensors has no DTensors for us, either.
        assert hasattr(model(IDS).logits, "placements") == placed
        handle.undo()
        assert model.lm_head.forward is before
    grads = {name: x.grad for name, x in model.named_parameters()}
    assert str(grads["lm_head.weight"].placements) == "(Shard(dim=0),)"
    whole = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in grads.items()}
    return {"loss": value.detach(), **found, **whole}


@pytest.mark.parametrize("kind", ["idiom", "logprobs"])
def test_a_plan(ranks, tmp_path, kind):
    pytest.importorskip("transformers.distributed.tensor_parallel")
    qwen3(V, num_key_value_heads=2).double().save_pretrained(tmp_path)
    wanted, ours = (ranks(run, 2, tmp_path, kind, deferred) for deferred in (False, True))
    for theirs, mine in zip(wanted, ours, strict=True):
        assert sorted(mine) == sorted(theirs)
        for name, right in theirs.items():
            assert_gradient_close_to_truth(mine[name], right, right, name)
