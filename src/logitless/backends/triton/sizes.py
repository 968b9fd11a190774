"""Block sizes of the kernels, in one place, with the measurement that chose them.

Nothing here is autotuned at run time: an autotuner would rerun an in-place kernel on its own output, and would make
the summation order depend on the machine's mood. Sizes depend on dtype and vocabulary, never on the number of rows.

Tiles of a sweep (up to 16384 columns) have sizes of their own: statistics of a float32 tile of 4096 x 8448 take 61 us
with 2048 columns x 4 warps and 93 us with 8192 x 8.

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


def statistics_sizes(dtype: torch.dtype, columns: int) -> dict[str, Any]:
    """Columns per step, warps, and loads in flight of the statistics kernel."""
    block, warps, stages = (8192, 8, 3) if dtype == torch.float32 else (4096, 4, 3)
    if columns <= 16384:
        # A tile of a sweep, 8448 columns or so: large steps would spend as long on the masked tail as on the rest.
        block, warps, stages = 2048, 4, 1
    return {"BLOCK": min(block, _power_of_two(columns)), "STAGES": stages, "num_warps": warps}


def gradient_sizes(dtype: torch.dtype, width: int) -> dict[str, Any]:
    """Columns per program and warps of the gradient kernel."""
    block = 1024 if dtype == torch.float32 else 4096
    if width <= 16384:
        # As above; 512 columns leave 6 % of a 4224-wide tile's last step idle where 1024 leave 18 %.
        block = 512
    return {"BLOCK": min(block, _power_of_two(width)), "num_warps": 4}


def _power_of_two(n: int) -> int:
    """Smallest power of two that is at least ``n`` and 16."""
    return max(16, 1 << max(n - 1, 0).bit_length())
