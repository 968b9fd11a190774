"""Megatron's models deferred, on two real gloo ranks: their own code, and losses and gradients of their own logits."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from close import assert_gradient_close_to_truth
from ranks import close_ranks
from shared.megatron import megatron
from shared.megatron_groups import TIMEOUT
from test_megatron import head_layer
from torch import Tensor

import logitless
from logitless import LogitlessError, Logits, Rows
from logitless.operands.logits import MADE, LogitsMade

pytestmark = pytest.mark.skipif(
    not find_spec("megatron") or not find_spec("megatron.core"), reason="megatron-core is not installed"
)

V, D, S, B = 38, 16, 12, 3


@pytest.fixture(scope="module", autouse=True)
def fresh_workers() -> Iterator[None]:
    """Megatron leaves global state behind, so the workers that have imported it are not reused."""
    yield
    close_ranks()


class Asked:
    """What ``head_layer`` wants to know."""

    def __init__(self, sequence_parallel: bool) -> None:
        self.mesh, self.tied, self.sequence_parallel = (2, 1), False, sequence_parallel


def run_layer(
    rank: int, world: int, sequence_parallel: bool, fused: bool, computed: bool, deferred: bool
) -> list[Tensor]:
    """A loss of the layer's output, transposed as GPTModel does; gradients of hidden states and weight."""
    with megatron(2) as state, warnings.catch_warnings():
        warnings.simplefilter("ignore", LogitsMade)
        torch.manual_seed(5)
        weight, whole = torch.randn(V, D), torch.randn(S, B, D)
        targets = torch.randint(V, (B, S))
        # On a CPU Megatron itself has no sequence parallelism: the truth is without it.
        split = sequence_parallel and deferred
        layer = head_layer(state, weight, Asked(split))
        with torch.no_grad():
            layer.weight.copy_(weight.chunk(2)[rank])
        if fused and deferred:
            layer.gradient_accumulation_fusion = True
            layer.weight.main_grad = torch.full_like(layer.weight, 0.5)
            layer.weight.grad_added_to_main_grad = False
        hidden = (whole.chunk(2)[rank] if split else whole).clone().requires_grad_()
        shard = logitless.VocabShard.even(V, state.get_tensor_model_parallel_group())
        model = torch.nn.ModuleDict({"output_layer": layer})
        if deferred:
            logitless.defer(model, head="output_layer", strict=not computed)
        MADE.clear()
        logits = layer(hidden)[0].transpose(0, 1).contiguous()
        assert isinstance(logits, Logits) == deferred
        assert logits.shape == (B, S, V // 2)
        if computed:
            logits = logits + 0.0
        given = logits if isinstance(logits, Logits) else Logits.given(logits, shard=shard)
        out = logitless.logprobs(given, targets, entropy="grad")
        (out.logprob**2 + out.entropy).sum().backward()
        assert sum(MADE.values()) == (deferred and computed)
        d_hidden = hidden.grad.chunk(2)[rank] if sequence_parallel and not split else hidden.grad
        if fused and deferred:
            assert layer.weight.grad_added_to_main_grad
            return [out.logprob.detach(), d_hidden, layer.weight.main_grad - 0.5]
        return [out.logprob.detach(), d_hidden, layer.weight.grad]


@pytest.mark.parametrize("computed", [False, True], ids=["read", "computed"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "into main_grad"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
def test_a_layer(ranks, sequence_parallel, fused, computed):
    wanted, ours = (
        ranks(run_layer, 2, sequence_parallel, fused, computed, deferred, timeout=TIMEOUT) for deferred in (False, True)
    )
    for theirs, mine in zip(wanted, ours, strict=True):
        for a, b in zip(theirs, mine, strict=True):
            assert_gradient_close_to_truth(b, a.double(), a)


def gpt(patch: Any, tied: bool, seed: int = 3) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import TransformerConfig

    warnings.simplefilter("ignore")
    # What Megatron wants of CUDA here is where to allocate, and a random state.
    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    patch.setattr(CudaRNGStatesTracker, "fork", lambda *_: warnings.catch_warnings())
    torch.manual_seed(seed)
    sizes = {"num_layers": 1, "hidden_size": D, "num_attention_heads": 2, "ffn_hidden_size": 32}
    off = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "bias_dropout_fusion": False}
    parallel = {"tensor_model_parallel_size": 2, "use_cpu_initialization": True}
    config = TransformerConfig(**sizes, **off, **parallel, init_method_std=0.5)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    more = {"vocab_size": V, "max_sequence_length": 16, "share_embeddings_and_output_weights": tied}
    return GPTModel(config, spec, **more)


def run_model(rank: int, world: int, how: str, tied: bool, deferred: bool) -> list[Tensor]:
    """The gradients of all parameters, and the numbers that they are of."""
    with megatron(2) as state, pytest.MonkeyPatch.context() as patch:
        model = gpt(patch, tied)
        tokens = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(1))
        inputs = {"input_ids": tokens, "position_ids": torch.arange(S).expand(B, -1)}
        inputs["attention_mask"] = torch.ones(1, 1, S, S).triu(1).bool()
        if how == "labels, ours":
            logitless.install("megatron", logits="deferred" if deferred else "host", audit=3)
        if deferred and how != "labels, ours":
            logitless.defer(model, strict=True)
        if how.startswith("labels"):
            out = model(**inputs, labels=tokens.roll(-1, 1))
        else:
            rows = Rows.padded([line.tolist() for line in tokens], [5, 11, 1])
            logits = model(**inputs)
            shard = logitless.VocabShard.even(V, state.get_tensor_model_parallel_group())
            given = logits if isinstance(logits, Logits) else Logits.given(logits, shard=shard)
            out = logitless.logprobs(given, rows).logprob
        out.pow(2).sum().backward()
        for report in logitless.status().hosts:
            assert (report.calls, report.passed_on, report.made) == (1, 0, {})
            assert report.audit.passed
            assert report.logits[0].startswith("logits: not computed") == deferred
        return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("how", ["logprobs", "labels", "labels, ours"])
def test_a_whole_model(ranks, how, tied):
    wanted, ours = (ranks(run_model, 2, how, tied, deferred, timeout=TIMEOUT) for deferred in (False, True))
    for theirs, mine in zip(wanted, ours, strict=True):
        assert len(theirs) == len(mine) > 5
        for a, b in zip(theirs, mine, strict=True):
            torch.testing.assert_close(b, a, atol=2e-5, rtol=2e-5)


def refused(rank: int, world: int) -> list[str]:
    found = []
    with megatron(2) as state:
        for name, value in (
            ("fp8_output_proj", True),
            ("defer_embedding_wgrad_compute", True),
        ):
            layer = head_layer(state, torch.zeros(V, D), Asked(False))
            setattr(layer if hasattr(layer, name) else layer.config, name, value)
            with pytest.raises(LogitlessError) as error:
                logitless.defer(torch.nn.ModuleDict({"output_layer": layer}), head="output_layer")
            found.append(str(error.value))
        layer = head_layer(state, torch.zeros(V, D), Asked(False))
        layer.__class__ = type(
            "Capped", (type(layer),), {"forward": lambda self, x: type(layer).forward(self, x).tanh()}
        )
        with pytest.raises(LogitlessError) as error:
            logitless.defer(torch.nn.ModuleDict({"output_layer": layer}), head="output_layer")
        found.append(str(error.value))
    return found


def test_layers_that_do_more_are_refused_by_name(ranks):
    words = ("fp8_output_proj=True", "defer_embedding_wgrad_compute=True", "a forward of its own")
    for texts in ranks(refused, 2, timeout=TIMEOUT):
        for text, word in zip(texts, words, strict=True):
            assert re.match(rf"defer: the head is a (ColumnParallelLinear|Capped) with {word}", text)
