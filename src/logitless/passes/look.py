"""The first pass: what is read off the rows, of whole rows that exist, or of hidden states one tile at a time.

    whole rows    logits that exist, or a chunk of them  ->  every reading, second looks included
    tiles         X[rows] @ W[columns].T  ->  lines of every reading  ->  merged  ->  a second look at tiles made again

Where one kernel makes the logits and their statistic, there is no tile, and parts are of what stays in its registers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from logitless.backends import run_statistics
from logitless.backends.blocks import LINES
from logitless.backends.blocks import merge as merge_blocks
from logitless.backends.contract import Pair, Problem
from logitless.call import Call
from logitless.machine import Tiles, pieces
from logitless.passes.exponentials import Exponentials
from logitless.readings.found import Asked, Found, Lines, Taught, find
from logitless.readings.rank import Rank
from logitless.readings.support import Support, kept_statistics, merge_kept
from logitless.readings.table import Table
from logitless.softmax import WIDTH, Normaliser, Statistic, merge
from logitless.sources.linear import Projection
from logitless.sources.teachers import Seen


def asked_of(call: Call, rows: slice | None = None) -> Asked:
    """What is to be found of all rows, or of some."""
    target, gain, ignored, table = call.rows.target, call.gain, call.ignored, call.table
    if rows is not None and rows != slice(0, call.num_rows):
        target, gain, table = target[rows], gain[rows], None if table is None else table.cut(rows)
        ignored = None if ignored is None else ignored[rows]
    solver = call.backend_name if call.canonical else None
    return Asked(target, gain, call.squash, ignored, call.entropy, call.group, table, solver)


def look_whole(call: Call, asked: Asked, problem: Problem, support: Support | None, seen: Seen | None) -> Found:
    """Everything that is asked for of whole rows that are there, a teacher's beside them if there is one.

    Args:
        support: of these rows.
        seen: of their teacher.
    """
    teacher, whole, best = (None, None, None) if seen is None else seen
    table = asked.table
    # torch.compile traces this function, so the backend is looked up by name behind an operator.
    opaque = torch.compiler.is_compiling() or isinstance(problem.logits, FakeTensor)
    lines = Lines(
        run_statistics(call.backend_name, problem) if opaque else call.backend.statistics(problem),
        None if support is None else kept_statistics(support.logits(problem)),
        None if table is None else table.lines(call.backend, problem, slice(None)),
        # The teacher's entropy is always summed: its cost cannot be measured.
        None if teacher is None else call.backend.statistics(replace(teacher, entropy=True, canonical=False)),
        best,
    )
    rank = None if table is None else table.rank
    count = None if rank is None else lambda key: rank.again(call.backend, problem, key, asked.target)
    if teacher is None:
        return find(asked, lines, count)
    kind = call.kind
    assert kind is not None

    def compare(norm: Normaliser, other: Normaliser, share: Tensor | None) -> Tensor:
        pair = Pair(problem, teacher, norm, other, kind, share)
        sums = problem.gain.new_empty((pair.lines, problem.num_rows))
        call.backend.divergence(pair, sums)
        return sums

    taught = Taught(kind, compare, call.accepts, call.bucket, call.asked.stats, whole)
    return find(asked, lines, count, taught)


def look_by_tiles(p: Projection, tiles: Tiles, support: Support | None, stored: Exponentials | None) -> Found:
    """Everything that is asked for of hidden rows, in tiles.

    Args:
        stored: to be filled for the first rows, or None.
    """
    lines = tile_lines(p, tiles, p.call.table, support, stored)
    return find_rows(p, tiles, lines)


def find_rows(p: Projection, tiles: Tiles, lines: Lines) -> Found:
    """Results of the rows of a call from lines of all its columns here. A padded projection has more rows."""
    call = p.call
    rank = None if call.table is None else call.table.rank
    count = None if rank is None else lambda key: count_ahead(p, tiles, key, rank)
    if len(p.hidden) != call.num_rows:
        lines = Lines(*(None if x is None else x[:, : call.num_rows] for x in lines))  # pyright: ignore[reportArgumentType]
    return find(asked_of(call), lines, count)


def tile_lines(
    p: Projection, tiles: Tiles, table: Table | None, support: Support | None, stored: Exponentials | None = None
) -> Lines:
    """Lines of all columns here; with a support, tiles hold all rows at once."""
    if tiles.fused:
        return _fused_lines(p, tiles, stored)
    slabs = -(-max(p.call.columns, 1) // tiles.columns)
    width = LINES if p.call.canonical else WIDTH
    out = p.gain.new_empty((width, len(p.hidden)))
    kept = None if support is None else p.gain.new_empty((2, len(p.hidden)))
    more = None if table is None else p.gain.new_empty((table.width, len(p.hidden)))
    memory, backend = p.empty_tile(tiles), p.backend
    heights = pieces(len(p.hidden), tiles.rows, p.hidden.is_meta)
    widths = pieces(max(p.call.columns, 1), tiles.columns, p.hidden.is_meta)
    for rows in heights:
        part = p.cut(rows.start, rows.stop)
        parts = p.gain.new_empty((slabs, width, len(part.hidden)))
        kept_parts = None if support is None else p.gain.new_empty((slabs, 2, len(part.hidden)))
        for columns in widths:
            tile, slab = part.tile(memory, tiles, columns.start), columns.start // tiles.columns
            if stored is None:
                backend.statistics(tile, parts[slab])
            else:
                stored.store(p, tile, parts[slab], rows.start)
            if table is not None and more is not None:
                add_lines(table, p, tile, rows, more)
            if support is not None and kept_parts is not None:
                kept_parts[slab] = kept_statistics(support.logits(tile))
        out[:, rows] = merged(part, parts)
        if kept is not None and kept_parts is not None:
            kept[:, rows] = merge_kept(kept_parts, Statistic.of(out).t[rows])[:2]
    return Lines(out, kept, more)


def merged(p: Projection, parts: Tensor) -> Tensor:
    """Lines of all columns from those of slabs ``[P, 4, R]``, or ``[P, 18, R]`` where sums are order-free."""
    if len(parts) == 1:
        return parts[0]
    return merge_blocks(parts, p.gain) if p.call.canonical else merge(parts)


def add_lines(table: Table, p: Projection, tile: Problem, rows: slice, more: Tensor) -> None:
    """Lines of a tile of these rows into those of all; tiles of the same rows come from left to right."""
    found, so_far = table.lines(p.backend, tile, rows), more[:, rows]
    so_far.copy_(table.merge(torch.stack([so_far, found])) if tile.first else found)


def best_lines(p: Projection, best: Tensor) -> Tensor:
    """``[2, R]`` key and column of the best column of all, which products find, as lines of the one reading asked
    for."""
    table = p.call.table
    assert table is not None
    assert table.only_best
    best[1] += p.call.start
    return best


def _fused_lines(p: Projection, tiles: Tiles, stored: Exponentials | None) -> Lines:
    """From products that end in the statistic; those of stored rows write the exponentials, too. Where readings are
    asked for, two lines more: the key of the best column, and its number."""
    top, products, width = p.call.table is not None, p.products, LINES if p.call.canonical else WIDTH
    out = p.gain.new_empty((width + 2 * top, len(p.hidden)))
    keeping = 0 if stored is None else min(stored.rows, len(p.hidden))
    for start, stop in ((0, keeping), (keeping, len(p.hidden))):
        for rows in pieces(stop - start, tiles.rows, p.hidden.is_meta):
            first, last = start + rows.start, start + rows.stop
            product = p.cut(first, last).product(slice(0, p.call.columns))
            if stored is not None and last <= keeping:
                here = stored.cut(first, last)
                products.exponentials(product, here.values, here.reference, out[:, first:last])
            else:
                products.statistics(product, out[:, first:last])
    return Lines(out[:width], None, best_lines(p, out[width:]) if top else None)


def count_ahead(p: Projection, tiles: Tiles, key: Tensor, rank: Rank) -> Tensor:
    """``[R]`` columns here that come before the target, whose key this is, from all tiles once more: the same products
    in the same sizes, and therefore the same bits."""
    place, num_rows, total = p.call.rows.target - rank.start, len(key), p.gain.new_zeros(len(p.hidden))
    key, place = (torch.nn.functional.pad(x, (0, len(p.hidden) - num_rows)) for x in (key, place))
    memory = p.empty_tile(tiles)
    for rows in pieces(len(p.hidden), tiles.rows, p.hidden.is_meta):
        part = p.cut(rows.start, rows.stop)
        for columns in pieces(p.call.columns, tiles.columns, p.hidden.is_meta):
            tile = part.tile(memory, tiles, columns.start)
            total[rows] += p.backend.ahead(tile, key[rows], place[rows], rank.negative)
    return total[:num_rows]
