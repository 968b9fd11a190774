"""The page about wrappers, on two ranks: each recipe's gradient is that of the whole batch in one process, in float64.

The truth is the model's own logits, ``log_softmax`` and the clipped loss written out; nothing of the library is in it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from close import assert_gradient_close_to_truth
from pages import ON_RANKS, compiled
from torch import Tensor, nn

PAGE = Path(__file__).parent.parent / ON_RANKS[0]


def whole_loss(logits: Tensor, page: dict[str, Any], lines: slice = slice(None)) -> Tensor:
    """PPO with clip (0.2, 0.28) and an entropy bonus of 0.01, a mean over all response tokens of the batch."""
    logp = torch.log_softmax(logits[:, :-1], -1)
    taken = logp.gather(-1, page["tokens"][lines, 1:, None]).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    ratio = (taken - page["old_logprob"][lines, :-1]).exp()
    advantage = page["advantage"][lines, None]
    policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    counted = page["mask"][:, 1:]
    return ((policy - 0.01 * entropy) * counted[lines]).sum() / counted.sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: x.grad for name, x in model.named_parameters()}
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in found.items() if x is not None}


def true_gradients(model: nn.Module, page: dict[str, Any], lines: slice = slice(None)) -> dict[str, Tensor]:
    model.zero_grad()
    out = model(page["tokens"][lines])
    whole_loss(getattr(out, "logits", out), page, lines).backward()
    return gradients(model)


def run_page(rank: int, world: int) -> dict[str, Any]:
    """The page's snippets, and of each recipe the gradients that it left and those of the whole batch."""
    # As torchrun sets it; accelerate asks for an address, and finds the group that is there.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    torch.set_default_dtype(torch.float64)
    page: dict[str, Any] = {"__name__": "snippet"}
    try:
        for code in compiled(PAGE):
            exec(code, page)
    finally:
        torch.set_default_dtype(torch.float32)
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    found = {name: gradients(page[name]) for name in ("ddp", "sharded", "prepared", "wrapped", "bypassed")}
    # One step of size 1: the change of each parameter is its gradient.
    pairs = zip(page["model"].named_parameters(), page["trained"].parameters(), strict=True)
    found["trained"] = {name: (before - after).detach() for (name, before), after in pairs}
    own = slice(2 * rank, 2 * rank + 2)
    return {
        "found": {kind: {k.removeprefix("module."): x for k, x in some.items()} for kind, some in found.items()},
        "model": true_gradients(page["model"], page),
        "policy": true_gradients(page["policy"], page),
        "part": true_gradients(page["policy"], page, own),
        "lora": lora(page),
    }


def lora(page: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of the page's adapter, and those of the product written out; each rank has its part of the loss."""
    a, b = (page[name].detach().requires_grad_() for name in ("lora_A", "lora_B"))
    logits = page["hidden"] @ (page["weight"] + 2.0 * b @ a).T
    whole_loss(logits, page, page["mine"]).backward()
    return {"A": page["lora_A"].grad, "B": page["lora_B"].grad}, {"A": a.grad, "B": b.grad}


def assert_same(recipe: str, ours: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    assert sorted(ours) == sorted(truth), recipe
    for name, exact in truth.items():
        assert_gradient_close_to_truth(ours[name], exact, exact, f"{recipe}: {name}")


def test_the_page_on_two_ranks(ranks):
    """One test, because its ranks import a Trainer, which takes longer than all the rest."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    results = ranks(run_page, 2, timeout=120)
    for result in results:
        found = result["found"]
        for recipe in ("ddp", "sharded", "prepared", "trained"):
            assert_same(recipe, found[recipe], result["model"])
        assert_same("wrapped", found["wrapped"], result["policy"])
        assert_same("lora", *result["lora"])
        # What the page warns of: the gradient of the rank's own part, times two.
        assert_same("bypassed", found["bypassed"], {name: 2 * x for name, x in result["part"].items()})
    one, other = (result["found"]["bypassed"]["head.linear.weight"] for result in results)
    assert not torch.allclose(one, other)
