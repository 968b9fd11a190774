"""Providers from hidden states: ``score(batch, hidden, weight) -> Scores``.

Most keep their logits, or the gradients they sum up, in the operands' half precision: those are marked ``rounds``, and
held to that precision. Peers are imported in ``load`` alone, as in ``providers``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench.inputs import Batch
from benchmarks.bench.providers import (
    Provider,
    Score,
    Scores,
    join_group_of_one,
    peer_file,
    standing_in,
    take_rows,
    te_cross_entropy,
)
from logitless.loss import policy_loss
from logitless.operands import Logits
from logitless.score import logprobs
from logitless.spec import IGNORE
from logitless.tools.plan.ways import plain_linear

VERL_KERNEL = "_bench_verl_kernel"
TRL_HEAD = "_bench_trl_head"
LIGER_OPS = "liger_kernel.ops"
TRL_COLUMNS = 32768
"""Columns at a time, as TRL's trainers have it."""


def _with_plain(function: Callable[..., tuple[Tensor, Tensor | None]]) -> Score:
    return lambda batch, hidden, weight: Scores(
        *function(hidden, weight, batch.index, batch.rows.target, batch.case.entropy)
    )


def _load_compiled() -> Score:
    # Past a number of shapes and modes the compiler would silently fall back to eager: forget the earlier ones.
    torch.compiler.reset()
    return _with_plain(torch.compile(plain_linear, dynamic=False))


def _load_logitless() -> Score:
    def score(batch: Batch, hidden: Tensor, weight: Tensor) -> Scores:
        case = batch.case
        memory = None if case.loss else case.memory
        out = logprobs(Logits(hidden, weight), batch.rows, entropy=case.entropy, memory=memory)
        return Scores(out.logprob, out.entropy)

    return score


def _load_logitless_loss(into_buffer: bool) -> Callable[[], Score]:
    def load() -> Score:
        # Made in the first call, whose gradients are checked; later calls add to it.
        buffers: list[Tensor] = []

        def score(batch: Batch, hidden: Tensor, weight: Tensor) -> Scores:
            if into_buffer and not buffers:
                buffers.append(torch.zeros(weight.shape, device=weight.device))
            buffer = buffers[0] if into_buffer else None
            loss, _, stats = policy_loss(
                Logits(hidden, weight, weight_grad=buffer),
                batch.rows,
                batch.objective,
                memory=batch.case.memory,
                return_stats=True,
                old_logprob=batch.old_logprob,
                advantage=batch.advantage,
            )
            return Scores(stats.logprob, stats.entropy, loss, buffer)

        return score

    return load


def _load_logitless_logits() -> Score:
    def score(batch: Batch, hidden: Tensor, weight: Tensor) -> Scores:
        logits = Logits.given(take_rows(hidden, batch) @ weight.T, overwrite=True)
        out = logprobs(logits, batch.rows.target, entropy=batch.case.entropy)
        return Scores(out.logprob, out.entropy)

    return score


def _load_liger_flce(reduction: str) -> Callable[[], Score]:
    def load() -> Score:
        module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
        function = module.LigerFusedLinearCrossEntropyFunction

        def score(batch: Batch, hidden: Tensor, weight: Tensor) -> Scores:
            loss = -function.apply(hidden, weight, batch.labels, None, None, IGNORE, 0.0, 0.0, reduction)[0]
            return Scores(loss if reduction == "mean" else take_rows(loss, batch), None)

        return score

    return load


def _load_torch_chunked() -> Score:
    functions, options = torch.nn.functional, getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is None:
        raise ImportError(f"torch {torch.__version__} has no linear_cross_entropy in chunks")

    def score(batch: Batch, hidden: Tensor, weight: Tensor) -> Scores:
        return Scores(-functions.linear_cross_entropy(hidden, weight, batch.labels, options=options()), None)

    return score


def _load_te() -> Score:
    function = te_cross_entropy()

    def score(batch: Batch, hidden: Tensor, weight: Tensor) -> Scores:
        return Scores(-function(take_rows(hidden, batch) @ weight.T, batch.rows.target, overwrite_input=True), None)

    return score


def _load_quack() -> Score:
    try:
        function = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    except TypeError as error:
        # QuACK takes CUTLASS for the user's own code unless it lies in a folder of that name.
        raise ImportError(f"quack imports from a folder named site-packages alone: {str(error)[:80]}") from error

    def score(batch: Batch, hidden: Tensor, weight: Tensor) -> Scores:
        # QuACK's default of 4,096 rows a chunk is refused where the hidden size is that number, too.
        chunk = 8192 if hidden.shape[1] == 4096 else 4096
        return Scores(-function(hidden, weight, batch.labels, chunk, IGNORE, "mean"), None)

    return score


