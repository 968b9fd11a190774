"""What a run of the matrix writes down, from every process of it: differences, calls and versions, one line each.

Nothing happens unless ``LOGITLESS_RECORD`` names a file: matrix.py sets it.
"""

from __future__ import annotations

import json
import os
from typing import Any

from logitless.adapters import patching

FILE = "LOGITLESS_RECORD"


def _write(**line: Any) -> None:
    # Short lines that are appended by one call do not mix.
    with open(os.environ[FILE], "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def start() -> None:
    """Watch the tolerance rule, the counters and what is installed, in this process."""
    if not os.environ.get(FILE):
        return
    import close

    if close.watchers:
        return
    close.watchers.append(lambda kind, ours, theirs, dtype: _write(kind=kind, ours=ours, theirs=theirs, dtype=dtype))
    called, passed_on, resolve = patching.Counter.called, patching.Counter.passed_on, patching._resolve_all

    def count(self: Any) -> None:
        _write(calls=1)
        called(self)

    def pass_on(self: Any, why: str) -> None:
        _write(passed_on=why)
        passed_on(self, why)

    def resolve_all(host: Any, *args: Any) -> Any:
        made = resolve(host, *args)
        _write(host=host.name, version=made.version, notes=list(made.notes))
        return made

    patching.Counter.called, patching.Counter.passed_on, patching._resolve_all = count, pass_on, resolve_all
