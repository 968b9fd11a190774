"""Products with epilogues: ``hidden @ weight.T`` whose float32 logits never reach memory.

    statistics      -> [4, R]                      as ``statistics`` of a backend says of the logits
    gradient        -> dZ [R, C] in 16 bits        as ``gradient`` does
    exponentials    -> [4, R] and e^(z - reference) [R, C] in 16 bits, with one reference per row and column tile
    gradient_from   -> dZ [R, C] of such exponentials
    towards         -> [4, R] in parts, and e^(z - reference) with one reference per row, which follows its maximum

The twin of each is the product in float32, then the function of that name in ``backends/reference.py``. What cannot be
had this way is told by :func:`takes` before anything runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from logitless.backends.contract import SLACK, Problem, Product
from logitless.backends.triton.blocks import merge_blocks
from logitless.backends.triton.dz_products import add_outer as add_outer
from logitless.backends.triton.dz_products import columns_pay as columns_pay
from logitless.backends.triton.dz_products import rows_pay as rows_pay
from logitless.backends.triton.dz_products import times_weight as times_weight
from logitless.backends.triton.launching import describable, described, interpreted, launch, of_rows
from logitless.errors import first_line
from logitless.machine import gradient_from_tiles_sizes, multiprocessors
from logitless.product_table import ProductSizes, product_sizes
from logitless.softmax import WIDTH, Coefficients, Normaliser
from logitless.spec import has_values

MERGED = {"BLOCK": 32, "AHEAD": 4, "num_warps": 1}
"""Rows per program of the merge, and parts that are loaded at a time."""

SLACKS = {torch.bfloat16: 60.0, torch.float16: SLACK}
"""How far a row's maximum may lie from the reference of its exponentials: e^60 squared is in range of bfloat16."""


def takes(hidden: Tensor, weight: Tensor, copied: bool = False) -> str | None:
    """Why these operands cannot be multiplied here, or None if they can.

    Args:
        copied: whether rows of hidden are to be copied first, and may lie where they like.
    """
    refused = takes_sizes(hidden.dtype, hidden.shape[-1])
    if refused is None and weight.dtype != hidden.dtype:
        refused = f"hidden is {hidden.dtype} and weight {weight.dtype}"
    if refused is None and hidden.device.type not in ("cuda", "meta") and not interpreted():
        refused = f"the kernels run on CUDA devices, and hidden is on {hidden.device.type}"
    for name, x in (("hidden", hidden), ("weight", weight))[copied:]:
        if refused is None and not describable(x):
            refused = f"rows of {name} are not contiguous or do not begin at multiples of 16 bytes"
    return refused


