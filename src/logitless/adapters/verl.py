"""verl: the fused heads of its FSDP and Megatron engines, and the functions on logits that its engines share.

    FSDP      use_fused_kernels     FusedLinearForPPO (torch, liger), linear_cross_entropy (triton)      (replaced)
              otherwise             logprobs_from_logits, entropy_from_logits[_with_chunking],
                                    calculate_sum_pi_squared_from_logits                                 (replaced)
    Megatron  use_fused_kernels     linear_cross_entropy, from verl's output processor                   (replaced)
              otherwise             vocab_parallel_{entropy[_with_chunking], sum_pi_squared,
                                    log_probs_from_logits}                                               (replaced)

Under ``rows_before_head`` the engines' labels are replaced too: verl_rows.py. Distillation is in verl_distillation.py.

verl passes its fused heads hidden states and a weight, nothing else of the model: a final softcap, a logit scale or a
bias of the head must be passed to ``install``. Calls left to verl and counted as passed on: ``linear_cross_entropy``
with a reduction, which verl itself never asks for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from logitless.adapters.host import Host, Option, PassOn, Replacement
from logitless.adapters.megatron import check_model_head
from logitless.adapters.replacing import Options, replaces
from logitless.adapters.schedules import in_schedule
from logitless.adapters.scoring import (
    entropy_mode,
    entropy_of_logits,
    score,
    score_overwriting,
    squared_probabilities,
)
from logitless.adapters.shards import check_ids, even_shard, tensor_group
from logitless.adapters.verl_distillation import compute_topk_loss
from logitless.adapters.verl_heads import FSDP_HEADS
from logitless.adapters.verl_rows import BEFORE_THE_HEAD, MEGATRON_ENGINE
from logitless.errors import LogitlessError
from logitless.operands import Logits
from logitless.spec import Head, TokenStats, VocabShard, parse_memory


@replaces("verl.utils.experimental.torch_functional", "FusedLinearForPPO.forward")
def forward(
    options: Options,
    self: Any,
    hidden_states: Tensor,
    vocab_weights: Tensor,
    input_ids: Tensor,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Whichever backend the module was made for."""
    if hidden_states.dim() not in (2, 3):
        raise LogitlessError(f"hidden_states must be [T, D] or [B, S, D] but is {list(hidden_states.shape)}.")
    check_ids("input_ids", input_ids, hidden_states.shape[:-1])
    out = _from_hidden("FusedLinearForPPO", hidden_states, vocab_weights, input_ids, temperature, options)
    assert out.entropy is not None
    return out.logprob.float(), out.entropy.to(hidden_states.dtype)


