"""Every route of a policy loss beside what the cost model says of it, over hidden sizes and budgets.

    python benchmarks/loss_routes.py --out benchmarks/results/h200-routes.jsonl

The model (``route/costs.py``, with the numbers of ``machine.py``) chooses one of them before anything runs. Each
line has the time of three bare products in the same run, the measured and the predicted time of each route, and which
was chosen: the choice should be the fastest, or within a few percent of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

import logitless as ll
from logitless.call import MEMORY
from logitless.machine import Machine
from logitless.route import loss as plans
from logitless.route.costs import LossShape, one_pass_seconds, two_pass_seconds
from logitless.route.plan import Plan
from logitless.route.tiles import chunk_tiles, even_chunks, exponentials_row
from logitless.spec import parse_memory

VOCAB = 151936
CASES = [
    (tokens, hidden, memory)
    for tokens, hidden in ((16384, 4096), (16384, 2048), (32768, 1024))
    for memory in ("256MiB", "1GiB", "2.5GiB")
]


def routes(shape: LossShape, memory: int) -> dict[str, Plan]:
    """One pass with logits, one pass with exponentials, two passes."""
    sizes = shape.sizes
    tiles = chunk_tiles(sizes, memory)
    room = (memory - tiles.rows * tiles.columns * sizes.logits_bytes) // exponentials_row(sizes, tiles.columns)
    chunks = {
        "logits": (even_chunks(sizes.rows, memory // (sizes.columns * sizes.logits_bytes)), None),
        "exponentials": (even_chunks(sizes.rows, room), tiles),
    }
    found = {
        name: Plan("one pass", "", chunks=cut, columns=sizes.columns, tiles=some, elementwise=memory)
        for name, (cut, some) in chunks.items()
    }
    return {**found, "two passes": Plan("two passes", "")}


def milliseconds(step: Callable[[], object], repeats: int = 5) -> float:
    laps = []
    for lap in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        if lap >= 2:
            laps.append(begin.elapsed_time(end))
    return statistics.median(laps)


def measure(tokens: int, hidden: int, memory: str) -> dict[str, object]:
    device, dtype, budget = torch.device("cuda"), torch.bfloat16, parse_memory(memory)
    x = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    w = (torch.randn(VOCAB, hidden, device=device) / hidden**0.5).to(dtype).requires_grad_()
    target, advantage = torch.randint(VOCAB, (tokens,), device=device), torch.randn(tokens, device=device)
    objective, machine = ll.Objective(entropy_coef=0.01), Machine.of(device)
    given = {"logits_dtype": torch.float32, "machine": machine, "bias": False, "capped": False}
    given["fused"] = machine.epilogues and hidden % 8 == 0
    shape = LossShape.of((tokens,), VOCAB, hidden, dtype=dtype, **given)
    z, d_z = torch.empty(4096, VOCAB, device=device, dtype=dtype), torch.randn(4096, VOCAB, device=device, dtype=dtype)

    def products() -> None:
        for r in range(0, tokens, 4096):
            part = x.detach()[r : r + 4096]
            torch.mm(part, w.detach().T, out=z[: len(part)])
            torch.mm(d_z[: len(part)], w.detach())
            torch.mm(d_z[: len(part)].T, part)

    def step() -> None:
        x.grad = w.grad = None
        fields = {"old_logprob": "current", "advantage": advantage, "memory": memory}
        ll.policy_loss(ll.Logits(x, w), target, objective, **fields)[0].backward()

    assert machine.costs is not None
    floor, times, told = milliseconds(products), {}, {}
    for name, plan in routes(shape, budget).items():
        with mock.patch.object(plans, "choose_loss_plan", lambda *_, plan=plan: plan):
            times[name] = milliseconds(step)
        if plan.kind == "one pass":
            seconds = one_pass_seconds(machine.costs, shape, plan.chunks, plan.tiles)
        else:
            seconds = two_pass_seconds(machine.costs, shape, min(budget, parse_memory(MEMORY["hidden"])))
        told[name] = 1e3 * seconds
    chosen = plans.choose_loss_plan(shape, False, None, budget)
    kind = chosen.kind if chosen.kind == "two passes" else "logits" if chosen.tiles is None else "exponentials"
    case = {"tokens": tokens, "vocab": VOCAB, "hidden": hidden, "memory": memory}
    return {**case, "three_products_ms": floor, "measured_ms": times, "predicted_ms": told, "chosen": kind}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", default="", help="what to record")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    where = {"device": torch.cuda.get_device_name(), "commit": arguments.commit, "torch": torch.__version__}
    for case in CASES:
        record = {**where, **measure(*case)}
        torch.cuda.empty_cache()
        print(json.dumps(record), flush=True)  # noqa: T201
        if arguments.out is not None:
            with arguments.out.open("a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
