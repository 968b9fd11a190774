"""The two products that dZ ends in, where the library's take longer. The twin of each is ``sources/gemm.multiply``."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.backends.triton.launching import describable, described, interpreted, launch
from logitless.machine import PIECE
from logitless.spec import has_values


class DZSizes(NamedTuple):
    """Sizes of the two products that dZ ends in.

    Attributes:
        rows, columns, depth: of a tile of the result, and of its operands at a time.
        band: blocks of rows that are worked on side by side, sharing their columns in L2.
        warps, stages: of a program, and of its loads.
    """

    rows: int
    columns: int
    depth: int = 64
    band: int = 16
    warps: int = 8
    stages: int = 3


def dz_sizes() -> DZSizes:
    """Of every hidden size."""
    # H200, bfloat16, 3328 rows of V = 151936 (2432 of 201088 at D = 2880), a warm chip, milliseconds at D = 1024, 2048,
    # 2880 and 4096. dX 1.65, 3.16, 4.3, 6.3, where the library takes 1.85, 3.84, 4.9, 6.5; with 256 x 128 1.76, 3.60,
    # 5.57, 7.00; with 128 x 128, 4 warps and 4 stages 1.68, 3.34, 4.96, 7.61. dW, added to what is there, 1.74, 3.46,
    # 5.36, 7.12, where the library takes 1.63, 3.19, 4.57, 7.11; of 8192 rows of V = 50257 at D = 768 0.89 and 1.53.
    return DZSizes(128, 256)


LARGE = 1 << 37
"""Multiplications of a product from which on a launch of Triton's may pay, which takes the CPU longer."""

FILLED = 0.9
"""Share of the programs' time with a tile from which on the library's dX is as fast."""

MOST_PARTS = 6
"""Parts of the vocabulary that a tile of dX may be summed in."""


@functools.lru_cache(1024)
def row_parts(rows: int, width: int, programs: int) -> tuple[int, int]:
    """How many rows of dX are made in whole tiles, and in how many parts each tile of the others is summed.

    So many programs work on tiles at the same time, and the last few tiles would leave most of them idle. Sums of parts
    take at most four tiles of each program.

    >>> row_parts(3328, 1024, 132), row_parts(3328, 4096, 132), row_parts(4096, 2048, 132)
    ((0, 5), (3072, 4), (4096, 1))
    """
    sizes = dz_sizes()
    blocks, across = -(-rows // sizes.rows), -(-width // sizes.columns)

    def waves(choice: tuple[int, int]) -> tuple[float, int, int]:
        whole, parts = choice
        rest = (blocks - whole) * across * parts
        time = -(-whole * across // programs) + -(-rest // programs) / parts
        # A launch, and sums that are read again, take about a hundredth of a tile's time.
        return round(time + 0.01 * parts + (0.02 if whole and rest else 0.0), 6), parts, -whole

    full = blocks * across // programs * programs // across
    choices = [
        (whole, parts)
        for whole in (0, full)
        for parts in range(2, MOST_PARTS + 1)
        if whole < blocks and (blocks - whole) * across * parts <= 4 * programs
    ]
    whole, parts = min([(blocks, 1), *choices], key=waves)
    return min(rows, whole * sizes.rows), parts


def rows_pay(d_z: Tensor, weight: Tensor, out: Tensor, programs: int) -> bool:
    """Whether :func:`times_weight` can be had and is faster: where tiles of so many rows leave programs idle."""
    sizes = dz_sizes()
    tiles = -(-len(d_z) // sizes.rows) * -(-weight.shape[1] // sizes.columns)
    idle = tiles < FILLED * programs * -(-tiles // programs)
    return (idle or _odd(d_z)) and _takes(d_z, weight, out)


def columns_pay(d_z: Tensor, hidden: Tensor, out: Tensor) -> bool:
    """Whether :func:`add_outer` can be had and is faster."""
    return out.dtype == torch.float32 and _odd(d_z) and _takes(d_z, hidden, out)


def _odd(d_z: Tensor) -> bool:
    """Whether the library has to do without its fast kernels: where a row of dZ is not made of whole pieces."""
    return d_z.shape[1] * d_z.element_size() % PIECE > 0


def _takes(d_z: Tensor, other: Tensor, out: Tensor) -> bool:
    halves = d_z.dtype in (torch.bfloat16, torch.float16) and other.dtype == d_z.dtype
    large = d_z.numel() * other.shape[1] >= LARGE
    return halves and large and all(describable(x) for x in (d_z, other, out))


def times_weight(d_z: Tensor, weight: Tensor, out: Tensor, programs: int) -> None:
    """``out = d_z @ weight``, rounded once: ``[R, V]`` by ``[V, D]``.

    Args:
        programs: that work at the same time. Rows whose tiles would leave most of them idle are summed in parts of V.
    """
    sizes = dz_sizes()
    whole, parts = row_parts(len(d_z), weight.shape[1], programs)
    if whole:
        _launch_rows(d_z[:whole], weight, out[:whole], 1, sizes, programs)
    rest = len(d_z) - whole
    if not rest:
        return
    height = -(-rest // sizes.rows) * sizes.rows
    sums = torch.empty((parts * height, weight.shape[1]), dtype=torch.float32, device=d_z.device)
    _launch_rows(d_z[whole:], weight, sums, parts, sizes, programs)
    out[whole:].copy_(sums.view(parts, height, -1)[:, :rest].sum(0))


def add_outer(d_z: Tensor, hidden: Tensor, out: Tensor, add: bool, programs: int) -> None:
    """``out = d_z.T @ hidden`` or ``out += d_z.T @ hidden``: ``[R, V]`` and ``[R, D]`` to float32 ``[V, D]``."""
    if not has_values(d_z):
        # A dry run needs no Triton, which descriptors are made by.
        return
    sizes = dz_sizes()
    tiles = -(-d_z.shape[1] // sizes.rows) * -(-hidden.shape[1] // sizes.columns)
    launch(
        "product_columns_kernel",
        min(tiles, programs),
        d_z=described(d_z, sizes.depth, sizes.rows),
        hidden=described(hidden, sizes.depth, sizes.columns),
        columns=d_z.shape[1],
        WIDTH=hidden.shape[1],
        BAND=sizes.band,
        ADD=add,
        **_shared(d_z, out, sizes),
    )


def _launch_rows(d_z: Tensor, weight: Tensor, out: Tensor, parts: int, sizes: DZSizes, programs: int) -> None:
    if not has_values(d_z):
        return
    units = -(-len(d_z) // sizes.rows) * -(-weight.shape[1] // sizes.columns) * parts
    launch(
        "product_rows_kernel",
        min(units, programs),
        d_z=described(d_z, sizes.rows, sizes.depth),
        weight=described(weight, sizes.depth, sizes.columns),
        depth=-(-d_z.shape[1] // (sizes.depth * parts)),
        WIDTH=weight.shape[1],
        PARTS=parts,
        **_shared(d_z, out, sizes),
    )


def _shared(d_z: Tensor, out: Tensor, sizes: DZSizes) -> dict[str, Any]:
    return {
        "on": d_z,
        "module": "dz_kernels",
        "out": described(out, sizes.rows, sizes.columns // 2),
        "rows": len(d_z),
        "BR": sizes.rows,
        "BC": sizes.columns,
        "BD": sizes.depth,
        "WIDEN": interpreted(),
        "num_warps": sizes.warps,
        "num_stages": sizes.stages,
    }
