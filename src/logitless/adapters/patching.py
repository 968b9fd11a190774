"""How functions of a host are replaced by ours, and put back.

    resolve: import the host, check its version, find each function, check its signature        (nothing is changed)
    place:   replace the functions under one lock, all or none
    restore: put them back under the same lock, if none was replaced again by other code

A host's file describes the host with ``Host`` and ``Replacement`` (host.py); which versions and signatures will do is
said in signatures.py. Our function counts its calls, and puts the name of the host's function before the text of a
``LogitlessError``.

Imports happen outside the lock: a thread with the lock never waits for another thread's import.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections import Counter as Tally
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from logitless.adapters.audit import Audit
from logitless.adapters.expected import Expectations
from logitless.adapters.heads import Heads
from logitless.adapters.host import Host, Installed, PassOn, Replaced, Replacement, chosen, resolve_options
from logitless.adapters.signatures import (
    UNKNOWN,
    Binding,
    covers,
    difference,
    import_part,
    is_there,
    new_parameters,
    version_of,
)
from logitless.errors import LogitlessError
from logitless.notes import log_once
from logitless.spec import untraced


class Counter:
    """Calls of one replacement, counted from any thread."""

    def __init__(self) -> None:
        self._lock, self.calls, self._why, self._logits = threading.Lock(), 0, Tally[str](), 0

    # A compiled caller breaks its graph here: traced, the count would be frozen at its first value.
    @untraced
    def called(self) -> None:
        with self._lock:
            self.calls += 1

    @untraced
    def passed_on(self, why: str) -> None:
        with self._lock:
            self._why[why] += 1

    @untraced
    def answered(self, logits: Any) -> None:
        """Remember the largest logits of a call with a graph."""
        if isinstance(logits, torch.Tensor) and torch.is_grad_enabled() and logits.requires_grad:
            with self._lock:
                self._logits = max(self._logits, logits.numel())

    def report(self, name: str) -> Replaced:
        with self._lock:
            return Replaced(name, self.calls, self._why.total(), dict(self._why), self._logits)


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
    new: tuple[str, ...]
    of_head: bool = False


@dataclass(frozen=True, eq=False)
class _Installation:
    host: Host
    version: str
    options: Mapping[str, Any]
    prepared: tuple[_Prepared, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...]
    audit: Audit
    heads: Heads
    expectations: Expectations


_lock = threading.RLock()
_installations: dict[str, _Installation] = {}


def install_host(host: Host, given: Mapping[str, Any]) -> Installed:
    """Make all replacements of the host, or raise and make none."""
    options = resolve_options(host, given)
    with _lock:
        if host.name in _installations:
            return _same_again(_installations[host.name], host, options)
    installation = _resolve_all(host, options, "logits" in given)
    prepared, version = installation.prepared, installation.version
    if version != UNKNOWN and not (options["any_version"] or covers(host.versions, version)):
        warnings.warn(f'install("{host.name}"): {installation.notes[0]}', UserWarning, stacklevel=3)
    with _lock:
        if host.name in _installations:
            return _same_again(_installations[host.name], host, options)
        _place(host, [*(entry.site for entry in prepared), *_by_value(host, prepared)])
        _installations[host.name] = installation
    log_once(_line(installation))
    return _report(installation)


def _line(installation: _Installation) -> str:
    """What an operator wants to find in the log of every worker."""
    host, heads = installation.host, installation.heads
    functions = sum(not entry.of_head for entry in installation.prepared)
    logits = "not computed" if host.heads is not None and heads.wanted else "computed by the host's own head"
    return f"installed {host.name} {installation.version}, {functions} functions replaced, logits are {logits}"


def try_host(host: Host, given: Mapping[str, Any] = MappingProxyType({})) -> Installed:
    """What :func:`install_host` would report, with nothing replaced; raises where it would raise."""
    with _lock:
        if host.name in _installations:
            return _report(_installations[host.name])
    installation = _resolve_all(host, resolve_options(host, given))
    _by_value(host, installation.prepared)
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
        installation.heads.undo()
        del _installations[name]


def installed() -> tuple[Installed, ...]:
    """The installed hosts, sorted by name."""
    with _lock:
        return tuple(_report(_installations[name]) for name in sorted(_installations))


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
        replaced=tuple(x.counter.report(x.replacement.path) for x in installation.prepared if not x.of_head),
        missing=installation.missing,
        options=MappingProxyType(dict(installation.options)),
        audit=installation.audit.report() if installation.audit else None,
        notes=installation.notes,
        logits=(
            *(installation.heads.lines() if installation.host.heads is not None else ()),
            *installation.expectations.lines(),
        ),
        made=installation.heads.made(),
    )


# Resolving.


def _resolve_all(host: Host, options: Mapping[str, Any], asked: bool = False) -> _Installation:
    """The whole installation, checked. Imports the host, changes nothing."""
    if host.package not in sys.modules and not is_there(host.package):
        name = host.distribution or host.package
        raise LogitlessError(f'install("{host.name}"): the package {name} is not installed in this environment.')
    version, audit = version_of(host), Audit(options["audit"])
    heads = Heads(options.get("logits", "host"), host.placed)
    expectations = Expectations()
    known = MappingProxyType({**options, "audit": audit, "heads": heads, "expectations": expectations})
    prepared, missing = _prepare(host, version, known)
    of_heads, why = _prepare_heads(host, version, known, asked)
    prepared += of_heads
    notes = _notes(host, version, prepared)
    if why is not None:
        heads.logits = "host"
        notes.append(f"logits are computed as before: {why}")
    return _Installation(
        host=host,
        version=version,
        options=options,
        prepared=tuple(prepared),
        missing=tuple(missing),
        notes=tuple(notes),
        audit=audit,
        heads=heads,
        expectations=expectations,
    )


def _notes(host: Host, version: str, prepared: Sequence[_Prepared]) -> list[str]:
    notes = []
    if not covers(host.versions, version):
        tested = ", ".join(host.versions) or "none"
        found = "the version is unknown" if version == UNKNOWN else f"version {version} was not tested"
        notes.append(f"{found} (tested: {tested}). All signatures fit; audit=16 compares the numbers with float64.")
    for entry in prepared:
        if entry.new:
            names = ", ".join(entry.new)
            notes.append(f"{entry.replacement.path} has new parameters: {names}. Calls that set one are passed on.")
    return notes


def _prepare(host: Host, version: str, options: Mapping[str, Any]) -> tuple[list[_Prepared], list[str]]:
    """All replacements, resolved and checked, and the missing optional modules. Imports the host, changes nothing."""
    found = [_resolve(host, version, replacement, options) for replacement in chosen(host, options)]
    prepared, missing = [x for x in found if isinstance(x, _Prepared)], [x for x in found if isinstance(x, str)]
    if not prepared:
        raise LogitlessError(f'install("{host.name}"): none of its parts can be imported: {"; ".join(missing)}.')
    return prepared, missing


def _prepare_heads(
    host: Host, version: str, options: Mapping[str, Any], asked: bool
) -> tuple[list[_Prepared], str | None]:
    """The functions in which models are deferred; none, and why, where one of them is not as we know it."""
    if host.heads is None or not options["heads"].wanted:
        return [], None
    if options["only"] is not None and not asked:
        return [], "only= leaves heads alone, unless logits= asks for them"
    prepared = []
    for replacement in host.heads(options):
        if replacement.if_asked and not asked:
            continue
        try:
            found = _resolve(host, version, replacement, options)
        except LogitlessError as error:
            return [], str(error)
        if isinstance(found, _Prepared):
            prepared.append(replace(found, of_head=True))
        elif not replacement.optional:
            return [], found
    return (prepared, None) if prepared else ([], "none of the host's models can be found")


def _resolve(host: Host, version: str, replacement: Replacement, options: Mapping[str, Any]) -> _Prepared | str:
    """A replacement, checked; or why this host lacks the function, if it may. Imports its module."""
    absent = [ranges for ranges, signature in replacement.forms.items() if signature is None]
    may_lack = bool(absent) and (not covers(host.versions, version) or covers(absent, version))
    try:
        module = import_part(host, replacement.module)
    except LogitlessError as error:
        if not replacement.optional and not (may_lack and isinstance(error.__cause__, ModuleNotFoundError)):
            raise
        return f"{replacement.module}: {error.__cause__}"
    if may_lack and _find(module, replacement.name)[2] is None:
        return f"{replacement.path}: not in {', '.join(absent)}"
    owner, attribute, stored = _look_up(host, module, replacement.name)
    inherited = attribute not in vars(owner)
    bound = isinstance(stored, classmethod | staticmethod)
    original = getattr(owner, attribute) if bound else stored
    _check_owner(host, replacement, original, inherited)
    checked, new = _check_signature(host, version, module, replacement)
    function = replacement.make(original, options)
    assert inspect.isroutine(function), f"{replacement.path}: make must return a function but returned {function!r}"
    counter, binding = Counter(), Binding.between(checked, function, new, replacement.path)
    ours: Any = _counted(function, original, binding, replacement.path, counter)
    ours = staticmethod(ours) if bound else ours
    return _Prepared(replacement, _Site(owner, attribute, replacement.path, stored, inherited, ours), counter, new)


def _look_up(host: Host, module: ModuleType, name: str) -> tuple[Any, str, Any]:
    """Owner, attribute name and stored value; a descriptor is not resolved."""
    owner, attribute, stored = _find(module, name)
    if stored is None:
        raise LogitlessError(
            f'install("{host.name}"): {module.__name__} has no {name}, so this is not the {host.package} we know. '
            f"Nothing was replaced."
        )
    return owner, attribute, stored


def _find(module: ModuleType, name: str) -> tuple[Any, str, Any]:
    *holders, attribute = name.split(".")
    owner: Any = module
    for holder in holders:
        owner = getattr(owner, holder, None)
    return owner, attribute, inspect.getattr_static(owner, attribute, None) if owner is not None else None


def _check_owner(host: Host, replacement: Replacement, original: Any, inherited: bool) -> None:
    # A bound method, like a Function's apply, belongs to the host if its class does.
    holder = getattr(original, "__self__", None)
    comes_from = getattr(holder if isinstance(holder, type) else original, "__module__", None)
    package = replacement.of or host.package
    if comes_from is not None and not inherited and comes_from.split(".")[0] != package.split(".")[0]:
        raise LogitlessError(
            f'install("{host.name}"): {replacement.path} is not {package}\'s own but {_describe(original)}. '
            f"Undo that replacement first. Nothing was replaced."
        )


def _check_signature(
    host: Host, version: str, module: ModuleType, replacement: Replacement
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """The function whose signature counts, and its new parameters."""
    name = replacement.signature_of or replacement.name
    owner, attribute, stored = _look_up(host, module, name)
    function = getattr(owner, attribute) if isinstance(stored, classmethod | staticmethod) else stored
    new = new_parameters(function, replacement)
    if new is None:
        raise LogitlessError(difference(host, f"{module.__name__}.{name}", function, replacement, version))
    return function, new


def _counted(
    function: Callable[..., Any], original: Any, binding: Binding, path: str, counter: Counter
) -> Callable[..., Any]:
    @functools.wraps(original)
    def logitless_replacement(*args: Any, **kwargs: Any) -> Any:
        counter.called()
        bound = (args, kwargs) if binding.direct else binding.bind(args, kwargs)
        if isinstance(bound, str):
            counter.passed_on(bound)
            return original(*args, **kwargs)
        try:
            answer = function(*bound[0], **bound[1])
        except LogitlessError as error:
            if str(error).startswith(path):
                raise
            raise LogitlessError(f"{path}: {error}") from error
        if answer is not NotImplemented and not isinstance(answer, PassOn):
            counter.answered(binding.logits(args, kwargs))
            return answer
        counter.passed_on(answer.why if isinstance(answer, PassOn) else "")
        return original(*args, **kwargs)

    return logitless_replacement


# Placing and restoring.


def _by_value(host: Host, prepared: Sequence[_Prepared], ours: bool = False) -> list[_Site]:
    """Attributes of imported modules that are the same function: the host's, or ours."""
    sites = []
    top = host.package.split(".")[0]
    inside = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == top and module is not None]
    for entry in prepared:
        wanted, own = entry.site.ours if ours else entry.site.before, entry.site.attribute
        # None marks a module whose import is blocked.
        named = [x for x in (sys.modules.get(name) for name in entry.replacement.also_in) if x is not None]
        for module in named if not ours else ():
            found = vars(module).get(own)
            if found is not wanted and found is not None:
                raise LogitlessError(
                    f'install("{host.name}"): {module.__name__}.{own} is not {entry.replacement.path} but '
                    f"{_describe(found)}, so part of the host would not use our function. Nothing was replaced."
                )
        for module in {id(module): module for module in (*inside, *named)}.values():
            if module is entry.site.owner:
                continue
            for attribute in [name for name, value in list(vars(module).items()) if value is wanted]:
                path = f"{module.__name__}.{attribute}"
                sites.append(_Site(module, attribute, path, entry.site.before, False, entry.site.ours))
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
