"""vLLM: log-probs and the float32 head, in the library's one order of summation, and prompts without logits.

    logprobs   compute_token_logprobs(logits, token_ids) of the newer model runner, wherever it was imported to;
               Sampler.compute_logprobs(logits) of the older one
    head       LogitsProcessor._apply_head, where the head is float32: hf_overrides={"head_dtype": "float32"}
    prompt     compute_prompt_logprobs, compute_prompt_token_id_logprobs: vLLM's own code, and within it
                   model.compute_logits(hidden)          LogitsProcessor.forward returns ``Logits``: not computed
                   compute_topk_scores(logits, ...)      log-probs of the prompt's tokens, the most likely ones, ranks
                   compute_token_logprobs(logits, ids)   log-probs of given ids
    contract   see contract

Log-probs are canonical of the logits that vLLM gives: raw ones in the mode ``raw_logprobs``, which is the default, and
in ``processed_logprobs`` those that were divided by the temperature and cut already.

Prompts are left to vLLM, with its logits, where all log-probs of the vocabulary are asked for, more than 128 of them,
or raw logits; for quantized heads and heads with a LoRA; and for shards that begin within a block of 128 columns. The
numbers are the same, the memory is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from logitless.adapters.host import Host, Option, PassOn, Replacement
from logitless.backends.blocks import BLOCK
from logitless.engines import PARTS, held
from logitless.engines.canonical import all_logprobs, product, token_logprobs
from logitless.engines.contract import contract_replacements
from logitless.operands import Logits
from logitless.score import logprobs
from logitless.seams import shard_between
from logitless.spec import VocabShard

LOGPROB = "vllm.v1.worker.gpu.sample.logprob"
PROMPT = "vllm.v1.worker.gpu.sample.prompt_logprob"
UNQUANTIZED = ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")
HEAD = "vllm.model_executor.layers.logits_processor"
MOST = 128
"""Most likely tokens that one call returns."""

SCORING: ContextVar[bool] = ContextVar("logitless_scoring", default=False)
"""Where it is True, heads return logits that are not computed."""


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
    signature = {"0.30 - 0.33": "(self, lm_head, hidden_states, embedding_bias)", "0.24": None}
    return [Replacement(HEAD, "LogitsProcessor._apply_head", signature, make_apply_head)]


# Prompts, and a teacher's scores of them, from hidden states.


def make_prompt_logprobs(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``PromptLogprobsWorker.compute_prompt_logprobs``."""

    def compute_prompt_logprobs(
        self: Any,
        logits_fn: Any,
        hidden_states: Tensor,
        input_batch: Any,
        all_token_ids: Tensor,
        num_computed_tokens: Tensor,
        prompt_lens: Any,
    ) -> Any:
        here = input_batch.idx_mapping_np
        numbers = self.num_prompt_logprobs[here][self.uses_prompt_logprobs[here]]
        if _of_logits(self):
            return PassOn("raw logits are asked for")
        if len(numbers) and (numbers.min() < 0 or numbers.max() > MOST):
            return PassOn(f"more than {MOST} log-probs of a token are asked for")
        with held(SCORING, True):
            return original(
                self, logits_fn, hidden_states, input_batch, all_token_ids, num_computed_tokens, prompt_lens
            )

    return compute_prompt_logprobs


