"""The one exception callers can expect from this library.

Every message names the argument, what was wanted, what came, and what to do next.
Broken invariants of our own are plain ``assert``; this class is for input we cannot honour.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LogitlessError(ValueError):
    """Input that cannot be honoured: the text says which argument, why, and what to do."""


def no_second_derivative(caller: str, instead: str = "") -> LogitlessError:
    """What the backward of an autograd Function raises under ``create_graph=True``."""
    return LogitlessError(
        f"{caller}: backward with create_graph=True asks for a second derivative, which is not implemented. "
        f"Drop create_graph{instead}."
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` with the known name that is closest, or nothing where none is close."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
