"""The process group under torchrun, and the device of a rank."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from logitless.errors import LogitlessError
from logitless.tools.cli.options import BAD_INPUT


@contextmanager
def ranks() -> Iterator[tuple[int, int, Any]]:
    """Rank, rank on this machine and process group under torchrun; 0, 0 and None otherwise."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield 0, 0, None
        return
    from datetime import timedelta

    import torch.distributed as dist

    # Ranks wait for the slowest one, however long it takes; if one dies, torchrun ends the others.
    dist.init_process_group("gloo", timeout=timedelta(days=30))
    yield dist.get_rank(), int(os.environ.get("LOCAL_RANK", "0")), dist.group.WORLD
    # Nobody leaves before all are done. A gloo thread that lets go of its last collective while Python shuts down would
    # abort the process, so they get the time to do so before.
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)


@contextmanager
def first_explains(rank: int) -> Iterator[None]:
    """Where every rank fails alike, the first one says why."""
    try:
        yield
    except LogitlessError:
        if rank == 0:
            raise
        raise typer.Exit(BAD_INPUT) from None


def pick_device(device: str | None, local_rank: int) -> str:
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise LogitlessError(f'device must be "cpu", "cuda" or "cuda:1" and so on but is {device!r}.')
    if kind == "cuda" and not torch.cuda.is_available():
        raise LogitlessError('device is "cuda" but torch sees no CUDA device. Use --device cpu.')
    return f"cuda:{local_rank}" if device == "cuda" else device
