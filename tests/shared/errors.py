"""Shared by the tests of errors and those that build on them."""

from __future__ import annotations

import re

import pytest
import torch

from logitless import LogitlessError


def raises(text: str):
    """The error, by its literal text; ``...`` stands for anything."""
    return pytest.raises(LogitlessError, match=".*".join(re.escape(part) for part in text.split("...")))


def logits_and_rows(tokens: int = 5, vocab: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, vocab), torch.randint(0, vocab, (tokens,))
