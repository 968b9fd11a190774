"""Policy losses for the oracle: the formulas of the papers on whole vectors, sums over samples by a matrix of ones.

Shares nothing with ``logitless.objectives``. Next to the loss it tells how sensitive each row's gradient is (*slack*),
and how far every comparison is from its bound (*margin*): at the bound itself either side is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuzz.build import Inputs

LARGEST = 20.0
"""The documented bound of a log-ratio."""

RECIPES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "grpo": {"reduce": "sample_mean", "kl": "k3"},
    "dapo": {"clip": (0.2, 0.28)},
    "dr_grpo": {"reduce": "sample_sum"},
    "gspo": {"policy": "gspo", "reduce": "sample_mean"},
    "cispo": {"policy": "cispo"},
    "sapo": {"policy": "sapo", "reduce": "sample_mean"},
    "reinforce": {"policy": "reinforce"},
    "reinforce++": {},
    "reinforce++_baseline": {"kl": "k2"},
    "sft": {"policy": "cross_entropy"},
    "dft": {"policy": "dft"},
}
"""As documented."""

CLIPS = {"ppo_clip": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
BOUNDS = {
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_tis": (0.0, 2.0),
    "sequence_icepop": (0.5, 5.0),
    "geometric_tis": (0.0, 2.0),
    "geometric_mask": (0.99, 1.01),
}


@dataclass(frozen=True)
class Fields:
    """``[R]`` what a loss is given besides log-probs, for every row of the case; float32 numbers."""

    old_logprob: Tensor
    ref_logprob: Tensor
    rollout_logprob: Tensor
    advantage: Tensor


@dataclass(frozen=True)
class Told:
    """A loss, its gradients by (log-prob, entropy, log Z), their sensitivity, and how large each row's terms are."""

    loss: Tensor
    upstream: Tensor
    slack: Tensor
    terms: Tensor
    margin: float


def fields_of(inputs: Inputs, active: Tensor, logprob: Tensor) -> Fields:
    """Log-probs of older policies near those of this one, or far from them, and advantages."""
    case, count = inputs.case, len(inputs.target)
    near = torch.zeros(count).index_copy_(0, active, logprob.float()).clamp_min(-1e4)
    spread = {"near": 0.3, "wide": 2.0, "far": 25.0, "same": 0.01}[case.ratios]
    old, ref, rollout = (near + spread * inputs.noise[k, :count] for k in range(3))
    if case.ratios == "far":
        ref, rollout = near + 0.5 * inputs.noise[1, :count], old + 0.5 * inputs.noise[2, :count]
    advantage = inputs.noise[3][inputs.sample] if count else inputs.noise[3, :0]
    if case.advantage == "zeros":
        advantage = torch.zeros_like(advantage)
    elif case.advantage == "some zeros":
        advantage = torch.where(inputs.sample % 2 == 0, 0.0, advantage)
    elif case.advantage == "ones":
        advantage = torch.ones_like(advantage)
    elif case.advantage == "large":
        advantage = 1e4 * advantage
    return Fields(old, ref, rollout, advantage)


def options_of(inputs: Inputs) -> dict[str, Any]:
    """The keyword arguments of the objective of a case, the recipe's own ones included."""
    case = inputs.case
    return {**RECIPES[case.recipe], **dict(case.objective)} if case.recipe else dict(case.objective)


def prompts_of(inputs: Inputs) -> tuple[Tensor, int]:
    """``[N]`` counted tokens of each sample's prompt, where two samples in a row share one; and how many prompts."""
    prompt = torch.arange(len(inputs.totals)) // 2
    num = int(prompt[-1]) + 1 if len(prompt) else 0
    per_prompt = torch.zeros(num, dtype=torch.float64).index_add_(0, prompt, inputs.totals.double())
    return per_prompt[prompt], num


