"""Whether the ranks of a sequence group cut their rows from one batch, each its own part.

Every rank sees the same table, so every rank raises the same error, or none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from logitless.collectives import table_over
from logitless.errors import LogitlessError

COMPARED = ("padded length", "response length", "tokens", "loss mask")
"""What ranks compare of every sample."""


def check_one_batch(rows: Any, group: Any) -> None:
    """Raise unless the ranks made their rows from one batch, each its own part. One small collective."""
    scheme = (type(rows.cp).__name__, 1 if rows.cp is None else rows.cp.size)
    rank = 0 if rows.cp is None else rows.cp.rank
    mine = (rank, scheme, rows.num_tokens, rows.spans, rows.response_lengths, *rows.batch.fingerprints())
    ranks, schemes, num_tokens, *by_sample = zip(*table_over(group, mine), strict=True)
    check_parts(ranks, schemes, group.size())
    for what, values in zip(COMPARED, by_sample, strict=True):
        check_samples(what, values)
    check_same("num_tokens", num_tokens)


def check_parts(ranks: Sequence[int], schemes: Sequence[tuple[str, int]], world: int) -> None:
    """Raise unless every rank has its own part of one split."""
    check_same("the scheme", schemes)
    if list(ranks) != list(range(world)):
        raise LogitlessError(
            f"Rows.check_over: ranks 0 .. {world - 1} of the group made rows of ranks {list(ranks)} of the split."
        )
    if schemes[0][1] != world:
        raise LogitlessError(f"Rows.check_over: these rows are split over {schemes[0][1]} ranks but group has {world}.")


def check_samples(what: str, by_rank: Sequence[Sequence[Any]]) -> None:
    """Raise unless the ranks have as many samples, and the same value for each."""
    check_same("the number of samples", [len(values) for values in by_rank])
    for sample, values in enumerate(zip(*by_rank, strict=True)):
        check_same(f"the {what} of sample {sample}", values)


def check_same(what: str, values: Sequence[Any]) -> None:
    """Raise unless all ranks have one value."""
    if len(set(values)) > 1:
        raise LogitlessError(f"Rows.check_over: ranks disagree about {what}: rank by rank it is {list(values)}.")
