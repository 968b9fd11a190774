"""A policy loss from Megatron-Core's output layer: ``torchrun --nproc-per-node 2 examples/megatron_output_layer.py``.

The vocabulary of a ``ColumnParallelLinear`` is split over all processes (tensor parallelism); without torchrun there is
one. Megatron would multiply hidden states ``[s, b, h]`` with the head and return logits. The output processor takes the
hidden states and the head, and returns log-probs and entropy of the response tokens. In a real model:

    model(tokens, ..., output_processor=output_processor, output_processor_context=Scoring(rows, ...))    from 0.18 on
    with scoring(model, Scoring(rows, ...)): model(tokens, ...)                                           before that
"""

from __future__ import annotations

import os
import time
import warnings

import torch
import torch.distributed as dist
from torch import Tensor

import logitless as ll
from logitless.adapters.megatron import Scoring, output_processor
from logitless.objectives import grpo_advantages

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asks for it
with warnings.catch_warnings():
    # Megatron warns of every CUDA package that is missing.
    warnings.simplefilter("ignore")
    from megatron.core import ModelParallelConfig, parallel_state, tensor_parallel

VOCAB, WIDTH, LENGTH = 512, 32, 24
PROMPTS, RESPONSES = [9, 9, 4, 4], [11, 15, 20, 7]  # two prompts, two samples of each


def output_layer() -> tensor_parallel.ColumnParallelLinear:
    """The last layer of a ``GPTModel``, with the same weights on any number of ranks."""
    config = ModelParallelConfig(
        tensor_model_parallel_size=dist.get_world_size(), use_cpu_initialization=True, perform_initialization=False
    )
    layer = tensor_parallel.ColumnParallelLinear(
        WIDTH, VOCAB, config=config, init_method=torch.nn.init.normal_, bias=False, gather_output=False
    )
    whole = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(0))
    layer.weight.data.copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])
    return layer


def plain_logprob(layer: tensor_parallel.ColumnParallelLinear, hidden: Tensor, rows: ll.Rows, tokens: Tensor) -> Tensor:
    """``[R]`` as Megatron computes them: the logits of every token, and its cross entropy."""
    logits, _ = layer(hidden)
    following = tokens.roll(-1, dims=1).T.contiguous()
    every = -tensor_parallel.vocab_parallel_cross_entropy(logits.float(), following)
    return rows.take(every.T)


def main() -> None:
    chance = torch.Generator().manual_seed(1)
    hidden = torch.randn(LENGTH, len(PROMPTS), WIDTH, generator=chance).requires_grad_()  # the decoder's output
    tokens = torch.randint(VOCAB, (len(PROMPTS), LENGTH), generator=chance)
    layer = output_layer()

    lengths = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    rows = ll.Rows.padded(tokens, RESPONSES, lengths=lengths)
    objective = ll.Objective.recipe("grpo", entropy_coef=0.001)
    out = output_processor(hidden_states=hidden, output_layer=layer, context=Scoring(rows, entropy=objective.entropy))
    advantage = grpo_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), groups=2)[rows.sample]
    loss, metrics = objective(out, rows, old_logprob="current", advantage=advantage)
    loss.backward()

    apart = (out.logprob - plain_logprob(layer, hidden, rows, tokens)).detach().abs().max()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} x {layer.weight.shape[0]} ids, {len(rows)} of {tokens.numel()} tokens scored")
        print(f"entropy {metrics.compute()['entropy']:.4f}, |d hidden| {hidden.grad.norm():.6f}")
        print(f"log-probs differ from Megatron's own by at most {apart:.1e}")


if __name__ == "__main__":
    if "RANK" not in os.environ:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    main()
    dist.barrier()  # nobody leaves while another still talks to it
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    time.sleep(0.2)  # gloo's threads let go of the last collective; one that does so while Python ends aborts it
