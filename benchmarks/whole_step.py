"""A whole policy update (forward, loss, backward, clipped gradients, AdamW) of transformers models, by way of the loss.

    python benchmarks/whole_step.py --out benchmarks/results/whole-step.jsonl [--peers FOLDER] [--limit 420]
    python benchmarks/whole_step.py --models 0.6B --only ours plain
    python benchmarks/whole_step.py --device cpu

Models have the shapes of Qwen3 with tied embeddings and random weights, in bfloat16, with gradient checkpointing and
torch's own attention. The loss is PPO's clipped loss of the response tokens, with their entropy as a value; old
log-probs are the current ones and a tenth of noise, so that a few tokens in a hundred are clipped. Every contender is
given the same rows, and is compared with the others first: loss and norm of all gradients, from the same weights. AdamW
is fused and keeps its state in bfloat16: eight bytes per parameter with weights and gradients.

Two kinds of records. ``step``: the time of a step, its peak, and the loss' share: forward and backward of the loss
alone, from given hidden states. ``longest``: the longest micro-batch, in whole sequences, that fits in a given memory
(``longest_batch.py``); ``refused_tokens`` is None where there was no time to try more.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from longest_batch import Search, attempt, say
from whole_step_model import MODELS, OPTIMIZER, Trainer, draw, with_old

from benchmarks.bench.providers import add_peers
from benchmarks.bench.records import Environment
from logitless.spec import format_bytes, parse_memory
from logitless.tools.outputs import text_table
from logitless.tools.stopwatch import StopWatch


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Milliseconds."""
    clock = StopWatch(device)
    clock.mark()
    work()
    clock.mark()
    return clock.laps_ms()[0]


def steps(trainer: Trainer, names: list[str], repeats: int) -> Iterator[dict]:
    """One record per contender: time, peak, share of the loss, and loss and gradients from the same weights."""
    batch = with_old(draw(trainer.shape, trainer.shape.sequences, trainer.device), trainer.model)
    found: dict[str, dict] = {}
    for name in names:
        found[name] = {"kind": "step", "contender": name, "tokens": batch.tokens.numel()}
        try:
            loss, norm = trainer.compare(name, batch)
            found[name] |= {"loss": loss, "grad_norm": norm}
        except Exception as error:
            # Whatever it is, the others still run.
            found[name] |= {"status": type(error).__name__, "text": str(error)[:300]}
        trainer.clear()
    running = [name for name in names if "status" not in found[name]]
    # Only now do the weights change.
    for name in running:
        found[name]["peak_bytes"] = trainer.peak(name, batch)
        trainer.clear()
    laps: dict[str, list[float]] = {name: [] for name in running}
    alone: dict[str, list[float]] = {name: [] for name in running}
    parts = {name: trainer.loss_alone(name, batch) for name in running}
    for turn in range(repeats + 1):
        for name in random.Random(turn).sample(running, len(running)):
            whole = timed(trainer.device, lambda name=name: trainer.step(name, batch))
            part = timed(trainer.device, parts[name])
            if turn:
                laps[name].append(whole)
                alone[name].append(part)
    for name in running:
        ms, loss_ms = statistics.median(laps[name]), statistics.median(alone[name])
        found[name] |= {"ms": ms, "range_ms": [min(laps[name]), max(laps[name])], "repeats": repeats}
        found[name] |= {"tokens_per_s": 1e3 * batch.tokens.numel() / ms, "loss_ms": loss_ms, "loss_share": loss_ms / ms}
        if trainer.first(name) in running:
            for what in ("loss", "grad_norm"):
                first = found[trainer.first(name)][what]
                found[name][f"{what}_difference"] = abs(found[name][what] - first) / abs(first)
    yield from found.values()


def run(trainer: Trainer, options: argparse.Namespace, ends: float) -> Iterator[dict]:
    """All records of one model."""
    shape, device = trainer.shape, trainer.device
    names = [name for name in trainer.names if not options.only or any(word in name for word in options.only)]
    searches = []
    for line in steps(trainer, names, options.repeats):
        yield line
        if "ms" in line:
            per_token = 1e-3 * line["ms"] / line["tokens"]
            searches.append(Search(shape, line["contender"], per_token, ends, functools.partial(attempt, trainer)))
    budgets = [] if options.steps_only else sorted(parse_memory(x) for x in options.budget)
    if device.type == "cuda" and not budgets and not options.steps_only:
        budgets = [80 * 10**9, 141 * 10**9]
    for one in searches if budgets else ():
        one.probe(budgets[-1])
    for budget in budgets:
        for one in searches:
            yield one.longest(budget)


def table(lines: list[dict]) -> str:
    rows = []
    for line in lines:
        where = (line["model"], line["contender"], line["kind"], f"{line.get('tokens', 0)}")
        if "status" in line:
            rows.append((*where, line["status"], "", "", ""))
        elif line["kind"] == "step":
            speed, share = f"{line['tokens_per_s']:.0f}/s", f"{100 * line['loss_share']:.0f} %"
            rows.append((*where, speed, share, format_bytes(line["peak_bytes"]), f"{line['grad_norm']:.5g}"))
        else:
            bound = f"of {line['budget_bytes'] / 1e9:.0f} GB"
            rows.append((*where, bound, f"< {line['refused_tokens']}", format_bytes(line["peak_bytes"]), ""))
    return text_table(("model", "contender", "kind", "tokens", "speed", "loss", "peak", "gradients"), rows)


def main(kind: type[Trainer] = Trainer, description: str = __doc__) -> None:
    """Run and record the contenders of one kind of trainer."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to append records to")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: all, or the tiny one on a CPU")
    parser.add_argument("--only", nargs="+", default=[], help="contenders whose name has this word")
    parser.add_argument("--peers", type=Path, help="folder of unpacked packages to import TRL from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", nargs="+", default=[], help="memory, e.g. 80GB; default: 80GB and 141GB")
    parser.add_argument("--steps-only", action="store_true", help="do not look for the longest micro-batch")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds after which nothing long is begun")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commit")
    options = parser.parse_args()
    if options.peers is not None:
        add_peers(options.peers)
    device, lines, start = torch.device(options.device), [], time.perf_counter()
    models = options.models or (["tiny"] if device.type == "cpu" else ["0.6B", "1.7B", "4B"])
    for turn, model in enumerate(models, 1):
        # Each model has its part of the time, and what those before it have left.
        ends = start + options.limit * turn / len(models)
        for line in run(kind(MODELS[model], device), options, ends):
            environment = asdict(Environment.here(device, options.commit))
            line = {"model": model, "shape": asdict(MODELS[model]), "optimizer": OPTIMIZER, **line}
            line["allocator"] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
            lines.append(line | {"environment": environment})
            say(f"{time.perf_counter() - start:5.0f} s  {json.dumps(line)}")
            if options.out is not None:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
    say(table(lines))


if __name__ == "__main__":
    main()
