"""A plugin of pytest: a host's own tests, on the host with the patch of docs/maintainers.md applied.

    LOGITLESS_PATCH=slime pytest -p patched SLIME/tests/test_ppo_logprob_entropy.py

The added lines of the page's diff run before the host's function, which takes the place of "...". Without
``LOGITLESS_PATCH`` the host is as it is: what fails then is the host's business. Tensors that a test asks of a GPU are
made on the CPU, and ``distributed_test_runner``, a fixture of NeMo-RL's tests, has one rank, in this process.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests"), str(ROOT)]

from hosts import load  # noqa: E402

import logitless  # noqa: E402
from benchmarks.bench.checkouts import MISSING, standing_in  # noqa: E402
from logitless import provider  # noqa: E402

PAGE = (ROOT / "docs" / "maintainers.md").read_text(encoding="utf-8")
WHERE = {
    "areal": ("areal.utils.functional.vocab_parallel", "gather_logprobs_entropy"),
    "megatron": ("megatron.core.tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy"),
    "miles": ("miles.backends.training_utils.loss_hub.math_utils", "calculate_log_probs_and_entropy"),
    "ms_swift": ("swift.megatron.trainers.vocab_parallel_utils", "compute_logps_and_entropy_from_logits"),
    "nemo_rl": ("nemo_rl.distributed.model_utils", "get_next_token_logprobs_from_logits"),
    "openrlhf": ("openrlhf.models.utils", "log_probs_from_logits"),
    "prime_rl": ("prime_rl.trainer.models.layers.lm_head", "FusedOutputLinear.forward"),
    "skyrl": ("skyrl.backends.skyrl_train.distributed.megatron.model_utils", "_fused_lm_head_logprob_apply"),
    "slime": ("slime.utils.ppo_utils", "calculate_log_probs_and_entropy"),
    "torchtitan": ("torchtitan.components.loss", "compute_logprobs"),
    "transformers": ("transformers.loss.loss_utils", "ForCausalLMLoss"),
    "trl": ("trl.trainer.utils", "selective_log_softmax"),
    "verl": ("verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy"),
}
"""The module and the function that a patch changes."""

DEFERRED = {
    "areal": ("areal.engine.fsdp_engine", "FSDPEngine.forward_backward_batch"),
    "nemo_rl": ("nemo_rl.models.automodel.train", "forward_with_post_processing_fn"),
    "openrlhf": ("openrlhf.models.actor", "Actor.__init__"),
    "skyrl": ("skyrl.backends.skyrl_train.workers.model_wrapper", "HFModelWrapper.__init__"),
    "verl": ("verl.workers.engine.fsdp.transformer_impl", "FSDPEngineWithLMHead.forward_step"),
}
"""The module and the function that a patch with deferred logits changes."""

BITS = {"slime": ("STRICT_ATOL", 5e-7)}
"""A tolerance of a host's tests that is below one float32 rounding (6e-8), and one of a few roundings."""

MORE = {
    "prime_rl": (
        *("prime_rl.trainer.models.llama", "prime_rl.trainer.rl", "prime_rl.utils.utils"),
        *("ring_flash_attn", "torchao"),
    ),
    "skyrl": ("skyrl.train.utils.utils",),
    "torchtitan": ("expecttest", "torchtitan.models"),
}
"""Modules that a host's file of tests imports, and that the tests in question do not use: they are stood in for."""

NAMES = {"prime_rl": ("prime_rl.trainer.models", "cast_float_and_contiguous")}
"""A name that such a file imports from a package that is empty here."""

ONLY = {"skyrl": "FusedLinearChunkedDistributedLogprob.apply"}
"""A function that ``install(host, only=...)`` replaces in place of a patch: tests compare it with another one, which
must stay the host's own."""

TITLES = {
    **{"areal": "AReaL", "megatron": "Megatron-Core", "ms_swift": "ms-swift", "nemo_rl": "NeMo-RL"},
    **{"openrlhf": "OpenRLHF", "prime_rl": "prime-rl", "skyrl": "SkyRL", "transformers": "Transformers", "trl": "TRL"},
}
served = 0
"""Calls of the provider so far."""


def diff_of(host: str) -> str:
    """The page's diff of a host, which its paragraph begins with."""
    return _diff(host, TITLES.get(host, host))


