"""Text, tables and progress: plain where they are piped, coloured on a terminal."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def console() -> Console:
    """Prints text as it is, never wrapped; on a terminal, in colour."""
    return Console(highlight=False, markup=False, soft_wrap=True)


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
    columns = (
        *(BarColumn(bar_width=24), TextColumn("{task.completed}/{task.total}")),
        *(TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()),
    )
    shown = (*columns, TextColumn("{task.description}"))
    # Drawn only between measurements: a thread that redraws the bar would disturb the times.
    with Progress(*shown, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda text: bar.update(task, description=text, advance=1, refresh=True)
