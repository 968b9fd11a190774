"""Drift of the hosts from our records: ``make drift`` prints, for each, the newest version and the newest that was run.
Of the rollout engines, which have no records, it prints the newest version and those that the plug-in knows.

    make drift                        releases
    make drift LOGITLESS_HOSTS=F      also the commits of the checkouts in the folder F

Releases come from the data of the package index that pip is configured for, ``/pypi/NAME/json``: the pip of an older
Python hides versions that want a newer one; and from the tags of the repositories, which some hosts are released by
alone, and others earlier. The newer of both counts. The exit status is 1 where something has drifted: run ``make
hosts`` on it, and then widen the adapter's versions. It is 2 where nothing has, but a source could not be reached.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from hosts import checkouts, commit, named  # noqa: E402
from matrix import RECORDS  # noqa: E402
from repositories import RELEASE, REPOSITORIES, UnreachableError, newest_tag, numbers  # noqa: E402

from logitless.adapters import HOSTS  # noqa: E402
from logitless.adapters.signatures import covers  # noqa: E402
from logitless.engines import PARTS as ENGINES  # noqa: E402

WITHOUT_INDEX = ("miles", "nemo_rl", "prime_rl", "slime")
"""Hosts that the index does not have: under the names of some, it has other packages."""


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
    try:
        with urllib.request.urlopen(f"{address}/pypi/{name}/json", timeout=60) as answer:
            files: dict[str, list[dict[str, Any]]] = json.load(answer)["releases"]
    except (urllib.error.URLError, TimeoutError) as error:
        raise UnreachableError(f"the index has no answer on {name}: {error}") from error
    there = [v for v, of in files.items() if RELEASE.fullmatch(v) and of and not all(f.get("yanked") for f in of)]
    return max(there, key=numbers, default=None)


def released(host: str, address: str) -> tuple[str | None, list[str]]:
    """The newest release that the index or the repository has, and which of them could not be asked."""
    asked: list[Any] = []
    if host not in WITHOUT_INDEX:
        module = importlib.import_module(f"logitless.adapters.{host}").HOST
        asked.append(lambda: newest(module.distribution or module.package, address))
    if host in REPOSITORIES:
        asked.append(lambda: newest_tag(*REPOSITORIES[host]))
    found, unreachable = [], []
    for ask in asked:
        try:
            found.append(ask())
        except UnreachableError as error:
            unreachable.append(str(error))
    return max(filter(None, found), key=numbers, default=None), unreachable


def last_run(host: str, records: list[dict[str, Any]]) -> str:
    """The newest release of the host that was run: installed, or a folder of that name. A branch has no release."""
    texts = [x["version"] if x["on"] == "installed" else x["on"] for x in records if x["host"] == host]
    return max((text for text in texts if RELEASE.fullmatch(text or "")), key=numbers, default="none")


def drift_of_version(host: str, version: str | None, records: list[dict[str, Any]]) -> str | None:
    """What is to be done about a release, or None."""
    last = last_run(host, records)
    if version is None or (last != "none" and numbers(last) >= numbers(version)):
        return None
    known = importlib.import_module(f"logitless.adapters.{host}").HOST.versions
    outside = "" if covers(known, version) else f", which the adapter's versions ({', '.join(known)}) leave out"
    return f"{version} is out{outside}; run on: {last}"


def drift_of_engine(engine: str, address: str) -> tuple[str | None, str, list[str], list[str]]:
    """The newest release of a rollout engine, the last one that we know, what to do, and who could not be asked."""
    known = importlib.import_module(f"logitless.engines.{engine}").HOST.versions
    try:
        version = newest(engine, address)
    except UnreachableError as error:
        return None, known[-1], [], [str(error)]
    ours = version is None or covers(known, version)
    found = [] if ours else [f"{version} is out, which the plug-in's versions ({', '.join(known)}) leave out"]
    return version, known[-1], found, []


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
    records, address = [json.loads(x) for x in RECORDS.read_text().splitlines()], index_address()
    drifted = unasked = 0
    print(f"{'host':<14}{'newest':<12}{'run on':<12}", flush=True)
    for name in (*HOSTS, *ENGINES):
        if name in ENGINES:
            version, run, found, unreachable = drift_of_engine(name, address)
        else:
            version, unreachable = released(name, address)
            run = last_run(name, records)
            lines = [drift_of_version(name, version, records)]
            lines += [drift_of_checkout(name, folder, records) for folder in checkouts(name)]
            found = [line for line in lines if line is not None]
        drifted += len(found)
        unasked += len(unreachable)
        say = found or ["as recorded" if version else "no release found"]
        say += [f"UNREACHABLE: {why}" for why in unreachable]
        print(f"{name:<14}{version or '-':<12}{run:<12}{'; '.join(say)}", flush=True)
    return 1 if drifted else 2 if unasked else 0


if __name__ == "__main__":
    sys.exit(main())
