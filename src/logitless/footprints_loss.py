"""What is alive at the fullest moments of ``linear_policy_loss``: a chunk of rows, and gradients made in forward.

    forward     chunk [C, V]  +  d_hidden of the rows  +  d_weight in float32  +  work on the chunk, vectors of the rows
    backward    those gradients, and their scaled copies in the operands' dtype; then the scatter to all tokens

In two passes it is ``linear_logprobs`` with the objective's vectors beside it. Those are counted for named parts of an
:class:`Objective`; a function of the caller's own is taken to be as ``ppo_clip``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from logitless.backends.tiled import BLOCK
from logitless.footprints import (
    Item,
    Moment,
    Step,
    count_slabs,
    exponentials_work,
    filling_work,
    gathering_work,
    gradient_from_work,
    gradient_work,
    held_exponentials,
    in_backward,
    in_forward,
    merging,
    output,
    product_work,
    scattering,
    selected_rows,
    selecting,
    statistics_work,
)
from logitless.footprints_linear import linear_moments
from logitless.objectives import Objective
from logitless.policy_loss.one_pass import FEW, MOVED
from logitless.policy_loss.plan import LossPlan, LossShape, choose_loss_plan, find_obstacle, two_pass_memory

OWN_MEANS = {"ppo_clip": 3, "gspo": 4, "cispo": 3, "sapo": 1, "reinforce": 0}
"""Metrics that a policy term itself averages: clip fractions, mostly."""


class Loss(NamedTuple):
    """What a policy loss has beyond a :class:`Step`.

    Attributes:
        objective: what is minimised.
        counts: rows of each sample.
        dropped: share of the rows of each chunk whose gradient is zero.
    """

    objective: Objective
    counts: tuple[int, ...]
    dropped: float

    def plan(self, step: Step) -> LossPlan:
        """Which way ``linear_policy_loss`` goes."""
        dtypes = {"dtype": step.dtype, "logits_dtype": step.logits_dtype}
        # Sizes say nothing of context parallelism: samples are taken to be whole here.
        obstacle = find_obstacle(
            replay=step.kept is not None, invariant=step.batch_invariant, split_samples=False, **dtypes
        )
        shape = LossShape.of(
            self.counts, step.columns, on_gpu=step.on_gpu, bias=step.bias, capped=step.softcap, **dtypes
        )
        return choose_loss_plan(shape, self.objective.sequence_level, obstacle, step.memory)


def loss_moments(step: Step, plan: LossPlan, loss: Loss) -> Iterator[Moment]:
    """``linear_policy_loss``."""
    assert step.hidden is not None
    if plan.kind == "two passes" or not any(step.needs):
        yield from _two_passes(step, loss)
        return
    yield from _one_pass_forward(step, plan, loss)
    yield from _one_pass_backward(step)


# Vectors of the rows.


def _given(step: Step) -> int:
    """Bytes of a row while the call runs: a place for log-probs, whether it counts, its weight and gain; its plan."""
    return 4 + 1 + 8 + step.wide + (24 if step.rows is None else 0)


def count_means(objective: Objective) -> int:
    """How many metrics are averaged: the policy term's, then advantage, entropy, ratio and two estimates of KL, ..."""
    own = OWN_MEANS[objective.policy] if isinstance(objective.policy, str) else OWN_MEANS["ppo_clip"]
    more = (objective.dual_clip is not None) + (objective.kl_coef != 0) + 4 * (objective.correction is not None)
    return own + 5 + more


def _evaluating(step: Step, objective: Objective) -> int:
    """Bytes of a row while metrics are made: each of them, and three times in float64; and the cleaned fields."""
    return count_means(objective) * (24 + step.wide) + step.wide + 4 * len(objective.required)


# One pass.


def _one_pass_forward(step: Step, plan: LossPlan, loss: Loss) -> Iterator[Moment]:
    assert step.hidden is not None
    selected, wide = selected_rows(step), step.wide
    yield Moment("forward", (*selecting(step), *selected))
    # Column of the target, and three results.
    vectors = in_forward("vectors of each row", step.num_rows * (_given(step) + 8 + 3 * wide))
    held = (*_made_in_forward(step), *selected, vectors, _chunk(step, plan))
    yield Moment("forward", (*held, in_forward("work on the chunk", _chunk_work(step, plan, loss))))
    # Statistics and results of the last chunk are still there.
    last = 0 if not plan.chunks else plan.chunks[-1][1] - plan.chunks[-1][0]
    metrics = 9 * wide * last + step.num_rows * _evaluating(step, loss.objective)
    yield Moment("forward", (*held, in_forward("loss and metrics of all rows", metrics)))


def _made_in_forward(step: Step) -> list[Item]:
    """Gradients as they are kept for backward: of the rows, and sums over the chunks."""
    assert step.hidden is not None
    hidden, weight, bias = step.needs
    rows, depth = step.num_rows, step.hidden
    items = []
    if hidden:
        items.append(Item(f"d_hidden of the rows [{rows}, {depth}]", rows * depth * step.dtype.itemsize, "kept"))
    if weight and not step.weight_grad:
        size = step.columns * depth * step.wide
        items.append(Item(f"d_weight summed [{step.columns}, {depth}]", size, "kept"))
    if bias:
        items.append(Item(f"d_bias summed [{step.columns}]", step.columns * step.wide, "kept"))
    return items


