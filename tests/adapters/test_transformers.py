"""Patched causal LMs against their own logits in float64: families, shapes, gradients, shards, refusals."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
from types import SimpleNamespace

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import takes
from torch import nn
from truth import plain, truth

import logitless
from benchmarks.bench.measure import peak_bytes
from logitless import Kept, LogitlessError, Rows
from logitless.adapters.transformers import TESTED, audit_of, patch, unpatch

transformers = pytest.importorskip("transformers")

# Releases of transformers 4 tell themselves so.
pytestmark = pytest.mark.filterwarnings("ignore:The `sliding_window_pattern` attribute is deprecated:FutureWarning")

V = 101
SIZES = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16}
FAMILIES = {
    "cohere": {"logit_scale": 0.0625},
    "cohere2": {"logit_scale": 0.25},
    "deepseek_v3": {**LATENT, **ROUTED, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 5.0},
    "gemma3_text": {"head_dim": 8, "final_logit_softcapping": 3.0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "granite": {"logits_scaling": 8.0},
    "llama": {},
    "mistral": {},
    "mixtral": {"num_local_experts": 4},
    "phi": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": EXPERTS,
}
HEADS = {"cohere": {"scale": 0.0625}, "cohere2": {"scale": 0.25}, "granite": {"scale": 0.125}}
HEADS |= {"gemma2": {"softcap": 5.0}, "gemma3_text": {"softcap": 3.0}}


def build(family: str = "llama", **more):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **more})
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)  # norms and biases too
    if family in ("deepseek_v3", "mixtral", "qwen3_moe") and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped products know no float64
    return model.eval()


def batch(n=3, length=11):
    tokens = torch.randint(3, V, (n, length))
    return tokens, Rows.padded([list(row) for row in tokens.tolist()], [5, 9, 2][:n])


def test_every_tested_family_is_tested():
    assert tuple(sorted(FAMILIES)) == TESTED


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients(family):
    """Against the model's own logits in float64, and with its own float32 logits as the yardstick."""
    if family == "deepseek_v3" and transformers.__version__.startswith("4."):
        pytest.skip("the experts of transformers 4 do not run in float64")
    model = build(family)
    exact = copy.deepcopy(model).double()
    tokens, rows = batch()
    upstream = torch.randn(2, len(rows))
    scores = []
    for scored, one in ((truth, exact), (plain, model)):
        out = scored(one(tokens).logits.reshape(-1, V), rows.index, rows.target, temperature=0.8)
        gradient = torch.autograd.grad(
            [out.logprob, out.entropy], list(one.parameters()), list(upstream.to(out.logprob)), allow_unused=True
        )
        scores.append((out, gradient))
    (wanted, true_gradients), (theirs, their_gradients) = scores
    assert patch(model, memory="8KiB") is model
    ours = model(tokens, rows=rows, entropy="grad", temperature=0.8)
    for name in ("logprob", "entropy", "log_z"):
        assert_close_to_truth(getattr(ours, name), getattr(wanted, name), getattr(theirs, name), name)
    gradients = torch.autograd.grad(
        [ours.logprob, ours.entropy], list(model.parameters()), list(upstream), allow_unused=True
    )
    for (name, _), mine, exactly, other in zip(
        model.named_parameters(), gradients, true_gradients, their_gradients, strict=True
    ):
        assert (mine is None) == (other is None), name
        if mine is not None:
            # An expert without tokens has no gradient to compare.
            if exactly.norm() > 1e-12:
                assert_gradient_close_to_truth(mine, exactly, other, name)
    for name, value in HEADS.get(family, {}).items():
        assert getattr(model._logitless.head, name) == value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model = build("gemma2").to(dtype)
    patch(model, audit=4)
    tokens, rows = batch()
    out = model(tokens, rows=rows, entropy="value")
    assert out.logprob.dtype == torch.float32
    hidden = model.base_model(tokens).last_hidden_state.double().reshape(-1, 32)
    z = 5 * torch.tanh(hidden @ model.lm_head.weight.double().T / 5)
    assert (out.logprob - truth(z, rows.index, rows.target).logprob).abs().max() < 1e-5
    assert audit_of(model).rows == 8
    assert audit_of(model).passed


