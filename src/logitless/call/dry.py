"""A dry call: the verb itself, watched on its way, for ``explain`` and ``estimate``.

    with Dry(device="cuda", machine=H200) as dry:
        logprobs(logits on the meta device, rows)          the same checks, route and allocations, and no numbers
    dry.plan

A verb says which route it takes (:func:`announce`); a dry call may stop it there.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from logitless.machine import Machine

ACTIVE: list[Dry] = []
"""Dry calls that are under way in any thread, the innermost last."""


class Stopped(BaseException):
    """Ends a verb whose route is all that is wanted. No error: nobody below may catch it."""


@dataclass(eq=False)
class Dry:
    """What a dry call pretends, and what it learned.

    Attributes:
        device: type of the device that tensors on the meta device stand for; None for that of the tensors.
        machine: whose sizes apply; None for that of the device.
        dropped: share of a loss's rows without a gradient, which no value can tell.
        stop: whether the verb ends once its route is known.
        plan: the route.
    """

    device: str | None = None
    machine: Machine | None = None
    dropped: float = 0.0
    stop: bool = False
    plan: Any = None
    backend: str | None = None
    thread: int = field(default_factory=threading.get_ident)

    def __enter__(self) -> Dry:
        ACTIVE.append(self)
        return self

    def __exit__(self, kind: Any, *_: Any) -> bool:
        ACTIVE.remove(self)
        return kind is Stopped


def under_way() -> Dry | None:
    """The innermost dry call of this thread: others may make real calls at the same time. To be asked where
    :data:`ACTIVE` has any."""
    return next((dry for dry in reversed(ACTIVE) if dry.thread == threading.get_ident()), None)


def announce(call: Any, plan: Any) -> None:
    """A verb has chosen its route. To be called where somebody is :func:`under_way`."""
    dry = under_way()
    assert dry is not None
    dry.plan, dry.backend = plan, call.backend_name
    if dry.stop:
        raise Stopped
