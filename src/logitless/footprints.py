"""What is alive at the fullest moments of a call, item by item, from sizes alone.

A call allocates in a fixed order, so its peak is the largest of a few moments: a tile under a kernel, a product of
matrices, the merge of the slabs, the rounding of an accumulator, the scatter into the gradient of all tokens. A path is
a function from a :class:`Step` to those moments. Sizes of tiles come from ``plans`` and ``tiles``, never from here.

Numbers written as bytes per row or per element count the temporaries of a few lines of torch, named beside them;
``tests/test_estimate.py`` holds every one to what the allocator says. A is the bytes of a float that sums (4, or 8).

What is not counted: what the caller holds (logits or hidden, weight, bias, targets, plan of the rows, upstream
gradients) and what a vendor library allocates once for good (cuBLAS's workspace).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from logitless.backends.contract import Problem, accumulation_dtype
from logitless.backends.tiled import BLOCK, tile_shape
from logitless.plans import FIXED_ROWS, LinearPlan, Wishes, choose_plan
from logitless.spec import EntropyMode
from logitless.tiles import Shape, Tiles

Phase = Literal["forward", "kept", "backward"]


class Item(NamedTuple):
    """Some bytes with a name.

    Attributes:
        name: what it is, with its shape where it has one.
        bytes: how many.
        phase: made and released in forward; made in forward and kept for backward or for the caller; made in backward.
        output: whether the caller gets it (results, gradients); otherwise it goes away by itself.
    """

    name: str
    bytes: int
    phase: Phase
    output: bool = False


class Moment(NamedTuple):
    """What is alive at one point of forward or backward."""

    phase: Literal["forward", "backward"]
    items: tuple[Item, ...]

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call, and its backward if any, as far as memory is concerned.

    Attributes:
        tokens, rows: T, and R of a plan of rows; None for every token in order, given as a tensor of targets.
        columns: V, columns of the vocabulary that live here.
        hidden: D, or None where the step starts from logits.
        dtype: of the logits, or of hidden and weight.
        logits_dtype: of a tile of logits from hidden.
        needs: whether hidden (or the logits), the weight and the bias need a gradient.
        bias, weight_grad: whether there is a bias, and a buffer for the weight's gradient.
        kept: number of kept ids of all rows together, or None.
        ranks: size of the vocabulary group; 0 where there is none.
        gloo: whether the collectives are gloo's, which works on copies.
    """

    tokens: int
    rows: int | None
    columns: int
    hidden: int | None
    dtype: torch.dtype
    logits_dtype: torch.dtype
    on_gpu: bool
    entropy: EntropyMode
    backend: str
    memory: int
    needs: tuple[bool, bool, bool] = (True, True, False)
    overwrite: bool = False
    softcap: bool = False
    bias: bool = False
    weight_grad: bool = False
    kept: int | None = None
    batch_invariant: bool = False
    ranks: int = 0
    sequence_parallel: bool = False

    @property
    def num_rows(self) -> int:
        return self.tokens if self.rows is None else self.rows

    @property
    def padded_rows(self) -> int:
        """Rows of the first sweep: those of whole tiles in batch-invariant mode."""
        return -(-self.num_rows // FIXED_ROWS) * FIXED_ROWS if self.batch_invariant else self.num_rows

    @property
    def wide(self) -> int:
        """A: bytes of a float that sums."""
        return accumulation_dtype(self.dtype).itemsize

    @property
    def entries(self) -> int:
        """Kept logits: the kept ids, and the target of each row."""
        return 0 if self.kept is None else self.kept + self.num_rows

    def plan(self) -> LinearPlan:
        """Which way ``linear_logprobs`` goes."""
        hidden, weight, bias = self.needs
        wishes = Wishes(
            hidden=hidden,
            weight=weight or bias,
            entropy_grad=self.entropy == "grad",
            replay=self.kept is not None,
            keepable=self.dtype.itemsize == 2 and not self.softcap,
            invariant=self.batch_invariant,
        )
        sizes = (self.logits_dtype.itemsize, self.dtype.itemsize, self.on_gpu)
        return choose_plan(Shape(self.num_rows, self.columns, *sizes), wishes, self.memory)


def in_forward(name: str, size: int) -> Item:
    return Item(name, size, "forward")


def in_backward(name: str, size: int) -> Item:
    return Item(name, size, "backward")


def output(name: str, size: int) -> Item:
    return Item(name, size, "backward", True)


# Vectors of the rows, which all paths share.


def _results(step: Step) -> list[Item]:
    """Log-prob, log Z, entropy; and what backward needs of a row: its column, gain, statistics, log sum, mean."""
    rows, wide = step.num_rows, step.wide
    results = rows * wide * (2 if step.entropy is None else 3)
    saved = rows * (8 + (3 if step.entropy == "grad" else 2) * wide) + step.padded_rows * 4 * wide
    if step.kept is not None:
        # Of the kept ids: their own statistics and log sum.
        saved += rows * 5 * wide
    if step.hidden is None and step.rows is None:
        saved += rows * 8
    return [Item("results of each row", results, "kept", True), Item("statistics of each row", saved, "kept")]


def _before_results(step: Step) -> Item:
    """While the sweep runs: column, gain and statistics; and a plan of the rows where the caller gave none."""
    plan = step.num_rows * 24 if step.rows is None else 0
    padded = step.padded_rows * (8 + step.wide) if step.batch_invariant else 0
    return in_forward(
        "vectors of each row", step.num_rows * (8 + step.wide) + step.padded_rows * 4 * step.wide + plan + padded
    )


def _making_results(step: Step) -> Item:
    """While results are made: what is masked, and its unmasked twin."""
    plan = 0 if step.rows is not None else 16 if step.hidden is None else 24
    padded = step.padded_rows * (8 + step.wide) if step.batch_invariant else 0
    # The statistics of this shard beside those of all.
    own = 4 * step.wide if step.ranks else 0
    per_row = 1 + (3 if step.entropy == "value" else 2) * step.wide + own + plan
    return in_forward("vectors of each row", step.num_rows * per_row + padded)


def _merging_ranks(step: Step) -> Iterator[Moment]:
    """The statistics of all ranks, gathered and merged."""
    if step.ranks:
        rows, wide = step.num_rows, step.wide
        gathered = step.ranks * rows * (4 if step.kept is None else 6) * wide
        merging = _merging(step, step.ranks, rows)
        if step.kept is not None:
            # This rank's part and the merged one, and the kept ids' stacked with the target's logit.
            merging += rows * wide * (6 + 4 * step.ranks)
        work = in_forward("statistics of all ranks", gathered + max(0 if step.on_gpu else gathered, merging))
        yield Moment("forward", (_before_results(step), work, *_gathered(step), *selected_rows(step)))


def _gathered(step: Step) -> list[Item]:
    """Kept logits stay until the end of forward where all of them are gathered at once."""
    if step.kept is None or step.hidden is not None:
        return []
    return [in_forward("kept logits", _kept_logits(step) + 8 * step.num_rows)]


def _merging(step: Step, parts: int, rows: int) -> int:
    """``softmax.merge``: four ``[parts, rows]`` temporaries and a mask, and as many of ``[rows]``."""
    return (4 * step.wide + 1) * (parts + 1) * rows


def _coefficients(step: Step) -> Item:
    count = 3 if step.entropy == "grad" else 2
    return in_backward("coefficients of each row", count * step.num_rows * step.wide)


# What a backend allocates inside a tile. Triton's kernels allocate nothing that grows.


def _elementwise(step: Step, memory: int, rows: int, columns: int, per_row: int) -> int:
    """Of ``tiled.statistics`` or ``gradient`` on a tile: two or three buffers, and some bytes per row of them."""
    if step.backend == "triton" or not rows or not columns:
        return 0
    logits, vector = torch.empty(0, dtype=step.logits_dtype, device="meta"), torch.empty(rows, device="meta")
    problem = Problem(logits, None, vector, vector, float(step.softcap), columns, True, memory)
    height, width = tile_shape(problem)
    buffers = 3 if step.softcap else 2
    parts = -(-columns // width)
    # Parts of a row that was cut wait for their merge.
    waiting = 0 if parts == 1 else parts * height * 4 * step.wide
    return height * (width * buffers * step.wide + per_row) + waiting


def _statistics(step: Step, memory: int, rows: int, columns: int) -> int:
    # Column (8), whether inside (1), target, m, s, w, and the four stacked.
    return _elementwise(step, memory, rows, columns, 9 + 9 * step.wide)


def _gradient(step: Step, memory: int, rows: int, columns: int) -> int:
    # Column (8), whether inside (1), what is there and what replaces it.
    return _elementwise(step, memory, rows, columns, 9 + 2 * step.wide)


def _chunked(step: Step, memory: int, rows: int, columns: int, per_element: int) -> int:
    """Of the twins that ``tiled`` runs on some rows at a time."""
    if step.backend == "triton":
        return 0
    height = max(1, memory // (6 * max(1, columns) * step.wide))
    return min(rows, height) * columns * per_element


def _exponentials(step: Step, memory: int, rows: int, columns: int) -> int:
    # The statistics come with them: z, its distance to m, e, and two factors of w; under a softcap the slope.
    return _chunked(step, memory, rows, columns, (6 if step.softcap else 5) * step.wide)


def _gradient_from(step: Step, memory: int, rows: int, columns: int) -> int:
    # The widened exponentials and their logarithm, dZ before and after, one term of it, and where the target is.
    return _chunked(step, memory, rows, columns, (7 if step.softcap else 5) * step.wide + 1)


def _product(step: Step, m: int, k: int, n: int, out: int) -> int:
    """Of ``gemm.multiply``: on CPU, half-precision operands are widened and the product is rounded after."""
    if step.on_gpu or (step.dtype.itemsize == out == step.wide):
        return 0
    operands = 0 if step.dtype.itemsize == step.wide else (m * k + k * n) * step.wide
    return operands + m * n * step.wide


# Kept ids. Flat vectors over all entries, most of them int64; gathered by sorting, written by scattering.


def _kept_logits(step: Step) -> int:
    """Alive after ``kept_logits``: row, column, z, slope and three masks of each entry."""
    return step.entries * (2 * 8 + 2 * step.wide + 3)


def _kept_gathering(step: Step) -> int:
    """Two integer vectors, their order, and a sort (on CUDA with an index and two buffers of its own); or the end."""
    sorting = 9 * 8 if step.on_gpu else 7 * 8
    index = 6 if step.hidden is None else 5
    return step.entries * max(sorting, index * 8 + 3 * step.wide + 4) + 8 * step.num_rows


def _kept_writing(step: Step) -> int:
    """What is gathered; finished values, in the dtype of dZ too; integer vectors; old, new and chosen values."""
    operand = step.dtype.itemsize
    values = step.wide + (operand if operand < step.wide else 0)
    index = 4 if step.hidden is None else 3
    return _kept_logits(step) + step.entries * (values + index * 8 + 1 + 3 * operand) + 8 * step.num_rows


# From logits.


def logits_moments(step: Step) -> Iterator[Moment]:
    """``logprobs``."""
    rows, columns, memory = step.num_rows, step.columns, step.memory
    kernel = _statistics(step, memory, rows, columns)
    yield Moment("forward", (_before_results(step), in_forward("work of the backend", kernel)))
    if step.kept is not None:
        yield Moment("forward", (_before_results(step), in_forward("kept logits", _kept_gathering(step))))
    yield from _merging_ranks(step)
    yield Moment("forward", (*_results(step), _making_results(step), *_gathered(step)))
    if not step.needs[0]:
        return
    # Which row of the plan each token is: Triton looks it up, the tiled backend marks the rest.
    if step.backend == "triton":
        kernel = 8 * (step.tokens + rows)
    else:
        kernel = _gradient(step, memory, rows, columns)
    gradient = [] if step.overwrite else [output("d_logits", step.tokens * columns * step.dtype.itemsize)]
    held = (*_results(step), *gradient, _coefficients(step))
    yield Moment("backward", (*held, in_backward("work of the backend", kernel)))
    if step.kept is not None:
        kernel += _kept_logits(step) + step.entries * step.wide
        # With a dense part, the targets' columns without the targets.
        work = max(kernel, _kept_writing(step) + 8 * rows) if step.entropy == "grad" else _kept_writing(step)
        yield Moment("backward", (*held, in_backward("work of the backend, and kept logits", work)))


# From hidden states.


def linear_moments(step: Step, plan: LinearPlan) -> Iterator[Moment]:
    """``linear_logprobs``."""
    assert step.hidden is not None
    yield from _linear_forward(step, plan)
    if plan.kind == "frozen":
        yield from _frozen_backward(step)
    elif plan.kind != "forward":
        yield from _linear_backward(step, plan)


def selected_rows(step: Step, phase: Phase = "forward") -> list[Item]:
    """Hidden states of the rows: a copy unless they are all rows in order, gathered first if split over ranks."""
    if step.hidden is None:
        return []
    row = step.hidden * step.dtype.itemsize
    if step.batch_invariant and phase == "forward":
        return [Item(f"hidden rows, padded [{step.padded_rows}, {step.hidden}]", step.padded_rows * row, phase)]
    if step.rows is not None:
        return [Item(f"hidden rows [{step.rows}, {step.hidden}]", step.rows * row, phase)]
    if step.sequence_parallel:
        return [Item(f"hidden of all ranks [{step.tokens}, {step.hidden}]", step.tokens * row, phase)]
    return []


def _selecting(step: Step) -> list[Item]:
    """The same while it is made: what it is made of is there too."""
    assert step.hidden is not None
    row = step.hidden * step.dtype.itemsize
    items = []
    if step.sequence_parallel:
        # Gloo gathers into a copy. Rows are selected when that is gone.
        gathered = step.tokens * (1 if step.on_gpu else 2)
        here = step.tokens if step.rows is None else step.rows
        more = gathered - here if step.rows is None else max(gathered - here, step.tokens)
        items.append(in_forward("hidden of all ranks", more * row))
    if step.batch_invariant and step.rows is not None:
        items.append(in_forward("hidden rows", step.rows * row))
    return items


def _space(step: Step, tiles: Tiles, phase: Phase) -> list[Item]:
    size = tiles.rows * tiles.columns * step.logits_dtype.itemsize
    return [Item(f"tile of logits [{tiles.rows}, {tiles.columns}]", size, phase)]


def _filling(step: Step, rows: int, columns: int) -> int:
    """Of a tile's product: widened operands, and the tile in float32 where a bias is added before it is rounded."""
    assert step.hidden is not None
    if step.bias and step.logits_dtype.itemsize < step.wide:
        return rows * columns * step.wide + _product(step, rows, step.hidden, columns, step.wide)
    return _product(step, rows, step.hidden, columns, step.logits_dtype.itemsize)


def _linear_forward(step: Step, plan: LinearPlan) -> Iterator[Moment]:
    assert step.hidden is not None
    tiles, rows, columns, memory = plan.forward, step.padded_rows, step.columns, plan.forward.elementwise
    height, width = min(tiles.rows, rows), min(tiles.columns, columns)
    slabs = max(1, -(-columns // max(1, tiles.columns)))
    selected, kept, space = selected_rows(step), [], _space(step, tiles, "forward")
    works = {"filling": _filling(step, height, width)}
    if plan.kind != "frozen" and plan.kept_rows < rows:
        works["statistics"] = _statistics(step, memory, min(height, rows - plan.kept_rows), width)
    if plan.kept_rows:
        size = plan.kept_rows * (columns * step.dtype.itemsize + slabs * step.wide)
        kept = [Item(f"exponentials [{plan.kept_rows}, {columns}]", size, "kept")]
        works["exponentials"] = _exponentials(step, memory, min(height, plan.kept_rows), width)
    if plan.kind == "frozen":
        kept = [Item(f"unit gradients [{rows}, {step.hidden}]", rows * step.hidden * step.dtype.itemsize, "kept")]
        sums = height * step.hidden * step.wide + tiles.rows * tiles.columns * step.dtype.itemsize
        space = [*space, in_forward(f"exponentials of the tile, sums [{height}, {step.hidden}]", sums)]
        works["exponentials"] = _exponentials(step, memory, height, width)
        rescaled = 0 if step.backend == "triton" else min(BLOCK, height) * step.hidden * step.wide
        works["sums"] = max(rescaled, _product(step, height, width, step.hidden, step.wide))
    parts = in_forward("statistics of the slabs", slabs * (4 if step.kept is None else 6) * height * step.wide)
    works["merging"] = _merging(step, slabs, height) if slabs > 1 else 0
    if step.kept is not None:
        works["kept"] = _kept_gathering(step)
        # Stacked, stacked again with the target's logit, and merged.
        works["merging"] = 6 * slabs * height * step.wide + _merging(step, slabs, height)
    held = (*kept, *selected, _before_results(step), *space, parts)
    yield Moment("forward", (*_selecting(step), *selected))
    yield Moment("forward", (*held, in_forward("work inside the tile", max(works.values()))))
    yield from _merging_ranks(step)
    yield Moment("forward", (*_results(step), *kept, *selected, _making_results(step)))


def _linear_backward(step: Step, plan: LinearPlan) -> Iterator[Moment]:
    assert step.hidden is not None
    tiles, rows, columns, depth = plan.backward, step.num_rows, step.columns, step.hidden
    want_hidden, want_weight, want_bias = step.needs
    operand, wide, block = step.dtype.itemsize, step.wide, min(plan.backward.block, step.num_rows)
    returned = want_weight and not step.weight_grad
    kept = _results(step)
    if plan.kept_rows:
        slabs = max(1, -(-columns // max(1, plan.forward.columns)))
        size = plan.kept_rows * (columns * operand + slabs * wide)
        kept.append(Item(f"exponentials [{plan.kept_rows}, {columns}]", size, "kept"))
    held = (*kept, _coefficients(step), *selected_rows(step, "backward"))
    yield Moment("backward", (*held, *_regathering(step)))
    deep = min(tiles.columns, columns) if tiles.slabs else columns
    d_z = in_backward(f"dZ [{block}, {tiles.columns if tiles.slabs else columns}]", block * operand * deep)
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
    work = in_backward("work inside the tile", _backward_work(step, plan, block, deep))
    yield Moment("backward", (*held, *_space(step, tiles, "backward"), d_z, *sums, *slab, work))
    yield Moment("backward", (*held, *rounded))
    if want_hidden:
        others = [item for item in rounded if item.output and not item.name.startswith("d_hidden")]
        yield Moment("backward", (*held, *others, *_scattering(step)))


def _backward_work(step: Step, plan: LinearPlan, block: int, width: int) -> int:
    """The most that filling a tile, its kernel, or one of the two products after it allocates."""
    assert step.hidden is not None
    tiles, depth = plan.backward, step.hidden
    want_hidden, want_weight, _ = step.needs
    height, across = min(tiles.rows, block), min(tiles.columns, step.columns)
    operand, wide = step.dtype.itemsize, step.wide
    works = [0]
    kept = 0 if step.kept is None else _kept_logits(step) + step.entries * wide
    if plan.kept_rows < step.num_rows:
        height = min(height, step.num_rows - plan.kept_rows)
        works += [_filling(step, height, across), _gradient(step, tiles.elementwise, height, across) + kept]
    if plan.kept_rows:
        works.append(_gradient_from(step, tiles.elementwise, min(block, plan.kept_rows), across))
    if step.kept is not None:
        works.append(_kept_writing(step))
    if want_hidden:
        works.append(_product(step, block, width, depth, wide if tiles.slabs else operand))
    if want_weight:
        direct = tiles.slabs and not step.weight_grad and step.num_rows <= tiles.block
        works.append(_product(step, width, block, depth, operand if direct else wide))
    return max(works)


def _regathering(step: Step) -> list[Item]:
    return [item._replace(phase="backward") for item in _selecting(step) if item.name == "hidden of all ranks"]


def _scattering(step: Step) -> list[Item]:
    """From the gradient of the rows to that of the tokens, and of this rank's tokens."""
    assert step.hidden is not None
    row = step.hidden * step.dtype.itemsize
    rows = in_backward(f"d_hidden of the rows [{step.num_rows}, {step.hidden}]", step.num_rows * row)
    if step.rows is None and not step.sequence_parallel:
        return [rows._replace(output=True)]
    tokens = output(f"d_hidden [{step.tokens}, {step.hidden}]", step.tokens * row)
    if not step.sequence_parallel:
        return [rows, tokens]
    part = output(f"d_hidden [{step.tokens // step.ranks}, {step.hidden}]", step.tokens // step.ranks * row)
    copies = 1 if step.on_gpu else 2
    tokens = in_backward(f"d_hidden of all ranks [{step.tokens}, {step.hidden}]", copies * step.tokens * row)
    return [*([] if step.rows is None else [rows]), tokens, part]


def _frozen_backward(step: Step) -> Iterator[Moment]:
    """A row scale, and the weight's rows at the targets."""
    assert step.hidden is not None
    rows, depth = step.num_rows, step.hidden
    unit = Item(f"unit gradients [{step.padded_rows}, {depth}]", step.padded_rows * depth * step.dtype.itemsize, "kept")
    held = (*_results(step), unit)
    # Five numbers per row (g_Z, at_target, share, a, b), the column, and two masks.
    vectors = in_backward("coefficients of each row", rows * (5 * step.wide + 10))
    # Of ``tiled.mix``: both terms and their sum; on CPU, half precision is widened in a copy before it is multiplied.
    narrow = step.dtype.itemsize if step.dtype.itemsize < step.wide and not step.on_gpu else 0
    work = 0 if step.backend == "triton" else min(BLOCK, rows) * depth * (3 * step.wide + narrow)
    chunk = in_backward("work of the backend", work)
    gradient = output(f"d_hidden of the rows [{rows}, {depth}]", rows * depth * step.dtype.itemsize)
    yield Moment("backward", (*held, vectors, gradient, chunk))
    yield Moment("backward", (*held, *_scattering(step)))
