"""Two commits on the same cases: ``python -m benchmarks bench --base REF``.

    REF in a temporary git worktree ("old") and the files of this checkout as they are ("new")
    per case: old, new, new, old, ...  each a process of the same interpreter that imports one of the two trees

Each process checks its providers against float64 before it times them, so a wrong provider has no time here either.
The worktree is removed whatever happens. A case or provider that the old commit does not have, or has with other sizes,
is measured in the new tree alone, and the table says so.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench.cases import Case
from benchmarks.bench.records import Record, append_records, read_records
from benchmarks.bench.run import Report, Request, Selection
from logitless.errors import LogitlessError
from logitless.spec import format_bytes
from logitless.tools.outputs import text_table

CHECKOUT = Path(__file__).parents[2]
ROUNDS = 2
# Ours, and plain torch, which no commit changes: its ratio tells what a ratio of ours is worth on this machine.
DEFAULT_PROVIDERS = ("torch", "logitless*")

ASK = """
import dataclasses, json, logitless
from BENCH.cases import CASES
from BENCH.providers import PROVIDERS
try:
    from BENCH.linear_providers import LINEAR_PROVIDERS
except ModuleNotFoundError:
    LINEAR_PROVIDERS = {}
cases = {name: dataclasses.asdict(case) for name, case in CASES.items()}
answer = {"cases": cases, "logits": list(PROVIDERS), "hidden": list(LINEAR_PROVIDERS), "package": logitless.__file__}
print(json.dumps(answer))
"""


@dataclass(frozen=True)
class Tree:
    """A checkout that can be measured.

    Attributes:
        name: ``"old"`` or ``"new"``.
        root: its top folder.
        commit: the commit that is checked out.
    """

    name: str
    root: Path
    commit: str

    @property
    def source(self) -> Path:
        """The folder that holds the package."""
        return self.root / "src"

    @property
    def bench(self) -> str:
        """Name of the benchmark's package, which was part of the library in earlier commits."""
        if (self.root / "benchmarks/bench").exists():
            return "benchmarks.bench"
        return "logitless.tools.bench" if (self.source / "logitless/tools/bench").exists() else "logitless.bench"

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python on this tree's package and benchmarks."""
        paths = [os.fspath(self.root), os.fspath(self.source), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
        )


@dataclass(frozen=True)
class Known:
    """What a commit can measure: fields of its cases by name, names of its providers, and the file of its package."""

    cases: Mapping[str, Mapping[str, Any]]
    logits: Sequence[str]
    hidden: Sequence[str]
    package: str

    def lacks(self, case: Case) -> str:
        """Why the case cannot be compared; empty if it can. A field that the commit lacks counts as its default."""
        old = self.cases.get(case.name)
        if old is None:
            return "not a case of the old commit"
        plain = asdict(Case("", case.device, case.tokens, case.vocab))
        other = {name: (old.get(name, plain[name]), value) for name, value in asdict(case).items()}
        changed = [f"{name} was {was!r} and is {now!r}" for name, (was, now) in other.items() if was != now]
        return f"another case in the old commit: {', '.join(changed)}" if changed else ""

    def providers_of(self, case: Case) -> Sequence[str]:
        return self.logits if case.hidden is None else self.hidden


@dataclass(frozen=True)
class Compared:
    """One provider on one case in both trees; a list has one record per round.

    Attributes:
        case, provider: their names.
        old, new: records; ``old`` is empty where the old commit has no such case or provider.
        remark: why ``old`` is empty.
    """

    case: str
    provider: str
    old: Sequence[Record]
    new: Sequence[Record]
    remark: str = ""

    @property
    def broken(self) -> bool:
        """Whether the new tree fails or is wrong where the old one was not."""
        return _status(self.new) in ("wrong", "failed", "out of memory") and _status(self.old) in ("", "ok")

    def values(self, name: str) -> tuple[float | None, float | None]:
        """A field's median over the rounds, old and new."""
        return _median(self.old, name), _median(self.new, name)

    def ratio(self, name: str) -> float | None:
        """New over old."""
        old, new = self.values(name)
        return None if not old or new is None else new / old

    def to_json(self) -> str:
        fields = {"case": self.case, "provider": self.provider, "remark": self.remark, "broken": self.broken}
        for name in ("total_ms", "forward_ms", "peak_bytes"):
            old, new = self.values(name)
            fields[name] = {"old": old, "new": new, "ratio": self.ratio(name)}
        fields["status"] = {"old": _status(self.old), "new": _status(self.new)}
        fields["errors"] = {"old": _errors(self.old), "new": _errors(self.new)}
        return json.dumps(fields)


