"""Every Triton kernel under NVIDIA's compute-sanitizer: accesses out of bounds, and races in shared memory.

    python benchmarks/sanitize.py                       both tools, one after the other; appends a record
    python benchmarks/sanitize.py --tools memcheck      one of them
    python benchmarks/sanitize.py --program             the program that is looked at, alone
    python benchmarks/sanitize.py --tests report.xml    a record of tests/test_cuda_trust.py, from pytest's --junitxml

The program makes the calls of ``CALLS`` at odd sizes in three dtypes and says which kernels they launched. It runs once
by itself, so that all kernels are compiled, and then under each tool. The exit code is 1 if a tool reports an error in
a kernel of ours, or one that it attributes to nobody, if it does not come to its end, or if a kernel of
``backends/triton`` was not launched. Hazards in kernels of other libraries are counted, and told.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import versions

import logitless as ll
from benchmarks.bench.records import Environment
from logitless.backends import triton as backend
from logitless.backends.triton import blocks, divergences, dz_products, pairs, products
from logitless.machine import Machine
from logitless.readings.table import STATS

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "src" / "logitless" / "backends" / "triton"
RECORDS = ROOT / "benchmarks" / "results" / "sanitizer.jsonl"
TOOLS = ("memcheck", "racecheck")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS, WIDTH, COLUMNS = 7, 24, 1037
ODD = 20
"""A width that products with epilogues do not take: logits go through memory."""

WIDE = 16384 + 331
"""Past one tile, where loads are in flight while a step is computed."""

SAID = "launched: "
"""What the program begins its last line with."""


# The program.


def target_of(columns: int, device: str) -> torch.Tensor:
    """A row that is left out among them, the first column and one near the end."""
    return torch.tensor([0, columns - 10, -100, 5, 17, 3, 1], device=device)


def kept_of(device: str, scope: Any = "vocabulary") -> ll.Kept:
    lengths = torch.tensor([3, 0, 2, 1, 4, 1, 2], device=device)
    return ll.Kept(torch.arange(13, device=device) * 3, lengths, scope)


def finish(out: ll.TokenStats) -> None:
    graded = (out.logprob, out.entropy, out.collision, out.mean_logit, out.ids_logprobs)
    torch.stack([x.sum() for x in graded if x is not None]).sum().backward()


def from_logits(
    device: str,
    dtype: torch.dtype,
    *,
    columns: int = COLUMNS,
    overwrite: bool = False,
    bits: Any = "fast",
    **options: Any,
) -> None:
    """All rows in order, and then some of them by index."""
    target = target_of(columns, device)
    for rows in (target, (torch.arange(ROWS, device=device) + 2, target)):
        leaf = torch.randn(ROWS if rows is target else ROWS + 3, columns, device=device).to(dtype).requires_grad_()
        # Only a result may be written over, not a leaf.
        logits = ll.Logits.given(leaf * 1.0, overwrite=overwrite, bits=bits)
        finish(ll.logprobs(logits, rows, backend="triton", **options))


def operands(
    device: str, dtype: torch.dtype, frozen: bool = False, width: int = WIDTH
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.randn(ROWS, width, device=device).to(dtype).requires_grad_()
    return hidden, torch.randn(COLUMNS, width, device=device).to(dtype).requires_grad_(not frozen)


def from_hidden(
    device: str,
    dtype: torch.dtype,
    *,
    frozen: bool = False,
    width: int = WIDTH,
    ids: int = 0,
    bits: Any = "fast",
    **options: Any,
) -> None:
    hidden, weight = operands(device, dtype, frozen, width)
    if ids:
        options["ids"] = torch.randint(COLUMNS, (ROWS, ids), device=device)
    logits = ll.Logits(hidden, weight, bits=bits)
    finish(ll.logprobs(logits, target_of(COLUMNS, device), backend="triton", **options))


def policy_loss(device: str, dtype: torch.dtype, **options: Any) -> None:
    hidden, weight = operands(device, dtype)
    given: dict[str, Any] = {"old_logprob": "current", "advantage": torch.ones(ROWS, device=device)}
    rows, objective = target_of(COLUMNS, device), ll.Objective(entropy_coef=0.01)
    # At these sizes two passes would cost less everywhere.
    machine = replace(Machine.of(torch.device(device)), costs=None)
    # Nor would products of dZ by Triton pay.
    with mock.patch.object(Machine, "of", return_value=machine), mock.patch.object(dz_products, "LARGE", 0):
        loss, _ = ll.policy_loss(ll.Logits(hidden, weight), rows, objective, backend="triton", **options, **given)
    (2 * loss).backward()


def divergence(device: str, dtype: torch.dtype, **options: Any) -> None:
    """Of hidden states of two models, of which the teacher's has a smaller vocabulary; then of their logits."""
    hidden, weight = operands(device, dtype)
    options["backend"] = "triton"
    teacher = ll.Logits(hidden.detach() + 1, weight.detach()[:-9])
    rows = target_of(COLUMNS - 9, device)
    ll.logprobs(ll.Logits(hidden, weight), rows, teacher=teacher, **options).divergence.sum().backward()
    logits = torch.randn(ROWS + 3, COLUMNS, device=device).to(dtype).requires_grad_()
    rows = (torch.arange(ROWS, device=device) + 2, rows)
    teacher = torch.randn(ROWS + 3, COLUMNS - 9, device=device)
    ll.logprobs(logits, rows, teacher=teacher, **options).divergence.sum().backward()


