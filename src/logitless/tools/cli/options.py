"""Options that several commands have, exit codes, and where files go that no option names."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from logitless.errors import LogitlessError

NO, BAD_INPUT, BROKEN = 1, 2, 3
"""Exit codes: the answer is no; wrong usage or input; anything else."""

Names = Annotated[list[str] | None, typer.Option(help="Name or shell pattern; may be repeated.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Peers = Annotated[Path | None, typer.Option(help="Folder of unpacked packages to import peers from.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")]

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def full_dtype(name: str) -> str:
    """``"bf16"`` becomes ``"bfloat16"``; a name that is no short one stays as it is."""
    return SHORT_DTYPES.get(name.lower(), name)


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise LogitlessError("figures need matplotlib. Install it with pip install 'logitless[bench]'.")
