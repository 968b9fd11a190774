"""Host time of a call: how long the CPU takes to check, launch and return, where the device has almost nothing to do.

    python benchmarks/host_time.py --device cuda --out benchmarks/results/h200-host-time.jsonl
    OMP_NUM_THREADS=1 python benchmarks/host_time.py --device cpu --small

Sizes are so small that nothing hides the CPU's work. The time is that of forward and backward together, without waiting
for the device in between; the median of many. It uses public names alone, so any commit can be measured with it. With
``--small``, log-probs of a few rows beside plain torch: contenders take turns, and the lower quartile of this thread's
own time counts, since others may use the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import logitless as ll

TOKENS, VOCAB, WIDTH = 256, 4096, 64


def steps(device: torch.device) -> dict[str, Callable[[], object]]:
    """Forward and backward of each call, and plain torch on the same work."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(TOKENS, WIDTH, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, device=device, dtype=dtype, requires_grad=True)
    logits = torch.randn(TOKENS, VOCAB, device=device, dtype=dtype, requires_grad=True)
    samples = [list(range(TOKENS // 4))] * 4
    rows = ll.Rows.packed(samples, [TOKENS // 4 - 1] * 4, device=device)
    advantage, objective = torch.randn(len(rows), device=device), ll.Objective(entropy_coef=0.01)

    def loss_of(out: ll.TokenStats) -> torch.Tensor:
        return out.logprob.sum() + out.entropy.sum()

    def plain() -> None:
        log_p = torch.log_softmax(logits[rows.index].float(), -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        (log_p.gather(1, rows.target[:, None]).sum() + entropy.sum()).backward()

    def policy_loss() -> None:
        fields = {"old_logprob": "current", "advantage": advantage}
        ll.policy_loss(ll.Logits(hidden, weight), rows, objective, **fields)[0].backward()

    def from_hidden() -> None:
        loss_of(ll.logprobs(ll.Logits(hidden, weight), rows, entropy="grad")).backward()

    return {
        "plain torch from logits": plain,
        "logprobs": lambda: loss_of(ll.logprobs(logits, rows, entropy="grad")).backward(),
        "logprobs of Logits": from_hidden,
        "policy_loss": policy_loss,
        "Rows.packed": lambda: ll.Rows.packed(samples, [TOKENS // 4 - 1] * 4, device=device),
    }


def small(device: torch.device) -> dict[str, Callable[[], object]]:
    """Log-probs of a few rows, from logits and from hidden states of size 64, with and without entropy in the loss."""
    found: dict[str, Callable[[], object]] = {}
    for tokens, vocab in ((96, 1000), (512, 2000)):
        logits = torch.randn(tokens, vocab, device=device, requires_grad=True)
        hidden = torch.randn(tokens, WIDTH, device=device, requires_grad=True)
        weight = torch.randn(vocab, WIDTH, device=device, requires_grad=True)
        target = torch.randint(vocab, (tokens,), device=device)
        for entropy in (None, "grad"):
            name = f"{tokens} x {vocab}" + ("" if entropy is None else ", entropy")
            shared = {"target": target, "entropy": entropy}
            found[f"plain torch from logits, {name}"] = partial(_plain, logits, None, **shared)
            found[f"logprobs, {name}"] = partial(_ours, logits, None, **shared)
            found[f"plain torch from hidden states, {name}"] = partial(_plain, hidden, weight, **shared)
            found[f"logprobs of Logits, {name}"] = partial(_ours, hidden, weight, **shared)
    return found


def _plain(x: torch.Tensor, weight: torch.Tensor | None, target: torch.Tensor, entropy: str | None) -> None:
    log_p = torch.log_softmax((x if weight is None else x @ weight.T).float(), -1)
    loss = log_p.gather(1, target[:, None]).sum()
    loss = loss if entropy is None else loss - (log_p.exp() * log_p).sum()
    torch.autograd.grad(loss, x if weight is None else (x, weight))


def _ours(x: torch.Tensor, weight: torch.Tensor | None, target: torch.Tensor, entropy: Any) -> None:
    out = ll.logprobs(x if weight is None else ll.Logits(x, weight), target, entropy=entropy)
    loss = out.logprob.sum() if out.entropy is None else out.logprob.sum() + out.entropy.sum()
    torch.autograd.grad(loss, x if weight is None else (x, weight))


def in_turns(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Milliseconds of this thread, of each contender: the lower quartile."""
    laps: dict[str, list[int]] = {name: [] for name in contenders}
    for lap in range(repeats + 5):
        for name, run in contenders.items():
            start = time.thread_time_ns()
            run()
            if lap >= 5:
                laps[name].append(time.thread_time_ns() - start)
    return {name: 1e-6 * statistics.quantiles(own, n=4)[0] for name, own in laps.items()}


def milliseconds(step: Callable[[], object], device: torch.device, repeats: int) -> float:
    laps = []
    for lap in range(repeats + 20):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        step()
        if lap >= 20:
            laps.append(1e3 * (time.perf_counter() - start))
    return statistics.median(laps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--commit", default="", help="what to record")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true", help="log-probs of a few rows beside plain torch")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if arguments.small:
        found = in_turns(small(device), arguments.repeats)
    else:
        found = {step: milliseconds(run, device, arguments.repeats) for step, run in steps(device).items()}
    record = {"device": name, "commit": arguments.commit, "torch": torch.__version__, "milliseconds": found}
    print(json.dumps(record))  # noqa: T201
    if arguments.out is not None:
        with arguments.out.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
