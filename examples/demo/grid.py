"""The ranks of a run: context parallel (tokens) times tensor parallel (vocabulary).

    TP 2 x CP 2      vocabulary 0 .. V/2    V/2 .. V
    tokens, part 0            rank 0         rank 1
    tokens, part 1            rank 2         rank 3

Across a row of that table every rank has the same loss; down a column losses are parts and add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.collectives import gather_rows_over, sum_over
from logitless.errors import LogitlessError
from logitless.rows.layouts import Zigzag
from logitless.spec import VocabShard


@dataclass(frozen=True)
class Grid:
    """The place of a rank, and its process groups.

    Attributes:
        tp, cp: ranks that share the vocabulary, ranks that share the tokens.
        rank: this rank among all ranks.
        tp_group, cp_group, world: process groups; None for a single rank.
    """

    tp: int = 1
    cp: int = 1
    rank: int = 0
    tp_group: Any = None
    cp_group: Any = None
    world: Any = None

    @property
    def size(self) -> int:
        return self.tp * self.cp

    @property
    def scheme(self) -> Zigzag | None:
        """Which tokens this rank holds; None if all."""
        return None if self.cp == 1 else Zigzag(self.rank // self.tp, self.cp)

    def shard(self, vocab: int) -> VocabShard | None:
        """The ids whose head is on this rank. Making the shard is a collective."""
        return None if self.tp == 1 else VocabShard.even(vocab, self.tp_group)

    def columns(self, vocab: int) -> slice:
        """The ids whose head is on this rank, as a slice."""
        here = self.rank % self.tp
        return slice(here * vocab // self.tp, (here + 1) * vocab // self.tp)

    def share(self, num: int) -> slice:
        """Which of ``num`` samples this rank draws."""
        return slice(self.rank * num // self.size, (self.rank + 1) * num // self.size)

    def gather_shares(self, x: Tensor) -> Tensor:
        """All samples, from the shares of all ranks."""
        return x if self.size == 1 else gather_rows_over(self.world, x)

    def gather_head(self, head: Tensor) -> Tensor:
        """The whole head, for rollouts."""
        return head if self.tp == 1 else gather_rows_over(self.tp_group, head)

    def sum_parts(self, gradients: list[Tensor]) -> None:
        """Gradients of all tokens, in place, in one collective."""
        if self.cp > 1:
            whole = sum_over(self.cp_group, torch.cat([g.flatten() for g in gradients]))
            for g, part in zip(gradients, whole.split([g.numel() for g in gradients]), strict=True):
                g.copy_(part.view_as(g))

    def sum_shards(self, x: Tensor) -> Tensor:
        """The sum of a number over the ranks that share the vocabulary."""
        return x if self.tp == 1 else sum_over(self.tp_group, x)


def make_grid(tp: int, cp: int, world: Any) -> Grid:
    """The grid of this rank. A collective where there are several ranks."""
    size = 1 if world is None else dist.get_world_size(world)
    for name, value in (("tp", tp), ("cp", cp)):
        if value < 1:
            raise LogitlessError(f"demo: {name} must be a positive number of ranks but is {value}.")
    if tp * cp != size:
        raise LogitlessError(
            f"demo: tp {tp} x cp {cp} needs {tp * cp} ranks but there {'is 1' if size == 1 else f'are {size}'}. Start "
            f"it with torchrun --nproc-per-node {tp * cp} -m examples.demo --tp {tp} --cp {cp}."
        )
    if size == 1:
        return Grid()
    rank, ranks = dist.get_rank(world), torch.arange(size).view(cp, tp)
    # Every rank makes every group, in the same order, and keeps the two that it belongs to.
    groups = [(line, dist.new_group(line)) for line in [*ranks.tolist(), *ranks.T.tolist()]]
    tp_group = next(group for line, group in groups[:cp] if rank in line)
    cp_group = next(group for line, group in groups[cp:] if rank in line)
    return Grid(tp, cp, rank, tp_group, cp_group, world)
