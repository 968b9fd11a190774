"""Advantages along time from a value model (GAE), discounted returns, whitening, and the loss of the value model.

GAE and returns are one recurrence, ``y_t = a_t y_{t+1} + b_t``, solved for all t at once by doubling. After k rounds
``y_t`` covers the 2^k tokens from t on; where a sample ends, ``a`` is 0, so samples of any length lie end to end:

    b0 + a0 b1 | b1 + a1 b2 | b2 + a2 b3 | b3          round 1, then the same with steps of 2, 4, ...

Tokens that do not count in the loss (tool output, for example) are skipped, whether their rows were masked or left out.
Under context parallelism the rows of all ranks are gathered first (one collective of a few values per response token),
and each rank takes the results of its own rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.collectives import gather_over, resolve_group
from logitless.errors import LogitlessError
from logitless.errors.arguments import FLOATS, check_flags, dense, is_number, real_numbers, refused
from logitless.objectives.checks import at_least_zero, check_rows
from logitless.rows import Rows
from logitless.rows.exchange import check_ranks


class Returns(NamedTuple):
    """``[R]`` advantages, and ``[R]`` returns (advantages plus values), which the values are trained towards."""

    advantage: Tensor
    returns: Tensor


def gae(
    rewards: Tensor, values: Tensor, rows: Rows, *, gamma: float = 1.0, lam: float = 0.95, group: Any = None
) -> Returns:
    """Generalised advantage estimation. Schulman et al. 2015.

    ``A_t = delta_t + gamma lam A_{t+1}`` with ``delta_t = r_t + gamma V_{t+1} - V_t``, and ``V = 0`` after the last.
    No gradient flows. Zero at rows that do not count.

    Args:
        rewards: ``[R]`` reward of each token, see :func:`token_rewards`.
        values: ``[R]`` value of each token.
        rows: the rows of this micro-batch.
        gamma, lam: in 0 .. 1.
        group: context-parallel group; None if the rows are not split.
    """
    _check_rate("gae", "gamma", gamma)
    _check_rate("gae", "lam", lam)
    reward, value, counted, ends = _whole(rows, {"rewards": rewards, "values": values}, group, "gae")
    step = (~ends).double()
    # For each token, the value of the next one that counts; 0 for the last one.
    skipping = step.masked_fill(counted, 0.0)
    from_here = _scan(skipping, torch.where(counted, value, 0.0), rows)
    following = torch.where(ends, 0.0, _shift(from_here, 1))
    delta = torch.where(counted, reward + gamma * following - value, 0.0)
    decay = step.masked_fill(counted & ~ends, gamma * lam)
    advantage = torch.where(counted, _scan(decay, delta, rows), 0.0)
    returns = torch.where(counted, advantage + value, 0.0)
    assert rows.response is not None
    dtype = _result_dtype(values)
    return Returns(advantage[rows.response].to(dtype), returns[rows.response].to(dtype))


def discounted_returns(rewards: Tensor, rows: Rows, *, gamma: float = 1.0, group: Any = None) -> Tensor:
    """``[R]`` reward from each token on, ``G_t = r_t + gamma G_{t+1}``; arguments as for :func:`gae`."""
    _check_rate("discounted_returns", "gamma", gamma)
    reward, counted, ends = _whole(rows, {"rewards": rewards}, group, "discounted_returns")
    decay = (~ends).double().masked_fill(counted & ~ends, gamma)
    total = torch.where(counted, _scan(decay, torch.where(counted, reward, 0.0), rows), 0.0)
    assert rows.response is not None
    return total[rows.response].to(_result_dtype(rewards))


def token_rewards(rewards: Tensor, rows: Rows, *, penalty: Tensor | None = None, group: Any = None) -> Tensor:
    """``[R]`` rewards per token: each sample's reward at its last token that counts, minus a penalty at every token.

    Args:
        rewards: ``[N]`` reward of each sample.
        rows: the rows of this micro-batch.
        penalty: ``[R]``, for example ``0.01 * kl_penalty(logprob, ref_logprob)``.
        group: context-parallel group; None if the rows are not split. One all-reduce of ``[N]``.
    """
    device = check_rows("token_rewards", rows).target.device
    real_numbers(rewards, "token_rewards: rewards", (len(rows.counts),), "sample", device)
    if penalty is not None:
        real_numbers(penalty, "token_rewards: penalty", (len(rows),), "row", device)
    group = resolve_group(group, "token_rewards: group")
    check_ranks("token_rewards", rows, group)
    counted = rows.counted
    place = torch.where(counted, rows.position, -1).double()
    lengths = torch.tensor(rows.counts, dtype=torch.int64, device="cpu").to(place.device, non_blocking=True)
    last = torch.segment_reduce(place, "max", lengths=lengths, unsafe=True, initial=-1)
    if group is not None:
        dist.all_reduce(last, op=dist.ReduceOp.MAX, group=group)
    out = torch.where(rows.position == last[rows.sample], rewards.detach()[rows.sample], 0.0)
    return out if penalty is None else torch.where(counted, out - penalty.detach(), 0.0)


def whiten(x: Tensor, counted: Tensor, *, group: Any = None, shift: bool = True, eps: float = 1e-8) -> Tensor:
    """``(x - mean) / sqrt(var + eps)`` over the counted entries of all ranks of a group; 0 at the others.

    The variance is the unbiased one, merged from the mean and the squared deviations of each rank: exact, whatever the
    mean. One collective of three numbers.

    Args:
        x: values.
        counted: bool, of the same shape.
        group: all ranks that have a part of the batch (DP x CP); None if this process has all of it.
        shift: False puts the mean back, so that only the scale changes.
        eps: 0 or more, added to the variance.
    """
    real_numbers(x, "whiten: x")
    dense(counted, "whiten: counted", f"a bool tensor of shape {list(x.shape)}")
    if x.shape != counted.shape or counted.dtype != torch.bool or counted.device != x.device:
        raise LogitlessError(
            f"whiten: counted must be bool of shape {list(x.shape)} on {x.device} but is {counted.dtype} of shape "
            f"{list(counted.shape)} on {counted.device}."
        )
    check_flags("whiten", shift=shift)
    at_least_zero("eps", eps, "whiten")
    group = resolve_group(group, "whiten: group")
    wide = torch.where(counted, x.detach().double(), 0.0)
    count = counted.sum().double()
    mean = wide.sum() / count.clamp_min(1)
    deviation = torch.where(counted, wide - mean, 0.0).square().sum()
    own = torch.stack([count, mean, deviation])
    counts, means, deviations = (own[None] if group is None else gather_over(group, own)).unbind(1)
    total = counts.sum()
    mean = (counts * means).sum() / total.clamp_min(1)
    variance = (deviations + counts * (means - mean).square()).sum() / (total - 1).clamp_min(1)
    scaled = (wide - mean) * (variance + eps).rsqrt()
    return torch.where(counted, scaled if shift else scaled + mean, 0.0).to(_result_dtype(x))


class ValueLoss(NamedTuple):
    """``[R]`` losses, and ``[R]`` 1 where the loss is that of the clipped value, else 0."""

    loss: Tensor
    clip_fraction: Tensor


def value_loss(
    values: Tensor, returns: Tensor, *, old_values: Tensor | None = None, clip: float | None = None
) -> ValueLoss:
    """Half the squared error of each value, or of the value clipped to ``clip`` around the old one if that is larger.

    Reduce it with :func:`~logitless.objectives.reduction.row_weights`: ``(weight * loss).sum()``.

    Args:
        values: ``[R]``, differentiable; of a value head's ``[T, 1]`` it is ``rows.take(x).squeeze(-1)``.
        returns: ``[R]``, see :func:`gae`.
        old_values: ``[R]`` values before the update, with ``clip``.
        clip: a positive number; None for no clipping.
    """
    if (clip is None) != (old_values is None):
        raise LogitlessError("value_loss: clip and old_values go together, but only one of them came.")
    shape = (dense(values, "value_loss: values", "a tensor of floating-point numbers, one per row,").numel(),)
    real_numbers(values, "value_loss: values", shape, "row", dtypes=FLOATS)
    real_numbers(returns, "value_loss: returns", shape, "row", values.device)
    plain = 0.5 * (values - returns.detach()).square()
    if clip is None or old_values is None:
        return ValueLoss(plain, torch.zeros_like(plain.detach()))
    if not is_number(clip) or clip <= 0:
        raise refused("value_loss: clip", "a positive number or None", clip)
    old = real_numbers(old_values, "value_loss: old_values", shape, "row", values.device).detach()
    kept = torch.minimum(torch.maximum(values, old - clip), old + clip)
    clipped = 0.5 * (kept - returns.detach()).square()
    active = clipped > plain
    return ValueLoss(torch.where(active, clipped, plain), active.to(plain.dtype))


def _whole(rows: Rows, given: dict[str, Tensor], group: Any, caller: str) -> tuple[Tensor, ...]:
    """Fields of all response tokens in float64; then which tokens count, and which are the last of a sample."""
    device = check_rows(caller, rows).target.device
    for name, x in given.items():
        real_numbers(x, f"{caller}: {name}", (len(rows),), "row", device)
    counted = rows.counted
    fields = [torch.where(counted, x.detach().double(), 0.0) for x in given.values()]
    whole = rows.gather([*fields, counted.double()], group, grad=None)
    lengths = torch.tensor(rows.response_lengths, dtype=torch.int64, device="cpu")
    ends = torch.zeros(int(lengths.sum()), dtype=torch.bool, device="cpu")
    ends[lengths.cumsum(0)[lengths > 0] - 1] = True
    joined = [torch.cat(parts) if len(parts) else fields[0].new_zeros(0) for parts in whole]
    return *joined[:-1], joined[-1] != 0, ends.to(counted.device, non_blocking=True)


def _result_dtype(x: Tensor) -> torch.dtype:
    """The dtype of numbers made of ``x``, which may be integers."""
    return x.dtype if x.is_floating_point() else torch.get_default_dtype()


def _scan(a: Tensor, b: Tensor, rows: Rows) -> Tensor:
    """``y_t = a_t y_{t+1} + b_t`` with ``y = 0`` after the end, in as many rounds as the longest response has bits."""
    step, longest = 1, max(rows.response_lengths or (0,), default=0)
    while step < longest:
        # By selection: 0 times a NaN of the next sample is not 0.
        a, b = a * _shift(a, step), b + torch.where(a != 0, a * _shift(b, step), 0.0)
        step *= 2
    return b


def _shift(x: Tensor, step: int) -> Tensor:
    """Entry ``t + step`` at t, zeros past the end."""
    return torch.nn.functional.pad(x[step:], (0, min(step, x.shape[0])))


def _check_rate(caller: str, name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise LogitlessError(f"{caller}: {name} must be a number in 0 .. 1 but is {value!r}.")
