"""Logitless: per-token log-probabilities and entropy for LLM reinforcement learning, without paying for the logits."""

from logitless import provider as provider
from logitless.adapters import install, status, uninstall
from logitless.backends import choose_backend
from logitless.errors import LogitlessError
from logitless.explain import explain
from logitless.from_hidden.entropy_sample import sampled_entropy
from logitless.from_hidden.logprobs import linear_logprobs
from logitless.from_hidden.policy_head import PolicyHead
from logitless.from_logits import logprobs
from logitless.kept import Kept
from logitless.memory import estimate
from logitless.objectives import Metrics, Mismatch, Objective, Preference, count_over, mismatch
from logitless.policy_loss import linear_policy_loss
from logitless.rows import Rows
from logitless.rows.layouts import Contiguous, Zigzag
from logitless.spec import Head, TokenStats, VocabShard, shard_of

__version__ = "0.1.0"

__all__ = [
    "Contiguous",
    "Head",
    "Kept",
    "LogitlessError",
    "Metrics",
    "Mismatch",
    "Objective",
    "PolicyHead",
    "Preference",
    "Rows",
    "TokenStats",
    "VocabShard",
    "Zigzag",
    "choose_backend",
    "count_over",
    "estimate",
    "explain",
    "install",
    "linear_logprobs",
    "linear_policy_loss",
    "logprobs",
    "mismatch",
    "sampled_entropy",
    "shard_of",
    "status",
    "uninstall",
]
