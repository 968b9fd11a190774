"""Versions and signatures of a host: what is known, what can be served all the same, and what is refused.

    known     the signature of some version in the table                                served
    longer    a known one with further parameters, all with defaults                    served; calls that set one are
                                                                                        passed on
    other     a parameter gone, renamed, without a default, or with another default     refused, with the difference

Calls are bound by the host's signature and handed to our function by name, so one function of ours serves versions
whose parameters come in another order.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from logitless.adapters.host import Host, Replacement
from logitless.errors import LogitlessError

UNKNOWN = "unknown"


# Versions.


def is_there(package: str) -> bool:
    """Whether a package can be imported. Where its parent is missing, so is the package."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def covers(ranges: Iterable[str], version: str) -> bool:
    """Whether a version is one of the tested ones. A name of a branch covers no version.

    >>> covers(["1.16"], "1.16.3"), covers(["1.16"], "1.160"), covers(["0.24 - 1.16"], "1.9.0+cpu")
    (True, False, True)
    >>> covers(["0.8 - 0.9"], "0.10.0.dev0"), covers(["0.8 - 0.9"], "unknown"), covers(["main"], "0.3.0")
    (False, False, False)
    """
    found = numbers(version)
    for text in ranges:
        first, _, last = text.partition(" - ")
        low, high = numbers(first), numbers(last or first)
        if found and low and low <= found[: len(low)] and found[: len(high)] <= high:
            return True
    return False


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (1, 16, 3) of 1.16.3rc1."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def version_of(host: Host) -> str:
    """The version of the package that is imported, or ``"unknown"`` for a source tree that does not tell it.

    Metadata beside the package come first, then its ``__version__``, then metadata elsewhere: those of an editable
    installation, or of another copy of the package.
    """
    try:
        distribution = importlib.metadata.distribution(host.distribution or host.package)
    except importlib.metadata.PackageNotFoundError:
        distribution = None
    if distribution is not None and _beside(distribution, host.package):
        return distribution.version
    told = str(getattr(import_part(host, host.package), "__version__", None) or "")
    # Some packages tell "0.0.0+unknown" where they find no metadata.
    told = "" if UNKNOWN in told else told
    return told or (distribution.version if distribution else UNKNOWN)


def _beside(distribution: importlib.metadata.Distribution, package: str) -> bool:
    """Whether the metadata are of the copy that is imported: the folders of a namespace package hold several."""
    folder = Path(str(distribution.locate_file(""))).resolve()
    found = sys.modules.get(package) or (importlib.util.find_spec(package) if is_there(package) else None)
    paths = getattr(found, "__path__", None) or getattr(found, "submodule_search_locations", None) or ()
    return any(Path(path).resolve().parents[package.count(".")] == folder for path in paths)


def import_part(host: Host, module: str) -> Any:
    """Import a module of the host; an import that fails is an error that names the host."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise LogitlessError(
            f'install("{host.name}"): cannot import {module}: {error}. Nothing was replaced.'
        ) from error


# Signatures.


def plain_signature(function: Callable[..., Any]) -> str:
    """The text of a signature without annotations.

    >>> def f(logits: int, *, chunk: int = 128) -> None: ...
    >>> plain_signature(f)
    '(logits, *, chunk=128)'
    """
    return str(bare_signature(function))


def bare_signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature without annotations."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)


def new_parameters(function: Callable[..., Any], replacement: Replacement) -> tuple[str, ...] | None:
    """Parameters of the host's function beyond a known signature, all with defaults; None if it is another one."""
    found = bare_signature(function)
    known = [text for text in replacement.forms.values() if text is not None]
    if str(found) in known:
        return ()
    best: tuple[str, ...] | None = None
    for text in known:
        more = set(found.parameters) - set(_names(text))
        defaults = all(found.parameters[name].default is not inspect.Parameter.empty for name in more)
        rest = found.replace(parameters=[p for name, p in found.parameters.items() if name not in more])
        if defaults and str(rest) == text and (best is None or len(more) < len(best)):
            best = tuple(name for name in found.parameters if name in more)
    return best


