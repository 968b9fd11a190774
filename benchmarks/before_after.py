"""The reference calls of two commits side by side on one card: time, peak and host time, in turns.

    python benchmarks/before_after.py --src 8f2a279 old/src --src HEAD src --out records.jsonl

Each source tree runs in a process of its own, one after the other and then again, so that neither has the cooler card.
Calls are made in the words of whichever tree is loaded: ``linear_logprobs`` and its kin, or ``logprobs`` of ``Logits``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOKENS, VOCAB = 16384, 151936


def cases(ll: Any, torch: Any, width: int) -> dict[str, Callable[[], object]]:
    """Forward, forward and backward, a frozen head, a loss, and a divergence, from hidden states of this size."""
    new, device = hasattr(ll, "Logits"), "cuda"
    hidden = torch.randn(TOKENS, width, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(VOCAB, width, device=device) * 2 / width**0.5).bfloat16().requires_grad_()
    target, upstream = torch.randint(VOCAB, (TOKENS,), device=device), torch.randn(TOKENS, device=device)
    objective, frozen = ll.Objective(entropy_coef=0.01), weight.detach()
    others = (
        torch.randn(TOKENS, 2048, device=device).bfloat16(),
        (torch.randn(VOCAB, 2048, device=device) / 22).bfloat16(),
    )

    def score(w: Any, **options: Any) -> Any:
        return (
            ll.logprobs(ll.Logits(hidden, w), target, **options)
            if new
            else ll.linear_logprobs(hidden, w, target, **options)
        )

    def forward() -> None:
        with torch.no_grad():
            score(weight, entropy="value")

    def both() -> None:
        out = score(weight, entropy="grad")
        torch.autograd.grad(((out.logprob + out.entropy) * upstream).sum(), (hidden, weight))

    def frozen_head() -> None:
        torch.autograd.grad((score(frozen).logprob * upstream).sum(), (hidden,))

    def loss() -> None:
        fields = {"old_logprob": "current", "advantage": upstream}
        if new:
            value = ll.policy_loss(ll.Logits(hidden, weight), target, objective, **fields)[0]
        else:
            value = ll.linear_policy_loss(hidden, weight, target, objective, **fields)[0]
        torch.autograd.grad(value, (hidden, weight))

    def divergence() -> None:
        if new:
            out = ll.logprobs(ll.Logits(hidden, weight), target, teacher=ll.Logits(*others), entropy="grad")
        else:
            out = ll.linear_divergence(hidden, weight, ll.Teacher(*others), target)
        torch.autograd.grad((out.divergence * upstream).sum(), (hidden, weight))

    found = {"forward": forward, "forward and backward": both, "frozen head": frozen_head, "policy loss": loss}
    return found | ({"reverse KL": divergence} if width == 4096 else {})


def host_cases(ll: Any, torch: Any) -> dict[str, Callable[[], object]]:
    """Calls so small that nothing hides the CPU's work."""
    new, device = hasattr(ll, "Logits"), "cuda"
    hidden = torch.randn(256, 64, device=device).bfloat16().requires_grad_()
    weight = torch.randn(4096, 64, device=device).bfloat16().requires_grad_()
    logits = torch.randn(256, 4096, device=device).bfloat16().requires_grad_()
    rows = ll.Rows.packed([list(range(64))] * 4, [63] * 4, device=device)
    advantage, objective = torch.randn(len(rows), device=device), ll.Objective(entropy_coef=0.01)

    def back(out: Any) -> None:
        (out.logprob.sum() + out.entropy.sum()).backward()

    def from_hidden() -> None:
        call = (ll.Logits(hidden, weight), rows) if new else (hidden, weight, rows)
        back((ll.logprobs if new else ll.linear_logprobs)(*call, entropy="grad"))

    def loss() -> None:
        call = (ll.Logits(hidden, weight), rows) if new else (hidden, weight, rows)
        verb = ll.policy_loss if new else ll.linear_policy_loss
        verb(*call, objective, old_logprob="current", advantage=advantage)[0].backward()

    return {
        "host: logprobs": lambda: back(ll.logprobs(logits, rows, entropy="grad")),
        "host: from hidden states": from_hidden,
        "host: policy loss": loss,
    }


def child(commit: str) -> None:
    """All cases on the tree that is on the path, a JSON line each."""
    import torch

    import logitless as ll

    facts = {"commit": commit, "device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def tell(case: str, **numbers: float) -> None:
        print(json.dumps({**facts, "case": case, **numbers}), flush=True)  # noqa: T201

    for name, run in host_cases(ll, torch).items():
        laps = []
        for lap in range(220):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            laps += [1e3 * (time.perf_counter() - start)] if lap >= 20 else []
        tell(name, milliseconds=round(statistics.median(laps), 3))
    for width in (4096, 2048, 1024):
        torch.manual_seed(0)
        for name, run in cases(ll, torch, width).items():
            run()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, laps = torch.cuda.memory_allocated(), []
            for _ in range(5):
                torch.cuda.synchronize()
                start = time.perf_counter()
                run()
                torch.cuda.synchronize()
                laps.append(1e3 * (time.perf_counter() - start))
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30
            tell(f"{name}, D={width}", milliseconds=round(statistics.median(laps), 2), gibibytes=round(peak, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--src", action="append", nargs=2, metavar=("COMMIT", "FOLDER"), default=[])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="file to append records to")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    records = []
    for turn in range(options.rounds):
        # Every other round begins with the other tree.
        for commit, folder in options.src if turn % 2 == 0 else options.src[::-1]:
            program = [sys.executable, __file__, "--child", commit]
            ran = subprocess.run(
                program, env={**os.environ, "PYTHONPATH": folder}, stdout=subprocess.PIPE, text=True, check=True
            )
            records += [{**json.loads(line), "round": turn} for line in ran.stdout.splitlines()]
    if options.out:
        with options.out.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    table: dict[str, dict[str, list[float]]] = {}
    for record in records:
        table.setdefault(record["case"], {}).setdefault(record["commit"], []).append(record["milliseconds"])
    for case, by_commit in table.items():
        cells = "  ".join(f"{commit} {min(laps):8.2f} .. {max(laps):8.2f} ms" for commit, laps in by_commit.items())
        print(f"{case:34}{cells}")  # noqa: T201


if __name__ == "__main__":
    main()
