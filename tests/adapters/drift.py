"""Drift of the hosts from our records: ``make drift`` prints, for each, the newest version and the newest that was run.

    make drift                        releases
    make drift LOGITLESS_HOSTS=F      also the commits of the checkouts in the folder F

Releases come from the data of the package index that pip is configured for, ``/pypi/NAME/json``: the pip of an older
Python hides versions that want a newer one. Those of hosts that no index has are the tags of their repositories, where
git can reach them. The exit status is 1 where something has drifted: run ``make hosts`` on it, and then widen the
adapter's versions.
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

REPOSITORIES = {
    "miles": "https://github.com/radixark/miles",
    "nemo_rl": "https://github.com/NVIDIA-NeMo/RL",
    "prime_rl": "https://github.com/PrimeIntellect-ai/prime-rl",
    "slime": "https://github.com/THUDM/slime",
}
"""Hosts that the index does not have: under the names of some, it has other packages."""

RELEASE = re.compile(r"\d+(\.\d+)*(\.post\d+)?")


def index_address() -> str:
    """The address of the index's data, from pip's configuration, or else the one that pip itself falls back on."""
    configured = os.environ.get("PIP_INDEX_URL") or _configured()
    if not configured:
        # In a process of its own: pip's imports replace distutils.
        command = [sys.executable, "-c", "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"]
        configured = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
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


def newest_tag(repository: str) -> str | None:
    """The newest release among the tags of a repository, or None where git finds none or does not reach it."""
    command = ["git", "ls-remote", "--tags", "--refs", repository]
    quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return None
    there = [line.rpartition("/")[2].removeprefix("v") for line in done.stdout.splitlines()]
    return max(filter(RELEASE.fullmatch, there), key=_numbers, default=None)


def last_run(host: str, records: list[dict[str, Any]]) -> str:
    """The newest release of the host that was run: installed, or a folder of that name. A branch has no release."""
    texts = [x["version"] if x["on"] == "installed" else x["on"] for x in records if x["host"] == host]
    return max((text for text in texts if RELEASE.fullmatch(text or "")), key=_numbers, default="none")


def drift_of_version(host: str, released: str | None, records: list[dict[str, Any]]) -> str | None:
    """What is to be done about a release, or None."""
    last = last_run(host, records)
    if released is None or (last != "none" and _numbers(last) >= _numbers(released)):
        return None
    known = importlib.import_module(f"logitless.adapters.{host}").HOST.versions
    outside = "" if covers(known, released) else f", which the adapter's versions ({', '.join(known)}) leave out"
    return f"{released} is out{outside}; run on: {last}"


def drift_of_checkout(host: str, folder: Path, records: list[dict[str, Any]]) -> str | None:
    """Whether a checkout is at a commit that was not run, or, where it tells no commit, has no record."""
    here, name = commit(folder), named(host, folder)
    recorded = [x for x in records if x["host"] == host and (x["on"] == name or x["commit"])]
    if here is None:
        return None if any(x["on"] == name for x in recorded) else f"{name} has no record"
    run = [x["commit"] for x in recorded if x["commit"]]
    if any(here.startswith(c) or c.startswith(here) for c in run):
        return None
    last = [x["commit"] for x in recorded if x["on"] == name]
    return f"{name} is at {here}; run on: {last[-1]}" if last else f"{name} has no record"


def main() -> int:
    records, address, drifted = [json.loads(x) for x in RECORDS.read_text().splitlines()], index_address(), 0
    print(f"{'host':<14}{'newest':<12}{'run on':<12}", flush=True)
    for host in HOSTS:
        module = importlib.import_module(f"logitless.adapters.{host}").HOST
        if host in REPOSITORIES:
            released = newest_tag(REPOSITORIES[host])
        else:
            released = newest(module.distribution or module.package, address)
        lines = [drift_of_version(host, released, records)]
        lines += [drift_of_checkout(host, folder, records) for folder in checkouts(host)]
        found = [line for line in lines if line is not None]
        drifted += len(found)
        say = "; ".join(found) or ("as recorded" if released else "no release found")
        print(f"{host:<14}{released or '-':<12}{last_run(host, records):<12}{say}", flush=True)
    return 1 if drifted else 0


if __name__ == "__main__":
    sys.exit(main())
