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


def print_records(table: str) -> None:
    """On a terminal, headlines in bold and our lines in green."""
    for line in table.splitlines():
        ours = line.startswith("logitless") or " logitless" in line
        console().print(line, style="bold" if ": T=" in line else "green" if ours else None)
