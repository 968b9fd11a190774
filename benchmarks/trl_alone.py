"""TRL where packages that it imports, and that nothing here uses, are not installed: pandas, pyarrow, datasets.

    trl_module("trl.trainer.grpo_trainer")

A stand-in takes the place of each that is missing: a module whose every name is an empty class, enough for imports and
for ``isinstance``. What is measured is TRL's own code.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

NOT_NEEDED = {"pandas": (), "pyarrow": ("compute", "types"), "datasets": ("distributed",)}
"""Packages, and modules of theirs, that TRL names when it is imported."""


class _StandIn(types.ModuleType):
    """A module that has every name, each an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


@functools.cache
def trl_module(name: str) -> Any:
    """A module of TRL; an ``ImportError`` if TRL itself is not there."""
    if importlib.util.find_spec("trl") is None:
        raise ImportError("trl is not installed")
    for package, parts in NOT_NEEDED.items():
        if package in sys.modules or importlib.util.find_spec(package) is not None:
            continue
        for path in (package, *(f"{package}.{part}" for part in parts)):
            module = _StandIn(path)
            module.__path__, module.__spec__ = [], ModuleSpec(path, None, is_package=True)
            sys.modules[path] = module
    return importlib.import_module(name)
