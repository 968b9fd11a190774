"""Launches of kernels that were compiled before: what they are told apart by, and that Triton tells apart no more."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitless.backends.triton.launching import Ready, kind

ROOT = Path(__file__).parents[2]


class Kernel:
    """A stand-in for a kernel of Triton's, with one constant among its parameters."""

    def __init__(self) -> None:
        self.params = [SimpleNamespace(name=x, is_constexpr=x.isupper()) for x in ("x", "rows", "scale", "BLOCK")]
        self.seen: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(**arguments: Any) -> Any:
            self.seen.append(("compiled", grid, arguments))
            return self.again

        return launch

    @property
    def again(self) -> Any:
        def at(grid: tuple[int, ...]):
            return lambda *values: self.seen.append(("again", grid, values))

        return _At(at)


class _At:
    def __init__(self, at: Any) -> None:
        self.at = at

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.at(grid)


FIRST = {"x": torch.zeros(8), "rows": 48, "scale": 0.5, "BLOCK": 32, "num_warps": 4}


def launched(*calls: dict[str, Any]) -> list[str]:
    """Which of these launches compiled."""
    kernel = Kernel()
    ready = Ready(kernel)
    for i, arguments in enumerate(calls):
        ready.launch(i + 1, 0, arguments)
    assert [grid[0] for _, grid, _ in kernel.seen] == list(range(1, len(calls) + 1))
    return [how for how, *_ in kernel.seen]


SAME = {
    "other numbers": {"rows": 64, "scale": 7.0},
    "another tensor": {"x": torch.ones(5)},
    "another order": {"num_warps": 4, "BLOCK": 32},
}
OTHERS = {
    "not a multiple of 16": {"rows": 47},
    "one": {"rows": 1},
    "64 bits": {"rows": 1 << 33},
    "none": {"x": None},
    "dtype": {"x": torch.zeros(8, dtype=torch.bfloat16)},
    "alignment": {"x": torch.zeros(8)[1:]},
    "a constant": {"BLOCK": 64},
    "an option": {"num_warps": 8},
    "one more option": {"num_stages": 3},
    "a flag for a number": {"rows": True},
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_one_kind_is_compiled_once(change: dict):
    assert launched(FIRST, {**change, **{k: x for k, x in FIRST.items() if k not in change}}) == ["compiled", "again"]


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_another_kind_is_compiled_anew(change: dict):
    other = {**FIRST, **change}
    assert launched(FIRST, other, FIRST, other) == ["compiled", "compiled", "again", "again"]


def test_values_are_handed_on_in_the_order_of_the_parameters():
    kernel = Kernel()
    ready = Ready(kernel)
    for _ in range(2):
        ready.launch(3, 0, dict(reversed(FIRST.items())))
    assert kernel.seen[1] == ("again", (3, 1, 1), (FIRST["x"], 48, 0.5, 32))


def test_other_devices_have_kernels_of_their_own():
    kernel = Kernel()
    ready = Ready(kernel)
    for device in (0, 1, 0, 1):
        ready.launch(1, device, FIRST)
    assert [how for how, *_ in kernel.seen] == ["compiled", "compiled", "again", "again"]


def test_a_parameter_that_is_missing_is_named():
    with pytest.raises(KeyError, match="scale"):
        launched({name: x for name, x in FIRST.items() if name != "scale"})


@pytest.mark.parametrize("bits", [31, 63])
def test_a_negative_number_has_room_for_one_more(bits: int):
    """As Triton has it: -2^31 takes 32 bits and 2^31 takes 64."""
    assert kind(-(2**bits)) != kind(2**bits)
    assert kind(-(2**bits)) == kind(16 - 2**bits) == kind(2**bits - 16)


def test_kinds_of_descriptors():
    def described(block: list[int], dtype: torch.dtype) -> Any:
        return SimpleNamespace(base=torch.zeros(1, dtype=dtype), block_shape=block)

    half = described([16, 32], torch.bfloat16)
    assert kind(half) == kind(described([16, 32], torch.bfloat16))
    assert kind(half) != kind(described([16, 64], torch.bfloat16))
    assert kind(half) != kind(described([16, 32], torch.float16))


TRITONS = """
import itertools, sys, torch
from triton.runtime import driver
from benchmarks import cards
from logitless.backends.triton.launching import Ready

driver.set_active(cards.Elsewhere(cards.TARGETS["sm_90"]))
memory = torch.zeros(64, dtype=torch.int64)
pointers = [memory.view(dtype)[k:] for dtype in (torch.bfloat16, torch.float32, torch.int64) for k in (0, 1, 2, 4, 8)]
numbers = [0, 1, 2, 8, 15, 16, 17, 32, -16, 2**31 - 1, 2**31, 2**31 + 16, 2**40, 2**63]
numbers += [-(2**31), -(2**31) - 16, -(2**63)]
checked, differ = 0, 0
for launch in {x.kernel: x for x in cards.launches()}.values():
    function = getattr(cards.importlib.import_module(f"logitless.backends.triton.{launch.module}"), launch.kernel)
    ready, (*_, binder), found = Ready(function), function.device_caches[0], {}
    options = {name: x for name, x in launch.arguments.items() if name not in ready.names}
    assert not set(ready.names) - set(launch.arguments), (launch.kernel, "a parameter is missing")
    assert set(options) <= {"num_warps", "num_stages", "maxnreg", "enable_fp_fusion"}, (launch.kernel, options)
    base = {name: memory if isinstance(x, torch.Tensor) else x for name, x in launch.arguments.items()}
    for name, constant in zip(ready.names, ready.constant):
        x = base[name]
        if constant or not isinstance(x, (int, float, torch.Tensor)):
            continue
        for value in [None, *pointers] if isinstance(x, torch.Tensor) else [0.5, *numbers]:
            arguments = base | {name: value}
            _, theirs, rest = binder(*(arguments[n] for n in ready.names), **options)
            ours = (*ready.kinds([arguments[n] for n in ready.names]), *ready.options(arguments))
            theirs = str(theirs), str(rest)
            assert found.setdefault(ours, theirs) == theirs, (launch.kernel, name, value)
            checked += 1
    differ += len(set(found.values())) > 1
print(checked, differ)
"""


@pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")
def test_tritons_own_kinds_are_no_finer(tmp_path):
    """For every kernel, with every kind of pointer and number in the place of each argument: what is one kind here has
    one specialisation there."""
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT, ROOT / "benchmarks")))
    names = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"} | names
    done = subprocess.run([sys.executable, "-c", TRITONS], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    checked, differ = map(int, done.stdout.split())
    assert checked > 1000
    # Of nearly all kernels Triton makes several.
    assert differ > 20
