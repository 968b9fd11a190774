"""Checks of an objective's arguments, and the texts they raise."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from logitless.collectives import resolve_group
from logitless.errors import LogitlessError, did_you_mean
from logitless.errors.arguments import instance, is_number, refused
from logitless.objectives.inputs import RESERVED, RESULTS, STATISTICS, Inputs
from logitless.rows import Rows
from logitless.rows.layouts import num_ranks
from logitless.spec import tracked_by_autograd

T = TypeVar("T")


def check_known_name(value: object, known: Iterable[str], argument: str) -> None:
    """Raise for a name that is not known; anything may come, also what no table can be asked for."""
    if not isinstance(value, str) or value not in known:
        raise unknown(argument, value, known)


def unknown(argument: str, value: object, known: Iterable[str]) -> LogitlessError:
    """The error for a name that is not known."""
    names = list(known)
    hint = elsewhere(value, names) or did_you_mean(str(value), names)
    return LogitlessError(f"{argument} {value!r} is not known.{hint} Known: {', '.join(names)}.")


OTHER_NAMES = {
    "beta": "kl_coef",
    "kl_beta": "kl_coef",
    "cliprange": "clip",
    "clip_eps": "clip",
    "clip_range": "clip",
    "clip_ratio": "clip",
    "eps": "clip",
    "epsilon": "clip",
    "ent_coef": "entropy_coef",
    "loss_agg_mode": "reduce",
    "loss_type": "policy",
    "max_completion_length": "length",
    "reduction": "reduce",
}
"""What others call an argument of an objective."""


def elsewhere(name: object, known: Iterable[str]) -> str:
    """`` Here it is called 'x'.`` for the name that others give to an argument, or nothing."""
    ours = OTHER_NAMES.get(str(name), "")
    if ours not in known:
        return ""
    kind = ' It goes with an estimator, as kl="k3".' if ours == "kl_coef" else ""
    return f" Here it is called {ours!r}.{kind}"


def explained_arguments(cls: type[T]) -> type[T]:
    """A class whose keyword arguments are its fields, and that says so where it is called with others."""
    made, known = cls.__init__, [field.name for field in fields(cls)]  # pyright: ignore[reportArgumentType]

    @functools.wraps(made)
    def init(self: Any, *args: Any, **given: Any) -> None:
        if args:
            came = type(args[0]).__name__ if not isinstance(args[0], str) else repr(args[0])
            raise LogitlessError(
                f'{cls.__name__}: wanted keyword arguments but got {came}. Name the term, as policy="ppo_clip", or '
                f'take a recipe by name, as {cls.__name__}.recipe("grpo"). Tensors go with the call: '
                f"objective(stats, rows, advantage=...)."
            )
        for name in given:
            if name not in known:
                raise unknown(f"{cls.__name__}: argument", name, known)
        made(self, **given)

    cls.__init__ = init
    return cls


def finite(name: str, value: Any, caller: str = "Objective") -> float:
    """The number, if it is one."""
    if not is_number(value):
        raise refused(f"{caller}: {name}", "a finite number", value)
    return value


def at_least_zero(name: str, value: Any, caller: str) -> float:
    """The number, if it is one and not negative."""
    if finite(name, value, caller) < 0:
        raise refused(f"{caller}: {name}", "a number of 0 or more", value)
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
    alone = len(default) == 1
    if isinstance(bounds, tuple | list):
        values = tuple(bounds)
    else:
        values = (bounds,) if alone else (0.0, bounds)
    if len(values) != len(default):
        wanted = "one number" if alone else "(low, high) or the high bound alone"
        raise LogitlessError(f"Objective: correction_bounds of {name!r} must be {wanted} but is {bounds!r}.")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value) or value < 0:
            raise LogitlessError(f"Objective: correction_bounds must be numbers of 0 or more but are {bounds!r}.")
    if values[0] > values[-1]:
        raise LogitlessError(f"Objective: correction_bounds must be (low, high) with low <= high but are {bounds!r}.")
    return tuple(float(value) for value in values)


def check_rows(caller: str, rows: Any) -> Rows:
    """The rows, if they are :class:`Rows`."""
    return instance(rows, Rows, f"{caller}: rows", " Make one with Rows.packed, say.")


def sequence_group(caller: str, rows: Rows, group: Any, *, needed: bool) -> Any:
    """The process group that sums over samples run over, if these rows are split over its ranks."""
    group = resolve_group(group, f"{caller}: group")
    size, world = num_ranks(rows.cp), 1 if group is None else group.size()
    if size != world and (needed or group is not None):
        raise LogitlessError(
            f"{caller}: these rows are split over {size} context-parallel ranks but group has {world}. Means over "
            f"samples run over the context-parallel group, and nothing else does: pass that one as group=."
        )
    # One rank has whole samples: there is nothing to send.
    return None if world == 1 else group


def check_stats(caller: str, stats: Any, num_rows: int) -> None:
    """Raise unless these are results with log-probs, and all of them have one number for each row."""
    if not isinstance(getattr(stats, "logprob", None), Tensor):
        raise LogitlessError(
            f"{caller}: stats must be the TokenStats of logprobs but is {type(stats).__name__}. Log-probs of your own "
            f"go in as TokenStats(logprob, entropy, None)."
        )
    if not stats.logprob.is_floating_point():
        raise refused(f"{caller}: logprob", "a tensor of floating-point numbers", stats.logprob)
    for name in (*RESULTS, *STATISTICS):
        x = getattr(stats, name, None)
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise refused(f"{caller}: {name}", f"a tensor of {num_rows} numbers", x)
        if tuple(x.shape) != (num_rows,):
            raise LogitlessError(
                f"{caller}: {name} has shape {list(x.shape)} but there are {num_rows} rows. Pass the results of "
                f"these rows; results in the shape of a tensor of targets go with Rows.every(target), flattened."
            )


def check_per_row(term: str, inputs: Inputs, value: Any, what: str = "it returned") -> Tensor:
    """What a term made, if it is one number for each row."""
    if not isinstance(value, Tensor) or value.shape != inputs.logprob.shape:
        came = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise LogitlessError(f"Objective: {term} must return one value per row, [{len(inputs)}], but {what} {came}.")
    return value


def check_field(name: str, x: Any, num_rows: int, device: torch.device, caller: str = "Objective") -> Tensor:
    """A field, if it is ``[R]`` values without gradient where the rows are."""
    if name in RESERVED:
        raise LogitlessError(
            f"{caller}: terms read {name} of Inputs itself, so that a field of that name would not be seen. Give the "
            f"field another name."
        )
    if not isinstance(x, Tensor):
        way = ""
        if isinstance(x, list | tuple):
            nested = len(x) > 0 and isinstance(x[0], list | tuple | Tensor)
            way = f" Pass {f'rows.from_responses({name})' if nested else f'torch.tensor({name})'}."
        raise LogitlessError(f"{caller}: {name} must be a tensor of shape [{num_rows}] but is {type(x).__name__}.{way}")
    if x.layout != torch.strided or x.is_complex() or x.dtype == torch.bool:
        raise refused(f"{caller}: {name}", f"a tensor of {num_rows} numbers", x)
    if tuple(x.shape) != (num_rows,):
        raise LogitlessError(
            f"{caller}: {name} has shape {list(x.shape)} but there are {num_rows} rows. Give one value per row: a "
            f"value per sample is per_sample[rows.sample], values of whole responses are rows.from_responses(...)."
        )
    if x.device != device:
        raise LogitlessError(f"{caller}: {name} is on {x.device} but the rows are on {device}. Move it there.")
    if x.requires_grad:
        raise LogitlessError(f"{caller}: {name} requires grad, but no gradient flows to it. Pass {name}.detach().")
    return tracked_by_autograd(x) if x.is_inference() else x
