"""One training step on a causal LM through a host's functions, which are ours once ``install(host)`` was called.

Each maker returns a function that runs forward and backward and gives the log-probs of all next tokens. It looks the
host's functions up as the host's trainers do, by name and at every call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TEMPERATURE = 0.7


def _learn(model: Any, logprob: Tensor, entropy: Tensor) -> Tensor:
    (logprob.sum() + 0.01 * entropy.sum()).backward()
    model.zero_grad(set_to_none=True)
    return logprob.detach().reshape(-1)


def verl(model: Any, tokens: Tensor) -> Callable[[], Tensor]:
    """The step of verl's FSDP engine without fused kernels."""
    functional = importlib.import_module("verl.utils.torch_functional")

    def step() -> Tensor:
        logits = model(tokens, use_cache=False).logits
        logits = logits / torch.tensor(TEMPERATURE, dtype=logits.dtype, device=logits.device)
        entropy = functional.entropy_from_logits(logits)
        labels = tokens.roll(-1, 1)
        return _learn(model, functional.logprobs_from_logits(logits, labels, inplace_backward=False), entropy)

    return step


def skyrl(model: Any, tokens: Tensor) -> Callable[[], Tensor]:
    """The step of SkyRL's FSDP worker with an entropy bonus."""
    torch_utils = importlib.import_module("skyrl.backends.skyrl_train.utils.torch_utils")

    def step() -> Tensor:
        logits = model(tokens, use_cache=False).logits
        logits.div_(TEMPERATURE)
        logprob = torch_utils.logprobs_from_logits(logits, tokens.roll(-1, 1), inplace_backward=True)
        return _learn(model, logprob, torch_utils.chunked_entropy_from_logits(logits, requires_grad=True))

    return step


def openrlhf(model: Any, tokens: Tensor) -> Callable[[], Tensor]:
    """The whole forward of OpenRLHF's actor around the model."""
    actor = importlib.import_module("openrlhf.models.actor").Actor(model, temperature=TEMPERATURE)
    actor.packing_samples = False
    mask = torch.ones_like(tokens)

    def step() -> Tensor:
        logprob, output = actor(tokens, None, mask, return_output=True, return_logprobs=True, return_entropy=True)
        return _learn(model, logprob, output.entropy)

    return step


def megatron(hidden: Tensor, labels: Tensor, vocab: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Megatron-Core's head on ``[s, b, h]`` hidden states: its logits and cross entropy, and the output processor."""
    parallel = importlib.import_module("megatron.core.tensor_parallel")
    config = importlib.import_module("megatron.core").ModelParallelConfig(
        params_dtype=hidden.dtype, use_cpu_initialization=True
    )
    adapter = importlib.import_module("logitless.adapters.megatron")
    initial = {"init_method": lambda weight: torch.nn.init.normal_(weight, std=0.02), "bias": False}
    layer = parallel.ColumnParallelLinear(hidden.shape[-1], vocab, config=config, gather_output=False, **initial)
    layer.to(hidden.device)
    scoring = adapter.Scoring(memory="64MiB" if hidden.device.type == "cpu" else "256MiB")

    def learn(logprob: Tensor) -> Tensor:
        logprob.sum().backward()
        layer.zero_grad(set_to_none=True)
        hidden.grad = None
        return logprob.detach().reshape(-1)

    def before() -> Tensor:
        logits, _ = layer(hidden)
        return learn(-parallel.vocab_parallel_cross_entropy(logits, labels.T.contiguous()).T)

    def after() -> Tensor:
        return learn(
            adapter.output_processor(
                hidden_states=hidden, output_layer=layer, output_weight=None, labels=labels, context=scoring
            ).logprob
        )

    return before, after
