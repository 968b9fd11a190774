"""The one exception callers can expect from this library.

Every message names the argument, what was wanted, what came, and what to do next.
Broken invariants of our own are plain ``assert``; this class is for input we cannot honour.
"""


class LogitlessError(ValueError):
    """Input that cannot be honoured: the text says which argument, why, and what to do."""
