"""The hosts that the adapters' tests run on: their real code (``benchmarks.bench.checkouts``), watched."""

from __future__ import annotations

import inspect
from typing import Any

import record

from benchmarks.bench.checkouts import (
    CHECKOUTS,
    FOLDER,
    checkout,
    checkouts,
    commit,
    load,
    named,
    put_first,
)

__all__ = [
    "CHECKOUTS",
    "FOLDER",
    "checkout",
    "checkouts",
    "commit",
    "load",
    "named",
    "put_first",
    "takes",
]

record.start()


def takes(function: Any, name: str) -> bool:
    """Whether this release of the host has the parameter."""
    return name in inspect.signature(function).parameters
