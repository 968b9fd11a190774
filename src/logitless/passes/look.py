"""Forward: the statistic of every row of ``hidden @ weight.T``, one tile of logits at a time.

tile = X[rows] @ W[columns].T  ->  statistics kernel  ->  one part per slab of columns, merged at the end

Where one kernel makes the logits and their statistic, there is no tile, and parts are of what stays in its registers.
"""

from __future__ import annotations

from torch import Tensor

from logitless.backends.triton import products
from logitless.from_hidden.exponentials import Exponentials
from logitless.from_hidden.extra_lines import ExtraLines
from logitless.from_hidden.plan import Tiles
from logitless.from_hidden.projection import Projection
from logitless.machine import pieces
from logitless.results import merge_support
from logitless.softmax import WIDTH, Statistic, merge
from logitless.support import Support, kept_statistics


def row_statistics(
    p: Projection,
    tiles: Tiles,
    support: Support | None = None,
    exponentials: Exponentials | None = None,
    extras: ExtraLines | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``[4, R]`` statistic over all columns here, and ``[2, R]`` (m, s) of the support if there is one.

    Args:
        support: tiles then hold all rows at once.
        exponentials: to be filled for the first rows.
        extras: to be filled.
    """
    if tiles.fused:
        assert support is None
        out = _fused_statistics(p, tiles, exponentials)
        if extras is not None:
            extras.take(out[WIDTH:])
        return out[:WIDTH], None
    lines, slabs = WIDTH + len(p.call.further), -(-max(p.call.columns, 1) // tiles.columns)
    out = p.gain.new_empty((lines, len(p.hidden)))
    support_out = None if support is None else p.gain.new_empty((2, len(p.hidden)))
    memory, backend = p.empty_tile(tiles), p.backend
    for rows in pieces(len(p.hidden), tiles.rows, p.hidden.is_meta):
        part = p.cut(rows.start, rows.stop)
        parts = p.gain.new_empty((slabs, lines, len(part.hidden)))
        support_parts = None if support is None else p.gain.new_empty((slabs, 2, len(part.hidden)))
        for columns in pieces(max(p.call.columns, 1), tiles.columns, p.hidden.is_meta):
            tile, slab = part.tile(memory, tiles, columns.start), columns.start // tiles.columns
            if exponentials is None:
                backend.statistics(tile, parts[slab])
            else:
                exponentials.store(p, tile, parts[slab], rows.start)
            if extras is not None:
                extras.add(tile, rows)
            if support is not None and support_parts is not None:
                support_parts[slab] = kept_statistics(support.logits(tile))
        out[:, rows] = parts[0] if slabs == 1 else merge(parts, p.call.further)
        if support_out is not None and support_parts is not None:
            support_out[:, rows] = merge_support(support_parts, Statistic.of(out).t[rows])[:2]
    return out, support_out


def _fused_statistics(p: Projection, tiles: Tiles, exponentials: Exponentials | None) -> Tensor:
    """``[4, R]`` statistic from products that end in it; those of stored rows write the exponentials, too. Where extras
    are asked for, two lines more: the key of the best column, and its number."""
    out = p.gain.new_empty((WIDTH + 2 * (p.call.extras is not None), len(p.hidden)))
    stored = 0 if exponentials is None else min(exponentials.rows, len(p.hidden))
    for start, stop in ((0, stored), (stored, len(p.hidden))):
        for rows in pieces(stop - start, tiles.rows, p.hidden.is_meta):
            first, last = start + rows.start, start + rows.stop
            product = p.cut(first, last).product(slice(0, p.call.columns))
            if exponentials is not None and last <= stored:
                here = exponentials.cut(first, last)
                products.exponentials(product, here.values, here.reference, out[:, first:last])
            else:
                products.statistics(product, out[:, first:last])
    return out
