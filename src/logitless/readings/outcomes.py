"""Divergence over listed outcomes: a teacher's K log-probs of every row, beside the student's of the same ids.

    bucket         the student's K log-probs over the vocabulary, and that of all other ids: K + 1 outcomes of both
    renormalise    both over the K ids

The terms are those of ``backends/divergences.py``, on ``[R, K]`` instead of ``[R, V]``: small tensors with a graph of
their own, made once the student's log-probs of the ids are known.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.backends.divergences import Divergence, over_outcomes
from logitless.operands.teacher import TopK
from logitless.softmax import FLOOR
from logitless.spec import IGNORE, TokenStats


class Sent(NamedTuple):
    """A teacher's outcomes of every row.

    Attributes:
        ids: ``[R, K]``, ``IGNORE`` for padding.
        log_q: ``[R, K]``, or ``[R, K + 1]`` with all other ids in the last place; -inf for padding.
        target: ``[R]``.
        rest: whether the last place of ``log_q`` is that of all other ids.
    """

    ids: Tensor
    log_q: Tensor
    target: Tensor
    rest: bool

    @staticmethod
    def of(sent: TopK, target: Tensor, dtype: torch.dtype) -> Sent:
        count, rest = sent.ids.shape[-1], sent.tail == "bucket"
        ids = sent.ids.reshape(-1, count)
        empty, x = ids < 0, sent.logprobs.detach().reshape(-1, count).double()
        if rest:
            # The rest is 1 less the listed probabilities, in float64: beside log-probs near 0 it is in the last digits.
            left = (1.0 - x.exp().masked_fill(empty, 0.0).sum(-1, keepdim=True)).clamp_min(0.0)
            log_q = torch.cat([x.masked_fill(empty, -torch.inf), left.log()], -1)
        else:
            log_q = normalised(x, empty)
        return Sent(ids.masked_fill(empty, IGNORE), log_q.to(dtype), target, rest)

    def cut(self, rows: slice) -> Sent:
        return Sent(self.ids[rows], self.log_q[rows], self.target[rows], self.rest)

    @property
    def empty(self) -> Tensor:
        """``[R, K]`` places without an id."""
        return self.ids == IGNORE

    @property
    def ignored(self) -> Tensor:
        return self.target == IGNORE

    @property
    def hit(self) -> Tensor:
        """``[R, K]`` whether the id is the row's target."""
        return (self.ids == self.target[:, None]) & ~self.empty

    def own(self) -> dict[str, Tensor]:
        """``[R]`` the teacher's log-prob of the target, and its entropy over the outcomes that it sent."""
        hit, listed = self.hit, self.log_q[:, : self.ids.shape[1]]
        # A target among the ids that are counted together has no known log-prob.
        missing = torch.nan if self.rest else -torch.inf
        logprob = torch.where(hit.any(-1), torch.where(hit, listed, 0.0).sum(-1), missing)
        entropy = -torch.where(self.log_q == -torch.inf, 0.0, self.log_q.exp() * self.log_q).sum(-1)
        logprob, entropy = (x.masked_fill(self.ignored, 0.0) for x in (logprob, entropy))
        return {"teacher_logprob": logprob, "teacher_entropy": entropy}

    def over_outcomes(self, log_p: Tensor) -> Tensor:
        """The student's log-probs of the outcomes, from those of the ids (and of all others) over the vocabulary."""
        if self.rest:
            return log_p.masked_fill(torch.nn.functional.pad(self.empty, (0, 1)), -torch.inf)
        return normalised(log_p, self.empty)

    def divergence(self, log_p: Tensor, kind: Divergence) -> Tensor:
        """``[R]``, with a graph; 0 for ignored rows, whatever they hold."""
        return torch.where(self.ignored, 0.0, _Outcomes.apply(log_p, self.log_q, kind))


def compared(own: TokenStats, other: Sent, kind: Divergence) -> TokenStats:
    """The student's results over the vocabulary, with the divergence."""
    assert own.ids_logprobs is not None
    divergence = other.divergence(other.over_outcomes(own.ids_logprobs), kind)
    return own._replace(ids_logprobs=None, divergence=divergence, **other.own())


def within(own: TokenStats | None, z: Tensor, log_z: Tensor, other: Sent, kind: Divergence) -> TokenStats:
    """All results over the K ids, from their logits or anything that differs from those by a number per row.

    Results over the vocabulary (``own``, or None) stay where there are none over K ids.
    """
    log_p = normalised(z, other.empty)
    # -inf stands for padding, and for ids that the student excludes.
    present = log_p.masked_fill(log_p == -torch.inf, 0.0)
    entropy = -torch.where(log_p == -torch.inf, 0.0, present.exp() * present).sum(-1)
    hit = other.hit
    logprob = torch.where(hit.any(-1), torch.where(hit, log_p, 0.0).sum(-1), -torch.inf)
    logprob, entropy, log_z = (torch.where(other.ignored, 0.0, x) for x in (logprob, entropy, log_z))
    found = {"logprob": logprob, "entropy": entropy, "log_z": log_z, "divergence": other.divergence(log_p, kind)}
    return (own or TokenStats(logprob))._replace(ids_logprobs=None, **found, **other.own())


def normalised(z: Tensor, empty: Tensor) -> Tensor:
    """Log-probs over the places that have an id; -inf for the others, also in a row that has none.

    NaN where every id of a row is excluded: there is no distribution over nothing.
    """
    nothing = ((z == -torch.inf) | empty).all(-1, keepdim=True)
    log_p = z.masked_fill(empty, FLOOR).log_softmax(-1)
    return log_p.masked_fill(nothing, torch.nan).masked_fill(empty, -torch.inf)


class _Outcomes(torch.autograd.Function):
    """Sum of the terms, with the gradient by the logarithms of all outcomes: autograd's own would divide by vanishing
    probabilities."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, log_q: Tensor, kind: Divergence) -> Tensor:
        value, slope = over_outcomes(log_p, log_q, kind, lambda x: x.sum(-1), lambda x: x[:, None])
        ctx.save_for_backward(outcome_gradient(log_p, slope))
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = ctx.saved_tensors
        return upstream[:, None] * gradient, None, None


def outcome_gradient(log_p: Tensor, weighted_slope: Tensor) -> Tensor:
    """``[R, O]`` gradient by each outcome's logit, ``p slope - p mean``; it adds up to 0.

    As ``p slope (sum of the others' p) - p (sum of the others' p slope)``: where one outcome is nearly certain, nothing
    of its size is subtracted. Sums without one of their terms are differences in float64.
    """
    p, u = log_p.double().exp(), weighted_slope.double()
    others_p, others_u = p.sum(-1, keepdim=True) - p, u.sum(-1, keepdim=True) - u
    return (u * others_p - p * others_u).to(log_p.dtype)
