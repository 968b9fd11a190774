"""A head that is not trained, and no entropy gradient: two products in all instead of four.

The gradient of a row's log-prob with respect to its hidden state is known up to a factor as soon as the row has been
swept: ``g_l (W[t] - sum_v p_v W_v)``. So the first sweep also sums ``e^(z - reference) W_v`` over the other tokens v,
as attention sums values, and backward is a row scale.

    forward    tile = X[r] @ W[c].T  ->  statistics, e^(z - reference)  ->  sum += e @ W[c]
    backward   d_hidden = a W[t] + b sum            two numbers per row

The reference is the row's maximum so far, give or take a few units: it only has to keep the exponentials in range, so
it moves, and the sum with it, when a tile exceeds it by more than that (:class:`Running`). The target's own term is
left out of the sum and formed in float32: a confident row would otherwise be nothing but rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from logitless.backends import load
from logitless.backends.contract import Running
from logitless.from_hidden.gemm import multiply
from logitless.from_hidden.gradients import Projection, allocate, tile_problem
from logitless.from_hidden.plan import Tiles
from logitless.softmax import SKIP, Normaliser, merge


class Unit(NamedTuple):
    """What forward keeps of each row for a backward without products.

    Attributes:
        others: ``[R, D]`` sum over the other tokens of this shard of ``p W`` (of ``p (1 - tanh^2) W`` under a softcap),
            with p normalised over this shard.
        local: ``[R]`` log of this shard's part of Z.
    """

    others: Tensor
    local: Tensor


def sweep_unit(p: Projection, tiles: Tiles) -> tuple[Tensor, Unit]:
    """``[4, R]`` statistics, and the unit gradients."""
    stats = p.gain.new_empty((4, p.num_rows))
    others = torch.empty_like(p.hidden)
    space = allocate(p, tiles, "exponentials")
    e = space.extra.view(-1)
    total = p.gain.new_empty((min(space.tiles.rows, max(p.num_rows, 1)), p.hidden.shape[1]))
    backend, slabs = load(p.backend), range(0, max(p.columns, 1), space.tiles.columns)
    for r in range(0, p.num_rows, space.tiles.rows):
        stop = min(r + space.tiles.rows, p.num_rows)
        rows = p.cut(r, stop)
        parts = p.gain.new_empty((len(slabs), 4, stop - r))
        sums, reference = total[: stop - r], p.gain.new_zeros(stop - r)
        for i, c in enumerate(slabs):
            tile = tile_problem(rows, space, c)
            exponentials = e[: (stop - r) * tile.columns].view(stop - r, tile.columns)
            # Later tiles far below the reference have nothing to add: only the first may move it down.
            running = Running(reference, reference, drop=torch.inf, sums=sums) if i else Running(reference, reference)
            backend.exponentials(tile, parts[i], running, exponentials, slope=True)
            multiply(exponentials, p.weight[c : c + tile.columns], sums, add=i > 0, tf32=p.tf32)
        stats[:, r:stop] = parts[0] if len(slabs) == 1 else merge(parts)
        local = stats[0, r:stop] + stats[1, r:stop].log()
        # A shard of nothing but padding has no Z of its own, and no gradient to share.
        backend.rescale(sums, torch.where(local == -torch.inf, 0.0, (reference - local).exp()), others[r:stop])
    return stats, Unit(others, stats[0] + stats[1].log())


def unit_gradient(
    p: Projection, unit: Unit, norm: Normaliser, logprob: Tensor, g_logprob: Tensor, g_log_z: Tensor | None
) -> Tensor:
    """``[R, D]`` gradient of the hidden rows from the unit gradients and the upstream ones. Reads no hidden rows."""
    g_z = torch.zeros_like(g_logprob) if g_log_z is None else g_log_z
    here = p.column >= 0
    at_target = g_z * logprob.exp() - g_logprob * torch.expm1(logprob)
    slope = p.gain
    if p.squash:
        squashed = (logprob + norm.log_sum + norm.reference) / p.gain
        at_target = at_target * (1 - squashed * squashed)
        slope = p.gain * p.squash
    share = (unit.local - norm.reference - norm.log_sum).exp()
    read = p.column != SKIP
    # Row 0 of the weight stands in for targets that live elsewhere. It is finite if anything here is.
    a = torch.where(here, at_target * slope, 0.0)
    b = torch.where(read, (g_z - g_logprob) * slope * share, 0.0)
    out = torch.empty_like(unit.others)
    backend = load(p.backend)
    if p.columns:
        backend.mix(unit.others, b, p.weight, p.column.clamp_min(0), a, out)
    else:
        backend.rescale(unit.others, b, out)
    return out
