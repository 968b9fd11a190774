"""Which route a policy loss takes, in which chunks of rows, and why.

    one pass      3 products     the objective is evaluated on a chunk of rows while their logits are there
    two passes    4 products     log-probs of all rows first, then the objective, then the logits again
    support       0 products     log-probs over the sampler's support alone, then the objective

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
from logitless.machine import ENOUGH, SLAB, Tiles
from logitless.objectives import Objective, Preference
from logitless.operands import Teacher, Teachers
from logitless.operands.teacher import regrouped
from logitless.route.costs import LossShape, one_pass_seconds, two_pass_seconds
from logitless.route.pairs import pair_apart, pair_row, stored_apart, sums_apart
from logitless.route.plan import ONLY_SUPPORT, Plan, score_plan
from logitless.route.tiles import chunk_tiles, even_chunks, exponentials_row
from logitless.spec import parse_memory

WORTHWHILE = 0.97
"""Exponentials instead of logits cost dZ a second rounding, and two passes a fourth product: neither is chosen for less
than 3 % of the time."""

HIDDEN = parse_memory(MEMORY["hidden"])
"""Bytes of working memory that log-probs get where there are two passes."""

COPIED = 4
"""A quarter of the budget may hold copies of rows without the teacher's K ids."""


def loss_plan(call: Call, objective: Objective | Preference) -> Plan:
    """The decision for a checked call. What a budget cannot hold is refused here, before anything is sent."""
    if call.over_support:
        return Plan("support", ONLY_SUPPORT, first=score_plan(call))
    linear, taught = call.linear, call.taught
    if linear is None:
        return Plan("two passes", "logits exist, and nothing is multiplied again", first=score_plan(call))
    counts = objective.kept_together(call.rows.counts)
    columns = call.columns if call.group is None else call.mean_columns
    shape = LossShape.of(
        counts,
        # Every rank of a vocabulary group has the same chunks, since each chunk is one all_gather.
        columns,
        call.width,
        dtype=call.dtype,
        logits_dtype=call.logits_dtype,
        machine=call.machine,
        bias=linear.bias is not None,
        capped=bool(call.squash),
        trained=call.needs[1],
        # Strides differ from rank to rank, so the choice does not look at them.
        fused=call.apart_everywhere is None,
    )
    if taught:
        sizes = [x.hidden.shape[-1] for x in call.teachers if x.hidden is not None]
        width = sum(sizes) // max(1, len(sizes))
        paired = pair_row(call, width, stored=True) if stored_apart(call) is None else 0
        coupled = (sums_apart(call) is None, pair_apart(call) is None)
        beside = call.gain.dtype.itemsize
        shape = replace(shape, exponentials=False, beside=beside, teacher=width, paired=paired, coupled=coupled)
    memory = call.memory
    if call.table is not None or call.kept is not None:
        shape = replace(shape, exponentials=False)
    rest = call.table is not None and call.table.rest and not call.machine.elementwise
    memory -= memory // COPIED if rest else 0
    unit = "sample" if len(counts) == len(call.rows.counts) else "pair"
    plan = choose_loss_plan(shape, objective.sequence_level, _obstacle(call, objective), memory, unit)
    products = 3 + taught if plan.kind == "one pass" else 4 + 2 * taught
    plan = replace(plan, taught=taught, products=products)
    if rest and plan.kind == "one pass":
        # The sum over all ids but those listed works on a copy of some rows.
        plan = replace(plan, elementwise=max(1, call.memory // COPIED))
    if plan.tiles is not None and taught:
        plan = replace(plan, tiles=plan.tiles._replace(rows=plan.rows, fused=pair_apart(call) is None))
    elif plan.tiles is not None and call.apart is None:
        plan = replace(plan, tiles=plan.tiles._replace(rows=plan.rows, columns=max(1, call.columns), fused=True))
    done = plan.kind == "one pass" and any(call.needs)
    return plan if done else replace(plan, first=score_plan(first_pass(call), whole=True))


def first_pass(call: Call) -> Call:
    """The call for log-probs alone, with the budget that is theirs."""
    return call if call.linear is None or call.taught else replace(call, memory=min(call.memory, HIDDEN))


def _obstacle(call: Call, objective: Objective | Preference) -> str | None:
    """Why it must be two passes, whatever the sizes; or None."""
    cp, linear = call.rows.cp, call.linear
    if call.kept is not None and call.asked.teacher is not None:
        return "the divergence over kept ids is made of single logits of all rows"
    if objective.modules:
        return "a term of the objective is a module, whose parameters get their gradient in backward"
    if objective.batch_level:
        return 'level="batch" asks for all rows at once'
    if linear is not None and linear.bits == "canonical":
        return 'bits="canonical" fixes the products, and that of a chunk is none of them'
    if call.logits_dtype.itemsize < call.dtype.itemsize:
        return f"match= rounds the logits to {call.logits_dtype}, whose rows hold no gradient in {call.dtype}"
    if objective.sequence_level and cp is not None and cp.size > 1:
        return "the objective takes means over samples, and those are split over context-parallel ranks"
    teacher = call.asked.teacher
    if objective.sequence_level and isinstance(teacher, Teacher | Teachers) and regrouped(teacher):
        return "the objective takes means over samples, and rows are in the order of their teachers or of its tokens"
    return None


def choose_loss_plan(
    shape: LossShape, sequence_level: bool, obstacle: str | None, memory: int, unit: str = "sample"
) -> Plan:
    """One pass if nothing stands in its way, and the chunks that cost least.

    Args:
        obstacle: why it must be two passes, or None.
        unit: what a sequence-level objective needs whole.
    """
    sizes, longest = shape.sizes, max(shape.counts, default=0)
    work = int(memory * (1 - sizes.machine.elementwise))
    elementwise = max(1, int(memory * sizes.machine.elementwise)) if sizes.machine.elementwise else memory
    reason = "the loss of a row depends on " + (f"its own {unit}" if sequence_level else "nothing but its own log-prob")

    def one_pass(rows: int, tiles: Tiles | None) -> Plan:
        chunks = whole_samples(shape.counts, rows) if sequence_level else even_chunks(sum(shape.counts), rows)
        columns = SLAB if shape.widened else max(1, sizes.columns)
        return Plan(
            "one pass",
            reason,
            chunks=chunks,
            whole_samples=sequence_level,
            columns=columns,
            tiles=tiles,
            elementwise=elementwise,
        )

    rows = max(1, work // (max(1, sizes.columns) * (sizes.logits_bytes + shape.beside)))
    tiles = None
    if shape.paired:
        rows = max(1, work // shape.paired)
        tiles = Tiles(rows, max(1, sizes.columns), rows, elementwise, fused=True)
    plan = one_pass(rows, tiles)
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
        one = one_pass_seconds(costs, shape, plan.chunks, plan.tiles)
        two = two_pass_seconds(costs, shape, memory if shape.beside else min(memory, HIDDEN))
        if two < WORTHWHILE * one:
            obstacle = (
                f"one pass in the {len(plan.chunks)} chunks that memory= holds takes {one / two:.2f} times as long"
            )
    return plan if obstacle is None else Plan("two passes", obstacle)


def _is_worthwhile(shape: LossShape, logits: Plan, exponentials: Plan, rows: int) -> bool:
    """Whether chunks of exponentials beat chunks of so many rows of logits. Without costs, longer chunks do."""
    costs = shape.sizes.machine.costs
    if costs is None:
        return rows < min(shape.sizes.rows, ENOUGH)
    few, many = (one_pass_seconds(costs, shape, x.chunks, x.tiles) for x in (logits, exponentials))
    return many < WORTHWHILE * few


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
