"""SkyRL's worker: rows before the head, dtypes, classes that are called directly, errors."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import checkout, load
from parity import run
from shared.skyrl import (
    LAYOUTS,
    MASK,
    MODEL_UTILS,
    TEMPERATURE,
    TORCH_UTILS,
    WRAPPER,
    D,
    V,
    action_weights,
    functional,
    logits_of,
    on_cpu,
)
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import logitless
from benchmarks.bench.adapters import ENTRIES, SMOKE, measure
from logitless import LogitlessError


@pytest.fixture(scope="module", autouse=True)
def skyrl():
    load("skyrl", TORCH_UTILS, MODEL_UTILS, WRAPPER)
    load("skyrl")


@pytest.fixture
def alone():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_rows_that_reach_no_result_are_not_computed(alone):
    """A prompt's rows cost nothing in the entropy of a batch, and padding none anywhere."""
    module = sys.modules[MODEL_UTILS]
    layout, ids = LAYOUTS["masked"], torch.randint(V, (1, 40))
    logits = torch.randn(1, 40, V)
    scored = torch.zeros(40, dtype=torch.bool)
    for start, places in zip(layout.bounds.tolist(), layout.place, strict=False):
        scored[start : start + len(places)] = True
    logits[:, ~scored] = torch.nan
    logits.requires_grad_()
    logitless.install("skyrl")
    pack = (ids, layout.bounds, 13, 0, V, alone)
    out = module.from_parallel_logits_to_logprobs_packed_sequences(logits, *pack, attention_mask=MASK)
    out.sum().backward()
    assert out.isfinite().all()
    assert logits.grad[:, ~scored].abs().max() == 0
    with torch.no_grad():
        assert not module.from_parallel_logits_to_logprobs_packed_sequences(logits, *pack).requires_grad
    again = module.from_parallel_logits_to_logprobs_packed_sequences(logits, *pack, True, attention_mask=MASK)
    assert not again.requires_grad  # inference_only
    assert torch.equal(again, out)
    hidden, weights = torch.randn(1, 40, D), action_weights(layout, None)
    used = torch.zeros(40, dtype=torch.bool)
    for start, places in zip(layout.bounds.tolist(), layout.place, strict=False):
        used[start : start + len(places)] = torch.tensor([weights[place] != 0 for place in places])
    hidden[:, ~used] = torch.nan
    hidden.requires_grad_()
    entropy = module.from_parallel_hidden_to_entropy_packed_sequences
    metric, part = entropy(hidden, torch.randn(V, D), layout.bounds, 13, 6, MASK, None, alone, alone)
    part.backward()
    assert metric.isfinite()
    assert not metric.requires_grad
    assert hidden.grad[:, ~used].abs().max() == 0
    assert hidden.grad[:, used].abs().min() > 0


class Stage:
    """The last stage of a Megatron model that hands its hidden states to an output processor, as SkyRL asks it to."""

    config = SimpleNamespace(fp8=None, fp8_recipe=None, fp8_output_proj=False, use_mup=False)

    def __init__(self):
        torch.manual_seed(3)
        parallel = {"sequence_parallel": False, "allreduce_dgrad": False}
        self.embed, self.layer = torch.randn(V, D), SimpleNamespace(weight=torch.randn(V, D), **parallel)

    def forward(self, ids, *_, output_processor, output_processor_context, **__):
        hidden = self.embed[ids].transpose(0, 1)
        return output_processor(hidden_states=hidden, output_layer=self.layer, context=output_processor_context)

    __call__ = forward


