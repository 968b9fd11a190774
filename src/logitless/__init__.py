"""Logitless: per-token log-probabilities and entropy for LLM reinforcement learning, without paying for the logits."""

from logitless.backends import choose_backend
from logitless.errors import LogitlessError
from logitless.kept import Kept
from logitless.layouts import Contiguous, Zigzag
from logitless.linear import explain, linear_logprobs
from logitless.ops import logprobs
from logitless.policy_head import PolicyHead
from logitless.rows import Rows
from logitless.spec import Head, TokenStats, VocabShard, shard_of

__version__ = "0.1.0"

__all__ = [
    "Contiguous",
    "Head",
    "Kept",
    "LogitlessError",
    "PolicyHead",
    "Rows",
    "TokenStats",
    "VocabShard",
    "Zigzag",
    "choose_backend",
    "explain",
    "linear_logprobs",
    "logprobs",
    "shard_of",
]
