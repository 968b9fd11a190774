"""Which route a policy loss takes, in which chunks of rows, and why.

    one pass      3 products     the objective is evaluated on a chunk of rows while their logits are there
    two passes    4 products     log-probs of all rows first, then the objective, then the logits again
    support       0 products     log-probs over the sampler's support alone, then the objective
    given         0 products     logits exist, and are one chunk: looked at once

A teacher's logits are one product more in one pass, and two in two.

One pass needs every row that a row's loss depends on in the same chunk: any chunk will do for a token-level objective,
whole samples for a sequence-level one, whole pairs for one that compares samples. A chunk holds logits, or 16-bit
exponentials of twice as many rows. Decided from shapes, options, one memory budget and what work costs on the machine,
the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from logitless.call import MEMORY, Call
from logitless.call.call import apart_everywhere
from logitless.machine import ENOUGH, SLAB, Tiles
from logitless.objectives import Objective, Preference
from logitless.operands import Teacher, Teachers
from logitless.route.costs import LossShape, one_pass_seconds, two_pass_seconds
from logitless.route.plan import ONLY_SUPPORT, Plan, score_plan
from logitless.route.tiles import chunk_tiles, even_chunks, exponentials_row
from logitless.spec import parse_memory

WORTHWHILE = 0.97
"""Exponentials instead of logits cost dZ a second rounding, and two passes a fourth product: neither is chosen for less
than 3 % of the time."""

COPIED = 4
"""A quarter of the budget may hold copies of rows without the teacher's K ids."""


