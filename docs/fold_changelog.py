"""Before a release: what CHANGELOG.md has under "Unreleased" goes into the section of the version, with today's date.

``make changelog`` runs it. A version that has no section gets one; one that was prepared and not yet released takes the
new entries above its own, heading by heading.
"""

from __future__ import annotations

import datetime
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed")


def entries(section: str) -> dict[str, str]:
    """The text below each ``###`` of a section, without empty lines around; before the first it is ``""``."""
    parts = re.split(r"^### (.+)$", section, flags=re.MULTILINE)
    return {"": parts[0].strip(), **{kind: text.strip() for kind, text in zip(parts[1::2], parts[2::2], strict=True)}}


def folded(text: str, version: str, date: str) -> str:
    """The changelog with an empty "Unreleased" and all of it under the version."""
    opening, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    found = {title: body for title, _, body in (section.partition("\n") for section in sections)}
    unknown = set(new := entries(found.pop("Unreleased"))) - {"", *KINDS}
    assert not unknown, f"headings that a changelog does not have: {sorted(unknown)}"
    title = next((title for title in found if title.split(" ")[0] == version), None)
    old = entries(found.pop(title)) if title else {"": ""}
    # Entries with a paragraph of their own ("Adapters:") are of what was there before.
    both = {kind: "\n\n".join(filter(None, (new.get(kind), old.get(kind)))) for kind in KINDS}
    body = [old[""], *(f"### {kind}\n\n{text}" for kind, text in both.items() if text)]
    parts = [opening.rstrip(), "## Unreleased", f"## {version} - {date}", *filter(None, body)]
    parts += [f"## {title}\n{body.rstrip()}" for title, body in found.items()]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    changelog = ROOT / "CHANGELOG.md"
    source = (ROOT / "src" / "logitless" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    today = datetime.date.today().isoformat()
    changelog.write_text(folded(changelog.read_text(encoding="utf-8"), version, today), encoding="utf-8")
