"""What a run of the fuzzer found, as one line of JSON; and the table of such a line."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from fuzz.cases import NAMES, PATHS, Case, features_on
from fuzz.judge import Verdict

ROOT = Path(__file__).parents[2]
KINDS = ("right", "refused", "at a bound", "wrong")


@dataclass
class Tally:
    """Counts of many cases; tallies of workers add up.

    Attributes:
        verdicts: by (path, kind).
        refusals: by reason.
        ratios: the largest error over what is allowed, by (path, dtype).
        pairs: pairs of features that were on together, by path.
        failures: (seed, case, reason).
    """

    verdicts: Counter = field(default_factory=Counter)
    refusals: Counter = field(default_factory=Counter)
    ratios: dict[tuple[str, str], float] = field(default_factory=dict)
    pairs: set[tuple[str, str, str]] = field(default_factory=set)
    failures: list[tuple[int, Case, str]] = field(default_factory=list)

    def add(self, case: Case, found: Verdict) -> None:
        self.verdicts[case.path, found.kind] += 1
        self.pairs |= {(case.path, *pair) for pair in combinations(features_on(case), 2)}
        if found.kind == "refused":
            self.refusals[found.reason] += 1
        elif found.kind == "right":
            key = case.path, case.dtype
            self.ratios[key] = max(self.ratios.get(key, 0.0), found.ratio)
        elif found.kind == "wrong":
            self.failures.append((case.seed, case, found.reason))

    def merge(self, other: Tally) -> None:
        self.verdicts += other.verdicts
        self.refusals += other.refusals
        for key, ratio in other.ratios.items():
            self.ratios[key] = max(self.ratios.get(key, 0.0), ratio)
        self.pairs |= other.pairs
        self.failures += other.failures

    @property
    def cases(self) -> int:
        return sum(self.verdicts.values())

    def count(self, kind: str) -> int:
        return sum(n for (_, k), n in self.verdicts.items() if k == kind)


def as_record(tally: Tally, seconds: float, **run: Any) -> dict[str, Any]:
    """A line for the record file."""
    dtypes = sorted({dtype for _, dtype in tally.ratios})
    return {
        "kind": "fuzz",
        "cases": tally.cases,
        "seconds": round(seconds, 1),
        **run,
        "paths": {path: {kind: tally.verdicts[path, kind] for kind in KINDS} for path in PATHS},
        "worst": {path: {d: round(tally.ratios.get((path, d), 0.0), 3) for d in dtypes} for path in PATHS},
        "refusals": dict(sorted(tally.refusals.items())),
        "pairs": {path: sum(p == path for p, *_ in tally.pairs) for path in PATHS},
        "failures": [{"seed": seed, "case": str(case), "reason": why[:300]} for seed, case, why in tally.failures[:50]],
        **environment(run.get("device", "cpu")),
    }


def environment(device: str) -> dict[str, Any]:
    """Versions, machine and commit."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        import triton

        versions["triton"] = triton.__version__
    except ImportError:
        pass
    git = ["git", "-C", str(ROOT)]
    told = [
        subprocess.run([*git, *c], capture_output=True, text=True) for c in (["rev-parse", "HEAD"], ["status", "-s"])
    ]
    return {
        "versions": versions,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}" if device == "cpu" else torch.cuda.get_device_name(),
        "commit": told[0].stdout.strip()[:12],
        "dirty": bool(told[1].stdout.strip()),
    }


def write(record: dict[str, Any], path: Path) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


SHOWN = {"linear_logprobs": "`logprobs(Logits)`", "linear_policy_loss": "`policy_loss`"}
"""Paths whose names in records are older than the calls that they are."""


def table(record: dict[str, Any]) -> str:
    """A run as a table in Markdown: a line per path."""
    dtypes = list(next(iter(record["worst"].values())))
    head = ["path", "cases", "right", "refused", "at a bound", "wrong", "pairs", *(f"worst {d}" for d in dtypes)]
    lines = [_line(head), _line(["---"] + ["---:"] * (len(head) - 1))]
    for path, counts in record["paths"].items():
        numbers = [f"{sum(counts.values()):,}", *(f"{counts[kind]:,}" for kind in KINDS), f"{record['pairs'][path]:,}"]
        lines.append(
            _line([SHOWN.get(path, f"`{path}`"), *numbers, *(f"{record['worst'][path][d]:.2f}" for d in dtypes)])
        )
    totals = {kind: sum(counts[kind] for counts in record["paths"].values()) for kind in KINDS}
    rest = [f"{totals[kind]:,}" for kind in KINDS] + [f"{sum(record['pairs'].values()):,}"] + [""] * len(dtypes)
    return "\n".join([*lines, _line(["all", f"{record['cases']:,}", *rest])])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def all_pairs(path: str) -> int:
    """How many pairs of features a path has, alternatives included."""
    return len(NAMES[path]) * (len(NAMES[path]) - 1) // 2
