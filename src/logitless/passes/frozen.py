"""A head that is not trained, and no entropy gradient: two products in all instead of four.

The gradient of a row's log-prob with respect to its hidden state is known up to a factor as soon as all its logits have
been seen: ``g_l (W[t] - sum_v p_v W_v)``. So forward also sums ``e^(z - reference) W_v`` over the other tokens v, as
attention sums values, and backward is a row scale.

    forward    tile = X[r] @ W[c].T  ->  statistics, e^(z - reference)  ->  sum += e @ W[c]
    backward   d_hidden = a W[t] + b sum            two numbers per row

The reference is the row's maximum so far, give or take a few units: it only has to keep the exponentials in range, so
it moves, and the sum with it, when a tile exceeds it by more than that (:class:`Running`). The target's own term is
left out of the sum and formed in float32: a confident row would otherwise be nothing but rounding.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.backends.blocks import LINES
from logitless.backends.contract import Running
from logitless.machine import Tiles, pieces
from logitless.passes.look import add_lines, best_lines, merged
from logitless.readings.found import Lines
from logitless.readings.table import Table
from logitless.softmax import SKIP, WIDTH, Normaliser, Statistic
from logitless.sources.linear import Projection, rows_in


class Unit(NamedTuple):
    """What forward keeps of each row for a backward without products.

    Attributes:
        others: ``[R, D]`` sum over the other tokens of this shard of ``p W`` (of ``p (1 - tanh^2) W`` under a softcap),
            with p normalised over this shard.
        local: ``[R]`` log of this shard's part of Z.
    """

    others: Tensor
    local: Tensor


def lines_with_unit(p: Projection, tiles: Tiles, table: Table | None) -> tuple[Lines, Unit]:
    """Lines of all columns here, and the unit gradients."""
    width = LINES if p.call.canonical else WIDTH
    if tiles.fused:
        lines, unit = _fused_lines_with_unit(p, tiles, width)
        return Lines(lines[:width], None, None if table is None else best_lines(p, lines[width:])), unit
    more = None if table is None else p.gain.new_empty((table.width, len(p.hidden)))
    # Kernels need a contiguous last dimension, which the caller's hidden states may not have.
    others = torch.empty_like(p.hidden, memory_format=torch.contiguous_format)
    out = p.gain.new_empty((width, len(p.hidden)))
    memory, e = p.empty_tile(tiles), p.empty_rows(tiles.rows, tiles.columns, p.hidden.dtype)
    total = p.gain.new_empty((min(tiles.rows, max(len(p.hidden), 1)), p.hidden.shape[1]))
    backend, slabs = p.backend, -(-max(p.call.columns, 1) // tiles.columns)
    for rows in pieces(len(p.hidden), tiles.rows, p.hidden.is_meta):
        part = p.cut(rows.start, rows.stop)
        parts = p.gain.new_empty((slabs, width, len(part.hidden)))
        # `exponentials` also writes a statistic, which a canonical call does not use.
        beside = parts.new_empty((WIDTH, len(part.hidden))) if p.call.canonical else None
        sums, reference = total[: len(part.hidden)], p.gain.new_zeros(len(part.hidden))
        for columns in pieces(max(p.call.columns, 1), tiles.columns, p.hidden.is_meta):
            tile = part.tile(memory, tiles, columns.start)
            exponentials = rows_in(e, len(part.hidden), tile.columns)
            running = Running(reference, reference)
            if columns.start:
                # Only the first tile may move the reference down: a later tile far below it adds nothing.
                running = running._replace(drop=torch.inf, sums=sums)
            into = parts[columns.start // tiles.columns]
            if beside is not None:
                backend.statistics(tile, into)
                tile, into = replace(tile, canonical=False), beside
            backend.exponentials(tile, into, running, exponentials, slope=True)
            if table is not None and more is not None:
                add_lines(table, p, tile, rows, more)
            p.multiply(
                exponentials, p.weight[columns.start : columns.start + tile.columns], sums, add=columns.start > 0
            )
        out[:, rows] = merged(part, parts)
        _normalise(part, sums, reference, out[:, rows], others[rows])
    return Lines(out, None, more), Unit(others, _log_normaliser(p, out))


def _fused_lines_with_unit(p: Projection, tiles: Tiles, lines: int) -> tuple[Tensor, Unit]:
    """The same from products that write the exponentials; with the best column's lines, where readings are asked
    for."""
    others, best = torch.empty_like(p.hidden, memory_format=torch.contiguous_format), p.call.table is not None
    products = p.products
    out = p.gain.new_empty((lines + 2 * best, len(p.hidden)))
    e = p.empty_rows(tiles.rows, tiles.columns, p.hidden.dtype)
    total = p.gain.new_zeros((min(tiles.rows, max(len(p.hidden), 1)), p.hidden.shape[1]))
    slabs = pieces(p.call.columns, tiles.columns)
    ends = list(itertools.accumulate((products.num_parts(p.product(c)) for c in slabs), initial=0))
    for rows in pieces(len(p.hidden), tiles.rows, p.hidden.is_meta):
        part = p.cut(rows.start, rows.stop)
        parts = p.gain.new_empty((ends[-1], WIDTH + best, len(part.hidden)))
        sums, reference = total[: len(part.hidden)], p.gain.new_zeros(len(part.hidden))
        for columns, (first, last) in zip(slabs, itertools.pairwise(ends), strict=True):
            product = part.product(columns)
            exponentials = rows_in(e, product.rows, product.columns)
            products.towards(product, parts[first:last], exponentials, reference, sums if first else None)
            p.multiply(exponentials, p.weight[columns], sums, add=first > 0)
        products.merge(part.product(slice(0, p.call.columns)), parts, out[:, rows])
        _normalise(part, sums, reference, out[:lines, rows], others[rows])
        # Before those of the next rows are there.
        del parts, reference
    return out, Unit(others, _log_normaliser(p, out[:lines]))


def _normalise(part: Projection, sums: Tensor, reference: Tensor, lines: Tensor, others: Tensor) -> None:
    """The unit gradients of some rows from their sums, which are relative to the reference."""
    local = _log_normaliser(part, lines)
    # A shard of nothing but padding has no Z of its own, and no gradient to share; nor has a row that is left out,
    # whose reference never moved.
    nothing = (local == -torch.inf) | (part.column == SKIP)
    part.backend.rescale(sums, torch.where(nothing, 0.0, (reference - local).exp()), others)


def _log_normaliser(p: Projection, lines: Tensor) -> Tensor:
    """``[R]`` log of this shard's part of Z."""
    row = Statistic.of(p.backend.solved(lines[None], p.gain) if p.call.canonical else lines)
    return row.m + row.s.log()


