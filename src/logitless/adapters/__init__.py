"""Drop-in adapters: ``install("host")`` makes a framework you already run use this library.

One file per host, imported when it is installed; nothing outside this folder knows a host. A framework without a file
here is installed by a ``Host`` of the user's own.

    install("trl")       check version and signatures, then replace: all or nothing
    status()             what is installed where, and how often it was called
    uninstall("trl")     put everything back

Installing is per process: in a framework with workers, call it in each worker.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from logitless.adapters.patching import (
    Host,
    Installed,
    Option,
    Replacement,
    install_host,
    installed,
    suggestion,
    uninstall_host,
)
from logitless.errors import LogitlessError

__all__ = ["HOSTS", "Host", "Installed", "Option", "Replacement", "Status", "install", "status", "uninstall"]

HOSTS = ("megatron", "nemo_rl", "openrlhf", "skyrl", "slime", "transformers", "trl", "verl")


@dataclass(frozen=True)
class Status:
    """Everything that is installed, printable."""

    hosts: tuple[Installed, ...]

    def __str__(self) -> str:
        return "\n".join(str(entry) for entry in self.hosts) or "logitless: nothing is installed"


def install(host: str | Host, **options: Any) -> Installed:
    """Make a framework use this library.

    Checks the framework's version and the signature of everything that is replaced, then replaces all of it. Installing
    twice with the same options is harmless.

    Args:
        host: ``"megatron"``, ``"nemo_rl"``, ``"openrlhf"``, ``"skyrl"``, ``"slime"``, ``"transformers"``, ``"trl"`` or
            ``"verl"``; or a :class:`Host` of your own, for any other framework.
        options: ``audit=k`` compares k random rows of every call with float64; ``any_version=True`` skips the version
            check, not the others; the host's page and its :class:`Option` list name the others.

    Returns:
        What was replaced: the host's entry of :func:`status`.

    Raises:
        LogitlessError: the host or an option is not known, or the host is not what was tested; nothing was replaced.

    >>> install("trll")
    Traceback (most recent call last):
    logitless.errors.LogitlessError: install: there is no host 'trll'. Did you mean 'trl'? Known: megatron, nemo_rl,
    openrlhf, skyrl, slime, transformers, trl, verl.

    A framework that is not in the list needs no change of this package. Say what is replaced, and by what::

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
    """Put back everything that :func:`install` replaced. Takes the host or its name.

    Raises:
        LogitlessError: the host is not installed, or someone replaced ours since; nothing was put back.
    """
    if isinstance(host, Host):
        return uninstall_host(host.name)
    _check_known("uninstall", host, {*HOSTS, *(entry.host for entry in installed())})
    uninstall_host(host)


def status() -> Status:
    """What is installed where, how often it was called, and what the audit saw.

    >>> print(status())
    logitless: nothing is installed
    """
    return Status(installed())


def _check_known(caller: str, host: str, known: Collection[str]) -> None:
    if host not in known:
        raise LogitlessError(f"{caller}: there is no host {host!r}.{suggestion(host, known)}")