def in_turn(forward_step_func, data_iterator, model, num_microbatches, **_):
    """Megatron's schedule of a forward pass without a pipeline, which wants a GPU."""
    steps = (forward_step_func(data_iterator, model[0]) for _ in range(num_microbatches))
    return [collect(output)[1] for output, collect in steps]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_a_pass_of_the_worker_multiplies_response_rows_alone(alone, monkeypatch, packed):
    """SkyRL's own pass for old and reference log-probs, with the fused head."""
    from megatron.core import fp8_utils, parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    module = sys.modules[WRAPPER]
    newer = "total_tokens=" in inspect.getsource(module.preprocess_packed_seqs)
    if packed and newer and "total_tokens" not in PackedSeqParams.__dataclass_fields__:
        pytest.skip("this SkyRL packs for a newer Megatron-Core")
    if hasattr(module, "call_model_with_fused_lm_head") and not hasattr(fp8_utils, "is_mxfp8_output_proj_active"):
        pytest.skip("this SkyRL's fused head is for a newer Megatron-Core")
    monkeypatch.setattr(module, "get_forward_backward_func", lambda: in_turn)
    monkeypatch.setattr(module, "get_model_config", lambda model: model.config)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    worker = object.__new__(module.MegatronModelWrapper)
    cfg = SimpleNamespace(logprobs_chunk_size=5, algorithm=SimpleNamespace(enable_sample_support_replay=False))
    facts = {"_fused_lm_head": True, "_fused_lm_head_backend": "torch", "is_vlm": False, "cfg": cfg}
    vars(worker).update({**facts, "remove_microbatch_padding": packed, "actor_module": [Stage()]})
    ids = torch.randint(V, MASK.shape)

    def log_probs():
        positions = (MASK.long().cumsum(1) - 1).clamp(min=0)
        batch = {"sequences": ids, "attention_mask": MASK.long(), "position_ids": positions, "num_actions": 6}
        batch["rollout_expert_indices"] = None
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            out = worker.forward([batch], MASK.shape[1], 3, temperature=TEMPERATURE)
        return out, counter.get_total_flops() / (2 * V * D)

    parallel_state.initialize_model_parallel()
    try:
        with on_cpu():
            theirs, their_rows = log_probs()
        logitless.install("skyrl", rows_before_head=False)
        every, all_rows = log_probs()
        logitless.uninstall("skyrl")
        logitless.install("skyrl")
        ours, rows = log_probs()
        monkeypatch.setattr(Stage, "config", SimpleNamespace(fp8="e4m3", fp8_output_proj=True))
        with pytest.raises(LogitlessError, match=r"fused_lm_head_logprob: .*has fp8_output_proj=True"):
            log_probs()
    finally:
        parallel_state.destroy_model_parallel()
    stage, follows = worker.actor_module[0], MASK[:, :-1] & MASK[:, 1:]
    truth = (stage.embed.double()[ids[:, :-1]] @ stage.layer.weight.double().T / TEMPERATURE).log_softmax(-1)
    truth = truth.gather(-1, ids[:, 1:, None])[..., 0]
    for mine in (ours, every):
        assert_close_to_truth(*(x[:, -6:][follows[:, -6:]] for x in (mine, truth, theirs)))
    # The last six of each line's twelve results are read; packed lines have none for padding.
    assert (their_rows, all_rows, rows) == ((27, 24, 12) if packed else (39, 36, 18))


def test_sequences_without_a_result(alone):
    """One token each: nothing to predict, and still a graph."""
    module = sys.modules[MODEL_UTILS]
    logits = torch.randn(1, 4, V, requires_grad=True)
    logitless.install("skyrl")
    bounds, mask = torch.tensor([0, 2, 4]), torch.tensor([[True, False], [False, True]])
    pack = (torch.zeros(1, 4, dtype=torch.int64), bounds, 2, 0, V, alone)
    out = module.from_parallel_logits_to_logprobs_packed_sequences(logits, *pack, attention_mask=mask)
    assert out.tolist() == [[0], [0]]
    out.sum().backward()
    assert logits.grad.abs().max() == 0


def test_hidden_states_in_another_dtype_than_the_head(alone):
    module = sys.modules[MODEL_UTILS]
    hidden, weight = torch.randn(1, 6, D).bfloat16().requires_grad_(), torch.randn(V, D, requires_grad=True)
    ids = torch.randint(V, (1, 6))
    function = lambda: module.from_parallel_hidden_to_logprobs(hidden, weight, ids, 0, V, alone)  # noqa: E731
    theirs = function()
    logitless.install("skyrl")
    ours = function()
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    ours.sum().backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)


def test_the_rounding_of_half_precision_is_kept_unless_accurate(alone):
    module = sys.modules[MODEL_UTILS]
    hidden, weight = torch.randn(2, 9, 64).bfloat16(), torch.randn(V, 64).bfloat16()
    ids = torch.randint(V, (2, 9))
    exact = (hidden.double() @ weight.double().T).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    score = lambda: module.from_parallel_hidden_to_logprobs(hidden, weight, ids, 0, V, alone, chunk_size=4)  # noqa: E731
    theirs = score()
    logitless.install("skyrl", audit=3)
    ours = score()
    assert logitless.status().hosts[0].audit.passed
    logitless.uninstall("skyrl")
    logitless.install("skyrl", accurate=True)
    accurate = score()
    assert (ours - theirs).abs().max() < 1e-5
    assert (theirs - exact).abs().max() > 1e-2
    assert (accurate - exact).abs().max() < 1e-5