def test_what_is_not_scored_stays_as_it_was():
    model = build()
    tokens, rows = batch()
    names, before = list(model.state_dict()), model(tokens, labels=tokens)
    continued = model.generate(tokens, max_new_tokens=3, do_sample=False)
    patch(model)
    after = model(tokens, labels=tokens)
    assert torch.equal(after.logits, before.logits)
    assert torch.equal(after.loss, before.loss)
    assert torch.equal(model.generate(tokens, max_new_tokens=3, do_sample=False), continued)
    assert list(model.state_dict()) == names
    out = model(tokens, None, None, rows=rows)  # positional, as the model's own
    assert out.entropy is None
    assert out.backbone.last_hidden_state.shape == (3, 11, 32)
    assert out.backbone.past_key_values is None
    unpatch(model)
    assert "forward" not in vars(model)
    assert "forward" not in vars(model.lm_head)
    assert model(tokens).logits.shape == (3, 11, V)


def test_masks_and_other_inputs_reach_the_backbone():
    model = build()
    tokens, rows = batch()
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    own = model(input_ids=tokens, attention_mask=mask).logits
    patch(model)
    for out in (model(tokens, mask, rows=rows), model(attention_mask=mask, input_ids=tokens, rows=rows)):
        expected = plain(own.reshape(-1, V), rows.index, rows.target).logprob
        torch.testing.assert_close(out.logprob, expected, atol=1e-5, rtol=0)
    routed = build("mixtral")
    patch(routed)
    assert len(routed(tokens, rows=rows, output_router_logits=True).backbone.router_logits) == 2


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_loss_in_the_forward(family):
    """Loss and gradients of everything, against the objective on the model's own logits in float64."""
    model = build(family)
    exact = copy.deepcopy(model).double()
    tokens, rows = batch()
    advantage, old = torch.randn(2, len(rows))
    objective = logitless.Objective(entropy_coef=0.1, clip=0.5)
    fields = {"advantage": advantage, "old_logprob": old - 4}
    found = []
    for scored, one, to in ((truth, exact, torch.float64), (plain, model, torch.float32)):
        out = scored(one(tokens).logits.reshape(-1, V), rows.index, rows.target, temperature=0.8)
        stats = logitless.TokenStats(out.logprob, out.entropy, None)
        value, _ = objective(stats, rows, **{name: x.to(to) for name, x in fields.items()})
        found.append((value, torch.autograd.grad(value, list(one.parameters()))))
    patch(model, memory="8KiB", audit=4)
    out = model(tokens, rows=rows, loss=logitless.Loss(objective, temperature=0.8, **fields))
    ours = (out[0], torch.autograd.grad(out.loss, list(model.parameters())))
    assert_close_to_truth(out.loss[None], found[0][0][None], found[1][0][None], "loss")
    for (name, _), *three in zip(model.named_parameters(), ours[1], found[0][1], found[1][1], strict=True):
        assert_gradient_close_to_truth(*three, name)
    assert audit_of(model).passed
    assert audit_of(model).rows == 8  # log-prob and entropy of four rows
    torch.testing.assert_close(out.stats.logprob, model(tokens, rows=rows, temperature=0.8).logprob)
    by_keyword = model(tokens, rows=rows, temperature=0.8, loss=logitless.Loss(objective, **fields))
    assert torch.equal(by_keyword.loss, out.loss)


def test_targets_kept_and_no_rows():
    model = build()
    tokens, rows = batch()
    logits = model(tokens).logits
    patch(model, memory="4KiB")
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    out = model(tokens, rows=targets, entropy="value")
    expected = logitless.logprobs(logits, targets, entropy="value")
    torch.testing.assert_close(out.logprob, expected.logprob, atol=1e-5, rtol=0)
    kept = Kept(torch.arange(V).repeat(len(rows)), torch.full((len(rows),), V))
    everything = model(tokens, rows=rows, kept=kept)
    torch.testing.assert_close(everything.logprob, model(tokens, rows=rows).logprob, atol=1e-5, rtol=0)
    none = model(tokens, rows=(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)))
    assert none.logprob.shape == (0,)
    none.logprob.sum().backward()
    assert torch.count_nonzero(model.lm_head.weight.grad) == 0


