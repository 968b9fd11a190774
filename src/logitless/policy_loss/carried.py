"""``Loss``: an objective and its inputs for one micro-batch, as one argument of a module's forward.

ddp(input_ids, rows=rows, loss=Loss(objective, advantage=..., old_logprob=...))
  the wrapper's forward: its hooks run  ->  the model's forward  ->  the head's forward: linear_policy_loss
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from logitless.call import PLAIN
from logitless.call.lora import LoRA
from logitless.errors import LogitlessError
from logitless.objectives import Metrics, Objective
from logitless.policy_loss.loss import linear_policy_loss
from logitless.spec import Head, TokenStats


class LossResult(NamedTuple):
    """Results of a head that was asked for a loss; the loss comes first, where trainers look for it.

    Attributes:
        loss, metrics: as from :func:`linear_policy_loss`.
        stats: the rows' results, without graph: the old log-probs of later epochs, say.
    """

    loss: Tensor
    metrics: Metrics
    stats: TokenStats


# Neither a dataclass nor a container: FSDP's mixed precision looks into those, and would round these float32 values.
class Loss:
    """A policy loss to be computed where the head's weight is: in the forward of a module, called through its wrappers.

    :class:`PolicyHead` and models patched by ``logitless.adapters.transformers.patch`` take it as ``loss=``.

    Args:
        objective: what to minimise.
        temperature: of sampling, a number or one value per row; None leaves it to the head.
        denominator, prompt_tokens, group, check_group, fields: as for :meth:`Objective.__call__`.

    >>> Loss(Objective(), old_logprob="current", denominator=12)
    Loss(Objective(policy='ppo_clip', clip=(0.2, 0.2), reduce='token_mean'), old_logprob, denominator)
    """

    def __init__(
        self,
        objective: Objective,
        *,
        temperature: float | Tensor | None = None,
        denominator: float | Tensor | None = None,
        prompt_tokens: Tensor | None = None,
        group: Any = None,
        check_group: bool = False,
        **fields: Tensor | str | None,
    ) -> None:
        if not isinstance(objective, Objective):
            raise LogitlessError(
                f"Loss: objective must be an Objective but is {type(objective).__name__}. Make one, as "
                f'Objective.recipe("grpo"), and give its inputs by name: Loss(objective, advantage=..., ...).'
            )
        self.objective = objective
        self.temperature = temperature
        batch = {"denominator": denominator, "prompt_tokens": prompt_tokens, "group": group}
        self.arguments: dict[str, Any] = {**fields, **batch, "check_group": check_group}

    def __repr__(self) -> str:
        everything = {**self.arguments, "temperature": self.temperature}
        given = [name for name, x in everything.items() if x is not None and x is not False]
        return f"Loss({', '.join([repr(self.objective), *given])})"

    def of(
        self, hidden: Tensor, weight: Tensor | LoRA, rows: Any, *, head: Head | None = None, **options: Any
    ) -> LossResult:
        """The loss of these rows; options are those of :func:`linear_policy_loss`."""
        if self.temperature is not None:
            head = replace(head or PLAIN, temperature=self.temperature)
        arguments = {**self.arguments, **options, "head": head, "return_stats": True}
        return LossResult(*linear_policy_loss(hidden, weight, rows, self.objective, **arguments))