def _of_liger(module: str, name: str, *options: Any) -> Callable[[], Callable[..., Any]]:
    """A function of Liger's, with options between the ignored id and whether there is to be an entropy."""

    def find() -> Callable[..., Any]:
        function = getattr(importlib.import_module(f"{LIGER_OPS}.{module}"), name)
        return lambda *given: function.apply(*given[:-1], *options, given[-1])

    return find


def _liger_native() -> Callable[..., Any]:
    """Liger's native kernels, which are for tensor parallelism, in a group of one."""
    name = "LigerFusedLinearScaledCrossEntropyNativeTPFunction"
    function = getattr(importlib.import_module(f"{LIGER_OPS}.cute.fused_linear_scaled_cross_entropy_tp"), name)
    core, nvshmem = (importlib.import_module(f"liger_cute_kernels.{x}") for x in ("tvm_ffi", "nvshmem"))
    try:
        core._load_module()
    except OSError as error:
        raise ImportError(f"liger_cute_kernels does not load: {error}") from error
    join_group_of_one()
    if not core.nvshmem_is_initialized():
        nvshmem.init_from_pg()

    def apply(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, ignored: int, entropy: bool) -> Any:
        group = torch.distributed.group.WORLD
        return function.apply(hidden, weight, labels, 0, temperature, ignored, 1, entropy, group)

    return apply


def _load_liger_scaled(find: Callable[[], Callable[..., Any]]) -> Callable[[], Score]:
    """Liger's scaled cross entropy with entropy: the chunked torch function, or kernels for Hopper."""

    def load() -> Score:
        function = find()

        def score(batch: Batch, hidden: Tensor, weight: Tensor) -> Scores:
            wanted = batch.case.entropy
            out = function(hidden, weight, batch.labels, 1.0, IGNORE, wanted is not None)
            if wanted is None:
                return Scores(take_rows(-out, batch), None)
            loss, entropy = out
            return Scores(take_rows(-loss, batch), take_rows(entropy.detach() if wanted == "value" else entropy, batch))

        return score

    return load


def _load_liger_selective() -> Score:
    module = importlib.import_module("liger_kernel.chunked_loss.fused_linear_ppo")
    function, chunk = module._ChunkedSelectiveLogProbFunction, module._SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE

    def score(batch: Batch, hidden: Tensor, weight: Tensor) -> Scores:
        return Scores(function.apply(take_rows(hidden, batch), weight, batch.rows.target, None, 1.0, chunk), None)

    return score


def _load_cce(filter_eps: str | None) -> Callable[[], Score]:
    def load() -> Score:
        function = importlib.import_module("cut_cross_entropy").linear_cross_entropy

        def score(batch: Batch, hidden: Tensor, weight: Tensor) -> Scores:
            loss = function(hidden, weight, batch.labels, reduction="none", filter_eps=filter_eps)
            return Scores(take_rows(-loss, batch), None)

        return score

    return load


def _load_verl_kernel() -> Score:
    # Importing verl pulls in Ray. Its two kernel files ask the rest of verl only about the device: a stand-in answers,
    # and the files are imported as a package, since one imports the other when it is called.
    folder = peer_file("verl", "utils/kernel/kernels.py").parent
    package = sys.modules[VERL_KERNEL] = ModuleType(VERL_KERNEL)
    package.__path__ = [os.fspath(folder)]
    device = ModuleType("verl.utils.device")
    vars(device).update(
        get_device_capability=torch.cuda.get_device_capability,
        get_device_name=lambda: "cuda",
        get_torch_device=lambda: torch.cuda,
        is_cuda_available=torch.cuda.is_available(),
    )
    with standing_in({"verl": ModuleType("verl"), "verl.utils": ModuleType("verl.utils"), device.__name__: device}):
        importlib.import_module(f"{VERL_KERNEL}.kernels")
    function = importlib.import_module(f"{VERL_KERNEL}.linear_cross_entropy").linear_cross_entropy

    def score(batch: Batch, hidden: Tensor, weight: Tensor) -> Scores:
        wanted = batch.case.entropy
        logprob, entropy = function(take_rows(hidden, batch), weight, batch.rows.target, 1.0, "none", None)
        return Scores(logprob, None if wanted is None else entropy.detach() if wanted == "value" else entropy)

    return score