def _diff(host: str, begins: str) -> str:
    found = re.search(rf"^{begins}, `[^\n]*\n(?:[^\n]+\n)*\n```diff\n(.*?)^```$", PAGE, re.M | re.S)
    assert found is not None, f"docs/maintainers.md has no diff of {host}"
    return found[1]


@contextmanager
def with_deferred_logits(host: str) -> Iterator[None]:
    """Within, the host has its patch with deferred logits; its functions on logits are its own."""
    module_name, path = DEFERRED[host]
    owner: Any = sys.modules[module_name]
    *holders, name = path.split(".")
    for holder in holders:
        owner = getattr(owner, holder)
    original = getattr(owner, name)
    text = "\n".join(line[1:] for line in _diff(host, f"{TITLES.get(host, host)} with deferred logits").splitlines())
    first, given = re.search(r"\((\w+), \.\.\.\):", text), "*args, **kwargs"
    assert first is not None
    # What comes after the host's code returns nothing, as a constructor.
    returns = "return " if text.endswith("    ...") else ""
    text = text.replace(first[0], f"({first[1]}, {given}):")
    names = {"_original": original, "logitless": logitless}
    exec(text.replace("    ...", f"    {returns}_original({first[1]}, {given})"), names)
    setattr(owner, name, names[name])
    try:
        yield
    finally:
        setattr(owner, name, original)


def replaced(host: str) -> tuple[Any, str, Any]:
    """Where the host has the function that the diff changes: the owner, the name, and the function."""
    module_name, path = WHERE[host]
    if host in MISSING:
        load(host, module_name)
    owner: Any = importlib.import_module(module_name)
    *holders, name = path.split(".")
    for holder in holders:
        owner = getattr(owner, holder)
    return owner, name, getattr(owner, name)


def patched(host: str, original: Any, namespace: dict[str, Any]) -> Any:
    """The host's function after the diff."""
    lines = [line[1:] for line in diff_of(host).splitlines() if not line.startswith("-")]
    text = "\n".join(lines).replace("    ...", "    return _original(**locals())")
    names = {**namespace, "_original": _by_name(original), "provider": Counted()}
    exec(text, names)
    return next(names[name] for name in re.findall(r"^def (\w+)\(", text, re.M))


def _by_name(original: Any) -> Any:
    known = set(inspect.signature(original).parameters) if callable(original) else set()
    return lambda **given: original(**{name: x for name, x in given.items() if name in known})


class Counted:
    """The provider, whose calls are counted: a patch that never serves would pass every test."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(provider.get(version=1), name)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            global served
            served += 1
            return function(*args, **kwargs)

        return call


def apply(host: str) -> None:
    """Put the patched function where the host's own was."""
    owner, name, original = replaced(host)
    setattr(owner, name, patched(host, original, vars(sys.modules[WHERE[host][0]])))


class OnCpu(TorchFunctionMode):
    """Tensors of a GPU, made on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if given.get("device") is not None and torch.device(given["device"]).type == "cuda":
            given["device"] = "cpu"
        return function(*args, **given)


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with OnCpu():
        yield


@pytest.fixture
def distributed_test_runner() -> Any:
    """One rank, in this process, which knows the patch; tests that want more are skipped."""

    def run(function: Any, world_size: int, backend: str = "gloo") -> None:
        if world_size > 1:
            pytest.skip("ranks of their own know no patch")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            function(0, 1)
        finally:
            dist.destroy_process_group()

    return run


def pytest_configure(config: Any) -> None:
    host = os.environ["LOGITLESS_HOST"]
    replaced(host)
    if host in ONLY:
        # For a fixture of SkyRL's tests, which takes the group that is there.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if os.environ.get("LOGITLESS_PATCH") and host in ONLY:
        logitless.install(host, only=[ONLY[host]], any_version=True)
    elif os.environ.get("LOGITLESS_PATCH"):
        apply(host)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    host = os.environ["LOGITLESS_HOST"]
    if host in NAMES:
        setattr(sys.modules[NAMES[host][0]], NAMES[host][1], None)
    with standing_in((*MISSING[host], *MORE.get(host, ()))):
        return (yield)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    name, tolerance = BITS.get(os.environ["LOGITLESS_HOST"], (None, None))
    for item in items if name else ():
        setattr(item.module, name, tolerance)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    calls = sum(entry.calls for entry in logitless.status().hosts)
    terminalreporter.write_line(f"served: {served + calls}")
