"""How to measure: time, peak memory, the floors of the machine, and the distance to float64.

Peak memory is bytes allocated beyond those alive before: on CUDA by the allocator's counter, on CPU by adding up every
allocation and release that torch's profiler saw. Both are exact, and neither is sampled.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from benchmarks.bench.cases import Computed
from benchmarks.bench.inputs import Batch
from logitless.tools.stopwatch import StopWatch

# At 700 TFLOP/s, 0.15 s.
WARM_FLOPS = 1.0e14


class Truth(NamedTuple):
    """Float64 results at sampled rows.

    Attributes:
        token: ``[S]`` sampled tokens, prompt among them.
        slot: ``[S]`` place of each token among the scored rows, -1 for prompt.
        logprob, entropy: ``[S]``, zero for prompt.
        by_logprob, by_entropy: ``[S, V]`` gradients by the upstream gradient of either alone.
        g_logprob, g_entropy: ``[S]`` absolute values of the upstream gradients.
        largest: the largest absolute value of a logit.
        linear: truth about the weight, from hidden states; ``by_logprob`` and ``by_entropy`` are then ``[S, D]``.
    """

    token: Tensor
    slot: Tensor
    logprob: Tensor
    entropy: Tensor
    by_logprob: Tensor
    by_entropy: Tensor
    g_logprob: Tensor
    g_entropy: Tensor
    largest: float
    linear: LinearTruth | None = None


class LinearTruth(NamedTuple):
    """The truth from hidden states that is not about sampled tokens.

    Attributes:
        mean: mean log-prob of all scored rows.
        column: ``[C]`` sampled rows of the weight.
        is_target: ``[C]`` whether it is the target of any row. If not, its gradient is far smaller.
        by_logprob, by_entropy: ``[C, D]`` gradients of the weight.
    """

    mean: float
    column: Tensor
    is_target: Tensor
    by_logprob: Tensor
    by_entropy: Tensor


class Errors(NamedTuple):
    """Largest distance to float64 over the sampled tokens; None for a result that was not computed.

    ``gradient`` is relative to the upstream gradients of its row, ``gradient_row`` to the row's largest element: the
    second is the harder test, for rows whose target is nearly certain.

    From hidden states, errors of gradients are norms relative to the norm of the gradient: ``gradient`` over all
    sampled rows of d_hidden together, ``gradient_row`` over the worst row, ``weight`` over sampled rows of d_weight
    that are the target of a row, ``weight_rest`` over sampled rows of d_weight that are not.
    """

    logprob: float
    entropy: float | None
    gradient: float | None
    gradient_row: float | None
    weight: float | None = None
    weight_rest: float | None = None


class Times(NamedTuple):
    """Milliseconds of one step: to the end of forward, and to the end of backward."""

    forward_ms: float
    total_ms: float


def peak_bytes(fn: Callable[[], object], device: torch.device | str) -> int:
    """Most bytes alive at once during ``fn()``, beyond those alive before it.

    >>> peak_bytes(lambda: torch.zeros(1024).add(1.0).sum(), "cpu") >= 8192
    True
    """
    gc.collect()
    if torch.device(device).type == "cpu":
        return _peak_bytes_cpu(fn)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    fn()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_bytes_cpu(fn: Callable[[], object]) -> int:
    # Not torch.profiler, which makes a tree of all events when it stops: that takes longer than most functions here.
    session = profile(profile_memory=True)
    with _quiet_stderr():
        session.__enter__()
    try:
        fn()
    finally:
        with _quiet_stderr():
            session.__exit__(None, None, None)
    results: Any = session.kineto_results
    changes = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    alive = peak = 0
    for _, change in changes:
        alive += change
        peak = max(peak, alive)
    return peak


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Drop what native code writes to stderr: the profiler announces its start and stop at any log level."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def warm_up(hidden: Tensor, weight: Tensor) -> None:
    """Some hundred milliseconds of plain products, so that the next step finds the chip as training leaves it.

    After a pause the first products run a sixth faster than later ones, until power runs out; and a queue of work hides
    the CPU's work before its first launch, as a model's forward does.
    """
    rows = hidden[: min(len(hidden), 4096)]
    out = torch.empty((len(rows), weight.shape[0]), dtype=hidden.dtype, device=hidden.device)
    flops = 2 * len(rows) * weight.numel()
    for _ in range(max(1, int(WARM_FLOPS / flops))):
        torch.mm(rows, weight.T, out=out)


def gemm_times(hidden: Tensor, weight: Tensor) -> list[float]:
    """Milliseconds to the end of the first, second, third and fourth of four full products, back to back.

    They are logits, d_hidden, d_weight and logits again, by the vendor library in the operands' dtype, into buffers
    made before the clock starts.
    """
    logits = torch.empty((hidden.shape[0], weight.shape[0]), dtype=hidden.dtype, device=hidden.device)
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)
    clock = StopWatch(hidden.device)
    if hidden.device.type == "cuda":
        warm_up(hidden, weight)
    clock.mark()
    for a, b, out in (
        (hidden, weight.T, logits),
        (logits, weight, d_hidden),
        (logits.T, hidden, d_weight),
        (hidden, weight.T, logits),
    ):
        torch.mm(a, b, out=out)
        clock.mark()
    return list(itertools.accumulate(clock.laps_ms()))


def interleaved(
    contenders: dict[str, Callable[[], object]], hidden: Tensor, weight: Tensor, repeats: int
) -> dict[str, list[float]]:
    """Milliseconds of each contender, taken in turns of random order, the chip warmed up by products before each.

    The first turn does not count.
    """
    laps: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name in random.Random(turn).sample(list(contenders), len(contenders)):
            if hidden.is_cuda:
                warm_up(hidden.detach(), weight.detach())
            clock = StopWatch(hidden.device)
            clock.mark()
            contenders[name]()
            clock.mark()
            if turn:
                laps[name] += clock.laps_ms()
    return laps


def sample_truth(batch: Batch, logits: Tensor, count: int = 64) -> Truth:
    """The truth at ``count`` random tokens, a quarter of them prompt if there is any, and at the last token."""
    return truth_at(batch, logits, sampled_tokens(batch, count))


def truth_at(batch: Batch, logits: Tensor, token: Tensor) -> Truth:
    """Float64 log-probs, entropies and gradients of the given tokens."""
    return truth_of(batch, logits[token].double(), token)


@torch.enable_grad()
def truth_of(batch: Batch, z: Tensor, token: Tensor) -> Truth:
    """The truth from float64 logits of the given tokens."""
    slot = torch.full((batch.case.tokens,), -1, device=z.device)
    slot = slot.index_copy_(0, batch.rows.index, torch.arange(len(batch.rows), device=z.device))[token]
    scored = (slot >= 0)[:, None]
    z = z.requires_grad_()
    logp = torch.log_softmax(z, dim=-1)
    logprob = logp.gather(1, batch.labels[token].clamp_min(0)[:, None]).squeeze(1)
    entropy = -(logp.exp() * logp).sum(-1)
    g_logprob, g_entropy = (g[slot.clamp_min(0)].double() for g in (batch.g_logprob, batch.g_entropy))
    (by_logprob,) = torch.autograd.grad(logprob, z, g_logprob, retain_graph=True)
    (by_entropy,) = torch.autograd.grad(entropy, z, g_entropy)
    return Truth(
        token,
        slot,
        logprob.detach() * scored[:, 0],
        entropy.detach() * scored[:, 0],
        by_logprob * scored,
        by_entropy * scored,
        g_logprob.abs(),
        g_entropy.abs(),
        float(z.detach().abs().amax()),
    )


@torch.no_grad()
def compare(
    truth: Truth,
    logprob: Tensor,
    entropy: Tensor | None,
    gradient: Tensor | None,
    mode: Computed,
    d_weight: Tensor | None = None,
) -> Errors:
    """Distance of a provider's results to the truth; ``mode`` is the entropy that the provider computed.

    From hidden states ``gradient`` is d_hidden, and a log-prob without dimensions is compared with the mean.
    """
    scored, slot = truth.slot >= 0, truth.slot[truth.slot >= 0]
    if truth.linear is not None and logprob.dim() == 0:
        off_logprob = _largest(logprob.double() - truth.linear.mean)
    else:
        off_logprob = _largest(logprob[slot].double() - truth.logprob[scored])
    off_entropy = None
    if entropy is not None:
        off_entropy = _largest(entropy[slot].double() - truth.entropy[scored])
    if gradient is None:
        return Errors(off_logprob, off_entropy, None, None)
    wanted, upstream = truth.by_logprob, truth.g_logprob
    if mode == "grad":
        wanted, upstream = wanted + truth.by_entropy, upstream + truth.g_entropy * (1 + truth.entropy)
    if truth.linear is not None:
        off = gradient[truth.token].double() - wanted
        rows = _largest(off[scored].norm(dim=1) / wanted[scored].norm(dim=1))
        return Errors(off_logprob, off_entropy, _relative(off, wanted), rows, *_compare_weight(truth, d_weight, mode))
    off = (gradient[truth.token].double() - wanted).abs().amax(1)
    own = wanted.abs().amax(1)[scored]
    return Errors(off_logprob, off_entropy, _largest(off / upstream), _largest(off[scored] / own))


def _compare_weight(truth: Truth, d_weight: Tensor | None, mode: Computed) -> tuple[float | None, float | None]:
    if d_weight is None or truth.linear is None:
        return None, None
    part = truth.linear
    wanted = part.by_logprob + part.by_entropy if mode == "grad" else part.by_logprob
    off = d_weight[part.column].double() - wanted
    target, rest = (_relative(off[chosen], wanted[chosen]) for chosen in (part.is_target, ~part.is_target))
    return target, rest


def _relative(off: Tensor, wanted: Tensor) -> float:
    return float(off.norm() / wanted.norm()) if off.numel() else 0.0


def _largest(x: Tensor) -> float:
    # amax carries NaN through, so a NaN anywhere is an error of NaN, which passes no comparison.
    return float(x.abs().amax()) if x.numel() else 0.0


def sampled_tokens(batch: Batch, count: int) -> Tensor:
    """``count`` random tokens, a quarter of them prompt if there is any, and the last token."""
    generator = torch.Generator().manual_seed(batch.seed + 3)
    labels = batch.labels.cpu()
    prompt, scored = (labels < 0).nonzero().squeeze(1), (labels >= 0).nonzero().squeeze(1)
    parts = [(prompt, min(count // 4, len(prompt)))]
    parts.append((scored, min(count - parts[0][1], len(scored))))
    picked = [part[torch.randperm(len(part), generator=generator)[:n]] for part, n in parts]
    # An offset that wrapped around would first show in the last row.
    last = torch.tensor([batch.case.tokens - 1])
    return torch.cat([*picked, last]).unique().to(batch.labels.device)
