"""``make mutants``: seed one bug after the other into a copy of the source, and see that the tests notice each.

    copy of src and benchmarks  ->  one change  ->  the tests that must notice, until the first failure: caught or not

The checkout is never edited. A change after which the tests fail, crash or hang is caught. An entry whose text is no
longer in the source is stale, and an error like a survivor: the catalogue is then a claim about code that is gone.
Tests run in forks of this process, which has torch imported already: that is most of what a small test takes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from catalogue import ROOT, SOURCE, Mutant, Stale, load

TIMEOUT = 240.0
"""Seconds after which tests count as hung. The slowest named here take a tenth of that on a busy machine."""

# Pytest warns that it cannot rewrite the assertions of what was imported before it, which are not ours.
PYTEST = (
    "-x",
    "-q",
    "--no-header",
    "--tb=line",
    "-p",
    "no:cacheprovider",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        verdict: "caught", "survived" or "stale".
        how: the first test that failed, or the reason.
        seconds: that its tests took.
    """

    name: str
    file: str
    verdict: str
    how: str
    seconds: float


@dataclass(eq=False)
class Trial:
    """Tests that run in a fork, on a source folder of their own."""

    tests: tuple[str, ...]
    folder: Path
    pid: int = 0
    began: float = 0.0

    def start(self) -> None:
        """Fork, and run the tests there."""
        self.began = time.monotonic()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run_tests(self.tests, self.folder)

    def ended(self, timeout: float) -> tuple[bool, str] | None:
        """None while it runs; then whether all tests passed, and what stopped them."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        late = time.monotonic() - self.began > timeout
        if not pid and not late:
            return None
        # Ranks and commands that the tests started are in the same group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if not pid:
            os.waitpid(self.pid, 0)
            return False, f"hung for {timeout:.0f} s"
        return _outcome(os.waitstatus_to_exitcode(status), (self.folder / "log").read_text(errors="replace"))


def _run_tests(tests: tuple[str, ...], folder: Path) -> None:
    """In the fork: pytest on the copy. Never returns."""
    code = 70
    try:
        os.setsid()
        log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.environ["PYTHONPATH"] = str(folder)
        sys.path.insert(0, str(folder))
        import pytest

        # Before the checkout, which alone pyproject.toml names.
        code = int(pytest.main([*PYTEST, "-o", f"pythonpath={folder} {ROOT}", *tests]))
        import logitless

        if not str(logitless.__file__).startswith(str(folder)):
            print(f"the tests ran on {logitless.__file__}")
            code = 70
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _outcome(code: int, log: str) -> tuple[bool, str]:
    """Whether all tests passed, and what stopped them.

    Raises:
        Stale: no test ran, or not on the copy.
    """
    if code == 0:
        return True, ""
    found = FAILED.search(log)
    if code < 0:
        return False, f"killed by {signal.Signals(-code).name}"
    if code in (1, 2):
        return False, found[1] if found else "failed"
    raise Stale(f"pytest ended with {code}: {log.strip().splitlines()[-1] if log.strip() else 'no output'}")


def is_stale(mutant: Mutant) -> str | None:
    """Why an entry does not fit the source or the tests any more, or None."""
    try:
        mutant.check()
    except Stale as error:
        return str(error)
    return None


def copy_source(folder: Path, mutant: Mutant | None = None) -> Path:
    """A copy of the source and the benchmarks in a new folder below, with the change made."""
    place = Path(tempfile.mkdtemp(dir=folder))
    # With what is compiled already, which saves each trial a second, but never of the changed file.
    shutil.copytree(SOURCE, place, dirs_exist_ok=True)
    shutil.copytree(ROOT / "benchmarks", place / "benchmarks", ignore=shutil.ignore_patterns("results"))
    if mutant is not None:
        path = place / mutant.path
        path.write_text(mutant.apply(), encoding="utf-8")
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()
    return place


def check_tests(mutants: list[Mutant], folder: Path) -> str | None:
    """Run all named tests once on the source as it is; the first failure, or None. Stale entries are judged later."""
    tests = tuple(dict.fromkeys(test for mutant in mutants if not is_stale(mutant) for test in mutant.tests))
    if not tests:
        return None
    print(f"{len(tests)} tests or files on the source as it is ...", flush=True)
    trial = Trial(tests, copy_source(folder))
    trial.start()
    try:
        while (end := trial.ended(TIMEOUT * max(1, len(mutants) // 4))) is None:
            time.sleep(0.1)
    except Stale as error:
        end = False, str(error)
    print(f"done in {time.monotonic() - trial.began:.0f} s", flush=True)
    return None if end[0] else f"{end[1]}\n{(trial.folder / 'log').read_text(errors='replace')[-2000:]}"


def seed(mutants: list[Mutant], folder: Path, jobs: int) -> list[Verdict]:
    """The verdict on each, a line for each as it comes."""
    waiting, verdicts = list(mutants), []
    running: dict[Trial, Mutant] = {}

    def note(mutant: Mutant, verdict: str, how: str, seconds: float = 0.0) -> None:
        verdicts.append(Verdict(mutant.name, mutant.file, verdict, how, round(seconds, 1)))
        print(f"[{len(verdicts):3}/{len(mutants)}] {verdict:8} {seconds:5.1f} s  {mutant.name}  {how}", flush=True)

    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop(0)
            reason = is_stale(mutant)
            if reason is not None:
                note(mutant, "stale", reason)
                continue
            trial = Trial(mutant.tests, copy_source(folder, mutant))
            trial.start()
            running[trial] = mutant
        time.sleep(0.05)
        for trial, mutant in list(running.items()):
            seconds = time.monotonic() - trial.began
            try:
                end = trial.ended(TIMEOUT)
            except Stale as error:
                end, stale = (False, str(error)), True
            else:
                stale = False
            if end is None:
                continue
            del running[trial]
            shutil.rmtree(trial.folder, ignore_errors=True)
            verdict = "stale" if stale else "survived" if end[0] else "caught"
            note(mutant, verdict, mutant.suffers if verdict == "survived" else end[1], seconds)
    order = {mutant.name: place for place, mutant in enumerate(mutants)}
    return sorted(verdicts, key=lambda verdict: order[verdict.name])


def summary(verdicts: list[Verdict]) -> str:
    """The table at the end: counts by folder, then what was not caught."""
    kinds = ("caught", "survived", "stale")
    parts = sorted({verdict.file.split("/")[0] for verdict in verdicts})
    lines = [f"{'':16}{'seeded':>9}" + "".join(f"{kind:>10}" for kind in kinds)]
    for part in (*parts, "all"):
        own = [verdict.verdict for verdict in verdicts if part in ("all", verdict.file.split("/")[0])]
        lines.append(f"{part:16}{len(own):9}" + "".join(f"{own.count(kind):10}" for kind in kinds))
    rest = [verdict for verdict in verdicts if verdict.verdict != "caught"]
    return "\n".join([*lines, *(f"{v.verdict}: {v.name} ({v.file}): {v.how}" for v in rest)])


def record(verdicts: list[Verdict]) -> str:
    """JSON lines: the run, then each mutant."""
    kinds = [verdict.verdict for verdict in verdicts]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.strip(),
        "seeded": len(kinds),
        **{kind: kinds.count(kind) for kind in ("caught", "survived", "stale")},
    }
    return "".join(json.dumps(line) + "\n" for line in (facts, *(vars(verdict) for verdict in verdicts)))


def earlier(path: Path) -> dict[str, Verdict]:
    """The verdicts of a record, by name."""
    verdicts = [Verdict(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    return {verdict.name: verdict for verdict in verdicts}


def preload() -> None:
    """Import what the tests import, but for the package itself. Nothing is computed: forks have no threads to lose."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch.distributed

    if not torch.cuda.is_available():
        # As tests/conftest.py does, which comes too late for a Triton that is imported here.
        os.environ["TRITON_INTERPRET"] = "1"
    import triton  # noqa: F401


