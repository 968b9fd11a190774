"""Random changes of the core, each tried on the tests that run its line: ``make mutants``, or to go on with the record

    python tests/mutants/sample.py --json benchmarks/results/mutation-sample.jsonl

    all tests collected, nothing run  --fork-->  code of the changed functions swapped  -->  tests until one fails

A fork has torch, the package and the tests imported already, so a change that is caught takes about a second. Ranks
and commands that tests start import the package anew, from a copy that holds the change. What survives is either a gap
in the tests or no change at all: the latter are listed with their reasons in ``equivalent.toml``.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from lines import CACHE, PACKAGE, ROOT, SLOW, Lines, arguments, core, digest, load
from operators import Change, changes

EQUIVALENT = Path(__file__).with_name("equivalent.toml")
GIB = 1 << 30
ALONE = "test_alone.py"
"""The file of tests of rules that whole calls hide."""
COUNT = 500
"""Changes that are tried, where a record does not hold more."""
SEVERAL = 6
"""Times the budget, for those that survived."""
UNFIT, FAILED, LOST = 71, 72, 70
"""Exit codes of a fork: the change cannot be put in, a test failed, the fork itself did."""


@dataclass(frozen=True)
class Tried:
    """One change and what became of it.

    Attributes:
        verdict: "killed", "survived" or "equivalent".
        how: the test that failed, how the tests ended, or the reason.
    """

    file: str
    function: str
    line: int
    operator: str
    old: str
    new: str
    nth: int
    verdict: str
    how: str
    seconds: float

    @property
    def key(self) -> tuple[str | int, ...]:
        return self.file, self.function, self.operator, self.old, self.new, self.nth


def described(change: Change, verdict: str = "", how: str = "", seconds: float = 0.0) -> Tried:
    """A change in the words of the record; its line is for people, as lines move."""
    old = change.old(_text(PACKAGE / change.file))
    where = (change.file, change.function, change.line, change.operator)
    return Tried(*where, old, " ".join(change.new.split()), change.nth, verdict, how, round(seconds, 1))


@functools.cache
def key_of(change: Change) -> tuple[str | int, ...]:
    """By which a change is found again when its line has moved."""
    return described(change).key


@functools.cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def equivalents(path: Path = EQUIVALENT) -> dict[tuple[str | int, ...], str]:
    """Reasons of the changes that change no result, by their keys."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("equivalent", [])
    names = ("file", "function", "operator", "old", "new")
    return {(*(entry[name] for name in names), entry.get("nth", 1)): entry["reason"] for entry in entries}


# Putting a change into a process in which the package is imported already.


def places(code: CodeType, path: tuple = ()) -> dict[tuple, CodeType]:
    """Every code object of a module, by the names on the way to it."""
    found, seen = {path: code}, Counter()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            seen[constant.co_name] += 1
            found |= places(constant, (*path, (constant.co_name, seen[constant.co_name])))
    return found


def living() -> tuple[dict[str, list[FunctionType]], list]:
    """All functions of the package by file, and the caches around some of them."""
    found, caches = defaultdict(list), []
    for thing in gc.get_objects():
        # Not isinstance, which asks things that warn for their class.
        if type(thing) is FunctionType:
            if thing.__code__.co_filename.startswith(str(PACKAGE)):
                found[thing.__code__.co_filename].append(thing)
        elif type(thing).__name__ == "_lru_cache_wrapper" and (thing.__module__ or "").startswith("logitless"):
            caches.append(thing)
    return found, caches


def put_in(change: Change, functions: list[FunctionType]) -> bool:
    """Swap the code of a file's functions; whether any was swapped.

    Raises:
        ValueError: a closure has other variables after the change.
    """
    path = PACKAGE / change.file
    text = path.read_text(encoding="utf-8")
    before = places(compile(text, str(path), "exec", dont_inherit=True))
    after = places(compile(change.apply(text), str(path), "exec", dont_inherit=True))
    where = {code: place for place, code in before.items()}
    swapped = False
    for function in functions:
        place = where.get(function.__code__)
        if place in after and after[place] != function.__code__:
            function.__code__ = after[place]
            swapped = True
    return swapped


