"""One case and one provider, measured in a separate process: if that process dies, the sweep goes on.

    parent    measure_apart(point)  ->  python -m benchmarks.bench.point, the point as JSON on stdin
    child     bounds its memory, runs the case  ->  its record as the last line of stdout

A full GPU raises. A full machine kills some process, and not always the one that asked for too much; so on a CPU the
child may allocate only as much as the point allows, and raises beyond that.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import logitless
from benchmarks.bench.cases import Case
from benchmarks.bench.linear_providers import LINEAR_PROVIDERS
from benchmarks.bench.providers import PROVIDERS, add_peers
from benchmarks.bench.records import Environment, Record, Status
from benchmarks.bench.run import Selection, run

# Torch raises a plain RuntimeError with this word when it cannot allocate on a CPU.
CPU_FULL = "DefaultCPUAllocator"
NO_ROOM = "no room for the inputs, the truth in float64 or the copy that measures bandwidth"


@dataclass(frozen=True)
class Point:
    """The case and provider that one process measures.

    Attributes:
        case: the problem, which runs on the case's device.
        provider: a name in ``PROVIDERS``, or in ``LINEAR_PROVIDERS`` where the case starts from hidden states.
        repeats: timed repeats.
        limit: bytes that the process may allocate on a CPU beyond those it starts with; None for no bound.
        peers: folder of unpacked packages to import peers from.
    """

    case: Case
    provider: str
    repeats: int = 3
    limit: int | None = None
    peers: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Point:
        fields: dict[str, Any] = json.loads(text)
        return Point(Case(**fields.pop("case")), **fields)


def measure_apart(point: Point, environment: Environment) -> Record:
    """The record of a point, from a separate process; if that process died, the record says so."""
    # The child imports the same packages as this process, installed or not, whatever folder it is started in.
    ours = [str(Path(__file__).parents[2]), str(Path(logitless.__file__).parent.parent)]
    paths = [*ours, *filter(None, [os.environ.get("PYTHONPATH")])]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench.point"],
        input=point.to_json(),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    return outcome(point, environment, ran.returncode, ran.stdout, ran.stderr)


def outcome(point: Point, environment: Environment, code: int, out: str, err: str) -> Record:
    """The record that a child printed, or one that says why there is none."""
    if code == 0:
        return Record(**json.loads(out.splitlines()[-1]))
    if code == -9:
        return lost_record(point, environment, "out of memory", "its process was killed, as a full machine does")
    lines = err.strip().splitlines() or ["it said nothing"]
    return lost_record(point, environment, "failed", f"its process ended with code {code}: {lines[-1]}")


def lost_record(point: Point, environment: Environment, status: Status, detail: str) -> Record:
    """The record of a point that gave no numbers at all."""
    case = point.case
    return Record(
        case=asdict(case),
        provider=point.provider,
        computes=case.entropy,
        status=status,
        detail=detail,
        rows=round(case.tokens * case.response),
        logits_bytes=case.logits_bytes,
        forward_floor_ms=None,
        floor_ms=None,
        bandwidth=math.nan,
        environment=asdict(environment),
    )


def measure_here(point: Point) -> Record:
    """The record of a point, in this process."""
    device = torch.device(point.case.device)
    if point.peers is not None:
        add_peers(Path(point.peers))
    own = LINEAR_PROVIDERS if point.case.hidden is not None else PROVIDERS
    chosen = {point.provider: own[point.provider]}
    if point.limit is not None and device.type == "cpu":
        bound_memory(point.limit)
    try:
        ((record,),) = run(Selection([point.case], chosen, device, point.repeats, linear_providers=chosen))
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        # A provider's failures are in its record; this error comes from inputs or truth, made before it runs.
        if type(error) is RuntimeError and CPU_FULL not in str(error):
            raise
        return lost_record(point, Environment.here(device), "out of memory", NO_ROOM)
    if record.status == "failed" and (CPU_FULL in record.detail or record.detail.startswith("MemoryError")):
        return replace(record, status="out of memory")
    return record


def bound_memory(limit: int) -> None:
    """Let this process allocate at most ``limit`` bytes more. Linux only; elsewhere, no bound."""
    status = Path("/proc/self/status")
    if not status.exists():
        return
    import resource

    found = re.search(r"^VmData:\s*(\d+) kB$", status.read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(found[1]) * 1024 + limit, hard))


def main() -> None:
    record = measure_here(Point.from_json(sys.stdin.read()))
    sys.stdout.write("\n" + record.to_json() + "\n")


if __name__ == "__main__":
    main()
