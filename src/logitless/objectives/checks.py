"""Checks of an objective's arguments, and the texts they raise."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from logitless.collectives import resolve_group
from logitless.errors import LogitlessError, did_you_mean
from logitless.rows import Rows


def unknown(argument: str, value: object, known: Iterable[str]) -> LogitlessError:
    """The error for a name that is not known."""
    names = list(known)
    return LogitlessError(
        f"{argument} {value!r} is not known.{did_you_mean(str(value), names)} Known: {', '.join(names)}."
    )


def finite(name: str, value: Any, caller: str = "Objective") -> float:
    """The number, if it is one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise LogitlessError(f"{caller}: {name} must be a finite number but is {value!r}.")
    return value


def resolve_clip(clip: Any) -> tuple[float, float]:
    """``(low, high)`` from one number or two."""
    pair = clip if isinstance(clip, tuple | list) else (clip, clip)
    if len(pair) != 2:
        raise LogitlessError(f"Objective: clip must be a number or (low, high) but is {clip!r}.")
    low, high = (finite("clip", bound) for bound in pair)
    if not 0 <= low <= 1 or high < 0:
        raise LogitlessError(
            f"Objective: clip bounds the ratio by 1 - low and 1 + high, so low must be in 0 .. 1 and high 0 or more, "
            f"but they are {low!r} and {high!r}."
        )
    return low, high


def resolve_bounds(name: str, bounds: Any, default: tuple[float, ...]) -> tuple[float, ...]:
    """The bounds of a named correction, as many as its default has."""
    if bounds is None:
        return default
    values = tuple(bounds) if isinstance(bounds, tuple | list) else (bounds,) if len(default) == 1 else (0.0, bounds)
    if len(values) != len(default):
        wanted = "one number" if len(default) == 1 else "(low, high) or the high bound alone"
        raise LogitlessError(f"Objective: correction_bounds of {name!r} must be {wanted} but is {bounds!r}.")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value) or value < 0:
            raise LogitlessError(f"Objective: correction_bounds must be numbers of 0 or more but are {bounds!r}.")
    if values[0] > values[-1]:
        raise LogitlessError(f"Objective: correction_bounds must be (low, high) with low <= high but are {bounds!r}.")
    return tuple(float(value) for value in values)


def sequence_group(caller: str, rows: Rows, group: Any, *, needed: bool) -> Any:
    """The process group that sums over samples run over, if these rows are split over its ranks."""
    group = resolve_group(group, f"{caller}: group")
    size, world = 1 if rows.cp is None else rows.cp.size, 1 if group is None else group.size()
    if size != world and (needed or group is not None):
        raise LogitlessError(
            f"{caller}: these rows are split over {size} context-parallel ranks but group has {world}. Means over "
            f"samples run over the context-parallel group, and nothing else does: pass that one as group=."
        )
    return group


def check_field(name: str, x: Any, num_rows: int, device: torch.device, caller: str = "Objective") -> Tensor:
    """A field, if it is ``[R]`` values without gradient where the rows are."""
    if not isinstance(x, Tensor):
        raise LogitlessError(f"{caller}: {name} must be a tensor of shape [{num_rows}] but is {type(x).__name__}.")
    if tuple(x.shape) != (num_rows,):
        raise LogitlessError(
            f"{caller}: {name} has shape {list(x.shape)} but there are {num_rows} rows. Give one value per row: a "
            f"value per sample is per_sample[rows.sample], values of whole responses are rows.from_responses(...)."
        )
    if x.device != device:
        raise LogitlessError(f"{caller}: {name} is on {x.device} but the rows are on {device}. Move it there.")
    if x.requires_grad:
        raise LogitlessError(f"{caller}: {name} requires grad, but no gradient flows to it. Pass {name}.detach().")
    return x
