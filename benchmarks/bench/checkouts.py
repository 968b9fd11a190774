"""Hosts without their requirements: their real code, imported on a machine that has torch and little else.

    .venv/hosts                    the hosts of constraints-hosts.txt, put there by ``make``
    .venv/deepspeed                DeepSpeed, put there by ``make``: on the path of the tests that ask for it alone
    LOGITLESS_HOSTS=checkouts      a folder with ``slime-0.3.0``, ``verl-main``, ...; the last of a host is taken
    LOGITLESS_HOSTS=checkouts/slime-0.3.0      one checkout; for every other host the usual place

A checkout comes before what is installed, and in place of a double. A host's package imports third-party packages that
are not there and that the functions in question never call (ray, tensordict, peft, ...). While the host's modules are
imported, and no longer, each of these is stood in for by an empty module; the host's own code is always the real one.
The tests of the adapters and the benchmark of hosts load them here.
"""

from __future__ import annotations

import abc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import subprocess
import sys
import typing
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch._dynamo
import typing_extensions

from logitless.errors import LogitlessError

FOLDER = Path(sys.prefix) / "hosts"
DEEPSPEED = Path(sys.prefix) / "deepspeed"

CHECKOUTS = "LOGITLESS_HOSTS"

MISSING = {
    "areal": (
        *("aiohttp", "colorlog", "einops", "hydra", "lark", "numba", "omegaconf", "orjson", "peft", "ray", "torchdata"),
        *("fastapi", "httpx", "mbridge", "megatron.bridge", "torch_memory_saver", "uvicorn", "uvloop", "areal.v2"),
    ),
    "deepspeed": ("cpuinfo", "einops", "hjson", "msgpack", "ninja"),
    "megatron": (),
    "ms_swift": (
        *("dacite", "json_repair", "mcore_bridge", "modelscope", "vllm", "swift.dataset", "swift.infer_engine"),
        *("swift.rlhf_trainers", "swift.template", "swift.trainers", "swift.tuners", "swift.utils"),
        *("swift.megatron.arguments", "swift.megatron.callbacks", "swift.megatron.model"),
    ),
    "miles": ("httpx", "ray", "megatron.training", "sglang", "torch_memory_saver", "wandb"),
    "nemo_rl": (
        *("decord", "hydra", "megatron.bridge", "megatron.training", "nemo_automodel", "PIL", "ray", "requests"),
        *("tensordict", "nemo_rl.models.dtensor", "nemo_rl.models.generation", "nemo_rl.models.policy"),
        "nemo_rl.utils.logger",
    ),
    "openrlhf": (
        *("aiohttp", "deepspeed", "fastapi", "flash_attn", "jsonlines", "optree", "peft", "pylatexenc", "ray"),
        *("torchdata", "uvicorn", "vllm"),
    ),
    "prime_rl": ("loguru",),
    "skyrl": (
        *("cloudpathlib", "cloudpickle", "jaxtyping", "loguru", "megatron.bridge", "omegaconf", "peft", "ray"),
        "skyrl_gym",
    ),
    "slime": ("httpx", "ray", "megatron.training", "torch_memory_saver", "wandb"),
    "specforge": ("flash_attn", "sglang", "yunchang"),
    "speculators": ("hs_connectors", "loguru", "openai", "pydantic_settings", "typer", "speculators.train.data"),
    "torchtitan": ("monarch", "spmd_types", "torchdata", "torchstore", "tyro", "vllm"),
    "trl": (),
    "vime": (),
    "verl": ("codetiming", "hydra", "omegaconf", "orjson", "peft", "prefix_grouper", "ray", "tensordict"),
}
"""Third-party packages that a host imports at its top level and that are stood in for; of NeMo-RL and
ms-swift also modules of their own that name types, read data, or want another version of a package.
"""

FIRST = {
    "openrlhf": ("transformers.integrations.deepspeed",),
    "miles": ("megatron.core.models.gpt",),
    "ms_swift": ("transformers",),
    "nemo_rl": ("transformers",),
    "prime_rl": ("transformers",),
    "skyrl": ("transformers",),
    "slime": ("megatron.core.models.gpt",),
    "verl": ("transformers",),
}
"""Real packages that look around for others when they are imported, and should not see a stand-in."""


