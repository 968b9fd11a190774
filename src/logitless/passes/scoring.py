"""The seam between passes and autograd: one Function for results over the vocabulary, whatever the logits come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from logitless.backends import load
from logitless.backends.contract import Problem
from logitless.call import PLAIN, Call, Operands
from logitless.errors import no_second_derivative
from logitless.notes import explained
from logitless.operands import Kept, Teacher, Teachers
from logitless.passes.back import Beside, gradients
from logitless.passes.chunk import LogitsChunk, empty_chunk
from logitless.passes.dropped import packed, staying_rows, unpacked
from logitless.passes.exponentials import Exponentials
from logitless.passes.frozen import Unit, lines_with_unit, unit_gradient
from logitless.passes.look import asked_of, find_rows, look_by_tiles, look_whole
from logitless.passes.pairs import look_at_pairs
from logitless.passes.terms import Terms, or_zeros
from logitless.passes.whole import teacher_rows
from logitless.readings.found import Asked, Found
from logitless.readings.ids import write_at_ids
from logitless.readings.reading import Row
from logitless.readings.support import Support
from logitless.route import Plan
from logitless.softmax import Normaliser
from logitless.sources.given import given_problem, gradient_buffer
from logitless.sources.linear import Projection, hidden_gradient, hidden_gradients, selected_rows
from logitless.sources.listed import spent
from logitless.sources.teachers import Seen, TeacherRows, best_here, in_place
from logitless.spec import IGNORE, TokenStats, untraced

DIFFERENTIABLE = ("logprob", "log_z", "divergence", "acceptance")
"""Results with a gradient; so have those of which a reading says so, and an entropy if it is asked for."""

PLACES: tuple[str, ...] = ("index", "target", "column", "gain", "kept_ids", "kept_lengths")
"""Tensors of a call that backward reads besides the operands: saved, so that a change in place is an error."""


def scored(call: Call, plan: Plan, operands: Operands) -> TokenStats:
    """``[R]`` results over the vocabulary of a call that was checked."""
    kept = call.kept
    places = (
        call.index,
        call.rows.target,
        call.column,
        call.gain,
        *((None, None) if kept is None else (kept.ids, kept.lengths)),
    )
    # Collectives, the bookkeeping of overwriting and readings beyond the softmax are not traced.
    plain = call.linear is None and call.group is None and not call.overwrite and call.table is None
    traced = plain and call.asked.teacher is None
    apply = _Score.apply if traced or not torch.compiler.is_compiling() else untraced(_with_backend)
    names = _names(call)
    values = apply(call, plan, names, *operands, *places)
    return TokenStats(**dict(zip(names, values, strict=True)))


def _with_backend(call: Call, *rest: Any) -> Any:
    """The Function behind a graph break: the call was resolved by a compiler, which loads no backend."""
    return _Score.apply(replace(call, backend=load(call.backend_name)), *rest)


def _names(call: Call) -> tuple[str, ...]:
    """The results of a call, in the order of :class:`TokenStats`."""
    if call.table is None and call.asked.teacher is None:
        return ("logprob", "entropy", "log_z") if call.entropy else ("logprob", "log_z")
    named = {"logprob", "log_z", *(("entropy",) if call.entropy else ())}
    if call.table is not None:
        named |= {name for reading in call.table.readings for name in reading.names}
    if call.taught:
        named |= {"divergence", "teacher_logprob", "teacher_entropy", *(("acceptance",) if call.accepts else ())}
        named |= {"teacher_top1_id" if name == "teacher_top1" else name for name in call.asked.stats}
    return tuple(name for name in TokenStats._fields if name in named)


class _Score(torch.autograd.Function):
    """The seam to autograd: plain functions of this folder do the work."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, plan: Plan, names: tuple[str, ...], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Results in the order of :class:`TokenStats`: the compiler takes no None among them."""
        operands, places = Operands(*tensors[:6]), dict(zip(PLACES, tensors[6:], strict=True))
        look = _look_given if operands.logits is not None else _look_hidden
        found, more = look(call, plan, operands, places)
        results = {name: found.results[name] for name in names}
        ctx.set_materialize_grads(False)
        graded = (*DIFFERENTIABLE, "entropy") if call.asked.entropy == "grad" else DIFFERENTIABLE
        graded = graded if call.table is None else (*graded, *call.table.differentiable)
        fixed = [x for name, x in results.items() if name not in graded]
        if fixed:
            ctx.mark_non_differentiable(*fixed)
        saved = {**found.saved, **more, **operands._asdict(), **places}
        if call.asked.entropy != "grad":
            saved.pop("mean", None)
        ctx.names = tuple(saved)
        ctx.save_for_backward(*saved.values())
        ctx.unchanged = None if torch.compiler.is_compiling() else call.unchanged()
        # weight_grad stays in the call: autograd would refuse a saved buffer that others add to before backward.
        ctx.call, ctx.plan, ctx.results, ctx.spent = call, plan, names, False
        # A leaf may ask for its gradient in another dtype; for anything else autograd keeps the tensor's own.
        logits, grad_dtype = operands.logits, None
        if logits is not None:
            asks = logits.is_leaf and not torch.compiler.is_compiling()
            grad_dtype = (getattr(logits, "grad_dtype", None) if asks else None) or logits.dtype
        ctx.grad_dtype = grad_dtype
        return tuple(results.values())

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        call: Call = ctx.call
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise no_second_derivative(call.caller, ", or use torch.log_softmax of computed logits for this term")
        if ctx.spent:
            raise spent(call.caller)
        needs = ctx.needs_input_grad[3:9]
        nothing = (None,) * (len(ctx.needs_input_grad) - 9)
        if not any(needs):
            return *(None,) * 9, *nothing
        if ctx.unchanged is not None:
            # Checked before autograd compares what it saved, because its error names no argument.
            ctx.unchanged.check()
        saved = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        operands = Operands(*(saved[name] for name in Operands._fields))
        up = dict(zip(ctx.results, upstream, strict=True))
        buffer = None if call.linear is None else call.linear.weight_grad
        over = operands.logits if call.overwrite else None
        with explained(call.caller, call.budget, weight_grad=buffer, logits=over):
            # From here on a failure may leave the logits half overwritten, so no second backward is allowed.
            ctx.spent = call.overwrite
            if operands.logits is not None:
                found = (_given_gradient(call, ctx.plan, operands.logits, saved, up, ctx.grad_dtype), *(None,) * 5)
            else:
                found = (None, *_hidden_gradients(call, ctx.plan, operands, saved, up, needs))
            return None, None, None, *found, *nothing


