"""What our pages say of other projects: it is on the page, and it is what the newest source says (claims.toml)."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hosts import FOLDER, checkout
from matrix import files

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ADAPTERS = ROOT / "docs" / "adapters"
OTHERS = {
    "README": ROOT / "README.md",
    "drafts": ROOT / "docs" / "drafts.md",
    "index": ADAPTERS / "index.md",
    "maintainers": ROOT / "docs" / "maintainers.md",
}
"""Pages that speak of every host."""

CLAIMS: list[dict[str, Any]] = tomllib.loads((HERE / "claims.toml").read_text(encoding="utf-8"))["claim"]
HEADINGS = (
    "What differs",
    "Skip the forward pass for old log-probs",
    "Known limits",
    "Distillation",
    "What does not change",
)
"""Sections of an adapter's page that speak of what its host does."""

SECTIONS = re.compile(rf"^## ({'|'.join(HEADINGS)})\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
NAMES = {
    **{"areal": "AReaL", "deepspeed": "DeepSpeed", "megatron": "Megatron", "ms_swift": "ms-swift"},
    **{"nemo_rl": "NeMo-RL", "openrlhf": "OpenRLHF", "prime_rl": "prime-rl", "skyrl": "SkyRL"},
    **{"specforge": "SpecForge", "transformers": "Transformers", "trl": "TRL"},
}
"""What a page calls its host, where that is not the name of the adapter."""


def plain(text: str) -> str:
    return " ".join(text.split())


def page(claim: dict[str, Any]) -> str:
    path = OTHERS[claim["page"]] if "page" in claim else ADAPTERS / f"{claim['host']}.md"
    return path.read_text(encoding="utf-8")


def run_by_make_hosts(host: str) -> set[str]:
    """The files whose tests of a host ``make hosts`` runs, on each of its checkouts or on the newest."""
    there = {path.name for path in files(host)}
    held = re.search(r"^HELD := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert held is not None
    return there | {f"{name.rpartition('/')[2]}.py" for name in held[1].split()}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda x: f"{x['host']}: {x['says'][:40]}")
def test_a_claim_is_on_its_page_and_held(claim):
    assert plain(claim["says"]) in plain(page(claim))
    if "test" in claim:
        file, name = claim["test"].split("::")
        assert f"\ndef {name}(" in (HERE / file).resolve().read_text(encoding="utf-8")
        assert Path(file).name in run_by_make_hosts(claim["host"]), f"`make hosts` does not run {file}"
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


def sentences(text: str, name: str) -> list[str]:
    """The paragraphs, points and lines of tables in which the host of that name is what does something."""
    prose = re.sub(r"```.*?```|<!-- table.*?<!-- end of table -->|<!--.*?-->", "", text, flags=re.DOTALL)
    blocks = [plain(block) for block in re.split(r"\n\n|\n(?=\* |\|)", prose)]
    says = re.compile(rf"(^|[.;:,|] |\* |, which ){re.escape(name)}('s own [a-z-]+)?( \d[\d.]*\d| main)? [a-z]+s\b")
    return [block for block in blocks if says.search(block)]


def without_a_claim(text: str, name: str, host: str) -> list[str]:
    held = [plain(claim["says"]) for claim in CLAIMS if claim["host"] == host]
    return [block[:300] for block in sentences(text, name) if not any(says in block for says in held)]


PAGES = sorted({path.stem for path in ADAPTERS.glob("*.md")} - set(OTHERS))


@pytest.mark.parametrize("host", PAGES)
def test_every_sentence_on_what_a_host_does_has_a_claim(host):
    """Of the sections that speak of it: a sentence whose subject is the host."""
    text = (ADAPTERS / f"{host}.md").read_text(encoding="utf-8")
    name = NAMES.get(host, host)
    assert [x for _, part in SECTIONS.findall(text) for x in without_a_claim(part, name, host)] == []


@pytest.mark.parametrize("name", OTHERS)
def test_pages_on_every_host_have_claims_too(name):
    text = OTHERS[name].read_text(encoding="utf-8")
    hosts = {host: NAMES.get(host, host) for host in (*PAGES, "vime")}
    assert [x for host, called in hosts.items() for x in without_a_claim(text, called, host)] == []


def test_a_sentence_is_found():
    text = (
        "* Rows count.\n* TRL 1.16.0 rounds them; ours\n  does not.\n\nAs in TRL.\n\n| a | TRL scores all |\n\nTRLs do."
    )
    assert sentences(text, "TRL") == ["* TRL 1.16.0 rounds them; ours does not.", "| a | TRL scores all |"]
    assert without_a_claim("NeMo-RL divides the moon.", "NeMo-RL", "nemo_rl") == ["NeMo-RL divides the moon."]
