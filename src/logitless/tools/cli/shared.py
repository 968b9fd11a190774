"""Parts that several commands share: options, exit codes, text and progress, and the ranks of torchrun."""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typer import Exit, Option

from logitless.errors import LogitlessError

NO, BAD_INPUT, BROKEN, UNREAD = 1, 2, 3, 141
"""Exit codes: the answer is no; wrong usage or input; anything else; whoever read the output has left."""

AsJson = Annotated[bool, Option("--json", help="Print JSON instead of text.")]
Debug = Annotated[bool, Option("--debug", help="Show where an error comes from.")]
Device = Annotated[str | None, Option(help="cpu or cuda; default: cuda where there is one.")]

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def full_dtype(name: str) -> str:
    """``"bf16"`` becomes ``"bfloat16"``; a name that is no short one stays as it is."""
    return SHORT_DTYPES.get(name.lower(), name)


class _Console(Console):
    """A console that leaves a closed pipe to the command: rich itself would end it with 1, the code for "no"."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Console:
    """Prints text as it is, never wrapped; on a terminal, in colour."""
    return _Console(highlight=False, markup=False, soft_wrap=True)


def bar(console: Console, *more: ProgressColumn, auto_refresh: bool = True) -> Progress:
    """A progress bar that is gone in the end: how many of how many, the time so far, more columns, and a text."""
    columns = (BarColumn(bar_width=24), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(), *more)
    text = TextColumn("{task.description}")
    return Progress(*columns, text, console=console, transient=True, auto_refresh=auto_refresh)


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr with the time that is left; plain lines where stderr is no terminal."""
    console, start, steps = Console(stderr=True), time.monotonic(), itertools.count()
    if not console.is_terminal:

        def line(text: str) -> None:
            done, so_far = next(steps), time.monotonic() - start
            left = f" (about {so_far / done * (total - done) / 60:.0f} min left)" if done and so_far > 60 else ""
            print(f"{text}{left}", file=sys.stderr, flush=True)

        yield line
        return
    # The bar is drawn only between measurements: a thread that redraws the bar would disturb the times.
    with bar(console, TextColumn("left"), TimeRemainingColumn(), auto_refresh=False) as shown:
        task = shown.add_task("starting", total=total)
        yield lambda text: shown.update(task, description=text, advance=1, refresh=True)


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
        raise Exit(BAD_INPUT) from None


def pick_device(device: str | None, local_rank: int) -> str:
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if re.fullmatch(r"(cpu|cuda)(:\d{1,3})?", device) is None:
        raise LogitlessError(f'device must be "cpu", "cuda" or "cuda:1" and so on but is {device!r}.')
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise LogitlessError('device is "cuda" but torch sees no CUDA device. Use --device cpu.')
    device = f"cuda:{local_rank}" if device == "cuda" else device
    count = torch.cuda.device_count() if device.startswith("cuda") else 0
    if count and int(device.partition(":")[2]) >= count:
        raise LogitlessError(
            f'device is "{device}" but torch sees {count} CUDA devices, from cuda:0 on. Use one of them.'
        )
    return device
