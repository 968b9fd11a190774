"""Shared by the tests of top k teacher and those that build on them."""

from __future__ import annotations

import torch
from torch import Tensor

from logitless import Head


def textbook(
    log_p: Tensor, log_q: Tensor, kind: str, beta: float = 0.5, alpha: float = 0.5, eta: float = 3.0
) -> Tensor:
    """Each divergence as papers define it, of ``[R, O]`` log-probs of outcomes; -inf in both is no outcome."""
    none = (log_p == -torch.inf) & (log_q == -torch.inf)
    p, q = log_p.exp(), log_q.exp()
    log_p, log_q = log_p.masked_fill(none, 0.0), log_q.masked_fill(none, 0.0)
    accepted = torch.minimum(p, q).sum(-1)
    if kind == "acceptance":
        return accepted
    if kind == "log_acceptance":
        return -accepted.masked_fill(none.all(-1), 1.0).log()
    if kind == "lk_hybrid":
        share = torch.exp(-eta * accepted.detach())
        return share * (q * (log_q - log_p)).sum(-1) + (1 - share) * (1 - accepted)
    if kind == "forward_kl":
        return (q * (log_q - log_p)).sum(-1)
    if kind == "reverse_kl":
        return (p * (log_p - log_q)).sum(-1)
    if kind == "jsd":
        m = (beta * q + (1 - beta) * p).masked_fill(none, 1.0).log()
        return (beta * q * (log_q - m) + (1 - beta) * p * (log_p - m)).sum(-1)
    if kind == "tv":
        return 0.5 * (p - q).abs().sum(-1)
    alpha = 0.5 if kind == "hellinger" else alpha
    mixed = (alpha * log_p + (1 - alpha) * log_q).exp().masked_fill(none, 0.0)
    less = (~none).any(-1).to(p) - mixed.sum(-1)
    return less if kind == "hellinger" else less / (alpha * (1 - alpha))


def shaped(x: Tensor, head: Head | None) -> Tensor:
    head = head or Head()
    x = x[:, : head.vocab_size] * head.scale
    x = x if head.softcap is None else head.softcap * torch.tanh(x / head.softcap)
    return x / head.temperature
