"""``explain``: which route a call from hidden states will take, asked before it is made."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from logitless.from_hidden.logprobs import linear_plan
from logitless.from_hidden.plan import LinearPlan, SupportPlan
from logitless.objectives import Objective, Preference
from logitless.policy_loss.loss import loss_plan
from logitless.policy_loss.plan import LossPlan


def explain(
    hidden: Tensor, weight: Tensor, rows: Any, *, objective: Objective | Preference | None = None, **options: Any
) -> LinearPlan | SupportPlan | LossPlan:
    """Which route :func:`linear_logprobs` takes with these arguments, and why; with an objective,
    :func:`linear_policy_loss`. Computes nothing.

    Args:
        hidden, weight, rows: as for the call.
        objective: of the policy loss, or None.
        **options: keyword arguments of the call that concern the operands (memory, shard, entropy, ...).

    >>> import torch
    >>> print(explain(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([1, 2])).kind)
    forward
    """
    if objective is not None:
        return loss_plan(hidden, weight, rows, objective, **options)
    return linear_plan(hidden, weight, rows, **options)
