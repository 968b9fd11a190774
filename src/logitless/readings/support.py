"""The support of every row: kept ids and target, sorted once, and their share of each formula, on flat vectors.

Supports are ragged, one run of ids per row, and everything here works on flat ``[K + R]`` vectors: no ``[R, V]`` mask,
no loop. Log-probs are normalised over the support; what entropy and log Z are over is its scope:

    "vocabulary"    the whole row, which is read or multiplied as without a support; the support's logits are
                    gathered out of it
    "support"       the support too: nothing but its logits is needed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.backends.contract import Problem
from logitless.operands.kept import Kept
from logitless.softmax import FLOOR, Coefficients, Normaliser, Statistic, merge, transform


class Entries(NamedTuple):
    """The ids of all supports, targets included, sorted by row and id: flat ``[K + R]`` vectors.

    Attributes:
        row: ascending.
        ids: of the whole vocabulary.
        once: False for the second and later copies of an id within its row.
        is_target: whether the id is the row's target.
    """

    row: Tensor
    ids: Tensor
    once: Tensor
    is_target: Tensor

    @staticmethod
    def of_keys(key: Tensor, target: Tensor, vocab_size: int) -> Entries:
        """From sorted keys, each of which is one number for row and id: ``(vocab_size + 2) row + id + 1``."""
        row = key // (vocab_size + 2)
        ids = key - (vocab_size + 2) * row - 1
        once = torch.cat([key.new_ones(min(1, len(key)), dtype=torch.bool), key[1:] != key[:-1]])
        return Entries(row, ids, once, ids == target.clamp(-1, vocab_size)[row])


class KeptLogits(NamedTuple):
    """Transformed logits of each row's support, sorted by row and id, on flat ``[K + R]`` vectors.

    Attributes:
        row, once, is_target: as of :class:`Entries`.
        column: of the problem's logits; 0 for ids that are not among its columns.
        z: -inf for ids that are not among these columns, NaN for ids outside the vocabulary.
        slope: dz / dx.
        here: whether the id is among these columns.
        lengths: ``[R]`` entries of each row.
    """

    row: Tensor
    column: Tensor
    z: Tensor
    slope: Tensor
    here: Tensor
    once: Tensor
    is_target: Tensor
    lengths: Tensor


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
        each = torch.arange(target.numel(), device=target.device)
        row = torch.cat([rows_of(kept, each), each])
        # One sort makes the rows contiguous and puts copies of an id side by side, without a device sync. Ids outside
        # the vocabulary are -1 or its size.
        ids = torch.cat([kept.ids, target]).clamp(-1, vocab_size)
        key = ((vocab_size + 2) * row + (ids + 1)).sort(stable=True).values
        return Support(target, Entries.of_keys(key, target, vocab_size), kept.lengths + 1, start, vocab_size)

    def logits(self, problem: Problem) -> KeptLogits:
        """Gather the support's logits out of a problem that has all rows."""
        column, here = self.place(problem.first, problem.columns)
        row = self.entries.row
        at = row if problem.index is None else problem.index[row]
        x = problem.logits[at, column].to(problem.gain.dtype) if problem.columns else problem.gain[row]
        return self.transformed(x, column, here, problem.gain, problem.squash)

    def place(self, first: int, columns: int) -> tuple[Tensor, Tensor]:
        """``[K + R]`` place of each id among ``columns`` columns from column ``first`` here, 0 for an id that is not
        among them; and whether it is."""
        column = self.entries.ids - (self.start + first)
        here = (column >= 0) & (column < columns)
        return torch.where(here, column, 0), here

    def transformed(self, x: Tensor, column: Tensor, here: Tensor, gain: Tensor, squash: float) -> KeptLogits:
        """The logits of all entries after the head's transformation, from raw logits ``x``."""
        row, ids, once, is_target = self.entries
        z, slope = transform(x, gain[row], squash)
        z = torch.where(here, z, -torch.inf)
        z = torch.where((ids >= 0) & (ids < self.vocab_size), z, torch.nan)
        return KeptLogits(row, column, z, slope, here, once, is_target, self.lengths)

    def lone(self) -> Tensor:
        """``[K + R]`` whether an entry's row has one id alone: its log-prob is 0 whatever the logit."""
        ids, ends = self.entries.ids, self.lengths.cumsum(0)
        # Entries are sorted by row, and every row has one.
        return (ids[ends - 1] == ids[ends - self.lengths])[self.entries.row]