def _support(call: Call, places: Mapping[str, Tensor | None]) -> Support | None:
    """The sampler's support of each row, if there is one."""
    ids, lengths, target = (places[name] for name in ("kept_ids", "kept_lengths", "target"))
    if ids is None or lengths is None or target is None:
        return None
    return Support.of(Kept(ids, lengths), target, call.start, call.vocab_size)


def _row(call: Call, saved: Mapping[str, Any]) -> Row:
    return Row(Normaliser(saved["reference"], saved["log_sum"]), saved["target"], saved["gain"], call.squash)


# Logits that exist.


def _look_given(
    call: Call, plan: Plan, operands: Operands, places: Mapping[str, Any]
) -> tuple[Found, dict[str, Tensor]]:
    logits, support = operands.logits, _support(call, places)
    assert logits is not None
    problem = given_problem(logits, places["index"], places["column"], places["gain"], call)
    if not plan.taught:
        # torch.compile traces this branch, so it uses the tensors handed in and not those of the call.
        target, ignored = places["target"], None if call.found else places["target"] == IGNORE
        solver = call.backend_name if call.canonical else None
        asked = Asked(target, places["gain"], call.squash, ignored, call.entropy, call.group, call.table, solver)
        return look_whole(call, asked, problem, support, None), {}
    beside = _GivenTeacher.of(call, plan, problem, teacher_rows)
    if len(plan.chunks) == 1:
        return look_whole(call, asked_of(call), problem, None, beside.look(call, 0, call.num_rows, problem)), {}
    found = []
    for start, stop in plan.chunks:
        part, own = problem.cut(start, stop), asked_of(call, slice(start, stop))
        found.append(look_whole(call, own, part, None, beside.look(call, start, stop, part)))
    return Found.joined(found, call.num_rows), {}


