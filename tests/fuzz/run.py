"""The command: random cases in one or more processes, a bar, a table, and for every failure the smallest one like it.

    python tests/fuzz/run.py --seconds 60                    as many as go
    python tests/fuzz/run.py --cases 1000000 --jobs 16       so many
    python tests/fuzz/run.py --case 4711                     one seed again, shrunk if it fails
    python tests/fuzz/run.py --ranks 2                       over real gloo groups
    python tests/fuzz/run.py --soak 1000                     a training run with flat memory, see soak.py

Needs torch alone, and logitless on the path. Nothing is chosen by the clock: seed n is the same case on every machine
with the same ``--triton-share`` and ``--ranks``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import poison
import torch

from fuzz.cases import Case, draw
from fuzz.judge import Verdict, verdict
from fuzz.record import KINDS, Tally, as_record, table, write
from fuzz.shrink import as_test, shrink

CHUNK = 200
"""Seeds that a process takes at a time."""

SHOWN = 5
"""Failures that are shrunk and printed."""


def prepare(device: str) -> None:
    """What every process needs: one thread, poisoned memory, kernels interpreted where there is no GPU."""
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)
    poison.install()
    # Triton's interpreter is numpy, which tells of overflows that the kernels mean.
    warnings.filterwarnings("ignore", category=RuntimeWarning)


def judge(case: Case, device: str) -> Verdict:
    """The verdict; an exception in the oracle itself is a failure of the fuzzer, and shown as one."""
    try:
        return verdict(case, device)
    except Exception:
        return Verdict("wrong", torch.inf, f"the fuzzer failed\n{traceback.format_exc()}")


def judge_seeds(seeds: range, triton_share: float, device: str) -> Tally:
    """A worker's work: so many seeds."""
    tally = Tally()
    for seed in seeds:
        case = draw(seed, triton_share)
        tally.add(case, judge(case, device))
    return tally


def tallies(arguments: argparse.Namespace) -> Iterator[Tally]:
    """Tallies of chunks of seeds, as they come, until there are enough or time is up."""
    started, first = time.monotonic(), arguments.seed
    last = sys.maxsize if arguments.cases is None else first + arguments.cases

    def open_still(seed: int) -> bool:
        return seed < last and (arguments.seconds is None or time.monotonic() - started < arguments.seconds)

    if arguments.ranks > 1:
        from fuzz.team import judge_over_ranks

        while open_still(first):
            stop = min(first + CHUNK, last)
            yield judge_over_ranks(range(first, stop), arguments.ranks, arguments.triton_share)
            first = stop
        return
    if arguments.jobs == 1:
        while open_still(first):
            stop = min(first + CHUNK, last)
            yield judge_seeds(range(first, stop), arguments.triton_share, arguments.device)
            first = stop
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.jobs, prepare, (arguments.device,)) as pool:
        waiting: deque = deque()
        while open_still(first) or waiting:
            while open_still(first) and len(waiting) < 2 * arguments.jobs:
                stop = min(first + CHUNK, last)
                waiting.append(
                    pool.apply_async(judge_seeds, (range(first, stop), arguments.triton_share, arguments.device))
                )
                first = stop
            yield waiting.popleft().get()


def bar(tally: Tally, seconds: float, arguments: argparse.Namespace) -> str:
    """How far it is, in one line."""
    done = tally.cases / arguments.cases if arguments.cases else 0.0
    if arguments.seconds is not None:
        done = max(done, seconds / arguments.seconds)
    filled = round(24 * min(done, 1.0))
    rate = tally.cases / seconds if seconds else 0.0
    return (
        f"\r{'#' * filled}{'-' * (24 - filled)} {tally.cases:,} cases, {rate:,.0f} a second, "
        f"{tally.count('refused'):,} refused, {tally.count('wrong'):,} wrong "
    )


def show_failures(tally: Tally, arguments: argparse.Namespace) -> None:
    """The first few failures, each shrunk and as a test."""
    for seed, case, reason in tally.failures[:SHOWN]:
        print(f"\nseed {seed}: {case}\n{reason}\n")
        if arguments.ranks > 1:
            print(f"again: --ranks {arguments.ranks} --case {seed}")
            continue
        small = shrink(case, lambda c: judge(c, arguments.device).kind == "wrong")
        print(as_test(small, judge(small, arguments.device).reason))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Random calls of every path, compared with float64.")
    parser.add_argument("--cases", type=int, help="how many cases")
    parser.add_argument("--seconds", type=float, help="for how long; 60 where neither is given")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--case", type=int, help="this seed alone, shrunk if it fails")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of a real gloo group, in place of jobs")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--triton-share", type=float, help="share of the cases in Triton: 0.002, on a GPU 0.3")
    parser.add_argument("--json", type=Path, help="file to append a record to")
    parser.add_argument("--soak", type=int, help="so many training steps instead, with flat memory")
    arguments = parser.parse_args(words)
    if arguments.triton_share is None:
        arguments.triton_share = 0.3 if arguments.device != "cpu" else 0.002
    if arguments.cases is None and arguments.seconds is None:
        arguments.seconds = 60.0
    return arguments


def main(words: list[str] | None = None) -> int:
    """Exit code 0 if nothing is wrong."""
    arguments = parse(words)
    prepare(arguments.device)
    if arguments.soak is not None:
        from fuzz.soak import soak

        return soak(arguments.soak, arguments.device, arguments.json)
    if arguments.case is not None:
        arguments.seed, arguments.cases, arguments.seconds, arguments.jobs = arguments.case, 1, None, 1
        print(draw(arguments.case, arguments.triton_share, arguments.ranks))
    tally, started = Tally(), time.monotonic()
    for part in tallies(arguments):
        tally.merge(part)
        for seed, _, reason in part.failures:
            print(f"\nseed {seed} is wrong: {reason.splitlines()[0]}", file=sys.stderr, flush=True)
        if sys.stderr.isatty():
            print(bar(tally, time.monotonic() - started, arguments), end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - started
    record = as_record(
        tally,
        seconds,
        jobs=arguments.jobs,
        ranks=arguments.ranks,
        device=arguments.device,
        first_seed=arguments.seed,
        triton_share=arguments.triton_share,
    )
    print(f"\n{table(record)}\n")
    print(f"{tally.cases:,} cases in {seconds:.0f} s; " + ", ".join(f"{tally.count(k):,} {k}" for k in KINDS))
    for reason, count in sorted(tally.refusals.items()):
        print(f"  refused {count:,} times: {reason}")
    show_failures(tally, arguments)
    if arguments.json is not None:
        write(record, arguments.json)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