@dataclass(frozen=True)
class Comparison:
    """The commit that this checkout was compared with, and every comparison."""

    base: str
    commit: str
    compared: Sequence[Compared] = field(default_factory=tuple)

    @property
    def broken(self) -> bool:
        return any(c.broken for c in self.compared)


def compare_with(base: str, request: Request, report: Report = lambda text: None, root: Path = CHECKOUT) -> Comparison:
    """Measure the request's cases in the checkout ``root`` and in the commit ``base`` of its history.

    Records are appended to ``request.out`` if that is given, and to nothing otherwise.
    """
    selection = _with_defaults(request).resolve()
    with terminable(), worktree(base, root) as old:
        new = Tree("new", root, "")
        known = ask(old)
        compared: list[Compared] = []
        for case in selection.cases:
            compared += _compare_case(case, selection, request, known, (old, new), report)
    return Comparison(base, old.commit, compared)


def num_steps(request: Request) -> int:
    """How often :func:`compare_with` reports at most."""
    return 2 * ROUNDS * len(_with_defaults(request).resolve().cases)


def _with_defaults(request: Request) -> Request:
    return replace(request, providers=list(request.providers) or list(DEFAULT_PROVIDERS))


@contextmanager
def worktree(ref: str, root: Path) -> Iterator[Tree]:
    """The commit, checked out in a temporary folder. However the work ends, the folder goes and git forgets it."""
    top = Path(_git(root, "rev-parse", "--show-toplevel"))
    found = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}", wanted=ref)
    with tempfile.TemporaryDirectory(prefix="logitless-base-") as folder:
        place = Path(folder) / "tree"
        _git(top, "worktree", "add", "--detach", "--quiet", os.fspath(place), found)
        try:
            yield Tree("old", place / root.resolve().relative_to(top.resolve()), found)
        finally:
            _git(top, "worktree", "remove", "--force", os.fspath(place))


@contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that the worktree is removed."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def ask(tree: Tree) -> Known:
    """What the tree can measure, as its code says."""
    ran = tree.python("-c", ASK.replace("BENCH", tree.bench))
    if ran.returncode:
        lines = ran.stderr.strip().splitlines() or ["no message"]
        raise LogitlessError(
            f"bench: commit {tree.commit[:12]} cannot be measured: {lines[-1]}. Take a later commit as --base."
        )
    known = Known(**json.loads(ran.stdout.splitlines()[-1]))
    if not Path(known.package).resolve().is_relative_to(tree.source.resolve()):
        raise LogitlessError(
            f"bench: {sys.executable} imports {known.package} whatever PYTHONPATH says, so no other commit can be "
            "measured with it. Install logitless with pip install -e, or not at all."
        )
    return known


def _git(folder: Path, *words: str, wanted: str | None = None) -> str:
    ran = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
    if ran.returncode == 0:
        return ran.stdout.strip()
    if wanted is not None:
        raise LogitlessError(f"bench: --base {wanted!r} is not a commit of this repository. See git log.")
    said = ran.stderr.strip().splitlines() or ["no message"]
    raise LogitlessError(f"bench: --base needs a git checkout of logitless. git {words[0]} says: {said[-1]}")


def _compare_case(
    case: Case, selection: Selection, request: Request, known: Known, trees: tuple[Tree, Tree], report: Report
) -> list[Compared]:
    remark = known.lacks(case)
    names = list(selection.providers_of(case))
    both = [] if remark else [name for name in names if name in known.providers_of(case)]
    records: dict[str, dict[str, list[Record]]] = {tree.name: {name: [] for name in names} for tree in trees}
    for number in range(ROUNDS):
        # The trees take turns to begin, so that a machine that slows down favours neither.
        for tree in trees if number % 2 == 0 else trees[::-1]:
            wanted = both if tree.name == "old" else names
            if wanted:
                report(f"{case.name}: {tree.name}, round {number + 1} of {ROUNDS}")
                for record in _measure(tree, case, wanted, request, selection.device):
                    records[tree.name][record.provider].append(record)
    lost = {name: remark or ("" if name in both else "not a provider of the old commit") for name in names}
    return [Compared(case.name, name, records["old"][name], records["new"][name], lost[name]) for name in names]


