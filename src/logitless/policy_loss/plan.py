"""Which way a policy loss goes from hidden states, in which chunks of rows, and why.

    one pass      3 products     the objective is evaluated on a chunk of rows while their logits are there
    two passes    4 products     log-probs of all rows first, then the objective, then the logits again

One pass needs every row that a row's loss depends on in the same chunk: any chunk will do for a token-level objective,
whole samples for a sequence-level one. Decided from shapes, options and one memory budget, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from logitless.call import Options
from logitless.from_hidden.plan import Shape, Tiles, chunk_tiles, exponentials_row
from logitless.spec import parse_memory

FILLING = 128
"""Rows of a chunk are a multiple of this where there are that many: what a matrix unit takes at a time."""

ENOUGH = 4096
"""Rows of logits that are better than twice as many rows of exponentials. With fewer, the weight's gradient is read and
written so often that the longer chunk wins: at D = 4096 on an H200, 109 ms against 114 for 3328 and 1664 rows in 1 GiB,
but 103 against 101 for 8192 and 4096 in 2.4 GiB."""

SLAB = 4096
"""Columns of a product where operands must be widened first, which copies them."""


@dataclass(frozen=True)
class LossPlan:
    """The decision.

    Attributes:
        kind: which of the two ways.
        chunks: ``(start, stop)`` of each chunk of rows; none in two passes.
        whole_samples: whether chunks are whole samples.
        columns: of one product.
        tiles: of logits, by which a chunk of exponentials is filled; None where the chunk holds the logits.
        elementwise: bytes of working space for the plain-torch backend.
        reason: why, in a sentence.
    """

    kind: Literal["one pass", "two passes"]
    chunks: tuple[tuple[int, int], ...]
    whole_samples: bool
    columns: int
    tiles: Tiles | None
    elementwise: int
    reason: str

    @property
    def rows(self) -> int:
        """Of the largest chunk."""
        return max((stop - start for start, stop in self.chunks), default=0)

    def __str__(self) -> str:
        if self.kind == "two passes":
            return f"two passes: 4 matrix products, because {self.reason}."
        samples = " of whole samples" if self.whole_samples else ""
        held = "logits"
        if self.tiles is not None:
            held = f"16-bit exponentials, by tiles of {self.tiles.rows} x {self.tiles.columns} logits"
        return (
            f"one pass: 3 matrix products, because {self.reason}. {len(self.chunks)} chunks{samples}, of at most "
            f"{self.rows} rows of {held}."
        )


@dataclass(frozen=True)
class LossShape:
    """What the decision depends on.

    Attributes:
        counts: rows of each sample.
        sizes: of the logits that are never stored. Its columns are those of the vocabulary here, or the mean over a
            vocabulary group: the same on all of its ranks.
        exponentials: whether a chunk may hold 16-bit exponentials instead of wider logits. Not under a softcap.
        widened: whether a product copies its operands.
    """

    counts: tuple[int, ...]
    sizes: Shape
    exponentials: bool
    widened: bool

    @staticmethod
    def of(
        counts: tuple[int, ...],
        columns: int,
        *,
        dtype: torch.dtype,
        logits_dtype: torch.dtype,
        on_gpu: bool,
        bias: bool,
        capped: bool,
    ) -> LossShape:
        """From what a call is asked for: operands of ``dtype``, with a bias or without, with a softcap or without."""
        return LossShape(
            counts=counts,
            sizes=Shape(sum(counts), columns, logits_dtype.itemsize, dtype.itemsize, on_gpu),
            exponentials=dtype.itemsize < logits_dtype.itemsize and not capped,
            widened=(dtype.itemsize == 2 and not on_gpu) or (bias and logits_dtype.itemsize == 2),
        )


def find_obstacle(
    *,
    replay: bool,
    invariant: bool,
    dtype: torch.dtype,
    logits_dtype: torch.dtype,
    split_samples: bool,
) -> str | None:
    """Why it must be two passes, whatever the sizes; or None.

    Args:
        replay, invariant: whether there are kept ids, and ``batch_invariant=True``.
        split_samples: whether the objective takes means over samples of which other ranks hold a part.
    """
    if replay:
        return "log-probs over kept ids are not made chunk by chunk"
    if invariant:
        return "batch_invariant=True fixes the tiles, and a chunk is none of them"
    if logits_dtype.itemsize < dtype.itemsize:
        return f"match= rounds the logits to {logits_dtype}, whose rows hold no gradient in {dtype}"
    if split_samples:
        return "the objective takes means over samples, and those are split over context-parallel ranks"
    return None


def two_pass_memory(memory: int) -> int:
    """Working memory of ``linear_logprobs`` where it makes the first of two passes: its own default, at most."""
    return min(memory, parse_memory(Options().memory))


def choose_loss_plan(shape: LossShape, sequence_level: bool, obstacle: str | None, memory: int) -> LossPlan:
    """One pass if nothing stands in its way.

    Args:
        obstacle: what :func:`find_obstacle` found.
    """
    sizes, longest = shape.sizes, max(shape.counts, default=0)
    work = memory if sizes.on_gpu else memory // 2
    tiles, rows = None, max(1, work // (max(1, sizes.columns) * sizes.logits_bytes))
    if shape.exponentials and rows < max(min(sizes.rows, ENOUGH), longest if sequence_level else 0):
        tiles = chunk_tiles(sizes, memory)
        row_bytes = max(1, exponentials_row(sizes, tiles.columns))
        rows = max(1, (work - tiles.rows * tiles.columns * sizes.logits_bytes) // row_bytes)
    if obstacle is None and sequence_level and longest > rows:
        obstacle = (
            f"the objective takes means over samples, and the longest has {longest} rows where memory= holds {rows}"
        )
    if obstacle is not None:
        return LossPlan("two passes", (), False, 0, None, 0, obstacle)
    chunks = whole_samples(shape.counts, rows) if sequence_level else even_chunks(sum(shape.counts), rows)
    columns = SLAB if shape.widened else max(1, sizes.columns)
    reason = "the loss of a row depends on " + ("its own sample" if sequence_level else "nothing but its own log-prob")
    elementwise = memory if sizes.on_gpu else max(1, memory // 2)
    return LossPlan("one pass", chunks, sequence_level, columns, tiles, elementwise, reason)


def even_chunks(num_rows: int, most: int) -> tuple[tuple[int, int], ...]:
    """As few chunks of at most ``most`` rows as will do, all about as long.

    >>> even_chunks(1000, 300)
    ((0, 256), (256, 512), (512, 768), (768, 1000))
    """
    if num_rows == 0:
        return ()
    rows = -(-num_rows // -(-num_rows // most))
    filled = -(-rows // FILLING) * FILLING
    rows = filled if filled <= most else max(1, most - most % FILLING) if most >= FILLING else rows
    return tuple((start, min(start + rows, num_rows)) for start in range(0, num_rows, rows))


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