def two_models(device: str, dtype: torch.dtype, divergence: Any, **options: Any) -> None:
    """Of hidden states of two models with one vocabulary, in two passes and as a loss."""
    hidden, weight = operands(device, dtype)
    given: dict[str, Any] = {"backend": "triton", **options, "teacher": ll.Logits(hidden.detach() + 1, weight.detach())}
    logits, rows = ll.Logits(hidden, weight), target_of(COLUMNS, device)
    ll.logprobs(logits, rows, divergence=divergence, **given).divergence.sum().backward()
    machine = replace(Machine.of(torch.device(device)), costs=None)
    with mock.patch.object(Machine, "of", return_value=machine):
        loss, _ = ll.policy_loss(logits, rows, ll.Objective.recipe("distill", divergence=divergence), **given)
    loss.backward()


CALLS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "logprobs": (from_logits, {}),
    "logprobs, entropy": (from_logits, {"entropy": "grad"}),
    "logprobs, more than a tile": (from_logits, {"entropy": "grad", "columns": WIDE}),
    "logprobs, over the logits": (from_logits, {"entropy": "grad", "overwrite": True}),
    "logprobs, canonical bits": (from_logits, {"entropy": "grad", "bits": "canonical"}),
    "linear, canonical bits": (from_hidden, {"entropy": "grad", "bits": "canonical"}),
    "logprobs, softcap and padding": (
        from_logits,
        {"entropy": "grad", "head": ll.Head(temperature=0.7, softcap=20.0, vocab_size=COLUMNS - 9)},
    ),
    "logprobs, statistics": (from_logits, {"stats": STATS, "top_k": 5}),
    "logprobs, statistics, more than a tile": (from_logits, {"stats": STATS, "top_k": 5, "columns": WIDE}),
    "linear, statistics": (from_hidden, {"stats": STATS, "top_k": 40, "ids": 3, "memory": 64 << 10}),
    "linear, collision of stored exponentials": (from_hidden, {"stats": ("collision",), "memory": "513MiB"}),
    "linear, logits again": (from_hidden, {"entropy": "grad", "memory": 64 << 10}),
    "linear, softcap": (from_hidden, {"entropy": "grad", "memory": 64 << 10, "head": ll.Head(softcap=20.0)}),
    # Exponentials are stored in what is left of a budget past half a gibibyte.
    "linear, stored exponentials": (from_hidden, {"entropy": "grad", "memory": "513MiB"}),
    "linear, stored exponentials of logits": (from_hidden, {"entropy": "grad", "memory": "513MiB", "width": ODD}),
    "linear, logits again, through memory": (from_hidden, {"entropy": "grad", "memory": 64 << 10, "width": ODD}),
    "linear, frozen head": (from_hidden, {"frozen": True, "memory": 64 << 10}),
    "linear, frozen head, softcap": (
        from_hidden,
        {"frozen": True, "memory": 64 << 10, "head": ll.Head(softcap=20.0)},
    ),
    "loss in one pass": (policy_loss, {}),
    "loss in one pass, chunks": (policy_loss, {"memory": 4 * COLUMNS * 4}),
    "divergence, forward": (divergence, {"divergence": "forward_kl"}),
    "divergence, mixed": (divergence, {"divergence": "jsd", "head": ll.Head(softcap=20.0)}),
    "divergence, variation": (divergence, {"divergence": "tv"}),
    "divergence of two heads, reverse": (two_models, {"divergence": "reverse_kl"}),
    "divergence of two heads, forward": (two_models, {"divergence": "forward_kl", "memory": 16 * COLUMNS * 4}),
    "divergence of two heads, mixed": (two_models, {"divergence": "jsd", "head": ll.Head(softcap=20.0)}),
}
KEPT: dict[str, tuple[Callable[..., None], str]] = {
    "logprobs, kept ids": (from_logits, "vocabulary"),
    "linear, kept ids": (from_hidden, "vocabulary"),
    "linear, kept ids alone": (from_hidden, "support"),
}