def rows_of(kept: Kept, each: Tensor) -> Tensor:
    """``[K]`` row of each kept id, where ``each`` is the number of every row."""
    return torch.repeat_interleave(each, kept.lengths, output_size=kept.ids.numel())


def kept_statistics(k: KeptLogits) -> Tensor:
    """``[2, R]`` (m, s) of the ids of the support that are here."""
    m = _segment(k.z, "max", k.lengths)
    reference = torch.where(m == -torch.inf, torch.zeros_like(m), m)
    e = torch.where(k.once, (k.z - reference[k.row]).exp(), 0.0)
    return torch.stack([m, _segment(e, "sum", k.lengths)])


def merge_kept(parts: Tensor, target: Tensor) -> Tensor:
    """``[P, 2, R]`` parts of the support's (m, s) as one statistic with the given target logit."""
    m, s = parts.unbind(1)
    return merge(torch.stack([m, s, torch.zeros_like(s), target.expand_as(s)], dim=1))


def kept_gradient(
    k: KeptLogits,
    kept_norm: Normaliser,
    logprob: Tensor,
    g_logprob: Tensor,
    norm: Normaliser,
    coef: Coefficients | None,
    ignored: Tensor,
    of_ids: Tensor | None = None,
) -> Tensor:
    """``[K + R]`` whole gradient at each logit of the support: ``g_l (onehot - p_support)``, plus dense terms.

    Args:
        of_ids: ``[K + R]`` upstream gradient of each logit's own log-prob over the vocabulary (``ids=``), or None.
    """
    log_p = (k.z - kept_norm.reference[k.row]) - kept_norm.log_sum[k.row]
    upstream = g_logprob[k.row]
    dz = -upstream * torch.where(k.is_target, torch.expm1(logprob)[k.row], log_p.exp())
    # A row whose log-prob is NaN may have gradients of its entropy and log Z, to which 0 times NaN must not be added.
    dz = torch.where(upstream != 0, dz, 0.0)
    if coef is not None:
        d = k.z - norm.reference[k.row]
        log_p = d - norm.log_sum[k.row]
        if of_ids is None:
            dz = dz + coef.elsewhere(d, log_p.exp(), k.row)
        else:
            dz = dz + coef.elsewhere(d, log_p.exp(), k.row, of_ids) - of_ids * torch.expm1(log_p)
    return (dz * k.slope).masked_fill(ignored[k.row], 0.0)


def support_statistic(k: KeptLogits) -> Tensor:
    """``[4, R]`` statistic of rows that are nothing but their support, of the ids that are here."""
    m = _segment(k.z, "max", k.lengths)
    reference = torch.where(m == -torch.inf, 0.0, m)
    d = (k.z - reference[k.row]).clamp_min(FLOOR)
    e = torch.where(k.once, d.exp(), 0.0)
    # The target is one of the entries, on this shard or another; every other entry adds nothing to t.
    t = torch.where(k.is_target & k.here & k.once, k.z, 0.0)
    elsewhere = torch.where(k.is_target & k.here & k.once, 0.0, 1.0)
    sums = _segment(torch.stack([e, e * d, t, elsewhere], 1), "sum", k.lengths)
    s, w, t, elsewhere = sums.unbind(1)
    return Statistic(m, s, w, torch.where(elsewhere == k.lengths, torch.nan, t)).stacked()


def support_gradient(k: KeptLogits, norm: Normaliser, coef: Coefficients, ignored: Tensor) -> Tensor:
    """``[K + R]`` gradient at each raw logit of rows that are nothing but their support; copies have it, too."""
    d = k.z - norm.reference[k.row]
    dz = coef.plain[k.row]
    if coef.product is not None:
        dz = dz + coef.product[k.row] * d.clamp_min(FLOOR)
    dz = torch.where(k.is_target, coef.at_target[k.row], (d - norm.log_sum[k.row]).exp() * dz)
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