def _chunk(step: Step, plan: LossPlan) -> Item:
    """The rows: their logits, or exponentials in the operands' dtype with a reference per slab."""
    rows, columns = plan.rows, step.columns
    if plan.tiles is None:
        return in_forward(f"chunk of logits [{rows}, {columns}]", rows * columns * step.logits_dtype.itemsize)
    size = held_exponentials(step, rows, plan.tiles)
    return in_forward(f"chunk of exponentials [{rows}, {columns}]", size)


def _chunk_work(step: Step, plan: LossPlan, loss: Loss) -> int:
    """The most that a line of a chunk allocates: its logits, statistics, dZ, or products.

    The objective on a chunk is none of them: on all rows, with metrics, it takes more.
    """
    rows, columns, memory, wide = plan.rows, step.columns, plan.elementwise, step.wide
    if not rows:
        return 0
    gathering = gathering_work(step, rows) if step.ranks else 0
    # Statistics (of this rank and of all), three results, log sum, mean; gradients, coefficients, column and mask.
    floats = (9 if not step.ranks else 13) + (5 if step.entropy == "grad" else 3)
    vectors = rows * (floats * wide + 9)
    products = vectors + _products_work(step, plan, loss)
    if plan.tiles is not None:
        return max(_tile_work(step, plan), rows * 4 * wide + gathering, vectors + _gradient_work(step, plan), products)
    return max(
        filling_work(step, rows, min(plan.columns, columns)),
        rows * 4 * wide + max(statistics_work(step, memory, rows, columns), gathering),
        vectors + gradient_work(step, memory, rows, columns),
        products,
    )


def _tile_work(step: Step, plan: LossPlan) -> int:
    """Of a sweep over the chunk: a tile, statistics of its slabs and of all rows, and what a line allocates."""
    assert plan.tiles is not None
    tiles = plan.tiles
    height, width, slabs = min(tiles.rows, plan.rows), min(tiles.columns, step.columns), count_slabs(step, tiles)
    held = tiles.rows * tiles.columns * step.logits_dtype.itemsize + 4 * step.wide * (slabs * height + plan.rows)
    return held + max(
        filling_work(step, height, width),
        exponentials_work(step, tiles.elementwise, height, width),
        merging(step, slabs, height) if slabs > 1 else 0,
    )


def _gradient_work(step: Step, plan: LossPlan) -> int:
    assert plan.tiles is not None
    return gradient_from_work(step, plan.tiles.elementwise, plan.rows, min(plan.tiles.columns, step.columns))


def _products_work(step: Step, plan: LossPlan, loss: Loss) -> int:
    """Of the two products of dZ: operands that are widened, a sum over slabs; and of moving the rows that stay."""
    assert step.hidden is not None
    depth, operand, want_hidden = step.hidden, step.dtype.itemsize, step.needs[0]
    rows, width = plan.rows, min(plan.columns, step.columns)
    moved, copied = 0, 0
    if loss.dropped > 0:
        copied = rows * depth * operand
    if loss.dropped >= FEW:
        rows = round(rows * (1 - loss.dropped))
        at_a_time = max(1, MOVED // max(1, step.columns * operand))
        # What was moved last is there until the next is.
        moved = min(rows, 2 * at_a_time) * step.columns * operand
        copied = rows * depth * operand * (2 if want_hidden else 1)
    summed = rows * depth * step.wide if want_hidden and width < step.columns else 0
    # Both products, and that of the logits, are of the same three matrices.
    return max(moved, copied + summed + product_work(step, rows, width, depth, step.wide))


def _one_pass_backward(step: Step) -> Iterator[Moment]:
    """One gradient after the other, scaled into a new tensor; then from rows to tokens."""
    assert step.hidden is not None
    operand, wide = step.dtype.itemsize, step.wide
    hidden, weight, bias = step.needs
    # On CPU a scaled block in float32, and its widened twin where it was made in half precision.
    narrow = 0 if operand == wide else wide
    made = _made_in_forward(step)
    done: list[Item] = []
    for name, wanted, count, depth, extra in (
        ("d_hidden", hidden, step.num_rows, step.hidden, narrow),
        ("d_weight", weight and not step.weight_grad, step.columns, step.hidden, 0),
        ("d_bias", bias, step.columns, 1, 0),
    ):
        if wanted:
            done.append(output(f"{name} [{count}, {depth}]", count * depth * operand))
            work = 0 if step.backend == "triton" else min(BLOCK, count) * depth * (wide + extra)
            yield Moment("backward", (*made, *done, in_backward("work of the backend", work)))
    if hidden:
        yield Moment("backward", (*made, *done[1:], *scattering(step)))


# Two passes.


def _two_passes(step: Step, loss: Loss) -> Iterator[Moment]:
    """The log-probs of all rows with a graph, the objective on all rows, and the graph's backward."""
    first = replace(step, memory=two_pass_memory(step.memory))
    given = in_forward("vectors of the objective", step.num_rows * _given(step))
    left: tuple[Item, ...] = ()
    for moment in linear_moments(first, first.plan()):
        if moment.phase == "forward":
            # At last, what forward leaves behind: results, and with a graph what that holds.
            left = tuple(item for item in moment.items if item.output or (item.phase == "kept" and any(step.needs)))
            moment = Moment("forward", (*moment.items, given))
        yield moment
    # Fields and ratio that the objective's own graph holds.
    graph = 3 * step.wide + 1 if any(step.needs) else 0
    metrics = in_forward("loss and metrics of all rows", step.num_rows * (_evaluating(step, loss.objective) + graph))
    yield Moment("forward", (*left, given, metrics))
