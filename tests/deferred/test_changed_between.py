"""Tensors of a head that are written to between its forward and the reading: an error, and not another number."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_defer import IDS, Plain, idiom
from torch import nn

import logitless as ll

sys.path.append(str(Path(__file__).parents[1] / "adapters"))


class Keeps(Plain):
    """A model that keeps its hidden states."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.hidden = torch.tanh(self.body(self.embed(ids)))
        return self.lm_head(self.hidden)


def step(kind: str, **options: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for x in model.parameters():
            x.grad = torch.ones_like(x)
        getattr(torch.optim, kind)(model.lm_head.parameters(), lr=0.1, **options).step()

    return change


def write(name: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        with torch.no_grad():
            (model.hidden if name == "hidden" else model.get_parameter(name)).mul_(1.1)

    return change


def through_copies(name: str, **options: Any) -> Callable[[Any], None]:
    """As Megatron's and DeepSpeed's optimizers step: a copy of the weight, and then the weight through ``.data``."""

    def change(model: Any) -> None:
        weight = model.lm_head.weight
        copy = weight.main_param if name == "main_param" else weight._hp_mapping.hp_fragment
        copy.grad = torch.ones_like(copy)
        torch.optim.AdamW([copy], lr=0.1, **options).step()
        weight.data.copy_(copy.view_as(weight))

    return change


def with_copies(model: Any) -> Any:
    weight = model.lm_head.weight
    weight.main_param = weight.detach().clone()
    weight._hp_mapping = SimpleNamespace(hp_fragment=weight.detach().clone().view(-1))
    return model


CHANGES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "hidden": ("hidden", write("hidden")),
    "weight": ("weight", write("lm_head.weight")),
    "bias": ("bias", write("lm_head.bias")),
    "SGD": ("weight", step("SGD", foreach=False)),
    "SGD, foreach": ("weight", step("SGD", foreach=True)),
    "AdamW, foreach": ("weight", step("AdamW", foreach=True)),
    "AdamW, fused": ("weight", step("AdamW", fused=True)),
    "Megatron's copy": ("weight", through_copies("main_param")),
    "Megatron's copy, fused": ("weight", through_copies("main_param", fused=True)),
    "DeepSpeed's copy": ("weight", through_copies("hp_fragment")),
    "load_state_dict": ("weight", lambda model: model.load_state_dict(Plain().state_dict())),
}

READS: dict[str, Callable[[Any], Any]] = {
    "the idiom": idiom,
    "a slice": lambda x: x[:, 1:],
    "logprobs": lambda x: ll.logprobs(x, IDS),
    "computed": lambda x: x.computed(),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_linear_head(change, read):
    name, make = CHANGES[change]
    model = with_copies(Keeps())
    ll.defer(model)
    logits = model(IDS)
    READS[read](logits)
    make(model)
    with pytest.raises(ll.LogitlessError, match=f"Logits: {name} was changed in place after the logits were made"):
        READS[read](logits)
    # The next forward is of the new numbers.
    READS[read](model(IDS))


@pytest.mark.parametrize("kind", ["peft", "double"])
@pytest.mark.parametrize("name", ["lora_A", "lora_B", "base_layer"])
def test_a_lora_on_the_head(kind, name):
    pytest.importorskip("transformers")
    from test_peft import adapted_head

    model = adapted_head(kind).eval()
    ll.defer(model)
    logits = model(IDS % 50).logits
    layer = model.get_base_model().lm_head
    matrix = layer.base_layer if name == "base_layer" else getattr(layer, name)["default"]
    with torch.no_grad():
        matrix.weight.mul_(1.1)
    wanted = {"lora_A": "a of the LoRA", "lora_B": "b of the LoRA", "base_layer": "weight"}[name]
    with pytest.raises(ll.LogitlessError, match=f"Logits: {wanted} was changed in place"):
        ll.logprobs(logits, IDS % 50)


def test_an_adapter_that_is_switched_off_merged_and_unmerged():
    """Switching it off writes nothing: logits of before stay what they were."""
    peft = pytest.importorskip("peft")
    from test_peft import adapted_head

    model = adapted_head("peft").eval()
    assert isinstance(model, peft.PeftModel)
    tokens = IDS % 50
    wanted = ll.logprobs(model(tokens).logits, tokens).logprob
    ll.defer(model)
    logits = model(tokens).logits
    with model.disable_adapter():
        torch.testing.assert_close(ll.logprobs(logits, tokens).logprob, wanted)
        assert not torch.allclose(ll.logprobs(model(tokens).logits, tokens).logprob, wanted)
    model.merge_adapter()
    torch.testing.assert_close(ll.logprobs(model(tokens).logits, tokens).logprob, wanted)
    model.unmerge_adapter()
    torch.testing.assert_close(ll.logprobs(model(tokens).logits, tokens).logprob, wanted)


@pytest.mark.parametrize("kind", ["peft", "double"])
def test_an_adapter_that_is_merged_after_the_forward_is_refused(kind):
    """peft writes to the weight through ``.data``, of which no version knows."""
    pytest.importorskip("transformers")
    from test_peft import adapted_head

    model = adapted_head(kind).eval()
    ll.defer(model)
    logits = model(IDS % 50).logits
    if kind == "peft":
        model.merge_adapter()
    else:
        head = model.get_base_model().lm_head
        head.base_layer.weight.data += 2.0 * head.lora_B["default"].weight.data @ head.lora_A["default"].weight.data
        head.merged_adapters = ["default"]
    with pytest.raises(ll.LogitlessError, match="Logits: weight was changed in place"):
        ll.logprobs(logits, IDS % 50)


def test_a_tied_head_whose_embedding_is_written_to():
    class Tied(Keeps):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head.weight = self.embed.weight

    model: nn.Module = Tied()
    ll.defer(model)
    logits = model(IDS)
    write("embed.weight")(model)
    with pytest.raises(ll.LogitlessError, match="Logits: weight was changed in place"):
        idiom(logits)
