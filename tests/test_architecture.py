"""The shape of the code: who may import whom, what is public, what an import needs, how long things are."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import logitless

PACKAGE = Path(logitless.__file__).parent

# Files and folders of the package in the order in which a batch passes them. Each imports only from those before it.
ORDER = [
    *("errors", "notes", "collectives", "spec", "machine", "product_table"),
    "rows",
    *("softmax", "operands", "backends", "readings", "call", "objectives"),
    *("route", "sources", "passes"),
    *("score", "loss", "policy_head", "entropy_sample", "seams"),
    "deferred",
    "memory",
    *("adapters", "engines", "provider"),
    *("", "tools", "__main__"),
]

# Besides the standard library, torch and the package itself. Nothing else is imported anywhere: no framework.
THIRD_PARTY = {
    "adapters.megatron": {"megatron"},
    "adapters.skyrl_rows": {"megatron"},
    "adapters.slime": {"megatron"},
    "adapters.verl": {"megatron"},
    "backends.triton": {"triton"},
    "tools.cli": {"rich", "typer"},
    "tools.score.figure": {"matplotlib"},
    "tools.style": {"matplotlib"},
    "tools.outputs": {"rich"},
    "tools.score.files": {"pyarrow"},
    "tools.score.model": {"transformers"},
    "tools.score.texts": {"jinja2", "transformers"},
}

# The same for what only a checkout has, by the names under which it is imported.
OF_CHECKOUTS = {
    "benchmarks.bench": set(),
    "benchmarks.bench.adapters": {"datasets", "tokenizers", "transformers", "trl"},
    "benchmarks.bench.checkouts": {"typing_extensions"},
    "benchmarks.commands": {"typer"},
    "benchmarks.plots": {"matplotlib"},
    "examples.demo": {"benchmarks"},
    "examples.demo.__main__": {"rich", "typer"},
    "examples.demo.figure": {"matplotlib"},
    "examples.demo.policy": {"transformers"},
    "examples.demo.report": {"rich"},
}

PUBLIC = [
    "Contiguous",
    "Head",
    "Kept",
    "LoRA",
    "LogitlessError",
    "Logits",
    "Loss",
    "Metrics",
    "Objective",
    "PolicyHead",
    "Preference",
    "Rows",
    "Teacher",
    "TokenStats",
    "VocabShard",
    "Zigzag",
    "defer",
    "estimate",
    "explain",
    "install",
    "logprobs",
    "policy_loss",
    "status",
    "uninstall",
]

MODULES = sorted(PACKAGE.rglob("*.py"))
ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks/bench", "benchmarks/plots", "examples/demo")
OTHERS = sorted([ROOT / "benchmarks/commands.py", *(path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))])
"""Packages of a checkout that are not in the wheel."""


def dotted(path: Path) -> str:
    """``backends/triton/__init__.py`` becomes ``backends.triton``; the package itself is ``""``."""
    parts = path.relative_to(PACKAGE if PACKAGE in path.parents else ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Every dotted name that the file imports, at any depth, relative ones resolved."""
    here = dotted(path).split(".") if dotted(path) else []
    package = ["logitless", *(here if path.name == "__init__.py" else here[:-1])]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{name}.{alias.name}"
                yield whole if _is_module(whole) else name


def _is_module(name: str) -> bool:
    parts = name.split(".")
    place = PACKAGE.parent.joinpath(*parts)
    return parts[0] == "logitless" and (place.with_suffix(".py").exists() or (place / "__init__.py").exists())


def ids(paths: list[Path]) -> list[str]:
    return [dotted(path) or "logitless" for path in paths]


def test_there_is_something_to_check():
    found = {dotted(path) for path in MODULES}
    assert {"errors", "spec", "rows.rows", "score", "backends.triton.kernels"} <= found
    found = set(imports(PACKAGE / "passes/scoring.py"))
    assert {"torch", "logitless.call", "logitless.backends.contract", "logitless.errors"} <= found


