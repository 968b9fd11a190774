"""Recorded runs on ``docs/reliability.md``, held by tests: the fuzzer, seeded bugs and random changes, the GPU.

They come from ``fuzz-*``, ``mutants``, ``mutation-sample``, ``sanitizer`` and ``gpu-suite.jsonl`` of the results.

    python docs/make_reliability.py

Only what stands between two marks is written; the rest of the page is by hand.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from fuzz.record import read, table  # noqa: E402

PAGE = Path(__file__).parent / "reliability.md"
BEGIN, END = "<!-- runs of the fuzzer: begin -->", "<!-- runs of the fuzzer: end -->"
GPU = "<!-- on the GPU: begin -->", "<!-- on the GPU: end -->"
CHANGES = "<!-- random changes: begin -->", "<!-- random changes: end -->"
CHANGES_RECORD = ROOT / "benchmarks" / "results" / "mutation-sample.jsonl"
SEEDED = "<!-- seeded bugs: begin -->", "<!-- seeded bugs: end -->"
SEEDED_RECORD = ROOT / "benchmarks" / "results" / "mutants.jsonl"
GPU_RECORDS = [ROOT / "benchmarks" / "results" / f"{name}.jsonl" for name in ("sanitizer", "gpu-suite")]


def section(records: list[dict]) -> str:
    """All recorded runs, the largest first."""
    runs = sorted((r for r in records if r["kind"] == "fuzz"), key=lambda r: -r["cases"])
    soaks = [r for r in records if r["kind"] == "soak"]
    parts = [f"{_title(r)}\n\n{table(r)}" for r in runs]
    parts += [_soak(r) for r in soaks]
    return "\n\n".join(parts)


def _title(r: dict) -> str:
    how = f"{r['ranks']} ranks of a gloo group" if r["ranks"] > 1 else f"{r['jobs']} process{'es' * (r['jobs'] > 1)}"
    return f"**{r['cases']:,} cases** on {r['device']} in {how}, {r['seconds']:,.0f} s, {_where(r)}:"


def _soak(r: dict) -> str:
    grown = f"in the second half of them the process grew by {r['resident_growth_bytes'] // 1024} KiB"
    memory = f"{r['live_tensors'][0]} live tensors whenever they were counted, and {grown}"
    if r["device"] != "cpu":
        memory = f"{r['allocated_bytes'][0]:,} bytes allocated after every one of them"
    return (
        f"**Soak: {r['steps']:,} steps** on {r['device']}, {_where(r)}: {memory}. "
        f"Step {r['compared_step']:,} of a fresh process has the same bits."
    )


def _where(r: dict) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in r["versions"].items())
    return f"{versions}, {r['machine']}, commit `{r['commit']}`"


def filled(page: str, records: list[dict]) -> str:
    """The page with the runs between its marks."""
    return _between(page, BEGIN, END, section(records))


def _between(page: str, begin: str, end: str, text: str) -> str:
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    assert found, f"{PAGE.name} has lost its marks"
    return f"{before}{begin}\n\n{text}\n\n{end}{after}" if text else f"{before}{begin}\n{end}{after}"


# Seeded bugs.


def seeded_section(lines: list[dict]) -> str:
    """Verdicts, and how many entries change which part."""
    facts, *verdicts = lines
    names = ("date", "seeded", "caught", "survived")
    table = [f"| commit | {' | '.join(names)} |", "|---|---|---:|---:|---:|"]
    table += [f"| `{facts['commit']}` | {' | '.join(str(facts[name]) for name in names)} |", ""]
    table += ["What the seeded bugs are spread over:", "", "| part | seeded bugs |", "|---|---:|"]
    parts = Counter(f"`{x['file'].partition('/')[0]}/`" if "/" in x["file"] else "single modules" for x in verdicts)
    table += [f"| {part} | {count} |" for part, count in parts.most_common()]
    return "\n".join(table)


def seeded_record() -> list[dict]:
    return [json.loads(x) for x in SEEDED_RECORD.read_text("utf-8").splitlines()]


def with_seeded(page: str, lines: list[dict]) -> str:
    """The page with the section between its marks."""
    return _between(page, *SEEDED, seeded_section(lines))


# Random changes of the core.


def changes_section(lines: list[dict]) -> str:
    """Counts by operator, and every change that no test noticed."""
    facts, *tried = lines
    verdicts = ("killed", "equivalent", "survived")
    shown = (facts["killed"] + facts["equivalent"]) / facts["tried"]
    table = ["| operator | tried | killed | equivalent | survived |", "|---|---:|---:|---:|---:|"]
    for operator in (*sorted({x["operator"] for x in tried}), "all"):
        own = [x["verdict"] for x in tried if operator in ("all", x["operator"])]
        counts = " | ".join(str(own.count(verdict)) for verdict in verdicts)
        table.append(f"| {operator} | {len(own)} | {counts} |")
    told = (
        f"{facts['date']}, commit `{facts['commit']}`, seed {facts['seed']}: of {facts['sites']:,} changes, "
        f"{facts['reached']:,} are on lines that tests run on a CPU; of those {facts['tried']} were drawn, and "
        f"{shown:.1%} were killed or change nothing."
    )
    survivors = [x for x in tried if x["verdict"] == "survived"]
    listed = [f"| `{x['file']}:{x['line']}` | {_code(x['old'])} | {_code(x['new'])} |" for x in survivors]
    rest = ["", "Survived:", "", "| place | was | became |", "|---|---|---|", *listed] if listed else []
    return "\n".join([told, "", *table, *rest])


def _code(text: str, most: int = 90) -> str:
    """A piece of code in a cell of a table."""
    text = text if len(text) <= most else f"{text[:most]} ..."
    return "`` " + text.replace("|", "\\|") + " ``"


def with_changes(page: str, lines: list[dict]) -> str:
    """The page with the section between its marks."""
    return _between(page, *CHANGES, changes_section(lines))


def changes_record() -> list[dict]:
    return [json.loads(x) for x in CHANGES_RECORD.read_text("utf-8").splitlines()]


# On the GPU: the newest record of each kind.


def gpu_section(records: list[dict]) -> str:
    """What the sanitizer and the tests of streams and threads said; nothing without a record."""
    newest = {r["kind"]: r for r in records}
    parts = []
    if "sanitizer" in newest:
        r = newest["sanitizer"]
        lines = "\n".join(_tool(tool, r["kernels"]) for tool in r["tools"])
        parts.append(
            f"`benchmarks/sanitize.py` launches every Triton kernel under compute-sanitizer, at odd sizes in float32, "
            f"bfloat16 and float16. A kernel that is not launched is an error. The last run was of the "
            f"{len(r['kernels'])} kernels of its commit. {_on(r)}:\n\n"
            f"| tool | kernels | launches | errors | in other libraries | time |\n"
            f"|---|---:|---:|---:|---:|---:|\n{lines}"
        )
    if "tests" in newest:
        r = newest["tests"]
        told = (
            f"All {r['passed']} tests of `tests/test_cuda_trust.py` passed: a hundred runs of each call have the same "
            f"bits, and so have runs on two streams at once, in four threads with a stream each, and on a stream that "
            f"waits for its inputs"
        )
        if r["failed"]:
            told = (
                f"Of `tests/test_cuda_trust.py` {r['passed']} tests passed, and these failed: {', '.join(r['failed'])}"
            )
        parts.append(f"{told}. {_on(r)}.")
    for r in _suites(records):
        told = (
            f"**`make gpu`**: {r['passed']} tests of kernels passed in {len(r['files'])} files, {r['skipped']} skipped"
        )
        bad = f", and these failed: {', '.join(r['failures'])}" if r["failures"] else ", none failed"
        rest = f"; {r['not_run']} were not reached in {r['seconds']:.0f} s" if r["not_run"] else ""
        parts.append(f"{told}{bad}{rest}. {_on(r)}.")
    return "\n\n".join(["## On the GPU", *parts]) if parts else ""


def _suites(records: list[dict]) -> list[dict]:
    """The newest run of the suite with each pair of torch and Triton."""
    newest = {(r["versions"]["torch"], r["versions"]["triton"]): r for r in records if r["kind"] == "suite"}
    return list(newest.values())


def _tool(found: dict, kernels: list[str]) -> str:
    launched = found["launched"]
    errors = "; ".join(found["failures"]) or "0"
    numbers = f"{len(set(launched) & set(kernels))} of {len(kernels)} | {sum(launched.values())}"
    return f"| {found['tool']} | {numbers} | {errors} | {sum(found['others'].values())} | {found['seconds']:.0f} s |"


def _on(r: dict) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in r["versions"].items())
    return f"{r['device']}, {versions}, {r['date'][:10]}, commit `{r['commit'][:12]}`"


def with_gpu(page: str, records: list[dict]) -> str:
    """The page with the section between its marks; without a record there is none."""
    return _between(page, *GPU, gpu_section(records))


def gpu_records() -> list[dict]:
    return [json.loads(x) for file in GPU_RECORDS if file.exists() for x in file.read_text("utf-8").splitlines()]


def records() -> list[dict]:
    return [r for file in sorted(ROOT.glob("benchmarks/results/fuzz-*.jsonl")) for r in read(file)]


if __name__ == "__main__":
    text = with_seeded(filled(PAGE.read_text(encoding="utf-8"), records()), seeded_record())
    PAGE.write_text(with_gpu(with_changes(text, changes_record()), gpu_records()), encoding="utf-8")
