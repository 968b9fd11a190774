"""Kinds of arguments, each refused in one place and in the same words: the argument, what was wanted, what came.

``argument`` is the function and the parameter as errors name them: ``"Rows.at: index"``. What goes with what (sizes,
devices, options that exclude each other) is the business of whoever knows both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from logitless.errors import LogitlessError, adapted, did_you_mean

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of floats that are computed with."""

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""Dtypes of integers that are computed with."""

LARGEST = 2**62
"""The largest size or number that is worked with in 64 bits."""


def described(x: Any) -> str:
    """What an argument is, in a few words.

    >>> described(torch.zeros(2, 3)), described("x"), described([1, 2]), described(None)
    ('a tensor [2, 3] torch.float32', "'x'", 'a list', 'None')
    """
    if isinstance(x, Tensor):
        kind = "" if x.layout == torch.strided else f"{str(x.layout).removeprefix('torch.')} "
        return f"a {kind}tensor {list(x.shape)} {x.dtype}{' on meta' if x.is_meta else ''}"
    if x is None or isinstance(x, bool | int | float | str | bytes):
        return repr(x)
    return f"the type {x.__name__}" if isinstance(x, type) else f"a {type(x).__name__}"


def refused(argument: str, wanted: str, x: Any, instead: str = "") -> LogitlessError:
    """The error for an argument of another kind."""
    return LogitlessError(f"{argument} must be {wanted} but is {described(x)}.{instead}")


def refuse_transforms(caller: str) -> None:
    """Raise inside of ``torch.func``'s transforms, for which autograd Functions such as ours have no rules."""
    if torch._C._are_functorch_transforms_active():
        raise LogitlessError(
            f"{caller}: a transform of torch.func (grad, vmap, jvp, jacrev, ...) is under way, which is not supported. "
            f"Take gradients with backward() or torch.autograd.grad, and give rows of all samples in one call."
        )


def check_flags(caller: str, **given: Any) -> None:
    """Raise for an argument that is neither True nor False: a text such as "no" would be taken for True."""
    for name, x in given.items():
        if x is not True and x is not False:
            raise refused(f"{caller}: {name}", "True or False", x)


def is_number(x: Any) -> bool:
    """Whether it is a finite number that float64 holds, and no truth value."""
    # An integer may be too long for a float.
    whole = isinstance(x, int) and not isinstance(x, bool) and abs(x) <= LARGEST
    return whole or (isinstance(x, Real) and not isinstance(x, int) and abs(float(x)) <= LARGEST)


def check_name(x: Any, known: Iterable[str], argument: str) -> None:
    """Raise for what is none of the names that are known."""
    names = list(known)
    if not isinstance(x, str) or x not in names:
        hint = did_you_mean(x, names) if isinstance(x, str) else ""
        raise LogitlessError(f"{argument} must be one of {', '.join(names)} but is {described(x)}.{hint}")


def dense(x: Any, argument: str, wanted: str = "a tensor", *, numbers: bool = False) -> Tensor:
    """A tensor that lies in memory as tensors do, and not sparse.

    Args:
        numbers: whether its numbers are read here, so that none on the meta device will do.
    """
    # A compiler takes no question about the layout in a backward; it has none but dense tensors there.
    sparse = isinstance(x, Tensor) and not torch.compiler.is_compiling() and x.layout != torch.strided
    if not isinstance(x, Tensor) or sparse or (numbers and x.is_meta):
        way = f" Pass torch.tensor({argument.rpartition(' ')[2]})." if isinstance(x, list | tuple) else ""
        raise refused(argument, wanted, x, way)
    return x


def real_numbers(
    x: Any,
    argument: str,
    shape: tuple[int, ...] | None = None,
    each: str = "",
    device: torch.device | None = None,
    dtypes: tuple[torch.dtype, ...] = (*FLOATS, *INTEGERS),
) -> Tensor:
    """A tensor of real numbers, of exactly that shape and on that device where they are given.

    A column beside a vector would be broadcast to a matrix without a word.

    Args:
        each: what there is one number for, such as ``"row"``.
    """
    wanted = f"a tensor of {'floating-point ' * (dtypes == FLOATS)}numbers"
    wanted += "" if shape is None else f", one per {each}, {list(shape)},"
    dense(x, argument, wanted)
    if x.dtype not in dtypes:
        raise refused(argument, wanted, x)
    if shape is not None and tuple(x.shape) != shape:
        name = argument.rpartition(" ")[2]
        raise refused(argument, wanted, x, f" Pass {name}.squeeze(-1)." if tuple(x.shape) == (*shape, 1) else "")
    if device is not None and x.device != device:
        raise LogitlessError(f"{argument} is on {x.device} but the others are on {device}. Move it there.")
    return x


def sequence(x: Any, argument: str, wanted: str) -> Sequence[Any]:
    """A list, a tuple, a tensor of lines: something with a length and an order."""
    ordered = isinstance(x, Collection) and not isinstance(x, str | bytes | Mapping | set | frozenset)
    if isinstance(x, Tensor):
        ordered = x.dim() > 0 and x.layout == torch.strided
    if not (ordered and hasattr(x, "__getitem__")):
        raise refused(argument, wanted, x)
    return x  # pyright: ignore[reportReturnType]


def instance(x: Any, kind: type, argument: str, instead: str = "") -> Any:
    """One of our own nouns."""
    if not isinstance(x, kind):
        raise refused(argument, f"a {kind.__name__}", x, instead)
    return x


def device_named(x: Any, argument: str) -> torch.device:
    """A device, or its name."""
    try:
        if isinstance(x, torch.device | str) or (type(x) is int and x >= 0):
            return torch.device(x)
    except (RuntimeError, ValueError):
        pass
    raise refused(argument, 'a device such as "cpu" or "cuda:0"', x)


def instead_of_tensor(x: Any, what: str) -> str:
    """`` What to do`` where something other than a tensor came for the argument ``what``, or nothing."""
    if isinstance(x, list | tuple):
        whole = "torch.stack" if x and isinstance(x[0], Tensor) else "torch.tensor"
        return f" Pass {whole}({what})."
    if hasattr(x, "base_layer"):
        return f" {adapted(type(x).__name__)}"
    if what == "weight" and isinstance(getattr(x, "weight", None), Tensor):
        return " Pass the layer's weight and bias: layer.weight, bias=layer.bias. Under DDP or FSDP use a PolicyHead."
    if isinstance(getattr(x, "last_hidden_state", None), Tensor):
        return " Pass its last_hidden_state."
    return " Pass its logits." if isinstance(getattr(x, "logits", None), Tensor) else ""
