"""Notes on errors that leave a call: what to do, and which of the caller's tensors were written to. Also the log line,
and the place of the caller's code.

Nothing is caught and nothing is retried (docs/decisions/0011): the error goes on as it came, with notes.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WRITTEN = {
    "weight_grad": "weight_grad holds a part of this call's gradient, or all of it. Zero it, together with the other "
    "gradients of this optimizer step, before the next one.",
    "logits": "the logits, which overwrite=True gives up to backward, hold a part of their gradient. Run "
    "forward again.",
}
"""Notes on a tensor of the caller's that was being written to when the error came, and what to do."""


class Noting:
    """``with Noting(text_of):`` adds the note ``text_of(error)``, unless that is None, to an error that leaves it."""

    def __init__(self, text_of: Callable[[BaseException], str | None]) -> None:
        self.text_of = text_of

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            _add(error, self.text_of(error))


def explained(
    caller: str, memory: int | str, already: str | None = None, **written: Tensor | None
) -> contextlib.AbstractContextManager[None, bool | None]:
    """A block whose errors tell how to take less memory, and which of these tensors of the caller's were written to.

    Args:
        memory: the budget, as it was given.
        already: name in :data:`WRITTEN` of a tensor that was written to before the block.
        written: tensors that the block writes to, by a name in :data:`WRITTEN`.
    """
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    before = {name: version_of(x) for name, x in written.items()}

    def text_of(error: BaseException) -> str | None:
        changed = [name for name, x in written.items() if version_of(x) != before[name]]
        return _note(error, caller, memory, already, *changed)

    return Noting(text_of)


def add_note(error: BaseException, caller: str, memory: int | str, written: str | None = None) -> None:
    """Add to an error that leaves a call how it would take less memory, where that was its reason, and the note of
    :data:`WRITTEN` on a tensor of the caller's that the call has written to."""
    _add(error, _note(error, caller, memory, written))


def _note(error: BaseException, caller: str, memory: int | str, *written: str | None) -> str | None:
    """The note on an error, or None for none; ``written`` are names in :data:`WRITTEN`, or None."""
    texts = [WRITTEN[name] for name in written if name is not None]
    if is_out_of_memory(error) and not hasattr(error, "__notes__"):
        less = f"Pass a smaller memory= (it was {memory!r}), or ask logitless.estimate what fits."
        texts.append(f"no room for working memory. {less}")
    return f"{caller}: {' '.join(texts)}" if texts else None


def _add(error: BaseException, text: str | None) -> None:
    if text is not None and text not in getattr(error, "__notes__", ()):
        error.add_note(text)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device has no memory left, or a CPU, for which torch has no class of errors."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def version_of(x: Any) -> int | None:
    """How often a tensor was written to; None where torch does not count, or where there is no tensor."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else None


_LOGGED: set[tuple[int, str]] = set()
"""Lines that were logged, by the process that logged them: a fork logs its own."""


def log_once(what: str) -> None:
    """A line of the logger ``logitless``, once per process, with the versions that this runs on. Level INFO."""
    if (os.getpid(), what) in _LOGGED:
        return
    _LOGGED.add((os.getpid(), what))
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    version, python = sys.modules["logitless"].__version__, ".".join(map(str, sys.version_info[:3]))
    text = "logitless %s: %s (torch %s, Triton %s, Python %s, process %d)"
    logging.getLogger("logitless").info(text, version, what, torch.__version__, triton, python, os.getpid())


def place() -> str:
    """``file:line`` of the innermost code that is neither this package nor torch or what launches its kernels."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] not in ("logitless", "torch", "triton", "typing_extensions"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "nowhere in particular"