def row_weights(inputs: Inputs, o: dict[str, Any]) -> Tensor:
    """``[R]`` float64: what each row weighs in the loss."""
    reduce, totals = o.get("reduce", "token_mean"), inputs.totals.double()
    per_sample, count = torch.ones_like(totals), float(len(totals))
    if reduce == "token_mean":
        count = float(totals.sum())
    elif reduce == "sample_mean":
        per_sample = totals
    elif reduce == "sample_sum":
        per_sample = torch.full_like(totals, float(o["length"]))
    else:
        per_sample, count = prompts_of(inputs)
    if inputs.case.denominator is not None:
        count = inputs.case.denominator
    both = per_sample * count
    inverse = torch.where(both > 0, 1 / both, 0.0)
    return inverse[inputs.sample] * inputs.counted


def tell(
    inputs: Inputs,
    active: Tensor,
    fields: Fields,
    logprob: Tensor,
    entropy: Tensor,
    log_z: Tensor,
    wide: torch.dtype,
) -> Told:
    """Loss and gradients. ``logprob``, ``entropy`` and ``log_z`` are those of the active rows, with graph."""
    o = options_of(inputs)
    here = inputs.counted[active]
    w = row_weights(inputs, o)[active][here].to(wide)
    lp, ent, lz = (x.detach()[here].requires_grad_() for x in (logprob, entropy, log_z))
    old, ref, rollout, a = (
        x[active][here].to(wide)
        for x in (fields.old_logprob, fields.ref_logprob, fields.rollout_logprob, fields.advantage)
    )
    if inputs.case.on_policy:
        old = lp.detach()
    samples = inputs.sample[active][here]
    member = (samples[None, :] == torch.arange(len(inputs.totals))[:, None]).to(wide)
    mean = _Mean(member, inputs.totals.to(wide), samples)
    far: list[Tensor] = []
    weight = _correction(o, old - rollout, lp.detach() - old, a, mean, far)
    policy, slack = _policy(o, lp, old, a, mean, far, w * weight)
    loss, terms = w * weight * policy, (w * weight * policy).abs()
    if o.get("kl_coef"):
        kl, slack_kl = _kl(o["kl"], lp, ref, old, far)
        loss, slack = loss + w * o["kl_coef"] * kl, slack + w * abs(o["kl_coef"]) * slack_kl
        terms = terms + (w * o["kl_coef"] * kl).abs()
    coef = o.get("entropy_coef", 0.0)
    z_coef = o.get("z_coef", 0.0)
    loss = (loss - w * coef * ent + w * z_coef * lz * lz).sum()
    terms = terms + (w * coef * ent).abs() + (w * z_coef * lz * lz).abs()
    leaves = [lp, ent, lz]
    g_l, g_h, g_z = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else (None,) * 3
    places = here.nonzero().squeeze(1)

    def spread(x: Tensor | None) -> Tensor:
        out = torch.zeros(len(active), dtype=wide)
        return out if x is None else out.index_copy_(0, places, x.detach().to(wide))

    upstream = torch.stack([spread(g_l), spread(g_h), spread(g_z)]) * FACTOR * inputs.case.grad_scale
    # A z-loss is a square, so its gradient is as sensitive as log Z is large.
    of_log_z = 2 * w * abs(z_coef) * (1 + lz.detach().abs())
    of_logprob = slack + g_l.abs() if g_l is not None else slack
    slacks = torch.stack([spread(of_logprob), spread(w * abs(coef)), spread(of_log_z)])
    distances = torch.cat([x.reshape(-1) for x in far]) if far else torch.ones(1)
    margin = float(distances.abs().min()) if distances.numel() else 1.0
    return Told(loss.detach(), upstream, slacks * FACTOR * inputs.case.grad_scale, spread(terms), margin)


FACTOR = 1.75
"""The gradient that arrives at the loss, times the case's own."""


@dataclass(frozen=True)
class _Mean:
    """Means over the counted tokens of each row's sample."""

    member: Tensor
    totals: Tensor
    samples: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return (self.member @ x / self.totals.clamp_min(1))[self.samples]

    def total(self, x: Tensor) -> Tensor:
        return (self.member @ x)[self.samples]


