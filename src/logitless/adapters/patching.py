"""How functions of a host are replaced by ours, and put back.

    resolve: import the host, check its version, find each function, check its signature        (nothing is changed)
    place:   replace the functions under one lock, all or none
    restore: put them back under the same lock, if none was replaced again by other code

A host's file describes the host with ``Host`` and ``Replacement``; the mechanics are all here. Our function counts its
calls, and puts the name of the host's function before the text of a ``LogitlessError``.

Imports happen outside the lock: a thread with the lock never waits for another thread's import.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch

from logitless.adapters.audit import Audit, AuditReport
from logitless.errors import LogitlessError, did_you_mean


class Option(NamedTuple):
    """A keyword of ``install``: its default and one line of help. Values have the default's type, unless it is None."""

    default: Any
    help: str


COMMON = {
    "audit": Option(0, "rows of every call that are compared with float64; see status()"),
    "any_version": Option(False, "install into a version of the host that was not tested"),
}


@dataclass(frozen=True)
class Replacement:
    """One function of the host, and how to make the function that replaces it.

    Args:
        module: dotted name of the module that defines the function.
        name: attribute of the module, or ``"Class.method"``.
        signature: the function's signature, without annotations: ``"(logits, index)"``. The signature of a method
            starts with self; that of a class method does not name the class.
        make: ``make(original, options)`` returns our function. ``options`` has every declared option, and
            ``options["audit"]`` is an :class:`~logitless.adapters.audit.Audit`. Our function may return NotImplemented,
            before it has done anything, for calls that the documented contract leaves to the host: the original is
            then called, and ``status`` counts the call as passed on.
        also_in: modules that import the function by name. Modules that are already imported get our function now, the
            others when they are imported; ``uninstall`` puts the original back in both.
        optional: the host may lack this module; ``status`` then reports it.
        signature_of: attribute whose signature is checked instead, where the replaced function takes any arguments:
            ``"Function.forward"`` for ``"Function.apply"``.
    """

    module: str
    name: str
    signature: str
    make: Callable[[Callable[..., Any], Mapping[str, Any]], Callable[..., Any]]
    also_in: tuple[str, ...] = ()
    optional: bool = False
    signature_of: str | None = None

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Host:
    """A framework: its package, the tested versions, and the functions to replace.

    Args:
        name: the host's name in ``install``, ``uninstall`` and ``status``.
        package: name that the framework is imported by.
        versions: tested releases, as leading parts: ``"1.16"`` covers 1.16 and 1.16.3, not 1.17.
        replacements: ``replacements(options)`` lists the replacements. May raise for options that do not go together.
        options: keywords of ``install`` for this host, beyond the common ones.
        distribution: name that the framework is installed by, where it differs from ``package``.
    """

    name: str
    package: str
    versions: tuple[str, ...]
    replacements: Callable[[Mapping[str, Any]], Sequence[Replacement]]
    options: Mapping[str, Option] = field(default_factory=dict)
    distribution: str | None = None


@dataclass(frozen=True)
class Replaced:
    """One replaced function: its name, its calls, and how many of these calls were left to the host."""

    name: str
    calls: int
    passed_on: int = 0

    def __str__(self) -> str:
        return f"{self.name}: {self.calls} calls" + (f", {self.passed_on} passed on" if self.passed_on else "")


@dataclass(frozen=True)
class Installed:
    """An installed host.

    Attributes:
        host, version: the host's name, and the version found.
        replaced: every replaced function with its calls so far.
        missing: optional modules that this installation of the host lacks, as ``"module: why"``.
        options: options of the installation, defaults included.
        audit: the audit's report, or None without ``audit=``.
    """

    host: str
    version: str
    replaced: tuple[Replaced, ...]
    missing: tuple[str, ...]
    options: Mapping[str, Any]
    audit: AuditReport | None

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        lines = [f"{self.host} {self.version} ({given})"]
        lines += [f"  {entry}" for entry in self.replaced]
        lines += [f"  not there: {text}" for text in self.missing]
        lines += [] if self.audit is None else [f"  audit: {self.audit}"]
        return "\n".join(lines)


