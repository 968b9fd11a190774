"""Shared by the tests of divergence and those that build on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

KINDS: dict[str, dict[str, Any]] = {
    "forward_kl": {},
    "reverse_kl": {},
    "jsd": {"beta": 0.3},
    "tv": {},
    "hellinger": {},
    "alpha": {"alpha": 0.7},
}


def textbook(z: Tensor, y: Tensor, kind: str, beta: float = 0.5, alpha: float = 0.5) -> Tensor:
    """Each divergence as papers define it, of ``[R, V]`` logits of student and teacher."""
    log_p, log_q = z.log_softmax(-1), y.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward_kl":
        terms = torch.where(q > 0, q * (log_q - log_p), 0.0)
    elif kind == "reverse_kl":
        terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
    elif kind == "jsd":
        m = (beta * q + (1 - beta) * p).clamp_min(1e-300).log()
        terms = beta * torch.where(q > 0, q * (log_q - m), 0.0) + (1 - beta) * p * (log_p - m)
    elif kind == "tv":
        terms = 0.5 * (p - q).abs()
    elif kind == "hellinger":
        return 1 - torch.where(q > 0, ((log_p + log_q.clamp_min(-1e4)) / 2).exp(), 0.0).sum(-1)
    else:
        return (1 - (p**alpha * q ** (1 - alpha)).sum(-1)) / (alpha * (1 - alpha))
    return terms.sum(-1)
