"""Logitless: per-token log-probabilities and entropy for LLM reinforcement learning, without paying for the logits."""

from logitless import provider as provider
from logitless.adapters import install, status, uninstall
from logitless.backends import choose_backend
from logitless.backends.divergences import Divergence
from logitless.distill import Teacher, Teachers
from logitless.distill.divergence import DivergenceStats, linear_divergence
from logitless.distill.from_logits import divergence
from logitless.errors import LogitlessError
from logitless.explain import explain
from logitless.from_hidden.entropy_sample import sampled_entropy
from logitless.from_hidden.logprobs import linear_logprobs
from logitless.from_hidden.policy_head import PolicyHead
from logitless.from_logits import logprobs
from logitless.kept import Kept
from logitless.memory import estimate
from logitless.objectives import Metrics, Mismatch, Objective, Preference, count_over, mismatch
from logitless.policy_loss import Loss, linear_policy_loss
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


def __dir__() -> list[str]:
    """The public names, and the modules that have more of them."""
    return sorted([*__all__, "__all__", "__doc__", "__version__", "adapters", "objectives", "provider"])
