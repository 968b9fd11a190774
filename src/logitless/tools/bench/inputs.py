"""Logits or hidden states, targets and upstream gradients of a case, reproducible from a seed.

Peaked logits imitate a trained model. Column k of a shuffled vocabulary gets the bias ``-1.1 log(k + 1)`` (Zipf), and
in most rows the target is lifted to a chosen log-odds over all other columns together, so that p(target) runs from 0.3
to 0.999999. Confident rows are where gradients lose digits and where a softmax kernel meets mostly zeros.

From hidden states the operands make such logits: one coordinate of every hidden state is constant and carries the bias,
and each hidden state is moved along the weight of its target. The log-odds are then right up to the chance products of
that weight with the other weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from logitless.objectives import Objective
from logitless.rows import Rows
from logitless.spec import IGNORE, TokenStats
from logitless.tools.bench.cases import Case

SAMPLE_LENGTH = 1024
BLOCK_ELEMENTS = 1 << 28
BOOSTED = 0.85
P_RANGE = (0.3, 0.999999)
# The constant coordinate of peaked hidden states: a power of two, so that half precision holds it exactly.
CARRIER = 4.0
# In a case that is a loss: bounds of the ratio, and the entropy's coefficient.
CLIP = (0.2, 0.28)
BONUS = 0.01


@dataclass(frozen=True, eq=False)
class Batch:
    """Everything about a case but its logits or hidden states.

    Attributes:
        case: the case.
        rows: the scored rows.
        labels: ``[T]`` target of every row, ``-100`` for rows that are not scored.
        g_logprob: ``[R]`` upstream gradient of the log-probs, random.
        g_entropy: ``[R]`` upstream gradient of the entropies, random.
        seed: seed of the logits, or of the hidden states and the weight.
        advantage: ``[R]`` random advantages, for a loss.
        old_logprob: ``[R]`` for a loss; the upstream gradients are then those of the loss.
    """

    case: Case
    rows: Rows
    labels: Tensor
    g_logprob: Tensor
    g_entropy: Tensor
    seed: int
    advantage: Tensor | None = None
    old_logprob: Tensor | None = None

    @property
    def index(self) -> Tensor | None:
        """``[R]`` scored rows, or None where every token is scored."""
        return None if len(self.rows) == self.case.tokens else self.rows.index

    @property
    def objective(self) -> Objective:
        """The objective of a case that is a loss."""
        return Objective(policy="ppo_clip", clip=CLIP, entropy_coef=BONUS if self.case.entropy == "grad" else 0.0)

    def loss_of(self, logprob: Tensor, entropy: Tensor | None) -> Tensor:
        """The case's loss from one log-prob and entropy per row; without the bonus where there is no entropy."""
        objective = self.objective if entropy is not None else replace(self.objective, entropy_coef=0.0)
        stats = TokenStats(logprob, entropy, logprob.detach())
        return objective(stats, self.rows, old_logprob=self.old_logprob, advantage=self.advantage)[0]

    def with_loss(self, logprob: Tensor, entropy: Tensor) -> Batch:
        """The same batch, some updates after its samples were drawn: its old log-probs scatter around ``logprob``.

        No ratio lies within a thousandth of a bound, so that rounding decides nothing. The upstream gradients become
        those of the loss, for the truth to use.
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
        """The same batch with the upstream gradients of a mean cross entropy."""
        share = torch.full_like(self.g_logprob, -1 / max(1, len(self.rows)))
        return replace(self, g_logprob=share, g_entropy=torch.zeros_like(share))


def make_batch(case: Case, device: torch.device, seed: int = 0) -> Batch:
    """Rows, targets and upstream gradients of a case."""
    generator = torch.Generator().manual_seed(seed)
    index = scored_rows(case.tokens, case.response)
    target = _draw_targets(case, index.numel(), generator, seed)
    g_logprob, g_entropy = torch.randn(2, index.numel(), generator=generator)
    labels = torch.full((case.tokens,), IGNORE).index_copy_(0, index, target)
    advantage = torch.randn(index.numel(), generator=generator)
    advantage[torch.rand(index.numel(), generator=generator) < case.zero_advantage] = 0.0
    rows = Rows.at(index.to(device), target.to(device), num_tokens=case.tokens)
    if len(rows) == case.tokens:
        rows = Rows.every(target.to(device))
    return Batch(case, rows, labels.to(device), g_logprob.to(device), g_entropy.to(device), seed, advantage.to(device))


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
    generator = torch.Generator(out.device).manual_seed(batch.seed)
    odds = _log_odds(batch).to(out.device)
    bias = _zipf_bias(case, batch.seed).to(out.device) if case.logits == "peaked" else None
    block = max(1, BLOCK_ELEMENTS // case.vocab)
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


def hand_over(buffer: Tensor) -> Tensor:
    """The buffer as a model's output would arrive: it requires a gradient and is neither a leaf nor a view.

    No copy is made, so a provider that overwrites its input overwrites ``buffer``.
    """
    handle = torch.zeros((), device=buffer.device, requires_grad=True)
    return _HandOver.apply(handle, buffer)  # pyright: ignore[reportReturnType]


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, handle: Tensor, buffer: Tensor) -> Tensor:
        return buffer.detach()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[None, None]:
        # The gradient is taken at the output, so nothing before it needs one.
        return None, None


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
    """``[T]`` log-odds that the target of each row gets, NaN for rows that stay as they are."""
    generator = torch.Generator().manual_seed(batch.seed + 2)
    low, high = (math.log(p) - math.log1p(-p) for p in P_RANGE)
    odds = low + (high - low) * torch.rand(batch.case.tokens, generator=generator)
    left = torch.rand(batch.case.tokens, generator=generator) >= BOOSTED
    return odds.masked_fill(left, torch.nan)


def _lift_targets(z: Tensor, labels: Tensor, odds: Tensor) -> None:
    lifted = ((labels != IGNORE) & ~odds.isnan()).nonzero().squeeze(1)
    column = labels[lifted]
    # Without its target, a row's logsumexp is over all other columns.
    z[lifted, column] = -torch.inf
    others = torch.cat([part.logsumexp(1) for part in z.split(256)])
    z[lifted, column] = others[lifted] + odds[lifted]
