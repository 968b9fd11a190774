"""What the adapters' tests share: nothing stays installed, and a made-up host to install into."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import logitless
from logitless.adapters.patching import uninstall_host

# Packages for the tests to import, not tests.
collect_ignore_glob = ["doubles/*", "conftest.py"]


@pytest.fixture(autouse=True)
def nothing_stays_installed():
    """Whatever a test installed is put back, and it is an error if that cannot be done."""
    assert not logitless.status().hosts, "installed by an earlier test"
    yield
    for entry in logitless.status().hosts:
        uninstall_host(entry.host)


FAKE = {
    "fakehost": "__version__ = '2.5.1'",
    "fakehost.maths": """
def score(logits, index, temperature=1.0):
    return ("host", logits, index, temperature)

def mean(x, *, scale: float = 2.0) -> float:
    return x * scale

class Trainer:
    def step(self, batch, lr=0.1):
        return ("host step", batch, lr)

    @staticmethod
    def weigh(x):
        return ("host weigh", x)

    @classmethod
    def build(cls, size):
        return (cls.__name__, size)

class Kin(Trainer):
    pass
""",
    "fakehost.user": "from fakehost.maths import score\n\ndef use(x):\n    return score(x, 0)\n",
    "fakehost.late": "from fakehost.maths import score\n",
}


@pytest.fixture
def fakehost(monkeypatch):
    """A package of four modules; ``fakehost.late`` is imported by whoever calls the result."""
    modules = {name: ModuleType(name) for name in FAKE}
    modules["fakehost"].__path__ = []  # a package

    def load(name: str) -> ModuleType:
        monkeypatch.setitem(sys.modules, name, modules[name])
        exec(FAKE[name], vars(modules[name]))
        return modules[name]

    for name in ("fakehost", "fakehost.maths", "fakehost.user"):
        load(name)
    return load
