"""OpenRLHF: the actor's model, whose logits are not computed, and the two functions on logits that its actor calls.

    Actor.forward  ->  the model's head is deferred before the first call of each actor: policy, reference, EMA
                       logits to float32, divided by the temperature
                       compute_entropy          (replaced)    entropy of the policy that the rollout sampled from
                       log_probs_from_logits    (replaced)

A temperature passed to ``log_probs_from_logits`` divides the logits in place, as in OpenRLHF: an entropy computed from
the same logits afterwards is at that temperature too.
"""

from __future__ import annotations

from torch import Tensor

from logitless.adapters.heads import deferring
from logitless.adapters.host import Host, Option, Replacement
from logitless.adapters.replacing import Options, replaces
from logitless.adapters.scoring import entropy_of_logits, score
from logitless.adapters.shards import check_ids
from logitless.errors import LogitlessError


@replaces("openrlhf.models.utils", also_in=("openrlhf.models.actor",))
def log_probs_from_logits(options: Options, logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Float32, as OpenRLHF's flash-attention path gives them."""
    check_ids("labels", labels, logits.shape[:-1])
    if not temperature > 0:
        raise LogitlessError(f"temperature must be positive but is {temperature!r}.")
    if temperature != 1.0:
        logits.div_(temperature)
    return score("log_probs_from_logits", logits, labels, options["audit"]).logprob


@replaces("openrlhf.models.utils", also_in=("openrlhf.models.actor",))
def compute_entropy(options: Options, logits: Tensor) -> Tensor:
    """In OpenRLHF it is compiled, and makes three copies of the logits."""
    entropy = entropy_of_logits("compute_entropy", logits, options["audit"], grad=options["entropy_grad"], later=True)
    return entropy.to(logits.dtype)


def _heads(_: Options) -> list[Replacement]:
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
    replacements=lambda _: [log_probs_from_logits, compute_entropy],
    heads=_heads,
    logits="deferred",
    options={
        "entropy_grad": Option(True, "False: no entropy bonus is trained, so entropy is a metric without a graph"),
    },
)
