"""Lines of the core that each test runs: ``python tests/mutants/lines.py`` traces the suite once and keeps the answer.

    test  --settrace-->  {(file, line)}      in this process, its threads, and the ranks that :mod:`ranks` starts

The answer is a hint about which tests to run on a change of a line, never a verdict. It lies under ``out``, is not
committed, and holds for files that are as they were; of a file that has changed since, it is known by function.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import operator
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "logitless"
CACHE = ROOT / "out" / "lines.json"
# Parts whose bugs are found elsewhere: kernels by the interpreter and the GPU, adapters and commands on hosts.
LEFT_OUT = ("adapters/", "tools/cli/", "backends/triton/")
# Tests of hosts, pages and benchmarks are slow, and not there for the core.
TESTS = ("tests", "src")
NO_TESTS = ("adapters", "bench", "documents", "fuzz", "mutants", "shared", "smoke")
NO_FILES = (
    "test_demo",
    "test_sweep_command",
    "test_sanitize",
    "test_cuda",
    "test_cuda_trust",
    "test_fuzz",
    "test_walk",
)
# Ranks that die take their group's timeout each.
SLOW = "not ranks_die"


def core(package: Path = PACKAGE) -> list[str]:
    """The files of the core, relative to the package."""
    files = (str(path.relative_to(package)) for path in sorted(package.rglob("*.py")))
    return [file for file in files if not file.startswith(LEFT_OUT)]


def arguments(chosen: list[str]) -> list[str]:
    """What pytest is told to collect: what is chosen, or the tests of the core."""
    ignored = [f"--ignore={ROOT / 'tests' / name}" for name in NO_TESTS]
    ignored += [f"--ignore={ROOT / 'tests' / name}.py" for name in NO_FILES]
    return [*(chosen or (str(ROOT / name) for name in TESTS)), *ignored, f"--ignore={PACKAGE / 'adapters'}"]


def functions(text: str) -> dict[str, tuple[int, int]]:
    """First and last line of every function of a file, by its qualified name."""
    found: dict[str, tuple[int, int]] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}".lstrip(".")
                if isinstance(child, ast.FunctionDef):
                    found[name] = (child.lineno, child.end_lineno or child.lineno)
            walk(child, name)

    walk(ast.parse(text), "")
    return found


@dataclass
class Lines:
    """Which tests ran which line.

    Attributes:
        tests: their ids and seconds.
        ran: by file and line, a number whose bit i says that test i ran it.
        digests: of the files when the tests were traced.
        spans: by file, the functions of then with their first and last line.
    """

    tests: list[tuple[str, float]] = field(default_factory=list)
    ran: dict[str, dict[int, int]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    spans: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)

    def bits(self, file: str, line: int, function: str) -> int:
        """Of the tests that ran a line; of a file that has changed, of those that ran the function."""
        ran = self.ran.get(file, {})
        if self.digests.get(file) == _digest_of(PACKAGE / file):
            return ran.get(line, 0)
        first, last = self.spans.get(file, {}).get(function, (0, 0))
        return functools.reduce(operator.or_, (ran.get(number, 0) for number in range(first + 1, last + 1)), 0)

    def of(self, file: str, line: int, function: str) -> list[tuple[str, float]]:
        """Tests that ran a line, with their seconds."""
        bits = self.bits(file, line, function)
        return [test for place, test in enumerate(self.tests) if bits >> place & 1]

    def save(self, path: Path = CACHE) -> None:
        path.parent.mkdir(exist_ok=True)
        ran = {file: {line: hex(bits) for line, bits in lines.items()} for file, lines in self.ran.items()}
        text = json.dumps({"tests": self.tests, "ran": ran, "digests": self.digests, "spans": self.spans})
        path.write_text(text, encoding="utf-8")


def load(path: Path = CACHE) -> Lines:
    """What was kept."""
    data = json.loads(path.read_text(encoding="utf-8"))
    ran = {file: {int(line): int(bits, 16) for line, bits in lines.items()} for file, lines in data["ran"].items()}
    tests = [(test, seconds) for test, seconds in data["tests"]]
    return Lines(tests, ran, data["digests"], data["spans"])


@functools.cache
def _digest_of(path: Path) -> str:
    return digest(path.read_text(encoding="utf-8"))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def traced(package: str) -> Iterator[set[tuple[str, int]]]:
    """The set that the lines of the package's files are added to as they run."""
    hits: set[tuple[str, int]] = set()
    # Kernels run line by line in the interpreter, and would take a hundred times as long.
    left_out = tuple(package + part for part in LEFT_OUT)

    def enter(frame, event, _):
        name = frame.f_code.co_filename
        return line if name.startswith(package) and not name.startswith(left_out) else None

    def line(frame, event, _):
        if event == "line":
            hits.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    threading.settrace(enter)
    sys.settrace(enter)
    try:
        yield hits
    finally:
        sys.settrace(None)
        threading.settrace(None)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class TracedRank:
    """A function that ranks run, and that leaves the lines it ran in a folder."""

    function: Callable
    folder: str
    package: str

    def __call__(self, *args: Any, **options: Any) -> Any:
        with traced(self.package) as hits:
            try:
                return self.function(*args, **options)
            finally:
                handle, _ = tempfile.mkstemp(dir=self.folder, suffix=".json")
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump(sorted(hits), file)