class Sampler:
    """The pytest plugin that, instead of running the tests that were collected, tries changes on them."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.tried: list[Tried] = []
        self.folder = Path(tempfile.mkdtemp(prefix="sample-"))
        self.trusted: set[str] = set()

    def pytest_runtest_logreport(self, report) -> None:
        """Only in a fork, where tests run."""
        if report.failed:
            (self.folder / "failed").write_text(report.nodeid, encoding="utf-8")
            sys.stdout.flush()
            os._exit(FAILED)

    def pytest_runtestloop(self, session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        # On tests that are named, nothing has to be known of lines; but they may import what is changed when they run.
        self.lines: Lines = Lines() if self.asked.tests else load()
        for tried in self.earlier().values() if self.asked.tests else ():
            if tried.verdict == "survived":
                importlib.import_module(f"logitless.{tried.file.removesuffix('.py').replace('/', '.')}")
        self.functions, self.caches = living()
        shutil.copytree(PACKAGE, self.folder / "logitless", ignore=shutil.ignore_patterns("__pycache__"))
        gc.collect()
        gc.freeze()
        try:
            self.try_all()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        return True

    def try_all(self) -> None:
        """Changes in the order of the seed until the count or the time is reached."""
        began, known, reasons = time.monotonic(), self.earlier(), equivalents()
        retry = {key for key, tried in known.items() if tried.verdict == "survived"} if self.asked.survivors else set()
        count = max(COUNT, len(known)) if self.asked.count is None else self.asked.count
        # A record is gone on with: what it holds comes first.
        for change in sorted(self.drawn(), key=lambda change: key_of(change) not in known):
            late = self.asked.seconds is not None and time.monotonic() - began > self.asked.seconds
            if late or len(self.tried) >= count:
                break
            key = key_of(change)
            if key in reasons:
                self.note(described(change, "equivalent", reasons[key]))
            elif key in known and key not in retry:
                tried = known[key]
                if tried.verdict == "survived" or "::" not in tried.how or self.asked.tests or self.trusts(tried.how):
                    self.tried.append(tried)
            elif not self.asked.survivors or key in retry:
                end = self.judged(change, everything=key in retry)
                if end is not None:
                    self.note(end)
                elif self.asked.tests:
                    # None of these tests imports its file.
                    self.tried.append(known[key])

    def drawn(self) -> list[Change]:
        """All changes of lines that some test runs, in an order that the seed and their own texts decide. Where tests
        were named, those of the record: lines were traced when it was drawn."""
        sites = [change for file in core() for change in changes(file, (PACKAGE / file).read_text(encoding="utf-8"))]
        facts = self.facts()
        self.seed = facts.get("seed", 0) if self.asked.seed is None else self.asked.seed
        if self.asked.tests:
            known = self.earlier()
            reached = [change for change in sites if key_of(change) in known]
            self.sites, self.reached = facts["sites"], facts["reached"]
        else:
            reached = [change for change in sites if self.lines.bits(change.file, change.line, change.function)]
            print(f"{len(sites)} changes, {len(reached)} of them on lines that tests run", flush=True)
            self.sites, self.reached = len(sites), len(reached)
        return sorted(reached, key=lambda change: digest(f"{self.seed} {key_of(change)}"))

    def tests(self, change: Change, everything: bool) -> list[tuple[str, float]]:
        """The tests to run: of every file its quickest first, those of the same part before others, ranks last. Where
        some were named, all of them."""
        part = change.file.split("/")[0].removesuffix(".py")
        if self.asked.tests:
            order = sorted(self.items, key=lambda test: (self.starts_ranks(test), f"/{part}/" not in test))
            return [(test, 1.0) for test in order]
        candidates = self.lines.of(change.file, change.line, change.function)
        files: dict[str, list[tuple[str, float]]] = defaultdict(list)
        for test, seconds in sorted(candidates, key=lambda pair: pair[1]):
            if test in self.items:
                files[test.split("::")[0]].append((test, seconds))
        order = []
        for file, own in files.items():
            for place, (test, seconds) in enumerate(own):
                order.append((self.starts_ranks(test), place, f"/{part}/" not in file, seconds, test))
        chosen, total = [], 0.0
        for slow, _, _, seconds, test in sorted(order):
            cost = seconds + 2.0 * slow
            if not chosen or total + cost <= self.asked.budget * (SEVERAL if everything else 1):
                total += cost
                chosen.append((test, seconds))
        if everything:
            # Written since the lines were traced: of the same part, or about rules alone.
            traced = {test for test, _ in self.lines.tests}
            since = (test for test in self.items if test not in traced and not self.starts_ranks(test))
            chosen = [(test, 1.0) for test in since if f"/{part}/" in test or ALONE in test] + chosen
        return chosen

    def starts_ranks(self, test: str) -> bool:
        item = self.items[test]
        return "ranks" in getattr(item, "fixturenames", ()) or hasattr(getattr(item, "module", None), "run_ranks")

    def judged(self, change: Change, everything: bool) -> Tried | None:
        """What the tests say; None where the change cannot be put in. A test that fails without it has no say."""
        while True:
            end = self.trial(change, self.tests(change, everything))
            if end is None or end.how not in self.items or self.trusts(end.how):
                return end
            del self.items[end.how]

    def trusts(self, test: str) -> bool:
        """Whether a test passes in a fork into which nothing was put."""
        if test in self.items and test not in self.trusted:
            (self.folder / "failed").unlink(missing_ok=True)
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                self.run_in_fork(None, [test], limit=300)
            if self.wait(pid, time.monotonic() + 600) == 0:
                self.trusted.add(test)
        return test in self.trusted

    def trial(self, change: Change, tests: list[tuple[str, float]]) -> Tried | None:
        """What these tests say."""
        path = self.folder / "logitless" / change.file
        text = path.read_text(encoding="utf-8")
        changed = change.apply(text)
        try:
            compile(changed, "changed", "exec")
        except SyntaxError:
            return None
        path.write_text(changed, encoding="utf-8")
        (self.folder / "failed").unlink(missing_ok=True)
        began, expected = time.monotonic(), sum(seconds for _, seconds in tests)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            self.run_in_fork(change, [test for test, _ in tests], limit=int(30 + 5 * expected))
        code = self.wait(pid, began + 120 + 30 * expected)
        path.write_text(text, encoding="utf-8")
        seconds = time.monotonic() - began
        if code == UNFIT or not tests:
            return None
        if code == LOST:
            raise RuntimeError(f"{described(change)}: {(self.folder / 'log').read_text(errors='replace')[-2000:]}")
        if code == 0:
            return described(change, "survived", f"{len(tests)} tests passed", seconds)
        how = f"killed by {signal.Signals(-code).name}" if code and code < 0 else "hung"
        if code == FAILED:
            how = (self.folder / "failed").read_text(encoding="utf-8")
        return described(change, "killed", how, seconds)

    def run_in_fork(self, change: Change | None, tests: list[str], limit: int) -> None:
        """Never returns."""
        code = LOST
        try:
            os.setsid()
            log = os.open(self.folder / "log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(log, stream)
            # A loop that does not end, and a size that no machine has.
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            resource.setrlimit(resource.RLIMIT_DATA, (8 * GIB, 8 * GIB))
            # For ranks and commands.
            os.environ["PYTHONPATH"], os.environ["PYTHONDONTWRITEBYTECODE"] = str(self.folder), "1"
            for cache in self.caches:
                cache.cache_clear()
            try:
                fits = change is None or put_in(change, self.functions[str(PACKAGE / change.file)])
            except ValueError:
                fits = False
            code = self.run(tests) if fits else UNFIT
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def run(self, tests: list[str]) -> int:
        """Every test until one fails, which ends the process. By the hook, through which a test's own filters of
        warnings are set: without them it fails by a warning that it expects."""
        items = [self.items[test] for test in tests]
        for place, item in enumerate(items, 1):
            following = items[place] if place < len(items) else None
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        return 0

    def wait(self, pid: int, deadline: float) -> int | None:
        """The fork's exit code, or None if it was late; nothing that it started outlives it."""
        pause = 0.01
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended and time.monotonic() < deadline:
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
                continue
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            if not ended:
                os.waitpid(pid, 0)
                return None
            return os.waitstatus_to_exitcode(status)

    def earlier(self) -> dict[tuple[str | int, ...], Tried]:
        """Verdicts of the record that is gone on with, by key."""
        if self.asked.json is None or not self.asked.json.exists():
            return {}
        lines = self.asked.json.read_text(encoding="utf-8").splitlines()[1:]
        return {tried.key: tried for tried in (Tried(**json.loads(line)) for line in lines)}

    def facts(self) -> dict[str, Any]:
        """What that record says of its run."""
        if self.asked.json is None or not self.asked.json.exists():
            return {}
        return json.loads(self.asked.json.read_text(encoding="utf-8").partition("\n")[0])

    def note(self, tried: Tried) -> None:
        self.tried.append(tried)
        place = f"{tried.file}:{tried.line}"
        if tried.verdict == "survived":
            print(f"survived  {place} {tried.function}: {tried.operator}: {tried.old}  ->  {tried.new}")
        print(f"[{len(self.tried):3}] {tried.verdict:10} {tried.seconds:5.1f} s  {place}  {tried.how[:90]}", flush=True)
        if self.asked.json is not None and len(self.tried) % 20 == 0:
            self.write()

    def write(self) -> None:
        """The record: the run, then each change."""
        counts = Counter(tried.verdict for tried in self.tried)
        run = ["git", "rev-parse", "--short=12", "HEAD"]
        commit = subprocess.run(run, cwd=ROOT, capture_output=True, text=True).stdout.strip()
        facts = {
            "date": datetime.now(UTC).date().isoformat(),
            "commit": commit,
            "seed": self.seed,
            "sites": self.sites,
            "reached": self.reached,
            "tried": len(self.tried),
            **{verdict: counts[verdict] for verdict in ("killed", "survived", "equivalent")},
        }
        lines = [facts, *(asdict(tried) for tried in self.tried)]
        self.asked.json.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def summary(tried: list[Tried]) -> str:
    """Counts by operator, then what survived."""
    verdicts = ("killed", "equivalent", "survived")
    lines = [f"{'':12}{'tried':>8}" + "".join(f"{verdict:>12}" for verdict in verdicts)]
    for operator in (*sorted({x.operator for x in tried}), "all"):
        own = [x.verdict for x in tried if operator in ("all", x.operator)]
        lines.append(f"{operator:12}{len(own):8}" + "".join(f"{own.count(verdict):12}" for verdict in verdicts))
    rest = [x for x in tried if x.verdict == "survived"]
    return "\n".join([*lines, *(f"{x.file}:{x.line} {x.function}: {x.old} -> {x.new}" for x in rest)])


