"""Models under peft: adapters inside of the layers, copies of the head, LoRA on it, and others, which are refused.

Every test runs with peft where it is installed, and with doubles of its shape: a model that hands keywords on, layers
around a ``base_layer``, and a wrapper that chooses among copies of a module.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from torch import Tensor, nn
from truth import truth

import logitless as ll
from logitless.adapters.transformers import audit_of, patch, unpatch

pytest.importorskip("transformers")

V = 50
SIZES = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


class LoraLinear(nn.Module):
    """As peft's: the weight is that of the layer inside, and the adapter is not in it."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, base_layer.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2.0 * self.lora_B(self.lora_A(x))


class LoraOfPeft(nn.Module):
    """As peft's own: matrices, scale and dropout by the name of the adapter."""

    merged = disable_adapters = fan_in_fan_out = False
    active_adapters = ("default",)

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.scaling = base_layer, {"default": 2.0}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base_layer.out_features, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(0.5)})

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))
        return self.base_layer(x) + 0.0 * y if self.disable_adapters else self.base_layer(x) + 2.0 * y


class Copies(nn.Module):
    """As peft's wrapper of ``modules_to_save``: attributes and calls go to the trained copy, or to the original."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__()
        # Deep, as peft's: a forward that was patched comes along.
        trained = copy.deepcopy(module).requires_grad_()
        self.original_module, self.modules_to_save = module, nn.ModuleDict({"default": trained})
        self.disabled = False

    def chosen(self) -> nn.Module:
        return self.original_module if self.disabled else self.modules_to_save["default"]

    def __getattr__(self, name: str):
        if name in ("weight", "bias"):
            return getattr(self.chosen(), name)
        return super().__getattr__(name)

    def forward(self, *args, **kwargs):
        return self.chosen()(*args, **kwargs)


class Tuner(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


class PeftDouble(nn.Module):
    """As peft's model: no positional arguments go on, and unset ones go on as None."""

    def __init__(self, model: nn.Module, prompt_learning: bool = False) -> None:
        super().__init__()
        self.peft_config = {"default": SimpleNamespace(is_prompt_learning=prompt_learning)}
        self.base_model = Tuner(model)

    def get_base_model(self) -> nn.Module:
        return self.base_model.model

    def forward(self, input_ids=None, attention_mask=None, labels=None, output_attentions=None, **kwargs):
        given = {"attention_mask": attention_mask, "labels": labels, "output_attentions": output_attentions}
        return self.base_model(input_ids=input_ids, **given, **kwargs)

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model.model, name)


def causal_lm():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES)).double()


def adapt(kind: str, model, *targets: str, save: bool = False):
    """The model under adapters of these layers, with weights other than zero; with a trained copy of the head."""
    if kind == "peft":
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(
            r=4, target_modules=list(targets), init_lora_weights=False, modules_to_save=["lm_head"] if save else None
        )
        made = peft.get_peft_model(model, config).double()
    else:
        model.requires_grad_(False)
        for name, module in list(model.named_modules()):
            parent, _, leaf = name.rpartition(".")
            if leaf in targets:
                setattr(model.get_submodule(parent), leaf, LoraLinear(module).double())
        if save:
            model.lm_head = Copies(model.lm_head).double()
        made = PeftDouble(model)
    if save:
        made.get_base_model().lm_head.modules_to_save["default"].weight.data.normal_(std=0.3)
    return made.eval()


def batch():
    tokens = torch.randint(V, (2, 9))
    return tokens, ll.Rows.padded(tokens.tolist(), [4, 7])


both = pytest.mark.parametrize("kind", ["peft", "double"])


@both
@pytest.mark.parametrize("save", [False, True], ids=["frozen head", "copy of the head"])
@pytest.mark.parametrize("first", [False, True], ids=["peft first", "patch first"])
def test_adapters_inside_of_the_layers(kind, save, first):
    """Values, and the gradient of a loss with respect to everything that is trained, against the model's own logits."""
    base = patch(causal_lm()) if first else causal_lm()
    model = adapt(kind, base, "q_proj", "v_proj", save=save)
    if not first:
        assert patch(model, audit=3) is model
    tokens, rows = batch()
    wanted = truth(model(tokens).logits.reshape(-1, V), rows.index, rows.target)
    exact = wanted.logprob.detach()
    assert_close_to_truth(model(input_ids=tokens, rows=rows).logprob, exact, exact)
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    assert any("lora_B" in name for name in trained)
    assert any("lm_head" in name for name in trained) == save
    reinforce = ll.Loss(ll.Objective(policy="reinforce"), advantage=torch.ones(len(rows)).double())
    ours = torch.autograd.grad(model(tokens, rows=rows, loss=reinforce).loss, list(trained.values()))
    theirs = torch.autograd.grad(-wanted.logprob.mean(), list(trained.values()))
    for name, mine, true in zip(trained, ours, theirs, strict=True):
        assert_gradient_close_to_truth(mine, true, true, name)
    if not first:
        assert audit_of(model).passed
        assert audit_of(model).rows > 0
    unpatch(model)
    assert not hasattr(model(tokens), "logprob")


