"""The oracle: what every number must be, from ``torch.log_softmax`` and autograd alone.

Shares no code and no formula with the library: no statistic, no merge, no closed-form gradient.

    truth(...)    in float64, from the same rounded operands; pass a float64 leaf to get a float64 gradient
    plain(...)    the same lines in float32 (float64 for float64 logits): what a framework does today, and
                  the yardstick of ``close.py``
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Scores(NamedTuple):
    """``[R]`` results of the oracle, in the order of ``TokenStats``."""

    logprob: Tensor
    entropy: Tensor
    log_z: Tensor | None


def truth(logits: Tensor, index, target, **head_and_kept) -> Scores:
    """Log-prob, entropy and log Z of ``target`` under rows ``index`` of ``[T, V]`` logits, in float64 with a graph.

    Args:
        logits: ``[T, V]``, any float dtype.
        index, target: ``[R]`` tensors or lists; target ``-100`` gives zeros.
        temperature, scale, softcap, vocab_size: as in ``Head``; the temperature a number or ``[R]``.
        kept: one list of ids per row; the log-prob is then over those ids and the target.
        scope: with ``"support"`` the entropy is over them too, and there is no log Z.
    """
    return _score(logits.double(), index, target, **head_and_kept)


def plain(logits: Tensor, index, target, **head_and_kept) -> Scores:
    """Same as :func:`truth`, in the precision a framework uses: float32, or float64 for float64 logits."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return _score(wide, index, target, **head_and_kept)


def float64_leaf(logits: Tensor) -> Tensor:
    """The same numbers as a float64 leaf, so that the gradient of :func:`truth` is never rounded."""
    return logits.detach().double().clone().requires_grad_()


def _score(
    x: Tensor,
    index: Tensor | Sequence[int],
    target: Tensor | Sequence[int],
    temperature: float | Tensor = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    kept: Sequence[Sequence[int]] | None = None,
    scope: str = "vocabulary",
) -> Scores:
    index = torch.as_tensor(index, dtype=torch.int64, device=x.device)
    target = torch.as_tensor(target, dtype=torch.int64, device=x.device)
    ignored = target == -100
    z = x[index, :vocab_size] * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / (temperature.to(z)[:, None] if isinstance(temperature, Tensor) else temperature)
    log_p = torch.log_softmax(z, -1)
    p = log_p.exp()
    # 0 * log 0 is 0: the logarithm is replaced where p vanishes, for the value and for the gradient.
    entropy = -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)
    wanted = target.masked_fill(ignored, 0)
    if kept is None:
        logprob = log_p.gather(-1, wanted[:, None]).squeeze(-1)
    else:
        rows = zip(z.unbind(0), wanted.tolist(), kept, strict=True)
        pairs = [_over_kept(row, t, ids) for row, t, ids in rows]
        logprob, of_kept = (torch.stack(x) for x in zip(*pairs, strict=True)) if pairs else (z.sum(-1), z.sum(-1))
        entropy = of_kept if scope == "support" else entropy
    results = (logprob, entropy, None if scope == "support" else torch.logsumexp(z, -1))
    return Scores(*(None if r is None else r.masked_fill(ignored, 0.0) for r in results))


def _over_kept(z: Tensor, target: int, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Log-prob of the target and entropy over the kept ids."""
    ids = sorted({target, *ids})
    log_p = torch.log_softmax(z[ids], -1)
    p = log_p.exp()
    return log_p[ids.index(target)], -(p * log_p.masked_fill(p == 0, 0.0)).sum()
