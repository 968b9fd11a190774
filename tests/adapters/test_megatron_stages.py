"""Megatron's models deferred where there is more than one head or more than one stage, on real gloo ranks: multi-token
prediction, MuP, gathered columns, pipelines and virtual pipelines. Losses and gradients are those of its own logits.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hosts import put_first, takes
from ranks import close_ranks
from shared.megatron import megatron
from shared.megatron_step import Attention, on_cpu
from test_megatron_groups import TIMEOUT
from torch import Tensor

import logitless
from logitless import Logits
from logitless.operands.logits import MADE

put_first("megatron")
THERE = find_spec("megatron") and find_spec("megatron.core")
pytestmark = pytest.mark.skipif(not THERE, reason="megatron-core is not installed")

if THERE:
    with warnings.catch_warnings():
        # What Megatron's imports warn of is Megatron's business.
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.core")

V, D, S, B = 38, 16, 12, 2
TOKENS = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", autouse=True)
def fresh_workers() -> Iterator[None]:
    """Megatron leaves global state behind, so the workers that have imported it are not reused."""
    yield
    close_ranks()


def config_of(**more: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": D, "num_attention_heads": 2, "ffn_hidden_size": 32}
    off = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "bias_dropout_fusion": False}
    return TransformerConfig(**{**sizes, **off, "use_cpu_initialization": True, "init_method_std": 0.5, **more})


def gpt(config: Any, seed: int = 3, **more: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec

    torch.manual_seed(seed)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = Attention
    if config.mtp_num_layers:
        more["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return GPTModel(config, spec, vocab_size=V, max_sequence_length=16, position_embedding_type="none", **more)


def inputs() -> dict[str, Any]:
    return {"input_ids": TOKENS, "position_ids": torch.arange(S).expand(B, -1), "attention_mask": None}


def gradients(*models: Any) -> list[Tensor]:
    return [p.grad for model in models for p in model.parameters() if p.grad is not None]


def run_model(rank: int, world: int, how: str, tied: bool, deferred: bool) -> list[Tensor]:
    """The numbers that a model of two tensor-parallel ranks returns, and the gradients of all parameters."""
    settings = {"tensor_model_parallel_size": 2}
    settings |= {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3} if "MTP" in how else {}
    settings |= {"use_mup": True, "mup_base_hidden_size": 4} if "MuP" in how else {}
    with megatron(2) as state, on_cpu(), pytest.MonkeyPatch.context() as patch:
        from megatron.core.transformer import multi_token_prediction

        # Asks about a class of Transformer Engine, which has no CPU build.
        patch.setattr(multi_token_prediction, "is_inference_column_parallel_linear", lambda _: False, raising=False)
        model = gpt(
            config_of(**settings), share_embeddings_and_output_weights=tied, parallel_output="gathered" not in how
        )
        if deferred:
            logitless.defer(model, strict=True)
        MADE.clear()
        if "labels" in how:
            out = model(**inputs(), labels=TOKENS.roll(-1, 1), loss_mask=torch.ones(B, S))
        elif "gathered" in how:
            logits = model(**inputs())
            assert logits.shape == (B, S, V)
            assert isinstance(logits, Logits) == deferred
            out = torch.log_softmax(logits / 0.7, -1).gather(-1, TOKENS[..., None])
        else:
            shard = logitless.VocabShard.even(V, state.get_tensor_model_parallel_group())
            logits = model(**inputs())
            given = logits if isinstance(logits, Logits) else Logits.given(logits, shard=shard)
            out = logitless.logprobs(given, TOKENS).logprob
        out.pow(2).sum().backward()
        assert not MADE
        return [out.detach(), *gradients(model)]


HOW = ["labels, MTP", "gathered", "labels, MuP", "logprobs, MuP", "labels, MTP, MuP"]


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("how", HOW)
def test_a_model(ranks, how, tied):
    if "MuP" in how:
        transformer = pytest.importorskip("megatron.core.transformer")
        if not takes(transformer.TransformerConfig, "use_mup"):
            pytest.skip("this Megatron has no MuP")
    wanted, ours = (ranks(run_model, 2, how, tied, deferred, timeout=TIMEOUT) for deferred in (False, True))
    for theirs, mine in zip(wanted, ours, strict=True):
        assert len(theirs) == len(mine) > (10 if "MTP" in how else 5)
        for a, b in zip(theirs, mine, strict=True):
            assert (b - a).norm() <= 2e-5 * a.norm() + 1e-7


# Pipelines.


def step(how: str, iterator: Any, model: Any) -> Any:
    """A forward step as hosts write it: a loss of the logits, or of the labels."""
    tokens = next(iterator)
    given = {**inputs(), "input_ids": tokens}
    out = model(**given, labels=tokens.roll(-1, 1)) if how == "labels" else model(**given)

    def loss(out: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        found = out if how == "labels" else torch.log_softmax(out[:, :-1] / 0.7, -1).gather(-1, tokens[:, 1:, None])
        return found.pow(2).mean(), {"loss": found.detach().pow(2).mean()}

    return out, loss


def run_pipeline(rank: int, world: int, how: str, virtual: bool, deferred: bool) -> list[Tensor]:
    """Losses of four micro-batches, where they are known, and the gradients of the stages here."""
    with megatron(1, pp=2, vpp=2 if virtual else None), on_cpu(), pytest.MonkeyPatch.context() as patch:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        layers = {"num_layers": 4, "pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
        layers |= {"virtual_pipeline_model_parallel_size": 2} if virtual else {}
        config = config_of(**layers, batch_p2p_comm=False, deallocate_pipeline_outputs=True)
        chunks = []
        for chunk in range(2 if virtual else 1):
            first, last = (rank, chunk) == (0, 0), rank == 1 and chunk == (1 if virtual else 0)
            more = {"vp_stage": chunk} if virtual else {}
            chunks.append(gpt(config, 3 + 2 * chunk + rank, pre_process=first, post_process=last, **more))
        if deferred:
            handle = logitless.defer(chunks, strict=True)
            assert len(handle._layers) == (rank == 1)
        draw = torch.Generator().manual_seed(4)
        batches = [torch.randint(V, (B, S), generator=draw) for _ in range(4)]
        reports = get_forward_backward_func()(
            forward_step_func=partial(step, how),
            data_iterator=[iter(batches) for _ in chunks] if virtual else iter(batches),
            model=chunks if virtual else chunks[0],
            num_microbatches=4,
            seq_length=S,
            micro_batch_size=B,
            forward_only=False,
        )
        losses = torch.stack([x["loss"] for x in reports]) if reports else torch.zeros(0)
        return [losses, *gradients(*chunks)]


@pytest.mark.parametrize("virtual", [False, True], ids=["", "virtual"])
@pytest.mark.parametrize("how", ["labels", "logits"])
def test_a_pipeline(ranks, how, virtual):
    wanted, ours = (ranks(run_pipeline, 2, how, virtual, deferred, timeout=TIMEOUT) for deferred in (False, True))
    assert len(wanted[1][0]) == 4
    for theirs, mine in zip(wanted, ours, strict=True):
        assert len(theirs) == len(mine) > 10
        for a, b in zip(theirs, mine, strict=True):
            assert (b - a).norm() <= 2e-5 * a.norm() + 1e-7
