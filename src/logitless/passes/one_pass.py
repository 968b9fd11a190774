"""A policy loss and its gradients while the logits pass by: three products instead of four.

    for each chunk of rows:
        X[rows] @ W.T                               float32 logits, or 16-bit exponentials of them (``chunks``)
        statistic -> log-prob, entropy              one all_gather if sharded
        objective, and its gradient by autograd     on [C] vectors: no loss is ever written as a kernel
        dZ in the chunk's own memory
        dX[rows] = dZ @ W,  dW += dZ.T @ X[rows]    dW in float32 over all chunks

The chunk is the one large buffer. Rows that the objective gives no gradient (clipped, zero advantage, masked) are
dropped between the statistic and the last two products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.backends.divergences import Divergence
from logitless.distill.listed import ListedChunk, ListedResults
from logitless.distill.pair import PairChunk, PairResults
from logitless.distill.source import Source
from logitless.distill.stats import DivergenceStats
from logitless.distill.teacher import TopK
from logitless.errors import LogitlessError
from logitless.from_hidden.gradients import Gradients
from logitless.from_hidden.projection import Projection
from logitless.machine import FEW, MOVED, pieces
from logitless.objectives import Inputs, Metrics, Objective, Preference
from logitless.policy_loss.chunks import Chunk, empty_chunk
from logitless.policy_loss.own_terms import differs, refused
from logitless.policy_loss.plan import LossPlan
from logitless.results import RowResults, row_results
from logitless.softmax import SKIP, coefficients
from logitless.spec import TokenStats, has_values


@dataclass(frozen=True, eq=False)
class Outcome:
    """Loss, metrics, the rows' results, and the gradients for an upstream gradient of 1 (times the scale, if any)."""

    loss: Tensor
    metrics: Metrics
    stats: TokenStats | DivergenceStats
    gradients: Gradients
    scale: Tensor | None


class Factors(NamedTuple):
    """dZ ``[C, V]`` of the rows of a chunk that are multiplied, in the chunk's memory, and their hidden states."""

    d_z: Tensor
    x: Tensor


