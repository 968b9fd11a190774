"""Where files go that no option names: never into whatever folder a command happens to be started in."""

from __future__ import annotations

import os
import re
from pathlib import Path

RECORDS = Path("benchmarks/results")
"""Committed records, in a checkout of the project."""


def in_checkout() -> bool:
    """Whether the working directory is a checkout of the project."""
    return RECORDS.is_dir() and Path("src/logitless/__init__.py").is_file()


def default_folder() -> Path:
    """``out`` in a checkout of the project, elsewhere the user's cache, ``~/.cache/logitless``."""
    if in_checkout():
        return Path("out")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "logitless"


def slug_of(name: str) -> str:
    """A card's name in the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia").strip()).strip("-")
