"""Shared by the tests of estimate records and those that build on them."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from logitless.machine import H200, Machine


def without_epilogues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates are those of an H200 on which product and softmax are apart, and products of dZ the library's."""
    _take(replace(H200, epilogues=False, dz_programs=0), monkeypatch)


def without_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates are those of an H200 whose products are not made by turns."""
    _take(replace(H200, turns=False), monkeypatch)


def _take(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["logitless.memory.estimate"], "H200", machine)
    monkeypatch.setattr(Machine, "of", staticmethod(lambda device: machine))
