"""Our docstrings as Markdown, for the API reference: a Griffe extension that ``mkdocs.yml`` names.

Docstrings are written to be read in the source: doctests stand bare, references are Sphinx roles, a list of arguments
that share a text may take two lines. Markdown would make nested quotations of the first and print the second, and
Griffe would lose the third.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod):`~?([\w.]+)`")
SHARED = re.compile(r"^( {4}\w+(?:, \w+)*,)\n +(?=\w+(?:, \w+)*:)", re.MULTILINE)
DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1(?!\s*$).+)*", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites every docstring once, before it is parsed."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None and not obj.is_alias:
            obj.docstring.value = to_markdown(obj.docstring.value)

    def on_class_members(self, *, cls: Any, **_: Any) -> None:
        """A tensor's subclass is made by ``__new__``, whose arguments those are that a reader looks for."""
        made, init = cls.members.get("__new__"), cls.members.get("__init__")
        if made is not None and init is not None:
            init.parameters, init.docstring = made.parameters, None


def to_markdown(text: str) -> str:
    """Doctests fenced, roles as code, names of arguments on one line."""
    return ROLE.sub(r"`\1`", SHARED.sub(r"\1 ", DOCTEST.sub(_fence, text)))


def _fence(found: re.Match[str]) -> str:
    indent = found[1]
    return f"{indent}```pycon\n{found[0]}\n{indent}```"