def trl_head() -> Callable[[Tensor, Tensor, Tensor, tuple[str, ...]], tuple[Tensor, ...]]:
    """TRL's fused head as its trainers call it: of hidden rows, weight, targets and the names of what is asked for."""
    # Importing TRL pulls in a training framework. Its file asks the rest of TRL, in backward, for a context in which a
    # sharded head is whole: a stand-in answers, as TRL does where no head is sharded.
    folder = peer_file("trl", "kernels/chunked_logprob.py").parent
    for name in ("", ".kernels", ".trainer", ".trainer.utils"):
        package = sys.modules[TRL_HEAD + name] = ModuleType(TRL_HEAD + name)
        package.__path__ = [os.fspath(folder)] if name == ".kernels" else []
    vars(sys.modules[f"{TRL_HEAD}.trainer.utils"]).update(maybe_gather_lm_head_ctx=lambda *_: contextlib.nullcontext())
    function = importlib.import_module(f"{TRL_HEAD}.kernels.chunked_logprob").ChunkedLogProbFunction

    def head(rows: Tensor, weight: Tensor, target: Tensor, outputs: tuple[str, ...]) -> tuple[Tensor, ...]:
        return function.apply(rows, weight, None, target, 1.0, TRL_COLUMNS, None, 1.0, outputs)

    return head


def _load_trl_head() -> Score:
    head = trl_head()

    def score(batch: Batch, hidden: Tensor, weight: Tensor) -> Scores:
        wanted = batch.case.entropy
        outputs = ("log_probs",) if wanted is None else ("log_probs", "entropy")
        logprob, entropy, *_ = head(take_rows(hidden, batch), weight, batch.rows.target, outputs)
        return Scores(logprob, entropy.detach() if wanted == "value" else entropy)

    return score


LINEAR_PROVIDERS: dict[str, Provider] = {
    "torch": Provider(lambda: _with_plain(plain_linear), rounds=True, note="logits in the operands' dtype"),
    "torch.compile": Provider(_load_compiled, rounds=True),
    "logitless": Provider(_load_logitless, note="in a loss: objective(logprobs(...)), two passes"),
    "logitless-loss": Provider(_load_logitless_loss(False), cases=(True,)),
    "logitless-loss-buffer": Provider(
        _load_logitless_loss(True), cases=(True,), note="d_weight added to a given float32 buffer"
    ),
    "logitless-logits": Provider(
        _load_logitless_logits, rounds=True, note="logits in the operands' dtype, their gradient over them"
    ),
    "liger-flce": Provider(
        _load_liger_flce("mean"),
        "mean loss",
        cuda_only=True,
        rounds=True,
        note="gradients in forward, for a mean loss",
        cases=(False,),
    ),
    "liger-flce-none": Provider(_load_liger_flce("none"), "log-prob", cuda_only=True, rounds=True),
    "liger-chunked": Provider(
        _load_liger_scaled(_of_liger("fused_linear_scaled_cross_entropy", "_FusedLinearPPOFallbackFunction")),
        rounds=True,
    ),
    "liger-sm90": Provider(
        _load_liger_scaled(
            _of_liger("cutedsl.ops.fused_scaled_cross_entropy_sm90", "LigerFusedScaledCrossEntropySM90Function", 1)
        ),
        cuda_only=True,
        rounds=True,
    ),
    "liger-native": Provider(
        _load_liger_scaled(_liger_native), cuda_only=True, rounds=True, note="NVSHMEM's memory is not in its peak"
    ),
    "liger-selective": Provider(_load_liger_selective, "log-prob", rounds=True),
    "cce": Provider(_load_cce("high"), "log-prob", cuda_only=True, rounds=True, note="drops blocks of small gradients"),
    "cce-exact": Provider(_load_cce(None), "log-prob", cuda_only=True, rounds=True),
    "trl-head": Provider(_load_trl_head, rounds=True, note="logits in the operands' dtype, 32,768 columns at a time"),
    "te": Provider(
        _load_te,
        "log-prob",
        cuda_only=True,
        rounds=True,
        note="logits in the operands' dtype, their gradient over them",
    ),
    "torch-chunked": Provider(
        _load_torch_chunked,
        "mean loss",
        rounds=True,
        note="torch's linear_cross_entropy in chunks; gradients in forward, for a mean loss",
        cases=(False,),
    ),
    "quack": Provider(
        _load_quack,
        "mean loss",
        cuda_only=True,
        rounds=True,
        note="gradients in forward, for a mean loss",
        cases=(False,),
    ),
    "verl-kernel": Provider(_load_verl_kernel, cuda_only=True, rounds=True, note="d_hidden summed in bfloat16"),
}