def takes_sizes(dtype: torch.dtype, width: int) -> str | None:
    """The same of what all ranks of a group have in common."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"operands are bfloat16 or float16, and not {dtype}"
    return f"hidden has {width} columns, not a multiple of 8" if width % 8 or not width else None


def refusal(step: Callable[[], object]) -> str | None:
    """Why a kernel does not run on this card, for want of shared memory say; None once it has."""
    try:
        step()
    except (importlib.import_module("triton").TritonError, RuntimeError) as error:
        return f"{type(error).__name__}: {first_line(error)[:160]}"
    return None


def statistics(p: Product, out: Tensor | None = None, sizes: ProductSizes | None = None) -> Tensor:
    """``[4, R]`` statistic of the rows over these columns, into ``out`` if given."""
    return merge(p, statistic_parts(p, sizes), out)


def exponentials(
    p: Product, values: Tensor, references: Tensor, out: Tensor | None = None, sizes: ProductSizes | None = None
) -> Tensor:
    """The statistic, and ``e^(z - reference)`` of every element into ``values``, but 0 at the target.

    Args:
        values: ``[R, C]`` of the operands' dtype.
        references: ``[number of column tiles, R]`` receives each row's maximum within a tile.
    """
    return merge(p, statistic_parts(p, sizes, values, references), out)


def num_parts(p: Product) -> int:
    """How many parts the statistic of these columns has."""
    return _sizes(p).groups(p.columns)


def towards(
    p: Product,
    parts: Tensor,
    values: Tensor,
    reference: Tensor,
    sums: Tensor | None,
    sizes: ProductSizes | None = None,
) -> None:
    """The statistic in parts, and ``e^(z - reference)``, times the slope under a softcap.

    Where a row's maximum leaves the range of 16 bits its reference moves there, its sums with it, and the exponentials
    are made again: decided on the device, which goes on.

    Args:
        parts: ``[groups, 4, R]`` for :func:`merge`, ``[groups, 5, R]`` with the best column.
        values: ``[R, C]`` of the operands' dtype, 0 at the target.
        reference: ``[R]`` of the exponentials so far, and afterwards of these.
        sums: ``[R, D]`` relative to the reference; None before the first columns.
    """
    if not has_values(p.hidden) or not parts.numel():
        return
    sizes = sizes or _sizes(p)
    assert len(parts) == sizes.groups(p.columns)
    moved = torch.zeros((), dtype=torch.int32, device=p.hidden.device)
    slack = SLACKS[p.hidden.dtype]
    _launch_statistics(p, sizes, parts, values, reference, slack)
    launch(
        "follow_kernel",
        p.rows,
        on=p.hidden,
        module="part_kernels",
        parts=parts,
        column=p.column,
        gain=p.gain,
        references=reference,
        sums=sums,
        moved=moved,
        rows=p.rows,
        num_groups=len(parts),
        sums_stride=0 if sums is None else sums.stride(0),
        WIDTH=p.hidden.shape[1] if sums is None else sums.shape[1],
        SLACK=slack,
        NEGATIVE=p.negative,
        TOP=p.top,
        FIRST=sums is None,
        BLOCK=1024,
        num_warps=4,
    )
    _launch_statistics(p, sizes, parts, values, reference, slack, moved)


def statistic_parts(
    p: Product, sizes: ProductSizes | None = None, values: Tensor | None = None, references: Tensor | None = None
) -> Tensor:
    """``[groups, 4, R]`` parts of the statistic, and the exponentials where there is room for them.

    The parts are for :func:`merge` alone: m and t of each are before the gain, and skipped rows hold anything.
    """
    sizes = sizes or _sizes(p)
    parts = p.gain.new_empty((sizes.groups(p.columns), WIDTH + p.top, p.rows))
    if references is not None:
        assert references.shape == (-(-p.columns // sizes.columns), p.rows)
        assert references.stride(1) == 1
    if has_values(p.hidden) and parts.numel():
        _launch_statistics(p, sizes, parts, values, references)
    return parts


def _launch_statistics(
    p: Product,
    sizes: ProductSizes,
    parts: Tensor,
    values: Tensor | None,
    references: Tensor | None,
    slack: float = 0.0,
    moved: Tensor | None = None,
) -> None:
    blocks = -(-p.rows // sizes.rows)
    given = {
        **_operands(p, sizes),
        **written(values, sizes.rows, sizes.columns, sizes.turns),
        "parts": parts,
        "references": references,
        "moved": moved,
        "ENTROPY": p.entropy,
        "EVEN": p.columns % sizes.columns == 0,
        "NEGATIVE": p.negative,
        "TOP": p.top,
        "SLACK": slack,
    }
    if p.canonical:
        given |= {"module": "block_kernels", "enable_fp_fusion": False}
        launch("product_blocks_kernel", _programs(p, blocks * -(-p.columns // sizes.columns), sizes), **given)
        return
    # By turns a unit has a part of either group of warps.
    halves = 2 if sizes.turns else 1
    launch(
        "turns_statistics_kernel" if sizes.turns else "product_statistics_kernel",
        _programs(p, blocks * len(parts) // halves, sizes),
        **given,
        references_stride=0 if references is None else references.stride(0),
        TILES=halves * sizes.tiles,
        EXPONENTIALS=values is not None,
    )


def merge(p: Product, parts: Tensor, out: Tensor | None = None) -> Tensor:
    """``[4, R]`` statistic of the rows from its parts ``[groups, 4, R]``, added in order."""
    if p.canonical:
        return merge_blocks(p, parts, out)
    stats = p.gain.new_empty((WIDTH + 2 * p.top, p.rows)) if out is None else out
    launch(
        "merge_kernel",
        -(-p.rows // MERGED["BLOCK"]),
        on=p.hidden,
        module="part_kernels",
        parts=parts,
        column=p.column,
        gain=p.gain,
        stats=stats,
        rows=p.rows,
        num_groups=len(parts),
        part_stride=stats.stride(0),
        NEGATIVE=p.negative,
        TOP=p.top,
        **MERGED,
    )
    return stats


def gradient(p: Product, norm: Normaliser, coef: Coefficients, out: Tensor, sizes: ProductSizes | None = None) -> None:
    """d logits of these rows and columns over all of ``out``, ``[R, C]`` of the operands' dtype, rows at any stride."""
    if not has_values(p.hidden) or not out.numel():
        return
    # dZ has no sums of its own, so that canonical ones do not bind its sizes.
    sizes = sizes or product_sizes(p.columns, p.weight.shape[1], turns=p.turns)
    launch(
        "turns_gradient_kernel" if sizes.turns else "product_gradient_kernel",
        _programs(p, -(-p.rows // sizes.rows) * -(-p.columns // sizes.columns), sizes),
        **_operands(p, sizes),
        **written(out, sizes.rows, sizes.columns, sizes.turns),
        reference=norm.reference,
        log_sum=norm.log_sum,
        plain=coef.plain,
        product=coef.product,
        at_target=coef.at_target,
        PRODUCT=coef.product is not None,
    )


def gradient_from(
    problem: Problem, references: Tensor, slab: int, norm: Normaliser, coef: Coefficients, out: Tensor
) -> None:
    """Same as :func:`logitless.backends.reference.gradient_from`, for slabs as narrow as a tile of a product."""
    if not has_values(out):
        return
    sizes = gradient_from_tiles_sizes(slab)
    steps = -(-problem.columns // (slab * sizes["TILES"] * sizes["STEPS"]))
    launch(
        "gradient_from_tiles_kernel",
        problem.num_rows * steps,
        on=out,
        module="part_kernels",
        exponentials=problem.logits,
        moved=references,
        **of_rows(problem, norm, coef),
        out=out,
        row_stride=problem.logits.stride(0),
        out_stride=out.stride(0),
        moved_stride=references.stride(0),
        SLAB=slab,
        FAST=not interpreted(),
        **sizes,
    )


def _programs(p: Product, units: int, sizes: ProductSizes) -> int:
    return min(units, sizes.residents * multiprocessors(p.hidden.device))


def _sizes(p: Product) -> ProductSizes:
    return product_sizes(p.columns, p.weight.shape[1], p.canonical, p.turns)


def _operands(p: Product, sizes: ProductSizes) -> dict[str, Any]:
    """Arguments of all products."""
    given = {
        "on": p.hidden,
        "module": "turns_kernels" if sizes.turns else "product_kernels",
        "hidden": described(p.hidden, sizes.rows, sizes.depth, sizes.turns),
        "weight": described(p.weight, sizes.columns, sizes.depth, sizes.turns),
        "bias": p.bias,
        "column": p.column,
        "gain": p.gain,
        "rows": p.rows,
        "columns": p.columns,
        "first": p.first,
        "squash": p.squash,
        "WIDTH": p.hidden.shape[1],
        "BR": sizes.rows,
        "BC": sizes.columns,
        "BD": sizes.depth,
        "BAND": sizes.band,
        "BIASED": p.bias is not None,
        "MATCH": str(p.logits_dtype).removeprefix("torch."),
        "SOFTCAP": bool(p.squash),
        "FINITE": _finite(p, sizes),
        "num_warps": sizes.warps,
    }
    if sizes.turns:
        return given | {"STAGES": sizes.stages}
    return given | {"FLATTEN": sizes.flatten, "WIDEN": interpreted(), "num_stages": sizes.stages}


def _finite(p: Product, sizes: ProductSizes) -> bool:
    """Whether no logit of a tile is -inf: by a bias, by an overflow of float16, or past the last column."""
    return p.bias is None and p.logits_dtype != torch.float16 and p.columns % sizes.columns == 0


def written(out: Tensor | None, rows: int, columns: int, turns: bool = False) -> dict[str, Any]:
    """Arguments of what a tile of so many rows and columns is written to: a descriptor where there can be one."""
    # A descriptor stores whole chunks of 16 bytes: the last of a row would go over what lies beside.
    whole = out is not None and describable(out) and out.shape[1] * out.element_size() % 16 == 0
    return {
        "out": described(out, rows, columns, turns) if out is not None and whole else out,
        "out_stride": 0 if out is None else out.stride(0),
        "DESCRIBED": whole,
    }