def make_token_id_logprobs(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``PromptLogprobsWorker.compute_prompt_token_id_logprobs``."""

    def compute_prompt_token_id_logprobs(
        self: Any, logits_fn: Any, hidden_states: Tensor, input_batch: Any, prompt_lens: Any
    ) -> Any:
        if _of_logits(self):
            return PassOn("raw logits are asked for")
        with held(SCORING, True):
            return original(self, logits_fn, hidden_states, input_batch, prompt_lens)

    return compute_prompt_token_id_logprobs


def _of_logits(worker: Any) -> bool:
    """Whether scores are logits. Version 0.24 has no such mode."""
    return str(getattr(worker, "logprobs_mode", "raw_logprobs")).endswith("logits")


def make_forward(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``LogitsProcessor.forward``."""

    def forward(
        self: Any, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None = None, skip_gather: bool = False
    ) -> Any:
        if not SCORING.get():
            return PassOn("tokens are sampled")
        why = _not_deferred(self, lm_head, hidden_states)
        if why is not None or skip_gather:
            return PassOn(why or "shards are not gathered")
        return _deferred(self, lm_head, hidden_states, embedding_bias)

    return forward


def _not_deferred(processor: Any, lm_head: Any, hidden: Tensor) -> str | None:
    """Why logits are computed, the same on every rank; None where they are not."""
    if type(processor).__name__ != "LogitsProcessor":
        return f"the head is a {type(processor).__name__}"
    if processor.logits_as_input:
        return "the model computes logits"
    if type(lm_head.quant_method).__name__ not in UNQUANTIZED:
        return "the head is quantized"
    if lm_head.weight.dtype != hidden.dtype or _dtype(processor, hidden) not in (hidden.dtype, torch.float32):
        return "hidden states and head have two dtypes"
    if lm_head.tp_size > 1 and len(lm_head.weight) % BLOCK:
        return f"shards of {len(lm_head.weight)} columns begin within a block of {BLOCK}"
    return None


def _dtype(processor: Any, hidden: Tensor) -> torch.dtype:
    """The dtype that logits are rounded to. Version 0.24 knows the model's dtype alone."""
    return getattr(processor, "head_dtype", None) or hidden.dtype


def _deferred(processor: Any, lm_head: Any, hidden: Tensor, bias: Tensor | None) -> Logits:
    """Logits as the processor would return them, not computed."""
    shard = _shard(lm_head)
    here = processor.org_vocab_size if shard is None else shard.stop - shard.start
    dtype = _dtype(processor, hidden)
    logits = Logits(
        hidden,
        lm_head.weight[:here],
        bias=None if bias is None else bias[:here],
        shard=shard,
        match=None if dtype == torch.float32 else str(dtype).removeprefix("torch."),  # pyright: ignore[reportArgumentType]
        bits="canonical",
        strict=True,
    )
    if processor.soft_cap is not None:
        logits = torch.tanh(logits / processor.soft_cap) * processor.soft_cap
    return logits if processor.scale == 1.0 else logits * processor.scale


def _shard(lm_head: Any) -> VocabShard | None:
    if lm_head.tp_size == 1:
        return None
    group = sys.modules["vllm.distributed.parallel_state"].get_tp_group().device_group
    columns = lm_head.shard_indices
    return shard_between(group, columns.org_vocab_start_index, columns.org_vocab_end_index)


def make_topk(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``compute_topk_scores`` and, in 0.24, ``compute_topk_logprobs``."""

    def compute_topk_scores(logits: Tensor, num_logprobs: int, sampled_token_ids: Tensor, *_: Any, **__: Any) -> Any:
        if not isinstance(logits, Logits):
            return PassOn("logits are there")
        ids = sampled_token_ids.to(torch.int64)
        out = logprobs(logits, ids, top_k=num_logprobs or None, stats=("rank",))
        assert out.rank is not None
        columns, scores = ids[:, None], out.logprob[:, None]
        if out.top_k_ids is not None and out.top_k_logprobs is not None:
            columns, scores = (torch.cat(x, 1) for x in ((columns, out.top_k_ids), (scores, out.top_k_logprobs)))
        made = sys.modules["vllm.v1.outputs"].LogprobsTensors
        # vLLM's rank counts the token itself.
        return made(logprob_token_ids=columns, logprobs=scores, selected_token_ranks=out.rank + 1)

    return compute_topk_scores


def _prompt() -> list[Replacement]:
    scores = "(logits, num_logprobs, sampled_token_ids, cu_num_logits=None, logprob_token_ids_state=None"
    scores += ", expanded_idx_mapping=None, max_per_req_token_ids=0"
    prompt = "(self, logits_fn, hidden_states, input_batch, all_token_ids, num_computed_tokens, prompt_lens)"
    of_ids = {"0.32 - 0.33": "(self, logits_fn, hidden_states, input_batch, prompt_lens)", "0.24 - 0.30": None}
    forward = {
        "0.30 - 0.33": "(self, lm_head, hidden_states, embedding_bias=None, skip_gather=False)",
        "0.24": "(self, lm_head, hidden_states, embedding_bias=None)",
    }
    newer, worker = {"0.30 - 0.33": f"{scores}, logits_mode=False)", "0.24": None}, "PromptLogprobsWorker"
    return [
        Replacement(HEAD, "LogitsProcessor.forward", forward, make_forward),
        Replacement(PROMPT, f"{worker}.compute_prompt_logprobs", prompt, make_prompt_logprobs),
        Replacement(PROMPT, f"{worker}.compute_prompt_token_id_logprobs", of_ids, make_token_id_logprobs),
        Replacement(LOGPROB, "compute_topk_scores", newer, make_topk),
        Replacement(LOGPROB, "compute_topk_logprobs", {"0.24": f"{scores})", "0.30 - 0.33": None}, make_topk),
    ]


OF_PARTS = {"logprobs": _logprobs, "head": _head, "prompt": _prompt, "contract": contract_replacements}


def _replacements(options: Mapping[str, Any]) -> list[Replacement]:
    # Scores of given ids go through the function of the first part.
    parts = {*options["parts"], *(("logprobs",) if "prompt" in options["parts"] else ())}
    return [replacement for part in PARTS["vllm"] if part in parts for replacement in OF_PARTS[part]()]


HOST = Host(
    name="vllm",
    package="vllm",
    versions=("0.24", "0.30", "0.32 - 0.33"),
    replacements=_replacements,
    options={"parts": Option(("logprobs",), f"which of {', '.join(PARTS['vllm'])} are replaced")},
)