def test_training_modes_and_random_state_survive_verification():
    model = build("gpt2").train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    patch(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.base_model._forward_hooks


def test_a_copy_of_a_patched_model_is_its_own():
    model = patch(build())
    tokens, rows = batch()
    other = copy.deepcopy(model)
    other.lm_head.weight.data.mul_(2)
    mine, its = model(tokens, rows=rows).logprob, other(tokens, rows=rows).logprob
    assert not torch.allclose(mine, its)
    torch.testing.assert_close(
        its, plain(other(tokens).logits.reshape(-1, V), rows.index, rows.target).logprob, atol=1e-5, rtol=0
    )


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("family", ["llama", "qwen2"], ids=["", "tied"])
@pytest.mark.parametrize("through", [saved, lambda model: pickle.loads(pickle.dumps(model))], ids=["saved", "pickled"])
def test_a_patched_model_can_be_pickled(through, family):
    """As Ray, spawned processes and torch.save do: the copy is patched too, and is its own."""
    model, (tokens, rows) = patch(build(family), audit=4), batch()
    wanted = model(tokens, rows=rows, entropy="value")
    other = through(model)
    assert other.forward.__self__ is other
    assert inspect.signature(other.forward) == inspect.signature(model.forward)
    found = other(tokens, rows=rows, entropy="value")
    assert torch.equal(found.logprob, wanted.logprob)
    assert torch.equal(found.entropy, wanted.entropy)
    assert torch.equal(other(tokens).logits, model(tokens).logits)
    # The first call is in both reports; the second was the copy's alone.
    assert audit_of(other).rows == 2 * audit_of(model).rows > 0
    head = [other.get_output_embeddings().weight, model.get_output_embeddings().weight]
    with torch.no_grad():
        head[0].add_(1.0)
    assert not torch.equal(*head)
    assert torch.equal(model(tokens, rows=rows).logprob, wanted.logprob)
    before = other(tokens).logits
    unpatch(other)
    assert "forward" not in {*vars(other), *vars(other.get_output_embeddings())}
    assert torch.equal(other(tokens).logits, before)
    # A model that was made plain again is pickled as before.
    assert torch.equal(through(other)(tokens).logits, before)


def test_no_logits_are_built():
    """Forward and backward stay below one ``[B, S, V]`` in float32, 8 MiB here; the model's own path takes several."""
    model = build(vocab_size=8192, tie_word_embeddings=True)
    tokens = torch.randint(3, 8192, (4, 64))
    rows = Rows.padded(tokens.tolist(), [60] * 4)

    def own():
        model.zero_grad()
        logitless.logprobs(model(tokens).logits, rows, entropy="grad").logprob.sum().backward()

    def ours():
        model.zero_grad()
        model(tokens, rows=rows, entropy="grad").logprob.sum().backward()

    own()
    before = peak_bytes(own, "cpu")
    patch(model, memory="1MiB")
    ours()
    after = peak_bytes(ours, "cpu")
    assert before > 2 * 4 * 64 * 8192 * 4
    assert after < 4 * 64 * 8192 * 4


# Refusals.


class Odd(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1.5


def odd_head(model):
    model.lm_head = Odd(32, V)


def hidden_softcap(model):
    original = type(model).forward

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        out.logits = 3000 * torch.tanh(out.logits / 3000)
        return out

    type(model).forward = forward


def hidden_factor(model):
    model.lm_head.register_forward_hook(lambda module, args, out: out * 1.01 if isinstance(out, torch.Tensor) else None)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (odd_head, "the head must be a torch.nn.Linear but is Odd"),
        (hidden_softcap, r"LlamaForCausalLM are off by .* logits of size 1000"),
        (hidden_factor, r"are off by .* Its head does more than multiply, add a bias, scale by 1 and cap at None"),
        (lambda model: setattr(model.lm_head, "forward", print), "the forward of the head was replaced"),
        (lambda model: model.to("meta"), "the weights are on the meta device"),
        (lambda model: model.lm_head.weight.data.zero_(), "logits are all the same"),
    ],
)
def test_heads_that_are_not_understood_are_refused(spoil, message, monkeypatch):
    model = build()
    monkeypatch.setattr(type(model), "forward", type(model).forward)  # put back what a spoiler sets
    spoil(model)
    with pytest.raises(LogitlessError, match=message):
        patch(model)
    assert "_logitless" not in vars(model)


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite"])
def test_a_transformation_that_the_configuration_hides_is_refused(family):
    model = build(family)
    # The model goes on using it; the configuration that is read has forgotten it.
    forgetful = SimpleNamespace(model_type=family, vocab_size=V)
    model.config.get_text_config = lambda *_, **__: forgetful
    with pytest.raises(LogitlessError, match="Its head does more than multiply"):
        patch(model)


