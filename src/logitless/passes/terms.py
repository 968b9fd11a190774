"""``Terms``: what turns a tile of logits into a tile of dZ, from what forward found and the upstream gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.backends import run_gradient
from logitless.backends.contract import Pair, Problem
from logitless.backends.divergences import Divergence
from logitless.call import Call
from logitless.readings.ids import upstream_at, write_at_ids
from logitless.readings.reading import Row, Upstream
from logitless.readings.support import Support, kept_gradient, write_kept
from logitless.softmax import ELSEWHERE, Coefficients, Normaliser, coefficients
from logitless.spec import IGNORE


def or_zeros(upstream: Tensor | None, like: Tensor) -> Tensor:
    """An upstream gradient, with numbers where autograd has none."""
    return torch.zeros_like(like) if upstream is None else upstream.contiguous()


class KeptTerms(NamedTuple):
    """What dZ needs besides where log-probs are normalised over a support.

    Attributes:
        support: the ids of all rows.
        norm: normaliser over them.
        logprob, g_logprob: ``[R]`` log-prob over the support, and its upstream gradient.
    """

    support: Support
    norm: Normaliser
    logprob: Tensor
    g_logprob: Tensor


class TeacherTerms(NamedTuple):
    """What dZ needs besides where there is a teacher.

    Attributes:
        norm: pieces of the teacher's log Z.
        kind: which divergence.
        mean, by: ``[R]`` sum of ``p slope``, and the gradient of the row's divergence; with the acceptance ``[2, R]``.
        share: as in :class:`~logitless.backends.contract.Pair`.
    """

    norm: Normaliser
    kind: Divergence
    mean: Tensor
    by: Tensor
    share: Tensor | None = None

    @staticmethod
    def of(kind: Divergence, saved: Mapping[str, Tensor], up: Mapping[str, Tensor | None]) -> TeacherTerms:
        """From what forward saved, by name, and the upstream gradients of results, by name."""
        norm = Normaliser(saved["teacher_reference"], saved["teacher_log_sum"])
        mean, share = saved["mean_slope"], saved.get("share")
        by = or_zeros(up.get("divergence"), mean)
        if share is None:
            return TeacherTerms(norm, kind, mean, by)
        accepted = up.get("acceptance")
        accepted = torch.zeros_like(by) if accepted is None else accepted
        if "by_terms" in saved:
            by, accepted = by * saved["by_terms"], accepted + by * saved["by_acceptance"]
        return TeacherTerms(norm, kind, torch.stack([mean, saved["mean_rising"]]), torch.stack([by, accepted]), share)

    def shift(self, norm: Normaliser) -> Tensor:
        """``[R]`` what ``log q - log p`` is less than the difference of the two logits; above the share, if any."""
        (m, log_sum), (other, other_log_sum) = norm, self.norm
        shift = (other - m) + (other_log_sum - log_sum)
        return shift if self.share is None else torch.stack([shift, self.share])

    def cut(self, rows: slice) -> TeacherTerms:
        share = None if self.share is None else self.share[rows]
        return TeacherTerms(self.norm.cut(rows), self.kind, self.mean[..., rows], self.by[..., rows], share)


@dataclass(frozen=True, eq=False)
class Terms:
    """Of R rows.

    Attributes:
        norm, coef: as backends take them.
        kept: further terms over a support, or None. It stays that of all rows.
        teacher: further terms for a divergence, or None. Never beside ``kept``: there a divergence is one over its ids.
        plain: whether only the support has a gradient, so that all other columns are 0.
    """

    norm: Normaliser
    coef: Coefficients
    kept: KeptTerms | None = None
    teacher: TeacherTerms | None = None
    plain: bool = False

    @staticmethod
    def of(
        call: Call, saved: Mapping[str, Tensor], up: Mapping[str, Tensor | None], row: Row, support: Support | None
    ) -> Terms:
        """From what forward saved, by name, and the upstream gradients of results, by name."""
        norm, logprob = row.norm, saved["logprob"]
        g_logprob = or_zeros(up.get("logprob"), logprob)
        g_entropy = up.get("entropy") if "mean" in saved else None
        g_log_z, dense, kept = up.get("log_z"), g_logprob, None
        if support is not None:
            # The log-prob's gradient reaches the support alone; entropy and log Z have theirs everywhere.
            dense = torch.zeros_like(g_logprob)
            kept_norm = Normaliser(saved["kept_reference"], saved["kept_log_sum"])
            kept = KeptTerms(support, kept_norm, logprob, g_logprob)
        coef = coefficients(logprob, norm, saved.get("mean"), dense, g_entropy, g_log_z)
        others = (g_entropy, g_log_z)
        if call.table is not None:
            by = {name: g for name in call.table.differentiable if (g := up.get(name)) is not None}
            coef = call.table.extend(coef, saved, row, Upstream(logprob, dense, by))
            others = (*others, *by.values())
        teacher = None
        if "teacher_reference" in saved:
            assert call.kind is not None
            teacher = TeacherTerms.of(call.kind, saved, up)
        assert kept is None or teacher is None
        plain = kept is not None and all(g is None for g in others)
        return Terms(norm, coef, kept, teacher, plain)

    def cut(self, start: int, stop: int) -> Terms:
        """Those of rows ``start .. stop``."""
        if (start, stop) == (0, len(self.coef.plain)):
            return self
        rows = slice(start, stop)
        teacher = None if self.teacher is None else self.teacher.cut(rows)
        return replace(self, norm=self.norm.cut(rows), coef=self.coef.cut(rows), teacher=teacher)

    @property
    def listed(self) -> bool:
        """Whether the listed ids are written once for a block of tiles: with a support, its own values go over them."""
        return self.kept is None and self.coef.at_ids is not None

    def write(
        self,
        call: Call,
        tile: Problem,
        out: Tensor,
        out_index: Tensor | None = None,
        teacher: Problem | None = None,
        over: bool = False,
    ) -> None:
        """dZ of a tile, whose rows these terms are of, over all of ``out``.

        Listed ids of rows without a support are not written yet (:func:`~logitless.readings.ids.write_at_ids`). With a
        support, the tile holds all rows.

        Args:
            teacher: the teacher's tile, where there is one.
            over: whether ``out`` lies over the tile's own logits, in fewer bytes.
        """
        if self.kept is not None:
            self._write_kept(call, tile, out, out_index, over)
            return
        if self.teacher is None:
            self._write_dense(call, tile, self.coef, out, out_index, over)
            return
        assert teacher is not None
        coef, mean, by = self.coef, self.teacher.mean, self.teacher.by
        pair = Pair(tile, teacher, self.norm, self.teacher.norm, self.teacher.kind, self.teacher.share)
        if coef.square is None and coef.constant is None and coef.at_ids is None:
            call.backend.divergence_gradient(pair, mean, by, coef, out, out_index)
            return
        # Kernels of a divergence know no other readings, so both gradients are added. The divergence's comes first,
        # because `out` may be the logits that it reads.
        more = torch.empty_like(out, memory_format=torch.contiguous_format)
        call.backend.divergence_gradient(pair, mean, by, None, more, out_index)
        self._write_dense(call, tile, coef, out, out_index, over)
        write_at_ids(call.backend, coef, tile.first, tile.columns, out, out_index)
        out.add_(more)

    def _write_dense(
        self, call: Call, tile: Problem, coef: Coefficients, out: Tensor, out_index: Tensor | None, over: bool
    ) -> None:
        """dZ of every column, by one kernel."""
        if over:
            # `gradient` writes blocks of a row in parallel, which would overwrite logits that others still read.
            call.backend.gradient_over(tile, self.norm, coef, out.dtype)
        else:
            run_gradient(call.backend_name, tile, self.norm, coef, out, out_index)

    def _write_kept(self, call: Call, tile: Problem, out: Tensor, out_index: Tensor | None, over: bool) -> None:
        """dZ where log-probs are over a support: dense terms, then finished values at the support's columns."""
        assert self.kept is not None
        support, kept_norm, logprob, g_logprob = self.kept
        gathered, ignored = support.logits(tile), support.target == IGNORE
        dense = None if self.plain else self.coef
        own = upstream_at(dense, gathered.row, gathered.column + tile.first)
        values = kept_gradient(gathered, kept_norm, logprob, g_logprob, self.norm, dense, ignored, own)
        if dense is None:
            out.zero_()
        else:
            no_target = replace(tile, column=tile.column.clamp_max(ELSEWHERE), found=False)
            self._write_dense(call, no_target, dense, out, out_index, over)
            # Asked here: a compiler would trace the search for the backend.
            if dense.at_ids is not None:
                write_at_ids(call.backend, dense, tile.first, tile.columns, out, out_index)
        write_kept(gathered, values, out, out_index)
