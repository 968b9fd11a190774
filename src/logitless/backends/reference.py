"""The readable twin of every kernel: whole tensors, plain torch, any float dtype.

Float64 logits are computed in float64, everything else in float32. Copies the selected rows several times over;
use it to check, not to train.
"""

from __future__ import annotations

import torch
from torch import Tensor

from logitless.backends.contract import Problem, accumulation_dtype
from logitless.softmax import FLOOR, SKIP, Coefficients, Normaliser


def statistics(problem: Problem, out: Tensor | None = None) -> Tensor:
    """``[4, R]`` (m, s, w, t) of the selected rows; see :mod:`logitless.softmax`."""
    z, _ = transformed(problem)
    m = z.amax(-1) if z.shape[-1] else z.new_full(z.shape[:1], -torch.inf)
    reference = torch.where(m == -torch.inf, torch.zeros_like(m), m)
    d = z - reference[:, None]
    e = d.exp()
    t = z.new_full(m.shape, torch.nan)
    if z.shape[-1]:
        column = problem.column - problem.first
        inside = (column >= 0) & (column < problem.columns)
        at_target = z.gather(-1, column.clamp(0, problem.columns - 1)[:, None]).squeeze(-1)
        t = torch.where(inside, at_target, t)
    return torch.stack([m, e.sum(-1), (e * d.clamp_min(FLOOR)).sum(-1), t], out=out)


def gradient(problem: Problem, norm: Normaliser, coef: Coefficients, out: Tensor, out_index: Tensor | None) -> None:
    """Write d logits into ``out``: the formula at rows ``out_index``, zero everywhere else."""
    z, slope = transformed(problem)
    d = z - norm.reference[:, None]
    p = (d - norm.log_sum[:, None]).exp()
    dz = p * coef.plain[:, None]
    if coef.product is not None:
        dz = p * (coef.plain[:, None] + coef.product[:, None] * d.clamp_min(FLOOR))
    columns = torch.arange(problem.first, problem.first + problem.columns, device=z.device)
    dz = torch.where(columns == problem.column[:, None], coef.at_target[:, None], dz)
    dz = torch.where((problem.column == SKIP)[:, None], torch.zeros_like(dz), dz * slope)
    out.zero_()
    out[problem.index if out_index is None else out_index, : problem.columns] = dz.to(out.dtype)


def transformed(problem: Problem) -> tuple[Tensor, Tensor]:
    """``z`` of the selected rows over the true columns, and ``dz/dx``."""
    x = problem.logits[problem.index, : problem.columns].to(accumulation_dtype(problem.logits.dtype))
    gain = problem.gain[:, None]
    if not problem.squash:
        return x * gain, gain.expand_as(x)
    y = torch.tanh(x * problem.squash)
    return y * gain, gain * problem.squash * (1 - y * y)