class Collector:
    """The pytest plugin that traces every test."""

    def __init__(self, package: Path) -> None:
        self.package = str(package) + os.sep
        self.folder = tempfile.mkdtemp(prefix="lines-")
        self.lines = Lines()
        self.failed: set[str] = set()
        self.sets: dict[tuple[str, int], int] = defaultdict(int)
        for file in core(package):
            text = (package / file).read_text(encoding="utf-8")
            self.lines.digests[file], self.lines.spans[file] = digest(text), functions(text)

    def pytest_collection(self) -> None:
        import ranks

        run = ranks.run_ranks

        def traced_ranks(function: Callable, world: int, *args: Any, **options: Any) -> list[Any]:
            return run(TracedRank(function, self.folder, self.package), world, *args, **options)

        ranks.run_ranks = traced_ranks

    def pytest_runtest_logreport(self, report) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_runtest_protocol(self, item, nextitem) -> bool:
        from _pytest.runner import runtestprotocol

        began = time.perf_counter()
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        with traced(self.package) as hits:
            runtestprotocol(item, nextitem=nextitem)
        seconds = time.perf_counter() - began
        for file in Path(self.folder).glob("*.json"):
            hits.update((name, line) for name, line in json.loads(file.read_text(encoding="utf-8")))
            file.unlink()
        if item.nodeid not in self.failed:
            bit = 1 << len(self.lines.tests)
            self.lines.tests.append((item.nodeid, round(seconds, 3)))
            for hit in hits:
                self.sets[hit] |= bit

        if len(self.lines.tests) % 200 == 0:
            self.pytest_sessionfinish()
        return True

    def pytest_sessionfinish(self) -> None:
        """Keep what is known so far."""
        for (name, line), bits in self.sets.items():
            file = name.removeprefix(self.package)
            if file in self.lines.digests:
                self.lines.ran.setdefault(file, {})[line] = bits
        self.lines.save()


def collect() -> int:
    """Trace the suite once; about twice as long as it takes by itself, in one process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import pytest

    sys.path.insert(0, str(ROOT / "src"))
    options = [
        "-q",
        "--tb=line",
        "-k",
        SLOW,
        "-p",
        "no:cacheprovider",
        "-o",
        f"pythonpath={ROOT / 'src'} {ROOT} {ROOT / 'tests'}",
    ]
    return int(pytest.main([*options, *arguments(sys.argv[1:])], plugins=[Collector(PACKAGE)]))


if __name__ == "__main__":
    # Under a name that ranks can import.
    sys.path.insert(0, str(Path(__file__).parent))
    import lines

    sys.exit(lines.collect())
