"""Functions and objects in words that are the same in every process, for ranks to compare: never an address.

    a function          its name, a sum over its code, its defaults, and what it closes over
    a bound method      the same, and what it reads of its object
    an object           its class, and what its ``__call__`` reads of it
    a tensor            its fingerprint

What a method reads are the attributes that its code names, and those that the methods it calls name: a trainer whose
method is a term has a rank and a device besides, which are its own business. Objects are followed a few levels deep.
"""

from __future__ import annotations

import functools
import inspect
import re
import zlib
from collections.abc import Iterator, Mapping, Set
from dataclasses import is_dataclass
from enum import Enum
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor, nn

from logitless.collectives import fingerprint
from logitless.errors.arguments import described

DEPTH = 6
"""Levels of objects within objects that are compared."""

ROOM = 400
"""Characters that a value takes at most."""

Names = frozenset[str] | None
"""Attributes that are read, by name; None for all of them."""


def name_of(term: Any) -> str:
    """A function by its name, also where it is inside of a ``functools.partial``."""
    if isinstance(term, functools.partial):
        return f"functools.partial({name_of(term.func)})"
    return getattr(term, "__qualname__", type(term).__qualname__)


def stated(x: Any, read: Names = None, above: tuple[Any, ...] = ()) -> str:
    """``x`` in words, of which all that no error has room for are a sum.

    Args:
        read: attributes of objects that are read, as far as that is known.
        above: the objects that this one is inside of.

    >>> stated({"b": (1, 2.0), "a": len})
    "{'a': len, 'b': (1, 2.0)}"
    """
    text = _in_words(x, read, above)
    return text if len(text) <= ROOM else f"{text[: ROOM // 2]} ... #{zlib.crc32(text.encode()):08x}"


def _in_words(x: Any, read: Names, above: tuple[Any, ...]) -> str:
    if len(above) > DEPTH or any(x is other for other in above):
        return type(x).__qualname__
    above = (*above, x)
    if isinstance(x, Tensor):
        return _tensor(x)
    if isinstance(x, torch.device):
        # Its number is the rank's own.
        return x.type
    if isinstance(x, Mapping):
        pairs = sorted((stated(key, read, above), stated(value, read, above)) for key, value in x.items())
        return f"{{{', '.join(f'{key}: {value}' for key, value in pairs)}}}"
    if isinstance(x, list | tuple):
        return f"({', '.join(stated(part, read, above) for part in x)})"
    if isinstance(x, Set):
        return f"{{{', '.join(sorted(stated(part, read, above) for part in x))}}}"
    if isinstance(x, type | ModuleType):
        return x.__name__
    if callable(x):
        return _callable(x, above)
    if _is_walked(x):
        read = None if read is None else read | _reads(x, read)
        return _with_parts(name_of(type(x)), _attributes(x, read), read, above)
    return _without_address(x)


def _is_walked(x: Any) -> bool:
    """Whether an object is told by its attributes: one of a class that is written in Python, and no constant."""
    if isinstance(x, Enum) or type(x).__module__.startswith("torch."):
        return False
    return bool(getattr(x, "__dict__", None)) or is_dataclass(x) or type(x).__repr__ is object.__repr__


def _without_address(x: Any) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(x))


def _tensor(x: Tensor) -> str:
    """By its numbers, where they are here: those of a DTensor are in parts, and those of Logits are not computed."""
    if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or x.is_meta:
        return described(x)
    return f"tensor({x.dtype} {fingerprint(torch.view_as_real(x) if x.is_complex() else x)})"


