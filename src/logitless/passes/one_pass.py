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

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from logitless.call import Call
from logitless.errors import LogitlessError
from logitless.machine import FEW, MOVED, WAIT, pieces
from logitless.objectives import Inputs, Metrics, Objective, Preference
from logitless.objectives.metrics import Evaluate
from logitless.passes.back import Gradients
from logitless.passes.chunk import Chunk, empty_chunk
from logitless.passes.own_terms import RowGradients, differs, refused
from logitless.readings.outcomes import Sent
from logitless.route import Plan
from logitless.softmax import SKIP
from logitless.sources.linear import Projection
from logitless.sources.teachers import TeacherRows
from logitless.spec import TokenStats, has_values


@dataclass(frozen=True, eq=False)
class Outcome:
    """Loss, metrics, the rows' results, and the gradients for an upstream gradient of 1 (times the scale, if any)."""

    loss: Tensor
    metrics: Metrics
    stats: TokenStats
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
        teacher: the teacher's logits of all rows, what it sent of them, or None.
        watched: gradients of the chunks so far by what the terms are on, where a term of the caller's own goes in
            several chunks; else None.
    """

    p: Projection
    plan: Plan
    objective: Objective | Preference
    inputs: Inputs
    into: Gradients
    fresh: bool
    scale: Tensor | None
    float16: Float16Scale | None
    drop_zeros: bool
    teacher: TeacherRows | Sent | None = None
    watched: list[RowGradients] | None = None

    @staticmethod
    def over(
        p: Projection,
        plan: Plan,
        objective: Objective | Preference,
        inputs: Inputs,
        *,
        want: tuple[bool, bool, bool],
        weight_grad: Tensor | None,
        scale: Tensor | None,
        drop_zeros: bool,
        teacher: TeacherRows | Sent | None = None,
    ) -> OnePass:
        """With room for the gradients that are wanted; the weight's goes to ``weight_grad`` where that is given."""
        hidden, weight, bias = want
        into = weight_grad
        if weight and weight_grad is None:
            into = p.gain.new_empty(p.weight.shape)
            into[p.call.columns :].zero_()
        gradients = Gradients(
            # Kernels need a contiguous last dimension, which the caller's hidden states may not have.
            torch.empty_like(p.hidden, memory_format=torch.contiguous_format) if hidden else None,
            into if weight else None,
            p.gain.new_zeros(p.weight.shape[0]) if bias else None,
            None if p.low is None else p.gain.new_zeros(p.low.shape),
        )
        # A caller with a buffer of its own scales its float16 loss and looks for overflow itself.
        float16 = Float16Scale(gradients) if p.hidden.dtype == torch.float16 and weight_grad is None else None
        watched = [] if objective.own_terms and len(plan.chunks) > 1 else None
        fresh, inputs = weight_grad is None, inputs.readied(p.gain.dtype)
        return OnePass(p, plan, objective, inputs, gradients, fresh, scale, float16, drop_zeros, teacher, watched)

    def run(self) -> Outcome:
        """The objective of all rows, and the gradients."""
        p, chunks = self.p, self.plan.chunks
        if p.hidden.is_meta and len(chunks) > 3:
            # In a dry run only allocations count: the two largest chunks and the last one stand for all.
            chunks = (*sorted(chunks[:-1], key=lambda c: c[0] - c[1])[:2], chunks[-1])
        rows = self.teacher if isinstance(self.teacher, TeacherRows) else None
        chunk = empty_chunk(p, self.plan, rows)
        stats: dict[str, Tensor] = {}
        last, evaluate, full = None, None, True
        for i, (start, stop) in enumerate(chunks):
            if last is not None:
                # The next chunk reuses the memory of this dZ.
                self._multiply_head(*last, overwrite=self.fresh and i == 1)
                last = None
            ask = self.drop_zeros
            if i == len(chunks) - 1:
                # The CPU would wait with nothing launched ahead: only where chunks before this one had rows to drop.
                ask = ask and (not full if i else self._saves(stop - start))
            results, evaluate, last = self._work_off(chunk, start, stop, first=i == 0, ask=ask)
            full = full and last is not None and len(last.x) == stop - start
            if stop - start == len(p.hidden):
                stats = results
                continue
            for name, part in results.items():
                if name not in stats:
                    stats[name] = part.new_empty((len(p.hidden), *part.shape[1:]))
                stats[name][start:stop] = part
        if not chunks:
            self._zero(self.into.hidden)
        found = TokenStats(**(stats or self._nothing()))
        # Asked before the last product, which keeps the device busy while the answer travels.
        differing = self._differing(found)
        asked = None if differing is None or _capturing(differing) else _read_later(differing, None)
        # The caller's buffer is written to last: a failure before that leaves it untouched.
        evaluated = None if self.fresh or evaluate is None else evaluate()
        if last is not None:
            self._multiply_head(*last, overwrite=self.fresh and len(chunks) == 1)
        # After several chunks, loss and metrics are taken once more of all rows: the same bits for any chunks.
        evaluate = evaluate or functools.partial(self.objective.evaluate, self._inputs_with(found))
        loss, metrics = evaluated or evaluate()
        if asked is not None and asked():
            raise refused(self.objective, len(chunks))
        if differing is not None:
            # A CUDA graph cannot raise on replay, so a loss that would be wrong becomes NaN.
            loss = torch.where(differing, torch.nan, loss)
        scale = self.scale if self.float16 is None else self.float16.settle(chunks)
        return Outcome(loss.detach(), metrics, found, self.into, scale)

    def _nothing(self) -> dict[str, Tensor]:
        """The results of no rows, by name: those that the objective may have terms on."""
        taught = () if self.teacher is None else ("divergence", "teacher_logprob", "teacher_entropy")
        names = ("logprob", "entropy", "log_z", *self.objective.stats, *taught)
        return {name: self.p.gain.new_empty(0) for name in names}

    def _inputs_with(self, stats: TokenStats) -> Inputs:
        """The objective's inputs, with the results of all rows."""
        return with_results(self.objective, self.p.call, self.inputs, stats)

    def _differing(self, stats: TokenStats) -> Tensor | None:
        """0-dim bool, whether a term of the caller's own gives rows other gradients in chunks than over all rows; None
        where there is no such term, or nothing to compare."""
        if self.watched is None:
            return None
        at_once, _ = row_gradients(self.objective, self._inputs_with(stats))
        return differs(self.watched, at_once) if has_values(self.p.hidden) else None

    def _work_off(
        self, chunk: Chunk, start: int, stop: int, first: bool, ask: bool
    ) -> tuple[dict[str, Tensor], Evaluate | None, Factors | None]:
        """Results of a chunk of rows, whose hidden states get their gradient; what makes value and metrics of the
        objective, if the chunk is all rows; and the factors of the head's gradient.

        Args:
            first: whether it is the first chunk.
            ask: whether to ask for the number of rows with a gradient.
        """
        column, rows = self.p.column[start:stop], slice(start, stop)
        results, saved = chunk.look(start, stop)
        sent = self.teacher.cut(rows) if isinstance(self.teacher, Sent) else None
        stats, log_p = _outcomes(results, sent, self.p)
        whole = stop - start == len(self.p.hidden)
        part = self.inputs if whole else self.inputs.cut(start, stop, self.plan.whole_samples)
        part = with_results(self.objective, self.p.call, part, stats)
        found, evaluate = row_gradients(self.objective, part, check=first, whole=whole)
        if self.watched is not None:
            self.watched.append(found)
        scale = self.scale if self.float16 is None else self.float16.lower(*found.values())
        if scale is not None:
            found = {name: None if x is None else x * scale for name, x in found.items()}
        results = {name: x.detach() for name, x in stats._asdict().items() if x is not None}
        if not self.p.call.columns:
            self._zero(None if self.into.hidden is None else self.into.hidden[rows])
            return results, evaluate, None
        if log_p is not None:
            found = {**found, "ids_logprobs": _through_outcomes(stats, log_p, found)}
        counted, staying = None if part.complete else part.counted, None
        stays = matters(found) if counted is None else counted & matters(found)
        drop = ask and not _capturing(stays)
        # In a dry run no value says how many rows have a gradient; the call does.
        dry = None
        if stays.is_meta or isinstance(stays, FakeTensor):
            dry = round((stop - start) * (1 - self.p.call.dropped))
        number = _read_later(stays.sum(), dry) if drop else None
        if self.p.call.rows.mask is not None and counted is not None:
            # Rows of a mask may hold NaN: without a target their gradient is 0, and not 0 * NaN.
            column = torch.where(counted, column, SKIP)
        d_z = chunk.gradient(start, stop, column, saved, found)
        if number is not None:
            count = number()
            staying = _places(stays, count) if count <= (1 - FEW) * (stop - start) else None
            counted = None if count == stop - start else counted
        return results, evaluate, self._multiply(d_z, rows, staying, counted)

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
                p.times_whole_weight(d_z, self.plan.columns, rows)
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
        step, columns = self.plan.columns, p.call.columns
        slabs = [slice(0, columns)] if step >= columns else pieces(columns, step, p.hidden.is_meta)
        if into.bias is not None:
            for columns in slabs:
                p.add_rows(d_z[:, columns], into.bias[columns])
        if into.low is not None:
            for columns in slabs:
                p.add_low(d_z[:, columns], x, into.low[columns])
        if into.weight is not None:
            p.add_head(d_z, x, slabs, into.weight, add=not overwrite)

    def _zero(self, hidden: Tensor | None) -> None:
        """Nothing here has a gradient, and no product will write one."""
        if hidden is not None:
            hidden.zero_()
        if self.into.weight is not None and self.fresh:
            self.into.weight.zero_()

    def _saves(self, num_rows: int) -> bool:
        """Whether leaving out all rows of the only chunk saves more than it costs to ask for their number."""
        costs, operations = self.p.call.machine.costs, 4 * num_rows * self.p.call.columns * self.p.hidden.shape[1]
        return costs is None or operations > WAIT * costs.flops


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
        # The padding covers a chunk without rows, and rows without a gradient.
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


