"""Megatron's schedules: every training and log-prob forward of a host on Megatron-Core runs in one.

    run = get_forward_backward_func()             imported by name into the host's module, where ours stands in
    run(forward_step_func=..., model=chunks)      defers the heads of these chunks, and then runs Megatron's

A chunk of the virtual pipeline without a head, and a value model, are left alone. Inference runs in no schedule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from logitless.adapters.heads import Heads
from logitless.adapters.host import Replacement

NAME = "get_forward_backward_func"


def schedule(reads: Callable[..., bool]) -> Callable[[Callable[..., Any], Mapping[str, Any]], Callable[..., Any]]:
    """``make`` of what stands in for ``get_forward_backward_func``: the function that it returns defers the models that
    it runs.
    """

    def make(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
        heads: Heads = options["heads"]

        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            run = original(*args, **kwargs)

            @functools.wraps(run)
            def forward_backward(*args: Any, **given: Any) -> Any:
                model = given.get("model")
                for chunk in model if isinstance(model, list | tuple) else (model,):
                    if chunk is not None:
                        (heads.defer if reads(**given) else heads.release)(chunk)
                return run(*args, **given)

            return forward_backward

        return get_forward_backward_func

    return make


def in_schedule(module: str, optional: bool = False, reads: Callable[..., bool] = lambda **_: True) -> Replacement:
    """The heads of all models that this module of a host hands to a schedule.

    Args:
        reads: whether a schedule with these arguments reads a few numbers of each row; see ``deferring``.
    """
    return Replacement(
        module=module,
        name=NAME,
        signature={
            "with Megatron-Core 0.19 - 0.20": "(pp_size=None, vp_size=None, schedule_pg_collection=None)",
            "with Megatron-Core 0.15 - 0.18": "(pp_size=None, vp_size=None)",
            "with Megatron-Core before that": "()",
        },
        make=schedule(reads),
        optional=optional,
        of="megatron",
    )
