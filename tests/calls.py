"""Calls in the arguments that tests draw at random: options of the head and of the verb in one dictionary."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor

import logitless as ll
from logitless.operands import Linear, Logits

OF_LOGITS = tuple(field.name for field in fields(Linear))
"""Options that say what the head is; all others are the verb's."""


def logits_of(hidden: Any, weight: Any, options: dict[str, Any]) -> tuple[Logits, dict[str, Any]]:
    """``Logits`` with the options that are theirs, and the rest, which are the verb's."""
    of_logits = {name: options[name] for name in OF_LOGITS if name in options}
    return ll.Logits(hidden, weight, **of_logits), {k: x for k, x in options.items() if k not in OF_LOGITS}


def from_hidden(hidden: Any, weight: Any, rows: Any, **options: Any) -> ll.TokenStats:
    """``logprobs`` of ``Logits``."""
    logits, options = logits_of(hidden, weight, options)
    return ll.logprobs(logits, rows, **options)


def loss_from_hidden(hidden: Any, weight: Any, rows: Any, objective: Any, **options: Any) -> Any:
    """``policy_loss`` of ``Logits``."""
    logits, options = logits_of(hidden, weight, options)
    return ll.policy_loss(logits, rows, objective, **options)


def from_logits(
    logits: Tensor, rows: Any, *, shard: Any = None, overwrite: bool = False, bits: Any = "fast", **options: Any
) -> ll.TokenStats:
    """``logprobs`` of logits that exist."""
    return ll.logprobs(ll.Logits.given(logits, shard=shard, overwrite=overwrite, bits=bits), rows, **options)