def _callable(x: Any, above: tuple[Any, ...]) -> str:
    """A function, a method or an object that can be called, with what it was made with."""
    # A compiled function is a wrapper with caches of its own.
    x = getattr(x, "__dict__", {}).get("_torchdynamo_orig_callable", x)
    if isinstance(x, functools.partial):
        parts = {"": x.func, **{str(i): y for i, y in enumerate(x.args)}, **x.keywords}
        return _with_parts("functools.partial", parts.items(), None, above)
    if isinstance(x, MethodType) and isinstance(x.__func__, FunctionType):
        names = _names(x.__func__.__code__)
        read = names | _reads(x.__self__, names)
        of = [("cls", x.__self__)] if isinstance(x.__self__, type) else _attributes(x.__self__, read)
        return _with_parts(_function_name(x.__func__), [*_made_with(x.__func__), *of], read, above)
    if isinstance(x, FunctionType):
        return _with_parts(_function_name(x), _made_with(x), _names(x.__code__), above)
    if isinstance(x, BuiltinFunctionType | MethodWrapperType | WrapperDescriptorType | MethodDescriptorType):
        bound = getattr(x, "__self__", None)
        parts = [] if bound is None or isinstance(bound, ModuleType) else [("", bound)]
        return _with_parts(name_of(x), parts, None, above)
    if type(x).__module__.startswith("torch.") and not isinstance(x, nn.Module):
        return _without_address(x)
    read = _reads(x, frozenset({"__call__", "forward"})) or None
    return _with_parts(name_of(type(x)), _attributes(x, read), read, above)


def _function_name(function: FunctionType) -> str:
    """Its name and a sum over its code: two functions of one place, such as lambdas, have one name."""
    return f"{function.__qualname__}#{_code_sum(function.__code__):08x}"


def _with_parts(name: str, parts: Any, read: Names, above: tuple[Any, ...]) -> str:
    told = ", ".join(
        f"{key}={stated(value, read, above)}" if key else stated(value, read, above) for key, value in parts
    )
    return f"{name}({told})" if told else name


def _made_with(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Defaults, values that it closes over, and attributes of its own that it reads, by name."""
    for name, parameter in inspect.signature(function, follow_wrapped=False).parameters.items():
        if parameter.default is not parameter.empty:
            yield name, parameter.default
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            # Nothing is assigned to it yet.
            yield name, None
    names = _names(function.__code__)
    yield from ((name, x) for name, x in vars(function).items() if name in names)


def _attributes(x: Any, read: Names) -> list[tuple[str, Any]]:
    """Attributes that an object holds, by name, and of those the ones that are read."""
    slots = [name for cls in type(x).__mro__ for name in vars(cls).get("__slots__", ())]
    held = {name: getattr(x, name) for name in slots if hasattr(x, name)} | getattr(x, "__dict__", {})
    for table in ("_parameters", "_buffers", "_modules") if isinstance(x, nn.Module) else ():
        held |= vars(x)[table]
    if read is None and isinstance(x, nn.Module):
        # The others are hooks and caches.
        read = frozenset(name for name in held if not name.startswith("_"))
    return sorted(((name, value) for name, value in held.items() if read is None or name in read), key=lambda x: x[0])


def _reads(x: Any, methods: frozenset[str]) -> frozenset[str]:
    """Names in the code of these methods of an object, and of those that they name in turn."""
    found, waiting = set(), set(methods)
    while waiting:
        name = waiting.pop()
        for cls in type(x).__mro__:
            member = vars(cls).get(name)
            # Of torch's own classes the names are those of hooks and caches.
            if cls.__module__.startswith("torch.") or member is None:
                continue
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(function, FunctionType):
                names = _names(function.__code__)
                waiting |= names - found - {name}
                found |= names
    return frozenset(found)


def _names(code: CodeType) -> frozenset[str]:
    """Names that code reads, also as a text for ``getattr``, and code within it."""
    texts = {x for x in code.co_consts if isinstance(x, str)}
    within = [_names(x) for x in code.co_consts if isinstance(x, CodeType)]
    return frozenset({*code.co_names, *texts}.union(*within))


def _code_sum(code: CodeType) -> int:
    """A sum over instructions and constants, and those of code within."""
    consts = [f"{_code_sum(x):08x}" if isinstance(x, CodeType) else stated(x) for x in code.co_consts]
    return zlib.crc32(repr((code.co_code, code.co_names, consts)).encode())
