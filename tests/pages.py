"""Snippets of the documents, for tests that run them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import CodeType

SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)

ON_RANKS = ("docs/how-to/wrappers.md",)
"""Pages whose snippets run on several ranks, in tests of their own."""


def snippets(path: Path) -> list[tuple[int, str]]:
    """Line of the first statement and text of every Python snippet of a file."""
    text = path.read_text()
    return [(text[: found.start(1)].count("\n"), found[1]) for found in SNIPPET.finditer(text)]


def compiled(path: Path) -> list[CodeType]:
    """Every snippet, with the line numbers of the file in a traceback."""
    return [compile(ast.increment_lineno(ast.parse(code), line), str(path), "exec") for line, code in snippets(path)]