@both
def test_a_copy_of_the_head_that_is_switched_off(kind):
    model = patch(adapt(kind, causal_lm(), "q_proj", save=True))
    head = model.get_base_model().lm_head
    tokens, rows = batch()
    on = model(tokens, rows=rows).logprob.detach()
    if kind == "peft":
        model.base_model.disable_adapter_layers()
    else:
        head.disabled = True
    off, own = model(tokens, rows=rows).logprob.detach(), ll.logprobs(model(tokens).logits, rows).logprob.detach()
    assert_close_to_truth(off, own, own)
    assert not torch.allclose(on, off)


def adapted_head(kind: str, **more):
    """A model with LoRA on its head."""
    if kind == "peft":
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False, lora_dropout=0.5, **more)
        return peft.get_peft_model(causal_lm(), config).double()
    model = causal_lm().requires_grad_(False)
    model.lm_head = LoraOfPeft(model.lm_head).double()
    return PeftDouble(model)


@both
@pytest.mark.parametrize("route", ["patch", "PolicyHead"])
def test_lora_on_the_head(kind, route):
    """Values and gradients of the adapter, against the model's own logits, on and switched off."""
    model = adapted_head(kind).eval()
    tokens, rows = batch()
    wanted = truth(model(tokens).logits.reshape(-1, V), rows.index, rows.target)
    head = model.get_base_model().lm_head
    trained = {name: x for name, x in head.named_parameters() if x.requires_grad}
    assert any("lora_A" in name for name in trained)
    assert route == "PolicyHead" or patch(model) is model
    hidden = model.get_base_model().model(tokens).last_hidden_state

    def score():
        return model(tokens, rows=rows).logprob if route == "patch" else ll.PolicyHead(head)(hidden, rows).logprob

    exact = wanted.logprob.detach()
    assert_close_to_truth(score().detach(), exact, exact)
    ours = torch.autograd.grad(score().sum(), list(trained.values()))
    theirs = torch.autograd.grad(wanted.logprob.sum(), list(trained.values()))
    for name, mine, true in zip(trained, ours, theirs, strict=True):
        assert_gradient_close_to_truth(mine, true, true, name)
    head.train()
    assert not torch.allclose(score().detach(), exact), "the adapter's dropout did not act"
    head.eval()
    if kind == "peft":
        model.base_model.disable_adapter_layers()
    else:
        head.disable_adapters = True
    off, own = score().detach(), ll.logprobs(model(tokens).logits, rows).logprob.detach()
    assert_close_to_truth(off, own, own)
    assert not torch.allclose(off, exact)
    if route == "patch":
        unpatch(model)
        assert "forward" not in vars(head)


@both
def test_an_adapter_that_is_merged_into_the_weight(kind):
    """The weight has it then, and its two matrices are still there."""
    model = adapted_head(kind).eval()
    head = model.get_base_model().lm_head
    hidden, target = torch.randn(5, head.base_layer.in_features).double(), torch.arange(5)
    apart = ll.PolicyHead(head)(hidden, target).logprob.detach()
    if kind == "peft":
        model.merge_adapter()
    else:
        head.base_layer.weight.data += 2.0 * (head.lora_B["default"].weight @ head.lora_A["default"].weight).detach()
        head.merged = True
    assert_close_to_truth(ll.PolicyHead(head)(hidden, target).logprob.detach(), apart, apart)


def test_more_than_two_matrices_is_refused():
    model = adapted_head("double").get_base_model()
    head, text = model.lm_head, r"LoraOfPeft has {}, and only weight \+ scale \* b @ a is computed here"
    for name, value, what in (
        ("use_dora", {"default": True}, "DoRA's magnitudes"),
        ("lora_variant", {"default": object()}, "the variant object"),
        ("fan_in_fan_out", True, "a transposed weight"),
    ):
        setattr(head, name, value)
        with pytest.raises(ll.LogitlessError, match=f"PolicyHead: {text.format(what)}"):
            ll.PolicyHead(head)
        delattr(head, name)
    head.lora_A["second"], head.active_adapters = head.lora_A["default"], ("default", "second")
    with pytest.raises(ll.LogitlessError, match=r"patch: LoraOfPeft has 2 active adapters \(default, second\)"):
        patch(model)
    head.active_adapters = ("default",)
    with pytest.raises(ll.LogitlessError, match="patch: audit= compares with the head's weight alone"):
        patch(model, audit=2)
    head.base_layer.register_forward_hook(lambda *_: None)
    with pytest.raises(ll.LogitlessError, match="PolicyHead: Linear has forward hooks, which would not run"):
        ll.PolicyHead(head)


