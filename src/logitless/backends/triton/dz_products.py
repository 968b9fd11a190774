"""The two products that dZ ends in, where the library's take longer. The twin of each is ``sources/gemm.multiply``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless.backends.triton.launching import describable, described, interpreted, launch
from logitless.machine import LARGE, DZSizes, dz_sizes, row_parts


def takes_dz(d_z: Tensor, other: Tensor, out: Tensor) -> bool:
    """Whether these kernels can multiply dZ by hidden states or a weight, and whether that pays."""
    if d_z.dtype not in (torch.bfloat16, torch.float16) or other.dtype != d_z.dtype:
        return False
    large = d_z.numel() * other.shape[1] >= LARGE
    return large and all(describable(x) for x in (d_z, other, out))


def times_weight(d_z: Tensor, weight: Tensor, out: Tensor, programs: int) -> None:
    """``out = d_z @ weight``, rounded once: ``[R, V]`` by ``[V, D]``.

    Args:
        programs: that work at the same time. Rows whose tiles would leave most of them idle are summed in parts of V.
    """
    sizes = dz_sizes(weight.shape[1])
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
    sizes = dz_sizes(hidden.shape[1])
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
