"""The site's links to the repository, whose address pyproject.toml has, and how its search weighs pages: the hooks that
``mkdocs.yml`` names."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """With the repository's address, its last two parts as the link's text, and where a page is edited."""
    pyproject = tomllib.loads((Path(config.config_file_path).parent / "pyproject.toml").read_text(encoding="utf-8"))
    config.repo_url = pyproject["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    config.repo_name = "/".join(config.repo_url.rsplit("/", 2)[1:])
    config.edit_uri = "edit/main/docs/"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Decisions come last in a search: they are records, and users need none of them."""
    if page.file.src_uri.startswith("decisions/"):
        page.meta.setdefault("search", {"boost": 0.2})
    return markdown