def test_unknown_families_need_verification():
    model = build()
    model.config.model_type = "llamalike"
    with pytest.raises(LogitlessError, match="llamalike is not one of the tested families"):
        patch(model, verify=False)
    model.config.model_type = "llama"
    patch(model, verify=False)


def test_errors():
    model = build()
    tokens, rows = batch()
    with pytest.raises(LogitlessError, match=r"there is no option 'memry'. Did you mean 'memory'\?"):
        patch(model, memry=1)
    with pytest.raises(LogitlessError, match="must be a transformers causal LM but Linear has no base_model"):
        patch(nn.Linear(2, 2))
    with pytest.raises(LogitlessError, match="LlamaModel has no language-model head"):
        patch(model.model)
    with pytest.raises(LogitlessError, match="not patched"):
        unpatch(model)
    with pytest.raises(LogitlessError, match="not patched"):
        audit_of(model)
    patch(model)
    with pytest.raises(LogitlessError, match="already patched"):
        patch(model)
    with pytest.raises(LogitlessError, match=r"LlamaForCausalLM.forward: labels cannot go with rows"):
        model(tokens, rows=rows, labels=tokens)
    with pytest.raises(LogitlessError, match="logits_to_keep cannot go with rows"):
        model(tokens, rows=rows, logits_to_keep=3)
    with pytest.raises(LogitlessError, match="entropy was given without rows"):
        model(tokens, entropy="value")
    loss = logitless.Loss(logitless.Objective(policy="reinforce"), advantage=torch.ones(len(rows)))
    with pytest.raises(LogitlessError, match=r"loss was given without rows. Pass rows=, which say what is scored."):
        model(tokens, loss=loss)
    with pytest.raises(LogitlessError, match=r"forward: loss must be a logitless.Loss.* but is Tensor. Pass loss=Loss"):
        model(tokens, rows=rows, loss=torch.zeros(()))
    with pytest.raises(LogitlessError, match="entropy cannot go with loss, whose objective asks for it"):
        model(tokens, rows=rows, loss=loss, entropy="grad")
    with pytest.raises(
        LogitlessError, match=r"DataParallel has no base_model. .* wrapped: patch\(model.module\). Then"
    ):
        patch(nn.DataParallel(model))
    with pytest.raises(LogitlessError, match="rows were made for 33 tokens"):
        model(tokens[:, :-1], rows=rows)
    model.lm_head = nn.Linear(32, V)  # as an adapter on the head would do
    with pytest.raises(LogitlessError, match="the head is now Linear, not the linear layer that was patched"):
        model(tokens, rows=rows)
    model.forward = print
    with pytest.raises(LogitlessError, match="replaced by someone else since"):
        unpatch(model)


def test_install_patches_what_the_auto_class_makes(tmp_path):
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokens, rows = batch()
    build().save_pretrained(tmp_path)
    own = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "_logitless" not in vars(own)
    logitless.install("transformers", audit=3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)[1]
    assert not info["missing_keys"]
    expected = plain(own(tokens).logits.reshape(-1, V), rows.index, rows.target).logprob
    torch.testing.assert_close(model(tokens, rows=rows).logprob, expected, atol=1e-5, rtol=0)
    report = logitless.status().hosts[0]
    assert [entry.calls for entry in report.replaced] == [2, 0]
    assert report.audit.passed
    assert report.audit.rows == 3
    logitless.uninstall("transformers")
    assert "_logitless" not in vars(AutoModelForCausalLM.from_pretrained(tmp_path))


# Real ranks.


def split_over(world):
    """How this release is told to split a model over ranks."""
    config = pytest.importorskip("transformers.distributed").DistributedConfig
    newer = takes(config, "tp_size")
    return {"distributed_config": config(tp_size=world)} if newer else {"tp_plan": "auto"}


