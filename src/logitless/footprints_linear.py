"""What is alive at the fullest moments of ``linear_logprobs``: a tile of logits, what is kept, and the gradients."""

from __future__ import annotations

from collections.abc import Iterator

from logitless.backends.tiled import BLOCK
from logitless.footprints import (
    Item,
    Moment,
    Phase,
    Step,
    before_results,
    coefficients,
    count_slabs,
    exponentials_work,
    filling_work,
    gradient_from_work,
    gradient_work,
    held_exponentials,
    in_backward,
    in_forward,
    kept_gathering,
    kept_logits,
    kept_writing,
    making_results,
    merging,
    merging_statistics,
    output,
    product_work,
    regathering,
    results,
    scattering,
    selected_rows,
    selecting,
    statistics_work,
)
from logitless.from_hidden.plan import LinearPlan, Tiles


def linear_moments(step: Step, plan: LinearPlan) -> Iterator[Moment]:
    """``linear_logprobs``."""
    assert step.hidden is not None
    yield from _linear_forward(step, plan)
    if plan.kind == "frozen":
        yield from _frozen_backward(step)
    elif plan.kind != "forward":
        yield from _linear_backward(step, plan)


def _space(step: Step, tiles: Tiles, phase: Phase) -> list[Item]:
    size = tiles.rows * tiles.columns * step.logits_dtype.itemsize
    return [Item(f"tile of logits [{tiles.rows}, {tiles.columns}]", size, phase)]


def _linear_forward(step: Step, plan: LinearPlan) -> Iterator[Moment]:
    assert step.hidden is not None
    tiles, rows, columns, memory = plan.forward, step.padded_rows, step.columns, plan.forward.elementwise
    height, width = min(tiles.rows, rows), min(tiles.columns, columns)
    slabs = count_slabs(step, tiles)
    selected, kept, space = selected_rows(step), [], _space(step, tiles, "forward")
    works = {"filling": filling_work(step, height, width)}
    if plan.kind != "frozen" and plan.kept_rows < rows:
        works["statistics"] = statistics_work(step, memory, min(height, rows - plan.kept_rows), width)
    if plan.kept_rows:
        size = held_exponentials(step, plan.kept_rows, tiles)
        kept = [Item(f"exponentials [{plan.kept_rows}, {columns}]", size, "kept")]
        works["exponentials"] = exponentials_work(step, memory, min(height, plan.kept_rows), width)
    if plan.kind == "frozen":
        kept = [Item(f"unit gradients [{rows}, {step.hidden}]", rows * step.hidden * step.dtype.itemsize, "kept")]
        sums = height * step.hidden * step.wide + tiles.rows * tiles.columns * step.dtype.itemsize
        space = [*space, in_forward(f"exponentials of the tile, sums [{height}, {step.hidden}]", sums)]
        works["exponentials"] = exponentials_work(step, memory, height, width)
        rescaled = 0 if step.backend == "triton" else min(BLOCK, height) * step.hidden * step.wide
        works["sums"] = max(rescaled, product_work(step, height, width, step.hidden, step.wide))
    parts = in_forward("statistics of the slabs", slabs * (4 if step.kept is None else 6) * height * step.wide)
    works["merging"] = merging(step, slabs, height) if slabs > 1 else 0
    if step.kept is not None:
        works["kept"] = kept_gathering(step)
        # Stacked, stacked again with the target's logit, and merged.
        works["merging"] = 6 * slabs * height * step.wide + merging(step, slabs, height)
    held = (*kept, *selected, before_results(step), *space, parts)
    yield Moment("forward", (*selecting(step), *selected))
    yield Moment("forward", (*held, in_forward("work inside the tile", max(works.values()))))
    yield from merging_statistics(step)
    yield Moment("forward", (*results(step), *kept, *selected, making_results(step)))


