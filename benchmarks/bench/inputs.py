"""Logits or hidden states, targets and upstream gradients of a case, reproducible from a seed.

Peaked logits imitate a trained model. Column k of a shuffled vocabulary gets the bias ``-1.1 log(k + 1)`` (Zipf), and
in most rows the target is lifted to a chosen log-odds over all other columns together, so that p(target) runs from 0.3
to 0.999999. Confident rows are where gradients lose digits and where a softmax kernel meets mostly zeros.

From hidden states the same is done with the operands: one coordinate of every hidden state is constant and carries the
bias, and hidden states are moved along the weight of their target. The log-odds are then right up to the chance
products of that weight with the others.

What a trained model makes of a text (``Trained``) is taken as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.bench.cases import Case
from logitless.errors import LogitlessError
from logitless.objectives import Objective
from logitless.rows import Rows
from logitless.spec import IGNORE, TokenStats

SAMPLE_LENGTH = 1024
BLOCK_ELEMENTS = 1 << 28
BOOSTED = 0.85
P_RANGE = (0.3, 0.999999)
# The constant coordinate of peaked hidden states: a power of two, so that half precision holds it exactly.
CARRIER = 4.0
# Of a case that is a loss: bounds of the ratio, and the entropy's coefficient.
CLIP = (0.2, 0.28)
BONUS = 0.01


class Trained(NamedTuple):
    """``[T, D]`` hidden states that a model has of a text, ``[V, D]`` its head, and ``[T]`` the tokens that follow."""

    hidden: Tensor
    weight: Tensor
    target: Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        """T, V and D."""
        return len(self.hidden), self.weight.shape[0], self.weight.shape[1]


@dataclass(frozen=True, eq=False)
class Batch:
    """Everything about a case but its logits or hidden states.

    Attributes:
        case: the case.
        rows: plan of the scored rows.
        labels: ``[T]`` target of every row, ``-100`` for rows that are not scored.
        g_logprob: ``[R]`` upstream gradient of the log-probs, random.
        g_entropy: ``[R]`` upstream gradient of the entropies, random.
        seed: what the logits, or the hidden states and the weight, are drawn from.
        advantage: ``[R]`` of a loss, random.
        old_logprob: ``[R]`` of a loss; the upstream gradients are then those of the loss.
        trained: what the logits, or the hidden states and the weight, are taken from instead.
    """

    case: Case
    rows: Rows
    labels: Tensor
    g_logprob: Tensor
    g_entropy: Tensor
    seed: int
    advantage: Tensor | None = None
    old_logprob: Tensor | None = None
    trained: Trained | None = None

    @property
    def index(self) -> Tensor | None:
        """``[R]`` scored rows, or None where all of them are."""
        return None if len(self.rows) == self.case.tokens else self.rows.index

    @property
    def objective(self) -> Objective:
        """What the case minimises, if it is a loss."""
        return Objective(policy="ppo_clip", clip=CLIP, entropy_coef=BONUS if self.case.entropy == "grad" else 0.0)

    def loss_of(self, logprob: Tensor, entropy: Tensor | None) -> Tensor:
        """The case's loss from one log-prob and entropy per row; without the bonus where there is no entropy."""
        objective = self.objective if entropy is not None else replace(self.objective, entropy_coef=0.0)
        stats = TokenStats(logprob, entropy, logprob.detach())
        return objective(stats, self.rows, old_logprob=self.old_logprob, advantage=self.advantage)[0]

    def with_loss(self, logprob: Tensor, entropy: Tensor) -> Batch:
        """The same batch, some updates after its samples were drawn: old log-probs around the true ones given.

        No ratio lies within a thousandth of a bound, so that rounding decides nothing. The upstream gradients become
        the loss's own, for the truth to use.
        """
        generator = torch.Generator().manual_seed(self.seed + 5)
        ratio = torch.exp(0.2 * torch.randn(len(logprob), generator=generator))
        for bound in (1 - CLIP[0], 1 + CLIP[1]):
            ratio = torch.where((ratio - bound).abs() < 1e-3, bound + 2e-3, ratio)
        batch = replace(self, old_logprob=(logprob - ratio.log().to(logprob)).float())
        with torch.enable_grad():
            leaves = [x.detach().float().requires_grad_() for x in (logprob, entropy)]
            g = torch.autograd.grad(batch.loss_of(*leaves), leaves, allow_unused=True)
        return replace(batch, g_logprob=g[0], g_entropy=torch.zeros_like(g[0]) if g[1] is None else g[1])

    def with_mean_loss(self) -> Batch:
        """The same batch with the upstream gradients that a mean cross entropy has."""
        share = torch.full_like(self.g_logprob, -1 / max(1, len(self.rows)))
        return replace(self, g_logprob=share, g_entropy=torch.zeros_like(share))


