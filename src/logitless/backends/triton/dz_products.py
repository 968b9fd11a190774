"""The two products that dZ ends in, where the library's take longer. The twin of each is ``sources/gemm.multiply``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless.backends.triton.launching import describable, described, interpreted, launch
from logitless.machine import LARGE, PIECE, DZSizes, dz_sizes, row_parts


def rows_pay(d_z: Tensor, weight: Tensor, out: Tensor, programs: int) -> bool:
    """Whether :func:`times_weight` can be had and is faster: where tiles of so many rows leave programs idle."""
    idle = row_parts(len(d_z), weight.shape[1], programs)[0] < len(d_z)
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
