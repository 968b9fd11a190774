"""Drop-in adapters: ``install("host")`` makes a framework you already run use this library.

A host is a framework that an adapter plugs into. Each has one file, imported on install; no code outside this folder
knows a host. Users describe further frameworks with a ``Host``.

    install("trl")       check the signatures of the functions, then replace them: all or none
    status()             the replaced functions, how often each was called, and which calls were left to the host
    uninstall("trl")     put the host's functions back

Installing is per process: in a framework with workers, call it in each worker.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from logitless.adapters.host import Host, Installed, Option, PassOn, Replacement, suggestion
from logitless.adapters.patching import install_host, installed, uninstall_host
from logitless.errors import LogitlessError
from logitless.errors.arguments import refused

__all__ = ["HOSTS", "Host", "Installed", "Option", "PassOn", "Replacement", "Status", "install", "status", "uninstall"]

HOSTS = (
    *("areal", "deepspeed", "megatron", "miles", "ms_swift", "nemo_rl", "openrlhf", "prime_rl"),
    *("skyrl", "slime", "specforge", "speculators", "torchtitan", "transformers", "trl", "verl"),
)


@dataclass(frozen=True)
class Status:
    """All installed hosts, printable."""

    hosts: tuple[Installed, ...]

    def __str__(self) -> str:
        return "\n".join(str(entry) for entry in self.hosts) or "logitless: nothing is installed"


def install(host: str | Host, **options: Any) -> Installed:
    """Make a framework use this library.

    Checks the signature of every function to replace, then replaces all of them. A version that was not tested gives a
    warning; a parameter that is new, with a default, is honoured at its default, and calls that set it are left to the
    framework and counted. Installing twice with the same options is harmless.

    Args:
        host: ``"areal"``, ``"deepspeed"``, ``"megatron"``, ``"miles"``, ``"ms_swift"``, ``"nemo_rl"``,
            ``"openrlhf"``, ``"prime_rl"``, ``"skyrl"``, ``"slime"``, ``"specforge"``, ``"speculators"``,
            ``"torchtitan"``, ``"transformers"``, ``"trl"`` or ``"verl"``; or a :class:`Host`, for any other framework.
        options: ``audit=k`` compares k random rows of every call with float64; ``any_version=True`` silences the
            warning about the version; ``only=["name", ...]`` replaces these functions and leaves all others the
            host's; the host's page lists its further options.

    Returns:
        The host's entry of :func:`status`.

    Raises:
        LogitlessError: the host or an option is unknown, or a function of the host has a signature that the adapter
            does not know (the text has the difference); nothing was replaced.

    >>> install("trll")
    Traceback (most recent call last):
    logitless.errors.LogitlessError: install: there is no host 'trll'. Did you mean 'trl'? Known: areal, deepspeed,
    megatron, miles, ms_swift, nemo_rl, openrlhf, prime_rl, skyrl, slime, specforge, speculators, torchtitan,
    transformers, trl, verl.

    A framework that is not in the list needs no change of this package. Describe its function and the replacement::

        def make_score(original, options):
            def score(logits, ids):
                return logitless.logprobs(logits, ids).logprob

            return score

        score = Replacement(module="toyrl.maths", name="score", signature="(logits, ids)", make=make_score)
        toyrl = Host(name="toyrl", package="toyrl", versions=("1.2",), replacements=lambda options: [score])
        logitless.install(toyrl)
        logitless.uninstall("toyrl")
    """
    if isinstance(host, Host):
        return install_host(host, options)
    _check_known("install", host, HOSTS)
    return install_host(importlib.import_module(f"logitless.adapters.{host}").HOST, options)


def uninstall(host: str | Host) -> None:
    """Put back every function that :func:`install` replaced. Takes the host or its name.

    Raises:
        LogitlessError: the host is not installed, or other code replaced our functions since; nothing was put back.
    """
    if isinstance(host, Host):
        return uninstall_host(host.name)
    _check_known("uninstall", host, {*HOSTS, *(entry.host for entry in installed())})
    uninstall_host(host)


def status() -> Status:
    """The installed hosts: their replaced functions, the calls of each, and the audit's report.

    >>> print(status())
    logitless: nothing is installed
    """
    return Status(installed())


def _check_known(caller: str, host: str, known: Collection[str]) -> None:
    if not isinstance(host, str):
        raise refused(f"{caller}: host", "a Host, or the name of one", host)
    if host not in known:
        raise LogitlessError(f"{caller}: there is no host {host!r}.{suggestion(host, known)}")