class Counter:
    """Calls of one replacement, counted from any thread."""

    def __init__(self) -> None:
        self._lock, self.calls, self.passed_on = threading.Lock(), 0, 0

    # A compiled caller breaks its graph here: traced, the count would be frozen at its first value.
    @torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
    def add(self, calls: int = 0, passed_on: int = 0) -> None:
        with self._lock:
            self.calls += calls
            self.passed_on += passed_on


@dataclass(frozen=True, eq=False)
class _Site:
    """One attribute of a module or class, with its value before and our value."""

    owner: Any
    attribute: str
    path: str
    before: Any
    inherited: bool
    ours: Any

    def stored(self) -> Any:
        """The attribute's value now, as the owner itself stores it: a staticmethod stays one."""
        return vars(self.owner).get(self.attribute)

    def place(self) -> None:
        setattr(self.owner, self.attribute, self.ours)

    def restore(self) -> None:
        if self.inherited:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self.before)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A replacement whose host function was found and checked."""

    replacement: Replacement
    site: _Site
    counter: Counter


@dataclass(frozen=True, eq=False)
class _Installation:
    host: Host
    version: str
    options: Mapping[str, Any]
    prepared: tuple[_Prepared, ...]
    missing: tuple[str, ...]
    audit: Audit


_lock = threading.RLock()
_installations: dict[str, _Installation] = {}


def install_host(host: Host, given: Mapping[str, Any]) -> Installed:
    """Make all replacements of the host, or raise and make none."""
    options = resolve_options(host, given)
    with _lock:
        if host.name in _installations:
            return _same_again(_installations[host.name], host, options)
    version = _check_version(host, options["any_version"])
    audit = Audit(options["audit"])
    prepared, missing = _prepare(host, MappingProxyType({**options, "audit": audit}))
    with _lock:
        if host.name in _installations:
            return _same_again(_installations[host.name], host, options)
        installation = _Installation(host, version, options, tuple(prepared), tuple(missing), audit)
        _place(host, [*(entry.site for entry in prepared), *_by_value(host, prepared)])
        _installations[host.name] = installation
        return _report(installation)


def uninstall_host(name: str) -> None:
    """Undo all replacements of the host; raise and undo none if other code replaced our functions since."""
    with _lock:
        installation = _installations.get(name)
        if installation is None:
            there = ", ".join(sorted(_installations)) or "nothing"
            raise LogitlessError(f'uninstall("{name}"): it is not installed. Installed: {there}.')
        for entry in installation.prepared:
            found = entry.site.stored()
            if found is not entry.site.ours:
                raise LogitlessError(
                    f'uninstall("{name}"): {entry.site.path} is no longer ours: it was replaced by {_describe(found)}. '
                    f"Undo that replacement first; nothing was put back."
                )
        # Names imported by value first: they are found by comparison with the defining module's attribute.
        for site in _by_value(installation.host, installation.prepared, ours=True):
            site.restore()
        for entry in reversed(installation.prepared):
            entry.site.restore()
        del _installations[name]


def installed() -> tuple[Installed, ...]:
    """The installed hosts, sorted by name."""
    with _lock:
        return tuple(_report(_installations[name]) for name in sorted(_installations))


def resolve_options(host: Host, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of the host with its value; unknown names and wrong types are refused."""
    known = {**COMMON, **host.options}
    for name, value in given.items():
        if name not in known:
            raise LogitlessError(f'install("{host.name}"): there is no option {name!r}.{suggestion(name, known)}')
        default = known[name].default
        wanted = (int, float) if type(default) is float else type(default)
        if default is not None and (not isinstance(value, wanted) or isinstance(value, bool) != (wanted is bool)):
            raise LogitlessError(
                f'install("{host.name}"): {name} must be of type {type(default).__name__} but is {value!r}. '
                f"It means: {known[name].help}."
            )
    return {name: given.get(name, option.default) for name, option in known.items()}


