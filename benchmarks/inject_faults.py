"""Every fault that the tests inject a sample of, injected everywhere: the record behind docs/reliability.md.

    make faults                                         python benchmarks/inject_faults.py
    python benchmarks/inject_faults.py --parts disagreements   one part anew, the others as they are on record

Allocations: every storage that torch makes in every step of ``tests/failing.py`` fails once, in float32, or in bfloat16
where the route is one of 16 bits; the next step has to have the bits of a run that nothing happened to. Ranks: every
collective of every path of ``tests/faults.py`` is cut short by every rank of two and of three, at three moments. A
fault that is not survived as promised ends the command, and its part is not written.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from failing import STEPS, check_failure, reference_of  # noqa: E402
from faults import MARGIN, MOMENTS, PATHS, TIMEOUT, Fault, Team, abouts, disagree, is_named, is_right  # noqa: E402

from benchmarks.bench.records import Environment  # noqa: E402

RECORD = ROOT / "benchmarks" / "results" / "faults.json"
PAGE = ROOT / "docs" / "reliability.md"
START, END = "<!-- faults: make faults -->\n", "<!-- end of faults -->"

CALLS = ("logprobs", "logprobs of Logits", "policy_loss")


def allocations() -> dict[str, dict[str, int]]:
    """By step: how many allocations failed, and how the buffer was left."""
    found: dict[str, dict[str, int]] = {}
    for name, step in STEPS.items():
        dtype = torch.bfloat16 if step.half else torch.float32
        right, places = reference_of(step, dtype)
        kinds = Counter(check_failure(step, dtype, right, k) for k in range(1, len(places) + 1))
        found[name] = {"points": len(places), **kinds}
        say(f"{name}, {dtype}: {len(places)} allocations")
    return found


def ranks() -> dict[str, dict[str, Any]]:
    """By path: how many faults, how many survivors raised by name or were right, and the longest wait."""
    team, found = Team(), {}
    for name, path in PATHS.items():
        kinds, slowest, collectives = Counter(), 0.0, 0
        for world in (2, 3):
            right = team.run(world, path)
            collectives = right[0].value[1]
            for fault in (Fault(r, n, m) for r in range(world) for n in range(collectives) for m in MOMENTS):
                outcomes = team.run(world, path, fault=fault)
                assert outcomes[fault.rank].kind == "died", (name, fault, outcomes)
                kinds["points"] += 1
                for rank, outcome in enumerate(outcomes):
                    if rank != fault.rank:
                        kinds["raised"] += is_named(outcome)
                        kinds["right"] += is_right(outcome, right[rank])
                        assert is_named(outcome) or is_right(outcome, right[rank]), (name, fault, outcome)
                        assert outcome.seconds < TIMEOUT + MARGIN, (name, fault, outcome)
                        slowest = max(slowest, outcome.seconds)
        found[name] = {"collectives": collectives, **kinds, "slowest_seconds": round(slowest, 1)}
        say(f"{name}: {kinds['points']} kills")
    team.close()
    return found


def disagreements() -> dict[str, dict[str, str]]:
    """By path and argument: refused by every rank, or not compared."""
    team, found = Team(), {}
    for path in CALLS:
        said = [outcome.value[0] for outcome in team.run(2, disagree, path, TIMEOUT)]
        for about in abouts(path):
            kinds = {rank[about][0] for rank in said}
            assert kinds in ({"LogitlessError"}, {"returned"}), (path, about, kinds)
            refused = kinds == {"LogitlessError"}
            found.setdefault(path, {})[about] = "refused by every rank" if refused else "not compared"
    team.close()
    return found


PARTS: dict[str, Callable[[], Any]] = {"allocations": allocations, "ranks": ranks, "disagreements": disagreements}


def tables(record: dict[str, Any]) -> str:
    """What the page says of a record."""
    made = record["made"]
    lines = [
        f"Commit `{made['commit']}`, torch {made['versions']['torch']}, on CPU over gloo. `make faults` does it again.",
        "",
        "| step whose allocations fail, one by one | allocations | not ours | buffer untouched | buffer holds a part |",
        "|---|---:|---:|---:|---:|",
    ]
    total: Counter[str] = Counter()
    for name, counts in record["allocations"].items():
        kinds = Counter(counts)
        total.update(kinds)
        has = STEPS[name].buffer
        cells = (kinds["untouched"], kinds["buffer holds a part"]) if has else ("-", "-")
        lines.append(f"| {name} | {kinds['points']} | {kinds['outside']} | {cells[0]} | {cells[1]} |")
    killed = Counter()
    lines += [
        f"| all | {total['points']} | {total['outside']} | | |",
        "",
        "| path in which a rank is killed | collectives | kills | peers that raised | peers that were right |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, counts in record["ranks"].items():
        killed.update({k: n for k, n in counts.items() if k != "slowest_seconds"})
        lines.append(
            f"| {name} | {counts['collectives']} | {counts['points']} | {counts['raised']} | {counts['right']} |"
        )
    lines.append(f"| all | {killed['collectives']} | {killed['points']} | {killed['raised']} | {killed['right']} |")
    slowest = max(counts["slowest_seconds"] for counts in record["ranks"].values())
    lines += [
        "",
        f"The group's timeout was {TIMEOUT:g} s; the last peer had its error after {slowest:g} s.",
        "",
        "| one rank differs in | " + " | ".join(f"`{path}`" for path in CALLS) + " |",
        "|---" * (1 + len(CALLS)) + "|",
    ]
    by_path = record["disagreements"]
    for about in dict.fromkeys(about for path in CALLS for about in by_path[path]):
        lines.append(f"| {about} | " + " | ".join(by_path[path].get(about, "") for path in CALLS) + " |")
    return "\n".join(lines) + "\n\n"


def with_tables(text: str, new: str) -> str:
    """The page with what is between its marks replaced."""
    before, rest = text.split(START)
    return before + START + new + END + rest.split(END)[1]


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    torch.set_num_threads(1)
    for part in parser.parse_args().parts:
        found = PARTS[part]()
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        record |= {part: found, "made": asdict(Environment.here(torch.device("cpu")))}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    if set(PARTS) <= set(record):
        PAGE.write_text(with_tables(PAGE.read_text(), tables(record)))


if __name__ == "__main__":
    main()
