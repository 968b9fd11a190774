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

FILLING = 128
"""Rows of a chunk are a multiple of this where there are that many: what a matrix unit takes at a time."""

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
        elementwise: bytes of working space for the plain-torch backend.
        reason: why, in a sentence.
    """

    kind: Literal["one pass", "two passes"]
    chunks: tuple[tuple[int, int], ...]
    whole_samples: bool
    columns: int
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
        return (
            f"one pass: 3 matrix products, because {self.reason}. {len(self.chunks)} chunks{samples}, of at most "
            f"{self.rows} rows."
        )


@dataclass(frozen=True)
class LossShape:
    """What the decision depends on.

    Attributes:
        counts: rows of each sample.
        columns: columns of the vocabulary here, or the mean over a vocabulary group: the same on all of its ranks.
        row_bytes: bytes of one row of a chunk.
        on_gpu: whether the rows are on a GPU, whose products and kernels need no working space.
        widened: whether a product copies its operands.
    """

    counts: tuple[int, ...]
    columns: int
    row_bytes: int
    on_gpu: bool
    widened: bool


def choose_loss_plan(shape: LossShape, sequence_level: bool, obstacle: str | None, memory: int) -> LossPlan:
    """One pass if nothing stands in its way.

    Args:
        obstacle: why it must be two passes, whatever the sizes; or None.
    """
    work = memory if shape.on_gpu else memory // 2
    rows = max(1, work // max(1, shape.row_bytes))
    longest = max(shape.counts, default=0)
    if obstacle is None and sequence_level and longest > rows:
        obstacle = (
            f"the objective takes means over samples, and the longest has {longest} rows where memory= holds {rows}"
        )
    if obstacle is not None:
        return LossPlan("two passes", (), False, 0, 0, obstacle)
    chunks = whole_samples(shape.counts, rows) if sequence_level else even_chunks(sum(shape.counts), rows)
    columns = SLAB if shape.widened else max(1, shape.columns)
    reason = "the loss of a row depends on " + ("its own sample" if sequence_level else "nothing but its own log-prob")
    return LossPlan("one pass", chunks, sequence_level, columns, max(1, memory - work), reason)


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
