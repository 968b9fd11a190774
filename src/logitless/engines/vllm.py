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
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from logitless.adapters.host import Host, Option, PassOn, Replacement
from logitless.adapters.replacing import Options, held, replaces
from logitless.backends.blocks import BLOCK
from logitless.engines import PARTS
from logitless.engines.canonical import all_logprobs, product, token_logprobs
from logitless.engines.contract import VALIDATION
from logitless.operands import Logits
from logitless.readings.best import MOST
from logitless.score import logprobs
from logitless.seams import shard_between
from logitless.spec import VocabShard

LOGPROB = "vllm.v1.worker.gpu.sample.logprob"
PROMPT = "vllm.v1.worker.gpu.sample.prompt_logprob"
UNQUANTIZED = ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")
HEAD = "vllm.model_executor.layers.logits_processor"

SCORING: ContextVar[bool] = ContextVar("logitless_scoring", default=False)
"""Where it is True, heads return logits that are not computed."""


@replaces(LOGPROB)
def compute_token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    return token_logprobs(logits, token_ids)


@replaces("vllm.v1.sample.sampler", "Sampler.compute_logprobs")
def compute_logprobs(logits: Tensor) -> Tensor:
    return all_logprobs(logits)


@replaces(HEAD, "LogitsProcessor._apply_head", {"0.30 - 0.33": (), "0.24": None})
def _apply_head(self: Any, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None) -> Any:
    if self.head_dtype != torch.float32:
        return PassOn("the head is not float32")
    if type(lm_head.quant_method).__name__ not in UNQUANTIZED:
        return PassOn("the head is quantized")
    flat, weight = hidden_states.reshape(-1, hidden_states.shape[-1]), lm_head.weight
    out = torch.empty((len(flat), len(weight)), dtype=torch.float32, device=flat.device)
    return product(flat, weight, embedding_bias, out).reshape(*hidden_states.shape[:-1], -1)


# Prompts, and a teacher's scores of them, from hidden states.


@replaces(PROMPT, "PromptLogprobsWorker.compute_prompt_logprobs")
def compute_prompt_logprobs(
    original: Callable[..., Any],
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
        return original(self, logits_fn, hidden_states, input_batch, all_token_ids, num_computed_tokens, prompt_lens)


@replaces(PROMPT, "PromptLogprobsWorker.compute_prompt_token_id_logprobs", {"0.32 - 0.33": (), "0.24 - 0.30": None})
def compute_prompt_token_id_logprobs(
    original: Callable[..., Any], self: Any, logits_fn: Any, hidden_states: Tensor, input_batch: Any, prompt_lens: Any
) -> Any:
    if _of_logits(self):
        return PassOn("raw logits are asked for")
    with held(SCORING, True):
        return original(self, logits_fn, hidden_states, input_batch, prompt_lens)


def _of_logits(worker: Any) -> bool:
    """Whether scores are logits. Version 0.24 has no such mode."""
    return str(getattr(worker, "logprobs_mode", "raw_logprobs")).endswith("logits")


@replaces(HEAD, "LogitsProcessor.forward", {"0.30 - 0.33": (), "0.24": ("skip_gather",)})
def forward(
    self: Any, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None = None, skip_gather: bool = False
) -> Any:
    if not SCORING.get():
        return PassOn("tokens are sampled")
    why = _not_deferred(self, lm_head, hidden_states)
    if why is not None or skip_gather:
        return PassOn(why or "shards are not gathered")
    return _deferred(self, lm_head, hidden_states, embedding_bias)


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


TOPK = (
    "(logits, num_logprobs, sampled_token_ids, cu_num_logits=None, logprob_token_ids_state=None, "
    "expanded_idx_mapping=None, max_per_req_token_ids=0"
)


@replaces(LOGPROB, signature={"0.30 - 0.33": f"{TOPK}, logits_mode=False)", "0.24": None})
def compute_topk_scores(logits: Tensor, num_logprobs: int, sampled_token_ids: Tensor, *_: Any, **__: Any) -> Any:
    """Of 0.24 it is ``compute_topk_logprobs``."""
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


OF_PARTS = {
    "logprobs": (compute_token_logprobs, compute_logprobs),
    "head": (_apply_head,),
    "prompt": (
        forward,
        compute_prompt_logprobs,
        compute_prompt_token_id_logprobs,
        compute_topk_scores,
        replace(compute_topk_scores, name="compute_topk_logprobs", signature={"0.24": f"{TOPK})", "0.30 - 0.33": None}),
    ),
    "contract": (VALIDATION,),
}


def _replacements(options: Options) -> list[Replacement]:
    # Scores of given ids go through the function of the first part.
    parts = {*options["parts"], *(("logprobs",) if "prompt" in options["parts"] else ())}
    return [replacement for part in PARTS["vllm"] if part in parts for replacement in OF_PARTS[part]]


HOST = Host(
    name="vllm",
    package="vllm",
    versions=("0.24", "0.30", "0.32 - 0.33"),
    replacements=_replacements,
    options={"parts": Option(("logprobs",), f"which of {', '.join(PARTS['vllm'])} are replaced")},
)
