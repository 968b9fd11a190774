"""What every test gets: its own seed, poisoned uninitialised memory, a device, and real ranks on request."""

from __future__ import annotations

import gc
import os
import sys
import zlib
from dataclasses import replace

import interpreter
import poison
import pytest
import torch
import warp_groups
from hypothesis import settings

if not torch.cuda.is_available():
    # Read by Triton when it is first imported, which the library leaves to the first use of its kernels.
    os.environ["TRITON_INTERPRET"] = "1"
    interpreter.quicken()

poison.install()

# The same examples on every run and no wall clock in a verdict: a busy machine must not turn a test red.
settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")


# Files of one name cannot all be searched for doctests.
collect_ignore_glob = ["conftest.py", "*/conftest.py"]


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="device of the tests that take the `device` fixture")
    parser.addoption("--only-device", action="store_true", help="no tests but those")


def pytest_collection_modifyitems(config, items) -> None:
    """Torch before 2.11 cannot trace us: there is eager mode alone, as docs/reliability.md says.

    Where there is a GPU the kernels are compiled, and tests of kernels on CPU tensors have nothing to run them.
    """
    if config.getoption("--only-device"):
        # Those of test_cuda.py and its kin need no fixture to run on a GPU.
        items[:] = [
            x for x in items if "device" in getattr(x, "fixturenames", ()) or x.path.name.startswith("test_cuda")
        ]
    for item in items:
        kernels = any(word in item.name for word in ("triton", "interpreter"))
        if torch.cuda.is_available() and kernels and "device" not in item.fixturenames:
            item.add_marker(pytest.mark.skip(reason="runs in Triton's interpreter, on machines without a GPU"))
        if torch.__version__ < (2, 11) and "compiled" in item.name:
            item.add_marker(pytest.mark.skip(reason="torch.compile from torch 2.11 on"))


def pytest_generate_tests(metafunc) -> None:
    """Products at once, and by turns; in the interpreter, whose language has no groups of warps, these are threads."""
    if "turns" in metafunc.fixturenames:
        metafunc.parametrize("turns", ["at once", "by turns"], indirect=True)


@pytest.fixture
def turns(request, monkeypatch) -> bool:
    """Whether the machine makes products by turns, in this test."""
    from logitless.machine import Machine

    asked, of = request.param == "by turns", Machine.of
    monkeypatch.setattr(Machine, "of", staticmethod(lambda x: replace(of(x), turns=asked)))
    if asked and not torch.cuda.is_available():
        warp_groups.simulate(monkeypatch)
    return asked


@pytest.fixture
def device(request) -> torch.device:
    """The device named on the command line; CPU unless told otherwise."""
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def seed(request) -> None:
    """A seed of its own for every test and parameter, the same on every run, and in whatever folder the test lies."""
    path, _, test = request.node.nodeid.partition("::")
    torch.manual_seed(zlib.crc32(f"tests/{path.rpartition('/')[2]}::{test}".encode()))


@pytest.fixture(scope="session")
def numbers_of_modules() -> set[int]:
    """How many modules there were whenever what they hold was set aside."""
    return set()


@pytest.fixture(autouse=True)
def what_is_there_stays(numbers_of_modules: set[int]) -> None:
    """Garbage is collected before every measurement of memory; not in torch and all else that is imported by then."""
    if len(sys.modules) not in numbers_of_modules:
        numbers_of_modules.add(len(sys.modules))
        gc.collect()
        gc.freeze()


@pytest.fixture
def interpreted() -> None:
    """For tests of kernels on CPU tensors."""
    if torch.cuda.is_available():
        pytest.skip("runs in Triton's interpreter, on machines without a GPU")


@pytest.fixture
def one_thread():
    """For tests of small tensors, whose threads would spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def ranks():
    """``ranks(function, world, *args)``: see :func:`ranks.run_ranks`. The processes live as long as the session."""
    from ranks import close_ranks, run_ranks

    yield run_ranks
    close_ranks()


@pytest.fixture
def no_sync():
    """Any call that waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")
