"""A call from its arguments to what they mean: options as they were given, checks, and the resolved call."""

from logitless.call.call import (
    PLAIN,
    Call,
    apart_everywhere,
    as_products_take,
    local_part,
    needs_gradient,
    recorded,
    resolve_hidden,
    resolve_logits,
    resolve_rows,
    together,
    untraced,
)
from logitless.call.options import Options, Scope

__all__ = [
    "PLAIN",
    "Call",
    "Options",
    "Scope",
    "apart_everywhere",
    "as_products_take",
    "local_part",
    "needs_gradient",
    "recorded",
    "resolve_hidden",
    "resolve_logits",
    "resolve_rows",
    "together",
    "untraced",
]
