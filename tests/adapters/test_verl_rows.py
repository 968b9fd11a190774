"""verl with ``rows_before_head``: its own engine and losses around a small body, with and without ours."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import load
from torch.utils.flop_counter import FlopCounterMode

import logitless

V, D, TEMPERATURE = 211, 12, 0.8
FSDP, DENSE = "verl.workers.engine.fsdp.transformer_impl", "verl.models.transformers.dense_common"
PADDING, LOSSES = "verl.workers.utils.padding", "verl.workers.utils.losses"
PROMPTS, RESPONSES = [3, 7, 1, 4], [5, 2, 6, 0]


@pytest.fixture(scope="module", autouse=True)
def verl():
    return load("verl", "verl", FSDP, DENSE, PADDING, LOSSES)


class Batch(dict):
    """What the engines and losses ask of a TensorDict."""

    batch_size = (len(PROMPTS),)


class Body(torch.nn.Module):
    """Hidden states without a matrix product, and verl's own fused forward behind them; in float64 plain torch."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.lm_head = torch.nn.Embedding(V, D), torch.nn.Linear(D, V, bias=False)
        self.config = SimpleNamespace(output_attentions=False, output_hidden_states=False)
        self.to(dtype)

    def model(self, input_ids, **_):
        hidden = torch.tanh(self.embed(input_ids)) * 3
        return Output((hidden,))

    def forward(self, **inputs):
        if self.lm_head.weight.dtype == torch.float64:
            logits = self.lm_head(self.model(inputs["input_ids"])[0]) / inputs["temperature"]
            return SimpleNamespace(**truth_of(logits, inputs["shift_labels"]))
        return sys.modules[DENSE].forward_with_torch_backend(self, **inputs)


def truth_of(logits, labels):
    logp = logits.log_softmax(-1)
    chosen = logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return {"log_probs": chosen, "entropy": -(logp.exp() * logp).sum(-1)}


class Output(tuple):
    past_key_values = hidden_states = attentions = None


def nested(parts):
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def batch_of(kind, fused=True):
    """A batch in one of the forms that verl's trainers make."""
    torch.manual_seed(7)
    ids = [torch.randint(V, (p + r,)) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    batch = Batch(
        input_ids=nested(ids),
        position_ids=nested(torch.arange(len(x)) for x in ids),
        temperature=TEMPERATURE,
        use_fused_kernels=fused,
        calculate_entropy=True,
    )
    if kind == "supervised":
        masks = [(torch.arange(len(x)) >= p).long() for x, p in zip(ids, PROMPTS, strict=True)]
        masks[1][-1] = 0
        return batch | Batch(loss_mask=nested(masks), dp_size=1, batch_num_tokens=1)
    batch["loss_mask"] = torch.ones(len(ids), max(RESPONSES))
    if kind == "nested":
        prompts, responses = zip(*(x.split([p, len(x) - p]) for x, p in zip(ids, PROMPTS, strict=True)), strict=True)
        return batch | Batch(prompts=nested(prompts), responses=nested(responses))
    wide = max(PROMPTS)
    mask = torch.zeros(len(ids), wide + max(RESPONSES), dtype=torch.int64)
    for line, p, r in zip(mask, PROMPTS, RESPONSES, strict=True):
        line[wide - p : wide + r] = 1
    empty = torch.zeros_like(mask)
    return batch | Batch(attention_mask=mask, prompts=empty[:, :wide], responses=empty[:, wide:])


def engine_of(body, **more):
    engine = object.__new__(sys.modules[FSDP].FSDPEngineWithLMHead)
    vars(engine).update({"module": body, "pad_to_length": False, "use_ulysses_sp": False, **more})
    return engine


def scores(engine, batch):
    """Log-probs and entropies as verl's engine makes them, and what its losses read of these."""
    inputs, args = engine.prepare_model_inputs(batch)
    output = engine.prepare_model_outputs(engine.module.forward(**inputs), args, batch, None)
    whole = [output[name].values() for name in ("log_probs", "entropy")]
    if "prompts" not in batch:
        return whole, [sys.modules[LOSSES].sft_loss(None, output, batch)[0].reshape(1)]
    return whole, [sys.modules[PADDING].no_padding_2_padding(output[name], batch) for name in ("log_probs", "entropy")]


def results_and_gradients(engine, batch):
    whole, read = scores(engine, batch)
    torch.manual_seed(9)
    loss = sum((x.double() * torch.randn(x.shape, dtype=torch.float64)).sum() for x in read)
    weights = list(engine.module.parameters())
    return whole, [x.detach() for x in read], list(torch.autograd.grad(loss, weights))


def products(engine, batch):
    """How many rows a pass without gradients multiplies with the head."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        scores(engine, batch)
    rows, rest = divmod(counter.get_total_flops(), 2 * V * D)
    assert not rest
    return rows


@pytest.mark.parametrize("pad", [0, 8])
@pytest.mark.parametrize("kind", ["nested", "padded", "supervised"])
def test_what_verl_reads_is_the_same(kind, pad):
    batch, padding = batch_of(kind), {"pad_to_length": bool(pad), "pad_to_length_bucket": pad}
    total, wanted = sum(PROMPTS) + sum(RESPONSES), sum(RESPONSES) - (kind == "supervised")
    _, exact, exact_gradients = results_and_gradients(engine_of(Body(torch.float64), **padding), batch)
    engine = engine_of(Body(), **padding)
    _, theirs, their_gradients = results_and_gradients(engine, batch)
    assert products(engine, batch) == total + -total % (pad or 1)
    logitless.install("verl", rows_before_head=True, audit=5)
    whole, ours, gradients = results_and_gradients(engine, batch)
    for mine, truth, other in zip(ours, exact, theirs, strict=True):
        assert_close_to_truth(mine, truth, other)
    for mine, truth, other in zip(gradients, exact_gradients, their_gradients, strict=True):
        assert_gradient_close_to_truth(mine, truth, other)
    for results in whole:
        assert int((results != 0).sum()) == wanted
    (status,) = logitless.status().hosts
    assert status.audit.passed
    assert status.audit.rows == 2 * 5
    for options, count in (({"rows_before_head": True}, wanted), ({}, total + -total % (pad or 1))):
        logitless.uninstall("verl")
        logitless.install("verl", **options)
        assert products(engine, batch) == count
