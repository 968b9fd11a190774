"""Frameworks that are installed without their requirements: the real host code, imported on a plain CPU machine.

``make`` puts the hosts of constraints-hosts.txt into .venv/hosts. A host's package imports third-party packages that
are not there and that the functions under test never call (ray, tensordict, peft, ...). While the host's modules are
imported, and no longer, each of these is stood in for by an empty module; the host's own code is always the real one.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import typing
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import typing_extensions

FOLDER = Path(sys.prefix) / "hosts"

MISSING = {
    "openrlhf": ("deepspeed", "flash_attn", "peft", "pylatexenc"),
    "skyrl": ("cloudpathlib", "jaxtyping"),
    "verl": ("codetiming", "hydra", "omegaconf", "prefix_grouper", "ray", "tensordict"),
}
"""Third-party packages that a host imports at its top level and that are stood in for."""

FIRST = {"openrlhf": ("transformers.integrations.deepspeed",), "skyrl": (), "verl": ("transformers",)}
"""Real packages that look around for others when they are imported, and should not see a stand-in."""


MODULES = {
    "openrlhf": ("openrlhf.models.actor",),
    "skyrl": (
        "skyrl.backends.skyrl_train.utils.torch_utils",
        "skyrl.backends.skyrl_train.distributed.megatron.model_utils",
    ),
    "verl": (
        "verl.utils.torch_functional",
        "verl.utils.experimental.torch_functional",
        "verl.utils.kernel.linear_cross_entropy",
        "verl.utils.megatron.tensor_parallel",
    ),
}
"""Where the functions are that an adapter replaces."""


def load(host: str, *modules: str) -> list[ModuleType]:
    """The real modules of a host: those that are named, or all that its adapter replaces something in."""
    if not (FOLDER / host).is_dir():
        raise RuntimeError(f"{host} is not in {FOLDER}: run `make` to install what constraints-hosts.txt lists.")
    if str(FOLDER) not in sys.path:
        # Last, so that nothing of ours is hidden by what a host brings along.
        sys.path.append(str(FOLDER))
    with warnings.catch_warnings():
        # What a host's imports warn of is the host's business.
        warnings.simplefilter("ignore")
        for name in FIRST[host]:
            importlib.import_module(name)
        with standing_in(MISSING[host]):
            return [importlib.import_module(name) for name in modules or MODULES[host]]


@contextmanager
def standing_in(packages: tuple[str, ...]) -> Iterator[None]:
    """Within, the packages and everything below them can be imported, and hold whatever is asked of them."""
    finder = _Finder(packages)
    sys.meta_path.insert(0, finder)
    plain = typing.TypedDict
    # Pydantic refuses typing.TypedDict before Python 3.12, which skyrl is written for.
    typing.TypedDict = typing_extensions.TypedDict  # pyright: ignore
    try:
        yield
    finally:
        typing.TypedDict = plain  # pyright: ignore
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if finder.covers(name)]:
            del sys.modules[name]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def covers(self, name: str) -> bool:
        return name.split(".")[0] in self.packages

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if self.covers(fullname) else None

    def create_module(self, spec: Any) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _StandIn(ModuleType):
    """A module in which every name is a class that takes anything and does nothing."""

    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Nothing,), {})


class _Nothing:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __class_getitem__(cls, item: Any) -> Any:
        return cls
