"""Calls at the shapes of real models, each in multiples of the bare products that it cannot do without.

    python benchmarks/shapes.py --out benchmarks/results/shapes.jsonl
    python benchmarks/shapes.py --only qwen3-8b --profile

A line has one model: hidden size, vocabulary, tokens; the time of one bare bfloat16 product of each kind, in slabs of
4096 rows; and of each call its time, its peak beyond the gradients, and how many products it is counted in: log-probs
forward in 1, with backward in 4, of a frozen head in 2, a policy loss in 3. Calls and products take turns, each three
times without a pause, as the device sees them in training, where the CPU is ahead of it. Bare products of odd
vocabularies are of the next multiple of 8.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import logitless as ll

SLAB, REPEATS, RUN, AHEAD = 4096, 5, 3, 6


class Case(NamedTuple):
    hidden: int
    vocab: int
    tokens: int = 16384


CASES = {
    "gpt2": Case(768, 50257),
    "qwen2.5-0.5b": Case(896, 151936),
    "qwen3-0.6b": Case(1024, 151936),
    "gemma-3-1b": Case(1152, 262144),
    "llama-3.2-1b": Case(2048, 128256),
    "qwen3-1.7b": Case(2048, 151936),
    "gemma-3-4b": Case(2560, 262208),
    "gpt-oss-20b": Case(2880, 201088),
    "qwen3-8b": Case(4096, 151936),
    "deepseek-v3": Case(7168, 129280),
    "llama-3-70b": Case(8192, 128256),
    "qwen3-8b, 512 tokens": Case(4096, 151936, 512),
    "qwen3-1.7b, 512 tokens": Case(2048, 151936, 512),
    "qwen3-8b, shard of 8": Case(4096, 18992),
    "qwen3-0.6b, shard of 8": Case(1024, 18992),
}

COUNTED = {"forward": 1, "forward and backward": 4, "frozen": 2, "loss": 3, "loss, 2.5 GiB": 3}

Step = Callable[[], object]


def products(x: torch.Tensor, w: torch.Tensor) -> dict[str, Step]:
    """One product of each kind, in slabs of rows: logits, dX and dW."""
    rows = min(SLAB, len(x))
    w = torch.nn.functional.pad(w, (0, 0, 0, -len(w) % 8))
    z = torch.randn(rows, len(w), device=x.device, dtype=x.dtype)
    d_w, d_x = torch.empty_like(w), torch.empty_like(x)

    def each(work: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]) -> Step:
        def run() -> None:
            for r in range(0, len(x), rows):
                part = x[r : r + rows]
                work(part, z[: len(part)], d_x[r : r + rows])

        return run

    return {
        "logits": each(lambda part, some, _: torch.mm(part, w.T, out=some)),
        "dX": each(lambda _, some, into: torch.mm(some, w, out=into)),
        "dW": each(lambda part, some, _: torch.mm(some.T, part, out=d_w)),
    }


def calls(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> dict[str, Step]:
    """What is measured, by name."""
    advantage, objective = torch.randn(len(x), device=x.device), ll.Objective(entropy_coef=0.01)
    given = {"old_logprob": torch.full((len(x),), -12.0, device=x.device), "advantage": advantage}
    frozen = w.detach()

    def score(weight: torch.Tensor, entropy: str | None) -> None:
        x.grad = w.grad = None
        out = ll.logprobs(ll.Logits(x, weight), target, entropy=entropy)
        loss = out.logprob.sum() if out.entropy is None else out.logprob.sum() + out.entropy.sum()
        loss.backward()

    def forward() -> None:
        with torch.no_grad():
            ll.logprobs(ll.Logits(x, w), target, entropy="value")

    def loss(memory: str | None) -> None:
        x.grad = w.grad = None
        ll.policy_loss(ll.Logits(x, w), target, objective, memory=memory, **given)[0].backward()

    return {
        "forward": forward,
        "forward and backward": lambda: score(w, "grad"),
        "frozen": lambda: score(frozen, None),
        "loss": lambda: loss(None),
        "loss, 2.5 GiB": lambda: loss("2.5GiB"),
    }


def milliseconds(steps: dict[str, Step]) -> dict[str, float]:
    """Medians, of calls that begin while the device still has work: otherwise it would wait for the first launch."""
    heat = torch.randn(8192, 8192, device="cuda").bfloat16()
    laps: dict[str, list[float]] = {name: [] for name in steps}
    for lap in range(REPEATS + 2):
        for name, step in steps.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(AHEAD):
                torch.mm(heat, heat)
            begin.record()
            for _ in range(RUN):
                step()
            end.record()
            end.synchronize()
            if lap >= 2:
                laps[name].append(begin.elapsed_time(end) / RUN)
    return {name: statistics.median(times) for name, times in laps.items()}


def peak(step: Step, gradients: int) -> float:
    """GiB beyond what was there before and the gradients that are left."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before - gradients) / (1 << 30)


