"""TRL's GRPO loss, expected while its log-probs are made: ``install("trl", one_pass=True)``.

    GRPOTrainer._compute_loss    says which loss will be computed, and then computes it        (wrapped)
    ChunkedLogProbFunction       log-probs, and the gradients of that loss                     (replaced, in trl.py)

Up to a factor, which backward finds, a loss of the types grpo, bnpo, dr_grpo and dapo on ratios of tokens is known from
the trainer's settings and its batch. Nothing is expected of other types, of ratios of sequences, and where tokens are
masked by entropy or by their distance from the sampler: the step is then what it is without the option.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.adapters.expected import Expected
from logitless.adapters.replacing import held, replaces
from logitless.objectives import Objective

TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")


class Batch(NamedTuple):
    """What the loss of a batch will be.

    Attributes:
        here: ``[B, L]`` completion tokens that are there.
        prompt: how many columns come before them.
        values: ``[B, L]`` by the names of fields of the loss.
        objective: of each token.
    """

    here: Tensor
    prompt: int
    values: Mapping[str, Tensor]
    objective: Objective

    def expected(self, rows: int) -> Expected | None:
        """The loss of the rows that the head is given: those of completion tokens, or all of every line."""
        lines, columns = self.here.shape
        if rows == lines * (self.prompt + columns - 1):
            fields = {name: self._padded(x) for name, x in self.values.items()}
            return Expected(self.objective, fields)
        fields = {name: x[self.here] for name, x in self.values.items()}
        return Expected(self.objective, fields) if len(fields["advantage"]) == rows else None

    def _padded(self, x: Tensor) -> Tensor:
        """With zeros at the prompt; the last row of a line belongs to no token."""
        return torch.nn.functional.pad(torch.where(self.here, x, 0.0), (self.prompt - 1, 0)).reshape(-1)


_batch: ContextVar[Batch | None] = ContextVar("loss that is expected", default=None)


def expected_of(rows: int) -> Expected | None:
    """What the trainer that runs has said of so many rows."""
    batch = _batch.get()
    return None if batch is None or not torch.is_grad_enabled() else batch.expected(rows)


@replaces(
    "trl.trainer.grpo_trainer", "GRPOTrainer._compute_loss", {"1.15 - 1.16": (), "0.24 - 1.14": None}, optional=True
)
def compute_loss(original: Callable[..., Any], self: Any, model: Any, inputs: Any) -> Any:
    with held(_batch, _batch_of(self, inputs)):
        return original(self, model, inputs)


def _batch_of(trainer: Any, inputs: Mapping[str, Any]) -> Batch | None:
    if not _foreseeable(trainer):
        return None
    here = inputs["completion_mask"].bool()
    counted = here if "tool_mask" not in inputs else here & inputs["tool_mask"].bool()
    weight = counted.float()
    if trainer.loss_type == "grpo":
        weight = weight / weight.sum(-1, keepdim=True).clamp(min=1.0)
    advantage = inputs["advantages"].float()
    advantage = (advantage if advantage.dim() == 2 else advantage[:, None]) * weight
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        advantage = advantage * inputs["importance_sampling_ratio"]
    values = {"advantage": advantage}
    if inputs.get("old_per_token_logps") is not None:
        values["old"] = inputs["old_per_token_logps"].float()
    if trainer.beta != 0.0:
        values |= {"reference": inputs["ref_per_token_logps"].float(), "kl_weight": trainer.beta * weight}
    settings = {"low": 1 - trainer.epsilon_low, "high": 1 + trainer.epsilon_high, "largest": trainer.args.delta}
    settings["weighted_kl"] = getattr(trainer.args, "use_bias_correction_kl", False)
    objective = Objective(policy=_token_loss, policy_options=settings, needs=tuple(values))
    return Batch(here, inputs["prompt_ids"].shape[1], values, objective)


def _foreseeable(trainer: Any) -> bool:
    """Whether the loss is one that is written down here."""
    plain = trainer.loss_type in TYPES and trainer.importance_sampling_level == "token"
    masked = trainer.top_entropy_quantile < 1.0 or getattr(trainer, "off_policy_mask_threshold", None) is not None
    return plain and not masked and not getattr(trainer, "_entropy_bonus_enabled", False)


def _token_loss(inputs: Any, low: float, high: float, largest: float | None, weighted_kl: bool) -> Tensor:
    """The clipped surrogate of every token, and the KL to the reference; weights are in the advantages."""
    logprob, fields = inputs.logprob, inputs.fields
    ratio = (logprob - fields.get("old", logprob.detach())).exp()
    free = ratio if largest is None else ratio.clamp(max=largest)
    loss = -torch.minimum(free * inputs.advantage, ratio.clamp(low, high) * inputs.advantage)
    if "reference" not in fields:
        return loss
    above = fields["reference"] - logprob
    kl = above.exp() - above - 1
    return loss + fields["kl_weight"] * (kl * ratio if weighted_kl else kl)
