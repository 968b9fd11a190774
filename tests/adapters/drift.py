"""Drift of the hosts from our records: ``make drift`` prints, for each, the newest version and the newest that was run.

    make drift                        versions from the package index
    make drift LOGITLESS_HOSTS=F      also the commits of the checkouts in the folder F

Versions come from the index's own data: the index's ``/pypi/NAME/json``, of the index that pip is configured for. The
pip of an older Python hides versions that want a newer one. Hosts that no index has are told by checkouts alone. The
exit status is 1 where something has drifted: run ``make hosts`` on it, and then widen the adapter's versions.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from hosts import checkouts, commit, named  # noqa: E402
from matrix import RECORDS  # noqa: E402

from logitless.adapters import HOSTS  # noqa: E402
from logitless.adapters.signatures import covers  # noqa: E402

UNLISTED = ("miles", "nemo_rl", "prime_rl", "slime")
"""Hosts that the index does not have: under the names of some, it has other packages."""

RELEASE = re.compile(r"\d+(\.\d+)*(\.post\d+)?")


def index_address() -> str:
    """The address of the index's data, from pip's configuration, or else the one that pip itself falls back on."""
    configured = os.environ.get("PIP_INDEX_URL") or _configured()
    if not configured:
        from pip._internal.models.index import PyPI

        configured = PyPI.simple_url
    return configured.rstrip("/").removesuffix("/simple")


def _configured() -> str | None:
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def newest(name: str, address: str) -> str | None:
    """The newest release of a package that was not withdrawn; None where the index has none."""
    with urllib.request.urlopen(f"{address}/pypi/{name}/json", timeout=60) as answer:
        files: dict[str, list[dict[str, Any]]] = json.load(answer)["releases"]
    there = [v for v, of in files.items() if RELEASE.fullmatch(v) and of and not all(f.get("yanked") for f in of)]
    return max(there, key=_numbers, default=None)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def drift_of_version(host: str, released: str | None, records: list[dict[str, Any]]) -> str | None:
    """What is to be done about a release, or None."""
    known = importlib.import_module(f"logitless.adapters.{host}").HOST.versions
    run = {x["version"] for x in records if x["host"] == host and RELEASE.fullmatch(x["version"] or "")}
    run |= {x["on"] for x in records if x["host"] == host and RELEASE.fullmatch(x["on"])}
    last = max(run, key=_numbers, default="none")
    if released is None or any(_numbers(v) >= _numbers(released) for v in run):
        return None
    outside = "" if covers(known, released) else f", which the adapter's versions ({', '.join(known)}) leave out"
    return f"{released} is out{outside}; run on: {last}"


def drift_of_checkout(host: str, folder: Path, records: list[dict[str, Any]]) -> str | None:
    """Whether a checkout is at another commit than its record."""
    here, name = commit(folder), named(host, folder)
    recorded = [x["commit"] for x in records if (x["host"], x["on"]) == (host, name)]
    if not recorded:
        return f"{name} has no record"
    same = here is None or recorded[-1] is None or here.startswith(recorded[-1]) or recorded[-1].startswith(here)
    return None if same else f"{name} is at {here}; run on: {recorded[-1]}"


def main() -> int:
    records, address, drifted = [json.loads(x) for x in RECORDS.read_text().splitlines()], index_address(), 0
    for host in HOSTS:
        module = importlib.import_module(f"logitless.adapters.{host}").HOST
        lines = [drift_of_checkout(host, folder, records) for folder in checkouts(host)]
        if host not in UNLISTED:
            lines.append(drift_of_version(host, newest(module.distribution or module.package, address), records))
        found = [line for line in lines if line is not None]
        drifted += len(found)
        where = "no index has it" if host in UNLISTED and not checkouts(host) else "as recorded"
        for line in found or [where]:
            print(f"{host}: {line}", flush=True)
    return 1 if drifted else 0


if __name__ == "__main__":
    sys.exit(main())
