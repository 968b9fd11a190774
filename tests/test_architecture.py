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

# Lowest first. A module imports only from layers below its own; in the last layer, from its own too.
LAYERS = [
    ["errors"],
    ["collectives"],
    ["spec"],
    ["samples", "layouts", "exchange"],
    ["rows", "softmax"],
    ["backends.contract", "results"],
    ["objectives.inputs", "objectives.metrics", "objectives.reduction", "objectives.values", "objectives.checks"],
    ["objectives.policy", "objectives.corrections", "objectives.kl", "objectives.advantages"],
    ["objectives.objective"],
    ["objectives"],
    ["backends.reference"],
    ["backends.tiled", "backends.triton"],
    ["backends"],
    ["kept", "gemm", "tiles"],
    ["checks", "sweep", "plans"],
    ["frozen", "chunks", "linear_call"],
    ["linear_rows", "loss_plans", "footprints"],
    ["ops", "linear", "one_pass", "footprints_plain", "footprints_linear"],
    ["policy_head", "policy_loss", "footprints_loss"],
    ["explain", "estimate"],
    ["adapters.audit"],
    ["adapters.patching"],
    ["adapters.shards"],
    ["adapters.held", "adapters.packs"],
    ["adapters.transformers"],
    ["adapters"],
    [""],
    ["bench", "plots", "demo", "presets", "model_plan", "score", "doctor", "cli", "__main__"],
]

# Besides the standard library, torch and the package itself. Nothing else is imported anywhere: no framework.
THIRD_PARTY = {
    "adapters.megatron": {"megatron"},
    "adapters.skyrl": {"megatron"},
    "adapters.slime": {"megatron"},
    "adapters.verl": {"megatron"},
    "backends.triton": {"triton"},
    "plots": {"matplotlib"},
    "cli": {"rich", "typer"},
    "demo.figure": {"matplotlib"},
    "demo.policy": {"transformers"},
    "demo.report": {"rich"},
    "score.files": {"pyarrow"},
    "score.model": {"transformers"},
    "bench": {"rich", "typer"},
    "bench.adapters": {"datasets", "tokenizers", "transformers", "trl"},
}

PUBLIC = [
    "Contiguous",
    "Head",
    "Kept",
    "LogitlessError",
    "Metrics",
    "Objective",
    "PolicyHead",
    "Rows",
    "TokenStats",
    "VocabShard",
    "Zigzag",
    "choose_backend",
    "count_over",
    "estimate",
    "explain",
    "install",
    "linear_logprobs",
    "linear_policy_loss",
    "logprobs",
    "shard_of",
    "status",
    "uninstall",
]

MODULES = sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    """``backends/triton/__init__.py`` becomes ``backends.triton``; the package itself is ``""``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> int:
    """The layer of the longest listed name that is the module or a package around it."""
    listed = {name: height for height, names in enumerate(LAYERS) for name in names}
    if module in listed:
        return listed[module]
    parents = [name for name in listed if name and name != "backends" and module.startswith(f"{name}.")]
    assert parents, f"{module} is in no layer: put it into LAYERS"
    return listed[max(parents, key=len)]


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
    assert {"errors", "spec", "rows", "ops", "backends.triton.kernels"} <= {dotted(path) for path in MODULES}
    found = set(imports(PACKAGE / "ops.py"))
    assert {"torch", "logitless.backends", "logitless.backends.contract", "logitless.errors"} <= found


@pytest.mark.parametrize("path", MODULES, ids=ids(MODULES))
def test_imports_go_down(path):
    module = dotted(path)
    for name in imports(path):
        if name.split(".")[0] != "logitless":
            continue
        target = name.removeprefix("logitless").removeprefix(".")
        same_package = layer(module) == layer(target) and module.split(".")[:2] == target.split(".")[:2]
        allowed = layer(target) < layer(module) or same_package or layer(module) == layer(target) == len(LAYERS) - 1
        assert allowed, f"{module or 'logitless'} imports {name}, which is not below it"


@pytest.mark.parametrize("path", MODULES, ids=ids(MODULES))
def test_third_parties_only_where_they_belong(path):
    module = dotted(path)
    allowed = {"torch", "logitless"}
    for place, names in THIRD_PARTY.items():
        if module == place or module.startswith(f"{place}."):
            allowed |= names
    found = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names)
    assert found <= allowed, f"{module} imports {sorted(found - allowed)}"


def test_public_names():
    assert logitless.__all__ == PUBLIC
    assert sorted(logitless.__all__) == logitless.__all__
    assert all(getattr(logitless, name).__module__.startswith("logitless.") for name in PUBLIC)


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
    assert text == 'backend="triton": Triton is not installed. Run pip install "logitless[triton]".'


def test_import_does_not_load_what_it_may_not_need():
    wanted = [name for name in OPTIONAL if name != "numpy"]
    program = f"import sys, logitless; print(*sorted(set({wanted!r}) & set(sys.modules)))"
    assert run_python(program) == ""


# Sizes. A public docstring has its arguments and an example, so a function is measured without it.

MOST_LINES, MOST_FUNCTION_LINES = 500, 70


@pytest.mark.parametrize("path", MODULES, ids=ids(MODULES))
def test_files_are_short(path):
    lines = len(path.read_text().splitlines())
    assert lines < MOST_LINES, f"{dotted(path)} has {lines} lines"


@pytest.mark.parametrize("path", MODULES, ids=ids(MODULES))
def test_functions_are_short(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node, clean=False) is not None:
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            assert lines < MOST_FUNCTION_LINES, f"{dotted(path)}.{node.name} has {lines} lines"
