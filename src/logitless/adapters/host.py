"""How a host is described: its versions, its functions and their signatures, its options; and the report on it.

Host(versions=("0.16 - 0.19",), replacements=...)              a framework
Replacement(signature={"0.19": "(a, b=None)", "0.16 - 0.18": "(a)"}, make=...)      one of its functions
Installed, Replaced                                            what ``status`` tells
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from logitless.adapters.audit import AuditReport
from logitless.errors import LogitlessError, did_you_mean
from logitless.errors.arguments import check_flags, check_name, instance, refused
from logitless.spec import format_bytes

SAVED = Path(__file__).with_name("saved.json")


class Option(NamedTuple):
    """A keyword of ``install``: its default and one line of help.

    Values have the default's type, unless it is None; or they are among ``choices``, where there are only a few; or
    ``check`` raises for a bad one.
    """

    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    check: Callable[[Any], object] | None = None


def _check_texts(noun: str, *, optional: bool = False, **given: Any) -> None:
    for name, x in given.items():
        if not (isinstance(x, str) and x) and not (optional and x is None):
            raise refused(f"{noun}: {name}", "a text", x)


def _check_functions(noun: str, **given: Any) -> None:
    for name, x in given.items():
        if not callable(x):
            raise refused(f"{noun}: {name}", "a function", x)


def _check_list(argument: str, x: Any, kind: type, wanted: str) -> None:
    if not isinstance(x, tuple | list) or not all(isinstance(one, kind) for one in x):
        raise refused(argument, f"a list of {wanted}", x)


def _check_names(x: Any) -> None:
    if x is not None and not (isinstance(x, list | tuple) and x and all(isinstance(name, str) for name in x)):
        raise refused("only", 'a list of names of functions, such as ["selective_log_softmax"]', x)


COMMON = {
    "audit": Option(0, "rows of every call that are compared with float64; see status()"),
    "any_version": Option(False, "no warning where the version of the host was not tested"),
    "only": Option(None, "names of the functions to replace; the others stay the host's", check=_check_names),
}

LOGITS = ("deferred", "float32", "host")
LOGITS_HELP = "deferred: not computed, rounded as the head would; float32: not computed nor rounded; host: computed"


@dataclass(frozen=True)
class PassOn:
    """What our function returns, before it has done anything, for a call that is left to the host, and why."""

    why: str


@dataclass(frozen=True)
class Replacement:
    """One function of the host, and how to make the function that replaces it.

    Args:
        module: dotted name of the module that defines the function.
        name: attribute of the module, or ``"Class.method"``.
        signature: the function's signature, without annotations: ``"(logits, index)"``; or one for each range of
            versions, None for versions without the function. The signature of a method starts with self; that of a
            class method does not name the class.
        make: ``make(original, options)`` returns our function. ``options`` has every declared option, and
            ``options["audit"]`` is an :class:`~logitless.adapters.audit.Audit`. Our function may return a
            :class:`PassOn` for calls that the documented contract leaves to the host: the original is then called, and
            ``status`` counts the call as passed on.
        also_in: modules outside the host's package, or of the host, that import the function by name. Every imported
            module of the host's package that holds the function gets ours in any case, and later ones when they are
            imported; modules named here must hold it.
        optional: the host may lack this module; ``status`` then reports it.
        signature_of: attribute whose signature is checked instead, where the replaced function takes any arguments:
            ``"Function.forward"`` for ``"Function.apply"``.
        of: top-level package that the function comes from, where the host's module imports it from another.
        if_asked: of heads: left out unless ``install(host, logits=...)`` asks, since no run of that part of the host
            showed that none of its logits are computed.

    A parameter of the host's function that ours lacks, or that no known signature has, must have a default: a call that
    gives it another value is passed on, also where ours takes any argument.
    """

    module: str
    name: str
    signature: str | Mapping[str, str | None]
    make: Callable[[Callable[..., Any], Mapping[str, Any]], Callable[..., Any]]
    also_in: tuple[str, ...] = ()
    optional: bool = False
    signature_of: str | None = None
    of: str | None = None
    if_asked: bool = False

    def __post_init__(self) -> None:
        _check_texts("Replacement", module=self.module, name=self.name)
        _check_texts("Replacement", optional=True, signature_of=self.signature_of, of=self.of)
        forms = self.signature.items() if isinstance(self.signature, Mapping) else ((self.signature, self.signature),)
        if not all(isinstance(x, str) and (y is None or isinstance(y, str)) for x, y in forms):
            raise refused(
                "Replacement: signature", 'a text such as "(logits, index)", or one by version', self.signature
            )
        _check_functions("Replacement", make=self.make)
        _check_list("Replacement: also_in", self.also_in, str, "names of modules")
        check_flags("Replacement", optional=self.optional, if_asked=self.if_asked)

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    def is_named(self, name: str) -> bool:
        """Whether the name is the function's, with or without its class and module."""
        return f".{self.path}".endswith(f".{name}")

    @property
    def forms(self) -> Mapping[str, str | None]:
        """Signature for each range of versions; the range is empty where all versions have one signature."""
        return {"": self.signature} if isinstance(self.signature, str) else self.signature