def own_imports(path: Path) -> set[str]:
    """The modules of the package that the file imports; a package stands for its ``__init__``."""
    names = {name.removeprefix("logitless").removeprefix(".") for name in imports(path) if _is_ours(name)}
    return names - {dotted(path)}


def _is_ours(name: str) -> bool:
    return name.split(".")[0] == "logitless"


def test_the_order_names_what_is_there():
    there = {dotted(path).split(".")[0] for path in MODULES}
    assert there == set(ORDER), f"put into ORDER: {there - set(ORDER)}; take out: {set(ORDER) - there}"
    flat = [path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("_")]
    assert len(flat) <= 12, f"a folder would say more than one more flat file: {flat}"


@pytest.mark.parametrize("path", MODULES, ids=ids(MODULES))
def test_imports_go_down(path):
    module = dotted(path)
    here = ORDER.index(module.split(".")[0])
    for name in own_imports(path):
        # Within a folder, files import each other; the next test says that they do so in one direction.
        there = ORDER.index(name.split(".")[0])
        assert there < here or (there == here and module), f"{module or 'logitless'} imports {name}, not before it"


def test_imports_have_no_cycles():
    """Not at any depth, imports inside functions included; a folder's ``__init__`` may gather its files."""
    graph = {dotted(path): own_imports(path) for path in MODULES}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"cycle: {' -> '.join([*way[way.index(module) :], module])}"
        if module in done:
            return
        for name in sorted(graph[module]):
            visit(name, (*way, module))
        done.add(module)

    for module in sorted(graph):
        visit(module, ())


@pytest.mark.parametrize("path", MODULES, ids=ids(MODULES))
def test_third_parties_only_where_they_belong(path):
    module = dotted(path)
    allowed = {"torch", "logitless"}
    for place, names in THIRD_PARTY.items():
        if module == place or module.startswith(f"{place}."):
            allowed |= names
    found = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names)
    assert found <= allowed, f"{module} imports {sorted(found - allowed)}"


@pytest.mark.parametrize("path", OTHERS, ids=ids(OTHERS))
def test_packages_of_a_checkout_import_what_they_may(path):
    """The benchmarks import no example, and ``benchmarks.bench`` needs torch alone."""
    module = dotted(path)
    allowed = {"torch", "logitless", module.split(".")[0]}
    for place, names in OF_CHECKOUTS.items():
        if module == place or module.startswith(f"{place}."):
            allowed |= names
    found = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names)
    assert found <= allowed, f"{module} imports {sorted(found - allowed)}"


def test_nothing_in_the_wheel_imports_what_only_a_checkout_has():
    found = {name.split(".")[0] for path in MODULES for name in imports(path)}
    assert "torch" in found
    assert not found & {"benchmarks", "examples", "tests"}


def test_public_names():
    assert logitless.__all__ == PUBLIC
    shown = [name for name in dir(logitless) if not name.startswith("_")]
    assert shown == sorted([*PUBLIC, "adapters", "objectives", "provider"])
    assert all(hasattr(logitless, name) for name in dir(logitless))
    assert sorted(logitless.__all__) == logitless.__all__
    assert all(getattr(logitless, name).__module__.startswith("logitless.") for name in PUBLIC)


def test_names_are_loaded_from_where_type_checkers_look_for_them():
    """They read the imports that never run; a name that is missing there, or elsewhere, is an error in editors."""
    (guarded,) = [node for node in ast.parse((PACKAGE / "__init__.py").read_text()).body if isinstance(node, ast.If)]
    read = {alias.name: node.module for node in guarded.body for alias in node.names if node.module != "logitless"}
    assert read == {name: f"logitless.{home}" for name, home in logitless._HOME.items()}
    assert set(read) == set(PUBLIC)
    # A file of the package under the name of a function would take the function's place when it is imported.
    assert not set(PUBLIC) & {path.stem for path in PACKAGE.iterdir()}
    assert set(PUBLIC) <= set(dir(logitless))
    assert not hasattr(logitless, "nothing")


