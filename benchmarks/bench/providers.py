"""Providers from logits: one entry per implementation, each saying what it does and does not compute.

A provider's ``load`` imports its package and returns ``score(batch, logits) -> Scores``. Peers are imported there and
nowhere else; a peer that is not installed is reported as absent, with the reason. ``linear_providers`` has the
providers that start from hidden states.

Peers that cannot select rows get the inputs that their usual callers give them: masks or ``-100`` labels where they
take those, the gathered rows otherwise.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from benchmarks.bench.cases import Computed
from benchmarks.bench.inputs import Batch
from logitless.operands import Logits
from logitless.score import logprobs
from logitless.spec import IGNORE, EntropyMode
from logitless.tools.plan.ways import plain


class Scores(NamedTuple):
    """What a provider returns: ``[R]`` log-probs, and ``[R]`` entropies if it computes any.

    A provider that knows only the mean cross entropy returns that, negated, as a log-prob without dimensions. A
    provider that computes the loss of the case returns the loss too, and the buffer, if it added d_weight to one.
    """

    logprob: Tensor
    entropy: Tensor | None
    loss: Tensor | None = None
    weight_grad: Tensor | None = None


Score = Callable[..., Scores]
"""``score(batch, logits)``, or ``score(batch, hidden, weight)``."""


@dataclass(frozen=True)
class Provider:
    """An implementation that is measured.

    Attributes:
        load: imports and returns the scoring function; raises ImportError where the package is missing.
        computes: the most it can compute; a case that asks for more is run without the rest.
        cuda_only: whether it runs on NVIDIA GPUs only.
        note: one remark for the table.
        rounds: whether logits or running sums are in the operands' half precision, or small gradients are dropped.
            Larger errors are then allowed, and the table shows them.
        cases: kinds of case that it takes part in, by ``case.loss``.
    """

    load: Callable[[], Score]
    computes: Literal["mean loss", "log-prob", "entropy value", "entropy grad"] = "entropy grad"
    cuda_only: bool = False
    note: str = ""
    rounds: bool = False
    cases: tuple[bool, ...] = (False, True)

    def entropy_of(self, wanted: EntropyMode) -> Computed:
        """The part of the wanted entropy that this provider computes."""
        if self.computes == "mean loss":
            return "mean"
        if self.computes == "log-prob":
            return None
        return "value" if wanted == "grad" and self.computes == "entropy value" else wanted


def _load_plain() -> Score:
    return lambda batch, logits: Scores(*plain(logits, batch.index, batch.rows.target, batch.case.entropy))


def _load_compiled() -> Score:
    # Past a number of shapes and modes the compiler would silently fall back to eager: forget the earlier ones.
    torch.compiler.reset()
    compiled = torch.compile(plain, dynamic=False)
    return lambda batch, logits: Scores(*compiled(logits, batch.index, batch.rows.target, batch.case.entropy))


def _load_logitless(overwrite: bool) -> Callable[[], Score]:
    def score(batch: Batch, logits: Tensor) -> Scores:
        out = logprobs(Logits.given(logits, overwrite=overwrite), batch.rows, entropy=batch.case.entropy)
        return Scores(out.logprob, out.entropy)

    return lambda: score


def _load_liger() -> Score:
    function = importlib.import_module("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction

    def score(batch: Batch, logits: Tensor) -> Scores:
        loss = function.apply(logits, batch.labels, None, IGNORE, 0.0, 0.0, "none", None, False)[0]
        return Scores(take_rows(-loss, batch), None)

    return score


def _load_trl() -> Score:
    utils = importlib.import_module("trl.trainer.utils")

    def score(batch: Batch, logits: Tensor) -> Scores:
        scored = take_rows(logits, batch)
        logprob = utils.selective_log_softmax(scored, batch.rows.target)
        if batch.case.entropy is None:
            return Scores(logprob, None)
        with torch.set_grad_enabled(torch.is_grad_enabled() and batch.case.entropy == "grad"):
            return Scores(logprob, utils.entropy_from_logits(scored))

    return score


def _load_trl_kernel() -> Score:
    # Importing TRL pulls in a training framework; the file of the kernel needs torch and Triton alone.
    function = _module_from_file("trl", "kernels/logprob_entropy.py").selective_log_softmax_and_entropy

    def score(batch: Batch, logits: Tensor) -> Scores:
        mask = None if batch.index is None else batch.labels != IGNORE
        logprob, entropy = function(logits, batch.labels.clamp_min(0), row_mask=mask)
        entropy = entropy.detach() if batch.case.entropy == "value" else entropy
        return Scores(take_rows(logprob, batch), None if batch.case.entropy is None else take_rows(entropy, batch))

    return score


def _load_verl() -> Score:
    functional = importlib.import_module("verl.utils.torch_functional")

    def score(batch: Batch, logits: Tensor) -> Scores:
        scored = take_rows(logits, batch)
        logprob = functional.logprobs_from_logits(scored, batch.rows.target, inplace_backward=False)
        if batch.case.entropy is None:
            return Scores(logprob, None)
        with torch.set_grad_enabled(torch.is_grad_enabled() and batch.case.entropy == "grad"):
            return Scores(logprob, functional.entropy_from_logits(scored))

    return score


def _load_megatron() -> Score:
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    function = importlib.import_module("megatron.core.tensor_parallel.cross_entropy").vocab_parallel_cross_entropy
    join_group_of_one()
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)

    def score(batch: Batch, logits: Tensor) -> Scores:
        scored = take_rows(logits, batch)
        return Scores(-function(scored, batch.rows.target), None)

    return score


def join_group_of_one() -> None:
    """Have torch.distributed initialised, with this process alone."""
    if not torch.distributed.is_initialized():
        from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

        backend = "nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def te_cross_entropy() -> Callable[..., Tensor]:
    """Transformer Engine's cross entropy: ``f(logits, labels, overwrite_input=...)``, one loss per row."""
    # Importing Transformer Engine loads its libraries. Three of its files need torch and Triton alone: their packages
    # are stand-ins that run nothing, and one that keeps a decorator from being asked for.
    root = peer_file("transformer_engine", "pytorch/cross_entropy.py").parents[1]
    names = ("", ".pytorch", ".pytorch.triton", ".common", ".common.triton")
    packages = {f"transformer_engine{name}": ModuleType(f"transformer_engine{name}") for name in names}
    for name, package in packages.items():
        package.__path__ = [os.fspath(root.parent / name.replace(".", "/"))]
    jit = packages["transformer_engine.pytorch.jit"] = ModuleType("transformer_engine.pytorch.jit")
    vars(jit).update(no_torch_dynamo=lambda: lambda function: function)
    with standing_in(packages):
        function = importlib.import_module("transformer_engine.pytorch.cross_entropy").parallel_cross_entropy

    def cross_entropy(logits: Tensor, labels: Tensor, overwrite_input: bool) -> Tensor:
        return function(logits[None], labels[None], ignore_idx=IGNORE, overwrite_input=overwrite_input)[0]

    return cross_entropy


