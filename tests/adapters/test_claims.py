"""What our pages say of other projects: it is on the page, and it is what the newest source says (claims.toml)."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hosts import FOLDER, checkout

HERE = Path(__file__).parent
PAGES = HERE.parents[1] / "docs" / "adapters"
CLAIMS: list[dict[str, Any]] = tomllib.loads((HERE / "claims.toml").read_text(encoding="utf-8"))["claim"]
SECTIONS = re.compile(
    r"^## (What differs|Without a pass for old log-probs)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL
)
NAMES = {
    **{"areal": "AReaL", "megatron": "Megatron", "ms_swift": "ms-swift", "nemo_rl": "NeMo-RL", "openrlhf": "OpenRLHF"},
    **{"prime_rl": "prime-rl", "skyrl": "SkyRL", "trl": "TRL"},
}
"""What a page calls its host, where that is not the name of the adapter."""


def plain(text: str) -> str:
    return " ".join(text.split())


def page(host: str) -> str:
    return (PAGES / f"{host}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda x: f"{x['host']}: {x['says'][:40]}")
def test_a_claim_is_on_its_page_and_held(claim):
    assert plain(claim["says"]) in plain(page(claim["host"]))
    if "test" in claim:
        file, name = claim["test"].split("::")
        assert f"def {name}(" in (HERE / file).read_text(encoding="utf-8")
        return
    source = find(claim["host"], claim.get("on"), claim["file"]).read_text(encoding="utf-8")
    assert [text for text in claim["has"] if text not in source] == []
    assert [text for text in claim.get("lacks", ()) if text in source] == []


def find(host: str, on: str | None, file: str) -> Path:
    """The file in the newest checkout, or in the release that the claim names, or in what is installed."""
    if on == "installed":
        spec = importlib.util.find_spec(file.split("/")[0])
        there = (spec.submodule_search_locations or ()) if spec is not None else ()
        places = [FOLDER, *(Path(x).parent for x in there)]
    else:
        folder = checkout(host)
        folder = folder.parent / f"{host}-{on}" if folder is not None and on is not None else folder
        if folder is None or not folder.is_dir():
            pytest.skip(f"no checkout of {host} {on or ''}")
        places = [folder, folder / "src"]
    return next((place / file for place in places if (place / file).is_file()), places[0] / file)


@pytest.mark.parametrize("path", sorted(PAGES.glob("*.md")), ids=lambda x: x.stem)
def test_every_sentence_on_what_a_host_does_has_a_claim(path):
    """Of the sections that speak of it: a sentence whose subject is the host."""
    name = NAMES.get(path.stem, path.stem)
    held = [plain(claim["says"]) for claim in CLAIMS if claim["host"] == path.stem]
    for _, text in SECTIONS.findall(path.read_text(encoding="utf-8")):
        for block in re.split(r"\n\n|\n(?=\* )", text):
            body = plain(block)
            if re.search(rf"(^|[.;:] |\* ){re.escape(name)}( \d[\d.]*\d| main)? [a-z]+s\b", body):
                assert any(says in body for says in held), f"{path.name} has no claim for: {body[:300]}"