def plan_of(
    call: Call,
    hidden: Tensor,
    weight: Tensor,
    objective: Objective | Preference,
    teacher: Teacher | Teachers | None = None,
) -> LossPlan:
    """The decision for a checked call. What a budget cannot hold is refused here, before anything is sent."""
    needs = needs_gradient(hidden, weight, call.asked)
    if call.over_support:
        return LossPlan("support", (), False, 0, None, 0, ONLY_SUPPORT, choose_plan(call, needs))
    counts = objective.kept_together(call.rows.counts)
    shape = LossShape.of(
        counts,
        # The same chunks on every rank of a vocabulary group: all take part in the all_gather of each.
        call.mean_columns,
        weight.shape[1],
        dtype=call.dtype,
        logits_dtype=call.logits_dtype,
        machine=call.machine,
        bias=call.asked.bias is not None,
        capped=bool(call.squash),
        trained=weight.requires_grad,
        # Not from how the operands lie in memory, which the other ranks do not know.
        fused=apart_everywhere(call) is None,
    )
    if teacher is not None:
        members = (teacher,) if isinstance(teacher, Teacher) else teacher.members
        sizes = [x.hidden.shape[-1] for x in members if x.hidden is not None]
        width = sum(sizes) // max(1, len(sizes))
        shape = replace(shape, exponentials=False, beside=call.gain.dtype.itemsize, teacher=width)
    memory = call.memory
    if call.extras is not None:
        shape = replace(shape, exponentials=False)
        memory -= 0 if call.machine.elementwise else memory // COPIED
    unit = "sample" if len(counts) == len(call.rows.counts) else "pair"
    plan = choose_loss_plan(shape, objective.sequence_level, _obstacle(call, objective, teacher), memory, unit)
    if teacher is not None:
        first = None if plan.kind == "one pass" and any(needs) else pair_plan(call, needs)
        return replace(plan, taught=True, first=first)
    if call.extras is not None and plan.kind == "one pass" and not call.machine.elementwise:
        # The rest of a row is summed from a copy of some rows.
        plan = replace(plan, elementwise=max(1, call.memory // COPIED))
    if plan.tiles is not None and call.apart is None:
        plan = replace(plan, tiles=plan.tiles._replace(rows=plan.rows, columns=max(1, call.columns), fused=True))
    return plan if plan.kind == "one pass" and any(needs) else replace(plan, first=choose_plan(first_pass(call), needs))


def first_pass(call: Call) -> Call:
    """The call for log-probs alone, with the budget that is theirs."""
    return replace(call, memory=two_pass_memory(call.memory))


def _obstacle(call: Call, objective: Objective | Preference, teacher: Teacher | Teachers | None) -> str | None:
    """Why it must be two passes, whatever the sizes; or None."""
    cp = call.rows.cp
    if call.asked.kept is not None:
        return "log-probs over kept ids are not made chunk by chunk"
    if objective.stats:
        return "label smoothing needs the mean logit, which is not made chunk by chunk"
    if objective.modules:
        return "a term of the objective is a module, whose parameters get their gradient in backward"
    if objective.batch_level:
        return 'level="batch" asks for all rows at once'
    if call.asked.batch_invariant:
        return "batch_invariant=True fixes the tiles, and a chunk is none of them"
    if call.logits_dtype.itemsize < call.dtype.itemsize:
        return f"match= rounds the logits to {call.logits_dtype}, whose rows hold no gradient in {call.dtype}"
    if objective.sequence_level and cp is not None and cp.size > 1:
        return "the objective takes means over samples, and those are split over context-parallel ranks"
    if objective.sequence_level and isinstance(teacher, Teachers):
        return "the objective takes means over samples, and rows are grouped by their teachers"
    return None


def two_pass_memory(memory: int) -> int:
    """Working memory of ``linear_logprobs`` where it makes the first of two passes: its own default, at most."""
    return min(memory, parse_memory(Options().memory))


def choose_loss_plan(
    shape: LossShape, sequence_level: bool, obstacle: str | None, memory: int, unit: str = "sample"
) -> LossPlan:
    """One pass if nothing stands in its way, and the chunks that cost least.

    Args:
        obstacle: why it must be two passes, or None.
        unit: what a sequence-level objective needs whole.
    """
    sizes, longest = shape.sizes, max(shape.counts, default=0)
    work = int(memory * (1 - sizes.machine.elementwise))
    elementwise = max(1, int(memory * sizes.machine.elementwise)) if sizes.machine.elementwise else memory
    reason = "the loss of a row depends on " + (f"its own {unit}" if sequence_level else "nothing but its own log-prob")

    def one_pass(rows: int, tiles: Tiles | None) -> LossPlan:
        chunks = whole_samples(shape.counts, rows) if sequence_level else even_chunks(sum(shape.counts), rows)
        columns = SLAB if shape.widened else max(1, sizes.columns)
        return LossPlan("one pass", chunks, sequence_level, columns, tiles, elementwise, reason)

    rows = max(1, work // (max(1, sizes.columns) * (sizes.logits_bytes + shape.beside)))
    plan = one_pass(rows, None)
    if shape.exponentials and len(plan.chunks) > 1:
        tiles = chunk_tiles(sizes, memory)
        row_bytes = max(1, exponentials_row(sizes, tiles.columns))
        more = max(1, (work - tiles.rows * tiles.columns * sizes.logits_bytes) // row_bytes)
        other = one_pass(more, tiles)
        if (sequence_level and longest > rows) or _is_worthwhile(shape, plan, other, rows):
            plan, rows = other, more
    if obstacle is None and sequence_level and longest > rows:
        obstacle = (
            f"the objective takes means over samples, and the longest has {longest} rows where memory= holds {rows}"
            if unit == "sample"
            else f"the objective compares the samples of a pair, and the longest stretch of rows with whole pairs has "
            f"{longest} where memory= holds {rows}; it is shortest where the samples of a pair lie side by side"
        )
    costs = sizes.machine.costs
    if obstacle is None and costs is not None:
        one, two = one_pass_seconds(costs, shape, plan), two_pass_seconds(costs, shape, memory)
        if two < WORTHWHILE * one:
            obstacle = (
                f"one pass in the {len(plan.chunks)} chunks that memory= holds takes {one / two:.2f} times as long"
            )
    return plan if obstacle is None else LossPlan("two passes", (), False, 0, None, 0, obstacle)


def _is_worthwhile(shape: LossShape, logits: LossPlan, exponentials: LossPlan, rows: int) -> bool:
    """Whether chunks of exponentials beat chunks of so many rows of logits. Without costs, longer chunks do."""
    costs = shape.sizes.machine.costs
    if costs is None:
        return rows < min(shape.sizes.rows, ENOUGH)
    return one_pass_seconds(costs, shape, exponentials) < WORTHWHILE * one_pass_seconds(costs, shape, logits)


def whole_samples(counts: Sequence[int], most: int) -> tuple[tuple[int, int], ...]:
    """Chunks of consecutive samples, of at most ``most`` rows each.

    >>> whole_samples([3, 2, 4, 0, 1], 5)
    ((0, 5), (5, 10))
    """
    chunks, start, stop = [], 0, 0
    for count in counts:
        if stop + count - start > most:
            chunks.append((start, stop))
            start = stop
        stop += count
    return tuple(chunks if start == stop else [*chunks, (start, stop)])
