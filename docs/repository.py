"""The site's link to the repository, whose address pyproject.toml has: a hook that ``mkdocs.yml`` names."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """With the repository's address, and its last two parts as the link's text."""
    pyproject = tomllib.loads((Path(config.config_file_path).parent / "pyproject.toml").read_text(encoding="utf-8"))
    config.repo_url = pyproject["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    config.repo_name = "/".join(config.repo_url.rsplit("/", 2)[1:])
    return config
