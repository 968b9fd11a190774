"""Options that several commands have, and exit codes."""

from __future__ import annotations

from typing import Annotated

import typer

NO, BAD_INPUT, BROKEN = 1, 2, 3
"""Exit codes: the answer is no; wrong usage or input; anything else."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")]

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def full_dtype(name: str) -> str:
    """``"bf16"`` becomes ``"bfloat16"``; a name that is no short one stays as it is."""
    return SHORT_DTYPES.get(name.lower(), name)