# An import that needs torch alone. The blocked packages look as if they were not installed: no finder finds them.

OPTIONAL = ["triton", "numpy", "rich", "typer", "matplotlib", "hypothesis"]

BLOCKER = f"""
import sys

BLOCKED = {OPTIONAL!r}

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in BLOCKED else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""

BLOCKED_IS_BLOCKED = """
import importlib.util
for name in BLOCKED:
    assert importlib.util.find_spec(name) is None, name
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} was imported")
print("blocked", *BLOCKED)
"""

USE_TORCH_ALONE = """
import math
import torch
import logitless as ll

logits = torch.zeros(3, 5, requires_grad=True)
out = ll.logprobs(logits, ll.Rows.packed([[1, 2, 3]], [2]), entropy="grad")
(out.logprob.sum() + out.entropy.sum()).backward()
assert torch.allclose(out.logprob, torch.full((2,), -math.log(5))), out
assert torch.allclose(logits.grad[0], torch.tensor([-0.2, -0.2, 0.8, -0.2, -0.2])), logits.grad
assert not set(BLOCKED) & {name.split(".")[0] for name in sys.modules}
try:
    ll.logprobs(logits, torch.tensor([0, 1, 2]), backend="triton")
except ll.LogitlessError as error:
    print(error)
"""


READ_A_DEFERRED_MODEL = """
import torch
import logitless as ll

model = torch.nn.Sequential()
model.add_module("lm_head", torch.nn.Linear(4, 7))
ll.defer(model, strict=True)
torch.nn.functional.cross_entropy(model(torch.randn(3, 4)), torch.arange(3)).backward()
print(tuple(model.lm_head.weight.grad.shape))
"""


def run_python(program: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_the_blocker_blocks():
    assert run_python(BLOCKER + BLOCKED_IS_BLOCKED) == f"blocked {' '.join(OPTIONAL)}"


def test_the_blocked_packages_are_here_otherwise():
    """Without this, the test above could pass because nothing is installed."""
    for name in OPTIONAL:
        pytest.importorskip(name)


def test_import_and_use_need_torch_alone():
    text = run_python(BLOCKER + USE_TORCH_ALONE)
    assert text == 'backend="triton": Triton is not installed. Install it, or logitless with its extra [triton].'


def test_import_does_not_load_what_it_may_not_need():
    """Nor torch before something is used, so that the command answers --help at once."""
    wanted = [name for name in OPTIONAL if name != "numpy"]
    loaded = f"print('loaded', *sorted({{'torch', *{wanted!r}}} & set(sys.modules)))"
    told = run_python(f"import sys, logitless; {loaded}; logitless.logprobs; {loaded}")
    assert told.splitlines() == ["loaded", "loaded torch"]


# Sizes. A public docstring has its arguments and an example, so a function is measured without it.

MOST_LINES, MOST_FUNCTION_LINES = 500, 70


@pytest.mark.parametrize("path", [*MODULES, *OTHERS], ids=ids([*MODULES, *OTHERS]))
def test_files_are_short(path):
    lines = len(path.read_text().splitlines())
    assert lines < MOST_LINES, f"{dotted(path)} has {lines} lines"


@pytest.mark.parametrize("path", [*MODULES, *OTHERS], ids=ids([*MODULES, *OTHERS]))
def test_functions_are_short(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node, clean=False) is not None:
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            assert lines < MOST_FUNCTION_LINES, f"{dotted(path)}.{node.name} has {lines} lines"


def test_readings_of_deferred_logits_are_found_by_whoever_imports_the_package_alone():
    """Their module is imported by the first reading; other tests import it before."""
    assert run_python(READ_A_DEFERRED_MODEL) == "(7, 4)"