BARE = {
    "areal": ("areal", "areal.infra", "areal.utils"),
    "ms_swift": ("swift", "swift.megatron", "swift.megatron.trainers"),
    "prime_rl": ("prime_rl.trainer", "prime_rl.trainer.models"),
    "speculators": ("speculators", "speculators.losses", "speculators.utils"),
    "vime": ("vime", "vime.backends", "vime.backends.megatron_utils"),
}
"""Packages of a checkout whose ``__init__`` imports the whole host: their modules are imported without it."""

SWITCHES = {
    "torchtitan": (("torchtitan.components.loss", "spmd", SimpleNamespace(is_type_checking=lambda: False)),),
}
"""What is read of a package that is stood in for, while the host runs."""

ABSENT = {"nemo_rl": ("nemo_rl.models.megatron.train",)}
"""Modules of a checkout that want a Megatron-Core which may not be there: imported only by name."""


MODULES = {
    "areal": ("areal.utils.functional.vocab_parallel",),
    "deepspeed": ("deepspeed.sequence.cross_entropy",),
    "miles": (
        "miles.backends.training_utils.loss_hub.logit_processors",
        "miles.backends.training_utils.loss_hub.losses",
        "miles.backends.training_utils.parallel",
    ),
    "ms_swift": ("swift.megatron.trainers.vocab_parallel_utils",),
    "nemo_rl": ("nemo_rl.algorithms.logits_sampling_utils", "nemo_rl.distributed.model_utils"),
    "openrlhf": ("openrlhf.models.actor",),
    "prime_rl": ("prime_rl.trainer.models.layers.lm_head", "prime_rl.trainer.models.layers.lm_head_gemma"),
    "skyrl": (
        "skyrl.backends.skyrl_train.utils.torch_utils",
        "skyrl.backends.skyrl_train.distributed.megatron.model_utils",
    ),
    "slime": ("slime.backends.megatron_utils.loss", "slime.backends.megatron_utils.initialize"),
    "specforge": (
        *("specforge.core.compact_teacher", "specforge.core.loss", "specforge.core.lk_loss"),
        *("specforge.core.eagle3_adapters", "specforge.algorithms.eagle3.model"),
    ),
    "speculators": ("speculators.losses.fused", "speculators.losses.eager"),
    "torchtitan": ("torchtitan.components.loss",),
    "verl": (
        "verl.utils.torch_functional",
        "verl.utils.experimental.torch_functional",
        "verl.utils.kernel.linear_cross_entropy",
        "verl.utils.megatron.tensor_parallel",
    ),
    "vime": ("vime.backends.megatron_utils.linear_logp_provider",),
}
"""Where the functions are that an adapter replaces, or that call ours."""


LAST = {"skyrl": ("flash_attn", "skyrl.backends.skyrl_train.workers.model_wrapper")}
"""A package that is stood in for when all is imported that would have used it, and the module that needs it."""


PACKAGES = {"ms_swift": "swift"}
"""Names that hosts are imported by, where these are not the names of their adapters."""


def checkout(host: str) -> Path | None:
    """The checkout of a host that ``LOGITLESS_HOSTS`` names: the newest one of a folder; or None."""
    return next(iter(reversed(checkouts(host))), None)


def checkouts(host: str) -> list[Path]:
    """All checkouts of a host, oldest first."""
    if not os.environ.get(CHECKOUTS):
        return []
    root = Path(os.environ[CHECKOUTS]).resolve()
    if not root.is_dir():
        raise LogitlessError(f"{CHECKOUTS}={root} is not a folder.")
    folders = [root] if _is_of(host, root) else [folder for folder in root.iterdir() if _is_of(host, folder)]
    return sorted(folders, key=_age)


def _is_of(host: str, folder: Path) -> bool:
    return (
        re.fullmatch(rf"{host}(-.*)?", folder.name) is not None
        and (_sources(folder, host) / PACKAGES.get(host, host)).is_dir()
    )


def _sources(folder: Path, host: str) -> Path:
    """Where a checkout has its package: at the top, or under ``src``."""
    return folder / "src" if (folder / "src" / PACKAGES.get(host, host)).is_dir() else folder


def _age(folder: Path) -> tuple[int, tuple[int, ...]]:
    """Releases by their numbers, then branches."""
    numbers = tuple(map(int, re.findall(r"\d+", folder.name)))
    return (0 if numbers else 1), numbers


def named(host: str, folder: Path) -> str:
    """What a checkout calls itself: ``0.3.0`` for ``slime-0.3.0``."""
    return folder.name.removeprefix(f"{host}-")


