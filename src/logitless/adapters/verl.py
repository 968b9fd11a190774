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

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from logitless.adapters.host import Host, Option, PassOn, Replacement
from logitless.adapters.megatron import check_model_head
from logitless.adapters.schedules import in_schedule
from logitless.adapters.scoring import (
    entropy_mode,
    entropy_of_logits,
    make_logprobs_from_logits,
    score,
    squared_probabilities,
)
from logitless.adapters.shards import check_ids, even_shard, tensor_group
from logitless.adapters.verl_distillation import distillation
from logitless.adapters.verl_heads import fsdp_heads
from logitless.adapters.verl_rows import before_the_head
from logitless.errors import LogitlessError
from logitless.operands import Logits
from logitless.spec import Head, TokenStats, VocabShard, parse_memory

Make = Callable[[Callable[..., Any], Mapping[str, Any]], Callable[..., Any]]


def make_fused_linear(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``FusedLinearForPPO.forward``, whichever backend the module was made for."""

    def forward(
        self: Any, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        if hidden_states.dim() not in (2, 3):
            raise LogitlessError(f"hidden_states must be [T, D] or [B, S, D] but is {list(hidden_states.shape)}.")
        check_ids("input_ids", input_ids, hidden_states.shape[:-1])
        out = _from_hidden("FusedLinearForPPO", hidden_states, vocab_weights, input_ids, temperature, options)
        assert out.entropy is not None
        return out.logprob.float(), out.entropy.to(hidden_states.dtype)

    return forward


def make_linear_cross_entropy(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``linear_cross_entropy``: float32 vectors, however many dimensions hidden has.

    The gradient of hidden is this rank's part, as in verl: the backward of Megatron's sequence-parallel gather adds the
    parts up. Without sequence parallelism ``hidden_grad="reduced"`` adds them up here.
    """

    def linear_cross_entropy(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float = 1.0,
        reduction: str = "none",
        dist_process_group: Any = None,
    ) -> Any:
        if reduction.lower() != "none":
            return PassOn("reduction")
        tokens, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        check_ids("labels", labels, tokens.shape[:1])
        shard = None if dist_process_group is None else even_shard(dist_process_group, weight.shape[0])
        out = _from_hidden("linear_cross_entropy", tokens, weight, labels, temperature, options, shard)
        assert out.entropy is not None
        return out.logprob.float(), out.entropy.float()

    return linear_cross_entropy


def make_megatron_step(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Wraps the Megatron engine's ``forward_step``: its fused head is handed a weight, and here the model is seen."""

    def forward_step(
        self: Any, batch_iter: Any, model: Any, logits_processor_func: Any, postprocess_micro_batch_func: Any
    ) -> Any:
        if self.engine_config.use_fused_kernels:
            check_model_head("use_fused_kernels", model)
        return original(self, batch_iter, model, logits_processor_func, postprocess_micro_batch_func)

    return forward_step


def _from_hidden(
    where: str,
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperature: float | Tensor,
    options: Mapping[str, Any],
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


def make_entropy(where: str, dtype: torch.dtype | None) -> Make:
    """Stands in for ``entropy_from_logits`` and its chunked form, which differ in the dtype of their results."""

    def make(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
        def entropy_from_logits(logits: Tensor, chunk_size: int = 2048) -> Tensor:
            entropy = entropy_of_logits(where, logits, options["audit"], grad=options["entropy_grad"], later=True)
            return entropy.to(dtype or logits.dtype)

        return entropy_from_logits

    return make


def make_sum_pi_squared(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``calculate_sum_pi_squared_from_logits``."""

    def calculate_sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
        where = "calculate_sum_pi_squared_from_logits"
        return squared_probabilities(where, logits, options["audit"]).to(logits.dtype)

    return calculate_sum_pi_squared_from_logits


# Megatron: the vocabulary is cut over the tensor-parallel group.


def make_parallel_entropy(where: str, dtype: torch.dtype | None) -> Make:
    """Stands in for ``vocab_parallel_entropy`` and its chunked form. Logits are never overwritten."""

    def make(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
        def vocab_parallel_entropy(vocab_parallel_logits: Tensor, chunk_size: int = 2048) -> Tensor:
            logits, shard = vocab_parallel_logits, even_shard(tensor_group(), vocab_parallel_logits.shape[-1])
            entropy = entropy_of_logits(
                where, logits, options["audit"], grad=options["entropy_grad"], shard=shard, later=True
            )
            return entropy.to(dtype or logits.dtype)

        return vocab_parallel_entropy

    return make


def make_parallel_sum_pi_squared(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``vocab_parallel_sum_pi_squared``."""

    def vocab_parallel_sum_pi_squared(vocab_parallel_logits: Tensor) -> Tensor:
        logits, shard = vocab_parallel_logits, even_shard(tensor_group(), vocab_parallel_logits.shape[-1])
        sums = squared_probabilities("vocab_parallel_sum_pi_squared", logits, options["audit"], shard)
        return sums.to(logits.dtype)

    return vocab_parallel_sum_pi_squared


def make_parallel_log_probs(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``vocab_parallel_log_probs_from_logits``. Unlike verl's, it does not overwrite float32 logits."""

    def vocab_parallel_log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
        check_ids("labels", labels, logits.shape[:-1])
        shard = even_shard(tensor_group(), logits.shape[-1])
        where = "vocab_parallel_log_probs_from_logits"
        return score(where, logits, labels, options["audit"], shard=shard).logprob.float()

    return vocab_parallel_log_probs_from_logits


def _replacements(options: Mapping[str, Any]) -> list[Replacement]:
    if options["hidden_grad"] not in ("partial", "reduced"):
        came = options["hidden_grad"]
        raise LogitlessError(f'install("verl"): hidden_grad must be "partial" or "reduced" but is {came!r}.')
    Head(scale=options["scale"], softcap=options["softcap"])
    if options["bias"] is not None and not callable(options["bias"]):
        raise LogitlessError(
            'install("verl"): bias must be a function that returns the bias of the head, for example '
            "lambda: model.lm_head.bias, so that it is read where FSDP has gathered it."
        )
    rows = before_the_head() if options["rows_before_head"] else []
    return [*_fused(), *_on_logits(), *_on_parallel_logits(), *distillation(), *rows]


def _fused() -> list[Replacement]:
    return [
        Replacement(
            module="verl.utils.experimental.torch_functional",
            name="FusedLinearForPPO.forward",
            signature="(self, hidden_states, vocab_weights, input_ids, temperature=1.0)",
            make=make_fused_linear,
        ),
        Replacement(
            module="verl.utils.kernel.linear_cross_entropy",
            name="linear_cross_entropy",
            signature="(ctx, hidden, weight, labels, temperature=1.0, reduction='none', dist_process_group=None)",
            signature_of="LinearCrossEntropy.forward",
            make=make_linear_cross_entropy,
            also_in=("verl.models.mcore.model_forward_fused", "verl.models.mcore.model_forward_1f1b_overlap"),
        ),
        Replacement(
            module="verl.workers.engine.megatron.transformer_impl",
            name="MegatronEngineWithLMHead.forward_step",
            signature="(self, batch_iter, model, logits_processor_func, postprocess_micro_batch_func)",
            make=make_megatron_step,
            optional=True,
        ),
    ]


def _on_logits() -> list[Replacement]:
    functional = "verl.utils.torch_functional"
    engines = [f"verl.workers.engine.{name}.transformer_impl" for name in ("automodel", "fsdp", "torchtitan")]
    return [
        Replacement(
            module=functional,
            name="logprobs_from_logits",
            signature="(logits, labels, inplace_backward=True)",
            make=make_logprobs_from_logits,
            also_in=(
                *engines,
                "verl.trainer.ppo.prefix_grouper_utils",
                "verl.workers.rollout.naive.naive_rollout",
            ),
        ),
        Replacement(
            module=functional,
            name="entropy_from_logits",
            signature="(logits)",
            make=make_entropy("entropy_from_logits", None),
        ),
        Replacement(
            module=functional,
            name="entropy_from_logits_with_chunking",
            signature="(logits, chunk_size=2048)",
            make=make_entropy("entropy_from_logits_with_chunking", torch.float32),
        ),
        Replacement(
            module=functional,
            name="calculate_sum_pi_squared_from_logits",
            signature="(logits)",
            make=make_sum_pi_squared,
        ),
    ]


def _on_parallel_logits() -> list[Replacement]:
    engine = "verl.workers.engine.megatron.transformer_impl"
    makes: dict[str, tuple[str | dict[str, str | None], Make]] = {
        "vocab_parallel_entropy": ("(vocab_parallel_logits)", make_parallel_entropy("vocab_parallel_entropy", None)),
        "vocab_parallel_entropy_with_chunking": (
            {"0.9 - 0.10": "(vocab_parallel_logits, chunk_size=2048)", "0.8": None},
            make_parallel_entropy("vocab_parallel_entropy_with_chunking", torch.float32),
        ),
        "vocab_parallel_sum_pi_squared": ("(vocab_parallel_logits)", make_parallel_sum_pi_squared),
        "vocab_parallel_log_probs_from_logits": ("(logits, labels)", make_parallel_log_probs),
    }
    return [
        Replacement(
            module="verl.utils.megatron.tensor_parallel",
            name=name,
            signature=signature,
            make=make,
            also_in=(engine,),
            optional=True,
        )
        for name, (signature, make) in makes.items()
    ]


def _heads(options: Mapping[str, Any]) -> list[Replacement]:
    return [*fsdp_heads(), in_schedule("verl.workers.engine.megatron.transformer_impl", optional=True)]


HOST = Host(
    name="verl",
    package="verl",
    versions=("0.8 - 0.10",),
    replacements=_replacements,
    heads=_heads,
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