def make_batch(case: Case, device: torch.device, seed: int = 0, trained: Trained | None = None) -> Batch:
    """Rows, targets and upstream gradients of a case; ``trained`` is what a case of that kind is made from."""
    trained = _fitting(case, trained) if case.logits == "trained" else None
    generator = torch.Generator().manual_seed(seed)
    index = scored_rows(case.tokens, case.response)
    if trained is None:
        target = _draw_targets(case, index.numel(), generator, seed)
    else:
        target = trained.target.cpu()[index]
    g_logprob, g_entropy = torch.randn(2, index.numel(), generator=generator)
    labels = torch.full((case.tokens,), IGNORE).index_copy_(0, index, target)
    advantage = torch.randn(index.numel(), generator=generator)
    advantage[torch.rand(index.numel(), generator=generator) < case.zero_advantage] = 0.0
    rows = Rows.at(index.to(device), target.to(device), num_tokens=case.tokens)
    if len(rows) == case.tokens:
        rows = Rows.every(target.to(device))
    labels, g_logprob, g_entropy, advantage = (x.to(device) for x in (labels, g_logprob, g_entropy, advantage))
    return Batch(case, rows, labels, g_logprob, g_entropy, seed, advantage, trained=trained)


def _fitting(case: Case, trained: Trained | None) -> Trained:
    """The same, if the case can be made from it."""
    if trained is None:
        raise LogitlessError(f"bench: case {case.name} is of a trained model, and none is given.")
    wanted = (case.tokens, case.vocab, trained.sizes[2] if case.hidden is None else case.hidden)
    if trained.sizes != wanted:
        raise LogitlessError(f"bench: case {case.name} has T, V, D = {wanted}, the trained model {trained.sizes}.")
    return trained


def scored_rows(tokens: int, response: float) -> Tensor:
    """Indices of the response rows when every 1024 tokens are one sample, prompt first.

    >>> scored_rows(8, 0.25).tolist()
    [6, 7]
    """
    length = min(SAMPLE_LENGTH, tokens)
    prompt = length - max(1, round(length * response))
    position = torch.arange(tokens) % length
    return (position >= prompt).nonzero().squeeze(1)


def fill_logits(batch: Batch, out: Tensor) -> Tensor:
    """Write the case's logits over ``out`` (``[T, V]``), the same values every time on the same kind of device."""
    case = batch.case
    if batch.trained is not None:
        for part, rows in zip(*(x.split(block_rows(case.vocab)) for x in (out, batch.trained.hidden)), strict=True):
            part.copy_(product(rows, batch.trained.weight))
        return out
    generator = torch.Generator(out.device).manual_seed(batch.seed)
    odds = _log_odds(batch).to(out.device)
    bias = _zipf_bias(case, batch.seed).to(out.device) if case.logits == "peaked" else None
    block = block_rows(case.vocab)
    for start in range(0, case.tokens, block):
        part = out[start : start + block]
        direct = part.dtype == torch.float32
        z = part if direct else torch.empty(part.shape, device=part.device)
        z.normal_(generator=generator)
        if bias is None:
            z.mul_(2.0)
        else:
            _lift_targets(z.add_(bias), batch.labels[start : start + block], odds[start : start + block])
        if not direct:
            part.copy_(z)
    return out


