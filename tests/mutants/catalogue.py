"""The seeded bugs: small changes to the source that users would suffer from, each with the tests that must notice.

They are kept as data in ``entries/*.toml``, one file per part of the package:

    [[mutant]]
    name = "counted-without-ignored"        unique, for --only
    file = "rows/rows.py"                   under src/logitless, or "benchmarks/..."
    old = "scored & self.mask"              exactly as it stands there; ``count`` times, once unless told
    new = "self.mask"
    tests = ["tests/rows/test_rows.py::test_counted_and_totals"]
    suffers = "What a user would see."
"""

from __future__ import annotations

import ast
import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCE = ROOT / "src"
FIELDS = {"name", "file", "old", "new", "tests", "suffers", "count"}


class Stale(ValueError):
    """An entry that does not fit the source or the tests any more."""


@dataclass(frozen=True)
class Mutant:
    """One seeded bug; the fields are those of the catalogue."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    suffers: str
    count: int = 1

    @property
    def path(self) -> Path:
        """Of the changed file, relative to the folder that is searched for packages."""
        return Path(self.file) if self.file.startswith("benchmarks/") else Path("logitless") / self.file

    def apply(self) -> str:
        """The changed text of the file.

        Raises:
            Stale: the old text does not occur as often as the entry says, or the change is none.
        """
        path = (ROOT if self.file.startswith("benchmarks/") else SOURCE) / self.path
        if not path.is_file():
            raise Stale(f"{self.name}: there is no file {self.path}.")
        text = path.read_text(encoding="utf-8")
        found = text.count(self.old)
        if found != self.count:
            raise Stale(f"{self.name}: the old text occurs {found} times in {self.path}, not {self.count}.")
        changed = text.replace(self.old, self.new)
        if changed == text:
            raise Stale(f"{self.name}: the new text is the old text.")
        return changed

    def check(self) -> None:
        """Raise :class:`Stale` unless the change applies, still is Python, and its tests exist."""
        changed = self.apply()
        try:
            ast.parse(changed)
        except SyntaxError as error:
            raise Stale(f"{self.name}: the changed {self.path} is not Python: {error}.") from None
        if not self.tests:
            raise Stale(f"{self.name}: it names no tests.")
        for test in self.tests:
            file, *names = test.split("::")
            path = ROOT / file
            if not path.is_file() or (names and names[-1].partition("[")[0] not in _functions(path)):
                raise Stale(f"{self.name}: there is no test {test}.")


def load(folder: Path = HERE / "entries") -> list[Mutant]:
    """All entries, file by file."""
    mutants = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
            if not entry.keys() <= FIELDS or not FIELDS - {"count"} <= entry.keys():
                raise Stale(f"{path.name}: an entry has the fields {sorted(entry)}, wanted {sorted(FIELDS)}.")
            mutants.append(Mutant(**{**entry, "tests": tuple(entry["tests"])}))
    return mutants


@functools.cache
def _functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
