"""SGLang: log-probs and the float32 head, in the library's one order of summation.

    logprobs   Sampler.forward: log-probs of logits over the temperature, taken where custom processors are done;
               compute_row_log_normalizer and row_logsumexp_topk: log-probs of prompts, which are made from it always
    head       LogitsProcessor._compute_lm_head, where the head is float32: --enable-fp32-lm-head

SGLang's own code samples, gathers and sends; what it writes down is taken from our numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from logitless.adapters.host import Host, Option, PassOn, Replacement
from logitless.adapters.replacing import Options, held, replaces
from logitless.engines import PARTS, VARIABLE
from logitless.engines.canonical import all_logprobs, normaliser, product
from logitless.errors import LogitlessError

SAMPLER = "sglang.srt.layers.sampler"
HEAD = "sglang.srt.layers.logits_processor"
PROMPT = "sglang.srt.layers.logprob_processor"


# Sampled tokens.


@dataclass(eq=False)
class Taken:
    """Log-probs ``[R, V]`` of the logits that were ready last, over the temperature."""

    temperature: Tensor | float
    logprobs: Tensor | None = None


_taking: ContextVar[Taken | None] = ContextVar("logitless_taking", default=None)
"""Where it is set, logits that a sampler has made ready are scored before the sampler overwrites them."""


@replaces(SAMPLER, "Sampler._preprocess_logits")
def _preprocess_logits(original: Callable[..., Any], self: Any, logits: Tensor, sampling_info: Any) -> Tensor:
    """Of two calls, the second is on what log-probs are asked of."""
    ready, taken = original(self, logits, sampling_info), _taking.get()
    if taken is not None:
        taken.logprobs = all_logprobs(ready, taken.temperature)
    return ready


@replaces(SAMPLER, "Sampler.forward")
def sampler_forward(
    original: Callable[..., Any],
    self: Any,
    logits_output: Any,
    sampling_info: Any,
    return_logprob: bool,
    top_logprobs_nums: list[int],
    token_ids_logprobs: list[list[int]],
    positions: Tensor,
    *,
    logprob_logits: Tensor | None = None,
) -> Any:
    if not return_logprob:
        return PassOn("no log-probs are asked for")
    if self.rl_on_policy_target is not None:
        raise LogitlessError(
            f"rl_on_policy_target={self.rl_on_policy_target!r} rounds logits to bfloat16 once more, and "
            f"{VARIABLE} asks for log-probs of what the head gave. Leave one of them out."
        )
    raw = sampling_info.is_all_greedy or sys.modules[SAMPLER].SGLANG_RETURN_ORIGINAL_LOGPROB
    taken = Taken(1.0 if raw else sampling_info.temperatures.reshape(-1))
    with held(_taking, taken):
        given = (logits_output, sampling_info, False, top_logprobs_nums, token_ids_logprobs, positions)
        ids = original(self, *given, logprob_logits=logprob_logits)
    if taken.logprobs is not None:
        found = self.output_logprob_processor.compute_logprobs(
            taken.logprobs, top_logprobs_nums, token_ids_logprobs, ids
        )
        found.write_output_to(logits_output)
    return ids


# Prompts.


@replaces(PROMPT)
def compute_row_log_normalizer(logits: Tensor) -> tuple[Tensor, ...]:
    return tuple(normaliser(logits))


@replaces("sglang.srt.layers.logsumexp")
def row_logsumexp_topk(original: Callable[..., Any], x: Tensor, k: int) -> tuple[Tensor, ...]:
    """SGLang's most likely tokens, and our normaliser."""
    return (*normaliser(x), *original(x, k)[2:])


@replaces(
    PROMPT,
    "InputLogprobProcessor.forward",
    "(self, pruned_states, sample_indices, input_logprob_indices, token_to_seq_idx, lm_head, get_logits_fn, "
    "logits_metadata, skip_chunking_for_dp_attn=False)",
)
def prompt_forward(original: Callable[..., Any], self: Any, *arguments: Any, **more: Any) -> Any:
    """Log-probs from a normaliser, also where SGLang would take a softmax of its own, to have the same bits in prompts
    and in sampled tokens. Ours have the same bits."""
    self.enable_fast_input_logprobs = True
    return original(self, *arguments, **more)


# The head.


@replaces(HEAD, "LogitsProcessor._compute_lm_head")
def _compute_lm_head(
    self: Any,
    hidden_states: Tensor,
    lm_head: Any,
    embedding_bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Any:
    """SGLang adds no bias to plain weights."""
    if not (self.use_fp32_lm_head or self.use_fp32_lm_head_output):
        return PassOn("the head is not float32")
    if hasattr(lm_head, "set_lora") and hasattr(lm_head, "apply_lora"):
        return PassOn("the head has a LoRA")
    quantized = sys.modules[HEAD].should_apply_lm_head_quant_method
    if not hasattr(lm_head, "weight") or quantized(lm_head, getattr(lm_head, "quant_method", None)):
        return PassOn("the head is quantized")
    weight, shape = lm_head.weight, (len(hidden_states), len(lm_head.weight))
    if out is None or tuple(out.shape) != shape or out.dtype != torch.float32:
        out = torch.empty(shape, dtype=torch.float32, device=hidden_states.device)
    return product(hidden_states, weight, None, out)


OF_PARTS = {
    "logprobs": (
        _preprocess_logits,
        sampler_forward,
        compute_row_log_normalizer,
        row_logsumexp_topk,
        prompt_forward,
    ),
    "head": (_compute_lm_head,),
}


def _replacements(options: Options) -> list[Replacement]:
    return [replacement for part in PARTS["sglang"] if part in options["parts"] for replacement in OF_PARTS[part]]


HOST = Host(
    name="sglang",
    package="sglang",
    versions=("0.5.23",),
    replacements=_replacements,
    options={"parts": Option(("logprobs",), f"which of {', '.join(PARTS['sglang'])} are replaced")},
)