def fill_operands(batch: Batch, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Write the case's hidden states (``[T, D]``) and weight (``[V, D]``), whose product has a spread like logits."""
    if batch.trained is not None:
        return hidden.copy_(batch.trained.hidden), weight.copy_(batch.trained.weight)
    generator = torch.Generator(hidden.device).manual_seed(batch.seed)
    hidden.normal_(generator=generator)
    weight.normal_(generator=generator)
    scale = hidden.shape[1] ** -0.5
    if batch.case.logits == "gaussian":
        weight.mul_(2 * scale)
        return hidden, weight
    bias = _zipf_bias(batch.case, batch.seed).to(weight.device)
    weight.mul_(scale)
    weight[:, 0] = bias / CARRIER
    hidden[:, 0] = CARRIER
    odds = _log_odds(batch).to(hidden.device)
    # The products have variance one around the bias, and the mean of exp(noise) is exp(1/2).
    goal = bias.logsumexp(0) + 0.5 + odds
    lifted = ((batch.labels != IGNORE) & ~odds.isnan()).nonzero().squeeze(1)
    for rows in lifted.split(max(1, BLOCK_ELEMENTS // (8 * hidden.shape[1]))):
        towards, state = weight[batch.labels[rows]].float(), hidden[rows].float()
        missing = goal[rows] - (state * towards).sum(1)
        towards[:, 0] = 0
        hidden[rows] = (state + towards * (missing / towards.square().sum(1))[:, None]).to(hidden.dtype)
    return hidden, weight


def product(rows: Tensor, weight: Tensor) -> Tensor:
    """``rows @ weight.T`` in float32, whatever the dtype of the operands."""
    if rows.device.type == "cuda" and rows.dtype != torch.float32:
        return torch.mm(rows, weight.T, out_dtype=torch.float32)
    return rows.float() @ weight.float().T


def block_rows(vocab: int) -> int:
    """Rows whose float32 logits may exist at a time."""
    return max(1, BLOCK_ELEMENTS // vocab)


def _zipf_bias(case: Case, seed: int) -> Tensor:
    rank = torch.randperm(case.vocab, generator=torch.Generator().manual_seed(seed + 1))
    return -1.1 * torch.log1p(rank.float())


def _draw_targets(case: Case, count: int, generator: torch.Generator, seed: int) -> Tensor:
    if case.logits == "gaussian":
        return torch.randint(case.vocab, (count,), generator=generator)
    share = _zipf_bias(case, seed).double().exp().cumsum(0)
    spot = torch.rand(count, generator=generator, dtype=torch.float64) * share[-1]
    return torch.searchsorted(share, spot).clamp_max(case.vocab - 1)


def _log_odds(batch: Batch) -> Tensor:
    """``[T]`` log-odds to give the target of each row, NaN for the rows left as they are."""
    generator = torch.Generator().manual_seed(batch.seed + 2)
    low, high = (math.log(p) - math.log1p(-p) for p in P_RANGE)
    odds = low + (high - low) * torch.rand(batch.case.tokens, generator=generator)
    left = torch.rand(batch.case.tokens, generator=generator) >= BOOSTED
    return odds.masked_fill(left, torch.nan)


def _lift_targets(z: Tensor, labels: Tensor, odds: Tensor) -> None:
    lifted = ((labels != IGNORE) & ~odds.isnan()).nonzero().squeeze(1)
    column = labels[lifted]
    # The target is taken out of its row, so that the odds are over all other columns together.
    z[lifted, column] = -torch.inf
    others = torch.cat([part.logsumexp(1) for part in z.split(256)])
    z[lifted, column] = others[lifted] + odds[lifted]
