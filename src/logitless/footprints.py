"""What is alive at the fullest moments of a call, item by item, from sizes alone.

A call allocates in a fixed order, so its peak is the largest of a few moments: a tile under a kernel, a product of
matrices, the merge of the slabs, the rounding of an accumulator, the scatter into the gradient of all tokens. A path is
a function from a :class:`Step` to those moments: here what paths share, and the one from logits; those from hidden
states are in ``footprints_linear`` and ``footprints_loss``. Sizes of tiles come from ``plans`` and ``tiles``.

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
from logitless.backends.tiled import tile_shape
from logitless.from_hidden.plan import FIXED_ROWS, LinearPlan, Shape, Tiles, Wishes, choose_plan
from logitless.spec import EntropyMode

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
        wishes = Wishes.of(
            self.needs,
            entropy=self.entropy,
            operand_bytes=self.dtype.itemsize,
            capped=self.softcap,
            replay=self.kept is not None,
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


def results(step: Step) -> list[Item]:
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


def before_results(step: Step) -> Item:
    """While the sweep runs: column, gain and statistics; and a plan of the rows where the caller gave none."""
    plan = step.num_rows * 24 if step.rows is None else 0
    padded = step.padded_rows * (8 + step.wide) if step.batch_invariant else 0
    return in_forward(
        "vectors of each row", step.num_rows * (8 + step.wide) + step.padded_rows * 4 * step.wide + plan + padded
    )


def making_results(step: Step) -> Item:
    """While results are made: what is masked, and its unmasked twin."""
    plan = 0 if step.rows is not None else 16 if step.hidden is None else 24
    padded = step.padded_rows * (8 + step.wide) if step.batch_invariant else 0
    # The statistics of this shard beside those of all.
    own = 4 * step.wide if step.ranks else 0
    per_row = 1 + (3 if step.entropy == "value" else 2) * step.wide + own + plan
    return in_forward("vectors of each row", step.num_rows * per_row + padded)


def merging_statistics(step: Step) -> Iterator[Moment]:
    """The statistics of all ranks, gathered and merged; alone, those of the kept ids with the target's logit."""
    if step.ranks:
        work = in_forward("statistics of all ranks", gathering_work(step, step.num_rows))
    elif step.kept is not None:
        # Theirs (2) and a mask, stacked with the target's logit (4), and merged (10).
        work = in_forward("statistics of the kept ids", step.num_rows * (16 * step.wide + 1))
    else:
        return
    yield Moment("forward", (before_results(step), work, *_gathered(step), *selected_rows(step)))


def gathering_work(step: Step, rows: int) -> int:
    """Of one all_gather of the statistics of some rows, and their merge. Gloo works on a copy."""
    wide = step.wide
    gathered = step.ranks * rows * (4 if step.kept is None else 6) * wide
    work = merging(step, step.ranks, rows)
    if step.kept is not None:
        # This rank's part and the merged one, and the kept ids' stacked with the target's logit.
        work += rows * wide * (6 + 4 * step.ranks)
    return gathered + max(0 if step.on_gpu else gathered, work)


def _gathered(step: Step) -> list[Item]:
    """Kept logits stay until the end of forward where all of them are gathered at once."""
    if step.kept is None or step.hidden is not None:
        return []
    return [in_forward("kept logits", kept_logits(step) + 8 * step.num_rows)]


def merging(step: Step, parts: int, rows: int) -> int:
    """``softmax.merge``: four ``[parts, rows]`` temporaries and a mask, and as many of ``[rows]``."""
    return (4 * step.wide + 1) * (parts + 1) * rows


def coefficients(step: Step) -> Item:
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


def statistics_work(step: Step, memory: int, rows: int, columns: int) -> int:
    # Column (8), whether inside (1), target, m, s, w, and the four stacked.
    return _elementwise(step, memory, rows, columns, 9 + 9 * step.wide)


def gradient_work(step: Step, memory: int, rows: int, columns: int) -> int:
    # Column (8), whether inside (1), what is there and what replaces it.
    return _elementwise(step, memory, rows, columns, 9 + 2 * step.wide)