@dataclass(frozen=True, eq=False)
class OnePass:
    """The loop over chunks.

    Attributes:
        p: all rows.
        plan: the chunks.
        objective, inputs: what is minimised, without log-probs and entropies.
        into: where the gradients go. Of hidden rows ``[R, D]`` in the operands' dtype, each row written once; of the
            weight ``[V, D]``, the bias ``[V]`` and a LoRA's b ``[V, r]`` in float32, added to.
        fresh: whether the weight's gradient holds nothing yet, so that the first product may overwrite it.
        scale: factor of all gradients, or None for 1.
        float16: the factor that float16 gradients are held by while they are made, or None.
        drop_zeros: ask the device which rows have a gradient at all, and multiply only those. Not while a CUDA graph is
            captured, whose replays may have others.
        taught: the teacher's logits or log-probs, and the divergence from them; None without a teacher.
        watched: gradients of the chunks so far by what the terms are on, where a term of the caller's own goes in
            several chunks; else None.
    """

    p: Projection
    plan: LossPlan
    objective: Objective | Preference
    inputs: Inputs
    into: Gradients
    fresh: bool
    scale: Tensor | None
    float16: Float16Scale | None
    drop_zeros: bool
    taught: tuple[Source | TopK, Divergence] | None = None
    watched: list[RowGradients] | None = None

    @staticmethod
    def over(
        p: Projection,
        plan: LossPlan,
        objective: Objective | Preference,
        inputs: Inputs,
        *,
        want: tuple[bool, bool, bool],
        weight_grad: Tensor | None,
        scale: Tensor | None,
        drop_zeros: bool,
        taught: tuple[Source | TopK, Divergence] | None = None,
    ) -> OnePass:
        """With room for the gradients that are wanted; the weight's goes to ``weight_grad`` where that is given."""
        hidden, weight, bias = want
        into = weight_grad
        if weight and weight_grad is None:
            into = p.gain.new_empty(p.weight.shape)
            into[p.call.columns :].zero_()
        gradients = Gradients(
            # Kernels take rows whose last dimension is contiguous, which those of the caller need not be.
            torch.empty_like(p.hidden, memory_format=torch.contiguous_format) if hidden else None,
            into if weight else None,
            p.gain.new_zeros(p.weight.shape[0]) if bias else None,
            None if p.low is None else p.gain.new_zeros(p.low.shape),
        )
        # A buffer's factor is the caller's, who scales losses in float16 and looks for overflow.
        float16 = Float16Scale(gradients) if p.hidden.dtype == torch.float16 and weight_grad is None else None
        watched = [] if objective.own_terms and len(plan.chunks) > 1 else None
        fresh = weight_grad is None
        return OnePass(p, plan, objective, inputs, gradients, fresh, scale, float16, drop_zeros, taught, watched)

    def run(self) -> Outcome:
        """The objective of all rows, and the gradients."""
        p, chunks = self.p, self.plan.chunks
        if p.hidden.is_meta:
            # Nothing is computed and only allocations count: the two largest chunks and the last stand for all.
            chunks = (*sorted(chunks, key=lambda c: c[0] - c[1])[:2], *chunks[-1:])
        chunk = self._empty_chunk()
        # Log-prob, entropy and log Z; with a teacher, also what is about the two.
        stats = [p.gain.new_empty(len(p.hidden)) for _ in range(len(DivergenceStats._fields) if self.taught else 3)]
        last, evaluated = None, None
        for i, (start, stop) in enumerate(chunks):
            if last is not None:
                # The memory of its dZ is needed again.
                self._multiply_head(*last, overwrite=self.fresh and i == 1)
                last = None
            results, evaluated, last = self._work_off(chunk, start, stop, first=i == 0)
            for whole, part in zip(stats, results, strict=True):
                if part is not None:
                    whole[start:stop] = part
        if not chunks:
            self._zero(self.into.hidden)
        stats = DivergenceStats(*stats) if self.taught else TokenStats(*stats)
        # Before the last product, so that the device has work while the answer is on its way.
        differing = self._differing(stats)
        asked = None if differing is None or _capturing(differing) else _read_later(differing, None)
        # As late as can be: in one chunk, nothing that fails leaves a part of a gradient in the caller's buffer.
        if last is not None:
            self._multiply_head(*last, overwrite=self.fresh and len(chunks) == 1)
        # Of several chunks, the value and the metrics once more on all rows: the same bits however rows were chunked.
        loss, metrics = evaluated or self.objective.evaluate(self._inputs_with(stats))
        if asked is not None and asked():
            raise refused(self.objective, len(chunks))
        if differing is not None:
            # A CUDA graph can fetch nothing: what its replay finds, it can only show.
            loss = torch.where(differing, torch.nan, loss)
        scale = self.scale if self.float16 is None else self.float16.settle(chunks)
        return Outcome(loss.detach(), metrics, stats, self.into, scale)

    def _inputs_with(self, stats: TokenStats | DivergenceStats) -> Inputs:
        """The objective's inputs, with the results of all rows."""
        log_z, divergence = stats.log_z if self.objective.log_z else None, getattr(stats, "divergence", None)
        of_rows = {"logprob": stats.logprob, "entropy": stats.entropy, "log_z": log_z, "divergence": divergence}
        return replace(self.inputs, **of_rows)

    def _differing(self, stats: TokenStats | DivergenceStats) -> Tensor | None:
        """0-dim bool, whether a term of the caller's own gives rows other gradients in chunks than over all rows; None
        where there is no such term, or nothing to compare."""
        if self.watched is None:
            return None
        at_once, _ = row_gradients(self.objective, self._inputs_with(stats), stats)
        return differs(self.watched, at_once) if has_values(self.p.hidden) else None

    def _empty_chunk(self) -> Chunk | PairChunk | ListedChunk:
        """Room for the largest chunk."""
        p, plan = self.p, self.plan
        if self.taught is None:
            return empty_chunk(p, plan)
        (teacher, kind), sizes = self.taught, (plan.rows, plan.columns, plan.elementwise)
        if isinstance(teacher, TopK):
            return ListedChunk.empty(p, teacher, kind, *sizes)
        return PairChunk.empty(p, teacher, kind, *sizes)

    def _work_off(
        self, chunk: Chunk | PairChunk | ListedChunk, start: int, stop: int, first: bool
    ) -> tuple[tuple[Tensor | None, ...], Evaluated | None, Factors | None]:
        """Results of a chunk of rows, whose hidden states get their gradient; value and metrics of the objective, if
        the chunk is all rows; and the factors of the head's gradient."""
        column, pair = self.p.column[start:stop], None
        if isinstance(chunk, PairChunk | ListedChunk):
            pair = chunk.results(start, stop)
            row, divergence, values = pair.row, pair.divergence, pair.vectors()[: len(DivergenceStats._fields)]
        else:
            row = row_results(chunk.statistics(start, stop), None, column == SKIP, True, self.p.call.group)
            divergence, values = None, row[:3]
        part = replace(self.inputs.cut(start, stop, self.plan.whole_samples), divergence=divergence)
        found, evaluated = row_gradients(self.objective, part, row, check=first, whole=stop - start == len(self.inputs))
        if self.watched is not None:
            self.watched.append(found)
        scale = self.scale if self.float16 is None else self.float16.lower(*found)
        if scale is not None:
            found = found.scaled(scale)
        coef = coefficients(row.logprob, row.norm, row.mean, *found[:3])
        if not self.p.call.columns:
            self._zero(None if self.into.hidden is None else self.into.hidden[start:stop])
            return values, evaluated, None
        counted, staying = part.counted, None
        stays = counted & found.matters
        drop = self.drop_zeros and not _capturing(stays)
        number = _read_later(stays.sum(), self._dry_number(stop - start)) if drop else None
        # Rows that do not count may hold anything: without a target they have no gradient, rather than 0 * NaN.
        column = torch.where(counted, column, SKIP)
        if isinstance(chunk, PairChunk):
            assert isinstance(pair, PairResults)
            d_z = chunk.gradient(start, stop, column, pair, found.by_divergence, coef)
        elif isinstance(chunk, ListedChunk):
            assert isinstance(pair, ListedResults)
            d_z = chunk.gradient(start, stop, column, pair, found.by_divergence, coef, found.logprob)
        else:
            d_z = chunk.gradient(start, stop, column, row.norm, coef)
        if number is not None:
            count = number()
            staying = _places(stays, count) if count <= (1 - FEW) * (stop - start) else None
            counted = None if count == stop - start else counted
        return values, evaluated, self._multiply(d_z, slice(start, stop), staying, counted)

    def _multiply(self, d_z: Tensor, chunk: slice, staying: Tensor | None, counted: Tensor | None) -> Factors:
        """The product for a chunk's hidden states; returns the factors of that for the head.

        Args:
            staying: the rows to multiply, or None for all.
            counted: ``[C]`` which rows count, or None if all do. Hidden states of the others are not read.
        """
        p, into = self.p, self.into
        x = p.hidden[chunk]
        d_x = None if into.hidden is None else into.hidden[chunk]
        if staying is not None:
            d_z, x = _packed(d_z, staying), x.index_select(0, staying)
        elif counted is not None:
            x = torch.where(counted[:, None], x, 0.0)
        if d_x is not None:
            rows = d_x if staying is None else torch.empty_like(x)
            if len(x):
                self._times_weight(d_z, rows)
            if staying is not None:
                d_x.zero_().index_copy_(0, staying, rows)
        return Factors(d_z, x)

    def _multiply_head(self, d_z: Tensor, x: Tensor, overwrite: bool) -> None:
        """The product for the head. The weight comes last: its gradient may go to the caller's buffer.

        Args:
            overwrite: whether d_weight holds nothing yet.
        """
        p, into = self.p, self.into
        if self.float16 is not None and not overwrite:
            self.float16.catch_up()
        if not len(x):
            if overwrite and into.weight is not None:
                into.weight.zero_()
            return
        slabs = pieces(p.call.columns, self.plan.columns, p.hidden.is_meta)
        if into.bias is not None:
            for columns in slabs:
                p.add_rows(d_z[:, columns], into.bias[columns])
        if into.low is not None:
            for columns in slabs:
                p.add_low(d_z[:, columns], x, into.low[columns])
        if into.weight is not None:
            for columns in slabs:
                p.multiply(d_z[:, columns].T, p.parts(x)[0], into.weight[columns], add=not overwrite)

    def _times_weight(self, d_z: Tensor, out: Tensor) -> None:
        """``out = d_z @ W``: in one product, or over slabs of columns in float32."""
        p = self.p
        if self.plan.columns >= p.call.columns:
            p.times_weight(d_z, slice(0, p.call.columns), out)
            return
        total = p.gain.new_empty(out.shape)
        for columns in pieces(p.call.columns, self.plan.columns, p.hidden.is_meta):
            p.times_weight(d_z[:, columns], columns, total, add=columns.start > 0)
        out.copy_(total)

    def _zero(self, hidden: Tensor | None) -> None:
        """Nothing here has a gradient, and no product will write one."""
        if hidden is not None:
            hidden.zero_()
        if self.into.weight is not None and self.fresh:
            self.into.weight.zero_()

    def _dry_number(self, num_rows: int) -> int | None:
        """In a dry run no value says how many rows have a gradient; the call does."""
        return round(num_rows * (1 - self.p.call.dropped)) if not has_values(self.p.hidden) else None


