"""A teacher's K log-probs beside a chunk of the student's logits: the divergence, and its gradient over the logits.

    X W^T  ->  statistic, logits of the K ids, statistic of all others  ->  log-probs of the outcomes, one all_gather
    terms of ``backends/divergences.py`` on [C, K + 1]  ->  dZ over the logits, finished at the K ids

For a loss that is known in forward; ``top_k`` has the same where backward comes later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.backends.contract import Problem
from logitless.backends.divergences import Divergence, elements
from logitless.distill.stats import DivergenceStats
from logitless.distill.teacher import TopK
from logitless.distill.top_k import Sent, normalised, outcome_gradient
from logitless.extras import Extras, Row, SavedExtras, extended, write_at_ids
from logitless.from_hidden.projection import Projection
from logitless.machine import pieces
from logitless.results import RowResults, extra_results, row_results
from logitless.softmax import SKIP, Coefficients
from logitless.spec import IGNORE


class ListedResults(NamedTuple):
    """``[C]`` results of some rows.

    Attributes:
        row: the student's own.
        divergence: of the outcomes.
        other: the teacher's log-prob and entropy.
        slope: ``[C, O]`` gradient of the divergence by the outcomes' logits.
        saved: what backward needs of the K logits.
    """

    row: RowResults
    divergence: Tensor
    other: tuple[Tensor, Tensor]
    slope: Tensor
    saved: SavedExtras

    def vectors(self) -> tuple[Tensor | None, ...]:
        """In the order of ``DivergenceStats``."""
        row = self.row
        assert row.entropy is not None
        return DivergenceStats(self.divergence, row.logprob, row.entropy, row.log_z, *self.other)


@dataclass(frozen=True, eq=False)
class ListedChunk:
    """Room for the logits of some rows.

    Attributes:
        p: the student, all rows.
        sent: the teacher's outcomes of all rows.
        kind: which divergence.
        logits: flat memory of a chunk.
        columns: of one product.
        elementwise: bytes of working space.
    """

    p: Projection
    sent: Sent
    kind: Divergence
    logits: Tensor
    columns: int
    elementwise: int

    @staticmethod
    def empty(p: Projection, sent: TopK, kind: Divergence, rows: int, columns: int, elementwise: int) -> ListedChunk:
        """Room for so many rows."""
        logits = p.empty((rows, p.call.columns), p.call.logits_dtype)
        return ListedChunk(p, Sent.of(sent, p.call), kind, logits.view(-1), columns, elementwise)

    def results(self, start: int, stop: int) -> ListedResults:
        """Of rows ``start .. stop``, whose logits are then here."""
        rows, other = self.p.cut(start, stop), self.sent.cut(start, stop)
        problem, extras, call = self._problem(rows, rows.column), self._extras(start, stop), rows.call
        for columns in pieces(call.columns, self.columns, rows.hidden.is_meta):
            rows.project(columns.start, problem.logits[:, columns])
        lines = extras.lines(rows.backend, problem, slice(None))
        statistic = rows.backend.statistics(replace(problem, entropy=True, further=()))
        row = row_results(statistic, None, other.ignored, True, call.group, extras, lines)
        assert row.extras is not None
        found, saved = extra_results(extras, row.extras, self._row(row, other, rows), call.group, _no_rank)
        log_p = found["further_logprobs"]
        if other.rest:
            log_p = log_p.masked_fill(torch.nn.functional.pad(other.empty, (0, 1)), -torch.inf)
        else:
            log_p = normalised(log_p, other.empty)
        each = elements(log_p, other.log_q, other.log_q - log_p, self.kind)
        divergence = each.term.sum(-1).masked_fill(other.ignored, 0.0)
        slope = outcome_gradient(log_p, each.weighted_slope).masked_fill(other.ignored[:, None], 0.0)
        return ListedResults(row, divergence, other.own_stats(), slope, saved)

    def gradient(
        self,
        start: int,
        stop: int,
        column: Tensor,
        results: ListedResults,
        by: Tensor,
        coef: Coefficients,
        g_logprob: Tensor,
    ) -> Tensor:
        """``[C, V]`` dZ of the rows that are here, over them, in the operands' dtype.

        Args:
            column: of the targets, ``SKIP`` for rows that get no gradient whatever they hold.
            by: gradient of each row's divergence.
            coef, g_logprob: for log-prob and entropy, and that of the log-prob itself.
        """
        rows, other, extras = self.p.cut(start, stop), self.sent.cut(start, stop), self._extras(start, stop)
        problem, norm = self._problem(rows, column), results.row.norm
        upstream = (torch.where(by[:, None] == 0, 0.0, by[:, None] * results.slope),)
        row = self._row(results.row, other, rows)
        row = row._replace(target=row.target.masked_fill(column == SKIP, IGNORE))
        coef = extended(coef, extras, results.saved, row, results.row.logprob, g_logprob, upstream)
        out = rows.backend.gradient_over(problem, norm, coef, rows.hidden.dtype)
        write_at_ids(rows.backend, coef, 0, rows.call.columns, out)
        return out

    def _problem(self, rows: Projection, column: Tensor) -> Problem:
        count, columns = len(rows.hidden), rows.call.columns
        logits = self.logits[: count * columns].view(count, columns)
        return replace(rows, column=column).problem(logits, self.elementwise)

    def _extras(self, start: int, stop: int) -> Extras:
        extras = self.p.call.extras
        assert extras is not None
        assert extras.ids is not None
        return replace(extras, ids=extras.ids[start:stop])

    def _row(self, row: RowResults, other: Sent, rows: Projection) -> Row:
        return Row(row.norm, other.target, rows.gain, rows.call.squash)


def _no_rank(key: Tensor, place: Tensor) -> Tensor:
    raise AssertionError("no rank is asked for")