def commit(folder: Path) -> str | None:
    """The commit of a checkout, from its file ``COMMIT`` or from git; None where neither tells."""
    if (folder / "COMMIT").is_file():
        return (folder / "COMMIT").read_text().strip()
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def put_first(host: str) -> bool:
    """Whether there is a checkout of the host; its package is then the one that is imported."""
    folder = checkout(host)
    if folder is not None and str(_sources(folder, host)) not in sys.path:
        sys.path.insert(0, str(_sources(folder, host)))
        # For processes to come: a server of ranks imports some hosts before it is told of this path.
        others = filter(None, [os.environ.get("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_sources(folder, host)), *others])
        if not torch.cuda.is_available():
            # Hosts compile parts of their losses; there is no compiler to count on, and the numbers are the same.
            # The variable is for worker processes.
            os.environ["TORCHDYNAMO_DISABLE"] = "1"
            torch._dynamo.config.disable = True
    return folder is not None


def load(host: str, *modules: str) -> list[ModuleType]:
    """The real modules of a host: those that are named, or all that its adapter replaces something in."""
    if put_first(host):
        # Hosts call what newer torch has renamed, and torchtitan wants to be imported before torch.
        warnings.filterwarnings("ignore", "torch.distributed.nn.functional", FutureWarning)
        warnings.filterwarnings("ignore", "The 'torch' module has already been imported", UserWarning)
        warnings.filterwarnings("ignore", "Using a non-tuple sequence for multidimensional indexing", UserWarning)
        if not torch.cuda.is_available():
            _stay_on_cpu()
        for name in ABSENT.get(host, ()):
            if name in modules:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = None  # pyright: ignore
        for name in BARE.get(host, ()):
            _bare(name, host)
    elif (FOLDER / PACKAGES.get(host, host)).is_dir():
        if str(FOLDER) not in sys.path:
            # Last, so that nothing of ours is hidden by what a host brings along.
            sys.path.append(str(FOLDER))
    elif importlib.util.find_spec(PACKAGES.get(host, host)) is None:
        raise LogitlessError(
            f"{host} is neither installed nor in {FOLDER}, where `make` puts what constraints-hosts.txt lists; nor "
            f"does {CHECKOUTS} name a folder with its sources as {host}-main."
        )
    with warnings.catch_warnings():
        # What a host's imports warn of is the host's business.
        warnings.simplefilter("ignore")
        for name in FIRST.get(host, ()):
            importlib.import_module(name)
        with standing_in(MISSING[host]):
            found = [importlib.import_module(name) for name in modules or MODULES[host]]
        if not modules and host in LAST:
            package, name = LAST[host]
            with standing_in((*MISSING[host], package)):
                found.append(importlib.import_module(name))
    for module, name, value in SWITCHES.get(host, ()):
        setattr(sys.modules[module], name, value)
    return found


def _bare(name: str, host: str) -> None:
    folder = checkout(host)
    if name not in sys.modules and folder is not None:
        package = ModuleType(name)
        package.__path__ = [str(_sources(folder, host).joinpath(*name.split(".")))]
        sys.modules[name] = package


_tensor = torch.tensor


def _stay_on_cpu() -> None:
    """NeMo-RL moves ids to a device, and indices through pinned memory, that it knows it has."""
    torch.Tensor.cuda = lambda self, *_, **__: self  # pyright: ignore
    torch.tensor = lambda *args, pin_memory=False, **more: _tensor(*args, **more)


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
        _forget_what_is_there()


def _forget_what_is_there() -> None:
    """Clear what transformers remembers of packages that it looked for: some of them were stood in for."""
    module = sys.modules.get("transformers.utils.import_utils")
    for found in list(vars(module).values()) if module is not None else ():
        if callable(getattr(found, "cache_clear", None)):
            found.cache_clear()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def covers(self, name: str) -> bool:
        return any(name == package or name.startswith(f"{package}.") for package in self.packages)

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
        return _Names(name, (_Nothing,), {})


def stand_in(name: str, **holds: Any) -> ModuleType:
    """A module in which these names are what they are, and every other is a class that does nothing."""
    module = _StandIn(name)
    vars(module).update(holds)
    return module


class _Names(abc.ABCMeta):
    """A class whose attributes are such classes too: hosts annotate with ``package.module.Name``."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (_Nothing,), {})


class _Nothing(metaclass=_Names):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __class_getitem__(cls, item: Any) -> Any:
        return cls
