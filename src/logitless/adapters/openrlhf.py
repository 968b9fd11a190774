"""OpenRLHF: the actor's model, whose logits are not computed, and the two functions on logits that its actor calls.

    Actor.forward  ->  the model's head is deferred before the first call of each actor: policy, reference, EMA
                       logits to float32, divided by the temperature
                       compute_entropy          (replaced)    entropy of the policy that the rollout sampled from
                       log_probs_from_logits    (replaced)

A temperature passed to ``log_probs_from_logits`` divides the logits in place, as in OpenRLHF: an entropy computed from
the same logits afterwards is at that temperature too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from logitless.adapters.heads import deferring
from logitless.adapters.host import Host, Option, Replacement
from logitless.adapters.scoring import entropy_of_logits, score
from logitless.adapters.shards import check_ids
from logitless.errors import LogitlessError


def make_log_probs(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``log_probs_from_logits``: float32, as OpenRLHF's flash-attention path gives them."""

    def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
        check_ids("labels", labels, logits.shape[:-1])
        if not temperature > 0:
            raise LogitlessError(f"temperature must be positive but is {temperature!r}.")
        if temperature != 1.0:
            logits.div_(temperature)
        return score("log_probs_from_logits", logits, labels, options["audit"]).logprob

    return log_probs_from_logits


def make_entropy(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``compute_entropy``, which in OpenRLHF is compiled and makes three copies of the logits."""

    def compute_entropy(logits: Tensor) -> Tensor:
        entropy = entropy_of_logits(
            "compute_entropy", logits, options["audit"], grad=options["entropy_grad"], later=True
        )
        return entropy.to(logits.dtype)

    return compute_entropy


def _replacements(options: Mapping[str, Any]) -> list[Replacement]:
    utils, actor = "openrlhf.models.utils", ("openrlhf.models.actor",)
    return [
        Replacement(utils, "log_probs_from_logits", "(logits, labels, temperature=1.0)", make_log_probs, actor),
        Replacement(utils, "compute_entropy", "(logits)", make_entropy, actor),
    ]


def _heads(options: Mapping[str, Any]) -> list[Replacement]:
    signature = (
        "(self, sequences, action_mask=None, attention_mask=None, return_output=False, allgather_logits=False, "
        "return_logprobs=False, ring_attn_group=None, packed_seq_lens=None, return_entropy=False, **mm_inputs)"
    )
    actor = deferring(lambda self, *_, **__: self.model)
    return [Replacement("openrlhf.models.actor", "Actor.forward", signature, actor)]


HOST = Host(
    name="openrlhf",
    package="openrlhf",
    versions=("0.10 - 0.11",),
    replacements=_replacements,
    heads=_heads,
    logits="deferred",
    options={
        "entropy_grad": Option(True, "False: no entropy bonus is trained, so entropy is a metric without a graph"),
    },
)
