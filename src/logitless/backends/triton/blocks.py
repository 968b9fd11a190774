"""Order-free sums on a GPU: the launches of ``block_kernels.py``, whose twin is ``backends/blocks.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from logitless.backends.blocks import BLOCK, LINES
from logitless.backends.contract import Problem, Product
from logitless.backends.triton.launching import interpreted, launch
from logitless.machine import row_blocks_sizes
from logitless.softmax import WIDTH
from logitless.spec import has_values

PROGRAMS = 1024
"""Programs of the kernel that reads rows, each with memory for the blocks of one: 8 or so on a multiprocessor."""

MERGED = {"ROWS": 32, "AHEAD": 16, "num_warps": 4}
"""Rows per program of the merge of blocks, and blocks that are loaded at a time."""


def row_lines(problem: Problem, out: Tensor | None) -> Tensor:
    """``[18, R]`` lines of rows of logits in memory, in one read."""
    stats = problem.empty_statistic() if out is None else out
    blocks = -(-problem.columns // BLOCK)
    room = max(1, problem.memory // max(1, 3 * blocks * torch.float32.itemsize))
    programs = min(problem.num_rows, PROGRAMS, room)
    # Memory of a program, which stays in a cache.
    own = problem.gain.new_empty((programs, 3, blocks))
    launch(
        "row_blocks_kernel",
        programs,
        on=problem.logits,
        module="block_kernels",
        logits=problem.logits,
        index=problem.index,
        column=problem.column,
        gain=problem.gain,
        stats=stats,
        blocks=own,
        rows=problem.num_rows,
        row_stride=problem.logits.stride(0),
        columns=problem.columns,
        first=problem.first,
        part_stride=stats.stride(0),
        squash=problem.squash,
        INDEXED=problem.index is not None,
        ENTROPY=problem.entropy,
        SOFTCAP=bool(problem.squash),
        WIDEN=interpreted() if has_values(problem.logits) else False,
        enable_fp_fusion=False,
        **row_blocks_sizes(problem.logits.dtype, problem.columns),
    )
    return stats


def merge_blocks(p: Product, parts: Tensor, out: Tensor | None) -> Tensor:
    """``[18, R]`` lines of rows from the parts ``[blocks, 4, R]`` that a product left behind."""
    stats = p.gain.new_empty((LINES + 2 * p.top, p.rows)) if out is None else out
    launch(
        "merge_blocks_kernel",
        -(-p.rows // MERGED["ROWS"]),
        on=p.hidden,
        module="block_kernels",
        parts=parts,
        column=p.column,
        gain=p.gain,
        stats=stats,
        rows=p.rows,
        num_blocks=len(parts),
        part_stride=stats.stride(0),
        TOP=p.top,
        WIDEN=interpreted() if has_values(p.hidden) else False,
        enable_fp_fusion=False,
        **MERGED,
    )
    return stats


def solved(lines: Tensor, gain: Tensor) -> Tensor:
    """Same as :func:`logitless.backends.reference.solved`, in one launch."""
    stats = gain.new_empty((WIDTH, len(gain)))
    launch(
        "solve_kernel",
        -(-len(gain) // 128),
        on=lines,
        module="block_kernels",
        lines=lines,
        gain=gain,
        stats=stats,
        rows=len(gain),
        num_parts=len(lines),
        line_stride=lines.stride(1),
        shard_stride=lines.stride(0),
        ROWS=128,
        enable_fp_fusion=False,
        num_warps=4,
    )
    return stats