def _names(text: str) -> list[str]:
    """Parameters of a written signature.

    >>> _names("(self, a, *, chunk=(1, 2), **more)")
    ['self', 'a', 'chunk', 'more']
    """
    code = eval(f"lambda {text[1:-1]}: None", {}).__code__
    return list(code.co_varnames)


def difference(host: Host, path: str, function: Callable[..., Any], replacement: Replacement, version: str) -> str:
    """The text of a refusal: known and found signature, what is gone and new, and what to do."""
    found = bare_signature(function).parameters
    lines, nearest = [f'install("{host.name}"): {path} has a signature that this adapter does not know.'], None
    for versions, text in replacement.forms.items():
        if text is None:
            continue
        lines.append(f"  known{f' ({versions})' if versions else ''}: {text}")
        names = _names(text)
        gone, new = [n for n in names if n not in found], [n for n in found if n not in names]
        if nearest is None or len(gone) + len(new) < len(nearest[0]) + len(nearest[1]):
            nearest = gone, new
    lines.append(f"  found ({version}): {plain_signature(function)}")
    gone, new = nearest or ([], [])
    changes = [f"{word} {', '.join(names)}" for word, names in (("gone:", gone), ("new:", new)) if names]
    lines.append(f"  {'; '.join(changes) or 'the order, a kind or a default changed'}")
    return "\n".join(lines) + (
        f"\nNothing was replaced. Use a tested version ({', '.join(host.versions) or 'none'}), or report these lines "
        f"as an issue of logitless, with the commit of {host.package}."
    )


# Calls.


class Binding(NamedTuple):
    """How a call of the host's function becomes a call of ours.

    Attributes:
        names: parameters of the host's function, in order; the first ``positional`` of them may come by position.
        unknown: parameters that our function lacks or no known signature has, with their defaults.
        direct: our function takes the call as it is.
        open_ended: the host's function takes any arguments.
    """

    names: tuple[str, ...]
    positional: int
    unknown: Mapping[str, Any]
    direct: bool
    open_ended: bool

    @staticmethod
    def between(host_function: Callable[..., Any], ours: Callable[..., Any], new: Iterable[str], path: str) -> Binding:
        """``new``: the parameters beyond a known signature. Where ours takes any argument, nothing else tells them."""
        theirs = dict(inspect.signature(host_function).parameters)
        theirs.pop("ctx", None)
        mine = inspect.signature(ours).parameters
        by_position = [p for p in theirs.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        open_ended, takes_any = _takes_any(theirs.values()), _takes_any((*mine.values(), *theirs.values()))
        unknown = {name: p.default for name, p in theirs.items() if name in new or (name not in mine and not takes_any)}
        without = [name for name, default in unknown.items() if default is inspect.Parameter.empty]
        assert not without, f"{path}: our function must take {', '.join(without)}, which the host's requires"
        direct = not unknown and (takes_any or list(theirs) == list(mine)[: len(theirs)])
        return Binding(tuple(theirs), len(by_position), unknown, direct, open_ended)

    def logits(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The argument of a call that is logits by its name; None for functions without one."""
        name = next((name for name in self.names if name.endswith("logits")), None)
        if name is None:
            return None
        at = self.names.index(name)
        return args[at] if at < len(args) else kwargs.get(name)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | str:
        """Arguments for our function, or why the call is passed on. A call that the host refuses stays as it is."""
        count = min(self.positional, len(args))
        placed = dict(zip(self.names[:count], args[:count], strict=True))
        given = placed | kwargs
        if not self.open_ended and (len(given) < len(args) + len(kwargs) or not given.keys() <= set(self.names)):
            return args, kwargs
        for name, default in self.unknown.items():
            value = given.pop(name, default)
            # Arguments without a name stay in their places, so none of those before them can be taken out.
            fixed = self.open_ended and name in placed
            if fixed or (value is not default and not (type(value) is type(default) and value == default)):
                return f"{name} is given"
        return ((), given) if not self.open_ended else (args, {n: x for n, x in kwargs.items() if n in given})


def _takes_any(parameters: Iterable[inspect.Parameter]) -> bool:
    return any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
