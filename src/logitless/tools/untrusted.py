"""Files that others made: model directories and their configs. Read as data, never run, and only where they lie.

Weights are read from safetensors alone: other formats are pickles, which run code when they are read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from logitless.errors import LogitlessError
from logitless.spec import format_bytes

LARGEST_JSON = 64 << 20
"""Bytes of a JSON file that is read at all: the index of the largest model has a few."""

INDEX = "model.safetensors.index.json"


def read_object(caller: str, path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    size = path.stat().st_size
    if size > LARGEST_JSON:
        raise LogitlessError(
            f"{caller}: {path} has {format_bytes(size)}, and a config of more than {format_bytes(LARGEST_JSON)} is "
            f"not read. Is it another file?"
        )
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise LogitlessError(f"{caller}: {path} is not JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise LogitlessError(f"{caller}: {path} must hold a JSON object but holds {type(fields).__name__}.")
    return fields


def check_weights(caller: str, folder: Path) -> None:
    """Raise unless the weights in the folder are safetensors files that lie in it."""
    if not any(folder.glob("*.safetensors")):
        raise LogitlessError(
            f"{caller}: {folder} has no .safetensors file. Other formats (.bin, .pt) are pickles, which run code when "
            f"they are read. Convert them where you trust them: model.save_pretrained({folder.name!r})."
        )
    if not (folder / INDEX).is_file():
        return
    names = read_object(caller, folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise LogitlessError(f"{caller}: {folder / INDEX} has no weight_map that names its files.")
    for name in sorted({str(name) for name in names.values()}):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise LogitlessError(f"{caller}: {folder / INDEX} names {name!r}, which is no .safetensors file beside it.")
        if not (folder / name).is_file():
            raise LogitlessError(f"{caller}: {folder / INDEX} names {name}, which is not there. Was the copy cut off?")