@dataclass(frozen=True)
class Host:
    """A framework: its package, the tested versions, and the functions to replace.

    Args:
        name: the host's name in ``install``, ``uninstall`` and ``status``.
        package: name that the framework is imported by.
        versions: tested releases, by their leading parts: ``"1.16"`` covers 1.16 and 1.16.3, not 1.17, and
            ``"0.24 - 1.16"`` all releases between these two, with both.
        replacements: ``replacements(options)`` lists the replacements. May raise for options that do not go together.
        options: keywords of ``install`` for this host, beyond the common ones.
        distribution: name that the framework is installed by, where it differs from ``package``.
        heads: ``heads(options)`` lists functions of the host in which a model is at hand before its forward. Ours calls
            ``options["heads"].defer(model)`` and then the host's. A host whose functions differ installs without them,
            and ``status`` says so: its logits are then computed.
        logits: how logits are had unless ``install(host, logits=...)`` says: ``"deferred"`` only where a run of the
            host's own training step computed none.
        placed: whether heads are deferred that tensor parallelism has made DTensors: only where a run of the host's own
            training step with such a head computed no logits.
    """

    name: str
    package: str
    versions: tuple[str, ...]
    replacements: Callable[[Mapping[str, Any]], Sequence[Replacement]]
    options: Mapping[str, Option] = field(default_factory=dict)
    distribution: str | None = None
    heads: Callable[[Mapping[str, Any]], Sequence[Replacement]] | None = None
    logits: Literal["deferred", "host"] = "host"
    placed: bool = False

    def __post_init__(self) -> None:
        _check_texts("Host", name=self.name, package=self.package)
        _check_texts("Host", optional=True, distribution=self.distribution)
        _check_list("Host: versions", self.versions, str, 'releases such as "0.24 - 1.16"')
        _check_functions("Host", replacements=self.replacements)
        if self.heads is not None:
            _check_functions("Host", heads=self.heads)
        check_name(self.logits, ("deferred", "host"), "Host: logits")
        check_flags("Host", placed=self.placed)
        if not isinstance(self.options, Mapping) or not all(isinstance(name, str) for name in self.options):
            raise refused("Host: options", "Options by their names", self.options)
        for name, option in self.options.items():
            instance(option, Option, f"Host: options[{name!r}]")
            _check_texts(f"Option {name}", help=option.help)
            _check_list(f"Option {name}: choices", option.choices, object, "values")
            if option.check is not None:
                _check_functions(f"Option {name}", check=option.check)

    @property
    def known(self) -> Mapping[str, Option]:
        """Every option of this host."""
        of_heads = {} if self.heads is None else {"logits": Option(self.logits, LOGITS_HELP, LOGITS)}
        return {**COMMON, **of_heads, **self.options}


@dataclass(frozen=True)
class Replaced:
    """One replaced function: its name, its calls, how many of these calls were left to the host, and why.

    ``logits`` is the largest number of logits that a call with a graph got; 0 for functions that get none.
    """

    name: str
    calls: int
    passed_on: int = 0
    why: Mapping[str, int] = field(default_factory=dict)
    logits: int = 0

    def __str__(self) -> str:
        text = f"{self.name}: {self.calls} calls"
        if not self.passed_on:
            return text
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.why.items() if reason)
        return f"{text}, {self.passed_on} passed on" + (f" ({reasons})" if reasons else "")


