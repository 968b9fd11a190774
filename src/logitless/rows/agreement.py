"""Whether the ranks of a sequence group cut their rows from one batch, each its own part.

Every rank sees the same table, so every rank raises the same error, or none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from logitless.errors import LogitlessError


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