def test_other_adapters_on_the_head_are_refused():
    text = r"wraps another layer, as adapters on the head do, and its weight alone would leave the adapter out. Leave"
    model = adapt("double", causal_lm(), "q_proj", "lm_head")
    with pytest.raises(ll.LogitlessError, match=rf"patch: LoraLinear {text}"):
        patch(model)
    assert "_logitless" not in vars(model.get_base_model())
    head = model.get_base_model().lm_head
    with pytest.raises(ll.LogitlessError, match=f"PolicyHead: {type(head).__name__} {text}"):
        ll.PolicyHead(head)
    with pytest.raises(ll.LogitlessError, match=f"Logits: weight must be a tensor but is .*{text}"):
        ll.logprobs(ll.Logits(torch.zeros(2, 16), head), torch.tensor([1, 2]))


@both
def test_an_adapter_that_comes_after_the_patch_is_refused(kind):
    later = adapt(kind, patch(causal_lm()), "lm_head")
    tokens, rows = batch()
    with pytest.raises(ll.LogitlessError, match=r"the head is now a \w+, which wraps.* call patch after peft"):
        later(tokens, rows=rows)


@both
def test_virtual_tokens_are_refused(kind):
    if kind == "peft":
        peft = pytest.importorskip("peft")
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        model = peft.get_peft_model(causal_lm(), config)
    else:
        model = PeftDouble(causal_lm(), prompt_learning=True)
    with pytest.raises(ll.LogitlessError, match=r"patch: \w+ puts virtual tokens before those of the batch"):
        patch(model)


def deferred_gradients(model, read, deferred: bool) -> dict[str, Tensor]:
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    handle = ll.defer(model, strict=True) if deferred else None
    found = torch.autograd.grad(read(model), list(trained.values()))
    if handle is not None:
        handle.undo()
    return dict(zip(trained, found, strict=True))


@both
@pytest.mark.parametrize("adapters", ["inside of the layers", "a copy of the head", "on the head"])
def test_a_deferred_model_under_peft(kind, adapters):
    """User code unchanged: gradients of everything that is trained are those of the model's own logits."""
    if adapters == "on the head":
        model = adapted_head(kind).eval()
    else:
        model = adapt(kind, causal_lm(), "q_proj", save=adapters == "a copy of the head")
    tokens, _ = batch()

    def read(model):
        logp = torch.log_softmax(model(tokens).logits[:, :-1] / 0.7, dim=-1)
        return logp.gather(-1, tokens[:, 1:, None]).sum() + 0.1 * (logp.exp() * logp).sum(-1).mean()

    wanted, ours = (deferred_gradients(model, read, deferred) for deferred in (False, True))
    assert any("lm_head" in name for name in wanted) == (adapters != "inside of the layers")
    for name, true in wanted.items():
        assert_gradient_close_to_truth(ours[name], true, true, name)


def test_what_a_deferred_lora_refuses():
    model = adapted_head("double").get_base_model().train()
    tokens, _ = batch()
    with ll.defer(model):
        with pytest.raises(
            ll.LogitlessError, match=r"dropout of 0.5, which every reading.*lora_dropout=0 for the head"
        ):
            model(tokens)
    model.eval()
    with ll.defer(model):
        with pytest.raises(ll.LogitlessError, match=r"called with more than hidden states \(adapter_names\)"):
            model.lm_head(torch.zeros(2, 16).double(), adapter_names=["default"])
    model.lm_head.base_layer.register_forward_hook(lambda *_: None)
    with pytest.raises(ll.LogitlessError, match=r"inside of the LoRA on the head has forward hooks, which would not"):
        ll.defer(model)
    with pytest.raises(ll.LogitlessError, match=r"defer: LoraLinear wraps another layer"):
        ll.defer(adapt("double", causal_lm(), "lm_head"))


@pytest.mark.filterwarnings("ignore::logitless.operands.LogitsMade")
def test_an_adapter_that_comes_after_defer_computes_logits_and_is_counted():
    from logitless.operands.logits import MADE

    model = causal_lm()
    ll.defer(model)
    MADE.clear()
    later = adapt("double", model, "lm_head")
    tokens, rows = batch()
    found = ll.logprobs(later(tokens).logits, rows).logprob
    assert sum(MADE.values()) == 1
    model.lm_head.base_layer.forward = nn.Linear.forward.__get__(model.lm_head.base_layer)
    assert_close_to_truth(found, *(ll.logprobs(later(tokens).logits, rows).logprob,) * 2)
