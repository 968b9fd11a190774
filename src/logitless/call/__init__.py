"""A call from its arguments to what they mean: options as they were given, checks, and the resolved call."""

from logitless.call.asked import PLAIN, Asked
from logitless.call.call import Call, Operands, members_of, recorded, rows_of_each, together
from logitless.call.checks import resolve_rows
from logitless.call.resolve import MEMORY, default_memory, resolve
from logitless.call.unchanged import Unchanged

__all__ = [
    "MEMORY",
    "PLAIN",
    "Asked",
    "Call",
    "Operands",
    "Unchanged",
    "default_memory",
    "members_of",
    "recorded",
    "resolve",
    "resolve_rows",
    "rows_of_each",
    "together",
]