def unit_gradient(
    p: Projection, unit: Unit, norm: Normaliser, logprob: Tensor, g_logprob: Tensor, g_log_z: Tensor | None
) -> Tensor:
    """``[R, D]`` gradient of the hidden rows from the unit gradients and the upstream ones. Reads no hidden rows."""
    g_z = torch.zeros_like(g_logprob) if g_log_z is None else g_log_z
    here = p.column >= 0
    at_target = g_z * logprob.exp() - g_logprob * torch.expm1(logprob)
    slope = p.gain
    squash = p.call.squash
    if squash:
        squashed = (logprob + norm.log_sum + norm.reference) / p.gain
        at_target = at_target * (1 - squashed * squashed)
        slope = p.gain * squash
    share = (unit.local - norm.reference - norm.log_sum).exp()
    read = p.column != SKIP
    # Row 0 of the weight stands in for targets that live elsewhere. It is finite if anything here is.
    a = torch.where(here, at_target * slope, 0.0)
    b = torch.where(read, (g_z - g_logprob) * slope * share, 0.0)
    out = torch.empty_like(unit.others)
    if p.call.columns:
        p.backend.mix(unit.others, b, p.weight, p.column.clamp_min(0), a, out)
    else:
        p.backend.rescale(unit.others, b, out)
    return out