class Float16Scale:
    """The power of two that float16 gradients are held by: the largest upstream gradient so far is near 1.

    Weights of rows are as small as the number of tokens is large, ratios and advantages have no bound, and what a chunk
    brings is known only when it is there. So the factor falls where a chunk brings larger gradients, and what was made
    before is brought down to it.
    """

    def __init__(self, into: Gradients) -> None:
        self.into = into
        self.by_chunk: list[Tensor] = []

    def lower(self, *upstream: Tensor | None) -> Tensor:
        """The factor for a chunk with these upstream gradients."""
        sizes = torch.cat([x.abs().nan_to_num(0, 0, 0) for x in upstream if x is not None])
        # Also of no rows at all; and of rows without a gradient, which any factor will do for.
        largest = torch.nn.functional.pad(sizes, (0, 1), value=2.0**-100).max()
        scale = torch.exp2(-torch.log2(largest).floor())
        self.by_chunk.append(torch.minimum(scale, self.by_chunk[-1]) if self.by_chunk else scale)
        return self.by_chunk[-1]

    def catch_up(self) -> None:
        """Bring sums over the chunks before down to the factor of this one."""
        before, now = self.by_chunk[-2:]
        for total in (self.into.weight, self.into.bias, self.into.low):
            if total is not None and (not has_values(now) or bool(now != before)):
                total.mul_(now / before)

    def settle(self, chunks: Sequence[tuple[int, int]]) -> Tensor | None:
        """The factor of all gradients, after bringing the rows of every chunk down to it."""
        for (start, stop), scale in zip(chunks, self.by_chunk, strict=True):
            if self.into.hidden is not None:
                self.into.hidden[start:stop] *= self.by_chunk[-1] / scale
        return self.by_chunk[-1] if self.by_chunk else None


