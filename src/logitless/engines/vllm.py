"""vLLM: log-probs and the float32 head, in the library's one order of summation.

    logprobs   compute_token_logprobs(logits, token_ids) of the newer model runner, wherever it was imported to;
               Sampler.compute_logprobs(logits) of the older one
    head       LogitsProcessor._apply_head, where the head is float32: hf_overrides={"head_dtype": "float32"}
    prompt     see vllm_prompt
    contract   see contract

Log-probs are canonical of the logits that vLLM gives: raw ones in the mode ``raw_logprobs``, which is the default, and
in ``processed_logprobs`` those that were divided by the temperature and cut already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from logitless.adapters.host import Host, Option, PassOn, Replacement
from logitless.engines import PARTS
from logitless.engines.canonical import all_logprobs, product, token_logprobs
from logitless.engines.contract import contract_replacements
from logitless.engines.vllm_prompt import HEAD, LOGPROB, UNQUANTIZED, prompt_replacements


def make_token_logprobs(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``compute_token_logprobs``."""
    return lambda logits, token_ids: token_logprobs(logits, token_ids)


def make_logprobs(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``Sampler.compute_logprobs``."""
    return lambda logits: all_logprobs(logits)


def make_apply_head(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``LogitsProcessor._apply_head``."""

    def _apply_head(self: Any, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None) -> Any:
        if self.head_dtype != torch.float32:
            return PassOn("the head is not float32")
        if type(lm_head.quant_method).__name__ not in UNQUANTIZED:
            return PassOn("the head is quantized")
        flat, weight = hidden_states.reshape(-1, hidden_states.shape[-1]), lm_head.weight
        out = torch.empty((len(flat), len(weight)), dtype=torch.float32, device=flat.device)
        return product(flat, weight, embedding_bias, out).reshape(*hidden_states.shape[:-1], -1)

    return _apply_head


def _logprobs() -> list[Replacement]:
    return [
        Replacement(LOGPROB, "compute_token_logprobs", "(logits, token_ids)", make_token_logprobs),
        Replacement("vllm.v1.sample.sampler", "Sampler.compute_logprobs", "(logits)", make_logprobs),
    ]


def _head() -> list[Replacement]:
    signature = {"0.30 - 0.32": "(self, lm_head, hidden_states, embedding_bias)", "0.24": None}
    return [Replacement(HEAD, "LogitsProcessor._apply_head", signature, make_apply_head)]


OF_PARTS = {"logprobs": _logprobs, "head": _head, "prompt": prompt_replacements, "contract": contract_replacements}


def _replacements(options: Mapping[str, Any]) -> list[Replacement]:
    # Scores of given ids go through the function of the first part.
    parts = {*options["parts"], *(("logprobs",) if "prompt" in options["parts"] else ())}
    return [replacement for part in PARTS["vllm"] if part in parts for replacement in OF_PARTS[part]()]


HOST = Host(
    name="vllm",
    package="vllm",
    versions=("0.24", "0.30", "0.32"),
    replacements=_replacements,
    options={"parts": Option(("logprobs",), f"which of {', '.join(PARTS['vllm'])} are replaced")},
)