def _chunked(step: Step, memory: int, rows: int, columns: int, per_element: int) -> int:
    """Of the twins that ``tiled`` runs on some rows at a time."""
    if step.backend == "triton":
        return 0
    height = max(1, memory // (6 * max(1, columns) * step.wide))
    return min(rows, height) * columns * per_element


def count_slabs(step: Step, tiles: Tiles) -> int:
    return max(1, -(-step.columns // max(1, tiles.columns)))


def held_exponentials(step: Step, rows: int, tiles: Tiles) -> int:
    """Bytes of so many rows of exponentials, with a reference per slab."""
    return rows * (step.columns * step.dtype.itemsize + count_slabs(step, tiles) * step.wide)


def exponentials_work(step: Step, memory: int, rows: int, columns: int) -> int:
    # The statistics come with them: z, its distance to m, e, and two factors of w; under a softcap the slope.
    return _chunked(step, memory, rows, columns, (6 if step.softcap else 5) * step.wide)


def gradient_from_work(step: Step, memory: int, rows: int, columns: int) -> int:
    # The widened exponentials and their logarithm, dZ before and after, one term of it, and where the target is.
    return _chunked(step, memory, rows, columns, 5 * step.wide + 1)


def product_work(step: Step, m: int, k: int, n: int, out: int) -> int:
    """Of ``gemm.multiply``: on CPU, half-precision operands are widened and the product is rounded after."""
    if step.on_gpu or (step.dtype.itemsize == out == step.wide):
        return 0
    operands = 0 if step.dtype.itemsize == step.wide else (m * k + k * n) * step.wide
    return operands + m * n * step.wide


def filling_work(step: Step, rows: int, columns: int) -> int:
    """Of a tile's product: widened operands, and the tile in float32 where a bias is added before it is rounded."""
    assert step.hidden is not None
    if step.bias and step.logits_dtype.itemsize < step.wide:
        return rows * columns * step.wide + product_work(step, rows, step.hidden, columns, step.wide)
    return product_work(step, rows, step.hidden, columns, step.logits_dtype.itemsize)


# Kept ids. Flat vectors over all entries, most of them int64; gathered by sorting, written by scattering.


def kept_logits(step: Step) -> int:
    """Alive after ``kept_logits``: row, column, z, slope and three masks of each entry."""
    return step.entries * (2 * 8 + 2 * step.wide + 3)


def kept_gathering(step: Step) -> int:
    """Two integer vectors, their order, and a sort (on CUDA with an index and two buffers of its own); or the end."""
    sorting = 9 * 8 if step.on_gpu else 7 * 8
    index = 6 if step.hidden is None else 5
    return step.entries * max(sorting, index * 8 + 3 * step.wide + 4) + 8 * step.num_rows


def kept_writing(step: Step) -> int:
    """What is gathered; finished values, in the dtype of dZ too; integer vectors; old, new and chosen values."""
    operand = step.dtype.itemsize
    values = step.wide + (operand if operand < step.wide else 0)
    index = 4 if step.hidden is None else 3
    return kept_logits(step) + step.entries * (values + index * 8 + 1 + 3 * operand) + 8 * step.num_rows


# Hidden states of the rows, there and back.


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


def selecting(step: Step) -> list[Item]:
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


def regathering(step: Step) -> list[Item]:
    return [item._replace(phase="backward") for item in selecting(step) if item.name == "hidden of all ranks"]


def scattering(step: Step) -> list[Item]:
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


# The path from logits.


def logits_moments(step: Step) -> Iterator[Moment]:
    """``logprobs``."""
    rows, columns, memory = step.num_rows, step.columns, step.memory
    kernel = statistics_work(step, memory, rows, columns)
    yield Moment("forward", (before_results(step), in_forward("work of the backend", kernel)))
    if step.kept is not None:
        yield Moment("forward", (before_results(step), in_forward("kept logits", kept_gathering(step))))
    yield from merging_statistics(step)
    yield Moment("forward", (*results(step), making_results(step), *_gathered(step)))
    if not step.needs[0]:
        return
    # Which row of the plan each token is: Triton looks it up, the tiled backend marks the rest.
    if step.backend == "triton":
        kernel = 8 * (step.tokens + rows)
    else:
        kernel = gradient_work(step, memory, rows, columns)
    gradient = [] if step.overwrite else [output("d_logits", step.tokens * columns * step.dtype.itemsize)]
    held = (*results(step), *gradient, coefficients(step))
    yield Moment("backward", (*held, in_backward("work of the backend", kernel)))
    if step.kept is not None:
        kernel += kept_logits(step) + step.entries * step.wide
        # With a dense part, the targets' columns without the targets.
        work = max(kernel, kept_writing(step) + 8 * rows) if step.entropy == "grad" else kept_writing(step)
        yield Moment("backward", (*held, in_backward("work of the backend, and kept logits", work)))
