"""Checks of hosts' ids and Megatron's group, beside the shards of :mod:`logitless.seams`."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.seams import cut_shard, even_shard, known_shard, packed_shard, shard_between
from logitless.spec import VocabShard

__all__ = [
    "check_ids",
    "cut_shard",
    "even_shard",
    "known_shard",
    "packed_shard",
    "shard_between",
    "tensor_group",
    "vocabulary_of",
]


def vocabulary_of(shard: VocabShard | None, columns: int) -> int:
    """Columns in all shards together."""
    return columns if shard is None else shard.vocab_size


def check_ids(name: str, ids: Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless the ids are integers of this shape."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise LogitlessError(f"{name} must be integers but is {ids.dtype}.")
    if tuple(ids.shape) != tuple(shape):
        raise LogitlessError(f"{name} must be {list(shape)} but is {list(ids.shape)}.")


def tensor_group() -> Any:
    """Megatron's tensor-parallel group, each rank of which has an equal part of the vocabulary."""
    return importlib.import_module("megatron.core.parallel_state").get_tensor_model_parallel_group()