class RowGradients(NamedTuple):
    """``[C]`` gradients of a loss by what its terms are on; None where the objective has no such term."""

    logprob: Tensor
    entropy: Tensor | None
    log_z: Tensor | None
    divergence: Tensor | None = None

    @property
    def matters(self) -> Tensor:
        """``[C]`` whether any of them is not 0."""
        some = self.logprob != 0
        for x in self[1:]:
            some = some if x is None else some | (x != 0)
        return some

    @property
    def by_divergence(self) -> Tensor:
        """``[C]``, also of a loss without such a term."""
        return torch.zeros_like(self.logprob) if self.divergence is None else self.divergence

    def scaled(self, factor: Tensor) -> RowGradients:
        return RowGradients(*(x if x is None else x * factor for x in self))  # pyright: ignore[reportArgumentType]


Evaluated = tuple[Tensor, Metrics]
"""Value of an objective, 0-dim, and its metrics."""


def row_gradients(
    objective: Objective | Preference,
    inputs: Inputs,
    results: RowResults | TokenStats | DivergenceStats,
    check: bool = False,
    whole: bool = False,
) -> tuple[RowGradients, Evaluated | None]:
    """Gradients of some rows' loss by what its terms are on; and its value and metrics, if they are ``whole``.

    Args:
        inputs: with the rows' divergence, if there is a teacher.
        check: raise if the loss depends on anything else that needs a gradient, and would not get it here.
        whole: whether these are all rows.
    """
    with torch.enable_grad():
        logprob, entropy, divergence = results.logprob.detach().requires_grad_(), results.entropy, inputs.divergence
        assert entropy is not None
        leaves = {"logprob": logprob}
        if objective.entropy == "grad":
            leaves["entropy"] = entropy = entropy.detach().requires_grad_()
        if objective.log_z:
            assert results.log_z is not None
            leaves["log_z"] = results.log_z.detach().requires_grad_()
        if divergence is not None:
            leaves["divergence"] = divergence.detach().requires_grad_()
        inputs, evaluated = replace(inputs, **{"entropy": entropy, **leaves}), None
        if whole:
            loss, _ = evaluated = objective.evaluate(inputs)
        else:
            loss = objective.loss(inputs)
        found: dict[str, Tensor | None] = {}
        if check and _depends_on_others(loss, list(leaves.values())):
            raise LogitlessError(
                "linear_policy_loss: a term of the objective has parameters of its own, which get no gradient in one "
                "pass. Make the term a torch.nn.Module, or call objective(linear_logprobs(...), rows, ...)."
            )
        if loss.requires_grad:
            found = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))
    by = {name: x.contiguous() for name, x in found.items() if x is not None}
    by_logprob = by["logprob"] if "logprob" in by else torch.zeros_like(logprob)
    rest = (by.get(name) for name in ("entropy", "log_z", "divergence"))
    return RowGradients(by_logprob, *rest), evaluated


