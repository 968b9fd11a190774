"""A training run that goes on and on: memory stays flat, and step n is the step n of a fresh process.

Every step is a forward and a backward through each of the three paths, with its own seed, and an optimizer's update of
the weight. Memory is what torch has allocated on a GPU after every step and, ten times a run, the number of live
tensors and the resident size of the process. A step's numbers are hashed; at the end a new process starts from the
saved weight of one step and must get that step's hash.
"""

from __future__ import annotations

import gc
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import logitless as ll
from fuzz.record import environment, write

LENGTHS, VOCAB, WIDTH = ((3, 7), (2, 13), (5, 1), (1, 6)), 211, 32
WARM = 20
"""Steps before memory counts: caches of the first steps are filled then."""

SLACK = 1 << 18
"""Bytes by which the resident size may grow in the second half of a run: pages of the allocator. A leak of a kilobyte a
step is twice that."""

LOOKS = 10
"""How often live tensors and the resident size are looked at: counting takes longer than a step."""


class Step(NamedTuple):
    """Numbers of one step, and what torch has allocated on the GPU after it."""

    digest: str
    loss: float
    allocated: int


def soak(steps: int, device: str = "cpu", json_file: Path | None = None) -> int:
    """Run, judge, print, record. Exit code 0 if all is flat and the same."""
    record = run(steps, device)
    told = {k: v for k, v in record.items() if k not in ("versions", "commit", "dirty")}
    print("\n".join(f"{k:>24}  {v}" for k, v in told.items()))
    if json_file is not None:
        write(record, json_file)
    return 0 if record["flat"] and record["same"] else 1


def run(steps: int, device: str = "cpu") -> dict[str, Any]:
    """The record of a soak."""
    torch.set_num_threads(1)
    weight = start(device)
    momentum = torch.zeros_like(weight)
    middle = max(1, steps // 2)
    looks = {max(WARM, steps * k // LOOKS) for k in range(1, LOOKS)} | {steps - 1}
    # Only what is told at the end is kept: a list of all steps would itself grow.
    allocated, resident, tensors, kept = set(), [], [], {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "weight.pt"
        for n in range(steps):
            if n == middle:
                torch.save({"weight": weight.detach(), "momentum": momentum}, saved)
            told = step(n, weight, momentum, device)
            if n in (0, middle, steps - 1):
                kept[n] = told
            if n >= min(WARM, steps - 1):
                allocated.add(told.allocated)
            if n in looks:
                tensors.append(live_tensors())
                resident.append(resident_bytes())
        fresh = again(saved, middle, device)
    flat = len(allocated) == 1 and len(set(tensors)) == 1
    later = resident[len(resident) // 2 :]
    grown = max(later) - later[0]
    return {
        "kind": "soak",
        "device": device,
        "steps": steps,
        "seconds": round(time.monotonic() - started, 1),
        "live_tensors": sorted(set(tensors)),
        "allocated_bytes": sorted(allocated),
        "resident_bytes": resident,
        "resident_growth_bytes": grown,
        "flat": flat and (device != "cpu" or grown <= SLACK),
        "compared_step": middle,
        "same": fresh == kept[middle].digest,
        "first_loss": kept[0].loss,
        "last_loss": kept[steps - 1].loss,
        **environment(device),
    }


def start(device: str) -> Tensor:
    g = torch.Generator().manual_seed(7)
    return (torch.randn(VOCAB, WIDTH, generator=g) / WIDTH**0.5).to(device).requires_grad_()


def step(n: int, weight: Tensor, momentum: Tensor, device: str) -> Step:
    """One update of the weight, and the hash of all its numbers."""
    digest = hashlib.sha256()
    loss, gradient = losses(n, weight, device, digest)
    with torch.no_grad():
        momentum.mul_(0.9).add_(gradient)
        weight.sub_(0.05 * momentum)
    _add(digest, weight)
    value = float(loss)
    del loss, gradient
    return Step(digest.hexdigest(), value, allocated_bytes(device))


def losses(n: int, weight: Tensor, device: str, digest: Any) -> tuple[Tensor, Tensor]:
    """The loss of step n by all three paths, and the gradient of the weight."""
    g = torch.Generator().manual_seed(n)
    tokens = [torch.randint(VOCAB, (p + r,), generator=g).tolist() for p, r in LENGTHS]
    rows = ll.Rows.packed(tokens, [r for _, r in LENGTHS], device=device)
    count = sum(p + r for p, r in LENGTHS)
    hidden = torch.randn(count, WIDTH, generator=g).to(device).requires_grad_()
    advantage = torch.randn(len(rows), generator=g).to(device)
    given = {"old_logprob": "current", "advantage": advantage}
    objective = ll.Objective.recipe("dapo", entropy_coef=0.01)
    loss, metrics = ll.policy_loss(ll.Logits(hidden, weight), rows, objective, memory="64KiB", **given)
    stats = ll.logprobs(ll.Logits(hidden, weight), rows, entropy="grad", memory="64KiB")
    loss = loss - 0.1 * stats.logprob.mean() - 0.01 * stats.entropy.mean()  # pyright: ignore
    logits = hidden @ weight.T
    out = ll.logprobs(ll.Logits.given(logits, overwrite=True), rows, entropy="grad")
    loss = loss - 0.1 * out.logprob.mean() - 0.01 * out.entropy.mean()  # pyright: ignore
    d_hidden, d_weight = torch.autograd.grad(loss, [hidden, weight])
    for x in (loss, stats.logprob, out.entropy, d_hidden, d_weight):
        _add(digest, x)
    digest.update(json.dumps(metrics.compute(), sort_keys=True).encode())
    return loss.detach(), d_weight


def _add(digest: Any, x: Tensor | None) -> None:
    assert x is not None
    digest.update(bytes(x.detach().cpu().reshape(-1).contiguous().view(torch.uint8).tolist()))


def live_tensors() -> int:
    """Tensors that Python still holds."""
    gc.collect()
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


def allocated_bytes(device: str) -> int:
    return 0 if device == "cpu" else torch.cuda.memory_allocated()


def resident_bytes() -> int:
    """Resident size of this process, from the kernel; 0 where it does not say."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 if status.exists() else 0


def again(saved: Path, n: int, device: str) -> str:
    """The hash of step n, from a process that has done nothing before."""
    code = f"from fuzz.soak import replay; print(replay({str(saved)!r}, {n}, {device!r}))"
    paths = [str(Path(__file__).parents[1]), str(Path(ll.__file__).parents[1])]
    text = f"import sys; sys.path[:0] = {paths!r}; {code}"
    out = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return out.stdout.split()[-1]


def replay(saved: str, n: int, device: str) -> str:
    torch.set_num_threads(1)
    kept = torch.load(saved, map_location=device)
    return step(n, kept["weight"].requires_grad_(), kept["momentum"], device).digest
