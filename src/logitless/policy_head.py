"""``PolicyHead``: a language-model head that answers with log-probs, as a module.

It owns the linear layer it replaces, so tied embeddings stay tied, and FSDP gathers the weight around its forward:
inside, the weight is an ordinary tensor. The layer's own forward is not called: hooks go on the PolicyHead. With
``loss=`` the whole policy loss is computed in there, and the hooks of every wrapper run around it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from torch import Tensor, nn

from logitless.errors import LogitlessError
from logitless.errors.arguments import check_name
from logitless.loss import policy_loss
from logitless.operands import Linear, Logits
from logitless.operands.peft import head_weight
from logitless.score import logprobs
from logitless.spec import parse_memory

OF_LOGITS = tuple(field.name for field in fields(Linear))
"""Options of :class:`Logits`; all others are the verb's."""


def _options(verb: Callable[..., Any]) -> frozenset[str]:
    """Names of a verb's keyword arguments."""
    return frozenset(name for name, x in inspect.signature(verb).parameters.items() if x.kind is x.KEYWORD_ONLY)


OF_LOGPROBS, OF_LOSS = _options(logprobs), _options(policy_loss)


class PolicyHead(nn.Module):
    """An LM head that computes log-probs and entropy of chosen tokens, or their policy loss, and never their logits.

    Args:
        linear: the head it stands in for; its weight and bias are used as they are. With peft's LoRA around it, as a
            :class:`LoRA`, its dropout included.
        options: keyword arguments of :class:`Logits`, :func:`logprobs` and :func:`policy_loss` for every call, such as
            ``match``, ``head`` or ``memory``. A call with a loss leaves out those of ``logprobs`` alone, such as
            ``entropy``, and one without a loss those of ``policy_loss`` alone.

    >>> import torch
    >>> head = PolicyHead(nn.Linear(4, 10), entropy="value")
    >>> head(torch.zeros(2, 4), torch.tensor([1, 2])).logprob.shape
    torch.Size([2])
    """

    def __init__(self, linear: nn.Linear, **options: Any) -> None:
        super().__init__()
        if not isinstance(getattr(linear, "weight", None), Tensor) or "bias" in options:
            raise LogitlessError(
                f"PolicyHead: linear must be a linear layer, with its own bias if any, but is {type(linear).__name__}."
            )
        known = [*OF_LOGITS, *sorted(OF_LOGPROBS | OF_LOSS)]
        for name in options:
            check_name(name, known, "PolicyHead: the name of an option")
        if options.get("memory") is not None:
            parse_memory(options["memory"])
        self.linear = linear
        self.options = options
        self._weight()

    def forward(self, hidden: Tensor, rows: Any = None, *, loss: Any = None, **options: Any) -> Any:
        """Results for the rows; with a :class:`logitless.Loss` its loss; plain logits where no rows are given.

        Returns:
            :class:`TokenStats`, or with a loss ``(loss, metrics, stats)``, or logits.
        """
        if rows is None:
            given = [*options, *(() if loss is None else ("loss",))]
            if given:
                raise LogitlessError(f"PolicyHead: {given[0]} was given without rows. Pass the rows to score.")
            return self.linear(hidden)
        if "bias" in options:
            raise LogitlessError("PolicyHead: bias was given to a call, but the head has that of its linear layer.")
        weight, base = self._weight(), getattr(self.linear, "base_layer", self.linear)
        # What was set for every call is for either verb; what is given in a call is for this one.
        taken = (*OF_LOGITS, *(OF_LOGPROBS if loss is None else OF_LOSS))
        ours = {name: x for name, x in self.options.items() if name in taken}
        options = {**ours, **options, "bias": getattr(base, "bias", None)}
        linear = {name: options.pop(name) for name in OF_LOGITS if name in options}
        logits = Logits(hidden, weight, **linear)
        if loss is None:
            return logprobs(logits, rows, **options)
        if not hasattr(loss, "objective"):
            raise LogitlessError(
                f"PolicyHead: loss must be a logitless.Loss, an objective with its inputs, but is "
                f"{type(loss).__name__}. Pass loss=Loss(objective, advantage=..., old_logprob=...)."
            )
        return loss.of(logits, rows, **options)

    def _weight(self) -> Any:
        """The layer's weight; raises where the layer computes something else than a product with it."""
        weight = head_weight("PolicyHead", self.linear)
        inner = (x for x in self.linear.modules() if x._forward_hooks or x._forward_pre_hooks)
        if (hooked := next(inner, None)) is not None:
            name = type(hooked).__name__
            raise LogitlessError(
                f"PolicyHead: {name} has forward hooks, which would not run: its weight is read and its forward is not "
                f"called. Put the hooks on the PolicyHead."
            )
        return weight