@functools.cache
def _saved() -> Mapping[str, float]:
    """Bytes per logit by which each host's peak fell, from a file that ``benchmarks.bench.adapters --docs`` writes."""
    return json.loads(SAVED.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Installed:
    """An installed host.

    Attributes:
        host, version: the host's name, and the version found.
        replaced: every replaced function with its calls so far.
        missing: optional modules that this installation of the host lacks, as ``"module: why"``.
        options: options of the installation, defaults included.
        audit: the audit's report, or None without ``audit=``.
        notes: where this installation of the host differs from the tested ones.
        logits: whether the host's logits are computed, and by whom; empty for a host without heads.
        made: how often logits that were deferred were computed after all, by ``file:line``.
    """

    host: str
    version: str
    replaced: tuple[Replaced, ...]
    missing: tuple[str, ...]
    options: Mapping[str, Any]
    audit: AuditReport | None
    notes: tuple[str, ...] = ()
    logits: tuple[str, ...] = ()
    made: Mapping[str, int] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        """Calls of all replaced functions, those that were passed on included."""
        return sum(entry.calls for entry in self.replaced)

    @property
    def passed_on(self) -> int:
        return sum(entry.passed_on for entry in self.replaced)

    @property
    def peak_saved(self) -> int | None:
        """An estimate of the bytes by which the peak of a training step fell; None where nothing is known.

        By count: the largest logits of a training call so far, times the bytes per logit that the benchmark of hosts
        measured in a step of this host, with bfloat16 on a GPU. Of functions on logits alone.
        """
        per_logit, most = _saved().get(self.host), max((entry.logits for entry in self.replaced), default=0)
        return round(per_logit * most) if per_logit is not None and most else None

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        ours = self.calls - self.passed_on
        lines = [f"{self.host} {self.version} ({given}): {ours} of {self.calls} calls ours"]
        lines += [f"  {entry}" for entry in (*self.replaced, *self.logits)]
        if self.peak_saved is not None:
            most, per_logit = max(entry.logits for entry in self.replaced), _saved()[self.host]
            how = f"{per_logit:.1f} bytes, as measured on a GPU, for each of the {most:,} logits of the largest call"
            lines.append(f"  peak saved in training: about {format_bytes(self.peak_saved)}, an estimate: {how}")
        lines += [f"  not there: {text}" for text in self.missing]
        lines += [f"  note: {text}" for text in self.notes]
        lines += [] if self.audit is None else [f"  audit: {self.audit}"]
        return "\n".join(lines)


def resolve_options(host: Host, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of the host with its value; unknown names and wrong types are refused."""
    known = host.known
    for name, value in given.items():
        if name not in known:
            raise LogitlessError(f'install("{host.name}"): there is no option {name!r}.{suggestion(name, known)}')
        default, check = known[name].default, known[name].check
        if check is not None:
            try:
                check(value)
            except LogitlessError as error:
                raise LogitlessError(f'install("{host.name}"): {error} It means: {known[name].help}.') from None
            continue
        wanted = (int, float) if type(default) is float else type(default)
        if default is not None and (not isinstance(value, wanted) or isinstance(value, bool) != (wanted is bool)):
            raise LogitlessError(
                f'install("{host.name}"): {name} must be of type {type(default).__name__} but is {value!r}. '
                f"It means: {known[name].help}."
            )
        if known[name].choices and value not in known[name].choices:
            raise LogitlessError(
                f'install("{host.name}"): {name} must be one of {", ".join(map(str, known[name].choices))} but is '
                f"{value!r}. It means: {known[name].help}."
            )
    return {name: given.get(name, option.default) for name, option in known.items()}


def chosen(host: Host, options: Mapping[str, Any]) -> list[Replacement]:
    """The replacements that ``install(host, only=...)`` names, or all."""
    found = list(host.replacements(options))
    if options["only"] is None:
        return found
    for name in options["only"]:
        if not any(x.is_named(name) for x in found):
            names = [x.name for x in found]
            raise LogitlessError(f'install("{host.name}"): only: no function {name!r}.{suggestion(name, names)}')
    return [x for x in found if any(x.is_named(name) for name in options["only"])]


def suggestion(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'? Known: ...`` for a name that is not known."""
    return f"{did_you_mean(name, known)} Known: {', '.join(sorted(known))}."