def launched_by(device: str, dtypes: tuple[torch.dtype, ...] = DTYPES) -> dict[str, int]:
    """How often each kernel was launched by all calls in all dtypes."""
    counts: Counter[str] = Counter()
    launch = backend.launch

    def counting(kernel: str, programs: int, **arguments: Any) -> None:
        counts[kernel] += programs > 0
        launch(kernel, programs, **arguments)

    modules = (backend, products, dz_products, pairs, divergences, blocks)
    for module in modules:
        module.launch = counting
    machine = Machine.of(torch.device(device))
    try:
        # Where products are made by turns, those from hidden states are made at once, too.
        for turns in {False, machine.turns}:
            with mock.patch.object(Machine, "of", return_value=replace(machine, turns=turns)):
                for dtype, (name, (call, options)) in itertools.product(dtypes, CALLS.items()):
                    if turns == machine.turns or name.startswith(("linear", "loss")):
                        call(device, dtype, **options)
        for dtype, (call, scope) in itertools.product(dtypes, KEPT.values()):
            call(device, dtype, kept=kept_of(device, scope), entropy="grad")
    finally:
        for module in modules:
            module.launch = launch
    return dict(sorted(counts.items()))


def kernel_source() -> str:
    """Of all files of kernels."""
    return "\n".join(path.read_text() for path in sorted(KERNELS.glob("*kernels.py")))


def all_kernels(source: str) -> list[str]:
    """Functions under ``triton.jit`` or ``gluon.jit`` that no other one calls, or hands on: what is launched.

    >>> all_kernels("@triton.jit\\ndef f(x): return x\\n@triton.jit(debug=True)\\ndef g(x): f(x)")
    ['g']
    """
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    decorated = [(f, " ".join(map(ast.unparse, f.decorator_list))) for f in functions]
    jitted = [f for f, words in decorated if "triton.jit" in words or "gluon.jit" in words]
    calls = [node for f in jitted for node in ast.walk(f) if isinstance(node, ast.Call)]
    called = {x.id for node in calls for x in ast.walk(node) if isinstance(x, ast.Name)}
    return sorted(f.name for f in jitted if f.name not in called)


# The tools.


def command(tool: str, sanitizer: str, described: str) -> list[str]:
    """The program under a tool, with those options that this version of it describes."""
    # Other libraries' products have no such name, and are slow to look at.
    options = {"--kernel-name": "kns=_kernel"}
    if tool == "memcheck":
        # Torch asks the driver for functions that it may not have, which counts as an error. Ours raise in Python.
        options["--report-api-errors"] = "no"
    known = [word for name, value in options.items() if name in described for word in (name, value)]
    return [sanitizer, "--tool", tool, *known, sys.executable, __file__, "--program"]


def verdict(tool: str, said: str, kernels: list[str]) -> dict[str, Any]:
    """What a tool said: errors of ``ours`` and ``others`` by kernel, ``unknown`` ones, its own count; the launches."""
    reports = _reports(said)
    ours: Counter[str] = Counter()
    others: Counter[str] = Counter()
    unknown = 0
    for report in reports:
        names = re.findall(r"\b(?:at|in) (?:void )?([\w:<>~]+?)(?:\(.*?\))?\+0x", report)
        mine = [name for name in names if name in kernels]
        if mine:
            ours[mine[0]] += 1
        elif names:
            others[names[0]] += 1
        else:
            unknown += 1
    counted = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)", said)
    launched = re.findall(rf"^{SAID}(.*)$", said, re.MULTILINE)
    return {
        "tool": tool,
        "summary": int(counted[-1]) if counted else None,
        "ours": dict(ours),
        "others": dict(others),
        # Those that it counts and that were not recognised above are somebody's, too.
        "unknown": unknown + max(0, int(counted[-1]) - len(reports) if counted else 0),
        "launched": json.loads(launched[-1]) if launched else {},
    }


