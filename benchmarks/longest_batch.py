"""The longest micro-batch that a step of ``whole_step_model`` can take under a bound on memory.

    peaks of small sizes  ->  a guess, on the line through them  ->  steps of that size, and of others near it

A search ends when a size that fits and one that is refused are 6 % apart, or when there is no time for another step.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from whole_step_model import Shape, Trainer, draw

from logitless.spec import format_bytes

APART = 0.06
"""A size that fits and one that does not are this far apart, relative to the first, when the search ends."""
MARGIN = 0.985
"""Part of the memory that a guess fills; the rest is what the allocator cannot use."""


class Tried(NamedTuple):
    """One step at a size: None instead of its peak and time where memory ran out."""

    peak: int | None
    seconds: float


def attempt(trainer: Trainer, name: str, sequences: int, budget: int) -> Tried:
    """A step of so many sequences under a bound on memory."""
    device = trainer.device
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), torch.cuda.current_device())
    start = time.perf_counter()
    try:
        batch = draw(trainer.shape, sequences, device)
        # Far from what random weights give, on the side where nothing is clipped: no row can be left out.
        near = -math.log(trainer.shape.vocab)
        batch = batch._replace(old=batch.old.fill_(near) + 3 * batch.advantage.sign())
        peak = trainer.peak(name, batch)
    except torch.OutOfMemoryError:
        peak = None
    trainer.clear()
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, torch.cuda.current_device())
    return Tried(peak if peak is not None and peak <= budget else None, time.perf_counter() - start)


def guess(small: tuple[int, int], large: tuple[int, int], budget: int) -> int:
    """Sequences that fill the budget, on the line through two sizes and their peaks."""
    slope = (large[1] - small[1]) / (large[0] - small[0])
    return max(1, int(large[0] + (MARGIN * budget - large[1]) / slope))


def search(first: int, fits: Callable[[int], bool | None], again: Callable[[], int]) -> tuple[int, int | None]:
    """The largest size that fits and the smallest that does not.

    Args:
        first: what to try first.
        fits: whether a size fits; None ends the search.
        again: a new guess, after one that fitted.

    >>> search(50, lambda n: n <= 117, lambda: 112)
    (112, 119)
    """
    low, high, n = 0, None, first
    while True:
        answer = fits(n)
        if answer is None:
            return low, high
        low, high = (n, high) if answer else (low, n)
        stride = max(1, round(APART * n))
        if high is None:
            n = max(low + stride, again())
        elif not low:
            n = max(1, high - stride)
        elif high - low <= max(1, round(APART * low)):
            return low, high
        else:
            n = (low + high) // 2
        if n == high:
            return low, high


class Search:
    """Longest micro-batches of one contender, budget after budget, until ``ends``."""

    def __init__(
        self, shape: Shape, name: str, seconds_per_token: float, ends: float, attempt: Callable[[str, int, int], Tried]
    ) -> None:
        self.shape, self.name, self.ends, self.attempt = shape, name, ends, attempt
        self.seconds = seconds_per_token * shape.length
        self.tried: dict[int, Tried] = {}

    def fits(self, n: int, budget: int) -> bool | None:
        """Whether a step of n sequences fits; None if there is no time to try."""
        if time.perf_counter() + 1.2 * n * self.seconds > self.ends:
            return None
        tried = self.attempt(self.name, n, budget)
        said = "out of memory" if tried.peak is None else format_bytes(tried.peak)
        say(f"  {self.name}: {n} sequences under {format_bytes(budget)}: {said}, {tried.seconds:.1f} s")
        if tried.peak is None:
            return False
        self.tried[n] = tried
        return True

    def probe(self, budget: int) -> None:
        """Peaks of sizes that are small, for a guess."""
        usual = self.shape.sequences
        for n in (usual // 2, usual, 4 * usual):
            self.fits(n, budget)

    def longest(self, budget: int) -> dict:
        """The record of one budget."""
        line = {"kind": "longest", "contender": self.name, "budget_bytes": budget}
        if len(self.tried) < 2:
            return line | {"status": "no two sizes fit, or no time"}

        def on_the_line() -> int:
            return guess(*((n, self.tried[n].peak or 0) for n in sorted(self.tried)[-2:]), budget)

        first = on_the_line()
        low, high = search(first, lambda n: self.fits(n, budget), on_the_line)
        length = self.shape.length
        line |= {"guessed_tokens": first * length}
        if not low:
            return line | {"status": "nothing tried fits, or no time"}
        line |= {"tokens": low * length, "refused_tokens": None if high is None else high * length}
        return line | {"peak_bytes": self.tried[low].peak, "seconds": self.tried[low].seconds}


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
