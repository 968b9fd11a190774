"""Seams to frameworks, which adapters and the provider share: shards, logits with a shard, ids outside the vocabulary.

A framework passes a group, and perhaps bounds, with every call. Making a ``VocabShard`` is a collective, so shards are
cached, by what every rank of the group knows. A key that only this rank knows would have one rank wait in a collective
that another, whose own bounds it has met before, does not make:

    even_shard       equal parts                      the size of the vocabulary
    cut_shard        as DTensor cuts                  the size of the vocabulary
    shard_between    any bounds, of this rank alone   all bounds, which the ranks exchange in every call
    packed_shard     any widths, in rank order        all widths, which the ranks exchange in every call
    known_shard      bounds that the framework has compared: nothing is exchanged
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.collectives import resolve_group, table_over
from logitless.errors import LogitlessError
from logitless.errors.arguments import dense, refused
from logitless.operands import Given, Kept, Logits
from logitless.operands.logits import like
from logitless.spec import TokenStats, VocabShard

Bounds = tuple[int, int]


# The cache has no limit: ranks with other groups beside this one would drop other entries.
@functools.cache
def _made(group: dist.ProcessGroup, key: int | tuple[Bounds, ...], start: int, stop: int) -> VocabShard:
    """The shard of this rank, made once. ``key`` is the same on every rank, and says which bounds each of them has."""
    return VocabShard(start, stop, group)


def even_shard(group: Any, columns: int, rank: int | None = None) -> VocabShard | None:
    """This rank's equal part of the vocabulary, in rank order; None where one rank has the whole vocabulary.

    ``rank``: which part is here, where the host says it; None for the rank in the group.
    """
    process_group = _several(group)
    if process_group is None:
        return None
    rank = process_group.rank() if rank is None else rank
    return _made(process_group, process_group.size() * columns, rank * columns, (rank + 1) * columns)


def cut_shard(group: Any, vocab_size: int) -> VocabShard | None:
    """This rank's part where DTensor cuts the vocabulary: equal parts, the last ones shorter or empty."""
    process_group = _several(group)
    if process_group is None:
        return None
    part, rank = -(-vocab_size // process_group.size()), process_group.rank()
    return _made(process_group, vocab_size, min(rank * part, vocab_size), min((rank + 1) * part, vocab_size))


def shard_between(group: Any, start: int, stop: int) -> VocabShard | None:
    """Columns ``start .. stop`` of the vocabulary over a group; None where one rank has the whole vocabulary.

    A small collective in every call: nothing tells this rank whether the others' bounds are those of the last call.
    """
    process_group = _several(group)
    if process_group is None:
        return None if start == 0 else VocabShard(start, stop, resolve_group(group, "tensor-parallel group"))
    return _made(process_group, tuple(table_over(process_group, (start, stop))), start, stop)


def packed_shard(group: Any, columns: int) -> VocabShard | None:
    """This rank's columns, after those of the ranks before it. A small collective in every call."""
    process_group = _several(group)
    if process_group is None:
        return None
    widths = [width for (width,) in table_over(process_group, (columns,))]
    bounds = tuple(itertools.pairwise(itertools.accumulate(widths, initial=0)))
    return _made(process_group, bounds, *bounds[process_group.rank()])


def known_shard(group: Any, start: int, stop: int, vocab_size: int) -> VocabShard | None:
    """Columns ``start .. stop`` of a vocabulary whose ranks the framework has compared; None where one has it all.

    Its ``bounds`` are those of this rank alone.
    """
    process_group = _several(group)
    return None if process_group is None else _known(process_group, start, stop, vocab_size)


@functools.cache
def _known(group: dist.ProcessGroup, start: int, stop: int, vocab_size: int) -> VocabShard:
    shard, bounds = object.__new__(VocabShard), ((start, stop),)
    vars(shard).update(start=start, stop=stop, group=group, check_calls=False, vocab_size=vocab_size, bounds=bounds)
    return shard


def _several(group: Any) -> dist.ProcessGroup | None:
    """The process group, or None where it has one rank."""
    process_group = resolve_group(group, "tensor-parallel group")
    return None if process_group is None or process_group.size() == 1 else process_group


def placed(logits: Tensor, shard: VocabShard | None = None, *, overwrite: bool = False) -> Logits | Given:
    """A host's logits as a verb takes them, with the columns that the host says are here.

    Logits that are not computed may have a shard of their own: it must be of the same columns. Nothing of them can be
    overwritten.
    """
    if not isinstance(logits, Logits):
        whole = logits if logits.shape[-1] < 2 or logits.stride(-1) == 1 else logits.contiguous()
        return Logits.given(whole, shard=shard, overwrite=overwrite)
    own = logits.linear.shard
    if own is None:
        return logits if shard is None else like(logits, linear=replace(logits.linear, shard=shard))
    if shard is not None and (own.start, own.stop) != (shard.start, shard.stop):
        raise LogitlessError(
            f"the logits are not computed and hold columns {own.start} to {own.stop}, but the caller says "
            f"{shard.start} to {shard.stop}. Make them with the caller's shard: Logits(hidden, weight, shard=...)."
        )
    return logits


def without_outside(target: Tensor, vocab_size: int, score: Callable[[Tensor], TokenStats]) -> Tensor:
    """Log-probs of the targets; 0 for an id outside the vocabulary, with the gradient -p g of -log Z.

    Hosts that sum the target's logit over shards get the same where no shard has the id.
    """
    outside = (target < 0) | (target >= vocab_size)
    out = score(target.masked_fill(outside, 0))
    assert out.log_z is not None
    nothing = out.log_z.detach() - out.log_z
    return torch.where(outside, nothing, out.logprob)


def with_target_kept(keep: Tensor, target: Tensor, shard: VocabShard | None) -> Tensor:
    """A mask ``[N, V']`` of this rank's columns with each row's target kept, where its column is here."""
    column = (target - (0 if shard is None else shard.start))[:, None]
    here = (column >= 0) & (column < keep.shape[1])
    column = torch.where(here, column, 0)
    return keep.scatter(1, column, here | keep.gather(1, column))


def columns_of(caller: str, hidden: Any, weight: Any) -> int:
    """Columns of the head, whose operands are tensors."""
    if dense(hidden, f"{caller}: hidden").dim() < 1:
        raise refused(f"{caller}: hidden", "[..., D]", hidden)
    if dense(weight, f"{caller}: weight").dim() != 2:
        raise refused(f"{caller}: weight", "[V, D]", weight)
    return weight.shape[0]


def kept_from(support: Any) -> Kept:
    """The ids that a sampler kept, from a pair of ids and lengths."""
    if not isinstance(support, tuple | list) or len(support) != 2:
        raise refused("support", "a pair of tensors: the ids kept, and how many of them each row has", support)
    ids, lengths = (dense(x, "support", "a pair of tensors: ids and lengths") for x in support)
    return Kept(ids, lengths)
