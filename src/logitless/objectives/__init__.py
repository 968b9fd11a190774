"""Policy losses for reinforcement learning, on one value per row. See docs/objectives.md.

Objective      terms and their coefficients; called with results and fields, gives loss and metrics
terms          POLICY_TERMS, CORRECTIONS, KL_TERMS: plain functions by name
Preference     a loss on samples that were preferred to others: dpo, ipo, kto, orpo, simpo, ...
mismatch       how far the engine that sampled is from the policy that trains
batches        count_over, prompt_tokens_over: the denominators that a micro-batch cannot know
advantages     from rewards of groups, or along time from values (gae); whitening; the loss of a value model
"""

from logitless.objectives.advantages import (
    dr_grpo_advantages,
    grpo_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    rloo_advantages,
)
from logitless.objectives.corrections import CORRECTIONS
from logitless.objectives.inputs import Inputs, bounded_exp
from logitless.objectives.kl import KL_TERMS, kl_penalty
from logitless.objectives.metrics import Metrics
from logitless.objectives.mismatch import Mismatch, Outlier, mismatch
from logitless.objectives.objective import RECIPES, Objective
from logitless.objectives.policy import POLICY_TERMS
from logitless.objectives.preference import Preference
from logitless.objectives.preference_terms import KINDS
from logitless.objectives.reduction import count_over, prompt_tokens_over, row_weights
from logitless.objectives.values import (
    Returns,
    ValueLoss,
    discounted_returns,
    gae,
    token_rewards,
    value_loss,
    whiten,
)

__all__ = [
    "CORRECTIONS",
    "KINDS",
    "KL_TERMS",
    "POLICY_TERMS",
    "RECIPES",
    "Inputs",
    "Metrics",
    "Mismatch",
    "Objective",
    "Outlier",
    "Preference",
    "Returns",
    "ValueLoss",
    "bounded_exp",
    "count_over",
    "discounted_returns",
    "dr_grpo_advantages",
    "gae",
    "grpo_advantages",
    "kl_penalty",
    "mismatch",
    "prompt_tokens_over",
    "reinforce_pp_advantages",
    "reinforce_pp_baseline_advantages",
    "rloo_advantages",
    "row_weights",
    "token_rewards",
    "value_loss",
    "whiten",
]
