"""Megatron's schedules: every training and log-prob forward of a host on Megatron-Core runs in one.

    run = get_forward_backward_func()             imported by name into the host's module, where ours stands in
    run(forward_step_func=..., model=chunks)      defers the heads of these chunks, and then runs Megatron's

A chunk of the virtual pipeline without a head, and a value model, are left alone. Inference runs in no schedule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from logitless.adapters.host import Replacement
from logitless.adapters.replacing import Options, replaces


def in_schedule(module: str, optional: bool = False, reads: Callable[..., bool] = lambda **_: True) -> Replacement:
    """The heads of all models that this module of a host hands to a schedule.

    Args:
        reads: whether a schedule with these arguments reads a few numbers of each row; see ``deferring``.
    """
    versions = {
        "with Megatron-Core 0.19 - 0.20": "(pp_size=None, vp_size=None, schedule_pg_collection=None)",
        "with Megatron-Core 0.15 - 0.18": "(pp_size=None, vp_size=None)",
        "with Megatron-Core before that": "()",
    }

    @replaces(module, signature=versions, optional=optional, of="megatron")
    def get_forward_backward_func(
        original: Callable[..., Any], options: Options, *args: Any, **kwargs: Any
    ) -> Callable[..., Any]:
        run, heads = original(*args, **kwargs), options["heads"]

        @functools.wraps(run)
        def forward_backward(*args: Any, **given: Any) -> Any:
            model = given.get("model")
            for chunk in model if isinstance(model, list | tuple) else (model,):
                if chunk is not None:
                    (heads.defer if reads(**given) else heads.release)(chunk)
            return run(*args, **given)

        return forward_backward

    return get_forward_backward_func