def _load_te() -> Score:
    function = te_cross_entropy()
    return lambda batch, logits: Scores(take_rows(-function(logits, batch.labels, overwrite_input=False), batch), None)


PROVIDERS: dict[str, Provider] = {
    "torch": Provider(_load_plain),
    "torch.compile": Provider(_load_compiled),
    "logitless": Provider(_load_logitless(overwrite=False)),
    "logitless-overwrite": Provider(_load_logitless(overwrite=True), note="gradient over the logits"),
    "liger": Provider(_load_liger, "log-prob", cuda_only=True, note="overwrites the logits"),
    "trl": Provider(_load_trl),
    "trl-kernel": Provider(_load_trl_kernel, cuda_only=True),
    "verl": Provider(_load_verl),
    "te": Provider(_load_te, "log-prob", cuda_only=True, note="keeps a copy of the logits for the gradient"),
    "megatron": Provider(_load_megatron, "log-prob", note="overwrites float32 logits"),
}


def add_peers(folder: Path) -> None:
    """Let packages unpacked in ``folder`` be imported, ahead of installed ones."""
    sys.path.insert(0, os.fspath(folder.resolve()))


@contextlib.contextmanager
def standing_in(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """For a while, let the names of ``modules`` import them."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def take_rows(x: Tensor, batch: Batch) -> Tensor:
    """The scored rows of a tensor with one row per token."""
    return x if batch.index is None else x[batch.index]


def peer_file(package: str, path: str) -> Path:
    """Path of one file of a package, without importing the package."""
    found = importlib.util.find_spec(package)
    roots = (found.submodule_search_locations if found else None) or []
    file = next((Path(root) / path for root in roots if (Path(root) / path).exists()), None)
    if file is None:
        reason = "is not installed" if found is None else f"has no {path}"
        raise ImportError(f"{package} {reason}")
    return file


def _module_from_file(package: str, path: str) -> ModuleType:
    """One file of a package, imported as a module by itself."""
    file = peer_file(package, path)
    name = f"_bench_{package}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