def _exp(x: Tensor, far: list[Tensor]) -> Tensor:
    far.append(x.detach() - LARGEST)
    return torch.exp(torch.clamp(x, max=LARGEST))


def _policy(
    o: dict[str, Any], lp: Tensor, old: Tensor, a: Tensor, mean: _Mean, far: list[Tensor], w: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss of each row, and how sensitive the gradient at its log-prob is, times ``w``."""
    name = o.get("policy", "ppo_clip")
    if name == "reinforce":
        return -a * lp, w * a.abs()
    if name == "cross_entropy":
        return -lp, w
    if name == "dft":
        p = lp.detach().exp()
        return -p * lp, w * p * (1 + lp.detach().abs())
    low, high = o.get("clip", CLIPS.get(name, (0.0, 0.0)))
    ratio = _exp(mean(lp - old) if name == "gspo" else lp - old, far)
    r = ratio.detach()
    if name == "sapo":
        tau = dict(o.get("policy_options", ()))
        tau = torch.full_like(a, tau.get("negative", 1.05)).masked_fill(a > 0, tau.get("positive", 1.0))
        gate = torch.sigmoid(tau * (ratio - 1))
        open_ = (gate * (1 - gate)).detach()
        return -a * gate * 4 / tau, w * a.abs() * r * (4 + 4 * open_ * tau * r)
    far += [(r - 1 - high) / (1 + high), r - (1 - low)]
    if name == "cispo":
        held = r.clamp(1 - low, 1 + high)
        return -a * held * lp, w * a.abs() * held
    # A gain is not taken beyond the bound, a loss is.
    bound = torch.where(a >= 0, torch.clamp(ratio, max=1 + high), torch.clamp(ratio, min=1 - low))
    if o.get("dual_clip") is not None:
        far.append(r - o["dual_clip"])
        bound = torch.where(a < 0, torch.clamp(bound, max=o["dual_clip"]), bound)
    slack = w * a.abs() * (1 + r)
    return -a * bound, mean(slack) if name == "gspo" else slack


def _correction(
    o: dict[str, Any], drift: Tensor, log_ratio: Tensor, a: Tensor, mean: _Mean, far: list[Tensor]
) -> Tensor:
    """A constant weight for each row."""
    name = o.get("correction")
    if name is None:
        return torch.ones_like(drift)
    if name == "opsm":
        moved = -mean(log_ratio)
        far.append(moved - 1e-4)
        return 1.0 - ((a < 0) & (moved > 1e-4)).to(drift)
    low, high = BOUNDS[name]
    kind = name.split("_")[0]
    x = {"sequence": mean.total, "geometric": mean}.get(kind, lambda d: d)(drift)
    x = _exp(x, far)
    far += [(x - low) if low else torch.ones_like(x), x - high]
    inside = (x >= low) & (x <= high)
    if name.endswith("tis"):
        return x.clamp(low, high)
    return inside.to(x) if name == "geometric_mask" else torch.where(inside, x, 0.0)


def _kl(kind: str, lp: Tensor, ref: Tensor, old: Tensor, far: list[Tensor]) -> tuple[Tensor, Tensor]:
    """KL of each row, and how sensitive its gradient is."""
    base, _, form = kind.partition("_")

    def value(x: Tensor) -> Tensor:
        d = x - ref
        if base == "k1":
            return d
        if base == "k2":
            return d * d / 2
        if base == "abs":
            far.append(d.detach())
            return d.abs()
        far.extend([d.detach() - LARGEST, d.detach() + LARGEST])
        d = d.clamp(-LARGEST, LARGEST)
        return torch.expm1(-d) + d

    d = (lp - ref).detach()
    size = 1 + d.abs() + (torch.exp(-d.clamp(-LARGEST, LARGEST)) if base == "k3" else 0.0)
    if form == "straight_through":
        return value(lp.detach()) + d * (lp - lp.detach()), size
    if form == "weighted":
        ratio = _exp(lp - old, far)
        r = ratio.detach()
        return ratio * value(lp), (1 + r) * (size + value(lp).detach().abs())
    return value(lp), size