@replaces(
    "verl.utils.kernel.linear_cross_entropy",
    signature_of="LinearCrossEntropy.forward",
    also_in=("verl.models.mcore.model_forward_fused", "verl.models.mcore.model_forward_1f1b_overlap"),
)
def linear_cross_entropy(
    options: Options,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> Any:
    """Float32 vectors, however many dimensions hidden has.

    The gradient of hidden is this rank's part, as in verl: the backward of Megatron's sequence-parallel gather adds the
    parts up. Without sequence parallelism ``hidden_grad="reduced"`` adds them up here.
    """
    if reduction.lower() != "none":
        return PassOn("reduction")
    tokens, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    check_ids("labels", labels, tokens.shape[:1])
    shard = None if dist_process_group is None else even_shard(dist_process_group, weight.shape[0])
    out = _from_hidden("linear_cross_entropy", tokens, weight, labels, temperature, options, shard)
    assert out.entropy is not None
    return out.logprob.float(), out.entropy.float()


@replaces(MEGATRON_ENGINE, "MegatronEngineWithLMHead.forward_step", optional=True)
def forward_step(
    original: Callable[..., Any],
    self: Any,
    batch_iter: Any,
    model: Any,
    logits_processor_func: Any,
    postprocess_micro_batch_func: Any,
) -> Any:
    """The fused head is handed a weight, and here the model is seen."""
    if self.engine_config.use_fused_kernels:
        check_model_head("use_fused_kernels", model)
    return original(self, batch_iter, model, logits_processor_func, postprocess_micro_batch_func)


def _from_hidden(
    where: str,
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperature: float | Tensor,
    options: Options,
    shard: VocabShard | None = None,
) -> TokenStats:
    skip = options["rows_before_head"]
    if isinstance(temperature, Tensor) and temperature.numel() == 1:
        # Counting the rows waits for the device anyway; otherwise nothing does.
        temperature = temperature.item() if skip else temperature.detach().reshape(1).expand(ids.numel())
    head = Head(temperature=temperature, scale=options["scale"], softcap=options["softcap"])
    bias = None if options["bias"] is None else options["bias"]()
    logits = Logits(hidden, weight, bias=bias, shard=shard, hidden_grad=options["hidden_grad"])
    entropy = entropy_mode(options["entropy_grad"], logits)
    return score(where, logits, ids, options["audit"], skip=skip, head=head, entropy=entropy, memory=options["memory"])


def _entropy(options: Options, where: str, logits: Tensor, shard: VocabShard | None = None) -> Tensor:
    return entropy_of_logits(where, logits, options["audit"], grad=options["entropy_grad"], shard=shard, later=True)


FUNCTIONAL = "verl.utils.torch_functional"
logprobs_from_logits = replaces(
    FUNCTIONAL,
    "logprobs_from_logits",
    also_in=(
        *(f"verl.workers.engine.{name}.transformer_impl" for name in ("automodel", "fsdp", "torchtitan")),
        "verl.trainer.ppo.prefix_grouper_utils",
        "verl.workers.rollout.naive.naive_rollout",
    ),
)(score_overwriting)


@replaces(FUNCTIONAL)
def entropy_from_logits(options: Options, logits: Tensor) -> Tensor:
    return _entropy(options, "entropy_from_logits", logits).to(logits.dtype)


@replaces(FUNCTIONAL)
def entropy_from_logits_with_chunking(options: Options, logits: Tensor, chunk_size: int = 2048) -> Tensor:
    return _entropy(options, "entropy_from_logits_with_chunking", logits).float()


@replaces(FUNCTIONAL)
def calculate_sum_pi_squared_from_logits(options: Options, logits: Tensor) -> Tensor:
    where = "calculate_sum_pi_squared_from_logits"
    return squared_probabilities(where, logits, options["audit"]).to(logits.dtype)


# Megatron: the vocabulary is cut over the tensor-parallel group.


_of_megatron = functools.partial(
    replaces, "verl.utils.megatron.tensor_parallel", also_in=(MEGATRON_ENGINE,), optional=True
)


def _shard(logits: Tensor) -> VocabShard | None:
    return even_shard(tensor_group(), logits.shape[-1])


@_of_megatron()
def vocab_parallel_entropy(options: Options, vocab_parallel_logits: Tensor) -> Tensor:
    """Logits are never overwritten."""
    logits = vocab_parallel_logits
    return _entropy(options, "vocab_parallel_entropy", logits, _shard(logits)).to(logits.dtype)


@_of_megatron(signature={"0.9 - 0.10": (), "0.8": None})
def vocab_parallel_entropy_with_chunking(
    options: Options, vocab_parallel_logits: Tensor, chunk_size: int = 2048
) -> Tensor:
    logits = vocab_parallel_logits
    return _entropy(options, "vocab_parallel_entropy_with_chunking", logits, _shard(logits)).float()


@_of_megatron()
def vocab_parallel_sum_pi_squared(options: Options, vocab_parallel_logits: Tensor) -> Tensor:
    where, logits = "vocab_parallel_sum_pi_squared", vocab_parallel_logits
    return squared_probabilities(where, logits, options["audit"], _shard(logits)).to(logits.dtype)


@_of_megatron()
def vocab_parallel_log_probs_from_logits(options: Options, logits: Tensor, labels: Tensor) -> Tensor:
    """Unlike verl's, it does not overwrite float32 logits."""
    check_ids("labels", labels, logits.shape[:-1])
    where = "vocab_parallel_log_probs_from_logits"
    return score(where, logits, labels, options["audit"], shard=_shard(logits)).logprob.float()


def _replacements(options: Options) -> list[Replacement]:
    if options["hidden_grad"] not in ("partial", "reduced"):
        came = options["hidden_grad"]
        raise LogitlessError(f'install("verl"): hidden_grad must be "partial" or "reduced" but is {came!r}.')
    if options["bias"] is not None and not callable(options["bias"]):
        raise LogitlessError(
            'install("verl"): bias must be a function that returns the bias of the head, for example '
            "lambda: model.lm_head.bias, so that it is read where FSDP has gathered it."
        )
    return [
        forward,
        linear_cross_entropy,
        forward_step,
        logprobs_from_logits,
        entropy_from_logits,
        entropy_from_logits_with_chunking,
        calculate_sum_pi_squared_from_logits,
        vocab_parallel_entropy,
        vocab_parallel_entropy_with_chunking,
        vocab_parallel_sum_pi_squared,
        vocab_parallel_log_probs_from_logits,
        compute_topk_loss,
        *(BEFORE_THE_HEAD if options["rows_before_head"] else ()),
    ]


HOST = Host(
    name="verl",
    package="verl",
    versions=("0.8 - 0.10",),
    replacements=_replacements,
    heads=lambda _: [*FSDP_HEADS, in_schedule(MEGATRON_ENGINE, optional=True)],
    logits="deferred",
    options={
        "bias": Option(None, "function that returns the bias of the LM head, for the fused heads"),
        "entropy_grad": Option(True, "False: no entropy bonus is trained, so entropy is a metric without a graph"),
        "hidden_grad": Option("partial", '"reduced": linear_cross_entropy sums the gradient of hidden over its group'),
        "inplace_backward": Option(True, "False: never write a gradient over the logits, whatever the caller allows"),
        "memory": Option("256MiB", "working memory of the fused heads", check=parse_memory),
        "rows_before_head": Option(False, "True: fused heads multiply response rows alone, with zeros at prompt rows"),
        "scale": Option(
            1.0,
            "factor on the logits of the fused heads, before softcap and temperature",
            check=lambda x: Head(scale=x),
        ),
        "softcap": Option(None, "final logit softcapping of the fused heads", check=lambda x: Head(softcap=x)),
    },
)
