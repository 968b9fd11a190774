"""Divergence from a teacher that sent K log-probs of every row: ``Teacher.from_top_k``.

    bucket         the student's K log-probs over the vocabulary, and that of all other ids: K + 1 outcomes of both
    renormalise    both over the K ids: from dot products with those rows of the weight; from the K log-probs in a loss
                   that has other terms over the vocabulary, and where logits exist

The terms are those of ``backends/divergences.py``, on ``[R, K]`` instead of ``[R, V]``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.backends.divergences import Divergence, elements
from logitless.call import Call, apart_everywhere, recorded
from logitless.distill.stats import DivergenceStats
from logitless.distill.teacher import TopK
from logitless.errors import LogitlessError
from logitless.extras import LARGEST, Extras
from logitless.from_hidden.id_logits import id_logits
from logitless.from_hidden.logprobs import score
from logitless.from_hidden.plan import LinearPlan, SupportPlan, choose_plan
from logitless.from_logits import score_logits
from logitless.softmax import FLOOR
from logitless.spec import IGNORE, Head, TokenStats, inspectable


def check_top_k(call: Call, sent: TopK) -> None:
    """Raise for log-probs that do not go with the rows and the vocabulary of the call."""
    name, ids = call.asked.caller, sent.ids
    if tuple(ids.shape[:-1]) not in (call.shape, (call.num_rows,)):
        raise LogitlessError(
            f"{name}: the teacher's log-probs are {list(ids.shape)} but there are {call.num_rows} rows. Give K for "
            f"every scored row."
        )
    if ids.device != call.gain.device or sent.logprobs.device != call.gain.device:
        raise LogitlessError(f"{name}: the teacher's log-probs are on {ids.device}, the student on {call.gain.device}.")
    if inspectable(ids) and ids.numel() and int(ids.max()) >= call.vocab_size:
        raise LogitlessError(
            f"{name}: the teacher's ids go up to {int(ids.max())}, outside of the student's vocabulary of "
            f"{call.vocab_size}. Use -1 for ids that the student does not have."
        )
    if call.vocab_size > LARGEST:
        raise LogitlessError(f"{name}: log-probs of single ids take up to {LARGEST} columns, not {call.vocab_size}.")


def listing(call: Call, sent: TopK) -> Call:
    """The call of log-probs, asked for those of the teacher's ids besides."""
    ids = Sent.of(sent, call).ids
    negative, rest = (call.asked.head or Head()).scale < 0, sent.tail == "bucket"
    asked = replace(call.asked, further_ids=ids, entropy=call.asked.entropy or "value")
    call = replace(call, asked=asked, entropy=True, extras=Extras((), 0, ids, negative, call.start, rest))
    return replace(call, apart=apart_everywhere(call) or call.apart)


def score_top_k(hidden: Tensor, weight: Tensor, call: Call, sent: TopK, kind: Divergence) -> DivergenceStats:
    """``[R]`` results of a call that was checked, over what ``sent.tail`` says."""
    if sent.tail == "renormalise":
        return _over_ids(hidden, weight, call, sent, kind)
    call = listing(call, sent)
    return score_listed(hidden, weight, call, choose_plan(call, recorded(hidden, weight, call.asked.bias)), sent, kind)


def score_listed(
    hidden: Tensor, weight: Tensor, call: Call, plan: LinearPlan | SupportPlan, sent: TopK, kind: Divergence
) -> DivergenceStats:
    """``[R]`` results of a call of :func:`listing`; log-prob, entropy and log Z are over the vocabulary."""
    return _compared(score(hidden, weight, call, plan), call, sent, kind)


def score_logits_top_k(logits: Tensor, call: Call, sent: TopK, kind: Divergence) -> DivergenceStats:
    """``[R]`` results from logits that exist, over what ``sent.tail`` says."""
    call = listing(call, sent)
    own = score_logits(logits, call)
    if sent.tail == "bucket":
        return _compared(own, call, sent, kind)
    assert own.further_logprobs is not None
    assert own.log_z is not None
    other = Sent.of(sent, call)
    log_p = own.further_logprobs
    # Over the ids they have another normaliser, which is what is left of log Z.
    return _within(log_p, own.log_z + log_p.masked_fill(other.empty, FLOOR).logsumexp(-1), other, kind)


def _compared(own: TokenStats, call: Call, sent: TopK, kind: Divergence) -> DivergenceStats:
    """The student's results over the vocabulary, beside the divergence."""
    log_p, other = own.further_logprobs, Sent.of(sent, call)
    assert log_p is not None
    assert own.entropy is not None
    assert own.log_z is not None
    if sent.tail == "bucket":
        log_p = log_p.masked_fill(torch.nn.functional.pad(other.empty, (0, 1)), -torch.inf)
    else:
        log_p = normalised(log_p, other.empty)
    return DivergenceStats(_divergence(log_p, other, kind), own.logprob, own.entropy, own.log_z, *other.own_stats())


