"""The metadata that a built package has beyond pyproject.toml: its addresses, and a README whose links work anywhere.

Links of README.md are relative, so that they work in a checkout and in a fork. On a package page they would lead
nowhere; there each leads to the file in the repository, as it was in that version. In a checkout one installs
``.``, and where the package can be had by its name, that name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"""(?P<before>\]\(|(?:src|srcset|href)=")(?P<path>[^)\s"#]+)(?P<after>[^)\s"]*)""")
INSTALL = re.compile(r"""pip install (?P<quote>"?)\.(?P<extra>\[[\w,]+\])?(?P=quote)""")
ABSOLUTE = re.compile(r"[a-z]+:")
IMAGES = (".png", ".svg")


class Metadata(MetadataHookInterface):
    """Fills ``urls`` and ``readme``; the repository's address is the hook's one setting."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = self.config["repository"]
        metadata["urls"] = {
            "Repository": repository,
            "Documentation": f"{repository}/tree/main/docs",
            "Changelog": f"{repository}/blob/main/CHANGELOG.md",
            "Issues": f"{repository}/issues",
        }
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = with_name(text)
        text = with_absolute_links(text, repository, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_name(text: str) -> str:
    """The text with ``pip install .`` of a checkout turned into ``pip install logitless``, extras included."""
    return INSTALL.sub(lambda found: f"pip install {found[1]}logitless{found['extra'] or ''}{found[1]}", text)


def with_absolute_links(text: str, repository: str, tag: str) -> str:
    """The text with every relative link turned into one to the repository at a tag; images to the file itself."""

    def absolute(found: re.Match[str]) -> str:
        path = found["path"]
        if ABSOLUTE.match(path):
            return found[0]
        kind = "raw" if path.endswith(IMAGES) else "blob"
        return f"{found['before']}{repository}/{kind}/{tag}/{path}{found['after']}"

    return LINK.sub(absolute, text)