def test_classes_that_are_called_directly(alone):
    """Targets are shifted by the caller; an id outside the vocabulary has log-prob 0 and the gradient -p g."""
    module = sys.modules[MODEL_UTILS]
    hidden, weight, ids = torch.randn(2, 9, D), torch.randn(V, D), torch.randint(V, (2, 9))
    ids[1, 3] = V + 2
    calls = {
        "DistributedLogprob": lambda c, h, w: c.apply(h @ w.T, ids, 0, V, alone, False),
        "ChunkedDistributedLogprob": lambda c, h, w: c.apply(h @ w.T, ids, 0, V, 4, alone, False),
        "FusedLinearChunkedDistributedLogprob": lambda c, h, w: c.apply(h, w, ids, 0, V, 4, alone, False),
    }
    upstream = [torch.randn(2, 9)]

    def truth(h: Tensor, w: Tensor) -> Tensor:
        log_z = (h @ w.T).logsumexp(-1)
        chosen = (h @ w.T).gather(-1, ids.clamp(max=V - 1)[..., None])[..., 0]
        return torch.where(ids < V, chosen - log_z, log_z.detach() - log_z)

    exact, exact_gradients = run(truth, [hidden.double(), weight.double()], [upstream[0].double()])
    for name, call in calls.items():
        function = lambda h, w, name=name, call=call: call(getattr(module, name), h, w)  # noqa: E731
        theirs, their_gradients = run(function, [hidden, weight], upstream)
        logitless.install("skyrl", audit=3)
        ours, our_gradients = run(function, [hidden, weight], upstream)
        counts = {entry.name: entry.calls for entry in logitless.status().hosts[0].replaced}
        assert counts[f"{MODEL_UTILS}.{name}.apply"] == 1
        logitless.uninstall("skyrl")
        assert_close_to_truth(ours[0], exact[0], theirs[0], name)
        for mine, right, other in zip(our_gradients, exact_gradients, their_gradients, strict=True):
            assert_gradient_close_to_truth(mine, right, other, name)


def test_wrong_operands_are_named(alone):
    module = sys.modules[MODEL_UTILS]
    logitless.install("skyrl")
    logits, ids, bounds = torch.randn(1, 40, V), torch.zeros(1, 40, dtype=torch.int64), torch.tensor([0, 16, 32, 40])

    def packed(z=logits, target=ids, cu=bounds, width=13, stop=V, **more):
        return module.from_parallel_logits_to_logprobs_packed_sequences(z, target, cu, width, 0, stop, alone, **more)

    for text, call in {
        r"packed_sequences: target must be \[1, 40\] but is \[1, 39\]": lambda: packed(target=ids[:, :39]),
        r"vocab_parallel_logits must be \[1, T / CP, ...\], one pack, but is \[40, 62\]": lambda: packed(logits[0]),
        r"cu_seqlens_padded must rise from 0 but is \[0, 20, 10, 40\]": lambda: packed(
            cu=torch.tensor([0, 20, 10, 40])
        ),
        r"cu_seqlens_padded ends at 32 but 1 ranks of 40 tokens hold 40": lambda: packed(cu=bounds[:3]),
        r"attention_mask must be \[3, 13\], .* but is \[3, 12\]": lambda: packed(attention_mask=MASK[:, 1:]),
        r"sequence 2 has 9 tokens but cu_seqlens_padded leaves 8": lambda: packed(
            attention_mask=torch.ones(3, 9).bool(), width=9
        ),
        r"sub_seq_lengths describes 2 sub-sequences but cu_seqlens_padded describes 3": lambda: packed(
            sub_seq_lengths=[[9, 5]]
        ),
        r"vocab_start_index 0 and vocab_end_index 61 describe 61 columns, not 62": lambda: packed(stop=61),
    }.items():
        with pytest.raises(LogitlessError, match=text):
            call()
    with pytest.raises(LogitlessError, match=r"target has 6 tokens per sequence but 1 ranks of 5 hold 5"):
        module.from_parallel_logits_to_logprobs(torch.randn(2, 5, V), ids[:, :12].view(2, 6), 0, V, alone)
    entropy = module.from_parallel_hidden_to_entropy_packed_sequences
    with pytest.raises(LogitlessError, match="num_actions must be between 1 and 12 but is 0"):
        entropy(torch.randn(1, 40, D), torch.randn(V, D), bounds, 13, 0, MASK, None, alone, alone)
    with pytest.raises(LogitlessError, match=r"mask shape \[2, 4\] does not match logits shape \[2, 3, 507\]"):
        functional().chunked_entropy_from_logits(logits_of(2, 3), attention_mask=torch.ones(2, 4))


def test_everything_is_replaced_and_put_back():
    module = sys.modules[MODEL_UTILS]
    before = module.from_parallel_logits_to_logprobs, functional().logprobs_from_logits
    report = logitless.install("skyrl")
    assert checkout("skyrl") or report.version in ("0.3.0", "0.4.0")
    # Of 0.3 two functions of 0.4 are missing, and of main before it one.
    assert (len(report.replaced), len(report.missing)) in ((17, 2), (18, 1), (19, 0))
    assert module.from_parallel_logits_to_logprobs is not before[0]
    logitless.uninstall("skyrl")
    assert (module.from_parallel_logits_to_logprobs, functional().logprobs_from_logits) == before


@pytest.mark.skipif(checkout("skyrl") is not None, reason="benchmarks run on what is installed")
def test_the_benchmark_runs():
    record = measure(ENTRIES["skyrl"], torch.device("cpu"), SMOKE, repeats=1)
    assert record.difference < 1e-5
    assert record.after_bytes < record.before_bytes
    assert not logitless.status().hosts
