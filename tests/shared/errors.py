"""Shared by the tests of errors and those that build on them."""

from __future__ import annotations

import re

import pytest

from logitless import LogitlessError


def raises(text: str):
    """The error, by its literal text; ``...`` stands for anything."""
    return pytest.raises(LogitlessError, match=".*".join(re.escape(part) for part in text.split("...")))