def _measure(tree: Tree, case: Case, providers: Sequence[str], request: Request, device: torch.device) -> list[Record]:
    with tempfile.TemporaryDirectory(prefix="logitless-base-") as folder:
        out = Path(folder) / "records.jsonl"
        words = ["-m", tree.bench, "--case", case.name, "--provider", *providers, "--out", os.fspath(out)]
        words += ["--device", device.type, "--repeats", str(request.repeats)]
        words += ["--peers", os.fspath(request.peers.resolve())] if request.peers else []
        ran = tree.python(*words)
        if ran.returncode or not out.exists():
            lines = ran.stderr.strip().splitlines() or ["no message"]
            raise LogitlessError(f"bench: the {tree.name} tree ended with code {ran.returncode}: {lines[-1]}")
        records = read_records(out)
    if request.out is not None:
        append_records(request.out, records)
    return records


def _status(records: Sequence[Record]) -> str:
    """The first status that is not ok; ok if all are; empty without records."""
    found = [r.status for r in records]
    return next((status for status in found if status != "ok"), "ok" if found else "")


def _median(records: Sequence[Record], name: str) -> float | None:
    values = [getattr(r, name) for r in records]
    return None if not values or None in values else statistics.median(values)


def _errors(records: Sequence[Record]) -> tuple[float | None, float | None]:
    """Largest error of values and of gradients, over all rounds."""
    groups = (("logprob", "entropy"), ("gradient", "weight", "weight_rest"))
    found = [[v for r in records for name in names if (v := r.errors.get(name)) is not None] for names in groups]
    return max(found[0], default=None), max(found[1], default=None)


COLUMNS = ("provider", "correct", "value err", "grad err", "old ms", "new ms", "ratio", "old peak", "new peak", "ratio")


def comparison_table(comparison: Comparison) -> str:
    """Case by case: is each provider right, how far off, then time and peak, old and new."""
    lines = [f"old: {comparison.commit[:12]} ({comparison.base}), new: this checkout; ratio: new over old"]
    for name in dict.fromkeys(c.case for c in comparison.compared):
        group = [c for c in comparison.compared if c.case == name and _status(c.new) != "absent"]
        lines += ["", name, text_table(COLUMNS, map(_cells, group))]
        notes = [(c.provider, c.remark) for c in group if c.remark]
        notes += [(c.provider, r.detail) for c in group for r in [*c.new, *c.old] if r.status != "ok"]
        remarks = {c.remark for c in group}
        if len(remarks) == 1 and remarks != {""}:
            notes = [("all", remarks.pop()), *notes[len(group) :]]
        lines += dict.fromkeys(f"  {provider}: {note}" for provider, note in notes)
    return "\n".join(lines)


def _cells(c: Compared) -> tuple[str, ...]:
    old, new = _status(c.old), _status(c.new)
    correct = new if old in ("", new) else f"{old} -> {new}"
    errors = [_pair(*values, "{:.0e}".format) for values in zip(_errors(c.old), _errors(c.new), strict=True)]
    cells = [c.provider, correct, *errors]
    for name, show in (("total_ms", "{:.2f}".format), ("peak_bytes", lambda x: format_bytes(round(x)))):
        ratio = c.ratio(name)
        cells += ["-" if x is None else show(x) for x in c.values(name)] + ["-" if ratio is None else f"{ratio:.3f}"]
    return tuple(cells)


def _pair(old: float | None, new: float | None, show: Callable[[float], str]) -> str:
    """One text where both read alike."""
    texts = ["-" if x is None else show(x) for x in (old, new)]
    return texts[1] if texts[0] in ("-", texts[1]) else " -> ".join(texts)
