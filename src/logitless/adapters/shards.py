"""Vocabulary shards of hosts that split the vocabulary as Megatron does, and their checks.

A host passes a group, and perhaps bounds, with every call. Making a ``VocabShard`` is a collective, so shards are
cached by group and bounds: the ranks of a group make the same calls, so they also make the same shards.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from logitless.collectives import resolve_group
from logitless.errors import LogitlessError
from logitless.spec import VocabShard


@functools.lru_cache(maxsize=64)
def shard_between(group: Any, start: int, stop: int) -> VocabShard | None:
    """Columns ``start .. stop`` of the vocabulary over a group; None where one rank has the whole vocabulary."""
    process_group = resolve_group(group, "tensor-parallel group")
    if start == 0 and (process_group is None or process_group.size() == 1):
        return None
    return VocabShard(start, stop, process_group)


def even_shard(group: Any, columns: int) -> VocabShard | None:
    """This rank's equal part of the vocabulary, in rank order; None where one rank has the whole vocabulary."""
    process_group = resolve_group(group, "tensor-parallel group")
    rank = 0 if process_group is None else process_group.rank()
    return shard_between(process_group, rank * columns, (rank + 1) * columns)


def vocabulary_of(shard: VocabShard | None, columns: int) -> int:
    """Columns in all shards together."""
    return columns if shard is None else shard.vocab_size


def check_ids(name: str, ids: Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless the ids are integers of this shape."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise LogitlessError(f"{name} must be integers but is {ids.dtype}.")
    if tuple(ids.shape) != tuple(shape):
        raise LogitlessError(f"{name} must be {list(shape)} but is {list(ids.shape)}.")