def score_a_shard(rank, world, folder, family):
    import os

    from transformers import AutoModelForCausalLM

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    model = AutoModelForCausalLM.from_pretrained(folder, **split_over(world))
    weight = model.get_output_embeddings().weight
    if "tp_plan" in split_over(world) and not hasattr(weight, "to_local"):
        return None
    patch(model, audit=5)
    torch.manual_seed(1)
    tokens, rows = batch()
    out = model(tokens, rows=rows, entropy="grad")
    (out.logprob.sum() + out.entropy.sum()).backward()
    inner = model.model.layers[0].input_layernorm.weight.grad
    inner = inner.full_tensor() if hasattr(inner, "full_tensor") else inner
    held = weight.to_local().shape[0]
    return held, out.logprob.detach(), out.entropy.detach(), weight.grad.full_tensor(), inner, audit_of(model)


@pytest.mark.parametrize("family", ["llama", "phi"])
def test_a_tensor_parallel_plan_makes_the_head_a_shard(ranks, tmp_path, family):
    model = build(family)
    model.save_pretrained(tmp_path)
    torch.manual_seed(1)
    tokens, rows = batch()
    patch(model)
    whole = model(tokens, rows=rows, entropy="grad")
    (whole.logprob.sum() + whole.entropy.sum()).backward()
    norm = model.model.layers[0].input_layernorm.weight.grad
    results = ranks(score_a_shard, 2, str(tmp_path), family)
    if results == [None, None]:
        pytest.skip("this release leaves the head whole")
    assert [result[0] for result in results] == [51, 50]
    for _, logprob, entropy, d_weight, d_norm, audit in results:
        torch.testing.assert_close(logprob, whole.logprob.detach(), atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, whole.entropy.detach(), atol=1e-5, rtol=0)
        torch.testing.assert_close(d_weight, model.lm_head.weight.grad, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(d_norm, norm, atol=1e-4, rtol=1e-4)
        assert audit.passed
        assert audit.rows == 10


def score_under_fsdp(rank, world, own_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    model = patch(build())
    if own_group:
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(1)
    tokens, rows = batch()
    out = model(tokens, rows=rows, entropy="grad")
    (out.logprob.sum() + out.entropy.sum()).backward()
    return out.logprob.detach(), model.lm_head.weight.grad.full_tensor()


@pytest.mark.parametrize("own_group", [False, True], ids=["root", "own"])
def test_fsdp_gathers_the_head(ranks, own_group):
    model = patch(build())
    torch.manual_seed(1)
    tokens, rows = batch()
    whole = model(tokens, rows=rows, entropy="grad")
    (whole.logprob.sum() + whole.entropy.sum()).backward()
    for logprob, d_weight in ranks(score_under_fsdp, 2, own_group):
        torch.testing.assert_close(logprob, whole.logprob.detach(), atol=1e-5, rtol=0)
        torch.testing.assert_close(d_weight, model.lm_head.weight.grad, atol=1e-4, rtol=1e-4)


def temperatures_under_mixed_precision(rank, world, in_a_loss):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, half = init_device_mesh("cpu", (world,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = patch(build())
    fully_shard(model.lm_head, mesh=mesh, mp_policy=half)
    fully_shard(model, mesh=mesh, mp_policy=half if in_a_loss else MixedPrecisionPolicy())
    torch.manual_seed(1)
    tokens, rows = batch()
    temperatures = 0.7, torch.full((len(rows),), 0.7), 0.69921875
    if not in_a_loss:
        return [model(tokens, rows=rows, temperature=t).logprob.detach() for t in temperatures]
    objective, advantage = logitless.Objective(policy="reinforce"), torch.ones(len(rows))
    losses = [logitless.Loss(objective, advantage=advantage, temperature=t) for t in temperatures]
    return [model(tokens, rows=rows, loss=loss).stats.logprob for loss in losses]


@pytest.mark.parametrize("in_a_loss", [False, True], ids=["keyword", "loss"])
def test_mixed_precision_does_not_round_temperatures(ranks, in_a_loss):
    """One number and the same for every row give the same bits; 0.7 in bfloat16 is 0.69921875.

    The head's unit casts what the model hands to it; of the model's own unit a Loss alone is safe.
    """
    for number, per_row, rounded in ranks(temperatures_under_mixed_precision, 2, in_a_loss):
        assert torch.equal(number, per_row)
        assert not torch.equal(number, rounded)
