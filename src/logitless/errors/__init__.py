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
    """The error of an autograd Function's backward under ``create_graph=True``."""
    return LogitlessError(
        f"{caller}: backward with create_graph=True asks for a second derivative, which is not implemented. "
        f"Drop create_graph{instead}."
    )


def adapted(name: str) -> str:
    """The text that refuses a layer which an adapter wraps, where its weight would be read: why, and what to do."""
    return (
        f"{name} wraps another layer, as adapters on the head do, and its weight alone would leave the adapter out. "
        f"Leave the head out of the adapter (peft: target_modules), merge it (peft: merge_and_unload), or pass a "
        f"logitless.LoRA for the weight: see LoRA on the head in docs/how-to/wrappers.md."
    )


ELSEWHERE = (
    "Sharded parameters look like this outside of their module's forward (FSDP1, ZeRO-3): use a PolicyHead, and call "
    "it through its wrapper."
)
"""What to do about a weight whose numbers other ranks hold."""


def released(caller: str, shape: list[int]) -> LogitlessError:
    """The error of a backward whose weight was whole in forward, and has another shape now."""
    return LogitlessError(
        f"{caller}: backward multiplies by the weight again, which was whole in forward and is {shape} now: ZeRO-3 and "
        f"FSDP1 let go of it where their module's forward ends. Use a PolicyHead, whose wrapper gathers it for "
        f"backward too, or policy_loss, whose gradients are made in forward."
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or the name of its class where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is closest, itself first; None where none is close."""
    name, names = str(name), list(known)
    slips = [x for x in names if _one_slip(name.lower(), x.lower())]
    same = [x for x in slips if x.lower() == name.lower()]
    # difflib counts letters in common, and so prefers 'gspo' to 'grpo' for 'gpro'.
    close = same or slips or difflib.get_close_matches(name, names, n=1)
    return close[0] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` with the known name that is closest, or nothing where none is close."""
    close = closest(name, known)
    return f" Did you mean {close!r}?" if close is not None else ""


def _one_slip(a: str, b: str) -> bool:
    """Whether one letter more, less or other, or two letters that changed places, make a word of the other."""
    shorter = min(len(a), len(b))
    start = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    a, b = a[start:], b[start:]
    swapped = len(a) > 1 and a[1::-1] + a[2:] == b
    return swapped or a[1:] == b[1:] or a[1:] == b or a == b[1:]