def _linear_backward(step: Step, plan: LinearPlan) -> Iterator[Moment]:
    assert step.hidden is not None
    tiles, rows, columns, depth = plan.backward, step.num_rows, step.columns, step.hidden
    want_hidden, want_weight, want_bias = step.needs
    operand, wide, block = step.dtype.itemsize, step.wide, min(plan.backward.block, step.num_rows)
    returned = want_weight and not step.weight_grad
    kept = results(step)
    if plan.kept_rows:
        size = held_exponentials(step, plan.kept_rows, plan.forward)
        kept.append(Item(f"exponentials [{plan.kept_rows}, {columns}]", size, "kept"))
    held = (*kept, coefficients(step), *selected_rows(step, "backward"))
    yield Moment("backward", (*held, *regathering(step)))
    width = min(tiles.columns, columns)
    d_z = in_backward(f"dZ [{block}, {tiles.columns}]", block * operand * width)
    sums, rounded = [], []
    for name, count, wanted, finished in (
        ("d_hidden", rows, want_hidden, not tiles.slabs),
        ("d_weight", columns, returned, tiles.slabs),
    ):
        if wanted:
            exact = output(f"{name} [{count}, {depth}]", count * depth * operand)
            whole = in_backward(f"{name} in float32 [{count}, {depth}]", count * depth * wide)
            sums.append(exact if finished or operand == wide else whole)
            rounded += [exact] if finished or operand == wide else [whole, exact]
    if want_bias:
        sums.append(output(f"d_bias [{columns}]", columns * wide))
        rounded.append(output(f"d_bias [{columns}]", columns * (wide if operand == wide else wide + operand)))
    slab = []
    if tiles.slabs and returned and rows > tiles.block:
        slab = [in_backward(f"a slab of d_weight in float32 [{tiles.columns}, {depth}]", tiles.columns * depth * wide)]
    if not tiles.slabs and want_hidden and operand < wide:
        slab = [in_backward(f"a block of d_hidden in float32 [{block}, {depth}]", block * depth * wide)]
    work = in_backward("work inside the tile", _backward_work(step, plan, block, width))
    yield Moment("backward", (*held, *_space(step, tiles, "backward"), d_z, *sums, *slab, work))
    yield Moment("backward", (*held, *rounded))
    if want_hidden:
        others = [item for item in rounded if item.output and not item.name.startswith("d_hidden")]
        yield Moment("backward", (*held, *others, *scattering(step)))


def _backward_work(step: Step, plan: LinearPlan, block: int, width: int) -> int:
    """The most that filling a tile, its kernel, or one of the two products after it allocates."""
    assert step.hidden is not None
    tiles, depth = plan.backward, step.hidden
    want_hidden, want_weight, _ = step.needs
    height, across = min(tiles.rows, block), min(tiles.columns, step.columns)
    operand, wide = step.dtype.itemsize, step.wide
    works = [0]
    kept = 0 if step.kept is None else kept_logits(step) + step.entries * wide
    if plan.kept_rows < step.num_rows:
        height = min(height, step.num_rows - plan.kept_rows)
        works += [filling_work(step, height, across), gradient_work(step, tiles.elementwise, height, across) + kept]
    if plan.kept_rows:
        works.append(gradient_from_work(step, tiles.elementwise, min(block, plan.kept_rows), across))
    if step.kept is not None:
        works.append(kept_writing(step))
    if want_hidden:
        works.append(product_work(step, block, width, depth, wide))
    if want_weight:
        direct = tiles.slabs and not step.weight_grad and step.num_rows <= tiles.block
        works.append(product_work(step, width, block, depth, operand if direct else wide))
    return max(works)


def _frozen_backward(step: Step) -> Iterator[Moment]:
    """A row scale, and the weight's rows at the targets."""
    assert step.hidden is not None
    rows, depth = step.num_rows, step.hidden
    unit = Item(f"unit gradients [{step.padded_rows}, {depth}]", step.padded_rows * depth * step.dtype.itemsize, "kept")
    held = (*results(step), unit)
    # Five numbers per row (g_Z, at_target, share, a, b), the column, and two masks.
    vectors = in_backward("coefficients of each row", rows * (5 * step.wide + 10))
    # Of ``tiled.mix``: both terms and their sum; on CPU, half precision is widened in a copy before it is multiplied.
    narrow = step.dtype.itemsize if step.dtype.itemsize < step.wide and not step.on_gpu else 0
    work = 0 if step.backend == "triton" else min(BLOCK, rows) * depth * (3 * step.wide + narrow)
    chunk = in_backward("work of the backend", work)
    gradient = output(f"d_hidden of the rows [{rows}, {depth}]", rows * depth * step.dtype.itemsize)
    yield Moment("backward", (*held, vectors, gradient, chunk))
    yield Moment("backward", (*held, *scattering(step)))
