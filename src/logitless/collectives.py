"""The communication of this library, and its backward.

Two kinds of group exist and they follow opposite rules:

* Across a *vocabulary* group every rank computes the same loss. Each rank differentiates it with respect to
  its own shard, so the backward of the gather below is local: nothing is sent.
* Across a *sequence* group every rank computes a part of the loss, and the parts add up.

Every collective here is unconditional: each rank of the group makes the same calls in the same order,
ranks without rows included. ``group=None`` means "not sharded" and never communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.notes import Noting

T = TypeVar("T")


@dataclass(frozen=True)
class DryGroup:
    """A group on the meta device, where nothing is sent and only allocations count. ``copies`` says that the real group
    works on a copy, as gloo does."""

    ranks: int
    copies: bool

    def size(self) -> int:
        return self.ranks

    def pretend(self, copied: Tensor, out: Tensor) -> Tensor:
        """``out``, after allocating the copy that the collective would make."""
        if self.copies:
            torch.empty_like(copied)
        return out


Group = dist.ProcessGroup | DryGroup


def resolve_group(group: Any, argument: str) -> dist.ProcessGroup | None:
    """A process group from a process group, a one-dimensional DeviceMesh, or None.

    >>> resolve_group(None, "group") is None
    True
    """
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise LogitlessError(
                f"{argument}: a DeviceMesh with {group.ndim} dimensions does not name one group. "
                f'Pass one dimension of it, for example mesh["tp"].'
            )
        return group.get_group()
    raise LogitlessError(
        f"{argument}: wanted a torch.distributed process group, a one-dimensional DeviceMesh or None, "
        f"but got {type(group).__name__}."
    )


def gather_over(group: Group, x: Tensor) -> Tensor:
    """``x`` of every rank, stacked in rank order: ``[...]`` becomes ``[world, ...]``.

    One ``all_gather``. Same bits on every rank. Carries no gradient: each rank differentiates its own
    shard only (see the rule for vocabulary groups above).
    """
    out = x.new_empty((group.size(), *x.shape))
    if isinstance(group, DryGroup):
        return group.pretend(out, out)
    with _said("all_gather", x, group):
        _named(group, "all_gather_single", "all_gather_into_tensor")(out.flatten(0, 1), x.contiguous(), group=group)
    return out


def gather_rows_over(group: Group, x: Tensor) -> Tensor:
    """``[T / n, ...]`` of every rank, end to end in rank order: ``[T, ...]``. Backward: :func:`scatter_sum_over`."""
    return gather_over(group, x).flatten(0, 1)


def scatter_sum_over(group: Group, x: Tensor) -> Tensor:
    """``[T, ...]`` summed over ranks; each rank gets its part of the sum: ``[T / n, ...]``."""
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    if isinstance(group, DryGroup):
        return group.pretend(x, out)
    with _said("reduce_scatter", x, group):
        _named(group, "reduce_scatter_single", "reduce_scatter_tensor")(out, x.contiguous(), group=group)
    return out


def _named(group: Group, new: str, old: str) -> Callable[..., Any]:
    """A collective that torch 2.13 renamed, warning about the old name.

    A host whose groups are a class of its own, as slime's are, replaces the functions of the old names to unwrap them.
    """
    return getattr(dist, new if type(group) is dist.ProcessGroup and hasattr(dist, new) else old)


def sum_over(group: Group, x: Tensor) -> Tensor:
    """``x`` summed over ranks, in place."""
    if not isinstance(group, DryGroup):
        with _said("all_reduce", x, group):
            dist.all_reduce(x, group=group)
    return x


def table_over(group: dist.ProcessGroup, row: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """A small tuple of plain values from every rank, in rank order. On the CPU; for set-up and checks."""
    if find_spec("numpy") is None:
        raise LogitlessError(
            "ranks compare their calls with torch's all_gather_object, which needs numpy. Install numpy."
        )
    table: list[Any] = [None] * dist.get_world_size(group)
    with _said("all_gather", row, group):
        dist.all_gather_object(table, row, group=group)
    return table


def fingerprint(x: Any) -> Any:
    """A short text that differs, all but surely, where two tensors do. Waits for the device.

    A dataclass becomes the fingerprints of its fields, a list or a tuple those of its members; anything else stays.

    >>> fingerprint(torch.tensor([1, 2])) == fingerprint(torch.tensor([2, 1]))
    False
    """
    if is_dataclass(x):
        return tuple(fingerprint(getattr(x, field.name)) for field in fields(x))
    if isinstance(x, list | tuple):
        return tuple(fingerprint(y) for y in x)
    if not isinstance(x, Tensor):
        return x
    bits = x.detach().contiguous().flatten()
    bits = bits.view(_INTEGERS[bits.element_size()]) if bits.dtype != torch.bool else bits
    # Sums of 64-bit integers wrap around, so that any order of adding gives the same.
    mixed = bits.to(torch.int64) * 0x5851F42D4C957F2D + torch.arange(len(bits), device=x.device) * 0x14057B7EF767814F
    mixed = (mixed ^ (mixed >> 29)) * 0x3C6EF372FE94F82B
    return f"{list(x.shape)} {int((mixed ^ (mixed >> 32)).sum()) & 0xFFFFFFFFFFFFFFFF:016x}"


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _said(what: str, sent: Any, group: Group) -> Noting:
    """A block with one collective, whose error is torch's words on sockets or a watchdog, and a note on the cause."""

    def text_of(error: BaseException) -> str:
        size = f"{list(sent.shape)} {sent.dtype}" if isinstance(sent, Tensor) else "a few plain values"
        return (
            f"logitless: {what} of {size} over {group.size()} ranks stopped here. Another rank of the group died, came "
            f"later than the group's timeout, raised before it got here, or made another call. "
            f"Calls are compared first with VocabShard(check_calls=True), with check_group=True of a loss, with "
            f"check=True of Rows.gather, Rows.redistribute and Metrics.reduce, and by Rows.check_over."
        )

    return Noting(text_of)


