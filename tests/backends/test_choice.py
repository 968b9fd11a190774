"""Which backend ``"auto"`` means: by device, dtype and what is installed, also for tensors without numbers."""

from __future__ import annotations

import pytest
import torch

from logitless import backends
from logitless.backends import choose_backend


@pytest.mark.parametrize(
    ("dtype", "device", "name", "why"),
    [
        (torch.float32, None, "tiled", "the logits are on meta, and the kernels need CUDA"),
        (torch.bfloat16, "cpu", "tiled", "the logits are on cpu, and the kernels need CUDA"),
        (torch.float64, "cuda", "tiled", "the kernels do not take torch.float64"),
        *(
            (dtype, "cuda", "triton", f"CUDA tensor of {dtype}")
            for dtype in (torch.float32, torch.bfloat16, torch.half)
        ),
    ],
)
def test_what_auto_means(dtype: torch.dtype, device: str | None, name: str, why: str, monkeypatch):
    """What a dry run asks of another device does not depend on what is installed here."""
    for there in (True, False):
        monkeypatch.setattr(backends, "_has_triton", lambda there=there: there)
        choice = choose_backend(torch.empty(2, 3, dtype=dtype, device="meta"), "auto", device)
        assert choice.name == name
        assert choice.reason.startswith(why)