def _given_gradient(
    call: Call, plan: Plan, logits: Tensor, saved: dict[str, Any], up: dict[str, Tensor | None], dtype: torch.dtype
) -> Tensor:
    """Gradient of the logits, in a buffer of its own or over them."""
    problem = given_problem(logits, saved["index"], saved["column"], saved["gain"], call)
    out, out_index = gradient_buffer(logits, saved["index"], problem, dtype, call.overwrite)
    terms = Terms.of(call, saved, up, _row(call, saved), _support(call, saved))
    beside = _GivenTeacher.of(call, plan, problem, TeacherRows.of)
    if len(plan.chunks) == 1:
        terms.write(call, problem, out, out_index, beside.rows(0, call.num_rows, problem))
        # Asked here: a compiler would trace the search for the backend.
        if terms.listed and terms.teacher is None:
            write_at_ids(call.backend, terms.coef, 0, call.columns, out, out_index)
        return logits.detach() if call.overwrite else out.view(logits.shape)
    for start, stop in plan.chunks:
        part, into, place = problem.cut(start, stop), out[start:stop], None
        if out_index is not None:
            # Indexed rows are written to a chunk of their own first, then copied to their places.
            into, place = out.new_empty((stop - start, out.shape[1])), torch.arange(stop - start, device=out.device)
        terms.cut(start, stop).write(call, part, into, place, beside.rows(start, stop, part))
        if out_index is not None:
            out.index_copy_(0, out_index[start:stop], into)
    if out_index is not None:
        # Rows that were not scored have gradient 0; with overwrite=True their logits still lie there.
        others = torch.ones(len(out), dtype=torch.bool, device=out.device).index_fill_(0, out_index, False)
        out.masked_fill_(others[:, None], 0.0)
    return logits.detach() if call.overwrite else out.view(logits.shape)


@dataclass(frozen=True, eq=False)
class _GivenTeacher:
    """The teacher's rows beside logits that exist: where they lie, or made for a chunk of rows at a time.

    Attributes:
        whole: all rows where they lie, or None.
        made, memory: the rows, and flat memory of a chunk of them; None where they lie somewhere, or without a teacher.
    """

    whole: Problem | None = None
    made: TeacherRows | None = None
    memory: Tensor | None = None

    @staticmethod
    def of(call: Call, plan: Plan, problem: Problem, rows: Callable[[Any, Call], TeacherRows]) -> _GivenTeacher:
        """The teacher of a call; ``rows`` makes its rows where they lie nowhere."""
        teacher = call.asked.teacher
        if not plan.taught or not isinstance(teacher, Teacher | Teachers):
            return _GivenTeacher()
        whole = in_place(teacher, problem, call)
        if whole is not None:
            return _GivenTeacher(whole)
        memory = problem.gain.new_empty(plan.rows * call.columns)
        return _GivenTeacher(None, rows(teacher, call), memory)

    def rows(self, start: int, stop: int, like: Problem) -> Problem | None:
        """The teacher's logits of rows ``start .. stop``; None without a teacher."""
        if self.whole is not None:
            return self.whole.cut(start, stop)
        if self.made is None or self.memory is None:
            return None
        return self.made.cut(start, stop).problem(self.memory, 0, like)

    def look(self, call: Call, start: int, stop: int, like: Problem) -> Seen | None:
        """The same, and what is read of the teacher besides."""
        if self.whole is not None:
            head, problem = getattr(call.asked.teacher, "head", None) or PLAIN, self.whole.cut(start, stop)
            best = best_here(problem, head.scale < 0, call) if "teacher_top1" in call.asked.stats else None
            return Seen(problem, best=best)
        if self.made is None or self.memory is None:
            return None
        return self.made.cut(start, stop).look(self.memory, like, call)


# Hidden states.


def _look_hidden(
    call: Call, plan: Plan, operands: Operands, places: Mapping[str, Any]
) -> tuple[Found, dict[str, Tensor]]:
    support = _support(call, places)
    p = Projection.of(selected_rows(operands, call), operands, places["column"], call, call.found_here)
    if plan.kind == "pair":
        return _look_pairs(p, plan)
    assert plan.forward is not None
    if plan.kind == "frozen":
        lines, unit = lines_with_unit(p, plan.forward, call.table)
        more = {"others": unit.others[: call.num_rows], "local": unit.local[: call.num_rows]}
        return find_rows(p, plan.forward, lines), more
    stored = Exponentials.empty(p, plan.kept_rows, plan.forward) if plan.kept_rows else None
    found = look_by_tiles(p, plan.forward, support, stored)
    return found, {} if stored is None else {"exponentials": stored.values, "references": stored.reference}


