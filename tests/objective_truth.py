"""What the papers say, token by token and sample by sample, in Python loops over numbers with a graph.

Nothing here is shared with the library: no weights per row, no segment sums, no packed vectors. A batch is a list of
samples, each a list of tokens. ``dtype`` is float64 for the truth and float32 for plain torch's own error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from logitless import Rows, TokenStats

LENGTHS = [7, 0, 13, 1, 5, 3]
PROMPT_OF = [0, 0, 1, 1, 2, 2]
FIELDS = ("logprob", "old_logprob", "ref_logprob", "rollout_logprob", "advantage", "entropy")


@dataclass(frozen=True)
class Batch:
    """Whole responses: for every field one float64 vector per sample."""

    tokens: list[list[int]]
    lengths: list[int]
    masks: list[list[int]]
    values: dict[str, list[Tensor]]

    def __len__(self) -> int:
        return len(self.lengths)

    def pick(self, samples: list[int]) -> Batch:
        """Some of the samples: a micro-batch."""
        values = {name: [x[i] for i in samples] for name, x in self.values.items()}
        own = [[column[i] for i in samples] for column in (self.tokens, self.lengths, self.masks)]
        return Batch(*own, values)

    def rows(self, **options: Any) -> Rows:
        return Rows.packed(self.tokens, self.lengths, self.masks, **options)

    def fields(self, rows: Rows, dtype: torch.dtype, names: tuple[str, ...] = FIELDS) -> dict[str, Tensor]:
        """``[R]`` vectors of the rows, rounded from the same float64 numbers."""
        if not len(self):
            return {name: torch.zeros(0, dtype=dtype) for name in names}
        return {name: rows.from_responses(self.values[name]).to(dtype) for name in names}


def draw(lengths: list[int] = LENGTHS, spread: float = 0.4, masked: tuple[int, ...] = (5,)) -> Batch:
    """A random batch: some tokens masked, the samples in ``masked`` wholly, one advantage per sample."""
    masks = [[int(x) for x in torch.rand(n) < 0.7] for n in lengths]
    masks = [
        [0] * n if i in masked else [1, *mask[1:]] if n else mask
        for i, (n, mask) in enumerate(zip(lengths, masks, strict=True))
    ]
    # All numbers are float32 numbers, so that both dtypes start from the same ones.
    old = [(-torch.rand(n) * 3).double() for n in lengths]
    near = {name: [(x + spread * torch.randn(len(x))).float().double() for x in old] for name in FIELDS[:4]}
    values = {
        **near,
        "old_logprob": old,
        "advantage": [torch.randn(()).double().expand(n).clone() for n in lengths],
        "entropy": [torch.rand(n).double() for n in lengths],
    }
    return Batch([torch.randint(50, (3 + n,)).tolist() for n in lengths], lengths, masks, values)


@dataclass(frozen=True)
class Told:
    """The loss, and its gradient with respect to log-probs and entropies of every response token, in one vector."""

    loss: Tensor
    logprob: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class Formula:
    """Which formulas to add up. Options are those of the paper."""

    policy: str = "ppo_clip"
    options: dict[str, Any] = field(default_factory=dict)
    correction: str | None = None
    bounds: tuple[float, ...] = ()
    kl: str | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    reduce: str = "token_mean"
    length: int = 1


def tell(batch: Batch, formula: Formula, dtype: torch.dtype = torch.float64, on_policy: bool = False) -> Told:
    """Loss and gradients of a whole batch."""
    x = {name: [v.to(dtype) for v in batch.values[name]] for name in FIELDS}
    for name in ("logprob", "entropy"):
        x[name] = [v.clone().requires_grad_() for v in x[name]]
    if on_policy:
        x["old_logprob"] = [v.detach() for v in x["logprob"]]
    losses = []
    for i in range(len(batch)):
        tokens = [t for t in range(batch.lengths[i]) if batch.masks[i][t]]
        sample = {name: [x[name][i][t] for t in tokens] for name in FIELDS}
        losses.append(_sample_losses(sample, formula))
    loss = _reduce(losses, formula, dtype)
    leaves = [*x["logprob"], *x["entropy"]]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else [None] * len(leaves)
    flat = [torch.zeros_like(v) if g is None else g for v, g in zip(leaves, gradients, strict=True)]
    return Told(loss.detach(), torch.cat(flat[: len(batch)]), torch.cat(flat[len(batch) :]))


def _sample_losses(sample: dict[str, list[Tensor]], formula: Formula) -> list[Tensor]:
    """Loss of every counted token of one sample."""
    num = len(sample["logprob"])
    out = []
    weights = _corrections(sample, formula)
    policies = _policies(sample, formula.policy, formula.options)
    for t in range(num):
        loss = weights[t] * policies[t]
        if formula.kl_coef:
            loss = loss + formula.kl_coef * _kl(
                formula.kl, *(sample[n][t] for n in ("logprob", "ref_logprob", "old_logprob"))
            )
        loss = loss - formula.entropy_coef * sample["entropy"][t]
        out.append(loss)
    return out


def _policies(sample: dict[str, list[Tensor]], policy: str, o: dict[str, Any]) -> list[Tensor]:
    new, old, advantages = sample["logprob"], sample["old_logprob"], sample["advantage"]
    num = len(new)
    if policy == "gspo" and num:
        sequence = torch.exp(sum(new[t] - old[t] for t in range(num)) / num)
        return [_clipped(sequence, advantages[t], **o) for t in range(num)]
    out = []
    for t in range(num):
        ratio, a = torch.exp(new[t] - old[t]), advantages[t]
        if policy == "ppo_clip":
            out.append(_clipped(ratio, a, **o))
        elif policy == "cispo":
            weight = (
                1 - o["low"] if ratio < 1 - o["low"] else 1 + o["high"] if ratio > 1 + o["high"] else ratio.detach()
            )
            out.append(-a * new[t] * weight)
        elif policy == "sapo":
            tau = o["positive"] if a > 0 else o["negative"]
            out.append(-a * (4 / tau) / (1 + torch.exp(-tau * (ratio - 1))))
        elif policy == "reinforce":
            out.append(-a * new[t])
    return out


def _clipped(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """``min(r A, clip(r) A)``, in words: a gain is not taken beyond the bound, a loss is."""
    if advantage >= 0:
        surrogate = ratio * advantage if ratio <= 1 + high else (1 + high) * advantage
    else:
        surrogate = ratio * advantage if ratio >= 1 - low else (1 - low) * advantage
        if dual is not None and surrogate < dual * advantage:
            surrogate = dual * advantage
    return -surrogate


def _corrections(sample: dict[str, list[Tensor]], formula: Formula) -> list[Tensor | float]:
    num = len(sample["logprob"])
    name = formula.correction
    if name is None or not num:
        return [1.0] * num
    logs = [(a - b).detach() for a, b in zip(sample["old_logprob"], sample["rollout_logprob"], strict=True)]
    if name == "opsm":
        drift = sum((o - n).detach() for o, n in zip(sample["old_logprob"], sample["logprob"], strict=True)) / num
        return [0.0 if a < 0 and drift > formula.bounds[0] else 1.0 for a in sample["advantage"]]
    low, high = formula.bounds
    if name == "tis":
        return [w if low <= w <= high else (low if w < low else high) for w in map(torch.exp, logs)]
    if name == "icepop":
        return [w if low <= w <= high else 0.0 for w in map(torch.exp, logs)]
    product, geometric = torch.exp(sum(logs)), torch.exp(sum(logs) / num)
    if name == "sequence_icepop":
        return [product if low <= product <= high else 0.0] * num
    if name == "geometric_mask":
        return [1.0 if low <= geometric <= high else 0.0] * num
    weight = product if name == "sequence_tis" else geometric
    return [weight if low <= weight <= high else (low if weight < low else high)] * num


def _kl(kind: str | None, new: Tensor, ref: Tensor, old: Tensor) -> Tensor:
    assert kind is not None
    base = kind.split("_")[0]

    def value(lp: Tensor) -> Tensor:
        d = lp - ref
        if base == "k1":
            return d
        if base == "abs":
            return d if d > 0 else -d
        return d * d / 2 if base == "k2" else torch.exp(-d) - 1 + d

    if kind.endswith("_straight_through"):
        # A number with the derivative d of k2.
        return value(new.detach()) + (new - ref).detach() * (new - new.detach())
    return torch.exp(new - old) * value(new) if kind.endswith("_weighted") else value(new)


def _reduce(losses: list[list[Tensor]], formula: Formula, dtype: torch.dtype) -> Tensor:
    zero = torch.zeros((), dtype=dtype)
    sums = [sum(x, zero) for x in losses]
    if formula.reduce == "token_mean":
        return sum(sums, zero) / max(1, sum(len(x) for x in losses))
    if formula.reduce == "sample_mean":
        return sum((s / max(1, len(x)) for s, x in zip(sums, losses, strict=True)), zero) / len(losses)
    if formula.reduce == "sample_sum":
        return sum((s / formula.length for s in sums), zero) / len(losses)
    prompts = sorted(set(PROMPT_OF[: len(losses)]))
    out = zero
    for prompt in prompts:
        members = [i for i in range(len(losses)) if PROMPT_OF[i] == prompt]
        out = out + sum((sums[i] for i in members), zero) / max(1, sum(len(losses[i]) for i in members))
    return out / len(prompts)


def stats_of(fields: dict[str, Tensor]) -> TokenStats:
    """Leaves to differentiate with respect to, in the library's result type."""
    logprob, entropy = (fields[name].clone().requires_grad_() for name in ("logprob", "entropy"))
    return TokenStats(logprob, entropy, torch.zeros_like(logprob))