def suggestion(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'? Known: ...`` for a name that is not known."""
    return f"{did_you_mean(name, known)} Known: {', '.join(sorted(known))}."


def _same_again(installation: _Installation, host: Host, options: Mapping[str, Any]) -> Installed:
    name, there = host.name, installation.host
    if dict(installation.options) != dict(options):
        changed = [
            f"{key}={installation.options[key]!r} (now {value!r})"
            for key, value in options.items()
            if installation.options[key] != value
        ]
        raise LogitlessError(
            f'install("{name}"): it is already installed with other options: {", ".join(changed)}. '
            f'Call uninstall("{name}") first.'
        )
    if host is not there and list(host.replacements(options)) != list(there.replacements(options)):
        raise LogitlessError(
            f'install("{name}"): another host of that name is installed, with other replacements. '
            f'Call uninstall("{name}") first.'
        )
    return _report(installation)


def _report(installation: _Installation) -> Installed:
    return Installed(
        host=installation.host.name,
        version=installation.version,
        replaced=tuple(
            Replaced(entry.replacement.path, entry.counter.calls, entry.counter.passed_on)
            for entry in installation.prepared
        ),
        missing=installation.missing,
        options=MappingProxyType(dict(installation.options)),
        audit=installation.audit.report() if installation.audit else None,
    )


# Versions and signatures.


def is_there(package: str) -> bool:
    """Whether a package can be imported. Where its parent is missing, so is the package."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _check_version(host: Host, any_version: bool) -> str:
    if host.package not in sys.modules and not is_there(host.package):
        name = host.distribution or host.package
        raise LogitlessError(f'install("{host.name}"): the package {name} is not installed in this environment.')
    found = _version(host)
    if any_version or any(_covers(release, found) for release in host.versions):
        return found
    raise LogitlessError(
        f'install("{host.name}"): found version {found} of {host.distribution or host.package}, tested are '
        f"{', '.join(host.versions)}. Signatures are checked in any case: pass any_version=True to go on with this one."
    )


def _version(host: Host) -> str:
    """The version in the package's metadata; ``__version__`` for a source tree without metadata."""
    try:
        return importlib.metadata.version(host.distribution or host.package)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(importlib.import_module(host.package), "__version__", "unknown"))


def _covers(release: str, found: str) -> bool:
    """
    >>> _covers("1.16", "1.16.3"), _covers("1.16", "1.160")
    (True, False)
    """
    return found == release or found.startswith((f"{release}.", f"{release}+"))


def plain_signature(function: Callable[..., Any]) -> str:
    """The signature without annotations.

    >>> def f(logits: int, *, chunk: int = 128) -> None: ...
    >>> plain_signature(f)
    '(logits, *, chunk=128)'
    """
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _prepare(host: Host, options: Mapping[str, Any]) -> tuple[list[_Prepared], list[str]]:
    """All replacements, resolved and checked, and the missing optional modules. Imports the host, changes nothing."""
    prepared, missing = [], []
    for replacement in host.replacements(options):
        try:
            module = importlib.import_module(replacement.module)
        except ModuleNotFoundError as error:
            if not replacement.optional:
                raise LogitlessError(
                    f'install("{host.name}"): cannot import {replacement.module}: {error}. Nothing was replaced.'
                ) from error
            missing.append(f"{replacement.module}: {error}")
            continue
        prepared.append(_resolve(host, module, replacement, options))
    if not prepared:
        raise LogitlessError(f'install("{host.name}"): none of its parts can be imported: {"; ".join(missing)}.')
    return prepared, missing


def _resolve(host: Host, module: ModuleType, replacement: Replacement, options: Mapping[str, Any]) -> _Prepared:
    owner, attribute, stored = _look_up(host, module, replacement.name)
    inherited = attribute not in vars(owner)
    bound = isinstance(stored, classmethod | staticmethod)
    original = getattr(owner, attribute) if bound else stored
    _check_owner(host, replacement, original, inherited)
    _check_signature(host, module, replacement)
    counter = Counter()
    ours: Any = _counted(replacement.make(original, options), original, replacement.path, counter)
    ours = staticmethod(ours) if bound else ours
    return _Prepared(replacement, _Site(owner, attribute, replacement.path, stored, inherited, ours), counter)


