"""Outputs of commands: tables as plain text, and the folder of files that no option names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

RECORDS = Path("benchmarks/results")
"""Committed records, in a checkout of the project."""


def in_checkout() -> bool:
    """Whether the working directory is a checkout of the project."""
    return RECORDS.is_dir() and Path("src/logitless/__init__.py").is_file()


def default_folder() -> Path:
    """The folder ``out`` in a checkout of the project; elsewhere ``logitless`` in the user's cache, ``~/.cache``."""
    if in_checkout():
        return Path("out")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "logitless"


def slug_of(name: str) -> str:
    """A card's name in the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia").strip()).strip("-")


def text_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, one line per row, never wrapped: a header, and numbers to the right; with no ``columns``, rows alone.

    Without rich, which ``python -m benchmarks.bench`` of a checkout does not need, cells are separated by tabs.

    >>> print(text_table(("way", "peak"), [("ours", "64 B"), ("plain", "128 B")]))
    way     peak
    ------ -----
    ours    64 B
    plain  128 B
    """
    rows = [list(row) for row in rows]
    if not columns and not rows:
        return ""
    try:
        from rich.box import Box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return "\n".join("\t".join(row) for row in ([list(columns)] if columns else []) + rows)
    # A box is eight lines of four characters, here all blank but the rule below the header.
    rule = Box("\n".join(["    ", "    ", " -  ", *["    "] * 5]) + "\n", ascii=True)
    table = Table(box=rule, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), show_header=bool(columns))
    for place in range(len(columns) or max(map(len, rows))):
        numbers = bool(columns) and any(row[place][:1].isdigit() for row in rows)
        name = columns[place] if columns else ""
        table.add_column(name, justify="right" if numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # The console is wider than any table, and prints every character as it is.
    console = Console(width=10_000, color_system=None, markup=False, emoji=False, highlight=False)
    with console.capture() as shown:
        console.print(table)
    return "\n".join(line.rstrip() for line in shown.get().splitlines())
