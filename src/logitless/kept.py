"""The sampler's support: log-probs over the token ids that a sampler kept (top-p, top-k, min-p).

A rollout engine that truncates its distribution sampled from ``softmax(z[support])``. Training on the full softmax
would compare two different distributions, so the log-prob is normalised over the support, with the target forced
in. Entropy and log Z stay those of the whole row.

Supports are ragged, one run of ids per row, and everything here works on flat ``[K + R]`` vectors: no ``[R, V]`` mask,
no loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.backends.contract import Problem
from logitless.errors import LogitlessError
from logitless.rows import Rows
from logitless.softmax import FLOOR, Coefficients, Normaliser
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


class Entries(NamedTuple):
    """The ids of all supports, targets included, sorted by row and id: flat ``[K + R]`` vectors.

    Attributes:
        row: ascending.
        ids: of the whole vocabulary.
        first: False for the second and later copies of an id within its row.
        is_target: whether the id is the row's target.
    """

    row: Tensor
    ids: Tensor
    first: Tensor
    is_target: Tensor


class KeptLogits(NamedTuple):
    """Transformed logits of each row's support, sorted by row and id, on flat ``[K + R]`` vectors."""

    row: Tensor
    """Which row, ascending."""
    column: Tensor
    """Column of the problem's logits; 0 for ids that are not among its columns."""
    z: Tensor
    """-inf for ids that are not among these columns, NaN for ids outside the vocabulary."""
    slope: Tensor
    """dz / dx."""
    here: Tensor
    first: Tensor
    """False for the second and later copies of an id within its row."""
    is_target: Tensor
    lengths: Tensor
    """``[R]`` entries of each row."""


@dataclass(frozen=True, eq=False)
class Support:
    """The support of every row, its target included, and which columns of the vocabulary are here.

    Attributes:
        target: ``[R]`` token id of each row.
        entries: all ids, sorted once for all tiles.
        lengths: ``[R]`` entries of each row.
        start: first column here.
        vocab_size: true size of the vocabulary.
    """

    target: Tensor
    entries: Entries
    lengths: Tensor
    start: int
    vocab_size: int

    @staticmethod
    def of(kept: Kept, target: Tensor, start: int, vocab_size: int) -> Support:
        """The ids that the sampler kept, and the targets."""
        arange = torch.arange(target.numel(), device=target.device)
        row = torch.cat([torch.repeat_interleave(arange, kept.lengths, output_size=kept.ids.numel()), arange])
        ids = torch.cat([kept.ids, target])
        # Sorting by (row, id) makes the rows contiguous and puts copies of an id side by side, without a device sync.
        order = ids.argsort(stable=True)
        order = order[row[order].argsort(stable=True)]
        row, ids = row[order], ids[order]
        same = (row[1:] == row[:-1]) & (ids[1:] == ids[:-1])
        first = torch.cat([same.new_ones(min(1, row.numel())), ~same])
        entries = Entries(row, ids, first, ids == target[row])
        return Support(target, entries, kept.lengths + 1, start, vocab_size)

    def logits(self, problem: Problem) -> KeptLogits:
        """Gather the support's logits out of a problem that has all rows."""
        row, ids, first, is_target = self.entries
        column = ids - (self.start + problem.first)
        here = (column >= 0) & (column < problem.columns)
        column = torch.where(here, column, 0)
        at = row if problem.index is None else problem.index[row]
        x = problem.logits[at, column].to(problem.gain.dtype) if problem.columns else problem.gain[row]
        gain = problem.gain[row]
        if problem.squash:
            y = torch.tanh(x * problem.squash)
            z, slope = y * gain, gain * problem.squash * (1 - y * y)
        else:
            z, slope = x * gain, gain
        z = torch.where(here, z, -torch.inf)
        z = torch.where((ids >= 0) & (ids < self.vocab_size), z, torch.nan)
        return KeptLogits(row, column, z, slope, here, first, is_target, self.lengths)


def kept_statistics(k: KeptLogits) -> Tensor:
    """``[2, R]`` (m, s) of the ids of the support that are here."""
    m = _segment(k.z, "max", k.lengths)
    reference = torch.where(m == -torch.inf, torch.zeros_like(m), m)
    e = torch.where(k.first, (k.z - reference[k.row]).exp(), 0.0)
    return torch.stack([m, _segment(e, "sum", k.lengths)])


def kept_gradient(
    k: KeptLogits,
    kept_norm: Normaliser,
    logprob: Tensor,
    g_logprob: Tensor,
    norm: Normaliser,
    coef: Coefficients | None,
    ignored: Tensor,
) -> Tensor:
    """``[K + R]`` whole gradient at each logit of the support: ``g_l (onehot - p_support)``, plus dense terms."""
    log_p = (k.z - kept_norm.reference[k.row]) - kept_norm.log_sum[k.row]
    upstream = g_logprob[k.row]
    dz = -upstream * torch.where(k.is_target, torch.expm1(logprob)[k.row], log_p.exp())
    # Not the product alone: a row whose log-prob is NaN may have entropy and log Z, and gradients of those.
    dz = torch.where(upstream != 0, dz, 0.0)
    if coef is not None:
        d = k.z - norm.reference[k.row]
        dense = coef.plain[k.row]
        if coef.product is not None:
            dense = dense + coef.product[k.row] * d.clamp_min(FLOOR)
        dz = dz + (d - norm.log_sum[k.row]).exp() * dense
    return (dz * k.slope).masked_fill(ignored[k.row], 0.0)


def _segment(x: Tensor, how: str, lengths: Tensor) -> Tensor:
    # Unlike scatter_add, a segmented reduction adds in a fixed order: same bits on every run.
    return torch.segment_reduce(x, how, lengths=lengths, unsafe=True)


def write_kept(k: KeptLogits, values: Tensor, out: Tensor, out_index: Tensor | None) -> None:
    """Write finished gradients at the logits of the support that are here; ``out`` has the dense terms already.

    Ids that are elsewhere must not write. Because their number is not fetched from the device, each of them repeats the
    write of an id of its row that is here, or, where there is none, writes the value of column 0 once more.
    """
    if not out.shape[1] or not len(values):
        return
    values = values.to(out.dtype)
    place = torch.arange(len(values), device=values.device)
    here = torch.full_like(k.lengths, -1).scatter_reduce(0, k.row, torch.where(k.here, place, -1), "amax")[k.row]
    place = torch.where(k.here, place, here.clamp_min(0))
    column = torch.where(here < 0, 0, k.column[place])
    row = k.row if out_index is None else out_index[k.row]
    out[row, column] = torch.where(here < 0, out[row, 0], values[place])
