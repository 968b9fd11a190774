"""Programs as a user starts them, each rank in a process of its own: ``run_program(path, *arguments, ranks=2)``.

The processes are forked from the server of :mod:`ranks`, which has torch and the larger hosts imported: starting Python
for each of them would cost more than what most programs do. The environment is torchrun's, store included.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from ranks import new_process


class Ended(NamedTuple):
    """Exit codes in rank order, and what all ranks printed."""

    codes: list[int | None]
    out: str
    err: str


def start_program(path: Path, *arguments: str, folder: Path, written: Path, launched: dict[str, str] | None = None):
    """The process of a script in ``folder``, whose output goes to ``written`` with ``.out`` and ``.err`` added."""
    return new_process(_run, (str(path), arguments, str(folder), launched or {}, str(written)))


def run_program(
    path: Path, *arguments: str, folder: Path, ranks: int = 0, timeout: float = 240.0, environment: dict | None = None
) -> Ended:
    """Run a script to its end in ``folder``, under what torchrun sets if ranks are asked for; late ones are killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks else None
    with tempfile.TemporaryDirectory() as written:
        processes = []
        for rank in range(max(ranks, 1)):
            launched = (_launched(rank, ranks, store.port) if store else {}) | (environment or {})
            here = {"folder": folder, "written": Path(written, str(rank)), "launched": launched}
            processes.append(start_program(path, *arguments, **here))
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        out, err = ("".join(p.read_text() for p in sorted(Path(written).glob(f"*.{end}"))) for end in ("out", "err"))
    return Ended([process.exitcode for process in processes], out, err)


def _launched(rank: int, world: int, port: int) -> dict[str, str]:
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    named = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {name: str(size) for name, size in sizes.items()} | named


def _run(path: str, arguments: tuple[str, ...], folder: str, launched: dict[str, str], written: str) -> None:
    for end, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{written}.{end}", os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(launched)
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv, sys.path[:] = [path, *arguments], [os.path.dirname(path), *sys.path]
    runpy.run_path(path, run_name="__main__")
