"""A policy loss and its gradients while the logits pass by: three products instead of four.

    for each chunk of rows:
        X[rows] @ W.T                               float32 logits, or 16-bit exponentials of them (``chunks``)
        statistics -> log-prob, entropy             one all_gather if sharded
        objective, and its gradient by autograd     on [C] vectors: no loss is ever written as a kernel
        dZ in the chunk's own memory
        dX[rows] = dZ @ W,  dW += dZ.T @ X[rows]    dW in float32 over all chunks

The chunk is the one large buffer. Rows that the objective gives no gradient (clipped, zero advantage, masked) are
dropped between the statistics and the last two products.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from logitless.from_hidden.gemm import add_rows, multiply
from logitless.from_hidden.gradients import Gradients, Projection
from logitless.objectives import Inputs, Metrics, Objective
from logitless.policy_loss.chunks import Chunk, ExponentialsChunk, LogitsChunk
from logitless.policy_loss.plan import FILLING, LossPlan
from logitless.results import RowResults, row_results
from logitless.softmax import SKIP, coefficients
from logitless.spec import TokenStats

MOVED = 64 << 20
"""Bytes of dZ that are moved at a time when rows are dropped."""

FEW = 0.05
"""Share of a chunk's rows that is not worth dropping: moving the others costs more."""


@dataclass(frozen=True, eq=False)
class Accumulators:
    """Where the gradients go, chunk by chunk.

    Attributes:
        hidden: ``[R, D]`` in the operands' dtype, each row written once; or None.
        weight: ``[V, D]`` float32, added to; or None.
        bias: ``[V]`` float32, added to; or None.
        fresh: whether ``weight`` holds nothing yet, so that the first product may overwrite it.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    fresh: bool

    @staticmethod
    def make(p: Projection, want: tuple[bool, bool, bool], weight_grad: Tensor | None) -> Accumulators:
        hidden, weight, bias = want
        into = weight_grad
        if weight and weight_grad is None:
            into = p.gain.new_empty(p.weight.shape)
            into[p.columns :].zero_()
        return Accumulators(
            # Kernels take rows whose last dimension is contiguous, which those of the caller need not be.
            torch.empty_like(p.hidden, memory_format=torch.contiguous_format) if hidden else None,
            into if weight else None,
            p.gain.new_zeros(p.weight.shape[0]) if bias else None,
            fresh=weight_grad is None,
        )


@dataclass(frozen=True, eq=False)
class _Sweep:
    """What every chunk needs; see :func:`sweep_loss`."""

    p: Projection
    plan: LossPlan
    objective: Objective
    inputs: Inputs
    into: Accumulators
    scale: Tensor | None
    drop_zeros: bool
    group: Any


@dataclass(frozen=True, eq=False)
class Outcome:
    """Loss, metrics, the rows' results, and the gradients for an upstream gradient of 1 (times the scale)."""

    loss: Tensor
    metrics: Metrics
    stats: TokenStats
    gradients: Gradients


def sweep_loss(
    p: Projection,
    plan: LossPlan,
    objective: Objective,
    inputs: Inputs,
    *,
    want: tuple[bool, bool, bool],
    weight_grad: Tensor | None,
    scale: Tensor | None,
    drop_zeros: bool,
    group: Any,
) -> Outcome:
    """The objective of all rows, and gradients of hidden rows, weight and bias.

    Args:
        inputs: of the objective, without log-probs and entropies.
        want: which of the three gradients are wanted.
        weight_grad: float32 buffer to add the weight's gradient to.
        scale: factor of all gradients, or None for 1.
        drop_zeros: ask the device which rows have a gradient at all, and multiply only those.
        group: vocabulary group.
    """
    into = Accumulators.make(p, want, weight_grad)
    sweep = _Sweep(p, plan, objective, inputs, into, scale, drop_zeros, group)
    chunks, chunk = _allocate(p, plan, may_shrink=group is None)
    stats = TokenStats(*(p.gain.new_empty(p.num_rows) for _ in range(3)))
    for i, (start, stop) in enumerate(chunks):
        results = _work_off(sweep, chunk, start, stop, first=i == 0)
        for whole, part in zip(stats, results[:3], strict=True):
            if whole is not None and part is not None:
                whole[start:stop] = part
    if not chunks:
        _zero(into)
    # Once more on all rows, for the value and the metrics: on vectors, and the same bits however rows were chunked.
    loss, metrics = objective.evaluate(replace(inputs, logprob=stats.logprob, entropy=stats.entropy))
    return Outcome(loss.detach(), metrics, stats, Gradients(into.hidden, into.weight, into.bias))


def _work_off(s: _Sweep, chunk: Chunk, start: int, stop: int, first: bool) -> RowResults:
    """Results of a chunk of rows; their gradients go to the accumulators."""
    column = s.p.column[start:stop]
    results = row_results(chunk.statistics(start, stop), None, column == SKIP, True, s.group)
    part = s.inputs.cut(start, stop, s.plan.whole_samples)
    g_logprob, g_entropy = row_gradients(s.objective, part, results)
    if s.scale is not None:
        g_logprob, g_entropy = g_logprob * s.scale, None if g_entropy is None else g_entropy * s.scale
    coef = coefficients(results.logprob, results.norm, results.mean, g_logprob, g_entropy, None)
    if s.p.columns:
        counted, kept = part.counted, None
        matters = g_logprob != 0 if g_entropy is None else (g_logprob != 0) | (g_entropy != 0)
        stays = counted & matters
        number = _read_later(stays.sum()) if s.drop_zeros else None
        # Rows that do not count may hold anything: without a target they have no gradient, rather than 0 * NaN.
        d_z = chunk.gradient(start, stop, torch.where(counted, column, SKIP), results.norm, coef)
        if number is not None:
            count = number()
            kept = stays.nonzero().squeeze(1) if count <= (1 - FEW) * (stop - start) else None
            counted = None if count == stop - start else counted
        _multiply(s, d_z, slice(start, stop), kept, counted, overwrite=first and s.into.fresh)
    else:
        _zero(replace(s.into, hidden=None if s.into.hidden is None else s.into.hidden[start:stop]))
    return results