def _look_pairs(p: Projection, plan: Plan) -> tuple[Found, dict[str, Tensor]]:
    """Student and teacher side by side, in the kernel that multiplies both or in chunks of whole rows; with unit
    gradients of hidden rows, if the head has none."""
    call, teacher = p.call, p.call.asked.teacher
    assert isinstance(teacher, Teacher | Teachers)
    rows, fixed = teacher_rows(teacher, call), call.bits == "canonical" and bool(plan.chunks)
    if plan.forward is not None:
        return look_at_pairs(p, plan.forward, rows), {}
    if fixed:
        p, rows = p.padded(plan.rows), rows.padded(plan.rows)
    chunk = empty_chunk(p, plan, rows)
    assert isinstance(chunk, LogitsChunk)
    unit, found = p.hidden.new_zeros(p.hidden.shape) if plan.unit else None, []
    for start, stop in plan.chunks or ((0, 0),):
        found.append(chunk.look(start, stop))
        if unit is not None and stop > start and call.columns:
            up = {"divergence": p.gain.new_ones(stop - start)}
            d_z = chunk.gradient(start, stop, p.column[start:stop], found[-1].saved, up)
            p.times_whole_weight(d_z, plan.columns, unit[start:stop])
    return Found.joined(found, call.num_rows), {} if unit is None else {"unit": unit}


def _hidden_gradients(
    call: Call,
    plan: Plan,
    operands: Operands,
    saved: dict[str, Any],
    up: dict[str, Tensor | None],
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of hidden states, weight, bias and a LoRA's two factors."""
    linear, row = call.linear, _row(call, saved)
    assert linear is not None
    assert operands.hidden is not None
    if plan.kind == "frozen":
        # Unit gradients take the place of hidden rows, which are neither gathered nor multiplied again.
        p = Projection.of(saved["others"], operands, saved["column"], call, multiplied=False)
        g_logprob = or_zeros(up["logprob"], saved["logprob"])
        unit = Unit(saved["others"], saved["local"])
        rows = unit_gradient(p, unit, row.norm, saved["logprob"], g_logprob, up["log_z"])
        return hidden_gradient(rows, operands.hidden.shape, call), None, None, None, None
    by = up.get("divergence")
    if plan.unit and by is not None and all(x is None for name, x in up.items() if name != "divergence"):
        rows = torch.empty_like(saved["unit"])
        call.backend.rescale(saved["unit"], by.contiguous(), rows)
        return hidden_gradient(rows, operands.hidden.shape, call), None, None, None, None
    assert plan.backward is not None
    p = Projection.of(selected_rows(operands, call), operands, saved["column"], call, call.found_here)
    beside = _beside(p, plan, Terms.of(call, saved, up, row, _support(call, saved)), saved)
    _, hidden, weight, bias, y, _ = needs
    index = staying_rows(call, plan, saved, up)
    if index is not None:
        p, beside = packed(p, beside, index)
    found = gradients(p, plan.backward, beside, want=(hidden or y, weight, bias), weight_grad=linear.weight_grad)
    if index is not None:
        found = unpacked(found, index, call.num_rows)
    low = None if operands.y is None else operands.y.shape
    d_hidden, d_y = hidden_gradients(found.hidden, operands.hidden.shape, low, call, (hidden, y))
    return d_hidden, found.weight, found.bias, d_y, found.low


def _beside(p: Projection, plan: Plan, terms: Terms, saved: Mapping[str, Any]) -> Beside:
    """What lies beside the tiles of backward: the terms, and exponentials that forward stored, or the teacher."""
    assert plan.backward is not None
    if plan.kind == "pair":
        teacher = p.call.asked.teacher
        assert isinstance(teacher, Teacher | Teachers)
        memory = None
        if not plan.backward.fused:
            memory = p.empty((plan.backward.rows, plan.backward.columns), p.gain.dtype).view(-1)
        return Beside(terms, teacher=(TeacherRows.of(teacher, p.call), memory))
    if "exponentials" not in saved or plan.forward is None:
        return Beside(terms)
    return Beside(terms, Exponentials.of(p, saved["exponentials"], saved["references"], plan.forward))


def detached(stats: TokenStats) -> TokenStats:
    """The results without their graph."""
    return stats.each(lambda x: x.detach())
