"""verl with ``rows_before_head``: its own engine and losses around a small body, with and without ours."""

from __future__ import annotations

import inspect
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import load
from torch.utils.flop_counter import FlopCounterMode

import logitless
from logitless.adapters.verl_rows import get_mcore_forward_fused_model_engine_fn as fused

V, D, TEMPERATURE = 210, 12, 0.8
FSDP, DENSE = "verl.workers.engine.fsdp.transformer_impl", "verl.models.transformers.dense_common"
PADDING, LOSSES = "verl.workers.utils.padding", "verl.workers.utils.losses"
MEGATRON, FUSED = "verl.workers.engine.megatron.transformer_impl", "verl.models.mcore.model_forward_fused"
MODULES = ("verl", FSDP, DENSE, PADDING, LOSSES, MEGATRON, FUSED)
PROMPTS, RESPONSES = [3, 7, 1, 4], [5, 2, 6, 0]


@pytest.fixture(scope="module", autouse=True)
def verl():
    return load("verl", *MODULES)


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


def counted(function, columns=V):
    """What a function returns without gradients, and how many rows it multiplies with a head of so many columns."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        results = function()
    rows, rest = divmod(counter.get_total_flops(), 2 * columns * D)
    assert not rest
    return results, rows


def products(engine, batch):
    return counted(lambda: scores(engine, batch))[1]


@pytest.mark.parametrize("pad", [0, 8])
@pytest.mark.parametrize("kind", ["nested", "padded", "supervised"])
def test_what_verl_reads_is_the_same(kind, pad):
    if pad and "pad_to_length" not in inspect.getsource(sys.modules[FSDP]):
        pytest.skip("this release of verl does not pad to a length")
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


def test_other_batches_are_left_alone():
    """Without fused heads there are no labels to change, and without responses or a loss mask every row is scored."""
    batch = batch_of("nested", fused=False)
    engine = engine_of(Body())
    before, _ = engine.prepare_model_inputs(batch)
    logitless.install("verl", rows_before_head=True)
    after, _ = engine.prepare_model_inputs(batch)
    assert "shift_labels" not in after
    assert torch.equal(after["input_ids"], before["input_ids"])
    plain = batch_of("supervised")
    plain["loss_mask"] = torch.ones(4, 3)
    labels = engine.prepare_model_inputs(plain)[0]["shift_labels"]
    assert torch.equal(labels, plain["input_ids"].values().roll(-1)[None])


@pytest.mark.parametrize("layers", [None, 1])
def test_labels_stay_whole_for_layers_that_predict_further_tokens(layers):
    engine = object.__new__(sys.modules[MEGATRON].MegatronEngineWithLMHead)
    engine.tf_config = SimpleNamespace(mtp_num_layers=layers)
    logitless.install("verl", rows_before_head=True)
    ids = engine.prepare_model_inputs(batch_of("nested"))["input_ids"]
    seen = []
    forward = fused.make(lambda _: lambda labels, **__: seen.append(labels.values()), {})
    forward(None)(input_ids=ids, labels=ids.clone())
    assert int((seen[0] == -100).sum()) == (sum(PROMPTS) if layers is None else 0)


# Over ranks: Ulysses in the FSDP engine, context and tensor parallelism in Megatron's.


class Stage:
    """The last stage of a Megatron model that hands its hidden states to an output processor, as verl asks it to."""

    pre_process = post_process = True
    _verl_fused_forward_mode = "hook"
    config = SimpleNamespace(fp8=None, sequence_parallel=False, config_logger_dir="")

    def __init__(self, body, weight):
        self.body, self.weight = body, weight

    def __call__(self, **inputs):
        if "output_processor" not in inputs:
            # Before verl had the hook, it put a forward of its own in place of the model's.
            return sys.modules[FUSED]._fused_GPTModel_forward(self, **inputs)
        return inputs["output_processor"](
            hidden_states=self._preprocess(inputs["input_ids"])[0], output_layer=self.output_layer, output_weight=None,
            labels=inputs["labels"], context=inputs["output_processor_context"], config=self.config,
        )  # fmt: skip

    @property
    def output_layer(self):
        return SimpleNamespace(weight=self.weight)

    def _preprocess(self, input_ids, **_):
        return self.body.model(input_ids)[0].transpose(0, 1), None, None, None, None

    def decoder(self, hidden_states, **_):
        return hidden_states


def megatron_scores(batch, weight):
    """Inputs and fused forward as ``forward_step`` of verl's Megatron engine chains them."""
    from verl.models.mcore import get_mcore_forward_fused_model_engine_fn

    engine = object.__new__(sys.modules[MEGATRON].MegatronEngineWithLMHead)
    ids = engine.prepare_model_inputs(batch)["input_ids"]
    forward = get_mcore_forward_fused_model_engine_fn(SimpleNamespace(architectures=["Qwen3ForCausalLM"]))
    output = forward(
        model=Stage(Body(), weight), input_ids=ids, labels=ids.clone(), multi_modal_inputs={},
        temperature=TEMPERATURE, calculate_entropy=True, pad_token_id=0,
    )  # fmt: skip
    return [sys.modules[PADDING].no_padding_2_padding(output[name], batch) for name in ("log_probs", "entropy")]


def on_two_ranks(rank, world):
    """What verl reads on this rank and the rows that it multiplied, for each way of splitting the work."""
    import torch.distributed as dist

    load("verl", *MODULES)
    ulysses, parallel_state = load("verl", "verl.utils.ulysses", "megatron.core.parallel_state")
    batch, engine = batch_of("nested"), engine_of(Body(), use_ulysses_sp=True, ulysses_sequence_parallel_size=world)
    weight, found = engine.module.lm_head.weight.detach(), {}
    logitless.install("verl", rows_before_head=True)
    try:
        ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD)
        with warnings.catch_warnings():
            # verl calls what newer torch has renamed.
            warnings.filterwarnings("ignore", ".*all_gather_into_tensor", FutureWarning)
            found["ulysses"] = counted(lambda: scores(engine, batch)[1], V)
        ulysses.set_ulysses_sequence_parallel_group(None)
        for kind, own in {"context_parallel_size": weight, "tensor_model_parallel_size": weight.chunk(2)[rank]}.items():
            parallel_state.initialize_model_parallel(**{kind: world})
            found[kind] = counted(lambda own=own: megatron_scores(batch, own), own.shape[0])
            parallel_state.destroy_model_parallel()
    finally:
        logitless.uninstall("verl")
    return found


def test_over_ranks(ranks):
    exact = scores(engine_of(Body(torch.float64)), batch_of("nested"))[1]
    plain = scores(engine_of(Body()), batch_of("nested"))[1]
    found = ranks(on_two_ranks, 2, timeout=120)
    for kind in found[0]:
        for results, _ in (rank[kind] for rank in found):
            for mine, truth, other in zip(results, exact, plain, strict=True):
                assert_close_to_truth(mine, truth, other, kind)
    counts = {kind: [rank[kind][1] for rank in found] for kind in found[0]}
    assert sum(counts["ulysses"]) == sum(RESPONSES)
    # The engine pads sequences of 8, 9, 7 and 4 tokens to multiples of 2, or of 4 where they are cut zigzag. Padding
    # has a label, in some releases one that was rolled there.
    assert counts["tensor_model_parallel_size"] == [sum(RESPONSES) + 2] * 2
    assert 0 <= sum(counts["context_parallel_size"]) - sum(RESPONSES) <= 4
