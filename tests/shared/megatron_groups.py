"""Shared by the tests of megatron groups and those that build on them."""

from __future__ import annotations

# What Megatron 0.16 says on a machine without CUDA, about itself.
NOISE = [
    # It scripts functions when it is imported.
    (DeprecationWarning, "`torch.jit.script"),
    # Optional packages with CUDA kernels.
    (UserWarning, "Transformer Engine and Apex are not installed"),
    # It imports names of its own that it has deprecated.
    (DeprecationWarning, "The following imports from `dynamic_context.py` will be removed"),
    # Advice for CUDA streams.
    (UserWarning, "When using async grad allreduce it is recommended to set .* CUDA_DEVICE_MAX_CONNECTIONS"),
    # Newer torch has renamed what sequence parallelism calls.
    (FutureWarning, "`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"),
    # So do hosts that build on it.
    (FutureWarning, "torch.distributed.nn.functional"),
]


TIMEOUT = 180.0
"""Seconds for a job: importing Megatron takes five of them, times four ranks on however many cores."""