def _over_ids(hidden: Tensor, weight: Tensor, call: Call, sent: TopK, kind: Divergence) -> DivergenceStats:
    """All results over the K ids, and no product with the vocabulary."""
    other = Sent.of(sent, call)
    x, gain = id_logits(hidden, weight, other.ids, call), call.gain[:, None]
    z = gain * torch.tanh(x * call.squash) if call.squash else gain * x
    return _within(z, z.masked_fill(other.empty, FLOOR).logsumexp(-1), other, kind)


def _within(z: Tensor, log_z: Tensor, other: Sent, kind: Divergence) -> DivergenceStats:
    """All results over the K ids, from their logits or anything that differs from those by a number per row."""
    log_p = normalised(z, other.empty)
    # Padding, and ids that the student excludes.
    present = log_p.masked_fill(log_p == -torch.inf, 0.0)
    entropy = -torch.where(log_p == -torch.inf, 0.0, present.exp() * present).sum(-1)
    hit = other.hit
    logprob = torch.where(hit.any(-1), torch.where(hit, log_p, 0.0).sum(-1), -torch.inf)
    logprob, entropy, log_z = (torch.where(other.ignored, 0.0, x) for x in (logprob, entropy, log_z))
    return DivergenceStats(_divergence(log_p, other, kind), logprob, entropy, log_z, *other.own_stats())


class Sent(NamedTuple):
    """A teacher's outcomes of every row.

    Attributes:
        ids: ``[R, K]``, ``IGNORE`` for padding.
        log_q: ``[R, K]``, or ``[R, K + 1]`` with all other ids in the last place; -inf for padding.
        target: ``[R]``.
        rest: whether there is such a place.
    """

    ids: Tensor
    log_q: Tensor
    target: Tensor
    rest: bool

    @staticmethod
    def of(sent: TopK, call: Call) -> Sent:
        count, rest = sent.ids.shape[-1], sent.tail == "bucket"
        ids = sent.ids.reshape(-1, count)
        empty, x = ids < 0, sent.logprobs.detach().reshape(-1, count).double()
        if rest:
            # In float64: what is left of 1 beside log-probs near 0 is in their last digits.
            left = (1.0 - x.exp().masked_fill(empty, 0.0).sum(-1, keepdim=True)).clamp_min(0.0)
            log_q = torch.cat([x.masked_fill(empty, -torch.inf), left.log()], -1)
        else:
            log_q = normalised(x, empty)
        return Sent(ids.masked_fill(empty, IGNORE), log_q.to(call.gain.dtype), call.rows.target, rest)

    def cut(self, start: int, stop: int) -> Sent:
        """Rows ``start .. stop`` of it."""
        return Sent(self.ids[start:stop], self.log_q[start:stop], self.target[start:stop], self.rest)

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

    def own_stats(self) -> tuple[Tensor, Tensor]:
        """``[R]`` the teacher's log-prob of the target, and its entropy over the outcomes that are known of it."""
        hit, listed = self.hit, self.log_q[:, : self.ids.shape[1]]
        # Of one of the ids that are counted together nothing is known.
        missing = torch.nan if self.rest else -torch.inf
        logprob = torch.where(hit.any(-1), torch.where(hit, listed, 0.0).sum(-1), missing)
        entropy = -torch.where(self.log_q == -torch.inf, 0.0, self.log_q.exp() * self.log_q).sum(-1)
        return logprob.masked_fill(self.ignored, 0.0), entropy.masked_fill(self.ignored, 0.0)


def normalised(z: Tensor, empty: Tensor) -> Tensor:
    """Log-probs over the places that have an id; -inf for the others, also in a row that has none.

    NaN where every id of a row is excluded: nothing is a distribution over nothing.
    """
    nothing = ((z == -torch.inf) | empty).all(-1, keepdim=True)
    found = z.masked_fill(empty, FLOOR).log_softmax(-1)
    return found.masked_fill(nothing, torch.nan).masked_fill(empty, -torch.inf)


def _divergence(log_p: Tensor, other: Sent, kind: Divergence) -> Tensor:
    """``[R]``; 0 for ignored rows, whatever they hold."""
    return torch.where(other.ignored, 0.0, _Outcomes.apply(log_p, other.log_q, kind))


class _Outcomes(torch.autograd.Function):
    """Sum of the terms, with the gradient by the logarithms of all outcomes: autograd's own would divide by vanishing
    probabilities."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, log_q: Tensor, kind: Divergence) -> Tensor:
        found = elements(log_p, log_q, log_q - log_p, kind)
        ctx.save_for_backward(outcome_gradient(log_p, found.weighted_slope))
        return found.term.sum(-1)

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
