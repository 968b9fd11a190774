"""The sampler of random changes: what it draws, how a change is put in, and that the page says what the record says."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from types import FunctionType, SimpleNamespace

import pytest
import sample
from catalogue import ROOT
from lines import PACKAGE, Lines, core, digest, functions, traced
from operators import Change, changes

sys.path.insert(0, str(ROOT / "docs"))

import make_reliability

TEXT = '''"""Words."""

LIMIT = 3


def scale(x, by=2):
    """Words."""
    if x < 0 and by > 1:
        raise ValueError(f"{x - 1} is below {0}")
    out = min(x, by) * 10
    out += 1
    return out
'''


def test_every_operator_in_its_place():
    found = {(change.operator, change.old(TEXT), change.new) for change in changes("a.py", TEXT)}
    assert found == {
        ("comparison", "x < 0", "((x) <= (0))"),
        ("comparison", "by > 1", "((by) >= (1))"),
        ("boolean", "x < 0 and by > 1", "((x < 0) or (by > 1))"),
        ("negated", "x < 0 and by > 1", "(not (x < 0 and by > 1))"),
        ("constant", "0", "1"),
        ("constant", "1", "2"),
        ("constant", "10", "11"),
        ("swapped", "x, by", "by, x"),
        ("arithmetic", "min(x, by) * 10", "((min(x, by)) / (10))"),
        ("dropped", "out += 1", "pass"),
        ("returned", "return out", "return None"),
    }
    for change in changes("a.py", TEXT):
        changed = change.apply(TEXT)
        compile(changed, "a.py", "exec")
        assert changed != TEXT
        assert changed.count("\n") == TEXT.count("\n")
        assert change.function == "scale"


def test_a_dropped_statement_keeps_the_lines_after_it():
    text = "def f(x):\n    x.update(\n        a=1,\n    )\n    return x\n"
    (change,) = [c for c in changes("a.py", text) if c.operator == "dropped"]
    assert change.apply(text).split("\n")[4] == "    return x"


def test_columns_are_counted_in_bytes():
    text = 'def f(x):\n    return "\u00e4", x + 1\n'
    (change,) = [c for c in changes("a.py", text) if c.operator == "arithmetic"]
    assert change.apply(text) == 'def f(x):\n    return "\u00e4", ((x) - (1))\n'


def test_the_core_has_places_in_every_part():
    files = core()
    assert "softmax.py" in files
    assert not [file for file in files if file.startswith(("adapters/", "tools/cli/", "backends/triton/"))]
    text = (PACKAGE / "softmax.py").read_text(encoding="utf-8")
    assert len({change.operator for change in changes("softmax.py", text)}) >= 6


def test_a_change_is_put_into_functions_that_exist(tmp_path, monkeypatch):
    """Methods, nested functions and closures are swapped; a closure that needs other variables is not."""
    text = "def made(n):\n    def add(x):\n        return x + n\n    return add\n"
    text += "class A:\n    def f(self):\n        return 1\n"
    path = tmp_path / "a.py"
    path.write_text(text)
    monkeypatch.setattr(sample, "PACKAGE", tmp_path)
    space: dict = {"__name__": "a"}
    exec(compile(text, str(path), "exec", dont_inherit=True), space)
    add, one = space["made"](3), space["A"]()
    living: list[FunctionType] = [space["made"], add, space["A"].f]
    by_operator = {change.operator: change for change in changes("a.py", text)}
    assert sample.put_in(by_operator["arithmetic"], living)
    assert add(10) == 7
    assert space["made"](3)(10) == 7
    assert one.f() == 1
    last = [change for change in changes("a.py", text) if change.operator == "constant"][-1]
    assert sample.put_in(last, [space["A"].f])
    assert one.f() == 2
    exec(compile(text, str(path), "exec", dont_inherit=True), space)
    without = Change("a.py", 3, 8, 3, 20, "returned", "return None", "made.add")
    with pytest.raises(ValueError, match="free vars"):
        sample.put_in(without, [space["made"](3)])


def test_lines_that_ran(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(TEXT)
    space: dict = {}
    exec(compile(TEXT, str(path), "exec"), space)
    with traced(str(tmp_path)) as hits:
        space["scale"](1)
    assert {line for _, line in hits} == {8, 10, 11, 12}
    assert functions(TEXT) == {"scale": (6, 12)}


def test_tests_of_a_line_and_of_a_function_where_the_file_has_changed():
    text = (PACKAGE / "errors/__init__.py").read_text(encoding="utf-8")
    name, (first, _) = next(iter(functions(text).items()))
    known = Lines([("a", 1.0), ("b", 2.0)], {"errors/__init__.py": {first + 1: 0b10, first + 2: 0b01}})
    known.digests["errors/__init__.py"], known.spans["errors/__init__.py"] = digest(text), functions(text)
    assert known.of("errors/__init__.py", first + 1, name) == [("b", 2.0)]
    known.digests["errors/__init__.py"] = "of another text"
    assert known.of("errors/__init__.py", first + 1, name) == [("a", 1.0), ("b", 2.0)]
    assert known.of("errors/__init__.py", first + 1, "no_such_function") == []


def test_equivalent_changes_have_reasons():
    for key, reason in sample.equivalents().items():
        assert len(reason) > 20, key


def test_the_order_of_tests():
    """The quickest of every file first, those of the same part before others, ranks last, within the budget."""
    sampler = sample.Sampler(SimpleNamespace(budget=5.0, tests=None))
    seconds = {"tests/rows/a.py::x": 2.0, "tests/rows/a.py::y": 1.0, "tests/b.py::z": 0.5, "tests/c.py::ranks": 0.1}
    sampler.items = {test: SimpleNamespace(fixturenames=("ranks",) * ("ranks" in test)) for test in seconds}
    sampler.lines = SimpleNamespace(of=lambda *_: list(seconds.items()), tests=list(seconds.items()))
    change = Change("rows/rows.py", 1, 0, 1, 1, "constant", "1", "f")
    chosen = [test for test, _ in sampler.tests(change, everything=False)]
    assert chosen == ["tests/rows/a.py::y", "tests/b.py::z", "tests/rows/a.py::x"]
    assert len(sampler.tests(change, everything=True)) == 4


def test_tests_run_by_the_hook_that_sets_their_filters():
    seen = []
    hooks = SimpleNamespace(pytest_runtest_protocol=lambda item, nextitem: seen.append((item.name, nextitem)))
    first, second = (SimpleNamespace(name=name, ihook=hooks) for name in "ab")
    sampler = sample.Sampler(SimpleNamespace())
    sampler.items = {"a": first, "b": second}
    assert sampler.run(["a", "b"]) == 0
    assert seen == [("a", second), ("b", None)]


def test_survivors_are_tried_on_tests_that_are_named(tmp_path, monkeypatch):
    """Of a record, which else stays as it is: with its seed, its places, and changes that could not be put in."""
    sites = changes("softmax.py", (PACKAGE / "softmax.py").read_text(encoding="utf-8"))
    killed, caught, missed, unfit = (change for change in sites[:40:10])
    before = [sample.described(killed, "killed", "tests/b.py::y")]
    before += [sample.described(change, "survived", "9 tests passed") for change in (caught, missed, unfit)]
    path = tmp_path / "record.jsonl"
    lines = [{"seed": 3, "sites": 70, "reached": 60}, *(asdict(tried) for tried in before)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = SimpleNamespace(json=path, seed=None, count=None, seconds=None, survivors=True, tests=["tests/a.py"])
    ends = {caught: ("killed", "tests/a.py::x"), missed: ("survived", "2 tests passed")}
    sampler = sample.Sampler(asked)
    judged = lambda change, everything: sample.described(change, *ends[change]) if change in ends else None  # noqa: E731
    monkeypatch.setattr(sampler, "judged", judged)
    sampler.try_all()
    sampler.write()
    facts, *tried = (json.loads(line) for line in path.read_text().splitlines())
    assert [facts[name] for name in ("seed", "sites", "reached", "tried", "killed", "survived")] == [3, 70, 60, 4, 2, 2]
    found = {sample.Tried(**entry).key: (entry["verdict"], entry["how"]) for entry in tried}
    wanted = {killed: ("killed", "tests/b.py::y"), **ends, unfit: ("survived", "9 tests passed")}
    assert found == {sample.key_of(change): end for change, end in wanted.items()}


def test_the_page_says_what_the_record_says():
    """Run ``python docs/make_reliability.py`` after a new record."""
    page, lines = make_reliability.PAGE.read_text(encoding="utf-8"), make_reliability.changes_record()
    assert page == make_reliability.with_changes(page, lines)
    facts, *tried = lines
    assert facts["tried"] == len(tried) == facts["killed"] + facts["survived"] + facts["equivalent"]
