"""The sampler's support: log-probs over the token ids that a sampler kept (top-p, top-k, min-p).

A rollout engine that truncates its distribution sampled from ``softmax(z[support])``. Training on the full softmax
would compare two different distributions, so the log-prob is normalised over the support, with the target forced
in. Entropy and log Z stay those of the whole row.

Engines report such ids in several forms; each has a constructor here that checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.rows import Rows
from logitless.spec import inspectable, tracked_by_autograd


@dataclass(frozen=True, eq=False)
class Kept:
    """Kept token ids of each row, end to end.

    Args:
        ids: ``[K]`` token ids of the whole vocabulary, in any order; an id twice in a row counts once.
        lengths: ``[R]`` how many ids each row has. A row may have none: its support is then the target alone.

    >>> Kept(torch.tensor([5, 7, 9]), torch.tensor([2, 1])).lengths.tolist()
    [2, 1]
    """

    ids: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        for name, x in (("ids", self.ids), ("lengths", self.lengths)):
            if not isinstance(x, Tensor):
                raise LogitlessError(
                    f"Kept: {name} must be a 1-D integer tensor but is a {type(x).__name__}. Pass torch.tensor(...)."
                )
            if x.dim() != 1 or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
                raise LogitlessError(f"Kept: {name} must be a 1-D integer tensor but is {list(x.shape)} {x.dtype}.")
        if inspectable(self.lengths):
            total, low = int(self.lengths.sum()), int(self.lengths.min()) if self.lengths.numel() else 0
            if low < 0 or total != self.ids.numel():
                raise LogitlessError(
                    f"Kept: lengths must be 0 or more and add up to the {self.ids.numel()} ids, "
                    f"but the smallest is {low} and they add up to {total}."
                )
        object.__setattr__(self, "ids", tracked_by_autograd(self.ids.to(torch.int64)))
        object.__setattr__(self, "lengths", tracked_by_autograd(self.lengths.to(torch.int64)))

    @staticmethod
    def from_responses(rows: Rows, ids: Sequence[Tensor], lengths: Sequence[Tensor]) -> Kept:
        """The kept ids of the scored rows, out of the ids that were recorded for every response token.

        Args:
            rows: the rows that are scored.
            ids: per sample, the kept ids of all its response tokens, end to end.
            lengths: per sample, how many ids each response token has: ``[response length]``.
        """
        if len(ids) != len(rows.counts) or len(lengths) != len(rows.counts):
            raise LogitlessError(
                f"Kept.from_responses: got ids for {len(ids)} and lengths for {len(lengths)} samples, "
                f"but the rows have {len(rows.counts)}."
            )
        whole = rows.response_lengths or rows.counts
        for sample, (flat, runs) in enumerate(zip(ids, lengths, strict=True)):
            if runs.numel() != whole[sample]:
                raise LogitlessError(
                    f"Kept.from_responses: sample {sample} has lengths for {runs.numel()} tokens but its response has "
                    f"{whole[sample]}."
                )
            if int(runs.sum()) != flat.numel():
                raise LogitlessError(
                    f"Kept.from_responses: sample {sample} has {flat.numel()} ids but its lengths add up to "
                    f"{int(runs.sum())}."
                )
        if not len(ids):
            return Kept(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
        flat, runs = torch.cat(list(ids)), torch.cat(list(lengths)).to(torch.int64)
        first = torch.tensor([0, *[len(x) for x in lengths]]).cumsum(0)[:-1].to(runs.device)
        response = first[rows.sample.to(runs.device)] + rows.position.to(runs.device)
        lengths_R = runs[response]
        starts_R = (runs.cumsum(0) - runs)[response]
        row = torch.repeat_interleave(torch.arange(len(response), device=runs.device), lengths_R)
        within = torch.arange(len(row), device=runs.device) - (lengths_R.cumsum(0) - lengths_R)[row]
        return Kept(flat[starts_R[row] + within].to(rows.index.device), lengths_R.to(rows.index.device))
