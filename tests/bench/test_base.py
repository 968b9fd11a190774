"""``bench --base``: two trees, each measured by its own code, and a worktree that is gone afterwards.

Most tests use a small package that answers at once with records of its own; one uses the real one.
"""

import os
import shutil
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

import logitless
from benchmarks.bench import base as against
from benchmarks.bench.cases import CASES
from benchmarks.bench.records import read_records
from benchmarks.bench.run import Request
from logitless import LogitlessError

# A package that knows the cases it is given and takes SPEED milliseconds for each, without importing torch.
CASES_FILE = """
from dataclasses import make_dataclass

KNOWN = {known!r}
CASES = {{}}
for name, fields in KNOWN.items():
    CASES[name] = make_dataclass("Case", fields)(**fields)
"""
MAIN = """
import json, sys
from {bench}.cases import KNOWN

words = sys.argv[1:]
case, out = words[words.index("--case") + 1], words[words.index("--out") + 1]
first = words.index("--provider") + 1
names = words[first:next(i for i in range(first, len(words)) if words[i].startswith("--"))]
with open({log!r}, "a") as file:
    file.write({tree!r} + " " + case + " " + ",".join(names) + "\\n")
{extra}
with open(out, "w") as file:
    for name in names:
        record = dict(case=KNOWN[case], provider=name, computes="grad", status={status!r}, detail="why", rows=1)
        record |= dict(logits_bytes=8, forward_floor_ms=1.0, floor_ms=1.0, bandwidth=1.0, environment={{}})
        record |= dict(errors=dict(logprob=1e-7, gradient=2e-7), peak_bytes=64, forward_ms=1.0, total_ms={speed})
        file.write(json.dumps(record) + "\\n")
"""
GRAD, VALUE = "smoke-fp32-grad", "smoke-fp32-value"


def git(folder, *words):
    identity = {f"GIT_{who}_{what}": "x@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    ran = subprocess.run(
        ["git", *words], cwd=folder, env=os.environ | identity, capture_output=True, text=True, check=True
    )
    return ran.stdout.strip()


def write_package(
    root,
    tree,
    speed,
    cases=(GRAD, VALUE),
    status="ok",
    providers=("torch", "logitless"),
    extra="",
    place="benchmarks/bench",
    **changes,
):
    bench, package = root / place, root / "src" / "logitless"
    bench.mkdir(parents=True, exist_ok=True)
    package.mkdir(parents=True, exist_ok=True)
    known = {name: asdict(CASES[name]) | changes for name in cases}
    for folder in (package, bench.parent, bench):
        (folder / "__init__.py").write_text("")
    (bench / "cases.py").write_text(CASES_FILE.format(known=known))
    (bench / "providers.py").write_text(f"PROVIDERS = {dict.fromkeys(providers)!r}\n")
    log = str(root.parent / "log")
    name = place.removeprefix("src/").replace("/", ".")
    main = MAIN.format(bench=name, log=log, tree=tree, status=status, speed=speed, extra=extra)
    (bench / "__main__.py").write_text(main)


@pytest.fixture
def repository(tmp_path):
    """A git repository with the package in one commit; what it holds now is up to the test."""
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "--quiet", "--initial-branch", "main")

    def commit(**fields):
        write_package(root, "old", **{"speed": 4.0} | fields)
        git(root, "add", ".")
        git(root, "commit", "--quiet", "-m", "old")
        return root

    yield commit
    assert git(root, "worktree", "list").count("\n") == 0, "a worktree is left behind"
    assert [path for path in Path(root, ".git").glob("worktrees/*")] == []


def request(*cases, providers=("torch", "logitless"), **fields):
    return Request(cases=cases or (GRAD,), providers=providers, device="cpu", repeats=1, **fields)


def log(root):
    return (root.parent / "log").read_text().splitlines()


def test_both_trees_take_turns_and_are_set_side_by_side(repository, tmp_path):
    root = repository()
    write_package(root, "new", 3.0)
    told, out = [], tmp_path / "kept.jsonl"
    comparison = against.compare_with("main", request(out=out), told.append, root)
    assert log(root) == [f"{tree} {GRAD} torch,logitless" for tree in ("old", "new", "new", "old")]
    assert len(told) == 4 == against.num_steps(request())
    assert comparison.commit == git(root, "rev-parse", "HEAD")
    assert not comparison.broken
    ours = comparison.compared[1]
    assert (ours.provider, ours.values("total_ms"), ours.ratio("total_ms")) == ("logitless", (4.0, 3.0), 0.75)
    lines = against.comparison_table(comparison).splitlines()
    assert lines[0].startswith(f"old: {comparison.commit[:12]} (main), new: this checkout")
    assert lines[-1].split() == [
        "logitless",
        "ok",
        "1e-07",
        "2e-07",
        "4.00",
        "3.00",
        "0.750",
        "64",
        "B",
        "64",
        "B",
        "1.000",
    ]
    assert len(read_records(out)) == 8
    assert '"ratio": 0.75' in ours.to_json()


def test_what_the_old_commit_does_not_know_is_said(repository):
    root = repository(cases=(GRAD,), providers=("torch",), tokens=95)
    write_package(root, "new", 3.0)
    comparison = against.compare_with("HEAD", request(GRAD, VALUE), root=root)
    assert {line.split()[0] for line in log(root)} == {"new"}
    table = against.comparison_table(comparison)
    assert "all: another case in the old commit: tokens was 95 and is 96" in table
    assert "all: not a case of the old commit" in table
    assert {c.ratio("total_ms") for c in comparison.compared} == {None}
    assert not comparison.broken