SAME = {
    "vocabulary": "Every rank of the group must score the same rows with the same options.",
    "sequence": "Every rank of the group must make the same call, with its own part of the rows.",
}
"""Advice for ranks that disagree, by the kind of group."""


def agree_over(
    group: dist.ProcessGroup,
    caller: str,
    prepare: Callable[[], T],
    facts_of: Callable[[T], dict[str, Any]],
    kind: Literal["vocabulary", "sequence"] = "vocabulary",
) -> T:
    """``prepare()``, unless it fails on some rank or its facts differ between ranks: then every rank raises.

    One small collective, so that bad input on one rank is an error on all ranks and not a hang in the next collective.
    """
    prepared, facts, failure = None, {}, None
    try:
        prepared = prepare()
        facts = {"the function": caller} | facts_of(prepared)
    except Exception as error:
        # Any error, of ours or not, is raised again below, after the peers have heard of it.
        failure = error
    table = table_over(group, (None if failure is None else str(failure), facts))
    if failure is not None:
        raise failure
    for rank, (text, _) in enumerate(table):
        if text is not None:
            raise LogitlessError(f"{caller}: rank {rank} of this rank's {kind} group stopped with: {text}")
    for name in facts:
        # A rank that calls another function, or takes another route, may not have this fact at all.
        values = [theirs.get(name) for _, theirs in table]
        if len(set(values)) > 1:
            raise LogitlessError(
                f"{caller}: ranks of one {kind} group disagree about {name}: rank by rank it is {values}. {SAME[kind]}"
            )
    assert prepared is not None
    return prepared


def agree_if(
    check: bool, group: Any, caller: str, prepare: Callable[[], T], facts_of: Callable[[T], dict[str, Any]]
) -> T:
    """``prepare()``; if asked for, compared over the ranks of a sequence group, where there is one."""
    process_group = resolve_group(group, f"{caller}: group") if check else None
    return prepare() if process_group is None else agree_over(process_group, caller, prepare, facts_of, "sequence")
