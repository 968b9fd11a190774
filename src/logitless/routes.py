"""``explain``: which route a call from hidden states will take, asked before it is made."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from logitless.backends.divergences import Divergence, Kind
from logitless.distill import Teacher, Teachers
from logitless.distill.divergence import divergence_plan
from logitless.distill.pair import PairPlan
from logitless.from_hidden.logprobs import linear_plan
from logitless.from_hidden.plan import LinearPlan, SupportPlan
from logitless.objectives import Objective, Preference
from logitless.policy_loss.loss import loss_plan
from logitless.policy_loss.plan import LossPlan


def explain(
    hidden: Tensor,
    weight: Tensor,
    rows: Any,
    *,
    objective: Objective | Preference | None = None,
    teacher: Teacher | Teachers | None = None,
    kind: Kind | Divergence = "reverse_kl",
    **options: Any,
) -> LinearPlan | SupportPlan | LossPlan | PairPlan:
    """Which route :func:`linear_logprobs` takes with these arguments, and why; with an objective,
    :func:`linear_policy_loss`; with a teacher alone, :func:`linear_divergence`. Computes nothing.

    Args:
        hidden, weight, rows: as for the call.
        objective: of the policy loss, or None.
        teacher, kind: of a divergence. The kind says what is refused, and not the route.
        **options: keyword arguments of the call that concern the operands (memory, shard, entropy, ...).

    >>> import torch
    >>> print(explain(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([1, 2])).kind)
    forward
    """
    if objective is not None:
        return loss_plan(hidden, weight, rows, objective, teacher, **options)
    if teacher is not None:
        return divergence_plan(hidden, weight, rows, teacher, kind, **options)
    return linear_plan(hidden, weight, rows, **options)