def _reports(said: str) -> list[str]:
    """The tool's reports: blocks of lines that begin with nine equal signs, with a line of nothing else between them.

    Its name, its summary and its remarks are such lines, too, and no reports.
    """
    lines = [line[9:].strip() for line in said.splitlines() if line.startswith("=" * 9)]
    blocks = "\n".join(line for line in lines if "SUMMARY" not in line).split("\n\n")
    begins = r"^(Invalid|Misaligned|Error|Warning|Program hit|Fatal|Internal|Potential|Race)"
    return [block for block in blocks if re.search(begins, block, re.MULTILINE)]


def failures(found: dict[str, Any], kernels: list[str]) -> list[str]:
    """Why a tool's run is no clean one, in words; nothing if it is."""
    told = [f"{count} in {name}" for name, count in found["ours"].items()]
    if found["unknown"]:
        told.append(f"{found['unknown']} in no kernel that is named")
    if found["summary"] is None:
        told.append("it did not come to its summary")
    missing = [name for name in kernels if not found["launched"].get(name)]
    if missing:
        told.append(f"never launched: {', '.join(missing)}")
    if found["rc"]:
        told.append(f"exit code {found['rc']}")
    return told


def run(tool: str, sanitizer: str, described: str, kernels: list[str]) -> dict[str, Any]:
    # Each tensor an allocation of its own, so that its neighbour is not in bounds.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    began = time.monotonic()
    done = subprocess.run(command(tool, sanitizer, described), env=environment, capture_output=True, text=True)
    found = verdict(tool, done.stdout + done.stderr, kernels)
    found |= {"seconds": round(time.monotonic() - began, 1), "rc": done.returncode}
    found["failures"] = failures(found, kernels)
    if found["failures"]:
        say((done.stdout + done.stderr)[-6000:])
    return found


def show(found: dict[str, Any]) -> str:
    launched = ", ".join(f"{name} {count}" for name, count in found["launched"].items()) or "nothing"
    others = sum(found["others"].values())
    return (
        f"{found['tool']}: {'; '.join(found['failures']) or 'no error'}, {found['seconds']} s\n"
        f"  launched: {launched}\n  in kernels of other libraries: {others}"
    )


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Every Triton kernel under compute-sanitizer.")
    parser.add_argument("--program", action="store_true", help="make the calls, and say what they launched")
    parser.add_argument("--device", default="cuda", help="of the program; cpu in Triton's interpreter")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--tests", type=Path, help="pytest's report of tests/test_cuda_trust.py, to be recorded")
    parser.add_argument("--json", type=Path, default=RECORDS, help="file to append the record to")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    arguments = parse(words)
    if arguments.program:
        torch.manual_seed(0)
        launched = launched_by(arguments.device)
        if arguments.device == "cuda":
            torch.cuda.synchronize()
        say(f"{SAID}{json.dumps(launched)}")
        return 0
    if arguments.tests is not None:
        counts = {name: versions.record(arguments.tests)[name] for name in ("passed", "skipped", "failed")}
        write({"kind": "tests", **counts}, arguments.json)
        return int(bool(counts["failed"]) or not counts["passed"])
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        say("compute-sanitizer is neither on the path nor in /usr/local/cuda/bin; it comes with the CUDA toolkit.")
        return 1
    # Compiles every kernel, which takes far longer under a tool.
    subprocess.run([sys.executable, __file__, "--program"], check=True)
    described = subprocess.run([sanitizer, "--help"], capture_output=True, text=True).stdout
    kernels = all_kernels(kernel_source())
    found = [run(tool, sanitizer, described, kernels) for tool in arguments.tools]
    say("\n".join(show(x) for x in found))
    write({"kind": "sanitizer", "tools": found, "kernels": kernels}, arguments.json)
    return int(any(x["failures"] for x in found))


def write(what: dict[str, Any], path: Path) -> None:
    """Append a record, with where and when it was made."""
    here = Environment.here(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    environment = {"device": here.device, "commit": here.commit, "versions": here.versions, "date": here.date}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(what | environment) + "\n")


if __name__ == "__main__":
    sys.exit(main())