def tensors(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(case.tokens, case.hidden, device="cuda").bfloat16().requires_grad_()
    w = (2 * torch.randn(case.vocab, case.hidden, device="cuda") / case.hidden**0.5).bfloat16().requires_grad_()
    return x, w, torch.randint(case.vocab, (case.tokens,), device="cuda")


def measure(case: Case, only: str | None) -> dict[str, object]:
    x, w, target = tensors(case)
    bare = products(x.detach(), w.detach())
    ours = {name: step for name, step in calls(x, w, target).items() if only is None or name == only}
    times = milliseconds({**bare, **ours})
    logits, d_x, d_w = (times[name] for name in bare)
    floors = {1: logits, 2: logits + d_x, 3: logits + d_x + d_w, 4: 2 * logits + d_x + d_w}
    found = {}
    for name, step in ours.items():
        x.grad = w.grad = None
        left = 0 if name == "forward" else x.numel() * 2 + (0 if name == "frozen" else w.numel() * 2)
        ms = times[name]
        ratio = ms / floors[COUNTED[name]]
        found[name] = {"ms": round(ms, 3), "of_products": round(ratio, 3), "gib": round(peak(step, left), 2)}
    return {"bare_ms": {name: round(times[name], 3) for name in bare}, "calls": found}


KINDS = {
    "products": ("nvjet", "gemm", "cutlass", "xmma", "product_", "pair_sums", "pair_gradient_kernel"),
    "chunk": ("gradient", "merge_", "statistics", "exponentials", "rescale", "narrowing", "follow"),
}
"""Kernels by parts of their names; all others are small ones, of the objective and of vectors."""


def profile(step: Step) -> str:
    """Where the time of a call goes, the last of several without a pause: products, passes over a chunk, small kernels,
    and the device's waiting for the CPU, with what it waited for; then every kernel by name."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with recorded(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(RUN):
            step()
        torch.cuda.synchronize()
    kernels = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda e: e.time_range.start)
    spent: dict[str, float] = dict.fromkeys((*KINDS, "small"), 0.0)
    by_name: dict[str, list[float]] = {}
    waited: dict[str, float] = {}
    end = kernels[0].time_range.start
    for event in kernels:
        took, name = event.time_range.elapsed_us(), event.name[:90]
        kind = next((kind for kind, parts in KINDS.items() if any(x in name for x in parts)), "small")
        spent[kind] += took
        by_name.setdefault(name, []).append(took)
        gap = event.time_range.start - end
        if gap > 0:
            waited[name] = waited.get(name, 0.0) + gap
        end = max(end, event.time_range.end)
    span = end - kernels[0].time_range.start
    shown = ", ".join(f"{kind} {us / RUN / 1e3:.2f}" for kind, us in {**spent, "idle": sum(waited.values())}.items())
    lines = [f"{len(kernels) // RUN} kernels, {span / RUN / 1e3:.2f} ms a call: {shown}"]
    for name, us in sorted(waited.items(), key=lambda item: -item[1])[:6]:
        lines.append(f"{us / RUN / 1e3:9.3f} ms idle before {name}")
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:26]:
        lines.append(f"{sum(times) / RUN / 1e3:9.3f} ms {len(times) / RUN:7.1f} x  {name}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="models")
    parser.add_argument("--call", help="one call alone")
    parser.add_argument("--profile", action="store_true", help="kernels of a call instead of its time")
    parser.add_argument("--commit", default="", help="what to record")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    where = {"device": torch.cuda.get_device_name(), "commit": arguments.commit, "torch": torch.__version__}
    torch.manual_seed(0)
    for name, case in CASES.items():
        if arguments.only and name not in arguments.only:
            continue
        if arguments.profile:
            for call, step in calls(*tensors(case)).items():
                if arguments.call in (None, call):
                    print(f"== {name}: {call}\n{profile(step)}", flush=True)  # noqa: T201
            continue
        record = {**where, "model": name, **case._asdict(), **measure(case, arguments.call)}
        torch.cuda.empty_cache()
        shown = "  ".join(f"{call} {x['of_products']:.2f} ({x['gib']:.2f})" for call, x in record["calls"].items())
        print(f"{name:24s} {record['bare_ms']}  {shown}", flush=True)  # noqa: T201
        if arguments.out is not None:
            with arguments.out.open("a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
