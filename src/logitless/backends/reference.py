"""The readable twin of every kernel: whole tensors, plain torch, any float dtype.

Float64 logits are computed in float64, everything else in float32. Copies the selected rows several times over;
use it to check, not to train.
"""

from __future__ import annotations

import torch
from torch import Tensor

from logitless.backends.contract import Problem, accumulation_dtype
from logitless.softmax import FLOOR, SKIP, TINY, Coefficients, Normaliser


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


def exponentials(problem: Problem, reference: Tensor, out: Tensor) -> None:
    """``e^(z - reference)`` of every element (times ``1 - tanh^2`` under a softcap), and 0 at the target.

    The target is left out because its gradient is formed in float32 and must not be rounded with the others.
    """
    z, slope = transformed(problem)
    e = (z - reference[:, None]).exp()
    if problem.squash:
        e = e * slope / (problem.gain[:, None] * problem.squash)
    columns = torch.arange(problem.first, problem.first + problem.columns, device=z.device)
    unread = (columns == problem.column[:, None]) | (problem.column == SKIP)[:, None]
    out.copy_(e.masked_fill(unread, 0.0))


def gradient_from(e: Tensor, problem: Problem, shift: Tensor, scale: Tensor, coef: Coefficients, out: Tensor) -> None:
    """d logits from kept exponentials: ``p = e * scale`` and ``z - m = log e + shift``. No softcap."""
    wide = e.to(problem.gain.dtype)
    dz = wide * scale[:, None]
    if coef.product is None:
        dz = dz * coef.plain[:, None]
    else:
        dz = dz * (coef.plain[:, None] + coef.product[:, None] * (wide.clamp_min(TINY).log() + shift[:, None]))
    columns = torch.arange(problem.first, problem.first + e.shape[1], device=e.device)
    dz = torch.where(columns == problem.column[:, None], coef.at_target[:, None], dz) * problem.gain[:, None]
    out.copy_(dz.masked_fill((problem.column == SKIP)[:, None], 0.0))


def move(reference: Tensor, maximum: Tensor, slack: float, factor: Tensor) -> None:
    """Move each reference up to the maximum where that exceeds it by more than ``slack``; factor is ``e^(old - new)``.

    A maximum of -inf moves nothing. In place, so that a sweep launches one small kernel and not ten.
    """
    moves = (maximum > reference + slack) & (maximum != -torch.inf)
    moved = torch.where(moves, maximum, reference)
    factor.copy_(torch.where(moves, (reference - moved).exp(), torch.ones_like(moved)))
    reference.copy_(moved)


def rescale(x: Tensor, factor: Tensor) -> None:
    """``x[i] *= factor[i]``, in place."""
    x.mul_(factor[:, None])
