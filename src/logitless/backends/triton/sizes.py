"""Block sizes of the kernels, in one place, with the measurement that chose them.

Nothing here is autotuned at run time: an autotuner would rerun an in-place kernel on its own output, and would make
the summation order depend on the machine's mood. Sizes depend on dtype and vocabulary, never on the number of rows.

Tiles of a sweep (up to 16384 columns) have sizes of their own. Statistics of a float32 tile of 4096 x 8448 take 36 us
with 1024 columns x 2 warps; its exponentials 55 us with 1024 x 4 and three loads in flight, 73 us where the maximum is
looked for first. Those of a tile of 2048 x 4224, which is in L2, take 14 us with 512 x 2, 17 us with 1024 x 4 x 3. One
warp to 512 columns makes a whole backward sweep 1.6 ms faster than four: 96.4 ms against 98.0, beside three products in
94.0. Exponentials of 8192 rows become gradients in 1.60 ms with one program per row and slab, 256 x 1; in 1.86 ms with
512 x 2 and a branch per element, in 2.5 ms with one program per 512 columns.

One H200, T = 16384, V = 151936, entropy on, against a copy that moves 4.27 TB/s (so one read is 2.33 / 1.17 ms and
read + write 4.67 / 2.33 ms in float32 / bfloat16):

    statistics  float32   8192 x 8 warps x 3 stages  2.10 ms    2048 x 8 x 3  2.14    rescaling at every block  2.10
    statistics  bfloat16  4096 x 4 warps x 3 stages  1.20 ms    8192 x 8 x 3  1.38    rescaling at every block  1.39
    gradient    float32   1024 x 4 warps             4.83 ms    4096 x 4      4.94    8192 x 8                  4.98
    gradient    bfloat16  4096 x 4 warps             2.40 ms    2048 x 4      2.49    8192 x 8                  2.44
"""

from __future__ import annotations

from typing import Any

import torch

TILE = 16384
"""Columns up to which logits count as one tile of a sweep."""

SMALL = 4224
"""Columns up to which such a tile is likely to be in L2."""


def statistics_sizes(dtype: torch.dtype, columns: int) -> dict[str, Any]:
    """Columns per step, warps, and loads in flight of the statistics kernel."""
    block, warps, stages = (8192, 8, 3) if dtype == torch.float32 else (4096, 4, 3)
    if columns <= TILE:
        # Large steps would spend as long on the masked tail of some 8448 columns as on the rest.
        block, warps, stages = 1024, 2, 1
    return {"BLOCK": min(block, _power_of_two(columns)), "STAGES": stages, "num_warps": warps}


def exponentials_sizes(columns: int) -> dict[str, Any]:
    """Columns per step, warps, and loads in flight of the kernel that also writes exponentials."""
    # The larger tile comes from memory, the smaller one from L2.
    block, warps, stages = (512, 2, 1) if columns <= SMALL else (1024, 4, 3)
    return {"BLOCK": min(block, _power_of_two(columns)), "STAGES": stages, "num_warps": warps}


def gradient_from_sizes(columns: int) -> dict[str, Any]:
    """Columns per step and warps of the kernel that turns exponentials into gradients."""
    return {"BLOCK": min(256, _power_of_two(columns)), "num_warps": 1}


def gradient_sizes(dtype: torch.dtype, width: int) -> dict[str, Any]:
    """Columns per program and warps of the gradient kernels."""
    block, warps = (1024, 4) if dtype == torch.float32 else (4096, 4)
    if width <= TILE:
        # As above; 512 columns leave 6 % of a 4224-wide tile's last step idle where 1024 leave 18 %.
        block, warps = 512, 1
    return {"BLOCK": min(block, _power_of_two(width)), "num_warps": warps}


def narrowing_sizes(columns: int) -> dict[str, Any]:
    """Columns per step and warps of the kernel that writes a row over its own start."""
    return {"BLOCK": min(2048, _power_of_two(columns)), "num_warps": 16 if columns > TILE else 4}


def _power_of_two(n: int) -> int:
    """Smallest power of two that is at least ``n`` and 16."""
    return max(16, 1 << max(n - 1, 0).bit_length())
