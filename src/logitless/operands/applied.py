"""How a rule for logits that are not computed is given the arguments of the function of torch that it answers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

NUMPY = {"axis": "dim", "keepdims": "keepdim"}
"""Names by which torch takes an argument besides its own."""


def in_our_names(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments as rules take them: the first one by its place, and numpy's names of dimensions as torch's."""
    if not kwargs:
        return args, kwargs
    named = {NUMPY.get(name, name): x for name, x in kwargs.items()}
    first = next((name for name in ("input", "tensors") if name in named), None)
    return ((named.pop(first),), named) if first is not None and not args else (args, named)


def applied(rule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The rule's answer; NotImplemented where torch's function has an argument of a name that the rule has not."""
    if kwargs:
        try:
            _signature(rule).bind(*args, **kwargs)
        except TypeError:
            return NotImplemented
    return rule(*args, **kwargs)


_signature = functools.cache(inspect.signature)
