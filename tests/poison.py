"""Fill what ``torch.empty`` returns, so that reading memory nobody wrote shows up in a result.

Only calls made by the library itself are filled: floats with NaN, integers with a large odd number. Calls that
``torch.compile`` is tracing are left alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

POISON = 1_000_003
"""Past every vocabulary and row count in the suite, and odd, so that it is no multiple of a size by chance."""


def install() -> None:
    """Patch the ways to make uninitialised memory, for the rest of the process. Calling it twice is harmless."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")):
        original = getattr(owner, name)
        if not hasattr(original, "poisons"):
            setattr(owner, name, _poisoned(original))


def _poisoned(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        out = original(*args, **kwargs)
        if torch.compiler.is_compiling():
            return out
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return _fill(out) if caller.split(".")[0] == "logitless" else out

    wrapper.poisons = True
    return wrapper


def _fill(out: Tensor) -> Tensor:
    if out.is_floating_point():
        out.detach().fill_(torch.nan)
        return out
    if out.dtype in (torch.int32, torch.int64):
        return out.fill_(POISON)
    return out
