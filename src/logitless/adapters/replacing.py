"""A replacement, written as a function with the parameters of the host's own:

    @replaces("toyrl.maths")
    def score(options, logits, ids, chunk=128): ...     Replacement of toyrl.maths.score, "(logits, ids, chunk=128)"

Before these come ``original`` and ``options``, where the function needs them: what ``make`` of a ``Replacement`` gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any, TypeVar

from logitless.adapters.host import Replacement
from logitless.adapters.signatures import bare_signature

T = TypeVar("T")

Options = Mapping[str, Any]
"""Every option of the installed host, with its value."""

Known = str | tuple[str, ...] | None
"""A signature: a text; or ours, without the parameters that are named; or None for versions without the function."""


def replaces(
    module: str,
    name: str | None = None,
    signature: Known | Mapping[str, Known] = (),
    *,
    signature_of: str | None = None,
    **more: Any,
) -> Callable[[Callable[..., Any]], Replacement]:
    """Makes a :class:`~logitless.adapters.host.Replacement` of our function.

    Args:
        name: of the host's function; None for the name of ours.
        signature: one, or one for each range of versions; ours, unless it says otherwise.
        signature_of: as of a Replacement; of ``"Function.apply"`` it is ``"Function.forward"``.
        module, more: fields of the Replacement.
    """

    def replacement(ours: Callable[..., Any]) -> Replacement:
        whole = bare_signature(ours)
        supplied = [x for x in ("original", "options") if x in whole.parameters]
        called = name or ours.__name__
        checked = called.removesuffix("apply") + "forward" if called.endswith(".apply") else signature_of

        def make(original: Callable[..., Any], options: Options) -> Callable[..., Any]:
            function, given = ours, {"original": original, "options": options}
            for x in supplied:
                # A method has the signature of what comes after.
                function = MethodType(function, given[x])
            return function

        def text(known: Known) -> Any:
            if not isinstance(known, tuple):
                return known
            kept = [p for p in whole.parameters.values() if p.name not in (*supplied, *known)]
            written = str(whole.replace(parameters=kept))
            return f"(ctx, {written[1:]}" if checked else written

        forms = {x: text(y) for x, y in signature.items()} if isinstance(signature, Mapping) else text(signature)
        return Replacement(module, called, forms, make, signature_of=checked, **more)

    return replacement


@contextmanager
def held(variable: ContextVar[T], value: T) -> Iterator[T]:
    """A block in which a context variable has this value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
