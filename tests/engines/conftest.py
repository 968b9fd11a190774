"""Nothing stays installed, and nothing is asked for by the environment of whoever runs the tests."""

from __future__ import annotations

import pytest

import logitless
from logitless.adapters.patching import uninstall_host
from logitless.engines import VARIABLE


@pytest.fixture(autouse=True)
def nothing_stays_installed(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not logitless.status().hosts, "installed by an earlier test"
    yield
    for entry in logitless.status().hosts:
        uninstall_host(entry.host)