def test_a_provider_the_old_commit_does_not_have_is_measured_here_alone(repository):
    root = repository(providers=("torch",))
    write_package(root, "new", 3.0)
    comparison = against.compare_with("HEAD", request(), root=root)
    assert sorted(set(log(root))) == [f"new {GRAD} torch,logitless", f"old {GRAD} torch"]
    assert [c.remark for c in comparison.compared] == ["", "not a provider of the old commit"]
    assert "  logitless: not a provider of the old commit" in against.comparison_table(comparison)


@pytest.mark.parametrize(
    ("old", "new", "broken", "text"),
    [("ok", "wrong", True, "ok -> wrong"), ("wrong", "wrong", False, "wrong"), ("wrong", "ok", False, "wrong -> ok")],
)
def test_broken_is_what_was_right_before(old, new, broken, text, repository):
    root = repository(status=old)
    write_package(root, "new", 3.0, status=new)
    comparison = against.compare_with("HEAD", request(), root=root)
    assert comparison.broken is broken
    assert f"  {text}  " in against.comparison_table(comparison)
    assert "torch: why" in against.comparison_table(comparison)


@pytest.mark.parametrize("extra", ["raise SystemExit('no luck')", "sys.stderr.write('no luck'); sys.exit(3)"])
def test_a_tree_that_ends_early_is_named_and_the_worktree_is_removed(extra, repository):
    root = repository(extra=extra)
    with pytest.raises(LogitlessError, match=r"the old tree ended with code [13]: no luck"):
        against.compare_with("HEAD", request(), root=root)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_the_worktree_is_removed_whatever_happens(error, repository):
    root = repository()

    def stop(text):
        assert git(root, "worktree", "list").count("\n") == 1
        raise error

    with pytest.raises(error):
        against.compare_with("HEAD", request(), stop, root)


def test_a_request_to_terminate_removes_it_too(repository):
    root = repository()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop:
        against.compare_with("HEAD", request(), lambda text: os.kill(os.getpid(), signal.SIGTERM), root)
    assert stop.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_cannot_be_compared_is_refused_in_words(repository, tmp_path, monkeypatch):
    root = repository()
    with pytest.raises(LogitlessError, match="--base 'nowhere' is not a commit of this repository"):
        against.compare_with("nowhere", request(), root=root)
    (root / "benchmarks" / "bench" / "cases.py").unlink()
    git(root, "commit", "--quiet", "-am", "no cases")
    with pytest.raises(LogitlessError, match="cannot be measured: ModuleNotFoundError"):
        against.compare_with("HEAD", request(), root=root)
    monkeypatch.setattr(against, "ASK", against.ASK.replace("logitless.__file__", "'/elsewhere.py'"))
    with pytest.raises(LogitlessError, match=r"imports /elsewhere\.py whatever PYTHONPATH says"):
        against.compare_with("HEAD~1", request(), root=root)
    alone = tmp_path / "alone"
    write_package(alone, "new", 1.0)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    with pytest.raises(LogitlessError, match="--base needs a git checkout of logitless"):
        against.compare_with("HEAD", request(), root=alone)


def test_commits_before_the_moves_have_their_benchmark_elsewhere(tmp_path):
    tree = against.Tree("old", tmp_path, "")
    assert tree.bench == "logitless.bench"
    (tmp_path / "src" / "logitless" / "tools" / "bench").mkdir(parents=True)
    assert tree.bench == "logitless.tools.bench"
    (tmp_path / "benchmarks" / "bench").mkdir(parents=True)
    assert tree.bench == "benchmarks.bench"


@pytest.mark.parametrize("place", ["src/logitless/tools/bench", "src/logitless/bench"])
def test_a_commit_before_the_moves_is_measured_by_its_own_code(place, repository):
    root = repository(place=place)
    shutil.rmtree(root / "src")
    write_package(root, "new", 2.0)
    comparison = against.compare_with("main", request(), root=root)
    assert [c.values("total_ms") for c in comparison.compared] == [(4.0, 2.0)] * 2


def test_the_real_package_is_checked_before_it_is_timed(tmp_path, monkeypatch):
    """A checkout whose entropy is off by 1 %: wrong, without a time, where the commit is right."""
    root = tmp_path / "repository"
    ignored = shutil.ignore_patterns("__pycache__", "results")
    shutil.copytree(Path(logitless.__file__).parent, root / "src" / "logitless", ignore=ignored)
    shutil.copytree(Path(__file__).parents[2] / "benchmarks", root / "benchmarks", ignore=ignored)
    # The bandwidth of memory is not what this is about.
    watch = root / "src" / "logitless" / "tools" / "stopwatch.py"
    watch.write_text(watch.read_text().replace("CPU_COPY_BYTES = 384 << 20", "CPU_COPY_BYTES = 1 << 20"))
    git(root.parent, "init", "--quiet", str(root))
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "right")
    results = root / "benchmarks" / "bench" / "providers.py"
    text = results.read_text()
    assert "return Scores(out.logprob, out.entropy)" in text
    results.write_text(
        text.replace("return Scores(out.logprob, out.entropy)", "return Scores(out.logprob, 1.01 * out.entropy)")
    )
    monkeypatch.setattr(against, "ROUNDS", 1)
    comparison = against.compare_with("HEAD", request(providers=("logitless",)), root=root)
    (ours,) = comparison.compared
    assert comparison.broken
    assert (ours.old[0].status, ours.new[0].status) == ("ok", "wrong")
    assert ours.values("total_ms")[0] > 0
    assert ours.values("total_ms")[1] is None
    assert ours.old[0].environment["commit"] == comparison.commit[:12]
    assert "entropy is off by" in against.comparison_table(comparison)
