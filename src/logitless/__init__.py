"""Logitless: per-token log-probabilities and entropy for LLM reinforcement learning, without paying for the logits.

Names are loaded when they are first used, so that the command can answer ``--help`` without loading torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logitless import provider as provider
    from logitless.adapters import install, status, uninstall
    from logitless.deferred import defer
    from logitless.errors import LogitlessError
    from logitless.loss import Loss, policy_loss
    from logitless.memory import estimate, explain
    from logitless.objectives import Metrics, Objective, Preference
    from logitless.operands import Kept, Logits, LoRA, Teacher
    from logitless.policy_head import PolicyHead
    from logitless.rows import Rows
    from logitless.rows.layouts import Contiguous, Zigzag
    from logitless.score import logprobs
    from logitless.spec import Head, TokenStats, VocabShard

__version__ = "0.1.0"

__all__ = [
    "Contiguous",
    "Head",
    "Kept",
    "LoRA",
    "LogitlessError",
    "Logits",
    "Loss",
    "Metrics",
    "Objective",
    "PolicyHead",
    "Preference",
    "Rows",
    "Teacher",
    "TokenStats",
    "VocabShard",
    "Zigzag",
    "defer",
    "estimate",
    "explain",
    "install",
    "logprobs",
    "policy_loss",
    "status",
    "uninstall",
]

_HOMES = {
    "adapters": (
        "install",
        "status",
        "uninstall",
    ),
    "deferred": ("defer",),
    "errors": ("LogitlessError",),
    "loss": (
        "Loss",
        "policy_loss",
    ),
    "memory": (
        "estimate",
        "explain",
    ),
    "objectives": (
        "Metrics",
        "Objective",
        "Preference",
    ),
    "operands": (
        "Kept",
        "LoRA",
        "Logits",
        "Teacher",
    ),
    "policy_head": ("PolicyHead",),
    "rows": ("Rows",),
    "rows.layouts": (
        "Contiguous",
        "Zigzag",
    ),
    "score": ("logprobs",),
    "spec": (
        "Head",
        "TokenStats",
        "VocabShard",
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, or a folder or file of the package such as ``logitless.objectives``, on first use."""
    if name in _HOME:
        value = getattr(importlib.import_module(f"logitless.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"logitless.{name}") is not None:
        return importlib.import_module(f"logitless.{name}")
    raise AttributeError(f"module 'logitless' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, and the modules that have more of them."""
    return sorted([*__all__, "__all__", "__doc__", "__version__", "adapters", "objectives", "provider"])