def _depends_on_others(loss: Tensor, leaves: list[Tensor]) -> bool:
    """Whether the graph of a loss ends in a leaf that is none of these."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and all(leaf is not x for x in leaves):
            return True
        nodes += [following for following, _ in node.next_functions]
    return False


def _capturing(x: Tensor) -> bool:
    """Whether work on it goes into a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _read_later(number: Tensor, dry: int | None) -> Callable[[], int]:
    """A number of the device, fetched while it goes on with what is launched until the number is asked for."""
    if dry is not None:
        return lambda: dry
    if not number.is_cuda:
        return lambda: int(number)
    here = torch.empty((), dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(number.device))

    def read() -> int:
        arrived.synchronize()
        return int(here)

    return read


def _places(stays: Tensor, count: int) -> Tensor:
    """``[count]`` places at which ``stays`` is true."""
    if not has_values(stays):
        return stays.new_empty(count, dtype=torch.int64)
    return stays.nonzero().squeeze(1)


def _packed(d_z: Tensor, staying: Tensor) -> Tensor:
    """The staying rows moved to the top, in place: rows only move up, so each is read before it is overwritten."""
    step = max(1, MOVED // max(1, d_z.shape[1] * d_z.element_size()))
    for some in pieces(len(staying), step, d_z.is_meta):
        d_z[some] = d_z.index_select(0, staying[some])
    return d_z[: len(staying)]
