"""Block sizes of the kernels, in one place, with the measurement that chose them.

Nothing here is autotuned at run time: an autotuner would rerun an in-place kernel on its own output, and would make
the summation order depend on the machine's mood. Sizes depend on dtype and vocabulary, never on the number of rows.
"""

from __future__ import annotations

from typing import Any

import torch


def statistics_sizes(dtype: torch.dtype, columns: int) -> dict[str, Any]:
    """Columns per step and warps of the statistics kernel."""
    block = 4096 if dtype == torch.float32 else 8192
    return {"BLOCK": min(block, _power_of_two(columns)), "num_warps": 8}


def gradient_sizes(dtype: torch.dtype, columns: int) -> dict[str, Any]:
    """Columns per step, columns per program and warps of the gradient kernel."""
    block = min(4096, _power_of_two(columns))
    return {"BLOCK": block, "CHUNK": 4 * block, "num_warps": 8}


def _power_of_two(n: int) -> int:
    """Smallest power of two that is at least ``n`` and 16."""
    return max(16, 1 << (n - 1).bit_length())