def _read_later(number: Tensor) -> Callable[[], int]:
    """A number of the device, fetched while it goes on with what is launched until the number is asked for."""
    if number.device.type != "cuda":
        return lambda: int(number)
    here = torch.empty((), dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(number.device))

    def read() -> int:
        arrived.synchronize()
        return int(here)

    return read


def row_gradients(objective: Objective, inputs: Inputs, results: RowResults) -> tuple[Tensor, Tensor | None]:
    """Gradients of some rows' loss by log-prob and, if the objective has an entropy term, by entropy."""
    with torch.enable_grad():
        logprob = results.logprob.detach().requires_grad_()
        entropy = results.entropy
        assert entropy is not None
        leaves = [logprob]
        if objective.entropy == "grad":
            entropy = entropy.detach().requires_grad_()
            leaves.append(entropy)
        loss = objective.loss(replace(inputs, logprob=logprob, entropy=entropy))
        grads = [None] * len(leaves)
        if loss.requires_grad:
            grads = list(torch.autograd.grad(loss, leaves, allow_unused=True))
    by_logprob = torch.zeros_like(logprob) if grads[0] is None else grads[0].contiguous()
    by_entropy = grads[1].contiguous() if len(grads) > 1 and grads[1] is not None else None
    return by_logprob, by_entropy


def _multiply(
    s: _Sweep, d_z: Tensor, chunk: slice, kept: Tensor | None, counted: Tensor | None, overwrite: bool
) -> None:
    """The two products of a chunk.

    Args:
        kept: the rows to multiply, or None for all.
        counted: ``[C]`` which rows count, or None if all do. Hidden states of the others are not read.
        overwrite: whether d_weight holds nothing yet.
    """
    p, plan, into = s.p, s.plan, s.into
    x = p.hidden[chunk]
    d_x = None if into.hidden is None else into.hidden[chunk]
    if kept is not None:
        d_z, x = _packed(d_z, kept), x.index_select(0, kept)
    elif counted is not None:
        x = torch.where(counted[:, None], x, 0.0)
    if d_x is not None:
        rows = d_x if kept is None else torch.empty_like(x)
        if len(x):
            _times_weight(p, plan, d_z, rows)
        if kept is not None:
            d_x.zero_().index_copy_(0, kept, rows)
    if not len(x):
        if overwrite and into.weight is not None:
            into.weight.zero_()
        return
    for c in range(0, p.columns, plan.columns):
        columns = slice(c, min(c + plan.columns, p.columns))
        if into.weight is not None:
            multiply(d_z[:, columns].T, x, into.weight[columns], add=not overwrite, tf32=p.tf32)
        if into.bias is not None:
            add_rows(d_z[:, columns], into.bias[columns])


def _times_weight(p: Projection, plan: LossPlan, d_z: Tensor, out: Tensor) -> None:
    """``out = d_z @ W``: in one product, or over slabs of columns in float32."""
    if plan.columns >= p.columns:
        multiply(d_z, p.weight[: p.columns], out, tf32=p.tf32)
        return
    total = p.gain.new_empty(out.shape)
    for c in range(0, p.columns, plan.columns):
        columns = slice(c, min(c + plan.columns, p.columns))
        multiply(d_z[:, columns], p.weight[columns], total, add=c > 0, tf32=p.tf32)
    out.copy_(total)


def _packed(d_z: Tensor, kept: Tensor) -> Tensor:
    """The kept rows moved to the top, in place: rows only move up, so each is read before it is overwritten."""
    step = max(1, MOVED // max(1, d_z.shape[1] * d_z.element_size()))
    for r in range(0, len(kept), step):
        moved = d_z.index_select(0, kept[r : r + step])
        d_z[r : r + len(moved)] = moved
    return d_z[: len(kept)]


def _allocate(p: Projection, plan: LossPlan, may_shrink: bool) -> tuple[tuple[tuple[int, int], ...], Chunk]:
    """The chunks and room for the largest. Out of memory, chunks are halved where no other rank would notice."""
    chunks = plan.chunks
    while True:
        rows = max((stop - start for start, stop in chunks), default=0)
        try:
            if plan.tiles is not None:
                return chunks, ExponentialsChunk.make(p, rows, plan.tiles)
            return chunks, LogitsChunk.make(p, rows, plan.columns, plan.elementwise)
        except torch.OutOfMemoryError:
            if not may_shrink or plan.whole_samples or rows <= FILLING:
                raise
            half = -(-rows // 2)
            warnings.warn(
                f"linear_policy_loss: out of memory for a chunk of {rows} rows of {p.columns} logits; going on with "
                f"{half} rows. A smaller memory= avoids the attempt.",
                stacklevel=2,
            )
            chunks = tuple((r, min(r + half, p.num_rows)) for r in range(0, p.num_rows, half))


def _zero(into: Accumulators) -> None:
    """What no product will write: nothing here has a gradient."""
    if into.hidden is not None:
        into.hidden.zero_()
    if into.weight is not None and into.fresh:
        into.weight.zero_()
