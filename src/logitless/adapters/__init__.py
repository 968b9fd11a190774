"""Drop-in adapters: ``install("host")`` makes a framework you already run use this library.

One file per host, imported when it is installed; nothing outside this folder knows a host.

    install("trl")       check version and signatures, then replace: all or nothing
    status()             what is installed where, and how often it was called
    uninstall("trl")     put everything back

Installing is per process: in a framework with workers, call it in each worker.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from logitless.adapters.patching import Installed, install_host, installed, suggestion, uninstall_host
from logitless.errors import LogitlessError

HOSTS = ("megatron", "nemo_rl", "openrlhf", "skyrl", "slime", "transformers", "trl", "verl")


@dataclass(frozen=True)
class Status:
    """Everything that is installed, printable."""

    hosts: tuple[Installed, ...]

    def __str__(self) -> str:
        return "\n".join(str(entry) for entry in self.hosts) or "logitless: nothing is installed"


def install(host: str, **options: Any) -> Installed:
    """Make a framework use this library.

    Checks the framework's version and the signature of everything that is replaced, then replaces all of it. Installing
    twice with the same options is harmless.

    Args:
        host: ``"megatron"``, ``"nemo_rl"``, ``"openrlhf"``, ``"skyrl"``, ``"slime"``, ``"transformers"``, ``"trl"`` or
            ``"verl"``.
        options: ``audit=k`` compares k random rows of every call with float64; ``any_version=True`` skips the version
            check, not the others; the rest is the host's own.

    Returns:
        What was replaced: the host's entry of :func:`status`.

    Raises:
        LogitlessError: the host or an option is not known, or the host is not what was tested; nothing was replaced.

    >>> install("trll")
    Traceback (most recent call last):
    logitless.errors.LogitlessError: install: there is no host 'trll'. Did you mean 'trl'? Known: megatron, nemo_rl,
    openrlhf, skyrl, slime, transformers, trl, verl.
    """
    _check_host("install", host)
    return install_host(importlib.import_module(f"logitless.adapters.{host}").HOST, options)


def uninstall(host: str) -> None:
    """Put back everything that :func:`install` replaced.

    Raises:
        LogitlessError: the host is not installed, or someone replaced ours since; nothing was put back.
    """
    _check_host("uninstall", host)
    uninstall_host(host)


def status() -> Status:
    """What is installed where, how often it was called, and what the audit saw.

    >>> print(status())
    logitless: nothing is installed
    """
    return Status(installed())


def _check_host(caller: str, host: str) -> None:
    if host not in HOSTS:
        raise LogitlessError(f"{caller}: there is no host {host!r}.{suggestion(host, HOSTS)}")
