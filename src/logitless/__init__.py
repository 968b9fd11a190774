"""Logitless: per-token log-probabilities and entropy for LLM reinforcement learning, without paying for the logits."""

from logitless.backends import choose_backend
from logitless.errors import LogitlessError
from logitless.kept import Kept
from logitless.ops import logprobs
from logitless.rows import Rows
from logitless.spec import Head, TokenStats, VocabShard

__version__ = "0.1.0"

__all__ = [
    "Head",
    "Kept",
    "LogitlessError",
    "Rows",
    "TokenStats",
    "VocabShard",
    "choose_backend",
    "logprobs",
]
