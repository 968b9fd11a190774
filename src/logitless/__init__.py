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
    from logitless.backends import choose_backend
    from logitless.backends.divergences import Divergence
    from logitless.call.lora import LoRA
    from logitless.distill import Teacher, Teachers
    from logitless.distill.divergence import linear_divergence
    from logitless.distill.from_logits import divergence
    from logitless.distill.stats import DivergenceStats
    from logitless.errors import LogitlessError
    from logitless.from_hidden.entropy_sample import sampled_entropy
    from logitless.from_hidden.logprobs import linear_logprobs
    from logitless.from_hidden.policy_head import PolicyHead
    from logitless.from_logits import logprobs
    from logitless.kept import Kept
    from logitless.memory import estimate
    from logitless.objectives import Metrics, Mismatch, Objective, Preference, count_over, mismatch
    from logitless.policy_loss import Loss, linear_policy_loss
    from logitless.routes import explain
    from logitless.rows import Rows
    from logitless.rows.layouts import Contiguous, Zigzag
    from logitless.spec import Head, TokenStats, VocabShard, shard_of

__version__ = "0.1.0"

__all__ = [
    "Contiguous",
    "Divergence",
    "DivergenceStats",
    "Head",
    "Kept",
    "LoRA",
    "LogitlessError",
    "Loss",
    "Metrics",
    "Mismatch",
    "Objective",
    "PolicyHead",
    "Preference",
    "Rows",
    "Teacher",
    "Teachers",
    "TokenStats",
    "VocabShard",
    "Zigzag",
    "choose_backend",
    "count_over",
    "divergence",
    "estimate",
    "explain",
    "install",
    "linear_divergence",
    "linear_logprobs",
    "linear_policy_loss",
    "logprobs",
    "mismatch",
    "sampled_entropy",
    "shard_of",
    "status",
    "uninstall",
]

_HOMES = {
    "adapters": ("install", "status", "uninstall"),
    "backends": ("choose_backend",),
    "backends.divergences": ("Divergence",),
    "distill": ("Teacher", "Teachers"),
    "distill.divergence": ("linear_divergence",),
    "distill.from_logits": ("divergence",),
    "distill.stats": ("DivergenceStats",),
    "errors": ("LogitlessError",),
    "from_hidden.entropy_sample": ("sampled_entropy",),
    "from_hidden.logprobs": ("linear_logprobs",),
    "from_hidden.policy_head": ("PolicyHead",),
    "from_logits": ("logprobs",),
    "kept": ("Kept",),
    "call.lora": ("LoRA",),
    "memory": ("estimate",),
    "objectives": ("Metrics", "Mismatch", "Objective", "Preference", "count_over", "mismatch"),
    "policy_loss": ("Loss", "linear_policy_loss"),
    "routes": ("explain",),
    "rows": ("Rows",),
    "rows.layouts": ("Contiguous", "Zigzag"),
    "spec": ("Head", "TokenStats", "VocabShard", "shard_of"),
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
