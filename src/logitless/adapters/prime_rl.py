"""prime-rl: the LM heads of its RL trainer, which are given labels and a temperature per token.

    FusedOutputLinear.forward(hidden [b, s, h], labels [b, s], temperature [b, s])    log-probs and entropy, [b, s]
    GemmaFusedOutputLinear.forward                                                    the same under Gemma's softcap
    VanillaOutputLinear.forward        the same, where prime-rl's own returns logits for its trainer to score

The weight is the module's own, read inside its forward, where FSDP has gathered it. The weight's gradient is summed in
float32. A sampling mask ``[b, s, K]`` has the ids that the sampler kept, -1 for none: the log-prob of a row whose mask
has its label is over these. Calls without labels or temperature, and masks under a softcap, are left to prime-rl, which
refuses them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from logitless.adapters.host import Host, Option, PassOn, Replacement
from logitless.adapters.replacing import Options, replaces
from logitless.adapters.scoring import HALF, entropy_mode, product_dtype, score, untrained
from logitless.adapters.shards import check_ids
from logitless.errors import LogitlessError
from logitless.operands import Logits
from logitless.spec import Head, TokenStats

LAYERS = "prime_rl.trainer.models.layers"

CHUNK = 8192
"""Rows of a tile where prime-rl's head has no ``chunk_size``."""

VOCABULARY_CHUNK = 8192
"""Columns of prime-rl's tile of logits; ``chunk_size`` of the head is its rows."""


@replaces(f"{LAYERS}.lm_head", "FusedOutputLinear.forward", {"main": (), "0.4 - 0.8": ("sampling_mask",)})
def forward(
    options: Options,
    self: Any,
    hidden_states: Tensor,
    labels: Tensor | None = None,
    temperature: Tensor | float | None = None,
    sampling_mask: Tensor | None = None,
) -> Any:
    """The Gemma head has a softcap, the others none."""
    softcap = getattr(self, "softcap", None)
    if labels is None or temperature is None:
        return PassOn("no labels" if labels is None else "no temperature")
    if sampling_mask is not None and softcap is not None:
        return PassOn("a sampling mask under a softcap")
    lead = tuple(hidden_states.shape[:-1])
    labels, ids = _lined("labels", labels, lead), None
    check_ids("labels", labels, lead)
    if isinstance(temperature, Tensor):
        temperature = _as_rounded(_lined("temperature", temperature, lead), options["accurate"])
    if sampling_mask is not None:
        ids = _lined("sampling_mask", sampling_mask, (*lead, sampling_mask.shape[-1])).long()
    weight, trained = self.weight, options["entropy_grad"]
    match = None if options["accurate"] else HALF.get(product_dtype(hidden_states))
    out = score(
        type(self).__name__,
        Logits(hidden_states, weight, match=match),
        labels,
        options["audit"],
        head=Head(temperature=temperature, softcap=softcap),
        entropy=entropy_mode(trained, hidden_states, weight),
        # prime-rl's tile, as bytes of float32 logits; the vanilla head has none.
        memory=4 * getattr(self, "chunk_size", CHUNK) * min(weight.shape[0], VOCABULARY_CHUNK),
        ids=None if ids is None else ids.clamp_min(0),
    )
    assert out.entropy is not None
    logprob = out.logprob.float() if ids is None else _replayed(out, ids, labels)
    # FSDP warns of modules that return views, as results in the shape of the labels are.
    logprob, entropy = logprob.clone(), out.entropy.float()
    return {"logprobs": logprob, "entropy": entropy.clone() if trained else untrained("prime_rl", entropy, logprob)}


def _lined(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor in the shape of the lines: prime-rl lays every one out in rows, whatever its shape."""
    if x.numel() != math.prod(shape):
        raise LogitlessError(f"{name} must be {list(shape)} but is {list(x.shape)}.")
    return x.reshape(shape)


def _as_rounded(temperature: Tensor, accurate: bool) -> Tensor:
    """The temperature whose inverse, in its dtype, prime-rl multiplies by. FSDP2 casts it to half precision."""
    return temperature if accurate or temperature.dtype not in HALF else 1.0 / (1.0 / temperature).float()


def _replayed(out: TokenStats, ids: Tensor, labels: Tensor) -> Tensor:
    """Log-probs over the ids of a row's sampling mask; over the vocabulary where the mask lacks the label."""
    assert out.ids_logprobs is not None
    kept = (ids == labels[..., None]).any(-1)
    # A mask of no ids would have log Z of -inf, whose gradient is NaN.
    among = torch.where(ids >= 0, out.ids_logprobs.float(), -torch.inf)
    among = torch.where(kept[..., None], among, 0.0)
    return out.logprob.float() - torch.where(kept, among.logsumexp(-1), 0.0)


def _replacements(_: Options) -> list[Replacement]:
    gemma = replace(forward, module=f"{LAYERS}.lm_head_gemma", name="GemmaFusedOutputLinear.forward")
    return [forward, gemma, replace(forward, name="VanillaOutputLinear.forward")]


HOST = Host(
    name="prime_rl",
    package="prime_rl",
    versions=("0.4 - 0.8",),
    replacements=_replacements,
    options={
        "accurate": Option(False, "float32 logits of half-precision hidden states instead of prime-rl's rounding"),
        "entropy_grad": Option(
            False, "True: entropy has a gradient, for a bonus in a loss of your own; False: it raises"
        ),
    },
    distribution="prime-rl",
)