TERMS = ("logprob", "entropy", "log_z", "divergence", "mean_logit")
"""Results that a loss may have terms on."""


def matters(found: RowGradients) -> Tensor:
    """``[C]`` whether any of the gradients of a row is not 0."""
    first, *others = (x != 0 if x.dim() == 1 else (x != 0).any(1) for x in found.values() if x is not None)
    for flag in others:
        first = first | flag
    return first


def with_results(objective: Objective | Preference, call: Call, inputs: Inputs, stats: TokenStats) -> Inputs:
    """The inputs of an objective, with the results that its terms are on."""
    # Rows without a target have results of 0 already; rows of a mask have not, and further readings are not looked at.
    further = call.over_support or call.asked.teacher is not None or bool(objective.stats)
    clean = call.rows.mask is None and not further
    return replace(
        inputs if inputs._ready else inputs.readied(stats.logprob.dtype),
        logprob=stats.logprob,
        entropy=stats.entropy,
        log_z=stats.log_z if objective.log_z else None,
        mean_logit=stats.mean_logit if objective.stats else None,
        divergence=stats.divergence,
        _clean=clean,
    )


def row_gradients(
    objective: Objective | Preference, inputs: Inputs, check: bool = False, whole: bool = False
) -> tuple[RowGradients, Evaluate | None]:
    """Gradients of some rows' loss by what its terms are on; and what makes value and metrics, if they are ``whole``.

    Args:
        inputs: with the rows' results.
        check: raise if the loss depends on anything else that needs a gradient, and would not get it here.
        whole: whether these are all rows.
    """
    # Before there is a graph: a gradient of a row that does not count is not looked at.
    inputs = inputs if inputs._clean else inputs.cleaned()
    with torch.enable_grad():
        # An entropy without a term in the loss gets no gradient, as in two passes.
        named = {name: getattr(inputs, name) for name in TERMS if name != "entropy" or objective.entropy == "grad"}
        leaves = {name: x.detach().requires_grad_() for name, x in named.items() if x is not None}
        losses, weight, evaluate = objective.graded(replace(inputs, **leaves), measured=whole)
        found: RowGradients = {}
        if check and _depends_on_others(losses, list(leaves.values())):
            raise LogitlessError(
                "policy_loss: a term of the objective has parameters of its own, which get no gradient in one pass. "
                "Make the term a torch.nn.Module, or call objective(logprobs(...), rows, ...)."
            )
        if losses.requires_grad:
            by = torch.autograd.grad(losses, list(leaves.values()), weight, allow_unused=True)
            found = dict(zip(leaves, by, strict=True))
    found = {name: None if x is None else x.contiguous() for name, x in found.items()}
    if found.get("logprob") is None:
        found["logprob"] = torch.zeros_like(inputs.logprob)
    return {name: found.get(name) for name in TERMS}, evaluate if whole else None


def _outcomes(results: dict[str, Tensor], sent: Sent | None, p: Projection) -> tuple[TokenStats, Tensor | None]:
    """Results by name; of a teacher that sent K log-probs with the divergence, and the leaf that it is made from."""
    if sent is None:
        return TokenStats(**results), None
    with torch.enable_grad():
        leaf = results["ids_logprobs"].detach().requires_grad_()
        assert p.call.kind is not None
        divergence = sent.divergence(sent.over_outcomes(leaf), p.call.kind)
    rest = {name: x for name, x in results.items() if name != "ids_logprobs"}
    return TokenStats(**rest, divergence=divergence, **sent.own()), leaf


def _through_outcomes(stats: TokenStats, leaf: Tensor, found: RowGradients) -> Tensor | None:
    """Gradient of the student's log-probs of the outcomes, from that of the divergence."""
    by = found.get("divergence")
    if by is None or stats.divergence is None:
        return None
    (slope,) = torch.autograd.grad(stats.divergence, leaf, torch.ones_like(by), retain_graph=True)
    return torch.where(by[:, None] == 0, 0.0, by[:, None] * slope)


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
    here = torch.empty((), dtype=number.dtype, device="cpu", pin_memory=True).copy_(number, non_blocking=True)
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
