"""Text, tables and progress: plain where they are piped, coloured on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


def console() -> Console:
    """Prints text as it is, never wrapped; on a terminal, in colour."""
    return Console(highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr; plain lines where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    columns = (BarColumn(bar_width=24), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
    shown = (*columns, TextColumn("{task.description}"))
    # Drawn only between measurements: a thread that redraws the bar would disturb the times.
    with Progress(*shown, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda text: bar.update(task, description=text, advance=1, refresh=True)