def _look_up(host: Host, module: ModuleType, name: str) -> tuple[Any, str, Any]:
    """Owner, attribute name and stored value; a descriptor is not resolved."""
    *holders, attribute = name.split(".")
    owner: Any = module
    for holder in holders:
        owner = getattr(owner, holder, None)
    stored = inspect.getattr_static(owner, attribute, None) if owner is not None else None
    if stored is None:
        raise LogitlessError(
            f'install("{host.name}"): {module.__name__} has no {name}, so this is not the {host.package} we know. '
            f"Nothing was replaced."
        )
    return owner, attribute, stored


def _check_owner(host: Host, replacement: Replacement, original: Any, inherited: bool) -> None:
    # A bound method, like a Function's apply, belongs to the host if its class does.
    holder = getattr(original, "__self__", None)
    comes_from = getattr(holder if isinstance(holder, type) else original, "__module__", None)
    if comes_from is not None and not inherited and comes_from.split(".")[0] != host.package.split(".")[0]:
        raise LogitlessError(
            f'install("{host.name}"): {replacement.path} is not {host.package}\'s own but {_describe(original)}. '
            f"Undo that replacement first. Nothing was replaced."
        )


def _check_signature(host: Host, module: ModuleType, replacement: Replacement) -> None:
    name = replacement.signature_of or replacement.name
    owner, attribute, stored = _look_up(host, module, name)
    bound = isinstance(stored, classmethod | staticmethod)
    found = plain_signature(getattr(owner, attribute) if bound else stored)
    if found != replacement.signature:
        raise LogitlessError(
            f'install("{host.name}"): {module.__name__}.{name} has the signature {found}, but this adapter stands in '
            f"for {replacement.signature}. Nothing was replaced. Use a tested version: {', '.join(host.versions)}."
        )


def _counted(function: Callable[..., Any], original: Any, path: str, counter: Counter) -> Callable[..., Any]:
    assert inspect.isroutine(function), f"{path}: make must return a function but returned {function!r}"

    @functools.wraps(original)
    def logitless_replacement(*args: Any, **kwargs: Any) -> Any:
        counter.add(calls=1)
        try:
            answer = function(*args, **kwargs)
        except LogitlessError as error:
            if str(error).startswith(path):
                raise
            raise LogitlessError(f"{path}: {error}") from error
        if answer is not NotImplemented:
            return answer
        counter.add(passed_on=1)
        return original(*args, **kwargs)

    return logitless_replacement


# Placing and restoring.


def _by_value(host: Host, prepared: Sequence[_Prepared], ours: bool = False) -> list[_Site]:
    """Attributes of imported modules that are the same function: the host's, or ours."""
    sites = []
    for entry in prepared:
        wanted = entry.site.ours if ours else entry.site.before
        for name in entry.replacement.also_in:
            module = sys.modules.get(name)
            if module is None:
                continue
            found = vars(module).get(entry.site.attribute)
            if found is not wanted and not ours:
                raise LogitlessError(
                    f'install("{host.name}"): {name}.{entry.site.attribute} is not {entry.replacement.path} but '
                    f"{_describe(found)}, so part of the host would not use our function. Nothing was replaced."
                )
            if found is wanted:
                path = f"{name}.{entry.site.attribute}"
                sites.append(_Site(module, entry.site.attribute, path, entry.site.before, False, entry.site.ours))
    return sites


def _place(host: Host, sites: Sequence[_Site]) -> None:
    for site in sites:
        found = site.stored()
        if found is not (None if site.inherited else site.before):
            raise LogitlessError(
                f'install("{host.name}"): {site.path} was replaced by {_describe(found)} while installing. '
                f"Nothing was replaced."
            )
    placed: list[_Site] = []
    try:
        for site in sites:
            site.place()
            placed.append(site)
    except BaseException:
        for site in reversed(placed):
            site.restore()
        raise


def _describe(thing: Any) -> str:
    """``name from file`` of an unexpected value, for error texts."""
    function = getattr(thing, "__func__", thing)
    name = getattr(function, "__qualname__", None) or repr(function)
    code = getattr(function, "__code__", None)
    # functools.wraps copies the host function's name and module; the code object still names the file.
    place = code.co_filename if code is not None else getattr(function, "__module__", None)
    return f"{name} from {place}"