def main() -> int:
    parser = argparse.ArgumentParser(description="Try random changes of the core on the tests that run their lines.")
    parser.add_argument("--seed", type=int, help="of the order in which changes are drawn; default the record's, or 0")
    parser.add_argument("--count", type=int, help=f"how many are tried; default the record's, {COUNT} at least")
    parser.add_argument("--seconds", type=float, help="no new one is begun after so long")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of tests for each; default 20")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the record: it is gone on with, and written")
    parser.add_argument("--survivors", action="store_true", help="try those of the record again, on more tests")
    parser.add_argument(
        "--tests", nargs="+", metavar="FILE", help="with --survivors: on all tests of these files alone"
    )
    asked = parser.parse_args()
    os.chdir(ROOT)
    if asked.tests and not (asked.survivors and asked.json is not None and asked.json.exists()):
        parser.error("--tests goes with --survivors and the --json of a record")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import pytest

    if not CACHE.exists() and not asked.tests:
        print("tracing which tests run which lines: as long as the suite takes, once", flush=True)
        subprocess.run([sys.executable, Path(__file__).with_name("lines.py")], check=False)
    sys.path.insert(0, str(ROOT / "src"))
    sampler = Sampler(asked)
    options = ["-q", "-s", "-k", SLOW, "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    paths = f"pythonpath={ROOT / 'src'} {ROOT} {ROOT / 'tests'}"
    code = int(pytest.main([*options, "-o", paths, *arguments(asked.tests or [])], plugins=[sampler]))
    if code not in (0, 5) or not sampler.tried:
        return code or 2
    print(summary(sampler.tried))
    if asked.json is not None:
        sampler.write()
    survived = sum(tried.verdict == "survived" for tried in sampler.tried)
    return int(survived > 0.1 * len(sampler.tried))


if __name__ == "__main__":
    sys.exit(main())