def main() -> int:
    parser = argparse.ArgumentParser(description="Seed bugs into a copy of the source and see that the tests notice.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these entries of the catalogue")
    parser.add_argument("--list", action="store_true", help="print the catalogue and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time; default 1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there; with --only, renew those")
    asked = parser.parse_args()
    mutants = load()
    unknown = set(asked.only or ()) - {mutant.name for mutant in mutants}
    if unknown:
        parser.error(f"no entry is named {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in mutants if asked.only is None or mutant.name in asked.only]
    if asked.list:
        for mutant in chosen:
            print(f"{mutant.name:44} {mutant.file:28} {mutant.suffers}")
        return 0
    os.chdir(ROOT)
    preload()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        failure = check_tests(chosen, Path(folder))
        if failure is not None:
            print(f"the tests fail on the source as it is, so they tell nothing: {failure}")
            return 2
        verdicts = seed(chosen, Path(folder), asked.jobs)
    print(summary(verdicts))
    if asked.json is not None:
        known = earlier(asked.json) if asked.only is not None and asked.json.exists() else {}
        found = known | {verdict.name: verdict for verdict in verdicts}
        listed = [found[mutant.name] for mutant in mutants if mutant.name in found]
        asked.json.write_text(record(listed), encoding="utf-8")
    return 0 if all(verdict.verdict == "caught" for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
